"""The client's address: the peer's, or behind proxies the address that a trusted proxy reports.

A proxy appends the address of its own peer to the list. So the list is read from the right: while an address is a
trusted proxy's, the one before it is reliable, and the first other address is the client's. The client may have
invented everything further left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_network
from typing import Any, Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.web.addresses import Address, as_address, as_network
from forebay.web.native_requests import PeerKey
from forebay.web.request import KeyFunction, Request

__all__ = ["PEERS", "ClientAddress", "client_address"]

UNIX: Final = "unix"
MOST_COMMAS: Final = 10
"""Commas in one proxy's element of ``Forwarded``."""

TRUST_REMEDY: Final = (
    'name the field of the proxy, client=ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")'
)
UNIX_REMEDY: Final = f"{TRUST_REMEDY}, or give the rules another key"


class UnknownPeer(InvalidLimiter):
    """A ``ClientAddress`` got a request whose server reports no address of its peer."""


# An element of `Forwarded` (RFC 7239): pairs of a token and a token or quoted text, separated by semicolons.
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
_PAIR: Final = re.compile(rf"({_TOKEN})=({_TOKEN}|{_QUOTED})")
_ELEMENT: Final = re.compile(rf"\s*+(?:{_PAIR.pattern})?(?:\s*+;\s*+(?:{_PAIR.pattern})?)*+\s*+")


class ClientAddress(PeerKey):
    """A key function: the address of the client, an IPv6 one reduced to its network.

    ``ClientAddress()`` is for servers that clients connect to. Behind proxies:
    ``ClientAddress(trusted_proxies=["10.0.0.0/8"], header="X-Forwarded-For")``, with the networks of *all* proxies on
    the way, and the one field that they set: ``X-Forwarded-For``, ``Forwarded``, or one that holds a single address,
    such as ``X-Real-IP``. The field counts only if the peer is trusted, and is read from the right. ``"unix"`` among
    the proxies trusts every peer that connects over a Unix socket.

    A host usually has a whole IPv6 network, so a client that uses all its addresses must still be one key:
    `ipv6_prefix` is the number of bits that distinguish clients. `ipv4_prefix` likewise.

    Raises ``InvalidLimiter`` for one of the two without the other, and for a proxy that isn't a network. An address
    that can't be parsed ends the reading: the key is then the last proxy's, so all such requests share one limit.
    Thread-safe.
    """

    def __init__(
        self,
        *,
        trusted_proxies: Iterable[str] = (),
        header: str | None = None,
        ipv4_prefix: int = 32,
        ipv6_prefix: int = 64,
    ) -> None:
        if not isinstance(trusted_proxies, Iterable):
            raise InvalidLimiter(f"trusted_proxies are networks, not {short_repr(trusted_proxies)}")
        proxies = [trusted_proxies] if isinstance(trusted_proxies, str) else list(trusted_proxies)
        if proxies and header is None:
            raise InvalidLimiter(
                f"the proxies {short_repr(proxies)} are trusted, but no field is named: "
                'write header="X-Forwarded-For", or the field that they set'
            )
        if header is not None and not proxies:
            raise InvalidLimiter(
                f"the field {short_repr(header)} would be trusted from every client, and every client can send it: "
                'name the proxies that set it, trusted_proxies=["10.0.0.0/8"]'
            )
        if header is not None and not (isinstance(header, str) and re.fullmatch(_TOKEN, header)):
            raise InvalidLimiter(f'a header field has a name such as "X-Forwarded-For", not {short_repr(header)}')
        for what, prefix, most in (("ipv4_prefix", ipv4_prefix, 32), ("ipv6_prefix", ipv6_prefix, 128)):
            if isinstance(prefix, bool) or not isinstance(prefix, int) or not 1 <= prefix <= most:
                raise InvalidLimiter(f"{what} is from 1 to {most} bits, not {short_repr(prefix)}")
        self._networks = [
            as_network(
                proxy,
                'a trusted proxy is a network such as "10.0.0.0/8", an address, or "unix"',
                ", so a client could invent its own: name your proxies' networks",
            )
            for proxy in proxies
            if proxy != UNIX
        ]
        self._trusts_unix = UNIX in proxies
        self._header = header
        self._prefixes = {4: ipv4_prefix, 6: ipv6_prefix}
        self._addresses = _WholeAddress(header, self)
        super().__init__(header)

    @property
    def needs_peer(self) -> bool:
        """Whether it fails for a peer without an address."""
        return not self._trusts_unix

    def __repr__(self) -> str:
        networks = [str(network) for network in self._networks] + [UNIX] * self._trusts_unix
        trusted = f"trusted_proxies={networks}, header={self._header!r}" if networks else ""
        return f"ClientAddress({trusted})"

    def address_of(self, request: Request) -> Address | None:
        """The whole address of a request's client, which an ``AddressList`` may have.

        None if it is unknown: the server reports no address, or a trusted proxy has named no client.
        Never raises. Thread-safe; O(1) for addresses that it has seen before.
        """
        return self._addresses(request)  # type: ignore[return-value]

    def key_of(self, peer: str | None, field: str | None) -> str:
        if peer is None and not self._trusts_unix:
            raise UnknownPeer(f"the server reports no address of its peer, as over a Unix socket: {UNIX_REMEDY}")
        last, _ = self.last_known(peer, field)
        if last is None:
            return UNIX if peer is None else peer
        return self._reduced(last)

    def last_known(self, peer: str | None, field: str | None) -> tuple[Address | None, bool]:
        """The last reliable address, and whether it is the client's: not that of a proxy that has named no client."""
        last = None if peer is None else as_address(peer)
        if last is None:
            if peer is not None or not self._trusts_unix:
                return None, False
        elif not self._is_trusted(last):
            return last, True
        for hop in self._hops_from_the_last(field or ""):
            address = as_address(hop)
            if address is None:
                return last, False
            last = address
            if not self._is_trusted(last):
                return last, True
        return last, bool(field)

    def _hops_from_the_last(self, field: str) -> Iterator[str]:
        if self._header is not None and self._header.lower() == "forwarded":
            return _forwarded_from_the_last(field)
        return reversed(field.split(","))

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _reduced(self, address: Address) -> str:
        prefix = self._prefixes[address.version]
        if prefix == address.max_prefixlen:
            return str(address)
        return str(ip_network((address, prefix), strict=False))


class _WholeAddress(PeerKey):
    """The address of a client, which it caches as others do keys."""

    def __init__(self, field_name: str | None, client: ClientAddress) -> None:
        self._client = client
        super().__init__(field_name)

    def key_of(self, peer: str | None, field: str | None) -> Any:
        last, is_client = self._client.last_known(peer, field)
        return last if is_client else None


PEERS: Final = ClientAddress()
"""The client of gates that name none."""


def client_address(key: KeyFunction | None, client: KeyFunction) -> ClientAddress:
    """The ``ClientAddress`` of a rule with this `key`, or of its gate, for an ``AddressList``.

    Raises ``InvalidLimiter`` if there is none, or only a default that the rule doesn't use: behind a proxy, a list of
    private networks would then have every client.
    """
    if isinstance(key, ClientAddress):
        return key
    if isinstance(client, ClientAddress) and (key is None or client is not PEERS):
        return client
    raise InvalidLimiter(
        "an AddressList needs the client's address: beside the rules write client=ClientAddress(), or behind proxies "
        f"client=ClientAddress(trusted_proxies=..., header=...), not {short_repr(client)}"
    )


def _forwarded_from_the_last(field: str) -> Iterator[str]:
    """The peers that the proxies report by ``Forwarded``, the last one first. Text that can't be parsed is "", the end.

    Parsed from the right, since a client may have invented the left part, for example a quote without an end. An
    element ends at a comma outside quotes: text after a comma inside quotes has an odd quote, so it is no element.
    """
    end = len(field)
    while end > 0:
        start = end
        for _ in range(MOST_COMMAS):
            start = field.rfind(",", 0, start)
            if _ELEMENT.fullmatch(field, start + 1, end):
                break
            if start < 0:
                yield ""
                return
        else:
            yield ""
            return
        yield _for(field[start + 1 : end])
        end = start


def _for(element: str) -> str:
    """The peer in one element; empty if there is none, or more than one."""
    found = [value for name, value in _PAIR.findall(element) if name.lower() == "for"]
    if len(found) != 1:
        return ""
    return re.sub(r"\\(.)", r"\1", found[0][1:-1]) if found[0].startswith('"') else found[0]
