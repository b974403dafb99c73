//! A decision about one request, by all rules that match it: as `forebay.web.gate` and its plans decide.
//!
//! First the deny lists, then the enforced rules, all or none; rules in the shadow decide last, about requests that
//! those allow. `charging` charges limits, and `holding` holds permits.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::answers::{self, Answer, Fields, Limit};
use crate::capi::{self, Decision, Failure, Key, MOST_LIMITS, Thread};
use crate::charging::{Charge, Decided, Once};
use crate::client::UnknownPeer;
use crate::holding::Held;
use crate::keys::PREFLIGHT;
use crate::plan::{Ban, Override, Place, Plan, Rule};
use crate::question::Charging;
use crate::report::Seldom;
use crate::request::Asked;

/// What a server decides by.
#[derive(Clone)]
pub struct Rules {
    pub plan: Arc<Plan>,
    /// If Python charges the limits that aren't in the memory of the host.
    pub charging: Option<Arc<Charging>>,
}

/// A thread's handles of all limiters.
pub struct Worker {
    pub plan: Arc<Plan>,
    /// By the numbers of their limits.
    pub threads: Vec<Thread>,
    /// If Python charges limits.
    pub charging: Option<Arc<Charging>>,
}

/// Whether a request is charged, or its decision only read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Charge,
    /// Charged, and the charges may be given back.
    Refundable,
    /// The same, if it may proceed within this time.
    Book(u64),
    /// Charged, and permits of concurrency limits are held. Whether the charges may be given back.
    Hold {
        refundable: bool,
    },
    Peek,
}

impl Mode {
    /// Whether the charges may be given back.
    pub fn is_given_back(self) -> bool {
        matches!(self, Mode::Refundable | Mode::Book(_) | Mode::Hold { refundable: true })
    }
}

/// What was decided.
#[derive(Default)]
pub struct Outcome {
    /// Fields for the response to an admitted request.
    pub fields: Fields,
    pub denial: Option<Answer>,
    /// Whether it is denied because the limits can't be decided.
    pub has_failed: bool,
    pub decisions: Vec<LimitDecision>,
    /// Of an admitted request.
    pub charges: Vec<Charge>,
    /// The same, if Python has made them.
    pub charge: Option<String>,
    pub held: Vec<Held>,
    /// The same, if Python holds them, and how long they last.
    pub lease: Option<(String, Duration)>,
    /// Why the asking service has no answer.
    pub refused: Option<String>,
}

/// The decision of one limit.
pub struct LimitDecision {
    /// The number of the request: of those that were decided together.
    pub request: usize,
    /// The limit's number.
    pub limit: usize,
    pub decision: Decision,
}

impl Outcome {
    /// The limits can't be decided.
    pub fn unavailable() -> Outcome {
        Outcome { has_failed: true, ..answers::unavailable().into() }
    }
}

impl From<Answer> for Outcome {
    fn from(denial: Answer) -> Outcome {
        Outcome { denial: Some(denial), ..Outcome::default() }
    }
}

/// The limits that requests are to be charged to.
pub struct Uses<'a> {
    /// In the order of their charges.
    pub enforced: Vec<Use<'a>>,
    /// Of rules in the shadow, for requests that the others allow.
    pub shadows: Vec<Use<'a>>,
}

/// A limit that a request is to be charged to.
pub struct Use<'a> {
    pub rule: &'a Rule,
    request: usize,
    /// The limit's number.
    pub limit: usize,
    pub cost: u64,
    /// For whom the request counts: a preflight, too.
    pub client: Key,
    /// By which the limit counts, if that is another key. `place` sets it.
    placed: Option<Key>,
    is_preflight: bool,
}

impl Use<'_> {
    /// The key by which the limit counts.
    pub fn key(&self) -> &Key {
        self.placed.as_ref().unwrap_or(&self.client)
    }

    /// Bytes that it takes.
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.client.size() + self.placed.as_ref().map_or(0, Key::size)
    }

    pub fn decision(&self, decision: Decision) -> LimitDecision {
        LimitDecision { request: self.request, limit: self.limit, decision }
    }
}

impl Worker {
    /// Takes the GIL for a moment.
    pub fn new(rules: &Rules) -> Result<Worker, Failure> {
        let Rules { plan, charging } = rules.clone();
        let threads = plan.limiters.iter().map(capi::Limiter::attach).collect::<Result<Vec<_>, _>>()?;
        Ok(Worker { plan, threads, charging })
    }

    pub fn decide(&self, asked: &Asked<'_>, mode: Mode) -> Outcome {
        self.decide_together(std::slice::from_ref(asked), mode)
    }

    /// Decide several requests as one: all of them are charged, or none.
    pub fn decide_together(&self, requests: &[Asked<'_>], mode: Mode) -> Outcome {
        let Uses { mut enforced, shadows } = match self.uses(requests) {
            Ok(uses) => uses,
            Err(denied) => return *denied,
        };
        let holding: Vec<_> = enforced.extract_if(.., |one| self.limit(one).concurrency.is_some()).collect();
        if let (Some(one), false) = (holding.first(), matches!(mode, Mode::Hold { .. })) {
            return answers::held(&one.rule.name).into();
        }
        let held = match self.held(&holding) {
            Ok(Ok(held)) => held,
            Ok(Err(denied)) => return self.denied_permits(denied),
            Err(failure) => return self.failed(failure),
        };
        let mut outcome = match self.charged(&enforced, mode, &self.once_of(requests, &enforced, mode)) {
            Ok(decided) => {
                let mut outcome = self.outcome(&enforced, &decided, mode);
                if outcome.denial.is_none() && mode.is_given_back() {
                    outcome.charges = self.charges(&enforced, &decided);
                }
                outcome
            }
            Err(failure) if failure.is_cost() => {
                self.too_costly(&enforced).unwrap_or_else(|failed| self.failed(failed))
            }
            Err(failure) => self.failed(failure),
        };
        if outcome.denial.is_none() {
            outcome.held = held;
        } else {
            self.release(held);
        }
        if outcome.denial.is_none() && mode != Mode::Peek {
            for shadow in &shadows {
                let uses = std::slice::from_ref(shadow);
                if let Err(failure) = self.charged(uses, Mode::Charge, &self.once_of(requests, uses, Mode::Charge)) {
                    self.log(failure);
                }
            }
        }
        outcome
    }

    /// What requests are to be charged to, if they are decided as one: or their denial by something else than a limit.
    pub fn uses<'a>(&'a self, requests: &[Asked<'_>]) -> Result<Uses<'a>, Box<Outcome>> {
        let mut enforced = Vec::new();
        let mut shadows = Vec::new();
        let mut denying = None;
        for (request, asked) in requests.iter().enumerate() {
            let matching = self.matching(asked);
            if let Some(refusal) = self.refused(asked, &matching) {
                return Err(Box::new(refusal.into()));
            }
            for rule in self.plan.rules.iter().filter(|rule| is_for(rule, asked, &matching)) {
                let found = match rule.key.of(asked) {
                    Ok(found) => found,
                    Err(UnknownPeer) if rule.shadow => continue,
                    Err(UnknownPeer) => return Err(Box::new(answers::unknown().into())),
                };
                let client = found.key();
                let limits = match rule.overrides.get(&client).filter(|one| now_s() < one.until_s) {
                    None => rule.limits_of(&found),
                    Some(Override { limits: Some(limits), .. }) => limits,
                    Some(over) => {
                        denying = denying.or((!rule.shadow).then_some((rule, over)));
                        continue;
                    }
                };
                let is_preflight = rule.place.methods.is_empty() && asked.is_preflight();
                let cost = rule.cost.saturating_mul(asked.hits);
                let to = if rule.shadow { &mut shadows } else { &mut enforced };
                let used =
                    |limit: usize, client: Key| Use { rule, request, limit, cost, client, placed: None, is_preflight };
                if let Some((last, others)) = limits.split_last() {
                    to.extend(others.iter().map(|limit| used(*limit, client.clone())));
                    to.push(used(*last, client));
                }
            }
        }
        match self.banned(&enforced) {
            Ok(None) => {}
            Ok(Some(denial)) => return Err(Box::new(denial.into())),
            Err(failure) => return Err(Box::new(self.failed(failure))),
        }
        if let Some((rule, over)) = denying {
            return Err(Box::new(denied_by_override(rule, over).into()));
        }
        for one in enforced.iter_mut().chain(&mut shadows) {
            self.place(one).map_err(|failure| Box::new(self.failed(failure)))?;
        }
        let has_once = enforced.iter().any(|one| one.rule.is_once);
        // Last those that are charged once, or that can't take back a charge once later charges stand behind it. The
        // sort is stable.
        enforced.sort_by_key(|one| if has_once { one.rule.is_once } else { self.limit(one).is_last });
        Ok(Uses { enforced, shadows })
    }

    /// How these uses are charged once. What may be given back is always charged.
    fn once_of(&self, requests: &[Asked<'_>], uses: &[Use<'_>], mode: Mode) -> Once<'_> {
        let from = uses.iter().position(|one| one.rule.is_once).unwrap_or(uses.len());
        let retry = match (requests, &self.plan.retries) {
            ([asked], Some(retries)) if from < uses.len() && !mode.is_given_back() => {
                retries.id(asked, &uses[from..]).map(|id| (retries, id))
            }
            _ => None,
        };
        Once { from, retry }
    }

    /// Whether each pattern matches a reading of the path.
    fn matching(&self, asked: &Asked<'_>) -> Vec<bool> {
        let mut matching = vec![asked.readings.may_be_any(); self.plan.patterns.len()];
        for path in &asked.readings.all {
            for number in self.plan.patterns.matches(path) {
                matching[number] = true;
            }
        }
        matching
    }

    /// Set the key by which the limit counts.
    fn place(&self, one: &mut Use<'_>) -> Result<(), Failure> {
        if let Some(carried) = &self.limit(one).carried {
            one.placed = Some(carried.counted(&self.threads, &one.client)?);
        }
        if one.is_preflight {
            // It leaves a client its own limit.
            one.placed = Some(one.key().behind(PREFLIGHT, None));
        }
        Ok(())
    }

    pub fn limit(&self, one: &Use<'_>) -> &Limit {
        &self.plan.limits[one.limit]
    }

    /// The refusal by a deny list.
    fn refused(&self, asked: &Asked<'_>, matching: &[bool]) -> Option<Answer> {
        let denies = self.plan.denies.iter().filter(|deny| asked.tells(&deny.place));
        for deny in denies.filter(|deny| is_at(&deny.place, asked, matching)) {
            let Some(address) = asked.client_address() else {
                if asked.has_no_peer() {
                    return Some(answers::unknown());
                }
                continue;
            };
            let Some(left_s) = deny.networks.end_s(address).map(|end_s| end_s - now_s()).filter(|left| *left > 0.0)
            else {
                continue;
            };
            let wait_s = left_s.is_finite().then_some(left_s.ceil() as u64);
            let detail = "Requests from this address are refused.";
            return Some(deny.denied.answer(detail, None, Fields::new(), wait_s));
        }
        None
    }

    /// The denial by the ban that lasts longest. A banned key is charged by none of the rules.
    fn banned(&self, uses: &[Use<'_>]) -> Result<Option<Answer>, Failure> {
        let mut longest: Option<(&Rule, &Ban, u64)> = None;
        for one in uses {
            let Some(ban) = &one.rule.ban else { continue };
            let decision = self.threads[ban.bans].peek(&one.client, 1)?;
            if decision.allowed == 0 && longest.is_none_or(|(_, _, wait_ns)| decision.retry_after_ns > wait_ns) {
                longest = Some((one.rule, ban, decision.retry_after_ns));
            }
        }
        Ok(longest.map(|(rule, ban, wait_ns)| answers::banned(&rule.denied, &ban.name, wait_ns)))
    }

    /// Count a denial, and ban the key if there are too many. A ban isn't prolonged.
    pub fn count_denial(&self, ban: &Ban, key: &Key) -> Result<(), Failure> {
        let counted = self.threads[ban.denials].decide(key, 1)?;
        let has_room = counted.allowed != 0 || counted.full == 0;
        if counted.remaining == 0 && has_room && self.threads[ban.bans].decide(key, 1)?.allowed != 0 {
            self.threads[ban.denials].reset(key)?;
        }
        Ok(())
    }

    /// The denial of a request that some limit can never allow.
    fn too_costly(&self, uses: &[Use<'_>]) -> Result<Outcome, Failure> {
        let mut each = Vec::new();
        let mut denial = None;
        for (place, one) in uses.iter().enumerate() {
            let mut decision = self.threads[one.limit].peek(one.key(), 0)?;
            if one.cost > decision.limit {
                decision.allowed = 0;
                let limit = self.limit(one);
                let fields = self.fields_of(uses, [&(place, decision)].into_iter());
                denial = denial.or_else(|| Some(answers::too_costly(&one.rule.denied, limit, one.cost, fields)));
            }
            each.push(one.decision(decision));
        }
        let denial = denial.unwrap_or_else(answers::unavailable);
        Ok(Outcome { denial: Some(denial), decisions: each, ..Outcome::default() })
    }

    pub fn outcome(&self, uses: &[Use<'_>], decided: &Decided, mode: Mode) -> Outcome {
        let decisions = decided.each.iter().map(|(place, one)| uses[*place].decision(*one)).collect();
        if uses.is_empty() {
            return Outcome::default();
        }
        if decided.allowed {
            return Outcome { fields: self.fields_of(uses, decided.each.iter()), decisions, ..Outcome::default() };
        }
        // If all allow by now, a permit has come back since the denial.
        let mut denied: Vec<_> = decided.each.iter().filter(|(_, decision)| decision.allowed == 0).collect();
        if denied.is_empty() {
            denied = decided.each.iter().collect();
        }
        let longest = |first: &(usize, Decision), second: &(usize, Decision)| {
            if second.1.retry_after_ns > first.1.retry_after_ns { *second } else { *first }
        };
        let (place, decision) = denied.iter().map(|one| **one).reduce(|one, other| longest(&one, &other)).unwrap();
        if decision.allowed == 0 && decision.full != 0 {
            return Outcome { denial: Some(answers::full(decision.retry_after_ns)), decisions, ..Outcome::default() };
        }
        for (place, _) in denied.iter().filter(|_| mode != Mode::Peek) {
            let one = &uses[*place];
            // A check of no permits is none of the requests that a ban counts.
            if let Some(ban) = one.rule.ban.as_ref().filter(|_| one.cost > 0)
                && let Err(failure) = self.count_denial(ban, &one.client)
            {
                // The request is denied, whether or not that can be counted.
                self.log(failure);
            }
        }
        let violated: Vec<&str> = denied.iter().map(|(place, _)| self.limit(&uses[*place]).shown.as_str()).collect();
        let binding = &uses[place];
        let denial = answers::over_limit(
            &binding.rule.denied,
            self.limit(binding),
            &violated,
            self.fields_of(uses, denied.iter().copied()),
            decision.retry_after_ns,
        );
        Outcome { denial: Some(denial), decisions, ..Outcome::default() }
    }

    /// The fields of these decisions, and the policies of all limits in the order in which they are charged.
    fn fields_of<'a>(&self, uses: &[Use<'_>], each: impl Iterator<Item = &'a (usize, Decision)>) -> Fields {
        let excess = uses.len().saturating_sub(MOST_LIMITS);
        let all = uses[excess..].iter().chain(&uses[..excess]).map(|one| self.limit(one));
        let pairs = each.map(|(place, decision)| (self.limit(&uses[*place]), decision));
        answers::rate_limit_fields(all, pairs)
    }

    fn failed(&self, failure: Failure) -> Outcome {
        self.log(failure);
        Outcome::unavailable()
    }

    /// Log an error that every request would repeat: once a minute.
    pub fn log(&self, failure: Failure) {
        static REPORTS: Seldom = Seldom::new();
        REPORTS.report(|| format!("a limit can't be decided: {}", self.plan.core.message(failure)));
    }
}

fn is_at(place: &Place, asked: &Asked<'_>, matching: &[bool]) -> bool {
    (place.methods.is_empty() || place.methods.iter().any(|method| asked.methods().contains(method)))
        && place.pattern.is_none_or(|number| matching[number])
}

fn is_for(rule: &Rule, asked: &Asked<'_>, matching: &[bool]) -> bool {
    let has = |networks: &Option<crate::client::Networks>, inside: bool| {
        networks.as_ref().is_none_or(|list| asked.client_address().is_some_and(|one| list.has(one)) == inside)
    };
    is_at(&rule.place, asked, matching)
        && asked.suits(rule)
        && !rule.lifted.as_ref().is_some_and(|lifted| lifted.has(&asked.tier(&lifted.field)))
        && rule.headers.iter().all(|pattern| {
            asked.header(&pattern.name).is_some_and(|value| !value.is_empty() && pattern.matches(&value))
        })
        && has(&rule.inside, true)
        && has(&rule.outside, false)
}

fn denied_by_override(rule: &Rule, over: &Override) -> Answer {
    let wait_s = (over.until_s - now_s()).ceil().max(1.0) as u64;
    let detail = format!("Requests of this client are denied until {}.", over.until);
    rule.denied_by_override.answer(&detail, None, Fields::new(), Some(wait_s))
}

/// The host's wall clock, by which lists and overrides end.
fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
