//! `envoy.service.ratelimit.v3.RateLimitService`: descriptors, which `entries` maps to rules.

use std::borrow::Cow;
use std::fmt::Write;
use std::net::IpAddr;

use hyper::header::HeaderName;
use tonic::Status;

use super::messages::fields_of;
use super::messages::ratelimit::{
    Code, DescriptorStatus, Duration, RateLimit, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, Unit,
};
use crate::answers::Limit;
use crate::client::as_address;
use crate::decide::{LimitDecision, Mode, Outcome};
use crate::entries::{self, Entries};
use crate::gated::Gated;
use crate::http::{Answering, Serving, trusted};
use crate::metrics::{self, AskedBy};
use crate::plan::Plan;
use crate::question::PIECE;
use crate::readings::{self, Readings};
use crate::report::{report_refused, shown};
use crate::request::{Asked, Origin};

const NS: u64 = 1_000_000_000;
/// Descriptors of a request: Envoy sends at most one for each rate limit of its configuration.
const MOST_DESCRIPTORS: usize = 64;
/// Entries of a descriptor: at most one for each action of a rate limit.
const MOST_ENTRIES: usize = 64;
const UNITS: [(u64, Unit); 5] = [
    (604_800 * NS, Unit::Week),
    (86_400 * NS, Unit::Day),
    (3600 * NS, Unit::Hour),
    (60 * NS, Unit::Minute),
    (NS, Unit::Second),
];

pub fn should_rate_limit(
    answering: &Answering,
    peer: Option<IpAddr>,
    asked: &RateLimitRequest,
) -> Result<RateLimitResponse, Status> {
    let worker = answering.worker();
    let plan = &worker.plan;
    let decided = described(plan, peer, asked)
        .map(|each| worker.decide_together(&requests(&each, plan, asked.hits_addend), Mode::Charge));
    answered(&answering.serving, answering.number, plan, asked, decided)
}

/// As `should_rate_limit`, by limits that Python charges. `size`: the bytes of the call.
pub async fn should_rate_limit_by_gate(
    gated: &Gated,
    peer: Option<IpAddr>,
    asked: &RateLimitRequest,
    size: usize,
) -> Result<RateLimitResponse, Status> {
    let worker = gated.following.worker();
    let plan = &worker.plan;
    // What is described isn't held while Python is asked.
    let matched = described(plan, peer, asked)
        .map(|each| worker.for_gate(&requests(&each, plan, asked.hits_addend), Mode::Charge));
    let decided = match matched {
        Err(status) => Err(status),
        Ok(Err(denied)) => Ok(*denied),
        Ok(Ok(matched)) => {
            let entries: usize = asked.descriptors.iter().map(|one| one.entries.len() + 1).sum();
            let outcome = worker.charged_by_gate(&gated.asking, matched, size + entries * PIECE).await;
            outcome.map_err(|reason| Status::invalid_argument(format!("{reason}; or send fewer descriptors")))
        }
    };
    answered(&gated.serving, gated.number, plan, asked, decided)
}

fn answered(
    serving: &Serving,
    number: usize,
    plan: &Plan,
    asked: &RateLimitRequest,
    decided: Result<Outcome, Status>,
) -> Result<RateLimitResponse, Status> {
    serving.count(
        number,
        AskedBy::RateLimit,
        match &decided {
            Err(status) => {
                report_refused(status.message());
                metrics::Result::Refused
            }
            Ok(Outcome { denial: Some(_), .. }) => metrics::Result::Denied,
            Ok(outcome) if outcome.decisions.is_empty() => metrics::Result::Unmatched,
            Ok(_) => metrics::Result::Allowed,
        },
    );
    let outcome = decided?;
    if outcome.has_failed {
        return Err(Status::unavailable("the limits can't be checked"));
    }
    Ok(response(&plan.limits, asked.descriptors.len(), outcome))
}

/// What the descriptors describe; an error if the request can't be read, or if its proxy is configured wrongly.
fn described<'a>(plan: &Plan, peer: Option<IpAddr>, asked: &'a RateLimitRequest) -> Result<Vec<Described<'a>>, Status> {
    trusted(plan.client.as_ref(), peer).map_err(Status::permission_denied)?;
    let domain = &plan.domain;
    if asked.domain != *domain {
        return Err(Status::not_found(format!(
            "the domain is {domain:?}, as the rule file is named, and not {}: rename one of them",
            shown(&asked.domain)
        )));
    }
    if asked.descriptors.is_empty() || asked.descriptors.len() > MOST_DESCRIPTORS {
        return Err(Status::invalid_argument(format!("a request has 1 to {MOST_DESCRIPTORS} descriptors")));
    }
    asked.descriptors.iter().map(Described::new).collect()
}

fn requests<'a>(each: &'a [Described<'a>], plan: &'a Plan, hits: u32) -> Vec<Asked<'a>> {
    each.iter().map(|one| one.asked(plan, u64::from(hits.max(1)))).collect()
}

/// What the entries of a descriptor describe.
#[derive(Default)]
struct Described<'a> {
    entries: Entries<'a>,
    path: Option<&'a str>,
    method: Option<&'a str>,
    address: Option<IpAddr>,
    hits: Option<u64>,
}

impl<'a> Described<'a> {
    fn new(descriptor: &'a RateLimitDescriptor) -> Result<Described<'a>, Status> {
        if descriptor.limit.is_some() {
            return Err(Status::unimplemented("the rule file has the limits: send a descriptor without a limit"));
        }
        if descriptor.is_negative_hits {
            return Err(Status::unimplemented("the server takes no hits back: leave is_negative_hits out"));
        }
        if descriptor.entries.len() > MOST_ENTRIES {
            return Err(Status::invalid_argument(format!("a descriptor has at most {MOST_ENTRIES} entries")));
        }
        let mut described = Described { hits: descriptor.hits_addend, ..Described::default() };
        for entry in &descriptor.entries {
            let value = entry.value.as_str();
            let is_repeated = match entry.key.as_str() {
                entries::PATH => described.path.replace(value).is_some(),
                entries::METHOD => described.method.replace(value).is_some(),
                entries::ADDRESS => {
                    let none = || Status::invalid_argument(format!("the remote_address {} is none", shown(value)));
                    let address = as_address(value).ok_or_else(none)?;
                    described.address.replace(address).is_some()
                }
                key => {
                    match HeaderName::from_bytes(key.as_bytes()) {
                        Ok(name) => described.entries.fields.push((name, field_value(value))),
                        Err(_) => described.entries.unnameable = true,
                    }
                    false
                }
            };
            if is_repeated {
                return Err(Status::invalid_argument(format!("a descriptor has {} twice", entry.key)));
            }
        }
        described.entries.path = described.path.is_some();
        described.entries.method = described.method.is_some();
        described.entries.address = described.address.is_some();
        Ok(described)
    }

    fn asked<'b>(&'b self, plan: &'b Plan, hits: u64) -> Asked<'b> {
        let readings = self.path.map_or_else(Readings::default, |path| readings::of_target(path.as_bytes()));
        let (client, origin) = (plan.client.as_ref(), Origin::Client(self.address));
        let mut asked = Asked::described(self.method.unwrap_or(""), readings, &self.entries, client, origin);
        asked.hits = self.hits.unwrap_or(hits);
        asked
    }
}

/// Any text, as the value of a field. A refusal would be no denial, and a client may choose the text.
fn field_value(text: &str) -> Cow<'_, [u8]> {
    if text.bytes().all(|byte| byte == b'\t' || !byte.is_ascii_control()) {
        return text.as_bytes().into();
    }
    let mut encoded = String::new();
    for character in text.chars() {
        if character.is_ascii_control() {
            write!(encoded, "%{:02X}", u32::from(character)).expect("a text takes any text");
        } else {
            encoded.push(character);
        }
    }
    encoded.into_bytes().into()
}

fn response(limits: &[Limit], count: usize, outcome: Outcome) -> RateLimitResponse {
    let statuses: Vec<DescriptorStatus> = (0..count).map(|number| status(limits, number, &outcome)).collect();
    match outcome.denial {
        None => RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses,
            response_headers_to_add: fields_of(outcome.fields),
            raw_body: Vec::new(),
        },
        Some(denial) => RateLimitResponse {
            overall_code: Code::OverLimit.into(),
            statuses,
            response_headers_to_add: fields_of(denial.fields),
            raw_body: denial.body.into_bytes(),
        },
    }
}

/// The status of one descriptor, by that of its limits that binds it: the one that denies longest, or has the fewest left.
fn status(limits: &[Limit], number: usize, outcome: &Outcome) -> DescriptorStatus {
    let own = outcome.decisions.iter().filter(|one| one.request == number);
    let binding = own.min_by_key(|one| {
        let decision = &one.decision;
        (decision.allowed, if decision.allowed == 0 { u64::MAX - decision.retry_after_ns } else { decision.remaining })
    });
    // A list, a ban or an override denies without decisions of limits, and then it denies all.
    let is_denied = outcome.denial.is_some()
        && match binding {
            Some(one) => one.decision.allowed == 0 || outcome.decisions.iter().all(|one| one.decision.allowed != 0),
            None => outcome.decisions.is_empty(),
        };
    let code = if is_denied { Code::OverLimit } else { Code::Ok };
    let Some(LimitDecision { limit, decision, .. }) = binding else {
        return DescriptorStatus { code: code.into(), ..DescriptorStatus::default() };
    };
    let limit = &limits[*limit];
    let reset_ns = limit.next_after_ns(decision);
    DescriptorStatus {
        code: code.into(),
        current_limit: limit.rate.map(|rate| current_limit(&limit.name, rate)),
        limit_remaining: narrowed(decision.remaining),
        duration_until_reset: Some(Duration {
            seconds: i64::try_from(reset_ns / NS).unwrap_or(i64::MAX),
            nanos: i32::try_from(reset_ns % NS).unwrap_or(0),
        }),
    }
}

/// The limit by the longest unit of Envoy's in which its period is whole; without a unit if there is none.
fn current_limit(name: &str, (permits, period_ns): (u64, u64)) -> RateLimit {
    let (length_ns, unit) =
        UNITS.into_iter().find(|(length_ns, _)| period_ns % length_ns == 0).unwrap_or((period_ns, Unit::Unknown));
    let units = narrowed(period_ns / length_ns);
    RateLimit {
        requests_per_unit: narrowed(permits),
        unit: unit.into(),
        name: name.to_owned(),
        unit_multiplier: (units > 1).then_some(units),
    }
}

fn narrowed(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub mod tests {
    use hyper::header::HeaderValue;
    use prost::Message;

    use super::*;
    use crate::client::tests::behind;
    use crate::fuzz::Target;

    pub const DESCRIPTORS: Target = Target {
        name: "descriptors",
        seeds: &[
            b"\x12\x13\x0a\x0d\x0a\x04user\x12\x05alice\x1a\x02\x08\x03",
            b"\x12/\x0a\x0a\x0a\x04path\x12\x02/a\x0a\x0d\x0a\x06method\
                \x12\x03GET\x0a\x0b\x0a\x03x-a\x12\x04a\xc3\xa9\n\x0a\x05\x0a\x03a b",
            b"\x12\x1a\x0a\x18\x0a\x0eremote_address\x12\x06::1%lo",
        ],
        check: a_descriptor_describes_a_request,
    };

    /// Whether one of them does.
    fn a_descriptor_describes_a_request(data: &[u8]) -> bool {
        let Ok(request) = RateLimitRequest::decode(data) else { return false };
        let client = behind("forwarded");
        let described = request.descriptors.iter().filter_map(|descriptor| {
            let described = Described::new(descriptor).ok()?;
            let others = descriptor.entries.iter().filter(|entry| {
                let is_of_request = match entry.key.as_str() {
                    entries::PATH => described.path == Some(&entry.value),
                    entries::METHOD => described.method == Some(&entry.value),
                    entries::ADDRESS => described.address == as_address(&entry.value),
                    _ => return true,
                };
                assert!(is_of_request);
                false
            });
            let unnameable = others.count() - described.entries.fields.len();
            assert_eq!(described.entries.unnameable, unnameable > 0);
            for (name, value) in &described.entries.fields {
                assert!(HeaderValue::from_bytes(value).is_ok(), "{name} can't be sent");
                assert_eq!(field_value(str::from_utf8(value).unwrap()), *value, "it is encoded once");
            }
            let origin = Origin::Client(described.address);
            let asked = Asked::described("get", Readings::default(), &described.entries, Some(&client), origin);
            assert_eq!(asked.client_key().is_ok(), described.address.is_some());
            assert_eq!(asked.methods()[0], "GET");
            Some(())
        });
        described.count() > 0
    }
}
