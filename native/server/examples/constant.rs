//! A bare server of hyper that answers every request with a constant: the floor for benchmarks/server.
//!
//! `constant PORT THREADS`. It has threads and event loops as the decision server. Requests by gRPC get a constant
//! message and a status, and others an empty response.

use std::convert::Infallible;
use std::net::TcpListener;
use std::thread;

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Empty, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use tokio::runtime;
use tokio::task::{LocalSet, spawn_local};

/// A `RateLimitResponse` with the code OK.
const MESSAGE: &[u8] = &[0, 0, 0, 0, 2, 8, 1];

#[derive(Clone, Copy)]
struct SameThread;

impl<F: Future + 'static> hyper::rt::Executor<F> for SameThread {
    fn execute(&self, task: F) {
        spawn_local(async {
            task.await;
        });
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (port, threads): (u16, usize) = match (arguments.next(), arguments.next()) {
        (Some(port), Some(threads)) => (port.parse().expect("a port"), threads.parse().expect("a number of threads")),
        _ => panic!("constant PORT THREADS"),
    };
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
    listener.set_nonblocking(true).expect("a socket can be non-blocking");
    let servers: Vec<_> = (0..threads)
        .map(|_| {
            let listener = listener.try_clone().expect("a socket can be cloned");
            thread::spawn(move || serve(listener))
        })
        .collect();
    for server in servers {
        server.join().expect("a server doesn't end");
    }
}

fn serve(listener: TcpListener) {
    let event_loop = runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    LocalSet::new().block_on(&event_loop, async {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let _ = stream.set_nodelay(true);
            spawn_local(async {
                let _ = auto::Builder::new(SameThread).serve_connection(TokioIo::new(stream), service_fn(answer)).await;
            });
        }
    });
}

async fn answer(
    request: Request<Incoming>,
) -> Result<Response<Either<Empty<Bytes>, impl hyper::body::Body<Data = Bytes, Error = Infallible>>>, Infallible> {
    if request.version() != Version::HTTP_2 {
        return Ok(Response::new(Either::Left(Empty::new())));
    }
    let _ = request.into_body().collect().await;
    let trailers = async {
        let mut fields = HeaderMap::new();
        fields.insert("grpc-status", HeaderValue::from_static("0"));
        Some(Ok(fields))
    };
    let mut response = Response::new(Either::Right(Full::new(Bytes::from_static(MESSAGE)).with_trailers(trailers)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}
