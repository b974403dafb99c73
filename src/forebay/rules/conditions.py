"""Conditions of a rule beside its path and methods: header fields, the client's address, the tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Protocol, TypeAlias

from forebay.errors import short_repr
from forebay.web import AddressList, ClientAddress, Request
from forebay.web.addresses import as_network

__all__ = ["AddressCondition", "Condition", "HeaderCondition", "Network", "TierCondition", "network_of", "none_outside"]

Network: TypeAlias = IPv4Network | IPv6Network


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
    """The client's whole address is in one of these networks, or with `is_inside` False in none.

    An unknown address is in none: the server reports none, or a trusted proxy names no client.
    """

    def __init__(self, client: ClientAddress, networks: Sequence[Network], *, is_inside: bool) -> None:
        self._client, self._is_inside = client, is_inside
        self._texts = [str(network) for network in networks]
        self._networks = AddressList(self._texts)

    def holds(self, request: Request) -> bool:
        return (self._client.address_of(request) in self._networks) is self._is_inside

    def why_not(self, request: Request) -> str:
        where = "in none of" if self._is_inside else "in one of"
        address = self._client.address_of(request) or "of the client is unknown, so it"
        return f"the address {address} is {where} {', '.join(self._texts)}"


def network_of(text: str) -> Network:
    """Raises ``ValueError``."""
    if "%" in text:
        raise ValueError(f"{short_repr(text)} has a zone, which no client's address has: leave it out")
    return as_network(text, 'an address or a network is such as "10.0.0.0/8"', ": leave it out")


def none_outside(networks: Sequence[Network], excepted: Sequence[Network]) -> bool:
    """Whether each of `networks` is within one of `excepted`."""
    # subnet_of() takes two of one version.
    return all(
        any(one.version == other.version and one.subnet_of(other) for other in excepted)  # type: ignore[arg-type]
        for one in networks
    )


class TierCondition:
    """The request's tier isn't one of `lifted`. The rule's own `tiers` decide; this one explains."""

    def __init__(self, tier: Callable[[Request], str], lifted: frozenset[str]) -> None:
        self._tier, self._lifted = tier, lifted

    def holds(self, request: Request) -> bool:
        return self._tier(request) not in self._lifted

    def why_not(self, request: Request) -> str:
        return f"the rule isn't for the tier {short_repr(self._tier(request))}"
