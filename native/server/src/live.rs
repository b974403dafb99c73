//! Rules that change while the server runs: a plan for each version.
//!
//! A thread compares the version at each request, as the host's workers do. The first one that finds another makes its
//! plan, by Python, and others wait for that: so the request that finds a version is decided by it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::capi::Word;
use crate::plan::Plan;

/// Makes the plan of the version in force: its number, and the plan unless it can't be used.
type Make = Box<dyn Fn() -> Option<(u64, Option<Arc<Plan>>)> + Send + Sync>;

/// The versions of the rules.
pub struct Versions {
    /// The number of the version in force.
    word: Word,
    make: Make,
    /// The last version that was looked at, and the last good plan.
    latest: Mutex<(u64, Arc<Plan>)>,
}

impl Versions {
    pub fn new(word: Word, make: Make, number: u64, plan: Arc<Plan>) -> Versions {
        Versions { word, make, latest: Mutex::new((number, plan)) }
    }

    pub fn number(&self) -> u64 {
        self.word.load()
    }

    /// The version that was looked at last.
    pub fn seen(&self) -> u64 {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// The plan to decide by now, and the version that it is for. Takes the GIL if there is another version.
    pub fn latest(&self) -> (u64, Arc<Plan>) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.0 != self.number()
            && let Some((number, plan)) = (self.make)()
        {
            latest.0 = number;
            if let Some(plan) = plan {
                latest.1 = plan;
            }
        }
        (latest.0, Arc::clone(&latest.1))
    }
}
