"""A list of addresses agrees with the ``ipaddress`` module, for any networks and addresses."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.web import AddressList

addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))
mapped = st.ip_addresses(v=4).map(lambda address: ip_address(f"::ffff:{address}"))
# Near 0 and the greatest, so that networks nest, touch and are equal.
near = st.one_of(st.integers(0, 40), st.integers(2**32 - 40, 2**32 - 1)).map(ip_address)


def network_of(address: Any, prefix: int) -> Any:
    return ip_network((address, max(1, prefix * address.max_prefixlen // 128)), strict=False)


networks = st.builds(network_of, st.one_of(addresses, near), st.integers(0, 128))
EXPIRED = datetime(2000, 1, 1, tzinfo=UTC)


def plain(address: Any) -> Any:
    """The IPv4 address in an IPv6 one, or the address."""
    return getattr(address, "ipv4_mapped", None) or address


def holds(network: IPv4Network | IPv6Network, address: Any) -> bool:
    """By the module. IPv4 networks in IPv6 are IPv4, and other IPv6 networks hold IPv6 addresses only."""
    inner = getattr(network.network_address, "ipv4_mapped", None)
    if inner is not None and network.prefixlen >= 96:
        network = IPv4Network((inner, network.prefixlen - 96))
    return plain(address) in network


@given(st.dictionaries(networks, st.booleans(), max_size=12), st.lists(st.one_of(addresses, mapped, near), max_size=8))
def test_any_list_agrees_with_ipaddress(listed: dict[Any, bool], others: list[Any]) -> None:
    """`listed`: networks, and whether their time has passed."""
    found = AddressList({str(network): EXPIRED if is_over else None for network, is_over in listed.items()})
    edges = [ip for network in listed for ip in (network.network_address, network.broadcast_address)]
    beyond = [ip + step for ip in edges for step in (-1, 1) if 0 <= int(ip) + step < 2**ip.max_prefixlen]
    for address in [*others, *edges, *beyond]:
        expected = any(holds(network, address) for network, is_over in listed.items() if not is_over)
        assert (address in found) == expected, address
        assert (str(address) in found) == expected, address
