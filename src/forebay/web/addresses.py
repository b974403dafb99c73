"""Internet addresses and networks as text, and lists of networks."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

from forebay.errors import InvalidLimiter, short_repr

__all__ = ["Address", "AddressList", "as_address", "as_network"]

Address: TypeAlias = IPv4Address | IPv6Address

_WITH_PORT: Final = re.compile(r"\[([^\[\]]*)\](?::\w+)?|([^:]*)(?::\w+)?")


def as_address(text: str) -> Address | None:
    """An address with or without a port or brackets; None if it is none. IPv4 in IPv6 is IPv4."""
    text = text.strip()
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        match = _WITH_PORT.fullmatch(text)
        if match is None:
            return None
        try:
            address = ip_address((match[1] or match[2] or "").partition("%")[0])
        except ValueError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def as_network(text: str, what: str, remedy: str) -> IPv4Network | IPv6Network:
    """A network without host bits. IPv4 in IPv6 is IPv4.

    Raises ``InvalidLimiter`` for other text, which `what` describes, and for the network of all addresses, with the
    `remedy`.
    """
    try:
        if not isinstance(text, str):
            raise TypeError(f"it is {type(text).__name__}")
        network = ip_network(text)
    except (ValueError, TypeError) as error:
        raise InvalidLimiter(f"{what}, not {short_repr(text)}: {error}") from None
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None and network.prefixlen >= 96:
        network = IPv4Network((mapped, network.prefixlen - 96))
    if network.prefixlen == 0:
        raise InvalidLimiter(f"{short_repr(text)} is every address{remedy}")
    return network


class AddressList:
    """Networks and addresses: ``AddressList(["10.0.0.0/8", "2001:db8::/32"])``, for `exempt` of a ``Rule`` or ``Deny``.

    `networks` is one network in CIDR notation, several, or a mapping of networks to the time at which each leaves the
    list: a ``datetime`` with a time zone, or None for never. The host's wall clock decides. ``address in networks``
    takes text or an ``ipaddress`` object; an IPv4 address in IPv6 is that IPv4 address. Other text is in no list.

    Raises ``InvalidLimiter`` for text that is no network, a network with host bits (``10.0.0.1/8``), the network of all
    addresses, and a time without a zone. Immutable, so thread-safe and fork-safe. A lookup is one access to a dict for
    each length of prefix in the list, at most 32 for IPv4 and 128 for IPv6, however many networks there are.
    """

    def __init__(self, networks: str | Iterable[str] | Mapping[str, datetime | None]) -> None:
        if isinstance(networks, str):
            networks = [networks]
        if not isinstance(networks, Iterable):
            raise InvalidLimiter(f'an AddressList has networks such as "10.0.0.0/8", not {short_repr(networks)}')
        self._ends_s: dict[int, dict[int, dict[int, float]]] = {4: {}, 6: {}}
        """By version, by the bits behind the prefix and by the prefix: the end in seconds of the wall clock."""
        for text in networks:
            self._add(text, networks[text] if isinstance(networks, Mapping) else None)

    def __contains__(self, address: object) -> bool:
        return self.left_s(address) is not None

    def __len__(self) -> int:
        """How many networks it has, also those whose time has passed."""
        return sum(len(prefixes) for lengths in self._ends_s.values() for prefixes in lengths.values())

    def __repr__(self) -> str:
        return f"<AddressList of {len(self)} network{'s' * (len(self) != 1)}>"

    def left_s(self, address: object) -> float | None:
        """Seconds for which this address stays in the list, ``inf`` if it has no end; None if it isn't in the list."""
        known = as_address(address) if isinstance(address, str) else address
        if isinstance(known, IPv6Address):
            known = known.ipv4_mapped or known
        if not isinstance(known, (IPv4Address, IPv6Address)):
            return None
        number = int(known)
        end_s = max(
            (prefixes.get(number >> bits, -math.inf) for bits, prefixes in self._ends_s[known.version].items()),
            default=-math.inf,
        )
        left_s = end_s if math.isinf(end_s) else end_s - time.time()
        return left_s if left_s > 0 else None

    def _add(self, text: str, end: datetime | None) -> None:
        network = as_network(text, 'an AddressList has networks such as "10.0.0.0/8"', ": a rule for all needs no list")
        if isinstance(text, str) and "%" in text:
            raise InvalidLimiter(f"{short_repr(text)} has a zone, which no client's address has: leave it out")
        if end is not None and (not isinstance(end, datetime) or end.tzinfo is None):
            raise InvalidLimiter(
                f"{short_repr(text)} ends at a datetime with a time zone, or at None for never, not {short_repr(end)}: "
                "write datetime(2030, 1, 31, tzinfo=UTC)"
            )
        bits = network.max_prefixlen - network.prefixlen
        prefixes = self._ends_s[network.version].setdefault(bits, {})
        prefix = int(network.network_address) >> bits
        end_s = math.inf if end is None else end.timestamp()
        prefixes[prefix] = max(end_s, prefixes.get(prefix, -math.inf))
