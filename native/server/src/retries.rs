//! Retries of requests: a request with an id is charged once, and a few retries of it pass uncharged.
//!
//! As `forebay.web.charging_once`, but each server remembers its own ids. One charge admits at most the request and
//! `most` retries, whatever ids clients send. An id that is forgotten, as newer ones have taken its room, is charged
//! again.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::decide::Use;
use crate::request::Asked;

/// Ids that can be looked up at once.
const PARTS: usize = 16;
/// Ids of each part.
const MOST_IDS: usize = 1 << 14;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetriesDocument {
    /// In small letters: the field of the id.
    field: String,
    /// Retries of one charge.
    most: u32,
    lasts_ns: u64,
}

/// A hash of a request's id and of all that makes another request of it.
pub type Id = [u64; 2];

struct Charged {
    passed: u32,
    end: Instant,
}

#[derive(Default)]
struct Part {
    /// Requests that were charged, until their end.
    charged: HashMap<Id, Charged>,
    /// All of them, from the oldest on. Each lasts as long.
    order: VecDeque<Id>,
}

/// The ids of a plan. All threads use it.
pub struct Retries {
    field: String,
    most: u32,
    lasts: Duration,
    parts: Vec<Mutex<Part>>,
    /// With random keys: a client can't make two ids of one hash.
    hasher: RandomState,
}

impl Retries {
    pub fn new(document: RetriesDocument) -> Retries {
        Retries {
            field: document.field,
            most: document.most,
            lasts: Duration::from_nanos(document.lasts_ns),
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
        }
    }

    /// The id that a client has sent; None if it has sent none, or if nobody knows the path.
    fn sent_by<'a>(&self, asked: &'a Asked<'_>) -> Option<Cow<'a, str>> {
        let sent = asked.header(&self.field).filter(|sent| !sent.is_empty())?;
        (!asked.is_described() && !asked.readings.all.is_empty()).then_some(sent)
    }

    /// The id of a request for the middlewares of all hosts, as `forebay.web.request_ids` has it.
    pub fn sent(&self, asked: &Asked<'_>) -> Option<Vec<String>> {
        let sent = self.sent_by(asked)?;
        let path = asked.readings.decoded.first()?;
        Some(
            [path.as_str(), &sent]
                .into_iter()
                .chain(asked.methods().iter().map(String::as_str))
                .map(str::to_owned)
                .collect(),
        )
    }

    /// The id of a request that is charged to these limits.
    pub fn id(&self, asked: &Asked<'_>, uses: &[Use<'_>]) -> Option<Id> {
        let sent = self.sent_by(asked)?;
        let charges: Vec<_> = uses.iter().map(|one| (&one.rule.name, one.limit, one.key(), one.cost)).collect();
        let content = (&asked.readings.all, asked.methods(), sent, charges);
        Some([0, 1].map(|number| self.hasher.hash_one((number, &content))))
    }

    /// Charge a request by `charge`, which returns whether it is allowed, too; None if it passes as a retry.
    ///
    /// Others with the same id wait for it.
    pub fn once<T, E>(&self, id: Id, charge: impl FnOnce() -> Result<(bool, T), E>) -> Result<Option<T>, E> {
        let mut part = self.part(id);
        let now = Instant::now();
        part.forget_old(now);
        if let Some(charged) = part.charged.get_mut(&id) {
            if charged.passed < self.most {
                charged.passed += 1;
                return Ok(None);
            }
            return charge().map(|(_, result)| Some(result));
        }
        let (is_allowed, result) = charge()?;
        if is_allowed {
            part.charged.insert(id, Charged { passed: 0, end: now + self.lasts });
            part.order.push_back(id);
        }
        Ok(Some(result))
    }

    /// Whether a request with this id would pass as a retry.
    pub fn passes(&self, id: Id) -> bool {
        let part = self.part(id);
        part.charged.get(&id).is_some_and(|charged| charged.passed < self.most && charged.end > Instant::now())
    }

    fn part(&self, id: Id) -> MutexGuard<'_, Part> {
        self.parts[id[0] as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    /// Forget what has ended, and make room for another id.
    fn forget_old(&mut self, now: Instant) {
        while let Some(oldest) = self.order.front() {
            let is_over = self.charged.get(oldest).is_none_or(|charged| charged.end <= now);
            if !is_over && self.order.len() < MOST_IDS {
                return;
            }
            self.charged.remove(oldest);
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retries(lasts: Duration) -> Retries {
        let lasts_ns = lasts.as_nanos() as u64;
        Retries::new(RetriesDocument { field: "idempotency-key".to_owned(), most: 2, lasts_ns })
    }

    /// How many of so many requests are charged.
    fn charges(retries: &Retries, id: Id, requests: usize, is_allowed: bool) -> usize {
        let ask = || retries.once(id, || Ok::<_, ()>((is_allowed, ()))).unwrap().is_some();
        (0..requests).filter(|_| ask()).count()
    }

    #[test]
    fn a_charge_admits_as_many_retries() {
        let retries = retries(Duration::from_secs(3600));
        assert!(!retries.passes([1, 1]));
        assert_eq!(charges(&retries, [1, 1], 1, true), 1);
        assert!(retries.passes([1, 1]));
        assert_eq!(charges(&retries, [1, 1], 6, true), 4);
        assert!(!retries.passes([1, 1]));
        assert_eq!(charges(&retries, [1, 2], 1, true), 1);
    }

    #[test]
    fn a_request_that_is_denied_or_fails_leaves_nothing() {
        let retries = retries(Duration::from_secs(3600));
        assert_eq!(charges(&retries, [1, 1], 3, false), 3);
        assert_eq!(retries.once([1, 1], || Err::<(bool, ()), _>("no store")), Err("no store"));
        assert!(retries.parts.iter().all(|part| part.lock().unwrap().order.is_empty()));
    }

    #[test]
    fn a_retry_that_comes_too_late_is_charged() {
        let retries = retries(Duration::ZERO);
        assert_eq!(charges(&retries, [1, 1], 3, true), 3);
        assert_eq!(retries.part([1, 1]).order.len(), 1);
    }

    #[test]
    fn the_oldest_ids_make_room() {
        let retries = retries(Duration::from_secs(3600));
        let ids = (0..MOST_IDS as u64 + 10).map(|number| [0, number]);
        ids.for_each(|id| assert_eq!(charges(&retries, id, 1, true), 1));
        assert_eq!(retries.part([0, 0]).order.len(), MOST_IDS);
        assert_eq!(retries.part([0, 0]).charged.len(), MOST_IDS);
        assert!(!retries.passes([0, 0]) && retries.passes([0, 10]));
    }
}
