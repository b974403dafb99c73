//! Charges as text: what a service sends back to give them back.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::charging::Charge;
use crate::plan::Plan;

/// When a charge was made, in nanoseconds, and its number in its server: no two charges have the same.
pub type Number = (u64, u64);

/// Limits are named, as their numbers are those of one version of the rules. Keys are hashes: a key may be longer than a
/// question.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Charged {
    pub number: Number,
    /// The id of the question that was charged.
    pub request_id: Option<String>,
    charges: Vec<(String, u64, u64, u64)>,
}

impl Charged {
    pub fn new(plan: &Plan, charges: Vec<Charge>, request_id: Option<String>) -> Charged {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let time_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let charges =
            charges.into_iter().map(|one| (plan.limits[one.limit].name.clone(), one.hash, one.cost, one.charge));
        Charged { number: (time_ns, number), request_id, charges: charges.collect() }
    }

    /// Hexadecimal digits, so that nobody takes it for a document.
    pub fn text(&self) -> String {
        let document = serde_json::to_vec(self).unwrap_or_default();
        document.iter().fold(String::with_capacity(2 * document.len()), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a text takes any text");
            text
        })
    }

    pub fn read(text: &str) -> Option<Charged> {
        let digits: Option<Vec<u32>> = text.chars().map(|digit| digit.to_digit(16)).collect();
        let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
        let document: Vec<u8> = digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect();
        serde_json::from_slice(&document).ok()
    }

    /// With the numbers that the limits have in the plan; those that it doesn't have any more are left out.
    pub fn charges(self, plan: &Plan) -> Vec<Charge> {
        let numbered = self.charges.into_iter().filter_map(|(name, hash, cost, charge)| {
            let limit = plan.limits.iter().position(|limit| limit.name == name && limit.concurrency.is_none())?;
            Some(Charge { limit, hash, cost, charge })
        });
        numbered.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutations;

    #[test]
    fn any_text_is_a_charge_or_none() {
        let charged =
            Charged { number: (7, 8), request_id: Some("one".to_owned()), charges: vec![("api".to_owned(), 1, 2, 3)] };
        let text = charged.text();
        let document = serde_json::to_vec(&charged).unwrap();
        mutations::each(&[text.as_bytes(), &document], |data| {
            let hexadecimal: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
            for text in [String::from_utf8_lossy(data).into_owned(), hexadecimal] {
                // It is written as it was read.
                if let Some(read) = Charged::read(&text) {
                    assert_eq!(Charged::read(&read.text()).unwrap().text(), read.text());
                }
            }
        });
        assert!(Charged::read(&text).is_some());
    }
}
