//! Counts of the server, for Prometheus. Each thread has its own, which it alone writes.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// The way of a question.
#[derive(Clone, Copy, Debug)]
pub enum AskedBy {
    Nginx,
    Traefik,
    Caddy,
    Envoy,
    Authorization,
    RateLimit,
    Decide,
    Peek,
    Batch,
    Reserve,
    Refund,
    Acquire,
    Renew,
    Release,
}

/// The result of a question.
#[derive(Clone, Copy)]
pub enum Result {
    Allowed,
    Denied,
    /// No rule names the entries of any descriptor.
    Unmatched,
    /// It can't be read, or the proxy is configured wrongly.
    Refused,
}

#[rustfmt::skip]
const ASKED_BY: [&str; 14] = [
    "nginx", "traefik", "caddy", "envoy", "authorization", "ratelimit", "decide", "peek", "batch", "reserve", "refund",
    "acquire", "renew", "release",
];
const RESULTS: [&str; 4] = ["allowed", "denied", "unmatched", "refused"];

#[derive(Default)]
pub struct Counts([[AtomicU64; RESULTS.len()]; ASKED_BY.len()]);

impl Counts {
    pub fn count(&self, by: AskedBy, result: Result) {
        let cell = &self.0[by as usize][result as usize];
        // No other thread writes it.
        cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// The text of all threads' counts, the questions without an answer by their reasons, if Python decides, the version of
/// live rules, and the connections.
pub fn text(all: &[Counts], unanswered: &[(&str, u64)], version: Option<u64>, open: usize, most: usize) -> String {
    let mut text = String::from(
        "# HELP forebay_server_questions_total Requests that the server was asked about.\n\
         # TYPE forebay_server_questions_total counter\n",
    );
    for (way, by) in ASKED_BY.iter().enumerate() {
        for (kind, result) in RESULTS.iter().enumerate() {
            let count: u64 = all.iter().map(|counts| counts.0[way][kind].load(Ordering::Relaxed)).sum();
            writeln!(text, "forebay_server_questions_total{{asked_by=\"{by}\",result=\"{result}\"}} {count}")
                .expect("a text takes any text");
        }
    }
    if !unanswered.is_empty() {
        text.push_str(
            "# HELP forebay_server_unanswered_total Questions that were answered by 503, as Python didn't decide them.\n\
             # TYPE forebay_server_unanswered_total counter\n",
        );
    }
    for (reason, count) in unanswered {
        writeln!(text, "forebay_server_unanswered_total{{reason=\"{reason}\"}} {count}")
            .expect("a text takes any text");
    }
    if let Some(number) = version {
        write!(
            text,
            "# HELP forebay_server_rules_version The version of live rules that the server has seen last.\n\
             # TYPE forebay_server_rules_version gauge\n\
             forebay_server_rules_version {number}\n"
        )
        .expect("a text takes any text");
    }
    write!(
        text,
        "# HELP forebay_server_connections Connections that are open.\n\
         # TYPE forebay_server_connections gauge\n\
         forebay_server_connections {open}\n\
         # HELP forebay_server_connections_limit The most connections at once.\n\
         # TYPE forebay_server_connections_limit gauge\n\
         forebay_server_connections_limit {most}\n"
    )
    .expect("a text takes any text");
    text
}
