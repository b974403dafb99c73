//! A request as the rules see it, whoever asks about it.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::HeaderValue;

use crate::client::{ClientAddress, UnknownPeer};
use crate::entries::Entries;
use crate::plan::{Place, Rule};
use crate::readings::Readings;

const OVERRIDES: [&str; 3] = ["x-http-method-override", "x-http-method", "x-method-override"];

/// Whose request it is.
#[derive(Clone, Copy)]
pub enum Origin {
    /// A peer that may be a proxy, whose field then names the client. None: it is at the other end of a Unix socket.
    Peer(Option<IpAddr>),
    /// The client itself, or nobody.
    Client(Option<IpAddr>),
}

/// The header fields of a request.
#[derive(Clone, Copy)]
enum Fields<'a> {
    Sent(&'a HeaderMap),
    /// A descriptor tells about a request no more than these entries.
    Described(&'a Entries<'a>),
}

pub struct Asked<'a> {
    method: &'a str,
    methods: OnceCell<Vec<String>>,
    pub readings: Readings,
    fields: Fields<'a>,
    client: Option<&'a ClientAddress>,
    origin: Origin,
    client_key: OnceCell<Option<String>>,
    /// How often it counts.
    pub hits: u64,
}

impl<'a> Asked<'a> {
    pub fn new(
        method: &'a str,
        readings: Readings,
        fields: &'a HeaderMap,
        client: Option<&'a ClientAddress>,
        origin: Origin,
    ) -> Asked<'a> {
        Asked::with(method, readings, Fields::Sent(fields), client, origin)
    }

    /// A request that a descriptor describes.
    pub fn described(
        method: &'a str,
        readings: Readings,
        entries: &'a Entries<'a>,
        client: Option<&'a ClientAddress>,
        origin: Origin,
    ) -> Asked<'a> {
        Asked::with(method, readings, Fields::Described(entries), client, origin)
    }

    fn with(
        method: &'a str,
        readings: Readings,
        fields: Fields<'a>,
        client: Option<&'a ClientAddress>,
        origin: Origin,
    ) -> Asked<'a> {
        let (methods, client_key) = (OnceCell::new(), OnceCell::new());
        Asked { method, methods, readings, fields, client, origin, client_key, hits: 1 }
    }

    /// In capitals: of the request line, and of the fields that override it.
    pub fn methods(&self) -> &[String] {
        self.methods.get_or_init(|| methods(self.method, self.fields))
    }

    /// Whether it is a descriptor.
    pub fn is_described(&self) -> bool {
        matches!(self.fields, Fields::Described(_))
    }

    /// Whether a rule may be for it. A descriptor is for the rules that name its entries.
    pub fn suits(&self, rule: &Rule) -> bool {
        match self.fields {
            Fields::Sent(_) => true,
            Fields::Described(entries) => entries.are_of(rule),
        }
    }

    /// Whether it is known whether it is at this place.
    pub fn tells(&self, place: &Place) -> bool {
        match self.fields {
            Fields::Sent(_) => true,
            Fields::Described(entries) => entries.tell(place),
        }
    }

    /// The value of a field, several joined by commas, as Latin-1. `name` is in small letters.
    pub fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        self.fields.joined(name)
    }

    /// The tier in this field; empty if nobody has named one, which every rule limits.
    pub fn tier(&self, field: &str) -> Cow<'_, str> {
        self.header(field).unwrap_or_default()
    }

    /// The key of the client's address.
    pub fn client_key(&self) -> Result<&str, UnknownPeer> {
        let found = self.client_key.get_or_init(|| {
            let client = self.client?;
            let origin = match self.origin {
                Origin::Peer(peer) => return client.key_of(peer, self.proxied(client).as_deref()).ok(),
                Origin::Client(address) => address?,
            };
            Some(client.reduced(origin))
        });
        found.as_deref().ok_or(UnknownPeer)
    }

    /// The whole address of the client; None if it is unknown.
    pub fn client_address(&self) -> Option<IpAddr> {
        let client = self.client?;
        match self.origin {
            Origin::Peer(peer) => client.address_of(peer, self.proxied(client).as_deref()),
            Origin::Client(address) => address,
        }
    }

    /// Whether nothing says who the client is, though it should.
    pub fn has_no_peer(&self) -> bool {
        if self.is_described() {
            return false;
        }
        match self.origin {
            Origin::Peer(peer) => peer.is_none() && !self.client.is_some_and(|client| client.trusts_unix),
            Origin::Client(address) => address.is_none(),
        }
    }

    /// Whether a browser may have sent it before a request of another origin.
    pub fn is_preflight(&self) -> bool {
        let has = |name: &str| self.header(name).is_some_and(|value| !value.is_empty());
        has("origin") && has("access-control-request-method") && self.methods() == ["OPTIONS"]
    }

    fn proxied(&self, client: &ClientAddress) -> Option<Cow<'_, str>> {
        self.header(client.field.as_deref()?)
    }
}

impl<'a> Fields<'a> {
    fn joined(self, name: &str) -> Option<Cow<'a, str>> {
        match self {
            Fields::Sent(fields) => joined(fields.get_all(name).iter().map(HeaderValue::as_bytes)),
            Fields::Described(entries) => joined(entries.values(name)),
        }
    }
}

fn joined<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Option<Cow<'a, str>> {
    let mut text = latin_1(values.next()?);
    for value in values {
        text.to_mut().push(',');
        text.to_mut().push_str(&latin_1(value));
    }
    Some(text)
}

fn latin_1(bytes: &[u8]) -> Cow<'_, str> {
    if bytes.is_ascii() {
        return String::from_utf8_lossy(bytes);
    }
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

/// The method, and those that the application may follow instead. A WebSocket's handshake is a `WEBSOCKET`, too.
fn methods(method: &str, fields: Fields<'_>) -> Vec<String> {
    let mut methods = vec![method.to_uppercase()];
    match fields {
        Fields::Sent(fields) => {
            fields.iter().for_each(|(name, value)| add_overrides(&mut methods, name.as_str(), value.as_bytes()));
        }
        Fields::Described(entries) => {
            entries.fields.iter().for_each(|(name, value)| add_overrides(&mut methods, name.as_str(), value));
        }
    }
    let upgrades = fields.joined("upgrade").is_some_and(|value| value.to_ascii_lowercase().contains("websocket"));
    if upgrades || fields.joined("sec-websocket-version").is_some() {
        methods.push("WEBSOCKET".to_owned());
    }
    methods
}

/// Add the methods of this field, if it overrides the method.
fn add_overrides(methods: &mut Vec<String>, name: &str, value: &[u8]) {
    // A WSGI application reads X_HTTP_Method as X-HTTP-Method.
    if !name.starts_with('x') || !OVERRIDES.contains(&name.replace('_', "-").as_str()) {
        return;
    }
    // Some applications read it as UTF-8, others as Latin-1.
    let texts = [String::from_utf8_lossy(value), latin_1(value)];
    let several = if texts[0] == texts[1] { &texts[..1] } else { &texts[..] };
    for text in several.iter().filter(|text| !text.is_empty()) {
        methods.extend(text.split(',').map(|one| one.trim().to_uppercase()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_is_read_as_utf_8_and_as_latin_1() {
        let mut fields = HeaderMap::new();
        fields.append("x_http_method", HeaderValue::from_bytes(b"pa\xdf, put").unwrap());
        fields.append("x-method-override", HeaderValue::from_bytes("po\u{17f}t".as_bytes()).unwrap());
        let found = methods("get", Fields::Sent(&fields));
        for method in ["GET", "PASS", "PUT", "POST"] {
            assert!(found.iter().any(|one| one == method), "{method} isn't in {found:?}");
        }
    }
}
