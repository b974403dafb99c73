//! The responses to denied requests, and the fields of all: as `forebay.web.answers` and `forebay.web.header_fields`
//! write them.

use std::fmt::Write;

use hyper::header::{HeaderName, HeaderValue};
use serde::Deserialize;

use crate::capi::Decision;
use crate::carrying::Carried;

const NS: u64 = 1_000_000_000;
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const UNAVAILABLE: &str = "The limits of this service can't be checked at the moment";
const FULL: &str = "This service has no room to count another client's requests at the moment";
const UNKNOWN: &str = "The limits of this service can't be checked, as its server doesn't report the client's address.";
/// Seconds until a store that fails is asked again.
const STORE_WAIT_S: u64 = 1;

/// Bytes of an item of `RateLimit`; a longer one takes more.
const USUAL_ITEM: usize = 64;

/// A limit, as fields and reports name it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    pub name: String,
    /// As reports of violated policies name it: ASCII.
    pub shown: String,
    /// Its item of `RateLimit-Policy`.
    policy: String,
    /// The beginning of its item of `RateLimit`.
    prefix: String,
    /// What it allows, for people.
    allowance: String,
    /// The permits that come back one by one, and the time in which that many do; None if they come back at once.
    refill: Option<(u64, u64)>,
    /// The permits of its rate, and the time in nanoseconds for which they are; None of a concurrency limit.
    pub rate: Option<(u64, u64)>,
    /// Whether it can't take back a charge behind which others already stand, so it is charged last.
    pub is_last: bool,
    /// If permits are held: how many at most, and for how long without a renewal.
    pub concurrency: Option<(u64, u64)>,
    /// Of live rules that have changed.
    pub carried: Option<Carried>,
}

impl Limit {
    /// Whether it uses a limit with this number or a higher one.
    pub fn names_any_from(&self, count: usize) -> bool {
        self.carried.as_ref().is_some_and(|carried| carried.numbers().any(|number| number >= count))
    }

    /// When more is allowed than now. Never too early, by rounding up. 0 if that is unknown.
    pub fn next_after_ns(&self, decision: &Decision) -> u64 {
        if self.concurrency.is_some() {
            // Nobody knows.
            return 0;
        }
        let Some((permits, period_ns)) = self.refill else {
            return if decision.allowed == 0 { decision.retry_after_ns } else { decision.reset_after_ns };
        };
        if decision.allowed == 0 {
            return decision.retry_after_ns;
        }
        if decision.remaining >= decision.limit {
            return 0;
        }
        // After the next permit, the others come back until the key is as good as fresh.
        let others = u128::from(decision.limit - decision.remaining - 1);
        let others_ns = others * u128::from(period_ns) / u128::from(permits.max(1));
        decision.reset_after_ns.saturating_sub(u64::try_from(others_ns).unwrap_or(u64::MAX))
    }
}

/// The response of a rule or a deny list to a denied request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Denied {
    pub status: u16,
    /// The type of a problem report.
    kind: String,
    title: String,
    /// Sent instead of the report.
    answer: Option<OwnAnswer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnAnswer {
    fields: Fields,
    body: String,
}

pub type Fields = Vec<(String, String)>;

impl Denied {
    /// Refuses what can't be sent, or what a proxy would take for a permission.
    pub fn checked(self) -> Result<Denied, String> {
        if !(400..600).contains(&self.status) {
            return Err(format!("a response with status {} would admit the request", self.status));
        }
        for (name, value) in self.answer.iter().flat_map(|own| &own.fields) {
            field(name, value).ok_or_else(|| format!("the header field {name:?} can't have the value {value:?}"))?;
        }
        Ok(self)
    }

    /// The response, with a report if the rule has no text of its own. `wait_s`: None if asking again doesn't help.
    pub fn answer(&self, detail: &str, violated: Option<&[&str]>, fields: Fields, wait_s: Option<u64>) -> Answer {
        let Some(own) = &self.answer else {
            return problem(self.status, &self.kind, &self.title, detail, violated, fields, wait_s);
        };
        let fields = own.fields.iter().cloned().chain(fields).chain(retry_after(wait_s)).collect();
        Answer { status: self.status, fields, body: own.body.clone(), wait_s }
    }
}

/// A header field as it is sent, in Latin-1; None if it can't be.
pub fn field(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let bytes: Option<Vec<u8>> = value.chars().map(|one| u8::try_from(u32::from(one)).ok()).collect();
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_bytes(&bytes?).ok()?))
}

/// A whole response.
#[derive(Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub fields: Fields,
    pub body: String,
    /// Seconds after which the client may ask again.
    pub wait_s: Option<u64>,
}

/// A problem report (RFC 9457), with the spaces of Python's `json`.
fn problem(
    status: u16,
    kind: &str,
    title: &str,
    detail: &str,
    violated: Option<&[&str]>,
    fields: Fields,
    wait_s: Option<u64>,
) -> Answer {
    let mut body = format!(
        "{{\"type\": {}, \"title\": {}, \"status\": {status}, \"detail\": {}",
        quoted(kind),
        quoted(title),
        quoted(detail)
    );
    if let Some(names) = violated {
        let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
        write!(body, ", \"violated-policies\": [{}]", names.join(", ")).expect("a text takes any text");
    }
    body.push('}');
    let own = [("Content-Type", "application/problem+json"), ("Cache-Control", "no-store")];
    let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Answer { status, fields: own.into_iter().chain(fields).chain(retry_after(wait_s)).collect(), body, wait_s }
}

/// Text in JSON; characters beyond ASCII as Python's `json` escapes them.
fn quoted(text: &str) -> String {
    let plain = serde_json::Value::from(text).to_string();
    let mut escaped = String::with_capacity(plain.len());
    for character in plain.chars() {
        if character.is_ascii() && character != '\x7f' {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(escaped, "\\u{unit:04x}").expect("a text takes any text");
            }
        }
    }
    escaped
}

fn retry_after(wait_s: Option<u64>) -> Option<(String, String)> {
    wait_s.map(|seconds| ("Retry-After".to_owned(), seconds.to_string()))
}

fn again(wait_s: u64) -> String {
    format!("ask again in {wait_s} second{}", if wait_s == 1 { "" } else { "s" })
}

/// The limits could not be checked.
pub fn unavailable() -> Answer {
    let detail = format!("{UNAVAILABLE}: {}.", again(STORE_WAIT_S));
    problem(503, REDUCED_CAPACITY, "Service Unavailable", &detail, None, Fields::new(), Some(STORE_WAIT_S))
}

/// The store has no room for another key, and denies new ones.
pub fn full(wait_ns: u64) -> Answer {
    let wait_s = wait_ns.div_ceil(NS);
    let detail = format!("{FULL}: {}.", again(wait_s));
    problem(503, REDUCED_CAPACITY, "Service Unavailable", &detail, None, Fields::new(), Some(wait_s))
}

/// Nothing says who the client is.
pub fn unknown() -> Answer {
    problem(500, "about:blank", "Internal Server Error", UNKNOWN, None, Fields::new(), None)
}

/// A rule holds permits until its request ends, and the question doesn't hold any.
pub fn held(rule: &str) -> Answer {
    let detail =
        format!("The rule {rule:?} holds permits until a request ends: call /v1/acquire, and then /v1/release.");
    problem(500, "about:blank", "Internal Server Error", &detail, None, Fields::new(), None)
}

/// The server can't decide the request, and an operator has to know why.
pub fn undecided(reason: &str) -> Answer {
    let detail = format!("The limits of this service can't be checked: {reason}.");
    problem(500, "about:blank", "Internal Server Error", &detail, None, Fields::new(), None)
}

/// By a limit that waits so long.
pub fn over_limit(denied: &Denied, limit: &Limit, violated: &[&str], fields: Fields, wait_ns: u64) -> Answer {
    let wait_s = wait_ns.div_ceil(NS).max(1);
    let detail = format!("The limit is {}: {}.", limit.allowance, again(wait_s));
    denied.answer(&detail, Some(violated), fields, Some(wait_s))
}

/// By a limit that never allows so much at once.
pub fn too_costly(denied: &Denied, limit: &Limit, cost: u64, fields: Fields) -> Answer {
    let detail = format!("The limit is {}: {cost} at once are never allowed.", limit.allowance);
    denied.answer(&detail, Some(&[limit.shown.as_str()]), fields, None)
}

/// By a ban that lasts so long.
pub fn banned(denied: &Denied, ban: &str, wait_ns: u64) -> Answer {
    let wait_s = wait_ns.div_ceil(NS).max(1);
    let detail = format!("Too many requests were denied: {}.", again(wait_s));
    denied.answer(&detail, Some(&[ban]), Fields::new(), Some(wait_s))
}

/// `RateLimit-Policy` of all limits of a request, and `RateLimit` of decisions about some of them
/// (draft-ietf-httpapi-ratelimit-headers-10).
pub fn rate_limit_fields<'a>(
    all: impl Iterator<Item = &'a Limit>,
    decided: impl Iterator<Item = (&'a Limit, &'a Decision)>,
) -> Fields {
    let mut policies = String::new();
    for limit in all {
        begin_item(&mut policies);
        policies.push_str(&limit.policy);
    }
    let mut items = String::with_capacity(USUAL_ITEM);
    for (limit, decision) in decided {
        begin_item(&mut items);
        write!(items, "{}{}", limit.prefix, decision.remaining).expect("a text takes any text");
        let wait_s = limit.next_after_ns(decision).div_ceil(NS);
        if wait_s > 0 {
            write!(items, ";t={wait_s}").expect("a text takes any text");
        }
    }
    vec![("RateLimit-Policy".to_owned(), policies), ("RateLimit".to_owned(), items)]
}

fn begin_item(list: &mut String) {
    if !list.is_empty() {
        list.push_str(", ");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_as_python_does() {
        assert_eq!(quoted("a\"\u{e9}\u{1f600}"), r#""a\"\u00e9\ud83d\ude00""#);
    }

    #[test]
    fn an_answer_that_looks_like_success_is_refused() {
        let denied = Denied { status: 200, kind: String::new(), title: String::new(), answer: None };
        assert!(denied.checked().is_err());
    }
}
