//! The listeners, the threads and the life of the server.
//!
//! Each thread has an event loop of its own and a handle of each limiter, and accepts from all listeners. A connection
//! stays in its thread. What a client can occupy is bounded: connections, the bytes of a request, and the time without a
//! whole request.

use std::cell::Cell;
use std::fs;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use socket2::TcpKeepalive;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::access::Access;
use crate::api;
use crate::bodies::Bodies;
use crate::decide::{Rules, Worker};
use crate::gate::{Asking, Gate};
use crate::gated::Gated;
use crate::grpc::{self, Watchers};
use crate::http::{Answering, Serving};
use crate::live::{Following, Versions};
use crate::metrics::Counts;
use crate::plan::Plan;
use crate::report::report;
use crate::tls::Tls;

/// Bytes of the fields of a request. nginx takes as many of a client by default, and adds some.
const LARGEST_HEAD: usize = 64 << 10;
const MOST_FIELDS: usize = 200;
const BACKLOG: i32 = 1024;
/// Bytes of the path of a Unix socket: Linux has 108, with a zero at the end.
const LONGEST_SOCKET: usize = 107;
/// Requests at once in a connection of HTTP/2.
const MOST_STREAMS: u32 = 128;
/// Bytes that a connection of HTTP/2 may send ahead.
const WINDOW: u32 = 64 << 10;
/// Responses of one connection that wait to be sent.
const SEND_BUFFER: usize = 64 << 10;
/// For a connection that is to be closed.
const CLOSING_TIME: Duration = Duration::from_secs(5);
/// A client whose host is silent for so long is asked by TCP whether it is there, and then again.
const PROBE_AFTER: Duration = Duration::from_secs(20);
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// The part of the time for requests under way in which Python may charge their limits.
const ANSWERED_WITHIN: f64 = 0.8;
const MAINTAIN_EVERY: Duration = Duration::from_secs(10);
/// After an error of `accept`, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub struct Options {
    pub threads: usize,
    pub connections: usize,
    /// A connection without a whole request for so long is closed.
    pub idle: Duration,
    /// Requests that are under way at the end have so long.
    pub drain: Duration,
    pub reuse_port: bool,
    pub access: Access,
    /// Whether proxies may ask.
    pub proxies: bool,
    /// Of live rules.
    pub versions: Option<Arc<Versions>>,
    /// Of connections over TCP.
    pub tls: Option<Arc<Tls>>,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// The listeners of a server that has not begun.
pub struct Bound {
    listeners: Vec<Listener>,
    /// What it listens to: the port that the host chose for port 0, too.
    pub addresses: Vec<String>,
    sockets: Vec<PathBuf>,
}

impl Bound {
    /// `listen`: such as `127.0.0.1:7464`, `[::1]:7464` or `unix:/run/forebay.sock`.
    pub fn new(listen: &[String], options: &Options) -> Result<Bound, String> {
        let mut bound = Bound { listeners: Vec::new(), addresses: Vec::new(), sockets: Vec::new() };
        for text in listen {
            let refused = |error: io::Error| match error.kind() {
                ErrorKind::AddrInUse if text.starts_with("unix:") => {
                    format!(
                        "can't listen to {text}: a server that runs, or another file, has this path: write another one"
                    )
                }
                ErrorKind::AddrInUse => format!(
                    "can't listen to {text}: another process or another --listen has taken it. Write another port, or \
                     start both servers with --reuse-port"
                ),
                _ => format!("can't listen to {text}: {error}"),
            };
            if let Some(path) = text.strip_prefix("unix:") {
                if path.is_empty() || path.len() > LONGEST_SOCKET {
                    return Err(format!(
                        "can't listen to {text:?}: write a path of 1 to {LONGEST_SOCKET} bytes, such as \
                         unix:/run/forebay.sock"
                    ));
                }
                let path = Path::new(path);
                let listener = unix_listener(path).map_err(refused)?;
                listener.set_nonblocking(true).map_err(refused)?;
                bound.sockets.push(path.to_owned());
                bound.listeners.push(Listener::Unix(listener));
                bound.addresses.push(text.clone());
                continue;
            }
            let addresses: Vec<SocketAddr> = text
                .to_socket_addrs()
                .map_err(|error| format!("{text:?} is no address such as 127.0.0.1:7464: {error}"))?
                .collect();
            for address in addresses {
                let listener = tcp_listener(address, options.reuse_port).map_err(refused)?;
                bound.addresses.push(listener.local_addr().map_err(refused)?.to_string());
                bound.listeners.push(Listener::Tcp(listener));
            }
        }
        Ok(bound)
    }
}

impl Bound {
    /// Refuse new connections. From now on, another server may listen there.
    fn close(&mut self) {
        for path in self.sockets.drain(..) {
            // Another process may have removed it.
            let _ = fs::remove_file(path);
        }
        self.listeners.clear();
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.close();
    }
}

fn tcp_listener(address: SocketAddr, reuse_port: bool) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(reuse_port)?;
    socket.set_nonblocking(true)?;
    // Connections inherit it. It ends those of Watch, which is never idle, when the client's host is gone. Pings of
    // HTTP/2 would do so, too, and take a fortieth of the time of a request.
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY))?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Takes the place of a socket that nobody listens to any more, and of nothing else.
fn unix_listener(path: &Path) -> io::Result<UnixListener> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
        fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}

/// What a thread answers requests by.
trait Answers: 'static {
    fn answer(self: Rc<Self>, watchers: Rc<Watchers>, peer: Option<IpAddr>, request: Request<Incoming>)
    -> grpc::Answer;
}

impl Answers for Answering {
    fn answer(
        self: Rc<Self>,
        watchers: Rc<Watchers>,
        peer: Option<IpAddr>,
        request: Request<Incoming>,
    ) -> grpc::Answer {
        grpc::answer(self, watchers, peer, request)
    }
}

impl Answers for Gated {
    fn answer(
        self: Rc<Self>,
        watchers: Rc<Watchers>,
        peer: Option<IpAddr>,
        request: Request<Incoming>,
    ) -> grpc::Answer {
        grpc::answer_by_gate(self, watchers, peer, request)
    }
}

/// What all threads share.
#[derive(Clone)]
struct Shared {
    serving: Arc<Serving>,
    stop: watch::Receiver<bool>,
    options: Options,
}

/// Serve until SIGTERM or SIGINT, and then until the requests under way are answered. Must not hold the GIL. `ready` is
/// called once the signals are handled.
///
/// Returns the rest of the time for these, in which others may end.
pub fn run(
    rules: &Rules,
    gate: Option<Arc<Gate>>,
    mut bound: Bound,
    options: &Options,
    ready: impl FnOnce() -> Result<(), String>,
) -> Result<Duration, String> {
    let (stopping, stop) = watch::channel(false);
    // Before the connections are cut off.
    let drain = options.drain.mul_f64(ANSWERED_WITHIN);
    let (asking, ending) = gate.as_ref().map(|gate| gate.start(stop.clone(), drain)).transpose()?.unzip();
    let serving = Arc::new(Serving {
        draining: AtomicBool::new(false),
        stop: stop.clone(),
        counts: (0..options.threads).map(|_| Counts::default()).collect(),
        places: Arc::new(Semaphore::new(options.connections)),
        connections: options.connections,
        bodies: Bodies::default(),
        access: options.access.clone(),
        proxies: options.proxies,
        versions: options.versions.clone(),
        api: api::Shared::default(),
        gate,
    });
    let shared = Shared { serving, stop, options: options.clone() };
    let mut threads = Vec::new();
    let waited = in_event_loop(async {
        // Before a client can know that the server runs, so that a signal doesn't end it at once.
        let signals = Signals::new().map_err(|error| error.to_string())?;
        if let Some(tls) = &options.tls {
            let hangups = signal(SignalKind::hangup()).map_err(|error| error.to_string())?;
            spawn_local(reload(Arc::clone(tls), hangups));
        }
        for number in 0..options.threads {
            let listeners = bound.listeners.iter().map(Listener::try_clone).collect::<io::Result<Vec<_>>>();
            let listeners = listeners.map_err(|error| error.to_string())?;
            let (shared, serving) = (shared.clone(), Arc::clone(&shared.serving));
            let thread = thread::Builder::new().name(format!("forebay-{number}"));
            let worker = Worker::new(rules).map_err(|failure| rules.plan.core.message(failure))?;
            let versions = options.versions.clone();
            let asking = asking.clone();
            let spawned = thread.spawn(move || {
                let following = Following::new(worker, versions);
                match asking {
                    None => serve(Answering { following, serving, number }, listeners, shared),
                    Some(asking) => serve(Gated { asking, following, serving, number }, listeners, shared),
                }
            });
            threads.push(spawned.map_err(|error| error.to_string())?);
        }
        ready()?;
        until_signal(signals, &rules.plan, &shared.serving, asking.as_ref(), &threads).await
    });
    let stopped_at = Instant::now();
    shared.serving.draining.store(true, Ordering::Relaxed);
    bound.close();
    // Each thread holds a receiver until it ends. Those who watch the server's health see both.
    let _ = stopping.send(true);
    drop(stopping);
    let mut ended = waited.and_then(|result| result);
    for thread in threads {
        let result = thread.join().unwrap_or_else(|_| Err("a thread of the server has panicked".to_owned()));
        ended = ended.and(result);
    }
    let left = || options.drain.saturating_sub(stopped_at.elapsed());
    // Before the threads of the gate end, as they do without those that ask them.
    if let Some(asking) = asking {
        asking.release_again();
    }
    if let Some(ending) = ending {
        ending.wait(left());
    }
    ended.map(|()| left())
}

pub fn in_event_loop<F: Future>(work: F) -> Result<F::Output, String> {
    let event_loop = runtime::Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
    Ok(LocalSet::new().block_on(&event_loop, work))
}

/// The signals that end a server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }
}

/// Read the certificate again at each SIGHUP.
async fn reload(tls: Arc<Tls>, mut hangups: Signal) {
    while hangups.recv().await.is_some() {
        if let Err(reason) = tls.reload() {
            report(&format!("the earlier certificate is used further: {reason}"));
        }
    }
}

/// Returns at a signal, or if a thread has ended by itself.
async fn until_signal(
    mut signals: Signals,
    plan: &Plan,
    serving: &Serving,
    asking: Option<&Asking>,
    threads: &[thread::JoinHandle<Result<(), String>>],
) -> Result<(), String> {
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return Ok(()),
            _ = signals.interrupt.recv() => return Ok(()),
            () = sleep(MAINTAIN_EVERY) => {}
        }
        if threads.iter().any(thread::JoinHandle::is_finished) {
            return Ok(());
        }
        serving.api.sweep();
        asking.inspect(|asking| asking.release_again());
        for limiter in plan.maintained() {
            if let Err(failure) = limiter.maintain() {
                // Decisions go on, whatever is wrong with the store's file.
                report(&format!("the store can't be maintained: {}", plan.core.message(failure)));
            }
        }
    }
}

impl Listener {
    fn try_clone(&self) -> io::Result<Listener> {
        Ok(match self {
            Listener::Tcp(listener) => Listener::Tcp(listener.try_clone()?),
            Listener::Unix(listener) => Listener::Unix(listener.try_clone()?),
        })
    }
}

/// One thread of the server.
fn serve(answering: impl Answers, listeners: Vec<Listener>, shared: Shared) -> Result<(), String> {
    let drain = shared.options.drain;
    in_event_loop(async move {
        let answering = Rc::new(answering);
        // Dropped by the last connection.
        let (open, mut closed) = watch::channel(());
        let open = Rc::new(open);
        let mut accepting = Vec::new();
        for listener in listeners {
            let (answering, shared, open) = (Rc::clone(&answering), shared.clone(), Rc::clone(&open));
            let work: std::pin::Pin<Box<dyn Future<Output = ()>>> = match listener {
                Listener::Tcp(listener) => {
                    let listener = tokio::net::TcpListener::from_std(listener).map_err(|error| error.to_string())?;
                    Box::pin(async move {
                        accept(&answering, &shared, &open, async || {
                            let (stream, peer) = listener.accept().await?;
                            // It fails for a client that has already gone, which its connection finds out.
                            let _ = stream.set_nodelay(true);
                            Ok((stream, Some(peer.ip().to_canonical())))
                        })
                        .await;
                    })
                }
                Listener::Unix(listener) => {
                    let listener = tokio::net::UnixListener::from_std(listener).map_err(|error| error.to_string())?;
                    Box::pin(async move {
                        accept(&answering, &shared, &open, async || Ok((listener.accept().await?.0, None))).await;
                    })
                }
            };
            accepting.push(spawn_local(work));
        }
        drop(open);
        for loops in accepting {
            loops.await.map_err(|error| error.to_string())?;
        }
        // Those that take longer are cut off.
        let _ = timeout(drain, closed.wait_for(|()| false)).await;
        Ok(())
    })?
}

/// Accept until the server stops.
async fn accept<S>(
    answering: &Rc<impl Answers>,
    shared: &Shared,
    open: &Rc<watch::Sender<()>>,
    accepted: impl AsyncFn() -> io::Result<(S, Option<IpAddr>)>,
) where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let mut stop = shared.stop.clone();
    let next = async || {
        let (stream, peer) = accepted().await?;
        // Beyond the most, one connection for each thread and listener waits here, and others in the kernel's backlog.
        // An idle listener that held a place would take it from the others.
        let place = Arc::clone(&shared.serving.places).acquire_owned().await.map_err(io::Error::other)?;
        Ok::<_, io::Error>((stream, peer, place))
    };
    loop {
        tokio::select! {
            _ = stop.wait_for(|stopped| *stopped) => return,
            result = next() => match result {
                Ok((stream, peer, place)) => {
                    let (answering, shared, open) = (Rc::clone(answering), shared.clone(), Rc::clone(open));
                    // A peer without an address is behind a Unix socket.
                    match shared.options.tls.clone().zip(peer) {
                        None => drop(spawn_local(connection(answering, shared, open, stream, peer, place))),
                        Some((tls, address)) => drop(spawn_local(async move {
                            let mut stop = shared.stop.clone();
                            let opened = tokio::select! {
                                opened = tls.opened(stream, address, shared.options.idle) => opened,
                                // It has no request under way.
                                _ = stop.wait_for(|stopped| *stopped) => None,
                            };
                            if let Some(stream) = opened {
                                connection(answering, shared, open, stream, peer, place).await;
                            }
                        })),
                    }
                }
                // That client has gone while it waited: no reason to keep others waiting.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
        }
    }
}

/// Tasks of a connection run in its thread.
#[derive(Clone, Copy)]
struct SameThread;

impl<F> hyper::rt::Executor<F> for SameThread
where
    F: Future + 'static,
{
    fn execute(&self, task: F) {
        spawn_local(async {
            task.await;
        });
    }
}

async fn connection<S>(
    answering: Rc<impl Answers>,
    shared: Shared,
    _open: Rc<watch::Sender<()>>,
    stream: S,
    peer: Option<IpAddr>,
    _place: OwnedSemaphorePermit,
) where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let idle = shared.options.idle;
    let asked_at = Rc::new(Cell::new(Instant::now()));
    let seen = Rc::clone(&asked_at);
    let watchers = Rc::new(Watchers::default());
    let watching = Rc::clone(&watchers);
    let service = service_fn(move |request| {
        seen.set(Instant::now());
        Rc::clone(&answering).answer(Rc::clone(&watching), peer, request)
    });
    let mut builder = auto::Builder::new(SameThread);
    builder.http1().max_buf_size(LARGEST_HEAD).max_headers(MOST_FIELDS).header_read_timeout(None);
    builder
        .http2()
        .max_header_list_size(LARGEST_HEAD as u32)
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_send_buf_size(SEND_BUFFER);
    let serving = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    let mut stop = shared.stop.clone();
    let mut end = None;
    loop {
        let deadline = end.unwrap_or_else(|| asked_at.get() + idle);
        let left = tokio::select! {
            // A client's errors are no concern of the server.
            _ = serving.as_mut() => return,
            _ = stop.wait_for(|stopped| *stopped), if end.is_none() => shared.options.drain,
            () = sleep_until(deadline) => CLOSING_TIME,
        };
        if end.is_some() {
            return;
        }
        if !watchers.is_empty() {
            asked_at.set(Instant::now());
        }
        if *stop.borrow() || asked_at.get() + idle <= Instant::now() {
            end = Some(Instant::now() + left);
            serving.as_mut().graceful_shutdown();
        }
    }
}
