//! Charges of limits that Python decides: those of Redis. All else of a decision is as in the memory of a host.

use crate::answers::{self, Fields};
use crate::capi::MOST_LIMITS;
use crate::charging::Decided;
use crate::decide::{Mode, Outcome, Use, Uses, Worker};
use crate::gate::{Asking, How, Once, Question};
use crate::request::Asked;

/// What Python is to be asked about requests.
pub struct ForGate<'a> {
    uses: Uses<'a>,
    mode: Mode,
    /// The id by which a request and its retries are charged once.
    id: Option<Vec<String>>,
}

impl Worker {
    /// What Python is to be asked, if the requests are decided as one: or their denial by something else than a limit.
    ///
    /// The requests needn't be held meanwhile.
    pub fn for_gate<'a>(&'a self, requests: &[Asked<'_>], mode: Mode) -> Result<ForGate<'a>, Box<Outcome>> {
        let uses = self.uses(requests)?;
        let is_once = mode == Mode::Charge && uses.enforced.iter().chain(&uses.shadows).any(|one| one.rule.is_once);
        let id = match (requests, &self.plan.retries) {
            ([asked], Some(retries)) if is_once => retries.sent(asked),
            _ => None,
        };
        Ok(ForGate { uses, mode, id })
    }

    /// Charge requests by one question to Python. An error says why they are refused, and charged to nothing.
    ///
    /// `size`: the bytes that they hold meanwhile.
    pub async fn charged_by_gate(&self, asking: &Asking, asked: ForGate<'_>, size: usize) -> Result<Outcome, String> {
        let ForGate { uses: Uses { enforced, shadows }, mode, id } = asked;
        let Some(charging) = &self.charging else { return Err("nobody charges its limits".to_owned()) };
        let count = enforced.len();
        // The local limits of a fallback take no more at once.
        if count > MOST_LIMITS {
            return Err(format!(
                "the request has {count} charges, and over Redis at most {MOST_LIMITS} are made at once: let fewer rules \
                 match it, or keep the limits in shm:///NAME?keys=1000000"
            ));
        }
        let outcome = if enforced.is_empty() && matches!(mode, Mode::Charge | Mode::Peek) {
            Outcome::default()
        } else {
            let size = size + enforced.iter().chain(&shadows).map(Use::size).sum::<usize>();
            match asking.charge(Question::new(charging, &enforced, how(&enforced, mode, id.as_ref())), size).await {
                None => Outcome::unavailable(),
                Some((decided, charge)) => Outcome { charge, ..self.outcome_by_gate(&enforced, &decided, mode) },
            }
        };
        if outcome.denial.is_none() && mode != Mode::Peek {
            for one in &shadows {
                let uses = std::slice::from_ref(one);
                asking.charge_shadow(Question::new(charging, uses, how(uses, Mode::Charge, id.as_ref())));
            }
        }
        Ok(outcome)
    }

    fn outcome_by_gate(&self, uses: &[Use<'_>], decided: &Decided, mode: Mode) -> Outcome {
        let each = &decided.each;
        let never = each.iter().find(|(place, decision)| decision.allowed == 0 && uses[*place].cost > decision.limit);
        let Some(&(place, _)) = never else { return self.outcome(uses, decided, mode) };
        // Redis wasn't asked what remains, so no field reports it.
        let one = &uses[place];
        let denial = answers::too_costly(&one.rule.denied, self.limit(one), one.cost, Fields::new());
        let decisions = each.iter().map(|(place, decision)| uses[*place].decision(*decision)).collect();
        Outcome { denial: Some(denial), decisions, ..Outcome::default() }
    }
}

fn how(uses: &[Use<'_>], mode: Mode, id: Option<&Vec<String>>) -> How {
    match mode {
        Mode::Peek => How::Peek,
        Mode::Book(max_delay_ns) => How::Book(max_delay_ns),
        Mode::Refundable => How::Take,
        Mode::Charge | Mode::Hold => {
            let from = uses.iter().position(|one| one.rule.is_once);
            How::Hit(from.map(|from| Once { from, id: id.cloned() }))
        }
    }
}
