//! Charges of limits that Python decides: those of Redis. All else of a decision is as in the memory of a host.

use std::time::{Duration, Instant};

use crate::answers::{self, Fields};
use crate::capi::{Decision, MOST_LIMITS};
use crate::charging::Decided;
use crate::decide::{Mode, Outcome, Use, Uses, Worker};
use crate::gate::Asking;
use crate::holding::TooFew;
use crate::question::{Again, How, Once, Question, Undecided};
use crate::request::Asked;

/// What Python is to be asked about requests.
pub struct ForGate<'a> {
    uses: Uses<'a>,
    mode: Mode,
    /// The id by which a request and its retries are charged once.
    id: Option<Vec<String>>,
    /// If the question may be sent again.
    again: Option<Again>,
    since: Instant,
}

impl ForGate<'_> {
    /// It is a question that may be sent again.
    pub fn sent_as(self, again: Option<Again>) -> Self {
        ForGate { again, ..self }
    }

    /// Its time is counted from then on.
    pub fn sent_at(self, since: Instant) -> Self {
        ForGate { since, ..self }
    }
}

impl Worker {
    /// What Python is to be asked, if the requests are decided as one: or their denial by something else than a limit.
    ///
    /// The requests needn't be held meanwhile.
    pub fn for_gate<'a>(&'a self, requests: &[Asked<'_>], mode: Mode) -> Result<ForGate<'a>, Box<Outcome>> {
        let mut uses = self.uses(requests)?;
        // Permits first.
        uses.enforced.sort_by_key(|one| !self.is_held(one));
        if let (Some(one), false) = (uses.enforced.first(), matches!(mode, Mode::Hold { .. }))
            && self.is_held(one)
        {
            return Err(Box::new(answers::held(&one.rule.name).into()));
        }
        let is_once = matches!(mode, Mode::Charge | Mode::Hold { refundable: false })
            && uses.enforced.iter().chain(&uses.shadows).any(|one| one.rule.is_once);
        let id = match (requests, &self.plan.retries) {
            ([asked], Some(retries)) if is_once => retries.sent(asked),
            _ => None,
        };
        Ok(ForGate { uses, mode, id, again: None, since: Instant::now() })
    }

    /// Charge requests by one question to Python. An error says why they are refused, and charged to nothing.
    ///
    /// `size`: the bytes that they hold meanwhile.
    pub async fn charged_by_gate(&self, asking: &Asking, asked: ForGate<'_>, size: usize) -> Result<Outcome, String> {
        let ForGate { uses: Uses { enforced, shadows }, mode, id, again, since } = asked;
        let Some(charging) = &self.charging else { return Err("nobody charges its limits".to_owned()) };
        let count = enforced.len();
        // The local limits of a fallback take no more at once.
        if count > MOST_LIMITS {
            return Err(format!(
                "the request has {count} charges, and over Redis at most {MOST_LIMITS} are made at once: let fewer rules \
                 match it, or keep the limits in shm:///NAME?keys=1000000"
            ));
        }
        let mut is_first = true;
        let needs_nothing = matches!(mode, Mode::Charge | Mode::Peek | Mode::Hold { refundable: false });
        let outcome = if enforced.is_empty() && needs_nothing && again.is_none() {
            Outcome::default()
        } else {
            let size = size + enforced.iter().chain(&shadows).map(Use::size).sum::<usize>();
            let question = Question::new(charging, &enforced, how(&enforced, mode, id.as_ref()), again);
            match asking.charge(question, size, since).await {
                Err(Undecided::Unavailable) => Outcome::unavailable(),
                Err(Undecided::Refused(reason)) => Outcome { refused: Some(reason), ..Outcome::unavailable() },
                Ok(charged) => {
                    is_first = charged.is_first;
                    let lasts_ns =
                        enforced.iter().filter_map(|one| self.limit(one).concurrency).map(|(_, ns)| ns).min();
                    let lease = charged.lease.zip(lasts_ns.map(Duration::from_nanos));
                    let outcome = self.outcome_by_gate(&enforced, charged.decided, mode);
                    Outcome { charge: charged.charge, lease, ..outcome }
                }
            }
        };
        if outcome.denial.is_none() && mode != Mode::Peek && is_first {
            for one in &shadows {
                let uses = std::slice::from_ref(one);
                asking.charge_shadow(Question::new(charging, uses, how(uses, Mode::Charge, id.as_ref()), None));
            }
        }
        Ok(outcome)
    }

    fn is_held(&self, one: &Use<'_>) -> bool {
        self.limit(one).concurrency.is_some()
    }

    /// `uses`: with those of permits first.
    fn outcome_by_gate(&self, uses: &[Use<'_>], decided: Decided, mode: Mode) -> Outcome {
        let each = &decided.each;
        let never = each.iter().find(|(place, decision)| decision.allowed == 0 && uses[*place].cost > decision.limit);
        let Some(&(place, _)) = never else { return self.outcome_with_permits(uses, decided, mode) };
        // Redis wasn't asked what remains, so no field reports it.
        let one = &uses[place];
        let denial = answers::too_costly(&one.rule.denied, self.limit(one), one.cost, Fields::new());
        let decisions = each.iter().map(|(place, decision)| uses[*place].decision(*decision)).collect();
        Outcome { denial: Some(denial), decisions, ..Outcome::default() }
    }

    /// As in the memory of a host: permits deny before rates, and an admitted request reports none.
    fn outcome_with_permits(&self, uses: &[Use<'_>], decided: Decided, mode: Mode) -> Outcome {
        let first = uses.iter().take_while(|one| self.is_held(one)).count();
        let Decided { allowed, each } = decided;
        // If all allow by now, a permit has come back since the denial.
        let is_denied = |decision: &Decision| decision.allowed == 0;
        let any = first > 0 && !allowed && !each.iter().any(|(_, decision)| is_denied(decision));
        let (permits, rates): (Vec<_>, Vec<_>) = each.into_iter().partition(|(place, _)| *place < first);
        if let Some((place, decision)) = permits.iter().find(|(_, decision)| any || is_denied(decision)) {
            let too_few = TooFew::new(&uses[*place], decision.remaining, is_denied(decision) && decision.full != 0);
            return self.denied_permits(too_few);
        }
        let each = rates.into_iter().map(|(place, decision)| (place - first, decision)).collect();
        self.outcome(&uses[first..], &Decided { allowed, each }, mode)
    }
}

fn how(uses: &[Use<'_>], mode: Mode, id: Option<&Vec<String>>) -> How {
    let from = uses.iter().position(|one| one.rule.is_once);
    let once = from.map(|from| Once { from, id: id.cloned() });
    match mode {
        Mode::Peek => How::Peek,
        Mode::Book(max_delay_ns) => How::Book(max_delay_ns),
        Mode::Refundable => How::Take,
        Mode::Charge => How::Hit(once),
        // A charge that is given back would leave its retries free.
        Mode::Hold { refundable } => How::Hold { once: once.filter(|_| !refundable), refundable },
    }
}
