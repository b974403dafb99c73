//! The entries of a rate limit descriptor, as a request that rules match.
//!
//! `path`, `method` and `remote_address` describe the request; each other entry is a header field. A rule is for a
//! descriptor that has all entries which the rule names, and no other: as in Envoy's own service, where a descriptor
//! leads to one place of the configuration. So descriptors of callers and paths don't charge a rule for callers.

use std::borrow::Cow;

use hyper::header::HeaderName;

use crate::keys::Source;
use crate::plan::{Place, Rule};

pub const PATH: &str = "path";
pub const METHOD: &str = "method";
pub const ADDRESS: &str = "remote_address";

#[derive(Default)]
pub struct Entries<'a> {
    /// The header fields, and their values.
    pub fields: Vec<(HeaderName, Cow<'a, [u8]>)>,
    /// Which entries there are that are no fields.
    pub path: bool,
    pub method: bool,
    pub address: bool,
    /// One that no rule can name: its key isn't the name of a field.
    pub unnameable: bool,
}

impl Entries<'_> {
    /// The values of a field.
    pub fn values(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        self.fields.iter().filter(move |(one, _)| one.as_str() == name).map(|(_, value)| value.as_ref())
    }

    /// Whether a rule names all these entries, and finds all that it needs among them.
    pub fn are_of(&self, rule: &Rule) -> bool {
        let in_key = |source: Source<'_>| rule.key.sources().flatten().any(|one| one == source);
        let needs_address = rule.inside.is_some() || rule.outside.is_some();
        let is_named = |name: &str| {
            rule.headers.iter().any(|one| one.name == name)
                || rule.lifted.as_ref().is_some_and(|lifted| lifted.field == name)
                || in_key(Source::Field(name))
                || in_key(Source::Tier(name))
        };
        !self.unnameable
            && self.path == rule.place.pattern.is_some()
            && self.method != rule.place.methods.is_empty()
            && (self.address || !needs_address)
            && (!self.address || needs_address || in_key(Source::Address))
            && self.fields.iter().all(|(name, _)| is_named(name.as_str()))
            && rule.key.sources().all(|mut part| part.any(|source| self.has(source)))
    }

    /// Whether they describe a request so far that it is known whether it is at this place.
    pub fn tell(&self, place: &Place) -> bool {
        (self.path || place.pattern.is_none()) && (self.method || place.methods.is_empty())
    }

    fn has(&self, source: Source<'_>) -> bool {
        match source {
            Source::Address => self.address,
            Source::Field(name) => self.values(name).next().is_some_and(|value| !value.is_empty()),
            Source::Tier(_) | Source::Rule => true,
        }
    }
}
