"""A client behind a trusted proxy can't change its key by any fields that it sends."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from web_requests import asgi_scope, wsgi_environ

from forebay.web import ClientAddress
from forebay.web.native_requests import ASGIRequest, WSGIRequest

PROXY = "10.0.0.1"
clients = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).filter(
    lambda address: address not in ip_network("10.0.0.0/8") and getattr(address, "ipv4_mapped", None) is None
)
# Text made of such a field's parts, and any other text that a field may have.
pieces = st.sampled_from(
    [
        "for=",
        "For=",
        '"',
        '\\"',
        "\\",
        ",",
        ";",
        " ",
        "=",
        "10.0.0.1",
        "1.2.3.4",
        "[2001:db8::1]",
        "by=",
        "unknown",
        ":80",
    ]
)
characters = st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f")
texts = st.one_of(
    st.lists(pieces, max_size=12).map("".join),
    st.text(characters, max_size=40),
    st.lists(pieces | characters, max_size=20).map("".join),
)


@given(
    clients,
    st.lists(texts, max_size=3),
    st.booleans(),
    st.sampled_from(["X-Forwarded-For", "Forwarded"]),
    st.booleans(),
)
def test_fields_of_a_client_do_not_change_its_key(
    client: Any, sent: list[str], as_one_line: bool, name: str, with_port: bool
) -> None:
    """The proxy appends the client's address, to the last line or as a further line."""
    address = f"[{client}]" if client.version == 6 and (name == "Forwarded" or with_port) else str(client)
    address += ":4711" * with_port
    seen = (
        address
        if name == "X-Forwarded-For"
        else f'for="{address}"'
        if client.version == 6 or with_port
        else f"for={address}"
    )
    lines = [*sent[:-1], f"{sent[-1]}, {seen}"] if as_one_line and sent else [*sent, seen]
    fields = [(name, line) for line in lines]
    expected = str(client) if client.version == 4 else str(ip_network((client, 64), strict=False))
    key = ClientAddress(trusted_proxies=["10.0.0.0/8"], header=name)
    assert key(WSGIRequest(wsgi_environ(client=PROXY, fields=fields))) == expected
    assert key(ASGIRequest(asgi_scope(client=PROXY, fields=fields))) == expected


@given(st.lists(texts, max_size=3), st.sampled_from(["X-Forwarded-For", "Forwarded", "X-Real-IP"]))
def test_client_that_is_no_proxy_is_identified_by_its_connection(sent: list[str], name: str) -> None:
    key = ClientAddress(trusted_proxies=["10.0.0.0/8"], header=name)
    fields = [(name, line) for line in sent]
    assert key(WSGIRequest(wsgi_environ(client="203.0.113.7", fields=fields))) == "203.0.113.7"


@given(st.lists(texts, max_size=3), st.sampled_from(["X-Forwarded-For", "Forwarded", "X-Real-IP"]))
def test_any_field_of_a_proxy_gives_an_address(sent: list[str], name: str) -> None:
    key = ClientAddress(trusted_proxies=["10.0.0.0/8"], header=name)
    found = key(WSGIRequest(wsgi_environ(client=PROXY, fields=[(name, line) for line in sent])))
    assert ip_address(found.partition("/")[0])
