//! Which charges were given back. Each server remembers its own.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::charges::Number;

/// Charges that are remembered.
const MOST: usize = 1 << 18;

/// The charges that were given back. All threads use it.
#[derive(Default)]
pub struct Refunds(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// The newest of those that were given back.
    given_back: BTreeSet<Number>,
    /// Charges up to this one may have been given back: they are forgotten.
    forgotten: Option<Number>,
}

impl Refunds {
    /// Give a charge back by `give_back`, unless it was given back before: whether it was now. Others wait for it.
    ///
    /// An error if the charge is so old that nobody knows, and that of `give_back`.
    pub fn once(&self, charge: Number, give_back: impl FnOnce() -> Result<(), String>) -> Result<bool, String> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.forgotten.is_some_and(|last| charge <= last) {
            return Err("that charge is too old: the server has forgotten whether it was given back".to_owned());
        }
        if known.given_back.contains(&charge) {
            return Ok(false);
        }
        give_back()?;
        known.given_back.insert(charge);
        if known.given_back.len() > MOST {
            known.forgotten = known.given_back.pop_first();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_is_given_back_once_however_many_others_are() {
        let refunds = Refunds::default();
        for number in 0..MOST as u64 + 10 {
            assert_eq!(refunds.once((number, 0), || Ok(())), Ok(true));
        }
        for number in [0, 9, 10, MOST as u64 + 9] {
            assert_ne!(refunds.once((number, 0), || Ok(())), Ok(true), "{number} was given back twice");
        }
    }

    #[test]
    fn a_charge_that_could_not_be_given_back_is_tried_again() {
        let refunds = Refunds::default();
        assert!(refunds.once((1, 0), || Err("no store".to_owned())).is_err());
        assert_eq!(refunds.once((1, 0), || Ok(())), Ok(true));
    }
}
