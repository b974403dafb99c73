//! Charges of limits that Python decides: those of Redis. All else of a decision is as in the memory of a host.

use crate::answers::{self, Fields};
use crate::capi::{Decision, MOST_LIMITS};
use crate::charging::Decided;
use crate::decide::{Mode, Outcome, Use, Uses, Worker};
use crate::gate::{Asking, Charge};

impl Worker {
    /// Charge requests by one question to Python. An error says why they are refused, and charged to nothing.
    ///
    /// `size`: the bytes that they hold meanwhile.
    pub async fn charged_by_gate(&self, asking: &Asking, uses: Uses<'_>, size: usize) -> Result<Outcome, String> {
        let Uses { enforced, shadows } = uses;
        let count = enforced.len() + shadows.len();
        // The local limits of a fallback take no more at once.
        if count > MOST_LIMITS {
            return Err(format!(
                "the request has {count} charges, and over Redis at most {MOST_LIMITS} are made at once: send fewer \
                 descriptors"
            ));
        }
        let outcome = if enforced.is_empty() {
            Outcome::default()
        } else {
            // Each is held once more by the question.
            let size = size + enforced.iter().chain(&shadows).map(|one| 2 * one.size()).sum::<usize>();
            match asking.charge(enforced.iter().map(charge_of).collect(), size).await {
                None => Outcome::unavailable(),
                Some(each) => self.outcome_by_gate(&enforced, each),
            }
        };
        if outcome.denial.is_none() {
            for one in &shadows {
                asking.charge_shadow(charge_of(one));
            }
        }
        Ok(outcome)
    }

    fn outcome_by_gate(&self, uses: &[Use<'_>], each: Vec<(usize, Decision)>) -> Outcome {
        let never = each.iter().find(|(place, decision)| decision.allowed == 0 && uses[*place].cost > decision.limit);
        let Some(&(place, _)) = never else {
            let allowed = each.iter().all(|(_, decision)| decision.allowed != 0);
            return self.outcome(uses, &Decided { allowed, each }, Mode::Charge);
        };
        // Redis wasn't asked what remains, so no field reports it.
        let one = &uses[place];
        let denial = answers::too_costly(&one.rule.denied, self.limit(one), one.cost, Fields::new());
        let decisions = each.iter().map(|(place, decision)| uses[*place].decision(*decision)).collect();
        Outcome { denial: Some(denial), decisions, ..Outcome::default() }
    }
}

fn charge_of(one: &Use<'_>) -> Charge {
    (one.limit, one.key().clone(), one.cost)
}
