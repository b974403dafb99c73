//! The server's own parsers, each with what holds for any input.
//!
//! `cargo test` checks it for the inputs to begin with and for changed ones. A fuzzer, which coverage guides, goes on
//! from them: `ci/fuzz-server` compiles this module's tests with `--cfg fuzzing`.

use std::thread;

use crate::{access, api, charges, client, grpc, http, mutations, plan, readings};

/// A parser, for a fuzzer.
pub struct Target {
    pub name: &'static str,
    /// Inputs to begin with. The parser takes each.
    pub seeds: &'static [&'static [u8]],
    /// Whether the parser takes an input. Panics if something doesn't hold for it.
    pub check: fn(&[u8]) -> bool,
}

static TARGETS: [Target; 12] = [
    access::tests::TOKENS,
    api::tests::QUESTIONS,
    charges::tests::CHARGES,
    client::tests::CLIENTS,
    client::tests::NETWORKS,
    grpc::CHECKS,
    grpc::DESCRIPTORS,
    grpc::MESSAGES,
    http::tests::PROXIES,
    plan::tests::PATTERNS,
    plan::tests::PLANS,
    readings::tests::PATHS,
];

#[test]
fn every_parser_takes_its_seeds_and_stands_changed_ones() {
    thread::scope(|scope| {
        for target in &TARGETS {
            scope.spawn(|| {
                for seed in target.seeds {
                    assert!((target.check)(seed), "{} refuses {}", target.name, seed.escape_ascii());
                }
                mutations::each(target.seeds, target.check);
            });
        }
    });
}

/// libFuzzer's `main` runs this instead of the tests.
#[cfg(fuzzing)]
mod guided {
    use std::path::Path;
    use std::sync::LazyLock;
    use std::{env, fs, process};

    use super::{TARGETS, Target};

    /// The one that `FOREBAY_FUZZ_TARGET` names.
    static TARGET: LazyLock<&Target> = LazyLock::new(|| {
        let name = env::var("FOREBAY_FUZZ_TARGET").expect("FOREBAY_FUZZ_TARGET names a target");
        TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("{name} is no target"))
    });

    libfuzzer_sys::fuzz_target!(init: write_seeds(), |data: &[u8]| { (TARGET.check)(data); });

    /// If `FOREBAY_FUZZ_SEEDS` names a folder, write the inputs to begin with there, in a folder for each target.
    fn write_seeds() {
        let Some(folder) = env::var_os("FOREBAY_FUZZ_SEEDS") else { return };
        for target in &TARGETS {
            let folder = Path::new(&folder).join(target.name);
            fs::create_dir_all(&folder).expect("a folder can be made");
            for (number, seed) in target.seeds.iter().enumerate() {
                fs::write(folder.join(number.to_string()), seed).expect("a file can be written");
            }
        }
        process::exit(0);
    }
}
