//! Inputs for the tests of parsers: good ones, changed at random. A parser may refuse each, and must end.
//!
//! `FOREBAY_FUZZ_ROUNDS` and `FOREBAY_FUZZ_SEED` run more of them, and others.

use std::env;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::thread;

const ROUNDS: u64 = 4000;
const MOST_CHANGES: usize = 8;
const LONGEST: usize = 512;
/// Bytes that have a meaning to some parser.
const ODD: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t \"'\\/%#?;:,=@[]{}().-+0aG";

/// Numbers that are the same in each run.
struct Numbers {
    seed: u64,
    count: u64,
}

impl Numbers {
    /// A number below this one.
    fn below(&mut self, end: usize) -> usize {
        self.count += 1;
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one((self.seed, self.count));
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

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Parse each of these, and many changed ones.
pub fn each(good: &[&[u8]], mut parse: impl FnMut(&[u8])) {
    good.iter().for_each(|data| parse(data));
    let mut numbers = Numbers { seed: number("FOREBAY_FUZZ_SEED", 1), count: 0 };
    for _ in 0..number("FOREBAY_FUZZ_ROUNDS", ROUNDS) {
        let mut data = good[numbers.below(good.len())].to_vec();
        for _ in 0..=numbers.below(MOST_CHANGES) {
            change(&mut data, good, &mut numbers);
        }
        data.truncate(LONGEST);
        let shown = Shown(&data);
        parse(shown.0);
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
