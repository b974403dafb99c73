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
#[derive(Clone, Serialize, Deserialize)]
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

    /// Bytes of its texts and charges.
    pub fn size(&self) -> usize {
        let of_charges = self.charges.iter().map(|charge| size_of_val(charge) + charge.0.len());
        of_charges.sum::<usize>() + self.request_id.as_ref().map_or(0, String::len)
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
    pub fn charges(&self, plan: &Plan) -> Vec<Charge> {
        let numbered = self.charges.iter().filter_map(|&(ref name, hash, cost, charge)| {
            let limit = plan.limits.iter().position(|limit| limit.name == *name && limit.concurrency.is_none())?;
            Some(Charge { limit, hash, cost, charge })
        });
        numbered.collect()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;

    pub const CHARGES: Target = Target {
        name: "charges",
        seeds: &[
            br#"{"number":[7,8],"request_id":"one","charges":[["api",1,2,3]]}"#,
            b"7b226e756d626572223a5b372c385d2c22726571756573745f6964223a6e756c6c2c2263686172676573223a5b5d7d",
        ],
        check: is_written_as_it_was_read,
    };

    /// The input is a charge, or its document.
    fn is_written_as_it_was_read(data: &[u8]) -> bool {
        let hexadecimal: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
        let texts = [String::from_utf8_lossy(data).into_owned(), hexadecimal];
        let charges: Vec<Charged> = texts.iter().filter_map(|text| Charged::read(text)).collect();
        for read in &charges {
            let again = Charged::read(&read.text()).expect("a charge can be read");
            assert_eq!(
                (again.number, &again.request_id, &again.charges),
                (read.number, &read.request_id, &read.charges)
            );
        }
        !charges.is_empty()
    }
}
