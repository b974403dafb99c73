//! Messages to the operator, on the standard error, and texts of others in messages.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Write one line. A standard error that nobody reads any more is no reason to stop: `eprintln!` would panic.
pub fn report(text: &str) {
    let _ = writeln!(io::stderr(), "forebay: {text}");
}

/// Between two reports of one kind.
const EVERY: Duration = Duration::from_secs(60);

/// Reports of one kind, which clients could cause at any rate: one a minute, with the number of the others.
#[derive(Default)]
pub struct Seldom(Mutex<Told>);

#[derive(Default)]
struct Told {
    last: Option<Instant>,
    others: u64,
}

impl Seldom {
    pub const fn new() -> Seldom {
        Seldom(Mutex::new(Told { last: None, others: 0 }))
    }

    pub fn report(&self, text: impl FnOnce() -> String) {
        if let Some(others) = self.due() {
            let more = if others == 0 { String::new() } else { format!(" ({others} more since the last report)") };
            report(&format!("{}{more}", text()));
        }
    }

    /// How many were left out since the last report; None if this one is to be left out.
    fn due(&self) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.last.is_some_and(|at| at.elapsed() < EVERY) {
            told.others += 1;
            return None;
        }
        told.last = Some(Instant::now());
        Some(std::mem::take(&mut told.others))
    }
}

/// A question that is refused, by which the operator learns that a proxy or the rule file is configured wrongly: the
/// proxy passes the reason on to nobody.
pub fn report_refused(reason: &str) {
    static REPORTS: Seldom = Seldom::new();
    REPORTS.report(|| format!("a proxy's question was refused: {reason}"));
}

/// Characters of such a text.
const MOST_SHOWN: usize = 80;

/// The beginning of a text, in quotes. A client may choose it, and a status with a long one reaches nobody.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(MOST_SHOWN) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_one_kind_are_counted() {
        let seldom = Seldom::new();
        assert_eq!([seldom.due(), seldom.due(), seldom.due()], [Some(0), None, None]);
        seldom.0.lock().unwrap().last = None;
        assert_eq!([seldom.due(), seldom.due()], [Some(2), None]);
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(shown("a\n"), r#""a\n""#);
        assert_eq!(shown(&"\u{e9}".repeat(1000)), format!("\"{}\"...", "\u{e9}".repeat(MOST_SHOWN)));
    }
}
