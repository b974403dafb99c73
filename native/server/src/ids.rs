//! Replies by the ids of questions: a question that is sent again is charged once, and gets the first reply again.
//!
//! Each server remembers its own. A reply that is forgotten, as others have taken its room, is charged once more.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::charges::{Charged, Number};

/// For so long, a question may be sent again.
pub const LASTS: Duration = Duration::from_secs(300);
/// Ids that can be looked up at once.
const PARTS: usize = 16;
/// Bytes of the ids and replies of each part.
const MOST_BYTES: usize = 4 << 20;
/// Bytes of an entry beside its texts, about.
const OF_ENTRY: usize = 640;

/// A reply to a question.
pub struct Reply {
    pub allowed: bool,
    pub text: String,
    /// For so long it may be sent again, at most `LASTS`.
    pub lasts: Duration,
    pub taken: Taken,
}

/// What a question has taken that can be given back.
#[derive(Clone, Default)]
pub struct Taken {
    pub charge: Option<Charged>,
    /// The id of the lease.
    pub lease: Option<String>,
}

/// By what a reply is found: another one with the same id may have come since.
pub enum Name<'a> {
    Charge(Number),
    Lease(&'a str),
}

impl Taken {
    /// Bytes of its texts.
    fn size(&self) -> usize {
        self.charge.as_ref().map_or(0, Charged::size) + self.lease.as_ref().map_or(0, String::len)
    }

    fn has(&self, name: &Name<'_>) -> bool {
        match name {
            Name::Charge(number) => self.charge.as_ref().is_some_and(|charge| charge.number == *number),
            Name::Lease(id) => self.lease.as_deref() == Some(*id),
        }
    }
}

struct Known {
    question: u64,
    text: String,
    taken: Taken,
    /// Until then it may be sent again, and may be prolonged up to its end.
    until: Instant,
    end: Instant,
    /// No other one has it.
    number: u64,
}

#[derive(Default)]
struct Part {
    replies: HashMap<String, Known>,
    /// From the oldest on. Some may have been forgotten.
    order: VecDeque<Place>,
    /// Of all in `order`.
    bytes: usize,
    count: u64,
}

struct Place {
    id: String,
    number: u64,
    end: Instant,
    size: usize,
}

/// The replies of a server. All threads use it.
pub struct Ids {
    parts: Vec<Mutex<Part>>,
    hasher: RandomState,
}

impl Default for Ids {
    fn default() -> Ids {
        Ids { parts: (0..PARTS).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }
}

impl Ids {
    /// The reply to a question with an id: the first one that was allowed, or that of `decide`.
    ///
    /// If the first one is over, the question is decided anew: before, `undo` gives back what it has taken. Others with
    /// the same id wait for it. An error if the id was another question's.
    pub fn once(
        &self,
        id: &str,
        question: &str,
        decide: impl FnOnce() -> Result<Reply, String>,
        undo: impl FnOnce(&Taken),
    ) -> Result<Reply, String> {
        let question = self.hasher.hash_one(question);
        let mut part = self.part(id);
        let now = Instant::now();
        part.forget_old(now);
        if let Some(known) = part.replies.get(id) {
            let (is_same, is_over) = (known.question == question, known.until <= now);
            if !is_over && !is_same {
                return Err(format!("the request_id {id:?} was that of another question: make one for each"));
            }
            if !is_over {
                let (text, taken) = (known.text.clone(), known.taken.clone());
                return Ok(Reply { allowed: true, text, lasts: known.until - now, taken });
            }
            if is_same {
                undo(&known.taken);
                part.replies.remove(id);
            }
        }
        let reply = decide()?;
        if reply.allowed {
            part.add(id, question, &reply, now);
        }
        Ok(reply)
    }

    /// If `renew` renews what it has taken, the reply with this id and name may be sent again for so long from then on,
    /// as far as `LASTS` allows. Returns what `renew` does. Repetitions wait for it: none gives back what is renewed.
    pub fn prolong<T>(
        &self,
        id: &str,
        name: &Name<'_>,
        lasts: Duration,
        renew: impl FnOnce() -> (bool, T),
    ) -> (bool, T) {
        let mut part = self.part(id);
        let (is_renewed, more) = renew();
        if is_renewed && let Some(known) = part.replies.get_mut(id).filter(|known| known.taken.has(name)) {
            known.until = (Instant::now() + lasts).min(known.end);
        }
        (is_renewed, more)
    }

    /// The next question with the id of the reply with this name is another one.
    pub fn forget(&self, id: &str, name: &Name<'_>) {
        let mut part = self.part(id);
        if part.replies.get(id).is_some_and(|known| known.taken.has(name)) {
            part.replies.remove(id);
        }
    }

    fn part(&self, id: &str) -> MutexGuard<'_, Part> {
        let number = self.hasher.hash_one(id) as usize % PARTS;
        self.parts[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    fn add(&mut self, id: &str, question: u64, reply: &Reply, now: Instant) {
        let (text, taken, end) = (reply.text.clone(), reply.taken.clone(), now + LASTS);
        let size = 2 * id.len() + text.len() + taken.size() + OF_ENTRY;
        let number = self.count;
        self.count += 1;
        self.bytes += size;
        self.order.push_back(Place { id: id.to_owned(), number, end, size });
        let until = (now + reply.lasts).min(end);
        self.replies.insert(id.to_owned(), Known { question, text, taken, until, end, number });
        while self.bytes > MOST_BYTES {
            self.remove_oldest();
        }
    }

    fn forget_old(&mut self, now: Instant) {
        while self.order.front().is_some_and(|place| place.end <= now) {
            self.remove_oldest();
        }
    }

    fn remove_oldest(&mut self) {
        let Some(Place { id, number, size, .. }) = self.order.pop_front() else { return };
        self.bytes -= size;
        // It may have been forgotten, and be the id of a later question by now.
        if self.replies.get(&id).is_some_and(|known| known.number == number) {
            self.replies.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ids: &Ids, id: &str, question: &str, text: &str) -> Result<String, String> {
        lasting(ids, id, question, text, LASTS)
    }

    fn lasting(ids: &Ids, id: &str, question: &str, text: &str, lasts: Duration) -> Result<String, String> {
        let undo = |taken: &Taken| assert!(taken.has(&Name::Lease("lease")));
        ids.once(id, question, || Ok(of_lease("lease", text, lasts)), undo).map(|reply| reply.text)
    }

    fn of_lease(lease: &str, text: &str, lasts: Duration) -> Reply {
        let taken = Taken { lease: Some(lease.to_owned()), charge: None };
        Reply { allowed: true, text: text.to_owned(), lasts, taken }
    }

    #[test]
    fn a_question_that_is_sent_again_gets_the_first_reply() {
        let ids = Ids::default();
        assert_eq!(reply(&ids, "a", "q", "first").unwrap(), "first");
        assert_eq!(reply(&ids, "a", "q", "second").unwrap(), "first");
        assert!(reply(&ids, "a", "other", "third").is_err());
        ids.forget("a", &Name::Lease("another"));
        assert!(reply(&ids, "a", "other", "third").is_err());
        ids.forget("a", &Name::Lease("lease"));
        assert_eq!(reply(&ids, "a", "other", "third").unwrap(), "third");
    }

    #[test]
    fn a_denial_is_not_remembered() {
        let ids = Ids::default();
        let denied = Reply { allowed: false, ..of_lease("lease", "denied", LASTS) };
        assert!(!ids.once("a", "q", || Ok(denied), |_| panic!("nothing was taken")).unwrap().allowed);
        assert_eq!(reply(&ids, "a", "q", "later").unwrap(), "later");
    }

    #[test]
    fn a_reply_is_sent_again_for_as_long_as_it_lasts() {
        let ids = Ids::default();
        assert_eq!(lasting(&ids, "a", "q", "first", Duration::ZERO).unwrap(), "first");
        assert_eq!(lasting(&ids, "a", "q", "second", Duration::ZERO).unwrap(), "second");
        let prolong = |lease, is_renewed| {
            let renew = || (is_renewed, ids.parts.iter().filter(|part| part.try_lock().is_err()).count());
            assert_eq!(ids.prolong("a", &Name::Lease(lease), LASTS, renew), (is_renewed, 1), "repetitions wait");
        };
        prolong("another", true);
        assert_eq!(lasting(&ids, "a", "q", "third", Duration::ZERO).unwrap(), "third");
        prolong("lease", false);
        assert_eq!(lasting(&ids, "a", "q", "fourth", Duration::ZERO).unwrap(), "fourth");
        prolong("lease", true);
        assert_eq!(lasting(&ids, "a", "q", "fifth", Duration::ZERO).unwrap(), "fourth");
    }

    #[test]
    fn what_a_reply_has_taken_is_given_back_before_its_question_is_decided_anew() {
        let ids = Ids::default();
        let mut undone = Vec::new();
        let mut ask = |question: &str, lease: &str| {
            let undo = |taken: &Taken| undone.extend(taken.lease.clone());
            ids.once("a", question, || Ok(of_lease(lease, "", Duration::ZERO)), undo).unwrap();
            undone.clone()
        };
        assert!(ask("q", "first").is_empty());
        assert_eq!(ask("q", "second"), ["first"]);
        // What another question has taken is not that one's.
        assert_eq!(ask("other", "third"), ["first"]);
        assert_eq!(ask("other", "fourth"), ["first", "third"]);
    }

    #[test]
    fn the_oldest_replies_leave_when_there_is_no_room() {
        let ids = Ids::default();
        let long = "x".repeat(1 << 16);
        for number in 0..2000 {
            reply(&ids, &number.to_string(), "q", &long).unwrap();
        }
        for part in &ids.parts {
            let part = part.lock().unwrap();
            assert!(part.bytes <= MOST_BYTES && part.replies.len() == part.order.len());
        }
        assert_eq!(reply(&ids, "1999", "q", "again").unwrap(), long);
        assert_eq!(reply(&ids, "0", "q", "again").unwrap(), "again");
    }
}
