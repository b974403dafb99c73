//! Which peers may change state by the JSON API, in which they name the clients themselves.

use std::hint::black_box;
use std::net::IpAddr;

use hyper::header::{AUTHORIZATION, HeaderMap, ORIGIN};

use crate::client::ClientAddress;

const SCHEME: &[u8] = b"bearer ";

/// Why a peer may not ask, for that peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It sends no token, or another one.
    Token,
    /// Without a token, this peer may not.
    Peer(&'static str),
}

/// With a token, each peer that sends it may ask. Without, those of this host and the trusted proxies.
#[derive(Clone)]
pub struct Access(pub Option<String>);

impl Access {
    pub fn check(
        &self,
        peer: Option<IpAddr>,
        client: Option<&ClientAddress>,
        fields: &HeaderMap,
    ) -> Result<(), Refusal> {
        if let Some(token) = &self.0 {
            return if has_token(fields, token.as_bytes()) { Ok(()) } else { Err(Refusal::Token) };
        }
        // A page of any site can have a browser of this host send a question.
        if fields.contains_key(ORIGIN) {
            return Err(Refusal::Peer(
                "a page in a browser may ask with a token only: start the server with --token-file",
            ));
        }
        let is_near = peer.is_none_or(|address| address.is_loopback());
        if is_near || client.is_some_and(|client| client.trusts(peer)) {
            return Ok(());
        }
        Err(Refusal::Peer("a peer of another host may ask with a token only: start the server with --token-file"))
    }
}

fn has_token(fields: &HeaderMap, token: &[u8]) -> bool {
    let mut values = fields.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return false };
    let given = value.as_bytes();
    given.len() > SCHEME.len()
        && given[..SCHEME.len()].eq_ignore_ascii_case(SCHEME)
        && is_same(given[SCHEME.len()..].trim_ascii(), token)
}

/// Takes as long for every text of one length.
fn is_same(given: &[u8], token: &[u8]) -> bool {
    given.len() == token.len()
        && black_box(given.iter().zip(token).fold(0, |all, (one, other)| all | (one ^ other))) == 0
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;

    pub const TOKENS: Target = Target {
        name: "tokens",
        seeds: &[b"Bearer secret", b"bearer  secret ", b"Basic c2VjcmV0"],
        check: one_token_is_admitted,
    };

    fn one_token_is_admitted(value: &[u8]) -> bool {
        let Ok(value) = hyper::header::HeaderValue::from_bytes(value) else { return false };
        let mut fields = HeaderMap::from_iter([(AUTHORIZATION, value.clone())]);
        let mut words = value.as_bytes().splitn(2, |byte| *byte == b' ');
        let is_bearer = words.next().is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer"));
        let is_admitted = is_bearer && words.next().is_some_and(|token| token.trim_ascii() == b"secret");
        assert_eq!(has_token(&fields, b"secret"), is_admitted);
        fields.append(AUTHORIZATION, value);
        assert!(!has_token(&fields, b"secret"), "two values are none");
        true
    }

    fn checked(token: Option<&str>, peer: &str, name: &'static str, value: &'static str) -> Result<(), Refusal> {
        let fields = HeaderMap::from_iter([(
            hyper::header::HeaderName::from_static(name),
            hyper::header::HeaderValue::from_static(value),
        )]);
        Access(token.map(str::to_owned)).check(Some(peer.parse().unwrap()), None, &fields)
    }

    #[test]
    fn a_token_opens_the_api_to_every_peer() {
        assert!(checked(Some("secret"), "192.0.2.1", "authorization", "Bearer secret").is_ok());
        assert!(checked(Some("secret"), "192.0.2.1", "authorization", "bearer secret").is_ok());
        for value in ["Bearer secre", "Bearer secrets", "Bearer ", "secret", "Basic secret"] {
            assert_eq!(checked(Some("secret"), "127.0.0.1", "authorization", value), Err(Refusal::Token));
        }
    }

    #[test]
    fn without_a_token_only_this_host_may_ask() {
        assert!(checked(None, "127.0.0.1", "accept", "*/*").is_ok());
        assert!(checked(None, "::1", "accept", "*/*").is_ok());
        assert!(checked(None, "192.0.2.1", "accept", "*/*").is_err());
        assert!(checked(None, "127.0.0.1", "origin", "https://a.example").is_err());
    }
}
