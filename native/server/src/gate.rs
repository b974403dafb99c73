//! The gate in Python, which charges limits that aren't in the memory of a host: those of Redis.
//!
//! Questions wait in a bounded channel for threads that are attached to Python. One that finds the channel full, or that
//! isn't answered in time, is denied by 503. So whatever Redis does, the server answers, and what it holds is bounded.
//!
//! A question that waits until too little of its time is left isn't asked any more. If more questions come than Redis
//! answers, each thread would otherwise be busy with one that is late in the end: all would be denied, and charged.
//!
//! Refunds, renewals and releases have a channel of their own, which comes before that of questions in seven of eight
//! turns: a lease isn't lost because others ask too much. Permits that nobody has are released in the turns between.
//!
//! Nobody waits for the charges of rules in the shadow. They have a channel of their own, to which a thread comes when
//! no question waits: so they delay a question by one call of Redis at most.

use std::collections::HashMap;
use std::future::Future;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Select, Sender, TryRecvError, bounded, unbounded};
use pyo3::prelude::*;
use tokio::sync::{Mutex, oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::question::{Charged, Charging, Done, Followup, PIECE, Question, Undecided};
use crate::report::Seldom;

/// Questions that wait for a thread, and as many charges of rules in the shadow.
const MOST_WAITING: usize = 1024;
/// Bytes of all questions that wait or are asked. Usual ones take a tenth of it.
const MOST_BYTES: usize = 64 << 20;
/// Bytes of all charges of rules in the shadow that wait. They take no room from questions.
const MOST_SHADOW_BYTES: usize = 16 << 20;
/// Bytes of all refunds, renewals and releases that wait. Questions leave them their room.
const MOST_FOLLOW_UP_BYTES: usize = 4 << 20;
/// Bytes of the id of a charge or a lease, at most.
const LONGEST_ID: usize = 64;
/// A thread takes a question first in one of so many turns.
const TURNS: usize = 8;
/// The names of `Unanswered`.
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

/// The reply to a question. If nobody takes it, its permits are given back, unless the question may be sent again.
struct Unread {
    charged: Option<Result<Charged, Undecided>>,
    question: Question,
    asking: Asking,
}

impl Unread {
    fn take(mut self) -> Result<Charged, Undecided> {
        self.charged.take().unwrap_or(Err(Undecided::Unavailable))
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let Some(Ok(Charged { lease: Some(lease), .. })) = self.charged.take() else { return };
        if self.question.again.is_some() {
            return;
        }
        self.asking.release(Unreleased { charging: Arc::clone(&self.question.charging), lease });
    }
}

/// The permits of a lease that nobody has.
struct Unreleased {
    charging: Arc<Charging>,
    lease: String,
}

impl Unreleased {
    /// Itself, if nobody knows whether they have come back.
    fn release(self, py: Python<'_>) -> Option<Unreleased> {
        static REPORTS: Seldom = Seldom::new();
        match self.charging.done(py, Followup::Release, &self.lease) {
            Ok(Done::Perhaps | Done::NotAsked) => return Some(self),
            Ok(Done::Now | Done::Unknown) => {}
            Err(error) => REPORTS.report(|| format!("permits can't be given back: {error}")),
        }
        None
    }
}

/// Asks Python, and sends the reply if somebody waits for it.
type Ask = dyn FnOnce(Python<'_>) + Send;

struct Waiting {
    ask: Box<Ask>,
    _bytes: Bytes,
}

/// A part of the bytes of all questions, or of all charges of rules in the shadow.
struct Bytes {
    all: Arc<AtomicUsize>,
    size: usize,
}

impl Bytes {
    /// None if there is no room for so many.
    fn new(all: &Arc<AtomicUsize>, size: usize, most: usize) -> Option<Bytes> {
        let bytes = Bytes { all: Arc::clone(all), size };
        (all.fetch_add(size, Ordering::Relaxed) + size <= most).then_some(bytes)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// The turns of questions with one id, by the hash of it. Two ids with one hash would only wait for each other.
#[derive(Default)]
struct Turns(std::sync::Mutex<HashMap<u64, Weak<Mutex<()>>>>);

impl Turns {
    fn of(&self, id: &str) -> Arc<Mutex<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = turns.hasher().hash_one(id);
        if let Some(turn) = turns.get(&hash).and_then(Weak::upgrade) {
            return turn;
        }
        if turns.len() == turns.capacity() {
            turns.retain(|_, turn| turn.strong_count() > 0);
        }
        let turn = Arc::default();
        turns.insert(hash, Arc::downgrade(&turn));
        turn
    }
}

/// How Python is asked.
pub struct Gate {
    threads: usize,
    /// A question that has waited so long is answered by 503.
    within: Duration,
    /// One that has waited so long isn't asked: Python may take the time that is left.
    begins_within: Duration,
    /// By the reasons.
    unanswered: [AtomicU64; REASONS.len()],
    /// Of questions.
    bytes: Arc<AtomicUsize>,
    /// Of charges of rules in the shadow.
    shadow_bytes: Arc<AtomicUsize>,
    /// Of refunds, renewals and releases.
    follow_up_bytes: Arc<AtomicUsize>,
    turns: Turns,
    /// To be released once more.
    unreleased: std::sync::Mutex<Vec<Unreleased>>,
}

impl Gate {
    /// `takes`: how long Python takes for a question at most.
    pub fn new(threads: usize, within: Duration, takes: Duration) -> Gate {
        Gate {
            threads,
            within,
            begins_within: within.saturating_sub(takes),
            unanswered: Default::default(),
            bytes: Arc::default(),
            shadow_bytes: Arc::default(),
            follow_up_bytes: Arc::default(),
            turns: Turns::default(),
            unreleased: std::sync::Mutex::default(),
        }
    }

    /// How many questions were answered by 503 here, by the reasons.
    pub fn unanswered(&self) -> [(&'static str, u64); REASONS.len()] {
        std::array::from_fn(|number| (REASONS[number], self.unanswered[number].load(Ordering::Relaxed)))
    }

    /// The threads begin. They end once there is no `Asking` any more.
    ///
    /// `stop`: true at the end. Then a question is answered within `drain`.
    pub fn start(self: &Arc<Gate>, stop: watch::Receiver<bool>, drain: Duration) -> Result<(Asking, Ending), String> {
        let (releases, to_release) = unbounded();
        let (follow_ups, to_follow_up) = bounded(MOST_WAITING);
        let (questions, to_answer) = bounded(MOST_WAITING);
        let (shadows, to_charge) = bounded(MOST_WAITING);
        let work = Work { releases: to_release, follow_ups: to_follow_up, questions: to_answer, shadows: to_charge };
        let (end, ended) = mpsc::channel();
        for number in 0..self.threads {
            let (gate, work, end) = (Arc::clone(self), work.clone(), end.clone());
            let thread = thread::Builder::new().name(format!("forebay-gate-{number}"));
            let spawned = thread.spawn(move || {
                gate.work(&work);
                drop(end);
            });
            spawned.map_err(|error| error.to_string())?;
        }
        Ok((Asking { gate: Arc::clone(self), releases, follow_ups, questions, shadows, stop, drain }, Ending(ended)))
    }

    /// Answer questions, attached to Python all the time: so its objects of this thread last.
    fn work(&self, Work { releases, follow_ups, questions, shadows }: &Work) {
        let mut any = Select::new();
        any.recv(releases);
        for asks in [follow_ups, questions, shadows] {
            any.recv(asks);
        }
        Python::attach(|py| {
            for turn in (0..TURNS).cycle() {
                let first = match turn {
                    0 => Some(questions),
                    // Releases of permits that nobody has come first in the other turns. There may be as many as leases.
                    1 | 3 | 5 | 7 => Some(follow_ups),
                    _ => None,
                };
                if let Some(Ok(Waiting { ask, _bytes })) = first.map(Receiver::try_recv) {
                    ask(py);
                    continue;
                }
                if let Ok(unreleased) = releases.try_recv() {
                    if let Some(unreleased) = unreleased.release(py) {
                        self.unreleased().push(unreleased);
                    }
                    continue;
                }
                // They all end at once.
                match follow_ups.try_recv().or_else(|_| questions.try_recv()).or_else(|_| shadows.try_recv()) {
                    Ok(Waiting { ask, _bytes }) => ask(py),
                    Err(TryRecvError::Disconnected) => return,
                    Err(TryRecvError::Empty) => {
                        py.detach(|| any.ready());
                    }
                }
            }
        });
    }

    fn unreleased(&self) -> std::sync::MutexGuard<'_, Vec<Unreleased>> {
        self.unreleased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, why: Unanswered) {
        self.unanswered[why as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// What the threads of a gate do: the first of it that there is.
#[derive(Clone)]
struct Work {
    releases: Receiver<Unreleased>,
    follow_ups: Receiver<Waiting>,
    questions: Receiver<Waiting>,
    shadows: Receiver<Waiting>,
}

/// Asks the threads of a gate.
#[derive(Clone)]
pub struct Asking {
    gate: Arc<Gate>,
    /// There are no more than leases.
    releases: Sender<Unreleased>,
    follow_ups: Sender<Waiting>,
    questions: Sender<Waiting>,
    shadows: Sender<Waiting>,
    stop: watch::Receiver<bool>,
    drain: Duration,
}

impl Asking {
    /// Ask about limits, which are charged to nothing without an answer in time. `size`: the bytes that are held
    /// meanwhile. `since`: from when on its time is counted.
    pub async fn charge(&self, question: Question, size: usize, since: Instant) -> Result<Charged, Undecided> {
        let (size, asking) = (size + question.size(), self.clone());
        let turn = question.again.as_ref().map(|again| self.gate.turns.of(&again.id));
        let bytes = Bytes::new(&self.gate.bytes, size, MOST_BYTES);
        let reply = self.reply(&self.questions, bytes, turn, since, move |py| {
            let charged = Some(question.charged(py)?);
            Ok(Unread { charged, question, asking })
        });
        match self.in_time(reply).await.unwrap_or(Err(Unanswered::Late)) {
            Ok(unread) => unread.take(),
            Err(why) => {
                self.gate.count(why);
                Err(Undecided::Unavailable)
            }
        }
    }

    /// Do something with what an earlier reply has named.
    pub async fn follow_up(&self, charging: Arc<Charging>, what: Followup, id: String) -> Done {
        if id.len() > LONGEST_ID {
            return Done::Unknown;
        }
        let bytes = Bytes::new(&self.gate.follow_up_bytes, 2 * id.len() + PIECE, MOST_FOLLOW_UP_BYTES);
        let turn = Some(self.gate.turns.of(&id));
        let is_asked = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&is_asked);
        let reply = self.reply(&self.follow_ups, bytes, turn, Instant::now(), move |py| {
            asked.store(true, Ordering::Relaxed);
            charging.done(py, what, &id)
        });
        match self.in_time(reply).await.unwrap_or(Err(Unanswered::Late)) {
            Ok(done) => done,
            Err(why) => {
                self.gate.count(why);
                if is_asked.load(Ordering::Relaxed) { Done::Perhaps } else { Done::NotAsked }
            }
        }
    }

    /// The thread that comes to it first does it.
    fn release(&self, unreleased: Unreleased) {
        // Its threads last as long.
        let _ = self.releases.send(unreleased);
    }

    /// Release permits that nobody has, and of which nobody knows whether they have come back: until Redis answers, or
    /// their lease ends.
    pub fn release_again(&self) {
        std::mem::take(&mut *self.gate.unreleased()).into_iter().for_each(|one| self.release(one));
    }

    /// What is asked in time, however many questions that are; None if they aren't answered by then.
    pub async fn in_time<T>(&self, asked: impl Future<Output = T>) -> Option<T> {
        let mut stop = self.stop.clone();
        let drained = async {
            let _ = stop.wait_for(|stopped| *stopped).await;
            sleep(self.drain).await;
        };
        tokio::select! {
            answered = timeout(self.gate.within, asked) => answered.ok(),
            () = drained => None,
        }
    }

    /// So many questions are late before their turn.
    pub fn count_late(&self, questions: usize) {
        (0..questions).for_each(|_| self.gate.count(Unanswered::Late));
    }

    /// Charge the limit of a rule in the shadow later, if there is room for that.
    pub fn charge_shadow(&self, question: Question) {
        static REPORTS: Seldom = Seldom::new();
        let bytes = Bytes::new(&self.gate.shadow_bytes, question.size(), MOST_SHADOW_BYTES);
        let Some(bytes) = bytes else { return };
        let ask = Box::new(move |py: Python<'_>| {
            if let Err(error) = question.charged(py) {
                REPORTS.report(|| format!("a rule in the shadow can't be charged: {error}"));
            }
        });
        let _ = self.shadows.try_send(Waiting { ask, _bytes: bytes });
    }

    /// The reply of Python. If nobody waits for it any more, or it would be late, Python isn't asked.
    ///
    /// Python is asked about an id once at a `turn`: others wait for theirs, and take no thread meanwhile.
    async fn reply<T: Send + 'static>(
        &self,
        asks: &Sender<Waiting>,
        bytes: Option<Bytes>,
        turn: Option<Arc<Mutex<()>>>,
        since: Instant,
        ask: impl FnOnce(Python<'_>) -> PyResult<T> + Send + 'static,
    ) -> Result<T, Unanswered> {
        static REPORTS: Seldom = Seldom::new();
        let bytes = bytes.ok_or(Unanswered::Full)?;
        let turn = match turn {
            None => None,
            Some(turn) => Some(turn.lock_owned().await),
        };
        let (reply, replied) = oneshot::channel();
        let begins_within = self.gate.begins_within;
        let ask = Box::new(move |py: Python<'_>| {
            // It ends with the answer, although the service may have gone before.
            let _turn = turn;
            // It is to be charged to no limit.
            if reply.is_closed() {
                return;
            }
            let answer = if since.elapsed() >= begins_within {
                Err(Unanswered::Late)
            } else {
                ask(py).map_err(|error| {
                    REPORTS.report(|| format!("a request can't be decided: {error}"));
                    Unanswered::Failed
                })
            };
            let _ = reply.send(answer);
        });
        asks.try_send(Waiting { ask, _bytes: bytes }).map_err(|_| Unanswered::Full)?;
        replied.await.unwrap_or(Err(Unanswered::Failed))
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
