//! Permits of concurrency limits, which a request holds until its service gives them back.

use crate::answers;
use crate::capi::{Acquired, Decision, Failure, Lease};
use crate::decide::{Outcome, Use, Worker};

/// Until permits that are held may have come back: nobody knows when. The middleware's clients wait as long.
const PERMITS_WAIT_NS: u64 = 1_000_000_000;

/// A limit that has too few permits.
pub struct TooFew<'a> {
    one: &'a Use<'a>,
    /// Permits that it has.
    available: u64,
    /// Whether the store had no room for the key.
    is_full: bool,
}

impl<'a> TooFew<'a> {
    pub fn new(one: &'a Use<'a>, available: u64, is_full: bool) -> TooFew<'a> {
        TooFew { one, available, is_full }
    }
}

/// Permits of one limit.
#[derive(Debug)]
pub struct Held {
    /// The limit's number.
    pub limit: usize,
    pub lease: Lease,
}

impl Worker {
    /// Hold permits of all these limits, or of none: then the one that has too few.
    pub fn held<'a>(&self, uses: &'a [Use<'a>]) -> Result<Result<Vec<Held>, TooFew<'a>>, Failure> {
        let mut held = Vec::new();
        for one in uses {
            match self.threads[one.limit].acquire(one.key(), one.cost) {
                Ok(Acquired::Held(lease)) => held.push(Held { limit: one.limit, lease }),
                Ok(Acquired::Denied { available, is_full }) => {
                    self.release(held);
                    return Ok(Err(TooFew::new(one, available, is_full)));
                }
                Err(failure) => {
                    self.release(held);
                    return Err(failure);
                }
            }
        }
        Ok(Ok(held))
    }

    pub fn denied_permits(&self, TooFew { one, available, is_full }: TooFew<'_>) -> Outcome {
        let limit = self.limit(one);
        if is_full {
            return answers::full(PERMITS_WAIT_NS).into();
        }
        let decision = Decision {
            limit: limit.concurrency.map_or(0, |(most, _)| most),
            remaining: available,
            retry_after_ns: PERMITS_WAIT_NS,
            reset_after_ns: PERMITS_WAIT_NS,
            ..Decision::default()
        };
        if let Some(ban) = &one.rule.ban
            && let Err(failure) = self.count_denial(ban, &one.client)
        {
            self.log(failure);
        }
        let fields = answers::rate_limit_fields([limit].into_iter(), [(limit, &decision)].into_iter());
        let denial = answers::over_limit(&one.rule.denied, limit, &[limit.shown.as_str()], fields, PERMITS_WAIT_NS);
        Outcome { denial: Some(denial), decisions: vec![one.decision(decision)], ..Outcome::default() }
    }

    /// Give permits back: whether any were still held.
    pub fn release(&self, held: Vec<Held>) -> bool {
        let mut any = false;
        for mut one in held {
            match self.threads[one.limit].release(&mut one.lease) {
                Ok(was_held) => any |= was_held,
                Err(failure) => self.log(failure),
            }
        }
        any
    }

    /// Restart leases: whether all of them have all their permits.
    pub fn renew(&self, held: &mut [Held]) -> bool {
        held.iter_mut().all(|one| match self.threads[one.limit].renew(&mut one.lease) {
            Ok(is_held) => is_held,
            Err(failure) => {
                self.log(failure);
                false
            }
        })
    }
}
