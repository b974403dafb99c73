"""Conditions of a rule beside its path and methods: header fields, the client's address, the tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final, Protocol, TypeAlias

from forebay.errors import short_repr
from forebay.web import ClientAddress, Request
from forebay.web.client import UnknownPeer

__all__ = ["AddressCondition", "Condition", "HeaderCondition", "Network", "TierCondition", "network_of", "none_outside"]

Network: TypeAlias = IPv4Network | IPv6Network
MOST_REMEMBERED: Final = 4096


class Condition(Protocol):
    """Whether a rule is for a request."""

    def holds(self, request: Request) -> bool: ...

    def why_not(self, request: Request) -> str:
        """The reason for which it doesn't hold, for a person."""
        ...


class HeaderCondition:
    """A header field has a value like a pattern, in which ``*`` matches anything."""

    def __init__(self, name: str, pattern: str) -> None:
        self._name, self._pattern = name, pattern
        self._parts = pattern.split("*")

    def holds(self, request: Request) -> bool:
        value = request.header(self._name)
        return bool(value) and _is_like(value or "", self._parts)

    def why_not(self, request: Request) -> str:
        value = request.header(self._name)
        found = f"is {short_repr(value)}, not" if value else "is missing, and should be"
        return f"the header field {self._name} {found} {self._pattern!r}"


def _is_like(value: str, parts: Sequence[str]) -> bool:
    """Whether a text is these parts with anything between them. Takes time linear in the text, for each part."""
    first, *rest = parts
    if not rest:
        return value == first
    *middle, last = rest
    at = len(first)
    if not value.startswith(first) or not value.endswith(last):
        return False
    for part in middle:
        at = value.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return at <= len(value) - len(last)


class AddressCondition:
    """The client's address is in one of these networks, or with `is_inside` False in none."""

    def __init__(self, client: ClientAddress, networks: Iterable[Network], *, is_inside: bool) -> None:
        self._client, self._is_inside = client, is_inside
        self._networks = tuple(networks)
        # Parsing an address takes longer than a decision.
        self._contains: Callable[[str], bool] = lru_cache(MOST_REMEMBERED)(self._is_within)

    def holds(self, request: Request) -> bool:
        return self._contains(self._address_of(request)) is self._is_inside

    def why_not(self, request: Request) -> str:
        where = "in none of" if self._is_inside else "in one of"
        address = self._address_of(request) or "of the client is unknown, so it"
        return f"the address {address} is {where} {', '.join(map(str, self._networks))}"

    def _address_of(self, request: Request) -> str:
        try:
            return str(self._client(request))
        except UnknownPeer:
            return ""

    def _is_within(self, address: str) -> bool:
        return is_within(address, self._networks)


def is_within(address: str, networks: Iterable[Network]) -> bool:
    """Whether one of the networks has the address, or network, that a ``ClientAddress`` returned.

    False for a client without an address, such as one behind a Unix socket.
    """
    try:
        found = ip_network(address)
    except ValueError:
        return False
    # subnet_of() takes two of one version.
    return any(found.version == one.version and found.subnet_of(one) for one in networks)  # type: ignore[arg-type]


def network_of(text: str, client: ClientAddress) -> Network:
    """Raises ``ValueError``, also for a network that is smaller than what `client` distinguishes."""
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ValueError(f"{short_repr(text)} is no address or network such as 10.0.0.0/8: {error}") from None
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise ValueError(f"{text} has addresses of IPv4 in IPv6, which count as IPv4: write the network of IPv4")
    one_client = ip_network(client.key_of(str(network.network_address), None))
    if network.prefixlen > one_client.prefixlen:
        raise ValueError(f"{text} is smaller than {one_client}, whose addresses count as one client: write that")
    return network


def none_outside(networks: Sequence[Network], excepted: Sequence[Network]) -> bool:
    """Whether each of `networks` is within one of `excepted`."""
    return all(is_within(str(network), excepted) for network in networks)


class TierCondition:
    """The request's tier isn't one of `lifted`. The rule's own `tiers` decide; this one explains."""

    def __init__(self, tier: Callable[[Request], str], lifted: frozenset[str]) -> None:
        self._tier, self._lifted = tier, lifted

    def holds(self, request: Request) -> bool:
        return self._tier(request) not in self._lifted

    def why_not(self, request: Request) -> str:
        return f"the rule isn't for the tier {short_repr(self._tier(request))}"
