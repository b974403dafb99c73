//! Rules that change while the server runs: a plan for each version.
//!
//! A thread compares the version at each request, as the host's workers do. The first one that finds another makes its
//! plan, by Python, and others wait for that: so the request that finds a version is decided by it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use crate::capi::Word;
use crate::decide::{Rules, Worker};
use crate::report::report;

/// Makes the rules of the version in force: its number, and the rules unless they can't be used.
type Make = Box<dyn Fn() -> Option<(u64, Option<Rules>)> + Send + Sync>;

/// The versions of the rules.
pub struct Versions {
    /// The number of the version in force.
    word: Word,
    make: Make,
    /// The last version that was looked at, and the last good rules.
    latest: Mutex<(u64, Rules)>,
}

impl Versions {
    pub fn new(word: Word, make: Make, number: u64, rules: Rules) -> Versions {
        Versions { word, make, latest: Mutex::new((number, rules)) }
    }

    pub fn number(&self) -> u64 {
        self.word.load()
    }

    /// The version that was looked at last.
    pub fn seen(&self) -> u64 {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// The rules to decide by now, and the version that they are of. Takes the GIL if there is another version.
    pub fn latest(&self) -> (u64, Rules) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.0 != self.number()
            && let Some((number, rules)) = (self.make)()
        {
            latest.0 = number;
            if let Some(rules) = rules {
                latest.1 = rules;
            }
        }
        latest.clone()
    }
}

/// A thread's handles for the version in force.
pub struct Following {
    versions: Option<Arc<Versions>>,
    worker: RefCell<Rc<Worker>>,
    /// The version that it decides by.
    version: Cell<u64>,
}

impl Following {
    pub fn new(worker: Worker, versions: Option<Arc<Versions>>) -> Following {
        // It takes over the version in force at its first request.
        Following { versions, worker: RefCell::new(Rc::new(worker)), version: Cell::new(0) }
    }

    /// Decides by the rules in force. A request is decided by those of one version.
    pub fn worker(&self) -> Rc<Worker> {
        if let Some(versions) = &self.versions
            && versions.number() != self.version.get()
        {
            let (number, rules) = versions.latest();
            self.follow(number, &rules);
        }
        Rc::clone(&self.worker.borrow())
    }

    fn follow(&self, number: u64, rules: &Rules) {
        if !Arc::ptr_eq(&self.worker.borrow().plan, &rules.plan) {
            match Worker::new(rules) {
                Ok(worker) => *self.worker.borrow_mut() = Rc::new(worker),
                Err(failure) => {
                    report(&format!("new rules can't be put in force: {}", rules.plan.core.message(failure)));
                    return;
                }
            }
        }
        self.version.set(number);
    }
}
