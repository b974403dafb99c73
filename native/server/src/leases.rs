//! Permits that services hold by the JSON API, each lease by an id that only its service knows.
//!
//! The permits are this process's: if it ends, however that is, they come back.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::holding::Held;

/// Leases at once.
const MOST: usize = 1 << 17;

/// What a service holds.
pub struct Open {
    pub held: Vec<Held>,
    /// The id of the question by which it was taken.
    pub request_id: Option<String>,
    /// Until the permits of the first limit come back, without a renewal.
    pub lasts: Duration,
    /// Until those of the last limit do.
    pub longest: Duration,
}

/// The leases of a server. All threads use it.
#[derive(Default)]
pub struct Leases {
    /// With their ends: then all permits have come back by themselves.
    open: Mutex<HashMap<String, (Open, Instant)>>,
    /// With random keys.
    hasher: RandomState,
    count: AtomicU64,
}

impl Leases {
    pub fn have_room(&self) -> bool {
        self.locked().len() < MOST
    }

    /// The id of a new lease.
    pub fn add(&self, open: Open) -> String {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:016x}{:016x}", self.hasher.hash_one((number, 0)), self.hasher.hash_one((number, 1)));
        let end = Instant::now() + open.longest;
        self.locked().insert(id.clone(), (open, end));
        id
    }

    /// End a lease: none if it isn't open.
    pub fn take(&self, id: &str) -> Option<Open> {
        self.locked().remove(id).map(|(open, _)| open)
    }

    /// The id of the question by which an open lease was taken, and for how long that may be sent again.
    pub fn asked_by(&self, id: &str) -> Option<(String, Duration)> {
        let all = self.locked();
        let (open, _) = all.get(id)?;
        open.request_id.clone().map(|request_id| (request_id, open.lasts))
    }

    /// Restart a lease by `renew`, and end it if that fails: whether it is held, and what it still has if not.
    ///
    /// A release of the same lease waits for it: else it would find none, and the permits would stay.
    pub fn renew(&self, id: &str, renew: impl FnOnce(&mut Open) -> bool) -> (bool, Option<Open>) {
        let mut all = self.locked();
        let Some((open, end)) = all.get_mut(id) else { return (false, None) };
        if renew(open) {
            *end = Instant::now() + open.longest;
            return (true, None);
        }
        (false, all.remove(id).map(|(open, _)| open))
    }

    /// Forget those whose time is over.
    pub fn sweep(&self) {
        let now = Instant::now();
        // A lease by the store's clock lasts up to a sixteenth longer.
        self.locked().retain(|_, (open, end)| *end + open.longest / 8 > now);
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, (Open, Instant)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(longest: Duration) -> Open {
        Open { held: Vec::new(), request_id: None, lasts: Duration::ZERO, longest }
    }

    #[test]
    fn a_lease_that_cannot_be_renewed_is_over() {
        let leases = Leases::default();
        let id = leases.add(open(Duration::from_secs(60)));
        assert!(leases.renew(&id, |_| true).0);
        assert!(matches!(leases.renew(&id, |_| false), (false, Some(_))));
        assert!(matches!(leases.renew(&id, |_| true), (false, None)));
        assert!(leases.take(&id).is_none());
    }

    #[test]
    fn a_lease_whose_time_is_over_is_forgotten() {
        let leases = Leases::default();
        let (old, new) = (leases.add(open(Duration::ZERO)), leases.add(open(Duration::from_secs(60))));
        leases.sweep();
        assert!(leases.take(&old).is_none() && leases.take(&new).is_some());
    }
}
