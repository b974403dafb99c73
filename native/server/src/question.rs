//! What Python is asked about limits that aren't in the memory of a host, and what it replies.

use std::sync::Arc;

use hyper::HeaderMap;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::capi::{Decision, Key};
use crate::charging::Decided;
use crate::decide::Use;

/// Bytes that a field, an entry of a descriptor or a charge takes beside its text.
pub const PIECE: usize = 128;

/// What charges the limits of a plan: as `forebay.serving.charging` has it.
pub struct Charging {
    object: Py<PyAny>,
    /// Whether the limits can book ahead.
    pub books: bool,
}

impl Charging {
    pub fn new(object: Py<PyAny>, books: bool) -> Charging {
        Charging { object, books }
    }

    /// Waits for Redis.
    pub fn done(&self, py: Python<'_>, what: Followup, id: &str) -> PyResult<Done> {
        let replied = self.object.bind(py).call_method1(what.method(py), (id,))?;
        Ok(match replied.extract()? {
            Some(true) => Done::Now,
            Some(false) => Done::Unknown,
            None => Done::Perhaps,
        })
    }
}

/// What Python is asked about limits.
pub struct Question {
    pub charging: Arc<Charging>,
    /// The number of a limit, a key and a cost of each use.
    uses: Vec<(usize, Key, u64)>,
    how: How,
    /// It is decided once.
    pub again: Option<Again>,
}

/// A question of a service that may be sent again: its id, and what makes it the same question.
pub struct Again {
    pub id: String,
    pub content: String,
}

/// How limits are asked.
pub enum How {
    /// All are charged, or none.
    Hit(Option<Once>),
    /// The same, and the charge can be given back.
    Take,
    /// The same, if the request may proceed within so many nanoseconds.
    Book(u64),
    /// The permits of concurrency limits are held. The other charges can be given back if it is `refundable`.
    Hold { once: Option<Once>, refundable: bool },
    /// Their decisions are only read.
    Peek,
}

/// A request and its retries are charged once.
#[derive(Clone)]
pub struct Once {
    /// To the uses from this place on.
    pub from: usize,
    /// By this id; None charges it in any case.
    pub id: Option<Vec<String>>,
}

/// What Python has decided about a question.
pub struct Charged {
    pub decided: Decided,
    /// By which it can be given back.
    pub charge: Option<String>,
    /// By which the permits can be given back.
    pub lease: Option<String>,
    /// Whether it was decided now, and not when the question was sent before.
    pub is_first: bool,
}

/// Why a question isn't decided.
pub enum Undecided {
    /// The store can't be asked, or Python hasn't answered.
    Unavailable,
    /// For the asking service.
    Refused(String),
}

/// What becomes of an earlier reply.
#[derive(Clone, Copy)]
pub enum Followup {
    /// The charge of this id is given back, once.
    Refund,
    /// The lease of this id begins anew.
    Renew,
    /// The permits of this lease are given back.
    Release,
}

impl Followup {
    fn method(self, py: Python<'_>) -> &Bound<'_, PyString> {
        match self {
            Followup::Refund => intern!(py, "give_back"),
            Followup::Renew => intern!(py, "renew"),
            Followup::Release => intern!(py, "release"),
        }
    }
}

/// Whether that was done.
pub enum Done {
    Now,
    /// This server doesn't know the id, or not any more.
    Unknown,
    /// Python wasn't asked, and can be.
    NotAsked,
    /// Nobody knows.
    Perhaps,
}

/// The decision of Python, as `forebay.serving.decided` has it.
type Replied = (bool, Vec<Option<Numbers>>, Option<String>, Option<String>, bool);
/// A decision of Python: whether it allows, its limit, what remains, when to ask again, when the key is as fresh, whether
/// the store has no room, and the time until the request may proceed.
type Numbers = (bool, u64, u64, u64, u64, bool, u64);

impl Question {
    pub fn new(charging: &Arc<Charging>, uses: &[Use<'_>], how: How, again: Option<Again>) -> Question {
        let uses = uses.iter().map(|one| (one.limit, one.key().clone(), one.cost)).collect();
        Question { charging: Arc::clone(charging), uses, how, again }
    }

    /// Bytes that it holds.
    pub fn size(&self) -> usize {
        let id = match &self.how {
            How::Hit(Some(once)) | How::Hold { once: Some(once), .. } => {
                once.id.iter().flatten().map(|text| text.len() + PIECE).sum()
            }
            _ => 0,
        };
        let again = self.again.as_ref().map_or(0, |again| again.id.len() + again.content.len() + PIECE);
        id + again + self.uses.iter().map(|(_, key, _)| key.size() + PIECE).sum::<usize>()
    }

    /// Ask Python about limits. Waits for Redis.
    pub fn charged(&self, py: Python<'_>) -> PyResult<Result<Charged, Undecided>> {
        let Question { charging, uses, how, again } = self;
        let asked = uses.iter().map(|(limit, key, cost)| Ok((*limit, key.in_python(py)?, *cost)));
        let asked = asked.collect::<PyResult<Vec<_>>>()?;
        let pair = |once: &Option<Once>| once.as_ref().map(|once| (once.from, once.id.clone()));
        let (method, more) = match how {
            How::Hit(once) => (intern!(py, "hit"), vec![pair(once).into_pyobject(py)?.into_any()]),
            How::Take => (intern!(py, "take"), vec![]),
            How::Book(max_delay_ns) => (intern!(py, "book"), vec![max_delay_ns.into_pyobject(py)?.into_any()]),
            How::Hold { once, refundable } => {
                let refundable = refundable.into_pyobject(py)?.to_owned().into_any();
                (intern!(py, "hold"), vec![pair(once).into_pyobject(py)?.into_any(), refundable])
            }
            How::Peek => (intern!(py, "peek"), vec![]),
        };
        let mut arguments = vec![asked.into_pyobject(py)?.into_any()];
        arguments.extend(more);
        let charging = charging.object.bind(py);
        let replied = match again {
            None => charging.call_method1(method, PyTuple::new(py, arguments)?)?,
            Some(Again { id, content }) => {
                charging.call_method1(intern!(py, "ask_once"), (id, content, method, arguments))?
            }
        };
        if let Ok(reason) = replied.cast::<PyString>() {
            return Ok(Err(Undecided::Refused(reason.to_string())));
        }
        let replied: Option<Replied> = replied.extract()?;
        let Some((allowed, each, charge, lease, is_first)) = replied else { return Ok(Err(Undecided::Unavailable)) };
        let count = each.len();
        let each = each.into_iter().enumerate().filter_map(|(place, numbers)| {
            let (allowed, limit, remaining, retry_after_ns, reset_after_ns, full, delay_ns) = numbers?;
            Some((
                place,
                Decision {
                    allowed: allowed.into(),
                    limit,
                    remaining,
                    retry_after_ns,
                    reset_after_ns,
                    full: full.into(),
                    delay_ns,
                    ..Decision::default()
                },
            ))
        });
        let each: Vec<_> = each.collect();
        let all_allow = each.len() == count && each.iter().all(|(_, decision)| decision.allowed != 0);
        let is_decided = all_allow || !allowed && !each.is_empty();
        if count != uses.len() || !is_decided {
            return Err(PyValueError::new_err("not every limit has decided, and none has denied"));
        }
        let is_refundable = matches!(how, How::Take | How::Book(_) | How::Hold { refundable: true, .. });
        if is_refundable && charge.is_some() != allowed {
            return Err(PyValueError::new_err("a charge that can't be given back"));
        }
        Ok(Ok(Charged { decided: Decided { allowed, each }, charge, lease, is_first }))
    }
}

/// Bytes of header fields.
pub fn size_of_fields(fields: &HeaderMap) -> usize {
    fields.iter().map(|(name, value)| name.as_str().len() + value.len() + PIECE).sum()
}
