//! gRPC: Envoy's rate limit service, its external authorization, and the health of the server.
//!
//! Served where HTTP is, to connections that begin with HTTP/2. `unary` has calls of one message, and `tonic` statuses
//! and streams; `messages` declares what is read and written.

mod authorization;
mod codec;
mod health;
mod messages;
mod rate_limit;
mod unary;

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode, Version};
use tonic::server::Grpc;
use tonic::{Code, Status};

use crate::gated::Gated;
use crate::http::{Answering, Serving};
use crate::question;
use codec::Prost;
use health::Watch;
pub use health::Watchers;
use unary::{Replied, Reply};
#[cfg(test)]
pub use {authorization::tests::CHECKS, rate_limit::tests::DESCRIPTORS, unary::tests::MESSAGES};

/// An answer by HTTP, by a call with one message, or by one with a stream of them.
pub type Answered = Response<Either<Full<Bytes>, Either<Reply, tonic::body::Body>>>;

pub type Answer = Pin<Box<dyn Future<Output = Result<Answered, Infallible>>>>;

/// Bytes of a message. It can have the fields of a client's request several times, and they have up to 60 KiB in Envoy.
const LARGEST_MESSAGE: usize = 512 << 10;
const RATE_LIMITS: &str = "envoy.service.ratelimit.v3.RateLimitService";
const AUTHORIZATION: &str = "envoy.service.auth.v3.Authorization";
const HEALTH: &str = "grpc.health.v1.Health";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// The answer to one request, by gRPC if it is one of it.
///
/// In a box, as hyper moves it several times before it runs; one for each way, so that a call needs no room for the other.
pub fn answer(
    answering: Rc<Answering>,
    watchers: Rc<Watchers>,
    peer: Option<IpAddr>,
    request: Request<Incoming>,
) -> Answer {
    if !is_grpc(&request) {
        return Box::pin(async move { Ok(answering.answer(peer, request).await?.map(Either::Left)) });
    }
    let (head, body) = request.into_parts();
    Box::pin(async move {
        let answered = match answering.serving.bodies.read(body, LARGEST_MESSAGE).await {
            Err((status, reason)) => unary::failed(&Status::new(code_of(status), reason)),
            // In a box: it is large, and would be a part of each call that waits for its message.
            Ok(data) if head.uri.path() == WATCH => {
                Box::pin(watch(&answering.serving, &watchers, &head.headers, data)).await
            }
            Ok(data) => call(&answering, peer, &head, &data),
        };
        Ok(answered.map(Either::Right))
    })
}

/// As `answer`, by Python's gate.
pub fn answer_by_gate(
    gated: Rc<Gated>,
    watchers: Rc<Watchers>,
    peer: Option<IpAddr>,
    request: Request<Incoming>,
) -> Answer {
    Box::pin(async move {
        if !is_grpc(&request) {
            return Ok(gated.answer(peer, request).await.map(Either::Left));
        }
        let (head, body) = request.into_parts();
        let serving = &gated.serving;
        let answered = match serving.bodies.read(body, LARGEST_MESSAGE).await {
            Err((status, reason)) => unary::failed(&Status::new(code_of(status), reason)),
            Ok(data) if head.uri.path() == WATCH => watch(serving, &watchers, &head.headers, data).await,
            Ok(data) => call_by_gate(&gated, peer, &head, &data).await,
        };
        Ok(answered.map(Either::Right))
    })
}

/// Whether it is a call with a message in protobuf, the only format that the server has.
fn is_grpc<B>(request: &Request<B>) -> bool {
    let is_message = |kind: &HeaderValue| {
        let kind = kind.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        matches!(kind.trim_ascii(), b"application/grpc" | b"application/grpc+proto")
    };
    request.version() == Version::HTTP_2 && request.headers().get(CONTENT_TYPE).is_some_and(is_message)
}

fn code_of(status: StatusCode) -> Code {
    match status {
        StatusCode::REQUEST_TIMEOUT => Code::DeadlineExceeded,
        StatusCode::PAYLOAD_TOO_LARGE | StatusCode::SERVICE_UNAVAILABLE => Code::ResourceExhausted,
        _ => Code::Cancelled,
    }
}

/// A call with a stream of messages.
async fn watch(serving: &Serving, watchers: &Watchers, fields: &HeaderMap, data: Vec<u8>) -> Replied {
    let mut request = Request::new(Full::new(Bytes::from(data)));
    *request.headers_mut() = fields.clone();
    let mut grpc = Grpc::new(Prost::default()).max_decoding_message_size(LARGEST_MESSAGE);
    grpc.server_streaming(Watch { serving, watchers }, request).await.map(Either::Right)
}

/// The service and the method of a call; an error if the server doesn't serve it.
fn called<'a>(serving: &Serving, head: &'a Parts) -> Result<(&'a str, &'a str), Status> {
    match head.uri.path().strip_prefix('/').and_then(|path| path.split_once('/')) {
        Some((RATE_LIMITS | AUTHORIZATION, _)) if !serving.proxies => {
            Err(Status::unimplemented("the server was started with --no-proxies"))
        }
        Some(method @ ((RATE_LIMITS, "ShouldRateLimit") | (AUTHORIZATION | HEALTH, "Check"))) => Ok(method),
        _ => Err(Status::unimplemented("the server has no such method: see docs/server.md")),
    }
}

/// A call with one message.
fn call(answering: &Answering, peer: Option<IpAddr>, head: &Parts, data: &[u8]) -> Replied {
    let serving = &answering.serving;
    let fields = &head.headers;
    match called(serving, head) {
        Err(status) => unary::failed(&status),
        Ok((RATE_LIMITS, _)) => {
            unary::answer(fields, data, |asked| rate_limit::should_rate_limit(answering, peer, &asked))
        }
        Ok((AUTHORIZATION, _)) => unary::answer(fields, data, |asked| authorization::check(answering, peer, asked)),
        Ok(_) => unary::answer(fields, data, |asked| health::check(serving, &asked)),
    }
}

/// As `call`, by Python's gate.
async fn call_by_gate(gated: &Gated, peer: Option<IpAddr>, head: &Parts, data: &[u8]) -> Replied {
    let serving = &gated.serving;
    let fields = &head.headers;
    match called(serving, head) {
        Err(status) => unary::failed(&status),
        Ok((RATE_LIMITS, _)) => unary::reply_of(match unary::message_in(fields, data) {
            Err(status) => Err(status),
            Ok(asked) => {
                // The message is held as it was sent, and as it is read.
                let size = 2 * data.len() + question::size_of_fields(fields);
                rate_limit::should_rate_limit_by_gate(gated, peer, &asked, size).await
            }
        }),
        Ok((AUTHORIZATION, _)) => unary::reply_of(match unary::message_in(fields, data) {
            Err(status) => Err(status),
            Ok(asked) => {
                let size = data.len() + question::size_of_fields(fields);
                authorization::check_by_gate(gated, peer, asked, size).await
            }
        }),
        Ok(_) => unary::answer(fields, data, |asked| health::check(serving, &asked)),
    }
}
