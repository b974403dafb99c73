//! The plan: what Python has made of a rule file, compiled. `forebay.serving.plan` writes the document.
//!
//! Unknown words are refused, so that no part of a rule is ignored.

use std::collections::HashMap;

use pyo3::prelude::*;
use regex::{Regex, RegexSet, RegexSetBuilder};
use serde::Deserialize;

use crate::answers::{Denied, Limit};
use crate::capi::{Core, Key, Limiter};
use crate::client::{ClientAddress, ClientDocument, Networks};
use crate::keys::{Found, KeyDocument, RuleKey};
use crate::retries::{Retries, RetriesDocument};

/// Bytes of all path patterns, compiled. More are refused at start.
const LARGEST_PATTERNS: usize = 64 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    domain: String,
    client: Option<ClientDocument>,
    limits: Vec<Limit>,
    denies: Vec<DenyDocument>,
    rules: Vec<RuleDocument>,
    retries: Option<RetriesDocument>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Where {
    pattern: Option<String>,
    methods: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DenyDocument {
    #[serde(rename = "where")]
    place: Where,
    networks: Vec<String>,
    until_s: Option<f64>,
    denied: Denied,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleDocument {
    name: String,
    #[serde(rename = "where")]
    place: Where,
    headers: Vec<HeaderPattern>,
    inside: Vec<String>,
    outside: Vec<String>,
    key: KeyDocument,
    cost: u64,
    shadow: bool,
    is_once: bool,
    ban: Option<Ban>,
    limits: Vec<usize>,
    canary: Option<Canary>,
    lifted: Option<Lifted>,
    overrides: Vec<OverrideDocument>,
    denied: Denied,
    denied_by_override: Denied,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OverrideDocument {
    key: KeyText,
    until_s: f64,
    until: String,
    /// Other limits; None denies the key.
    limits: Option<Vec<usize>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum KeyText {
    Text(String),
    Parts(Vec<String>),
}

/// A field, and the parts of its value with anything between them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeaderPattern {
    /// In small letters.
    pub name: String,
    parts: Vec<String>,
}

impl HeaderPattern {
    /// Whether a value is these parts with anything between them.
    pub fn matches(&self, value: &str) -> bool {
        let Some((first, rest)) = self.parts.split_first() else { return false };
        let Some((last, middle)) = rest.split_last() else { return value == first };
        let Some(mut behind) = value.strip_prefix(first.as_str()) else { return false };
        for part in middle {
            let Some(at) = behind.find(part.as_str()) else { return false };
            behind = &behind[at + part.len()..];
        }
        behind.ends_with(last.as_str())
    }
}

/// Which requests a rule or a deny list is for.
pub struct Place {
    /// Its number among the patterns; None for every path.
    pub pattern: Option<usize>,
    /// None for every method.
    pub methods: Vec<String>,
}

pub struct Deny {
    pub place: Place,
    pub networks: Networks,
    pub denied: Denied,
}

pub struct Rule {
    pub name: String,
    pub place: Place,
    pub headers: Vec<HeaderPattern>,
    pub inside: Option<Networks>,
    pub outside: Option<Networks>,
    pub key: RuleKey,
    pub cost: u64,
    pub shadow: bool,
    /// Whether a request and its retries are charged once.
    pub is_once: bool,
    pub ban: Option<Ban>,
    pub limits: Vec<usize>,
    pub canary: Option<Canary>,
    pub lifted: Option<Lifted>,
    pub overrides: HashMap<Key, Override>,
    pub denied: Denied,
    pub denied_by_override: Denied,
}

impl Rule {
    /// The limits of a key without an override.
    pub fn limits_of(&self, key: &Found<'_>) -> &[usize] {
        match &self.canary {
            Some(canary) if canary.has(key) => &canary.limits,
            _ => &self.limits,
        }
    }
}

/// Other limits for a part of the keys: as `forebay.web.canaries.Chosen` chooses.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// Of 2**32: which hashes are below it.
    below: u64,
    /// The key of the hash.
    salt: Vec<u8>,
    limits: Vec<usize>,
}

impl Canary {
    fn has(&self, key: &Found<'_>) -> bool {
        let hash = blake2b_simd::Params::new().hash_length(4).key(&self.salt).hash(&key.joined());
        let number = hash.as_bytes().iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        number < self.below
    }

    fn checked(self) -> Result<Canary, String> {
        if self.salt.len() > blake2b_simd::KEYBYTES {
            return Err("a canary has too long a salt".to_owned());
        }
        Ok(self)
    }
}

/// The tiers that a rule isn't for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifted {
    /// In small letters: the field in which a proxy or a service names the tier.
    pub field: String,
    tiers: Vec<String>,
}

impl Lifted {
    pub fn has(&self, tier: &str) -> bool {
        self.tiers.iter().any(|one| one == tier)
    }
}

/// Denies a key for a while after so many denials.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ban {
    pub name: String,
    /// The number of the limit that holds bans, and of the one that counts denials.
    pub bans: usize,
    pub denials: usize,
}

pub struct Override {
    pub until_s: f64,
    pub until: String,
    pub limits: Option<Vec<usize>>,
}

pub struct Plan {
    pub core: Core,
    /// The name of the file, by which rate limit requests name its rules.
    pub domain: String,
    pub client: Option<ClientAddress>,
    pub limits: Vec<Limit>,
    /// Of the limits in the memory of the host, which come first. Python decides the others.
    pub limiters: Vec<Limiter>,
    pub denies: Vec<Deny>,
    pub rules: Vec<Rule>,
    pub patterns: RegexSet,
    /// If a rule charges a request and its retries once.
    pub retries: Option<Retries>,
}

impl Plan {
    /// `limiters`: one for each of the document's limits; if there is a gate, of the first ones. The message of an error
    /// is for the operator.
    pub fn new(py: Python<'_>, document: &str, limiters: &[Bound<'_, PyAny>], has_gate: bool) -> Result<Plan, String> {
        let core = Core::import(py).map_err(|error| error.value(py).to_string())?;
        let document: Document = serde_json::from_str(document).map_err(|error| format!("the plan: {error}"))?;
        let count = document.limits.len();
        if limiters.len() > count || (limiters.len() < count && !has_gate) {
            return Err(format!("{} limiters for {count} limits", limiters.len()));
        }
        let opened = document.limits.iter().zip(limiters).map(|(limit, limiter)| {
            Limiter::open(core, limiter).map_err(|failure| {
                let users = document.rules.iter().filter(|rule| rule.uses(&document.limits, &limit.name));
                let names: Vec<String> = users.map(|rule| format!("{:?}", rule.name)).collect();
                format!(
                    "the limit {:?} of the rule {} can't be decided without Python: {}. Leave the rule to the \
                     middleware of the application",
                    limit.name,
                    names.join(", "),
                    core.message(failure)
                )
            })
        });
        let opened = opened.collect::<Result<Vec<_>, _>>()?;
        if let Some(limit) = document.limits.iter().find(|limit| limit.names_any_from(count)) {
            return Err(format!("the limit {:?} has a former one that isn't there", limit.name));
        }
        let mut patterns = Vec::new();
        let denies = document.denies.into_iter().map(|deny| {
            Ok(Deny {
                place: deny.place.numbered(&mut patterns),
                networks: Networks::new(&deny.networks, deny.until_s)?,
                denied: deny.denied.checked()?,
            })
        });
        let denies = denies.collect::<Result<Vec<_>, String>>()?;
        let rules = document.rules.into_iter().map(|rule| rule.compiled(&mut patterns, count));
        let rules = rules.collect::<Result<Vec<_>, String>>()?;
        let patterns = RegexSetBuilder::new(&patterns)
            .size_limit(LARGEST_PATTERNS)
            .build()
            .map_err(|error| format!("the path patterns can't be compiled: {error}"))?;
        let client = document.client.map(ClientAddress::new).transpose()?;
        let (domain, limits) = (document.domain, document.limits);
        let retries = document.retries.map(Retries::new);
        Ok(Plan { core, domain, client, limits, limiters: opened, denies, rules, patterns, retries })
    }
}

impl Plan {
    /// The limiters that need it from time to time: one, as all are in one store, and those whose permits are held.
    pub fn maintained(&self) -> impl Iterator<Item = &Limiter> {
        let pairs = self.limiters.iter().zip(&self.limits).enumerate();
        pairs
            .filter(|(number, (_, limit))| *number == 0 || limit.concurrency.is_some())
            .map(|(_, (limiter, _))| limiter)
    }
}

impl Where {
    fn numbered(self, patterns: &mut Vec<String>) -> Place {
        let pattern = self.pattern.map(|text| {
            patterns.push(whole(&text));
            patterns.len() - 1
        });
        Place { pattern, methods: self.methods }
    }
}

/// The expression of a whole text, as Python's `re.fullmatch` with `re.DOTALL` reads it.
fn whole(text: &str) -> String {
    format!(r"(?s)\A(?:{text})\z")
}

/// A path pattern with a group for one parameter.
pub fn compiled(text: &str) -> Result<Regex, String> {
    Regex::new(&whole(text)).map_err(|error| format!("the path pattern {text:?} can't be compiled: {error}"))
}

impl RuleDocument {
    /// The numbers of all limits that it may ask.
    fn numbers(&self) -> impl Iterator<Item = usize> {
        let others = self.overrides.iter().filter_map(|one| one.limits.as_ref()).flatten();
        let ban = self.ban.iter().flat_map(|ban| [ban.bans, ban.denials]);
        let canary = self.canary.iter().flat_map(|canary| &canary.limits);
        self.limits.iter().chain(others).chain(canary).copied().chain(ban)
    }

    fn uses(&self, limits: &[Limit], name: &str) -> bool {
        self.numbers().any(|number| limits.get(number).is_some_and(|limit| limit.name == name))
    }

    fn compiled(self, patterns: &mut Vec<String>, limit_count: usize) -> Result<Rule, String> {
        if let Some(number) = self.numbers().find(|number| *number >= limit_count) {
            return Err(format!("the rule {:?} has the limit number {number} of {limit_count}", self.name));
        }
        let list = |networks: &[String]| (!networks.is_empty()).then(|| Networks::new(networks, None)).transpose();
        let overrides = self.overrides.into_iter().map(|one| {
            let key = match one.key {
                KeyText::Text(text) => Key::text(&text),
                KeyText::Parts(parts) => Key::parts(parts.iter().map(String::as_str)),
            };
            (key, Override { until_s: one.until_s, until: one.until, limits: one.limits })
        });
        Ok(Rule {
            name: self.name,
            place: self.place.numbered(patterns),
            headers: self.headers,
            inside: list(&self.inside)?,
            outside: list(&self.outside)?,
            key: RuleKey::new(self.key)?,
            cost: self.cost,
            shadow: self.shadow,
            is_once: self.is_once,
            ban: self.ban,
            limits: self.limits,
            canary: self.canary.map(Canary::checked).transpose()?,
            lifted: self.lifted,
            overrides: overrides.collect(),
            denied: self.denied.checked()?,
            denied_by_override: self.denied_by_override.checked()?,
        })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;

    pub const PLANS: Target =
        Target { name: "plans", seeds: &[SMALLEST, WITH_A_RULE], check: a_document_is_compiled_or_refused };
    pub const PATTERNS: Target = Target {
        name: "patterns",
        seeds: &[b"", b"text/html\ntext/html", b"text/html, */*\n\n/html\n*\n"],
        check: a_pattern_has_parts_in_their_order,
    };

    const SMALLEST: &[u8] =
        br#"{"domain": "web", "client": null, "limits": [], "denies": [], "rules": [], "retries": null}"#;
    const WITH_A_RULE: &[u8] = br#"{"domain": "web",
"client": {"trusted": ["10.0.0.0/8"], "trusts_unix": true, "field": "forwarded", "ipv4_prefix": 32, "ipv6_prefix": 64},
"limits": [{"name": "a", "shown": "a", "policy": "\"a\";q=5;w=60", "prefix": "\"a\";r=", "allowance": "5 per minute",
"refill": [5, 60], "rate": [5, 60], "is_last": false, "concurrency": [5, 9], "carried": {"generation": 0, "marks": 0,
"links": [{"source": 0, "source_generation": 0, "target": 0, "target_generation": 1, "name": "b"}]}}],
"denies": [{"where": {"pattern": "/a[^/]*", "methods": []}, "networks": ["::/0"], "until_s": 1.5,
"denied": {"status": 403, "kind": "k", "title": "t", "answer": null}}],
"rules": [{"name": "r", "where": {"pattern": "/b/(.*)", "methods": ["GET"]},
"headers": [{"name": "accept", "parts": ["text/", ""]}], "inside": [], "outside": ["192.0.2.0/24"],
"key": {"everyone": false, "parts": [[{"word": "path", "name": "p", "patterns": ["/b/([^/]+)"]}, {"word": "address"}],
[{"word": "header", "name": "h"}, {"word": "tier", "field": "f"}, {"word": "constant", "text": "c"}]]},
"cost": 1, "shadow": false, "is_once": true, "ban": {"name": "b", "bans": 0, "denials": 0}, "limits": [0],
"canary": {"below": 9, "salt": [1], "limits": [0]}, "lifted": {"field": "f", "tiers": ["gold"]},
"overrides": [{"key": ["k"], "until_s": 1, "until": "u", "limits": [0]}],
"denied": {"status": 429, "kind": "k", "title": "t", "answer": {"fields": [["a", "b"]], "body": ""}},
"denied_by_override": {"status": 429, "kind": "k", "title": "t", "answer": null}}],
"retries": {"field": "idempotency-key", "most": 2, "lasts_ns": 9}}"#;

    fn a_document_is_compiled_or_refused(data: &[u8]) -> bool {
        let Ok(document) = serde_json::from_slice::<Document>(data) else { return false };
        let (mut patterns, count) = (Vec::new(), document.limits.len());
        if document.limits.iter().any(|limit| limit.names_any_from(count)) {
            return false;
        }
        let rules = document.rules.into_iter().map(|rule| rule.compiled(&mut patterns, count));
        let Ok(rules) = rules.collect::<Result<Vec<_>, _>>() else { return false };
        for rule in &rules {
            assert!(rule.place.pattern.is_none_or(|number| number < patterns.len()));
            assert!((400..600).contains(&rule.denied.status));
            let overriding = rule.overrides.values().filter_map(|one| one.limits.as_ref()).flatten();
            assert!(rule.limits.iter().chain(overriding).all(|number| *number < count));
        }
        document.retries.map(Retries::new);
        document.client.map(ClientAddress::new).is_none_or(|client| client.is_ok())
    }

    /// The input has a value, and the parts of a pattern, each in a line.
    fn a_pattern_has_parts_in_their_order(data: &[u8]) -> bool {
        let text = String::from_utf8_lossy(data);
        let mut lines = text.split('\n').map(str::to_owned);
        let value = lines.next().unwrap_or_default();
        let pattern = HeaderPattern { name: String::new(), parts: lines.collect() };
        let escaped: Vec<String> = pattern.parts.iter().map(|part| regex::escape(part)).collect();
        let is_match = !escaped.is_empty() && compiled(&escaped.join(".*")).unwrap().is_match(&value);
        assert_eq!(pattern.matches(&value), is_match);
        true
    }
}
