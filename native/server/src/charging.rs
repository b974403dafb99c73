//! The charges of a request to the limits of its rules: all of them, or none.

use crate::capi::{self, Decision, Failure, MOST_LIMITS, Thread};
use crate::decide::{Mode, Use, Worker};
use crate::retries::{Id, Retries};

/// A charge of one limit, for giving it back.
#[derive(Debug)]
pub struct Charge {
    /// The limit's number.
    pub limit: usize,
    /// Of the key, as the limit hashes it.
    pub hash: u64,
    pub cost: u64,
    pub charge: u64,
}

/// How a request and its retries are charged once.
pub struct Once<'a> {
    /// To the uses from this place on, after all others.
    pub from: usize,
    /// By this id; None charges it in any case.
    pub retry: Option<(&'a Retries, Id)>,
}

/// The decisions of uses, by their places.
pub struct Decided {
    pub allowed: bool,
    pub each: Vec<(usize, Decision)>,
}

impl Worker {
    /// Charge all or none; only read their decisions to peek.
    pub fn charged(&self, uses: &[Use<'_>], mode: Mode, once: &Once<'_>) -> Result<Decided, Failure> {
        match mode {
            Mode::Peek => {
                let is_retry = once.retry.is_some_and(|(retries, id)| retries.passes(id));
                let cost = |place: usize| if is_retry && place >= once.from { 0 } else { uses[place].cost };
                let each = (0..uses.len()).map(|place| Ok((place, self.peeked(&uses[place], cost(place))?)));
                let each = each.collect::<Result<Vec<_>, _>>()?;
                Ok(Decided { allowed: each.iter().all(|(_, decision)| decision.allowed != 0), each })
            }
            Mode::Book(max_delay_ns) => {
                self.one_by_one(uses, |thread, one| thread.book(one.key(), one.cost, max_delay_ns))
            }
            Mode::Charge | Mode::Refundable | Mode::Hold { .. } if once.from < uses.len() => self.once(uses, once),
            Mode::Charge | Mode::Refundable | Mode::Hold { .. } => self.anew(uses),
        }
    }

    fn anew(&self, uses: &[Use<'_>]) -> Result<Decided, Failure> {
        // One decision takes so many. Those before are charged one by one.
        let excess = uses.len().saturating_sub(MOST_LIMITS);
        let before = self.one_by_one(&uses[..excess], |thread, one| thread.decide(one.key(), one.cost))?;
        if !before.allowed {
            return Ok(before);
        }
        let at_once = self.at_once(uses, excess);
        let mut decided = at_once.inspect_err(|_| self.give_back(uses, &before.each))?;
        if decided.allowed {
            decided.each.extend(before.each);
        } else {
            self.give_back(uses, &before.each);
        }
        Ok(decided)
    }

    /// The uses that are charged once are never given back: an earlier request may have been handled by their charge.
    fn once(&self, uses: &[Use<'_>], once: &Once<'_>) -> Result<Decided, Failure> {
        let before = self.one_by_one(&uses[..once.from], |thread, one| thread.decide(one.key(), one.cost))?;
        if !before.allowed {
            return Ok(before);
        }
        let last = &uses[once.from..];
        let charged = match once.retry {
            None => self.anew(last).map(Some),
            Some((retries, id)) => retries.once(id, || self.anew(last).map(|decided| (decided.allowed, decided))),
        };
        let decided = charged.and_then(|charged| match charged {
            Some(decided) => Ok(decided),
            None => {
                let each = last.iter().enumerate().map(|(place, one)| Ok((place, self.peeked(one, 0)?)));
                Ok(Decided { allowed: true, each: each.collect::<Result<_, _>>()? })
            }
        });
        let Decided { allowed, each } = decided.inspect_err(|_| self.give_back(uses, &before.each))?;
        let each = each.into_iter().map(|(place, decision)| (once.from + place, decision));
        if allowed {
            return Ok(Decided { allowed, each: before.each.into_iter().chain(each).collect() });
        }
        self.give_back(uses, &before.each);
        Ok(Decided { allowed, each: each.collect() })
    }

    fn peeked(&self, one: &Use<'_>, cost: u64) -> Result<Decision, Failure> {
        self.threads[one.limit].peek(one.key(), cost)
    }

    /// Those before are given back if a later one denies or fails.
    fn one_by_one(
        &self,
        uses: &[Use<'_>],
        charge: impl Fn(&Thread, &Use<'_>) -> Result<Decision, Failure>,
    ) -> Result<Decided, Failure> {
        let mut each = Vec::new();
        for (place, one) in uses.iter().enumerate() {
            let decision = charge(&self.threads[one.limit], one).inspect_err(|_| self.give_back(uses, &each))?;
            if decision.allowed == 0 {
                self.give_back(uses, &each);
                return Ok(Decided { allowed: false, each: vec![(place, decision)] });
            }
            each.push((place, decision));
        }
        Ok(Decided { allowed: true, each })
    }

    /// The uses from this place on.
    fn at_once(&self, uses: &[Use<'_>], first: usize) -> Result<Decided, Failure> {
        if let [one] = &uses[first..] {
            let decision = self.threads[one.limit].decide(one.key(), one.cost)?;
            return Ok(Decided { allowed: decision.allowed != 0, each: vec![(first, decision)] });
        }
        let parts: Vec<_> = uses[first..].iter().map(|one| (&self.threads[one.limit], one.key(), one.cost)).collect();
        let (allowed, each) = capi::decide_all(&parts)?;
        Ok(Decided { allowed, each: (first..).zip(each).collect() })
    }

    fn give_back(&self, uses: &[Use<'_>], charged: &[(usize, Decision)]) {
        for (place, decision) in charged.iter().rev() {
            let one = &uses[*place];
            if let Err(failure) = self.threads[one.limit].refund(one.key(), one.cost, decision.charge) {
                self.log(failure);
            }
        }
    }

    /// The charges of these uses, which were allowed.
    pub fn charges(&self, uses: &[Use<'_>], decided: &Decided) -> Vec<Charge> {
        let charge = |(place, decision): &(usize, Decision)| {
            let one = &uses[*place];
            let hash = self.plan.limiters[one.limit].hash(one.key());
            Charge { limit: one.limit, hash, cost: one.cost, charge: decision.charge }
        };
        decided.each.iter().map(charge).collect()
    }

    /// Give charges back.
    pub fn refund(&self, charges: &[Charge]) -> Result<(), String> {
        let mut result = Ok(());
        for one in charges.iter().rev() {
            if let Err(failure) = self.threads[one.limit].refund_hash(one.hash, one.cost, one.charge) {
                result = Err(self.plan.core.message(failure));
            }
        }
        result
    }
}
