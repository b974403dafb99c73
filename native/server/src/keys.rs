//! For whom a request counts: the keys of `forebay.rules.keys`.

use std::borrow::Cow;
use std::collections::HashSet;

use regex::Regex;
use serde::Deserialize;

use crate::capi::Key;
use crate::client::UnknownPeer;
use crate::plan;
use crate::readings;
use crate::request::Asked;

/// The first part of keys of CORS preflights, which leave a client its own limit.
pub const PREFLIGHT: &str = "CORS preflight";
/// The value of a path parameter that a router may read in several ways.
const AMBIGUOUS: &str = "";
const EVERYONE: &str = "everyone";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyDocument {
    /// Whether it is one key for all requests, as the key function `everyone` has it.
    everyone: bool,
    /// Parts, each with alternatives of which the first that a request has counts.
    parts: Vec<Vec<AlternativeDocument>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "word", rename_all = "lowercase")]
enum AlternativeDocument {
    Address,
    /// The field's name is in small letters.
    Tier {
        field: String,
    },
    Constant {
        text: String,
    },
    /// The name is in small letters.
    Header {
        name: String,
    },
    Path {
        name: String,
        patterns: Vec<String>,
    },
}

enum Alternative {
    Address,
    Tier(String),
    Constant(String),
    Header(String),
    Path(String, Vec<Regex>),
}

/// What an alternative of a key reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    Address,
    /// A header field, by its name in small letters.
    Field(&'a str),
    /// A field that names the tier, or none.
    Tier(&'a str),
    /// The rule itself, which has a constant, or a path with a parameter.
    Rule,
}

/// The key of a rule.
pub struct RuleKey {
    is_everyone: bool,
    parts: Vec<Vec<Alternative>>,
}

/// The key of a request: a text, or several.
pub enum Found<'a> {
    Text(&'a str),
    Parts(Vec<Cow<'a, str>>),
}

impl Found<'_> {
    pub fn key(&self) -> Key {
        match self {
            Found::Text(text) => Key::text(text),
            Found::Parts(parts) => Key::parts(parts.iter().map(Cow::as_ref)),
        }
    }

    /// All of it, for a hash.
    pub fn joined(&self) -> Vec<u8> {
        match self {
            Found::Text(text) => text.as_bytes().to_vec(),
            Found::Parts(parts) => parts.join("\0").into_bytes(),
        }
    }
}

impl RuleKey {
    pub fn new(document: KeyDocument) -> Result<RuleKey, String> {
        let mut parts = Vec::new();
        for part in document.parts {
            parts.push(part.into_iter().map(Alternative::new).collect::<Result<Vec<_>, String>>()?);
        }
        Ok(RuleKey { is_everyone: document.everyone, parts })
    }

    /// For each part, what its alternatives read. A key for everyone has no parts.
    pub fn sources(&self) -> impl Iterator<Item = impl Iterator<Item = Source<'_>>> {
        self.parts.iter().map(|part| {
            part.iter().map(|alternative| match alternative {
                Alternative::Address => Source::Address,
                Alternative::Header(name) => Source::Field(name),
                Alternative::Tier(name) => Source::Tier(name),
                Alternative::Constant(_) | Alternative::Path(..) => Source::Rule,
            })
        })
    }

    pub fn of<'a>(&'a self, asked: &'a Asked<'_>) -> Result<Found<'a>, UnknownPeer> {
        if self.is_everyone {
            return Ok(Found::Text(EVERYONE));
        }
        let mut texts = Vec::new();
        for part in &self.parts {
            for alternative in part {
                if let (Alternative::Address, [_]) = (alternative, self.parts.as_slice()) {
                    return Ok(Found::Text(asked.client_key()?));
                }
                let Some(value) = alternative.of(asked)? else { continue };
                alternative.push_kind(&mut texts);
                texts.push(value);
                break;
            }
        }
        Ok(Found::Parts(texts))
    }
}

impl Alternative {
    fn new(document: AlternativeDocument) -> Result<Alternative, String> {
        Ok(match document {
            AlternativeDocument::Address => Alternative::Address,
            AlternativeDocument::Tier { field } => Alternative::Tier(field),
            AlternativeDocument::Constant { text } => Alternative::Constant(text),
            AlternativeDocument::Header { name } => Alternative::Header(name),
            AlternativeDocument::Path { name, patterns } => {
                let patterns = patterns.iter().map(|text| plan::compiled(text));
                Alternative::Path(name, patterns.collect::<Result<Vec<_>, String>>()?)
            }
        })
    }

    /// What the value begins with.
    fn push_kind<'a>(&'a self, texts: &mut Vec<Cow<'a, str>>) {
        match self {
            Alternative::Address => texts.push("address".into()),
            Alternative::Tier(_) => texts.push("tier".into()),
            Alternative::Constant(_) => texts.push("constant".into()),
            Alternative::Header(name) => texts.extend(["header".into(), name.into()]),
            Alternative::Path(name, _) => texts.extend(["path".into(), name.into()]),
        }
    }

    /// None if the request has no such value.
    fn of<'a>(&'a self, asked: &'a Asked<'_>) -> Result<Option<Cow<'a, str>>, UnknownPeer> {
        Ok(match self {
            Alternative::Address => Some(asked.client_key()?.into()),
            Alternative::Tier(field) => Some(asked.tier(field)),
            Alternative::Constant(text) => Some(text.into()),
            Alternative::Header(name) => asked.header(name).filter(|value| !value.is_empty()),
            Alternative::Path(_, patterns) => Some(parameter(patterns, asked).into()),
        })
    }
}

/// The value that all readings of the path agree on. In those of the path as it was sent, the value is encoded.
fn parameter(patterns: &[Regex], asked: &Asked<'_>) -> String {
    let read = |path: &String| {
        let found: Vec<String> =
            patterns.iter().filter_map(|pattern| Some(pattern.captures(path)?.get(1)?.as_str().to_owned())).collect();
        found
    };
    let sent = asked.readings.sent.iter().flat_map(read).map(|value| readings::unquote(&value).into_owned());
    let values: HashSet<String> = asked.readings.decoded.iter().flat_map(read).chain(sent).collect();
    let mut values = values.into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value,
        _ => AMBIGUOUS.to_owned(),
    }
}
