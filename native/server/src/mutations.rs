//! Inputs for the tests of parsers: good ones, changed at random, and the same in each run. The fuzzer of `fuzz` finds
//! more in a longer time.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::thread;

const ROUNDS: usize = 1000;
const MOST_CHANGES: usize = 8;
const LONGEST: usize = 2048;
/// Bytes that have a meaning to some parser.
const ODD: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t \"'\\/%#?;:,=@[]{}().-+0aG";

/// Numbers that are the same in each run: how many there were.
#[derive(Default)]
struct Numbers(u64);

impl Numbers {
    /// A number below this one.
    fn below(&mut self, end: usize) -> usize {
        self.0 += 1;
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(self.0);
        (hash % end.max(1) as u64) as usize
    }

    /// A part of so many bytes: its beginning and its end.
    fn part(&mut self, size: usize) -> (usize, usize) {
        let (one, other) = (self.below(size + 1), self.below(size + 1));
        (one.min(other), one.max(other))
    }

    fn byte(&mut self) -> u8 {
        if self.below(2) == 0 { ODD[self.below(ODD.len())] } else { self.below(256) as u8 }
    }
}

/// Shows the input that a parser panics at.
struct Shown<'a>(&'a [u8]);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("input: {}", self.0.escape_ascii());
        }
    }
}

/// Check these, changed in many ways.
pub fn each(good: &[&[u8]], check: fn(&[u8]) -> bool) {
    let mut numbers = Numbers::default();
    for _ in 0..ROUNDS {
        let mut data = good[numbers.below(good.len())].to_vec();
        for _ in 0..=numbers.below(MOST_CHANGES) {
            change(&mut data, good, &mut numbers);
        }
        data.truncate(LONGEST);
        let shown = Shown(&data);
        check(shown.0);
    }
}

fn change(data: &mut Vec<u8>, good: &[&[u8]], numbers: &mut Numbers) {
    let (begin, end) = numbers.part(data.len());
    match numbers.below(6) {
        0 => drop(data.drain(begin..end)),
        1 => data.extend_from_within(begin..end),
        2 => data.truncate(end),
        3 => {
            let other = good[numbers.below(good.len())];
            let (first, last) = numbers.part(other.len());
            data.splice(begin..begin, other[first..last].iter().copied());
        }
        4 => data.insert(begin, numbers.byte()),
        _ => {
            if let Some(byte) = data.get_mut(begin) {
                *byte = numbers.byte();
            }
        }
    }
}
