//! The client's address, by the fields of trusted proxies, and lists of networks: the port of `forebay.web.client` and
//! `forebay.web.addresses`. Tests compare the two.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex::Regex;
use serde::Deserialize;

/// The key of a client behind a Unix socket whose proxy names nobody.
const UNIX: &str = "unix";
const MOST_COMMAS: usize = 10;
const PAIR: &str = r#"([!#$%&'*+.^_`|~0-9A-Za-z-]+)=([!#$%&'*+.^_`|~0-9A-Za-z-]+|"(?:[^"\\]|\\.)*")"#;

/// An element of `Forwarded` (RFC 7239).
static ELEMENT: LazyLock<Regex> = LazyLock::new(|| {
    let element = format!(r"\A\s*(?:{PAIR})?(?:\s*;\s*(?:{PAIR})?)*\s*\z");
    Regex::new(&element).expect("the expression is valid")
});
static PAIRS: LazyLock<Regex> = LazyLock::new(|| Regex::new(PAIR).expect("the expression is valid"));

/// An address with or without a port or brackets. IPv4 in IPv6 is IPv4.
pub fn as_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    parsed(text).or_else(|| parsed(without_port(text)?))
}

fn parsed(text: &str) -> Option<IpAddr> {
    text.split('%').next()?.parse().ok().map(|address: IpAddr| address.to_canonical())
}

/// The address in `[2001:db8::1]:443`, `[2001:db8::1]` or `192.0.2.1:443`.
fn without_port(text: &str) -> Option<&str> {
    let (address, behind) = match text.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let is_port =
        |port: &str| !port.is_empty() && port.chars().all(|character| character.is_alphanumeric() || character == '_');
    (behind.is_empty() || behind.strip_prefix(':').is_some_and(is_port)).then_some(address)
}

/// Networks, until a time in seconds of the wall clock, or for good.
#[derive(Debug)]
pub struct Networks {
    /// For each length of a prefix, by version: the prefixes.
    lengths: BTreeMap<(bool, u8), BTreeSet<u128>>,
    until_s: f64,
}

impl Networks {
    /// `networks`: such as `10.0.0.0/8`, without host bits.
    pub fn new(networks: &[String], until_s: Option<f64>) -> Result<Networks, String> {
        let mut lengths: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for text in networks {
            let network = text.split_once('/').and_then(|(address, length)| {
                let (address, length): (IpAddr, u8) = (address.parse().ok()?, length.parse().ok()?);
                (length <= bits_of(address)).then_some((address, length))
            });
            let Some((address, length)) = network else { return Err(format!("{text:?} is no network")) };
            lengths.entry((address.is_ipv4(), length)).or_default().insert(prefix_of(address, length));
        }
        Ok(Networks { lengths, until_s: until_s.unwrap_or(f64::INFINITY) })
    }

    pub fn has(&self, address: IpAddr) -> bool {
        let mut of_version = self.lengths.iter().filter(|((is_v4, _), _)| *is_v4 == address.is_ipv4());
        of_version.any(|((_, length), prefixes)| prefixes.contains(&prefix_of(address, *length)))
    }

    /// When the address leaves the list; None if it isn't in it.
    pub fn end_s(&self, address: IpAddr) -> Option<f64> {
        self.has(address).then_some(self.until_s)
    }
}

fn bits_of(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn prefix_of(address: IpAddr, length: u8) -> u128 {
    let number = match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    };
    number.checked_shr(u32::from(bits_of(address) - length)).unwrap_or(0)
}

/// As a rule file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientDocument {
    trusted: Vec<String>,
    trusts_unix: bool,
    field: Option<String>,
    ipv4_prefix: u8,
    ipv6_prefix: u8,
}

/// The server reports no address of its peer, and none is trusted that it could name.
#[derive(Debug)]
pub struct UnknownPeer;

/// Finds the client of a request.
pub struct ClientAddress {
    trusted: Networks,
    pub trusts_unix: bool,
    /// In small letters.
    pub field: Option<String>,
    ipv4_prefix: u8,
    ipv6_prefix: u8,
}

impl ClientAddress {
    pub fn new(document: ClientDocument) -> Result<ClientAddress, String> {
        let ClientDocument { trusted, trusts_unix, field, ipv4_prefix, ipv6_prefix } = document;
        if ipv4_prefix > 32 || ipv6_prefix > 128 {
            return Err("a prefix is longer than an address".to_owned());
        }
        let trusted = Networks::new(&trusted, None)?;
        Ok(ClientAddress { trusted, trusts_unix, field, ipv4_prefix, ipv6_prefix })
    }

    /// Whether a peer is one of the proxies. None: it is at the other end of a Unix socket.
    pub fn trusts(&self, peer: Option<IpAddr>) -> bool {
        peer.map_or(self.trusts_unix, |address| self.trusted.has(address))
    }

    /// For whom a request counts.
    pub fn key_of(&self, peer: Option<IpAddr>, field: Option<&str>) -> Result<String, UnknownPeer> {
        if peer.is_none() && !self.trusts_unix {
            return Err(UnknownPeer);
        }
        Ok(self.last_known(peer, field).0.map_or_else(|| UNIX.to_owned(), |address| self.reduced(address)))
    }

    /// The whole address of the client; None if it is unknown.
    pub fn address_of(&self, peer: Option<IpAddr>, field: Option<&str>) -> Option<IpAddr> {
        let (last, is_client) = self.last_known(peer, field);
        last.filter(|_| is_client)
    }

    /// The last reliable address, and whether it is the client's: not that of a proxy that has named no client.
    fn last_known(&self, peer: Option<IpAddr>, field: Option<&str>) -> (Option<IpAddr>, bool) {
        if !self.trusts(peer) {
            return (peer, peer.is_some());
        }
        let mut last = peer;
        let field = field.unwrap_or("");
        for hop in self.hops_from_the_last(field) {
            let Some(address) = as_address(&hop) else { return (last, false) };
            last = Some(address);
            if !self.trusted.has(address) {
                return (last, true);
            }
        }
        (last, !field.is_empty())
    }

    fn hops_from_the_last(&self, field: &str) -> Vec<String> {
        if self.field.as_deref() == Some("forwarded") {
            return forwarded_from_the_last(field);
        }
        field.rsplit(',').map(str::to_owned).collect()
    }

    /// The key of a known client.
    pub fn reduced(&self, address: IpAddr) -> String {
        match address {
            IpAddr::V4(_) if self.ipv4_prefix == 32 => address.to_string(),
            IpAddr::V6(_) if self.ipv6_prefix == 128 => address.to_string(),
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.ipv4_prefix)).unwrap_or(0);
                format!("{}/{}", Ipv4Addr::from(u32::from(address) & mask), self.ipv4_prefix)
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6_prefix)).unwrap_or(0);
                format!("{}/{}", Ipv6Addr::from(u128::from(address) & mask), self.ipv6_prefix)
            }
        }
    }
}

/// The peers that the proxies report by `Forwarded`, the last one first. Text that can't be parsed is "", the end.
///
/// Parsed from the right, since a client may have invented the left part, for example a quote without an end.
fn forwarded_from_the_last(field: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut end = field.len();
    while end > 0 {
        let mut comma = Some(end);
        let mut element = None;
        for _ in 0..MOST_COMMAS {
            comma = field[..comma.unwrap_or(0)].rfind(',');
            let text = &field[comma.map_or(0, |at| at + 1)..end];
            if ELEMENT.is_match(text) {
                element = Some(text);
                break;
            }
            if comma.is_none() {
                break;
            }
        }
        let Some(element) = element else {
            found.push(String::new());
            return found;
        };
        found.push(peer_in(element));
        // Nothing is left of the first element. An empty text before a comma is another one.
        let Some(comma) = comma else { break };
        end = comma;
    }
    found
}

/// The peer in one element; empty if there is none, or more than one.
fn peer_in(element: &str) -> String {
    let mut named = PAIRS.captures_iter(element).filter(|pair| pair[1].eq_ignore_ascii_case("for"));
    let (Some(pair), None) = (named.next(), named.next()) else { return String::new() };
    match pair[2].strip_prefix('"') {
        None => pair[2].to_owned(),
        Some(quoted) => {
            let mut text = String::new();
            let mut characters = quoted[..quoted.len() - 1].chars();
            while let Some(character) = characters.next() {
                text.push(if character == '\\' { characters.next().unwrap_or('\\') } else { character });
            }
            text
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::fuzz::Target;

    pub const CLIENTS: Target = Target {
        name: "clients",
        seeds: &[
            b"203.0.113.7, 192.0.2.1:80, 10.2.3.4",
            b"for=\"[2001:db8:1::7]:80\";proto=http, for=10.1.1.1;by=_a",
            b"for=\"192.0.2.1\\\"\", For=unknown",
            b"[::1%eth0]:x, ::ffff:10.0.0.1",
        ],
        check: a_field_leads_to_a_client,
    };
    pub const NETWORKS: Target = Target {
        name: "networks",
        seeds: &[b"10.0.0.0/8", b"2001:db8::/32", b"192.0.2.7/32", b"::/0"],
        check: a_network_has_its_addresses,
    };

    fn a_field_leads_to_a_client(field: &[u8]) -> bool {
        let text: String = field.iter().map(|byte| char::from(*byte)).collect();
        let proxy = as_address("10.0.0.1");
        for (name, last) in [("x-forwarded-for", "192.0.2.1"), ("forwarded", "for=192.0.2.1")] {
            let client = behind(name);
            let key = client.key_of(proxy, Some(&text)).unwrap();
            let address = key.split('/').next().and_then(as_address).expect("a key is an address or a network");
            assert_eq!(client.reduced(address), key);
            assert_eq!(client.key_of(as_address("192.0.2.9"), Some(&text)).unwrap(), "192.0.2.9", "it is no proxy");
            let sent = format!("{text}, {last}");
            assert_eq!(client.key_of(proxy, Some(&sent)).unwrap(), "192.0.2.1", "a client invents what is before");
        }
        if let Some(address) = as_address(&text) {
            for written in [address.to_string(), format!("[{address}]"), format!("[{address}]:80")] {
                assert_eq!(as_address(&written), Some(address));
            }
        }
        true
    }

    fn a_network_has_its_addresses(text: &[u8]) -> bool {
        let text = String::from_utf8_lossy(text);
        let Ok(networks) = Networks::new(&[text.to_string()], None) else { return false };
        let (address, length) = text.split_once('/').unwrap();
        let (address, length): (IpAddr, u8) = (address.parse().unwrap(), length.parse().unwrap());
        assert!(networks.has(address));
        for bit in 0..bits_of(address) {
            let place = bits_of(address) - 1 - bit;
            let other = match address {
                IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) ^ 1 << place).into(),
                IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) ^ 1 << place).into(),
            };
            assert_eq!(networks.has(other), bit >= length, "{other} in {text}");
        }
        let of_version = |is_v4: bool, most: u8| if address.is_ipv4() == is_v4 { length } else { most };
        let (ipv4_prefix, ipv6_prefix) = (of_version(true, 32), of_version(false, 128));
        let client = ClientAddress::new(ClientDocument { ipv4_prefix, ipv6_prefix, ..document("forwarded") }).unwrap();
        let key = client.reduced(address);
        let network = if key.contains('/') { key } else { format!("{key}/{length}") };
        assert!(Networks::new(&[network], None).unwrap().has(address));
        true
    }

    fn document(field: &str) -> ClientDocument {
        ClientDocument {
            trusted: vec!["10.0.0.0/8".to_owned()],
            trusts_unix: false,
            field: Some(field.to_owned()),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        }
    }

    pub fn behind(field: &str) -> ClientAddress {
        ClientAddress::new(document(field)).unwrap()
    }

    #[test]
    fn a_trusted_proxy_names_the_client() {
        let (client, proxy) = (behind("x-forwarded-for"), as_address("10.0.0.1"));
        assert_eq!(client.key_of(proxy, Some("203.0.113.7, 192.0.2.1, 10.2.3.4")).unwrap(), "192.0.2.1");
        assert_eq!(client.key_of(proxy, Some("2001:db8::1")).unwrap(), "2001:db8::/64");
        assert_eq!(client.key_of(as_address("192.0.2.9"), Some("203.0.113.7")).unwrap(), "192.0.2.9");
        assert!(client.key_of(None, None).is_err());
    }

    #[test]
    fn forwarded_is_read_from_the_right() {
        let (client, proxy) = (behind("forwarded"), as_address("10.0.0.1"));
        let field = "for=\"[2001:db8:1::7]:80\";proto=http, for=10.1.1.1";
        assert_eq!(client.key_of(proxy, Some(field)).unwrap(), "2001:db8:1::/64");
        assert_eq!(client.key_of(proxy, Some("for=\"192.0.2.1, for=10.1.1.1")).unwrap(), "10.1.1.1");
    }

    #[test]
    fn a_list_ends_at_its_time() {
        let networks = Networks::new(&["198.51.100.0/24".to_owned()], Some(5.0)).unwrap();
        assert_eq!(networks.end_s(as_address("::ffff:198.51.100.9").unwrap()), Some(5.0));
        assert!(!networks.has(as_address("198.51.101.9").unwrap()));
        assert!(Networks::new(&["everything".to_owned()], None).is_err());
    }
}
