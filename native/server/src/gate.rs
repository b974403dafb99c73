//! The gate in Python, which decides by limits that aren't in the memory of a host: those of Redis.
//!
//! Questions wait in a bounded channel for threads that are attached to Python. One that finds the channel full, or that
//! isn't answered in time, is denied by 503. So whatever Redis does, the server answers, and what it holds is bounded.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded};
use hyper::HeaderMap;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::answers::{self, Answer, Fields};
use crate::client::{ClientAddress, ClientDocument};
use crate::decide::Outcome;
use crate::readings::Readings;
use crate::report::Seldom;
use crate::request::{self, Origin};

/// Questions that wait for a thread.
const MOST_WAITING: usize = 1024;
/// Bytes of the fields of all questions that wait or are asked. Usual ones take a tenth of it.
const MOST_BYTES: usize = 64 << 20;
/// Bytes that a field takes beside its text.
const FIELD: usize = 128;
const REASONS: [&str; 3] = ["full", "late", "failed"];

/// Why Python has decided no question.
#[derive(Clone, Copy)]
enum Unanswered {
    /// Too many others wait.
    Full,
    /// Its time is over.
    Late,
    /// The gate has raised an error.
    Failed,
}

/// What Python is asked about a request.
pub struct Question {
    pub method: String,
    pub readings: Readings,
    pub fields: HeaderMap,
    pub origin: Origin,
}

/// The fields for an admitted request, and the response to a denied one.
type Verdict = (Fields, Option<Answer>);

impl Question {
    fn size(&self) -> usize {
        self.fields.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum()
    }
}

struct Waiting {
    question: Question,
    reply: oneshot::Sender<Verdict>,
    _bytes: Bytes,
}

/// A part of the bytes of all questions.
struct Bytes {
    gate: Arc<Gate>,
    size: usize,
}

impl Bytes {
    /// None if there is no room for so many.
    fn new(gate: &Arc<Gate>, size: usize) -> Option<Bytes> {
        let bytes = Bytes { gate: Arc::clone(gate), size };
        (gate.bytes.fetch_add(size, Ordering::Relaxed) + size <= MOST_BYTES).then_some(bytes)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.gate.bytes.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// Python's gate for the rules of a file.
pub struct Gate {
    ask: Py<PyAny>,
    client: Option<ClientAddress>,
    threads: usize,
    /// A question that has waited so long is answered by 503.
    within: Duration,
    /// By the reasons.
    unanswered: [AtomicU64; REASONS.len()],
    /// Of the fields of questions.
    bytes: AtomicUsize,
}

impl Gate {
    /// `client`: the document of the proxies. `ask`: as `forebay.serving.gated` has it. An error is for the operator.
    pub fn new(client: &str, ask: Py<PyAny>, threads: usize, within: Duration) -> Result<Gate, String> {
        let client: Option<ClientDocument> =
            serde_json::from_str(client).map_err(|error| format!("the client: {error}"))?;
        let client = client.map(ClientAddress::new).transpose()?;
        Ok(Gate { ask, client, threads, within, unanswered: Default::default(), bytes: AtomicUsize::new(0) })
    }

    /// How many questions were answered by 503 here, by the reasons.
    pub fn unanswered(&self) -> [(&'static str, u64); REASONS.len()] {
        std::array::from_fn(|number| (REASONS[number], self.unanswered[number].load(Ordering::Relaxed)))
    }

    /// The threads begin. They end once there is no `Asking` any more.
    ///
    /// `stop`: true at the end. Then a question is answered within `drain`.
    pub fn start(self: &Arc<Gate>, stop: watch::Receiver<bool>, drain: Duration) -> Result<(Asking, Ending), String> {
        let (sender, questions) = bounded(MOST_WAITING);
        let (end, ended) = mpsc::channel();
        for number in 0..self.threads {
            let (gate, questions, end) = (Arc::clone(self), questions.clone(), end.clone());
            let thread = thread::Builder::new().name(format!("forebay-gate-{number}"));
            let spawned = thread.spawn(move || {
                gate.work(&questions);
                drop(end);
            });
            spawned.map_err(|error| error.to_string())?;
        }
        Ok((Asking { gate: Arc::clone(self), questions: sender, stop, drain }, Ending(ended)))
    }

    /// Answer questions, attached to Python all the time: so its objects of this thread last.
    fn work(&self, questions: &Receiver<Waiting>) {
        Python::attach(|py| {
            loop {
                let next = match questions.try_recv() {
                    Err(TryRecvError::Empty) => py.detach(|| questions.recv().ok()),
                    received => received.ok(),
                };
                let Some(Waiting { question, reply, _bytes }) = next else { return };
                // Nobody waits for it any more, and it is to be charged to no limit.
                if reply.is_closed() {
                    continue;
                }
                // An error closes the channel of the reply.
                if let Some(verdict) = self.logged(py, &question) {
                    let _ = reply.send(verdict);
                }
            }
        });
    }

    fn logged(&self, py: Python<'_>, question: &Question) -> Option<Verdict> {
        static REPORTS: Seldom = Seldom::new();
        self.decide(py, question)
            .inspect_err(|error| REPORTS.report(|| format!("a request can't be decided: {error}")))
            .ok()
    }

    /// Decide a request. Waits for Redis.
    pub fn decide(&self, py: Python<'_>, question: &Question) -> PyResult<Verdict> {
        let Question { method, readings, fields, origin } = question;
        let texts = PyDict::new(py);
        for (name, value) in request::texts(fields) {
            texts.set_item(name, value)?;
        }
        let peer = match *origin {
            Origin::Peer(peer) => peer,
            Origin::Client(client) => {
                if let Some((name, value)) = client.and_then(|address| self.client.as_ref()?.naming(address)) {
                    texts.set_item(name, value)?;
                }
                client
            }
        };
        let methods = PyTuple::new(py, request::methods_of(method, fields))?;
        let paths = PyTuple::new(py, &readings.all)?;
        let peer = peer.as_ref().map(IpAddr::to_string);
        let replied = self.ask.call1(py, (methods, paths, &readings.sent, &readings.decoded, texts, peer))?;
        let (fields, denied): (Fields, Option<(u16, String, Option<u64>)>) = replied.extract(py)?;
        match denied {
            None => Ok((fields, None)),
            Some((status, body, wait_s)) if (400..600).contains(&status) => {
                Ok((Fields::new(), Some(Answer { status, fields, body, wait_s })))
            }
            Some((status, ..)) => Err(PyValueError::new_err(format!("a denial by {status} would admit the request"))),
        }
    }

    fn count(&self, why: Unanswered) {
        self.unanswered[why as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Asks the threads of a gate.
#[derive(Clone)]
pub struct Asking {
    gate: Arc<Gate>,
    questions: Sender<Waiting>,
    stop: watch::Receiver<bool>,
    drain: Duration,
}

impl Asking {
    pub fn client(&self) -> Option<&ClientAddress> {
        self.gate.client.as_ref()
    }

    /// Decide a request, or deny it by 503.
    pub async fn ask(&self, question: Question) -> Outcome {
        match self.verdict(question).await {
            Ok((fields, denial)) => Outcome { fields, denial, ..Outcome::default() },
            Err(why) => {
                self.gate.count(why);
                Outcome { has_failed: true, ..answers::unavailable().into() }
            }
        }
    }

    async fn verdict(&self, question: Question) -> Result<Verdict, Unanswered> {
        let (reply, replied) = oneshot::channel();
        let bytes = Bytes::new(&self.gate, question.size()).ok_or(Unanswered::Full)?;
        let waiting = Waiting { question, reply, _bytes: bytes };
        self.questions.try_send(waiting).map_err(|_| Unanswered::Full)?;
        let mut stop = self.stop.clone();
        let drained = async {
            let _ = stop.wait_for(|stopped| *stopped).await;
            sleep(self.drain).await;
        };
        tokio::select! {
            replied = timeout(self.gate.within, replied) => match replied {
                Ok(replied) => replied.map_err(|_| Unanswered::Failed),
                Err(_) => Err(Unanswered::Late),
            },
            () = drained => Err(Unanswered::Late),
        }
    }
}

/// The end of the threads: each has a sender until then.
pub struct Ending(mpsc::Receiver<()>);

impl Ending {
    /// Wait for the threads to end, for so long. One that still waits for Redis ends with the process.
    pub fn wait(&self, most: Duration) {
        let _ = self.0.recv_timeout(most);
    }
}
