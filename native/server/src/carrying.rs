//! Where keys count after a change of live rules: the port of `forebay.rules.live.carrying`, which has the argument.

use serde::Deserialize;

use crate::capi::{Failure, Key, Thread};

/// No request has this key.
const UNSEEN: &str = "forebay: no request has this key";
/// The permits that a mark takes.
const MARK: u64 = 2;

/// The cells of a limit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Carried {
    generation: u64,
    /// From the oldest limit on.
    links: Vec<Link>,
    /// The number of the limit that has the marks; 0 without links.
    marks: usize,
}

/// A limit of before, and the one that takes its keys over, by their numbers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    source: usize,
    source_generation: u64,
    target: usize,
    target_generation: u64,
    /// The target's.
    name: String,
}

impl Carried {
    /// All limits that it uses.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        self.links.iter().flat_map(|link| [link.source, link.target]).chain([self.marks])
    }

    /// The key by which the limit counts, after the shares of former limits were brought there.
    pub fn counted(&self, threads: &[Thread], key: &Key) -> Result<Key, Failure> {
        for link in &self.links {
            link.bring(threads, &threads[self.marks], key)?;
        }
        Ok(of_generation(key, self.generation))
    }
}

fn of_generation(key: &Key, generation: u64) -> Key {
    if generation == 0 { key.clone() } else { key.behind("", Some(generation)) }
}

impl Link {
    /// Charge the key the part of the target that it has used of the source. O(1).
    fn bring(&self, threads: &[Thread], marks: &Thread, key: &Key) -> Result<(), Failure> {
        let (source, target) = (&threads[self.source], &threads[self.target]);
        let mark = key.behind(&self.name, Some(self.target_generation));
        if marks.peek(&mark, MARK)?.allowed == 0 {
            return Ok(());
        }
        let was = source.peek(&of_generation(key, self.source_generation), 0)?;
        let used = was.limit.saturating_sub(was.remaining);
        if used == 0 {
            return Ok(());
        }
        let carried = of_generation(key, self.target_generation);
        let fresh = target.peek(&Key::text(UNSEEN), 0)?;
        let part = (u128::from(used) * u128::from(fresh.limit)).div_ceil(u128::from(was.limit));
        let share = u64::try_from(part).unwrap_or(u64::MAX).min(fresh.remaining);
        let charged = target.decide(&carried, share)?;
        if charged.allowed == 0 {
            return take_up_to(target, &carried, share);
        }
        let marked = marks.decide(&mark, MARK)?;
        if marked.allowed == 0 && marked.full == 0 {
            target.refund(&carried, share, charged.charge)?;
        }
        Ok(())
    }
}

/// Charge what is left, as others have brought the share at the same time; nothing if the store has no room for the key.
fn take_up_to(target: &Thread, key: &Key, most: u64) -> Result<(), Failure> {
    loop {
        let left = target.peek(key, 0)?.remaining.min(most);
        if left == 0 {
            return Ok(());
        }
        let taken = target.decide(key, left)?;
        if taken.allowed != 0 || taken.full != 0 {
            return Ok(());
        }
    }
}
