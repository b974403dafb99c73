//! The readings of a path: every path that some router may route it as.
//!
//! The port of `forebay.web.paths` and of the texts of `forebay.web.native_requests`; tests compare the two. A server
//! in front of applications sees the path before any of them has decoded it, so the path as it was sent is a reading,
//! too: some routers match it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::LazyLock;

use regex::Regex;

/// Characters of a path. It bounds the cost of a request.
pub const LONGEST_READ: usize = 1024;
const MOST_MOUNTS: usize = 2;

static ANYWHERE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"/\.\.?(?:[;/]|\n?\z)|\n(?:[;/]|\z)").expect("the expression is valid"));
static SLASHES: LazyLock<Regex> = LazyLock::new(|| Regex::new("//+").expect("the expression is valid"));
static PARAMETERS: LazyLock<Regex> = LazyLock::new(|| Regex::new(";[^/]*").expect("the expression is valid"));

/// What routers may read in the target of a request.
#[derive(Debug, Default)]
pub struct Readings {
    /// Each reading once. None: it may be any path.
    pub all: Vec<String>,
    /// Those of the path as it was sent. The values in them are encoded.
    pub sent: Vec<String>,
    /// Those of the decoded path.
    pub decoded: Vec<String>,
}

impl Readings {
    pub fn may_be_any(&self) -> bool {
        self.all.is_empty()
    }
}

/// The readings of a target such as `/users/7?page=2`, as the client has sent it.
///
/// Some servers end the path at a question mark, others at the sign of a fragment, too.
pub fn of_target(target: &[u8]) -> Readings {
    let path = until(target, b'?');
    let shorter = until(path, b'#');
    let mut sent = Vec::new();
    let mut decoded = Vec::new();
    let mut texts = vec![path.to_vec()];
    if shorter.len() < path.len() {
        texts.push(shorter.to_vec());
    }
    for read in [without_omitted, with_slashes, without_host] {
        let more: Vec<Vec<u8>> = texts.iter().filter_map(|text| read(text)).collect();
        texts.extend(more);
    }
    for text in texts {
        let bytes = unquoted(&text);
        decoded.extend(texts_of(&bytes));
        decoded.extend(with_slashes(&bytes).iter().flat_map(|bytes| texts_of(bytes)));
        sent.push(String::from_utf8_lossy(&text).into_owned());
    }
    let (sent, decoded) = (readings(&sent), readings(&decoded));
    if sent.is_empty() || decoded.is_empty() {
        return Readings::default();
    }
    let all = unique(sent.iter().chain(&decoded).cloned());
    Readings { all, sent, decoded }
}

/// Without what parsers of URLs omit, for one those of gunicorn and of browsers. Most servers refuse it.
fn without_omitted(text: &[u8]) -> Option<Vec<u8>> {
    let is_omitted = |byte: &u8| matches!(byte, b'\t' | b'\r' | b'\n');
    text.iter().any(is_omitted).then(|| text.iter().copied().filter(|byte| !is_omitted(byte)).collect())
}

/// With a slash for each backslash, as WHATWG's parser and IIS read them.
fn with_slashes(text: &[u8]) -> Option<Vec<u8>> {
    text.contains(&b'\\').then(|| text.iter().map(|byte| if *byte == b'\\' { b'/' } else { *byte }).collect())
}

/// The path of `//host/login`, as Node's `new URL(target, base)` and PHP's `parse_url` read it.
fn without_host(text: &[u8]) -> Option<Vec<u8>> {
    // WHATWG's parser skips any number of slashes before the host.
    let behind = text.strip_prefix(b"//")?;
    let host = &behind[behind.iter().position(|byte| *byte != b'/').unwrap_or(behind.len())..];
    let path = host.iter().position(|byte| *byte == b'/').map_or(&b"/"[..], |at| &host[at..]);
    Some(path.to_vec())
}

fn until(text: &[u8], end: u8) -> &[u8] {
    &text[..text.iter().position(|byte| *byte == end).unwrap_or(text.len())]
}

/// Every path that a router may read in one of these, each once; none if it may be any path.
pub fn readings(paths: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for path in paths {
        if is_plain(path) {
            found.push(path.clone());
            continue;
        }
        let odd = odd_readings(path);
        if odd.is_empty() {
            return Vec::new();
        }
        found.extend(odd);
    }
    unique(found)
}

/// Whether every router reads it as it is, apart from a slash or a line's end after it.
fn is_plain(path: &str) -> bool {
    let mut before = ' ';
    path.starts_with('/')
        && path.chars().all(|character| {
            let is_odd = matches!(character, '%' | '\n' | ';' | '\u{fffd}')
                || (before == '/' && matches!(character, '/' | '.' | '@'));
            before = character;
            !is_odd
        })
}

fn odd_readings(path: &str) -> Vec<String> {
    if path.chars().count() > LONGEST_READ {
        return Vec::new();
    }
    let mut texts = vec![path.to_owned()];
    if path.contains('\u{fffd}') {
        // Bytes that aren't UTF-8: some routers omit them.
        texts.push(path.replace('\u{fffd}', ""));
    }
    let mut known: Vec<String> = texts.iter().flat_map(|text| with_slash(text)).collect();
    if path.contains('%') {
        // Decoded before or after a slash is put in front.
        let after: Vec<String> = known.iter().map(|text| unquote(text).into_owned()).collect();
        let before = texts.iter().flat_map(|text| with_slash(&unquote(text)));
        known = known.into_iter().chain(after).chain(before).collect();
    }
    if known.iter().any(|text| ANYWHERE.is_match(text)) {
        return Vec::new();
    }
    unique(unique(known).into_iter().flat_map(|reading| {
        let single = SLASHES.replace_all(&reading, "/").into_owned();
        let rooted = format!("/{}", reading.trim_start_matches('/'));
        let (whole, bare) = (traversed(&reading), traversed(&PARAMETERS.replace_all(&reading, "")));
        [reading, rooted, single, whole, bare]
    }))
}

fn unique(texts: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    texts.into_iter().filter(|text| seen.insert(text.clone())).collect()
}

/// The readings of a path that begins without a slash.
fn with_slash(path: &str) -> Vec<String> {
    if path.starts_with('/') {
        return vec![path.to_owned()];
    }
    let after = path.split_once('/').map_or("", |(_, after)| after);
    let mut found = vec![format!("/{path}"), format!("/{after}")];
    found.extend(paths_of_url(path));
    found
}

/// The path of a URL as `urllib.parse.urlsplit` finds it, with a slash in front. If that may refuse the host, both the
/// path and the slash that is then read.
fn paths_of_url(text: &str) -> Vec<String> {
    let mut rest: String = text
        .trim_start_matches(|character: char| character <= ' ')
        .chars()
        .filter(|character| !matches!(character, '\t' | '\r' | '\n'))
        .collect();
    if let Some(colon) = rest.find(':') {
        let is_scheme = rest.starts_with(|first: char| first.is_ascii_alphabetic())
            && rest[..colon].chars().all(|one| one.is_ascii_alphanumeric() || matches!(one, '+' | '-' | '.'));
        if is_scheme {
            rest.drain(..=colon);
        }
    }
    let mut is_odd_host = false;
    if let Some(behind) = rest.strip_prefix("//") {
        let end = behind.find(['/', '?', '#']).unwrap_or(behind.len());
        let host = &behind[..end];
        is_odd_host = !host.is_ascii() || host.contains(['[', ']']);
        rest = behind[end..].to_owned();
    }
    let path = &rest[..rest.find(['#', '?']).unwrap_or(rest.len())];
    let mut found = vec![format!("/{path}")];
    if is_odd_host {
        found.push("/".to_owned());
    }
    found
}

/// As Pyramid's traversal reads it: without empty segments, and without `@@` before a view's name.
fn traversed(path: &str) -> String {
    let segments = path.split('/').filter(|segment| !segment.is_empty());
    let mut read = String::new();
    for segment in segments {
        read.push('/');
        read.push_str(segment.strip_prefix("@@").unwrap_or(segment));
    }
    if read.is_empty() { "/".to_owned() } else { read }
}

/// The texts of decoded bytes: some routers read bytes that aren't UTF-8 as Latin-1, and Bottle omits them, and decodes
/// the path again beneath each of its mounts.
fn texts_of(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes).into_owned();
    if text.is_ascii() {
        return vec![text];
    }
    let mut texts = vec![text];
    if texts[0].contains('\u{fffd}') {
        texts.push(bytes.iter().map(|byte| char::from(*byte)).collect());
    }
    let mut again = without_invalid(bytes);
    for _ in 0..MOST_MOUNTS {
        let Some(encoded) = latin_1(&again) else { break };
        again = without_invalid(&encoded);
        texts.push(again.clone());
    }
    texts
}

fn without_invalid(bytes: &[u8]) -> String {
    bytes.utf8_chunks().map(|chunk| chunk.valid()).collect()
}

fn latin_1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|character| u8::try_from(u32::from(character)).ok()).collect()
}

/// As `urllib.parse.unquote`: percent signs are decoded in each run of ASCII characters, as UTF-8.
pub fn unquote(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let mut read = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|character: char| !character.is_ascii()).unwrap_or(rest.len());
        read.push_str(&String::from_utf8_lossy(&unquoted(&rest.as_bytes()[..end])));
        rest = &rest[end..];
        let other = rest.find(|character: char| character.is_ascii()).unwrap_or(rest.len());
        read.push_str(&rest[..other]);
        rest = &rest[other..];
    }
    Cow::Owned(read)
}

fn unquoted(bytes: &[u8]) -> Vec<u8> {
    let mut read = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digit = |place: usize| bytes.get(place).and_then(|byte| char::from(*byte).to_digit(16));
        match (bytes[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                read.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, _, _) => {
                read.push(byte);
                at += 1;
            }
        }
    }
    read
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;

    pub const PATHS: Target = Target {
        name: "paths",
        seeds: &[
            b"/users/7?page=2#x",
            b"/a%2Fb;c/..%2f\\d",
            b"//u:p@[::1]:80/login",
            b"http://h\xc3\xa9/\xff",
            b"/@@view/%ff%e9",
        ],
        check: every_path_is_read,
    };

    /// Of a target, as far as fuzzing has found.
    const MOST_READINGS: usize = 1 << 10;
    /// Bytes of a reading for each of the target: of one that isn't UTF-8.
    const LONGEST_OF_BYTE: usize = 3;

    fn every_path_is_read(target: &[u8]) -> bool {
        let Readings { all, sent, decoded } = of_target(target);
        assert_eq!(all.is_empty(), sent.is_empty() || decoded.is_empty());
        assert_eq!(all, unique(sent.into_iter().chain(decoded)));
        assert!(all.len() <= MOST_READINGS, "{} readings", all.len());
        for reading in &all {
            assert!(reading.starts_with('/') && reading.len() <= LONGEST_OF_BYTE * target.len() + 1, "{reading:?}");
        }
        if !target.contains(&b'?') {
            assert_eq!(of_target(&[target, b"?/a/../%2e"].concat()).all, all, "a query is no part of the path");
        }
        let encoded: String = target.iter().map(|byte| format!("%{byte:02X}")).collect();
        let (read, path) = (of_target(format!("/{encoded}").as_bytes()), String::from_utf8_lossy(target));
        assert!(read.may_be_any() || read.decoded.contains(&format!("/{path}")), "an encoded path is decoded");
        if !target.starts_with(b"/") && !target.iter().any(|byte| b"%?#\\\t\r\n".contains(byte)) {
            let same = of_target(&[b"/", target].concat()).decoded;
            assert!(read.may_be_any() || read.decoded == same, "every byte may be encoded");
        }
        assert_eq!(unquote(&path.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>()), path);
        true
    }

    #[test]
    fn a_plain_path_has_one_reading() {
        assert_eq!(of_target(b"/users/7?page=2").all, ["/users/7"]);
    }

    #[test]
    fn an_encoded_path_is_read_as_it_was_sent_and_decoded() {
        let all = of_target(b"/a%2Fb").all;
        assert!(all.contains(&"/a%2Fb".to_owned()) && all.contains(&"/a/b".to_owned()));
    }

    #[test]
    fn a_fragment_is_read_with_and_without() {
        let all = of_target(b"/login#x?y").all;
        assert!(all.contains(&"/login#x".to_owned()) && all.contains(&"/login".to_owned()));
    }

    #[test]
    fn a_tab_is_read_with_and_without() {
        let all = of_target(b"/lo\tgin?x").all;
        assert!(all.contains(&"/lo\tgin".to_owned()) && all.contains(&"/login".to_owned()));
    }

    #[test]
    fn a_host_is_read_as_a_part_of_the_path_and_as_a_host() {
        for target in ["//host/login", "/\\host/login", "\\\\host\\login", "///host/login", "//u:p@[::1]:80/login#x"] {
            let all = of_target(target.as_bytes()).all;
            assert!(all.contains(&"/login".to_owned()), "{target} is read as {all:?}");
        }
        assert!(of_target(b"//host").all.contains(&"/".to_owned()));
        assert!(of_target(b"//host/../login").all.is_empty());
    }

    #[test]
    fn a_backslash_is_read_as_it_is_and_as_a_slash() {
        for target in ["/api\\login", "/api%5Clogin", "/api%5clogin?x"] {
            let all = of_target(target.as_bytes()).all;
            assert!(all.contains(&"/api/login".to_owned()) && all.contains(&"/api\\login".to_owned()));
        }
        assert!(of_target(b"/api\\..\\login").all.is_empty());
    }

    #[test]
    fn dots_may_lead_anywhere() {
        assert!(of_target(b"/a/../login").all.is_empty());
        assert!(of_target(b"/a/%2e%2e/login").all.is_empty());
        assert!(of_target(&[b'/'; LONGEST_READ + 1]).all.is_empty());
    }

    #[test]
    fn a_whole_url_is_read_as_its_path() {
        assert!(of_target(b"http://host/login").all.contains(&"/login".to_owned()));
    }
}
