//! The JSON API: questions of services that describe a request themselves. `openapi.json` describes it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, StatusCode};
use serde::{Deserialize, Serialize};

use crate::answers::Answer;
use crate::charges::Charged;
use crate::charging_by_gate::ForGate;
use crate::client::{ClientAddress, as_address};
use crate::decide::{LimitDecision, Mode, Outcome, Worker};
use crate::gate::Asking;
use crate::gated::Gated;
use crate::ids::{self, Ids, Name, Reply, Taken};
use crate::leases::{Leases, Open};
use crate::metrics::AskedBy;
use crate::objects::{self, Object};
use crate::plan::Plan;
use crate::question::{Again, Done, Followup};
use crate::readings;
use crate::refunds::Refunds;
use crate::report::{Seldom, shown};
use crate::request::{Asked, Origin};

pub const DESCRIPTION: &str = include_str!("../openapi.json");

const NS: f64 = 1e9;
/// Seconds. A longer delay is a mistake of units.
const LONGEST_DELAY_S: f64 = 86_400.0;
/// Characters.
const LONGEST_ID: usize = 256;
/// Requests of a batch. A reply may be a hundred times as long as its question.
const LARGEST_BATCH: usize = 256;
const IN_MEMORY: &str = "for this call, keep the limits in shm:///NAME?keys=1000000";

/// What the calls of all threads share.
#[derive(Default)]
pub struct Shared {
    ids: Ids,
    refunds: Refunds,
    leases: Leases,
}

impl Shared {
    /// Forget leases whose time is over.
    pub fn sweep(&self) {
        self.leases.sweep();
    }

    /// End a lease: whether any permits were still held.
    fn release(&self, worker: &Worker, lease: &str, open: Open) -> bool {
        if let Some(id) = &open.request_id {
            // A question that is sent again holds others.
            self.ids.forget(id, &Name::Lease(lease));
        }
        worker.release(open.held)
    }

    /// Give a charge back, once: whether it was now.
    fn give_back(&self, worker: &Worker, charged: &Charged) -> Result<bool, String> {
        self.refunds.once(charged.number, || worker.refund(&charged.charges(&worker.plan)))
    }

    /// Give back what a reply has taken that is over. Of several limits, some may hold permits still.
    fn undo(&self, worker: &Worker, taken: &Taken) {
        if let Some(open) = taken.lease.as_ref().and_then(|lease| self.leases.take(lease)) {
            worker.release(open.held);
        }
        if let Some(Err(reason)) = taken.charge.as_ref().map(|charged| self.give_back(worker, charged)) {
            static REPORTS: Seldom = Seldom::new();
            REPORTS.report(|| format!("a charge stays: {reason}"));
        }
    }
}

/// A reply: whether it allows what was asked for, and its document. The text of an error is for the asking service.
pub type Replied = Result<(bool, String), String>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    uri: String,
    #[serde(default = "get")]
    method: String,
    client: Option<String>,
    #[serde(default, deserialize_with = "objects::each_once")]
    headers: BTreeMap<String, String>,
    /// A question that is sent again has the same one.
    request_id: Option<String>,
    /// Whether the reply has a `charge`, by which it can be given back.
    #[serde(default)]
    refundable: bool,
    /// Seconds, of a reservation.
    max_delay: Option<f64>,
}

fn get() -> String {
    "GET".to_owned()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Batch {
    requests: Vec<Object<Question>>,
}

impl Batch {
    /// All of them; an error if one can't be read.
    fn described(&self, address: Option<&ClientAddress>) -> Result<Vec<Described<'_>>, String> {
        if self.requests.len() > LARGEST_BATCH {
            return Err(format!("a batch has at most {LARGEST_BATCH} requests"));
        }
        let described = self.requests.iter().enumerate().map(|(number, Object(question))| {
            let described = Described::new(AskedBy::Batch, address, question);
            described.map_err(|reason| format!("requests[{number}]: {reason}"))
        });
        described.collect()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseQuestion {
    lease: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refund {
    charge: String,
}

#[derive(Serialize)]
struct ReplyDocument<'a> {
    allowed: bool,
    status: u16,
    retry_after: Option<u64>,
    headers: Vec<Field>,
    body: String,
    limits: Vec<LimitReply<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    charge: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseReply>,
}

impl<'a> ReplyDocument<'a> {
    fn new(plan: &'a Plan, outcome: Outcome) -> Self {
        let Outcome { fields, denial, decisions, .. } = outcome;
        let allowed = denial.is_none();
        let Answer { status, fields, body, wait_s: retry_after } =
            denial.unwrap_or(Answer { status: 200, fields, ..Answer::default() });
        let headers = fields.into_iter().map(|(name, value)| Field { name, value }).collect();
        let limits = decisions.iter().map(|LimitDecision { limit, decision, .. }| LimitReply {
            name: &plan.limits[*limit].name,
            allowed: decision.allowed != 0,
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after: decision.retry_after_ns as f64 / NS,
            reset_after: decision.reset_after_ns as f64 / NS,
        });
        let limits = limits.collect();
        ReplyDocument { allowed, status, retry_after, headers, body, limits, charge: None, delay: None, lease: None }
    }
}

#[derive(Serialize)]
struct Field {
    name: String,
    value: String,
}

#[derive(Serialize)]
struct LimitReply<'a> {
    name: &'a str,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after: f64,
    reset_after: f64,
}

#[derive(Serialize)]
struct LeaseReply {
    id: String,
    lasts: f64,
}

impl LeaseReply {
    fn new(id: String, lasts: Duration) -> LeaseReply {
        LeaseReply { id, lasts: lasts.as_secs_f64() }
    }
}

#[derive(Serialize)]
struct Refusal<'a> {
    error: &'a str,
}

/// The document of an error.
pub fn refusal(reason: &str) -> String {
    serde_json::to_string(&Refusal { error: reason }).unwrap_or_default()
}

/// The call at a path.
pub fn call_at(path: &str) -> Option<AskedBy> {
    Some(match path.strip_prefix("/v1/")? {
        "decide" => AskedBy::Decide,
        "peek" => AskedBy::Peek,
        "batch" => AskedBy::Batch,
        "reserve" => AskedBy::Reserve,
        "refund" => AskedBy::Refund,
        "acquire" => AskedBy::Acquire,
        "renew" => AskedBy::Renew,
        "release" => AskedBy::Release,
        _ => return None,
    })
}

/// Answer a call.
pub fn answer(call: AskedBy, worker: &Worker, shared: &Shared, data: &[u8]) -> Replied {
    match call {
        AskedBy::Batch => batch(worker, shared, data),
        AskedBy::Refund => refund(worker, shared, data),
        AskedBy::Renew => renew(worker, shared, data),
        AskedBy::Release => release(worker, shared, data),
        _ => decide(call, worker, shared, &read(data)?),
    }
}

fn read<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(data).map(|Object(read)| read).map_err(|error| error.to_string())
}

/// A question that was read as a whole: nothing of it is wrong.
struct Described<'a> {
    question: &'a Question,
    fields: HeaderMap,
    origin: Origin,
    mode: Mode,
}

impl<'a> Described<'a> {
    fn new(call: AskedBy, address: Option<&ClientAddress>, question: &'a Question) -> Result<Described<'a>, String> {
        if question.uri.is_empty() {
            return Err("the uri is empty: send a target such as \"/api/orders?page=2\"".to_owned());
        }
        if Method::from_bytes(question.method.as_bytes()).is_err() {
            return Err(format!("{} is no method: send one such as \"GET\"", shown(&question.method)));
        }
        let mut fields = HeaderMap::new();
        for (name, value) in &question.headers {
            let unnamed = |_| format!("{} is no name of a field", shown(name));
            let field = HeaderName::from_bytes(name.as_bytes()).map_err(unnamed)?;
            let value = HeaderValue::from_str(value)
                .map_err(|_| format!("the field {field:?} can't have the value {}", shown(value)))?;
            if fields.insert(&field, value).is_some() {
                return Err(format!("the field {field:?} comes twice: join its values by commas"));
            }
        }
        let client = match &question.client {
            None => None,
            Some(text) => Some(as_address(text).ok_or_else(|| format!("the client {} is no address", shown(text)))?),
        };
        if client.is_none() && address.is_some() {
            return Err("the rules need the client's address: send client, such as \"203.0.113.7\"".to_owned());
        }
        if question.request_id.as_ref().is_some_and(|id| id.is_empty() || id.chars().count() > LONGEST_ID) {
            return Err(format!("a request_id has 1 to {LONGEST_ID} characters"));
        }
        let mode = match (call, question.max_delay) {
            (AskedBy::Reserve, Some(delay_s)) if (0.0..=LONGEST_DELAY_S).contains(&delay_s) => {
                Mode::Book((delay_s * NS) as u64)
            }
            (AskedBy::Reserve, _) => return Err("send max_delay: seconds from 0 to 86400".to_owned()),
            (_, Some(_)) => return Err("max_delay is for /v1/reserve".to_owned()),
            (AskedBy::Acquire, None) => Mode::Hold { refundable: question.refundable },
            (AskedBy::Peek, None) => Mode::Peek,
            (_, None) if question.refundable => Mode::Refundable,
            (_, None) => Mode::Charge,
        };
        if mode == Mode::Peek && (question.refundable || question.request_id.is_some()) {
            return Err("a peek charges nothing: leave request_id and refundable out".to_owned());
        }
        Ok(Described { question, fields, origin: Origin::Client(client), mode })
    }

    /// What makes it the same question as an earlier one.
    fn content(&self, call: AskedBy) -> String {
        let Question { uri, method, client, headers, refundable, max_delay, .. } = self.question;
        format!("{call:?} {:?}", (uri, method, client, headers, refundable, max_delay))
    }

    /// Once for each id.
    fn replied(&self, call: AskedBy, worker: &Worker, shared: &Shared) -> Replied {
        let reply = match &self.question.request_id {
            None => self.decided(worker, shared),
            Some(id) => {
                let undo = |taken: &Taken| shared.undo(worker, taken);
                shared.ids.once(id, &self.content(call), || self.decided(worker, shared), undo)
            }
        };
        reply.map(|reply| (reply.allowed, reply.text))
    }

    fn decided(&self, worker: &Worker, shared: &Shared) -> Result<Reply, String> {
        if matches!(self.mode, Mode::Hold { .. }) && !shared.leases.have_room() {
            return Err("the server holds too many leases: release some".to_owned());
        }
        self.reply(worker, shared, worker.decide(&self.asked(worker), self.mode))
    }

    fn asked<'b>(&'b self, worker: &'b Worker) -> Asked<'b> {
        let readings = readings::of_target(self.question.uri.as_bytes());
        Asked::new(&self.question.method, readings, &self.fields, worker.plan.client.as_ref(), self.origin)
    }

    fn reply(&self, worker: &Worker, shared: &Shared, mut outcome: Outcome) -> Result<Reply, String> {
        let (charges, held) = (std::mem::take(&mut outcome.charges), std::mem::take(&mut outcome.held));
        let allowed = outcome.denial.is_none();
        let request_id = &self.question.request_id;
        let lasting = held.iter().filter_map(|one| worker.plan.limits[one.limit].concurrency);
        let lasting: Vec<_> = lasting.map(|(_, lasts_ns)| Duration::from_nanos(lasts_ns)).collect();
        let lasts = lasting.iter().min().copied();
        let lease = lasts.zip(lasting.iter().max().copied()).map(|(lasts, longest)| {
            let open = Open { held, request_id: request_id.clone(), lasts, longest };
            LeaseReply::new(shared.leases.add(open), lasts)
        });
        let is_refundable = allowed && self.mode.is_given_back();
        let charge = is_refundable.then(|| Charged::new(&worker.plan, charges, request_id.clone()));
        let taken = Taken { lease: lease.as_ref().map(|lease| lease.id.clone()), charge };
        let document = ReplyDocument {
            charge: taken.charge.as_ref().map(Charged::text),
            delay: outcome.delay(self.mode),
            lease,
            ..ReplyDocument::new(&worker.plan, outcome)
        };
        let text = serde_json::to_string(&document).map_err(|error| error.to_string())?;
        // The permits of a lease that is over are others' by now.
        Ok(Reply { allowed, text, lasts: lasts.unwrap_or(ids::LASTS), taken })
    }

    /// What Python is to be asked.
    fn for_gate<'b>(&self, call: AskedBy, worker: &'b Worker) -> Result<ForGate<'b>, Box<Outcome>> {
        let id = self.question.request_id.clone();
        let again = id.map(|id| Again { id, content: self.content(call) });
        worker.for_gate(&[self.asked(worker)], self.mode).map(|asked| asked.sent_as(again))
    }

    /// An error if it can't be answered by limits that Python charges.
    fn checked_for_gate(self, worker: &Worker) -> Result<Described<'a>, Refused> {
        if matches!(self.mode, Mode::Book(_)) && worker.charging.as_ref().is_some_and(|charging| !charging.books) {
            return Err((StatusCode::NOT_IMPLEMENTED, format!("leased limits can't book ahead: {IN_MEMORY}")));
        }
        Ok(self)
    }
}

/// An error for the asking service, with its status.
pub type Refused = (StatusCode, String);

fn unreadable(reason: String) -> Refused {
    (StatusCode::UNPROCESSABLE_ENTITY, reason)
}

/// Answer a call about limits that Python charges.
pub async fn answer_by_gate(call: AskedBy, gated: &Gated, data: Vec<u8>) -> Result<(bool, String), Refused> {
    let worker = gated.following.worker();
    match call {
        AskedBy::Batch => batch_by_gate(gated, &worker, data).await,
        AskedBy::Refund => {
            let Refund { charge } = read(&data).map_err(unreadable)?;
            drop(data);
            let unknown = "Redis hasn't answered: the charge has come back, or stays";
            let refunded = followed_up(&gated.asking, &worker, Followup::Refund, charge, unknown).await?;
            Ok((refunded, refunded_document(refunded)))
        }
        AskedBy::Renew => {
            let LeaseQuestion { lease } = read(&data).map_err(unreadable)?;
            drop(data);
            let unknown = "Redis hasn't answered: the lease lasts as long as before, or begins anew: renew it again";
            let held = followed_up(&gated.asking, &worker, Followup::Renew, lease, unknown).await?;
            Ok((held, held_document(held)))
        }
        AskedBy::Release => {
            let LeaseQuestion { lease } = read(&data).map_err(unreadable)?;
            drop(data);
            let unknown = "Redis hasn't answered: the permits come back with the end of the lease: release it again";
            let released = followed_up(&gated.asking, &worker, Followup::Release, lease, unknown).await?;
            Ok((released, released_document(released)))
        }
        _ => {
            let (asked, mode) = {
                let question = read(&data).map_err(unreadable)?;
                let described = Described::new(call, worker.plan.client.as_ref(), &question);
                let described = described.map_err(unreadable)?.checked_for_gate(&worker)?;
                (described.for_gate(call, &worker), described.mode)
            };
            // It isn't held while Python is asked.
            drop(data);
            document(&worker.plan, gated.decided(&worker, asked, 0).await, mode)
        }
    }
}

/// Whether that was done. This server has to have made the charge or the lease. `unknown`: the error if nobody knows.
async fn followed_up(
    asking: &Asking,
    worker: &Worker,
    what: Followup,
    id: String,
    unknown: &str,
) -> Result<bool, Refused> {
    let done = match worker.charging.clone() {
        Some(charging) => asking.follow_up(charging, what, id).await,
        None => Done::Unknown,
    };
    let unavailable = |reason: &str| Err((StatusCode::SERVICE_UNAVAILABLE, reason.to_owned()));
    match done {
        Done::Now => Ok(true),
        Done::Unknown => Ok(false),
        Done::NotAsked => unavailable("the server has too many questions: ask again"),
        Done::Perhaps => unavailable(unknown),
    }
}

fn refunded_document(refunded: bool) -> String {
    format!("{{\"refunded\":{refunded}}}")
}

fn held_document(held: bool) -> String {
    format!("{{\"held\":{held}}}")
}

fn released_document(released: bool) -> String {
    format!("{{\"released\":{released}}}")
}

fn document(plan: &Plan, mut outcome: Outcome, mode: Mode) -> Result<(bool, String), Refused> {
    if let Some(reason) = outcome.refused.take() {
        return Err(unreadable(reason));
    }
    let (charge, delay) = (outcome.charge.take(), outcome.delay(mode));
    let lease = outcome.lease.take().map(|(id, lasts)| LeaseReply::new(id, lasts));
    let document = ReplyDocument { charge, delay, lease, ..ReplyDocument::new(plan, outcome) };
    let text = serde_json::to_string(&document);
    let text = text.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok((document.allowed, text))
}

impl Outcome {
    /// Of a reservation: seconds until the request may proceed.
    fn delay(&self, mode: Mode) -> Option<f64> {
        let delay_ns = self.decisions.iter().map(|one| one.decision.delay_ns).max();
        matches!(mode, Mode::Book(_)).then(|| delay_ns.unwrap_or(0) as f64 / NS)
    }
}

/// As `batch`, with one time for all of them. Those that are left by then are charged to nothing.
async fn batch_by_gate(gated: &Gated, worker: &Worker, data: Vec<u8>) -> Result<(bool, String), Refused> {
    let batch: Batch = read(&data).map_err(unreadable)?;
    let described = batch.described(worker.plan.client.as_ref()).map_err(unreadable)?;
    let described = described.into_iter().map(|one| one.checked_for_gate(worker));
    let described = described.collect::<Result<Vec<_>, _>>()?;
    let mut outcomes = Vec::with_capacity(described.len());
    let since = Instant::now();
    let in_time = gated.asking.in_time(async {
        for one in &described {
            let asked = one.for_gate(AskedBy::Batch, worker).map(|asked| asked.sent_at(since));
            // The questions are held as they were sent, and as they were read.
            outcomes.push(gated.decided(worker, asked, 2 * data.len()).await);
        }
    });
    if in_time.await.is_none() {
        let left = described.len() - outcomes.len();
        gated.asking.count_late(left);
        outcomes.extend((0..left).map(|_| Outcome::unavailable()));
    }
    let replies = outcomes.into_iter().zip(&described).enumerate().map(|(number, (outcome, one))| {
        let replied = document(&worker.plan, outcome, one.mode);
        replied.unwrap_or_else(|(_, reason)| unanswered(number, &reason))
    });
    Ok(joined(&replies.collect::<Vec<_>>()))
}

/// The reply to a question of a batch that has none. Those before were charged, so the error is of this one alone.
fn unanswered(number: usize, reason: &str) -> (bool, String) {
    (false, refusal(&format!("requests[{number}]: {reason}")))
}

/// The reply to a batch: whether all are allowed, and its document.
fn joined(replies: &[(bool, String)]) -> (bool, String) {
    let texts: Vec<&str> = replies.iter().map(|(_, text)| text.as_str()).collect();
    (replies.iter().all(|(allowed, _)| *allowed), format!("{{\"replies\":[{}]}}", texts.join(",")))
}

fn decide(call: AskedBy, worker: &Worker, shared: &Shared, question: &Question) -> Replied {
    Described::new(call, worker.plan.client.as_ref(), question)?.replied(call, worker, shared)
}

/// Each question by itself, in their order. If one can't be read, none is decided.
fn batch(worker: &Worker, shared: &Shared, data: &[u8]) -> Replied {
    let batch: Batch = read(data)?;
    let described = batch.described(worker.plan.client.as_ref())?;
    let replies = described.iter().enumerate().map(|(number, one)| {
        one.replied(AskedBy::Batch, worker, shared).unwrap_or_else(|reason| unanswered(number, &reason))
    });
    Ok(joined(&replies.collect::<Vec<_>>()))
}

/// Give a charge back, once.
fn refund(worker: &Worker, shared: &Shared, data: &[u8]) -> Replied {
    let Refund { charge } = read(data)?;
    let charged = Charged::read(&charge).ok_or("that is no charge of a reply")?;
    let refunded = shared.give_back(worker, &charged)?;
    if let Some(id) = charged.request_id.filter(|_| refunded) {
        // A question that is sent again is charged again.
        shared.ids.forget(&id, &Name::Charge(charged.number));
    }
    Ok((refunded, refunded_document(refunded)))
}

fn renew(worker: &Worker, shared: &Shared, data: &[u8]) -> Replied {
    let LeaseQuestion { lease } = read(data)?;
    let renew = || shared.leases.renew(&lease, |open| worker.renew(&mut open.held));
    let (held, over) = match shared.leases.asked_by(&lease) {
        // An id is locked before the leases, as by a question that adds its lease.
        Some((id, lasts)) => shared.ids.prolong(&id, &Name::Lease(&lease), lasts, renew),
        None => renew(),
    };
    if let Some(open) = over {
        // Of several limits, some may still hold.
        shared.release(worker, &lease, open);
    }
    Ok((held, held_document(held)))
}

fn release(worker: &Worker, shared: &Shared, data: &[u8]) -> Replied {
    let LeaseQuestion { lease } = read(data)?;
    let released = shared.leases.take(&lease).is_some_and(|open| shared.release(worker, &lease, open));
    Ok((released, released_document(released)))
}

#[cfg(test)]
pub mod tests {
    use serde_json::Value;

    use super::*;
    use crate::client::tests::behind;
    use crate::fuzz::Target;

    pub const QUESTIONS: Target = Target {
        name: "questions",
        seeds: &[
            br#"{"uri": "/a?b", "method": "POST", "client": "192.0.2.1", "headers": {"a": "b", "c": "\u00e9"}}"#,
            br#"{"uri": "/", "max_delay": 1.5e3, "request_id": "one"}"#,
            br#"{"requests": [{"uri": "/", "refundable": true, "request_id": "one"}]}"#,
            br#"{"charge": "7b7d"}"#,
            br#"{"lease": "00ff"}"#,
        ],
        check: a_body_is_a_question_or_an_error,
    };
    const ASKING: [AskedBy; 5] = [AskedBy::Decide, AskedBy::Peek, AskedBy::Batch, AskedBy::Reserve, AskedBy::Acquire];

    fn a_body_is_a_question_or_an_error(data: &[u8]) -> bool {
        let value = || serde_json::from_slice::<Value>(data).expect("it is a document");
        if let Ok(question) = checked::<Question>(data) {
            let value = value();
            assert!(value.is_object() && value["uri"] == *question.uri);
            let headers = value.get("headers").map(|headers| serde_json::from_value(headers.clone()).unwrap());
            assert_eq!(question.headers, headers.unwrap_or_default());
            let batch: Batch = read(&[br#"{"requests":["#, data, b"]}"].concat()).unwrap();
            assert_eq!(batch.requests.len(), 1);
            ASKING.into_iter().for_each(|call| describe(call, &question));
            return true;
        }
        if let Ok(batch) = checked::<Batch>(data) {
            assert_eq!(value()["requests"].as_array().map(Vec::len), Some(batch.requests.len()));
            return true;
        }
        if let Ok(LeaseQuestion { lease }) = checked(data) {
            assert!(value()["lease"] == *lease);
            return true;
        }
        checked::<Refund>(data).is_ok_and(|Refund { charge }| value()["charge"] == *charge)
    }

    /// As `read`. The text of an error has a bound: its parts of the body are escaped.
    fn checked<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Result<T, String> {
        read(data).inspect_err(|reason| assert!(reason.len() <= 8 * data.len() + 1024))
    }

    fn describe(call: AskedBy, question: &Question) {
        for client in [None, Some(&behind("forwarded"))] {
            match Described::new(call, client, question) {
                Ok(Described { fields, origin: Origin::Client(address), mode, .. }) => {
                    assert_eq!(fields.len(), question.headers.len());
                    assert_eq!(address.is_some(), question.client.is_some());
                    assert_eq!(matches!(mode, Mode::Book(_)), matches!(call, AskedBy::Reserve));
                }
                Ok(_) => panic!("a service names the client"),
                Err(reason) => assert!(!reason.is_empty()),
            }
        }
    }
}
