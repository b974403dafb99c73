//! The gate in Python, which decides by limits that aren't in the memory of a host: those of Redis.
//!
//! Questions wait in a bounded channel for threads that are attached to Python. One that finds the channel full, or that
//! isn't answered in time, is denied by 503. So whatever Redis does, the server answers, and what it holds is bounded.
//!
//! Nobody waits for the charges of rules in the shadow. They have a channel of their own, to which a thread comes when
//! no question waits: so they delay a question by one call of Redis at most.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Select, Sender, TryRecvError, bounded};
use hyper::HeaderMap;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::answers::{Answer, Fields};
use crate::capi::{Decision, Key};
use crate::decide::Outcome;
use crate::plan::Plan;
use crate::readings::Readings;
use crate::report::Seldom;
use crate::request::{self, Origin};

/// Questions that wait for a thread, and as many charges of rules in the shadow.
const MOST_WAITING: usize = 1024;
/// Bytes of all questions that wait or are asked. Usual ones take a tenth of it.
const MOST_BYTES: usize = 64 << 20;
/// Bytes that a field, an entry of a descriptor or a charge takes beside its text.
pub const PIECE: usize = 128;
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

/// What Python is asked to charge: the number of a limit, a key and a cost.
pub type Charge = (usize, Key, u64);

/// The decisions of limits that are charged as one, by their places: of a denied request, at least those that deny it.
/// None: the store can't be asked, or Python hasn't answered.
pub type Charged = Option<Vec<(usize, Decision)>>;

/// A decision of Python: whether it allows, its limit, what remains, when to ask again, when the key is as fresh, and
/// whether the store has no room.
type Numbers = (bool, u64, u64, u64, u64, bool);

impl Question {
    fn size(&self) -> usize {
        size_of_fields(&self.fields)
    }
}

/// Bytes of header fields.
pub fn size_of_fields(fields: &HeaderMap) -> usize {
    fields.iter().map(|(name, value)| name.as_str().len() + value.len() + PIECE).sum()
}

/// Asks Python, and sends the reply if somebody waits for it.
type Ask = dyn FnOnce(&Gate, Python<'_>) + Send;

struct Waiting {
    ask: Box<Ask>,
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
    /// The rules without the limits that Python decides.
    pub plan: Arc<Plan>,
    ask: Py<PyAny>,
    charge: Py<PyAny>,
    threads: usize,
    /// A question that has waited so long is answered by 503.
    within: Duration,
    /// By the reasons.
    unanswered: [AtomicU64; REASONS.len()],
    /// Of questions.
    bytes: AtomicUsize,
}

impl Gate {
    /// `ask` and `charge`: as `forebay.serving.gated` has them.
    pub fn new(plan: Plan, ask: Py<PyAny>, charge: Py<PyAny>, threads: usize, within: Duration) -> Gate {
        let (plan, unanswered, bytes) = (Arc::new(plan), Default::default(), AtomicUsize::new(0));
        Gate { plan, ask, charge, threads, within, unanswered, bytes }
    }

    /// How many questions were answered by 503 here, by the reasons.
    pub fn unanswered(&self) -> [(&'static str, u64); REASONS.len()] {
        std::array::from_fn(|number| (REASONS[number], self.unanswered[number].load(Ordering::Relaxed)))
    }

    /// The threads begin. They end once there is no `Asking` any more.
    ///
    /// `stop`: true at the end. Then a question is answered within `drain`.
    pub fn start(self: &Arc<Gate>, stop: watch::Receiver<bool>, drain: Duration) -> Result<(Asking, Ending), String> {
        let (questions, to_answer) = bounded(MOST_WAITING);
        let (shadows, to_charge) = bounded(MOST_WAITING);
        let (end, ended) = mpsc::channel();
        for number in 0..self.threads {
            let (gate, to_answer, to_charge, end) =
                (Arc::clone(self), to_answer.clone(), to_charge.clone(), end.clone());
            let thread = thread::Builder::new().name(format!("forebay-gate-{number}"));
            let spawned = thread.spawn(move || {
                gate.work(&to_answer, &to_charge);
                drop(end);
            });
            spawned.map_err(|error| error.to_string())?;
        }
        Ok((Asking { gate: Arc::clone(self), questions, shadows, stop, drain }, Ending(ended)))
    }

    /// Answer questions, attached to Python all the time: so its objects of this thread last.
    fn work(&self, questions: &Receiver<Waiting>, shadows: &Receiver<Waiting>) {
        let mut either = Select::new();
        let of_questions = either.recv(questions);
        either.recv(shadows);
        Python::attach(|py| {
            loop {
                let next = match questions.try_recv().or_else(|_| shadows.try_recv()) {
                    Err(TryRecvError::Empty) => py.detach(|| {
                        let one = either.select();
                        let receiver = if one.index() == of_questions { questions } else { shadows };
                        one.recv(receiver).ok()
                    }),
                    Err(TryRecvError::Disconnected) => return,
                    Ok(next) => Some(next),
                };
                if let Some(Waiting { ask, _bytes }) = next {
                    ask(self, py);
                }
            }
        });
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
                if let Some((name, value)) = client.and_then(|address| self.plan.client.as_ref()?.naming(address)) {
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

    /// Charge limits, all or none. Waits for Redis.
    fn charge(&self, py: Python<'_>, charges: &[Charge]) -> PyResult<Charged> {
        let asked = charges.iter().map(|(limit, key, cost)| Ok((*limit, key.in_python(py)?, *cost)));
        let replied = self.charge.call1(py, (asked.collect::<PyResult<Vec<_>>>()?,))?;
        let Some(each) = replied.extract::<Option<Vec<Option<Numbers>>>>(py)? else { return Ok(None) };
        let count = each.len();
        let decided = each.into_iter().enumerate().filter_map(|(place, numbers)| {
            let (allowed, limit, remaining, retry_after_ns, reset_after_ns, full) = numbers?;
            let (allowed, full) = (allowed.into(), full.into());
            let decision =
                Decision { allowed, limit, remaining, retry_after_ns, reset_after_ns, full, ..Default::default() };
            Some((place, decision))
        });
        let decided: Vec<_> = decided.collect();
        let is_denied = decided.iter().any(|(_, decision)| decision.allowed == 0);
        if count != charges.len() || (decided.len() < count && !is_denied) {
            return Err(PyValueError::new_err("not every limit has decided, and none has denied"));
        }
        Ok(Some(decided))
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
    shadows: Sender<Waiting>,
    stop: watch::Receiver<bool>,
    drain: Duration,
}

impl Asking {
    /// Decide a request, or deny it by 503.
    pub async fn ask(&self, question: Question) -> Outcome {
        match self.reply(question.size(), move |gate, py| gate.decide(py, &question)).await {
            Ok((fields, denial)) => Outcome { fields, denial, ..Outcome::default() },
            Err(why) => {
                self.gate.count(why);
                Outcome::unavailable()
            }
        }
    }

    /// Charge limits, all or none. `size`: the bytes that are held meanwhile.
    pub async fn charge(&self, charges: Vec<Charge>, size: usize) -> Charged {
        let charged = self.reply(size, move |gate, py| gate.charge(py, &charges)).await;
        charged.unwrap_or_else(|why| {
            self.gate.count(why);
            None
        })
    }

    /// Charge the limit of a rule in the shadow later, if there is room for that.
    pub fn charge_shadow(&self, charge: Charge) {
        static REPORTS: Seldom = Seldom::new();
        let Some(bytes) = Bytes::new(&self.gate, charge.1.size() + PIECE) else { return };
        let ask = Box::new(move |gate: &Gate, py: Python<'_>| {
            if let Err(error) = gate.charge(py, &[charge]) {
                REPORTS.report(|| format!("a rule in the shadow can't be charged: {error}"));
            }
        });
        let _ = self.shadows.try_send(Waiting { ask, _bytes: bytes });
    }

    /// The reply of Python.
    async fn reply<T: Send + 'static>(
        &self,
        size: usize,
        ask: impl FnOnce(&Gate, Python<'_>) -> PyResult<T> + Send + 'static,
    ) -> Result<T, Unanswered> {
        static REPORTS: Seldom = Seldom::new();
        let (reply, replied) = oneshot::channel();
        let ask = Box::new(move |gate: &Gate, py: Python<'_>| {
            // Nobody waits for it any more, and it is to be charged to no limit.
            if reply.is_closed() {
                return;
            }
            match ask(gate, py) {
                Ok(answer) => drop(reply.send(answer)),
                // It closes the channel of the reply.
                Err(error) => REPORTS.report(|| format!("a request can't be decided: {error}")),
            }
        });
        let bytes = Bytes::new(&self.gate, size).ok_or(Unanswered::Full)?;
        self.questions.try_send(Waiting { ask, _bytes: bytes }).map_err(|_| Unanswered::Full)?;
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
