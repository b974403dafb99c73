"""Client identity: the client's address, and forged fields that cannot change it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from web_requests import asgi_scope, wsgi_environ

from forebay import InvalidLimiter
from forebay.web import ClientAddress, everyone, header, user
from forebay.web.native_requests import ASGIRequest, PeerKey, WSGIRequest
from forebay.web.request import Request

PROXY = "10.0.0.1"
CLIENT = "203.0.113.7"
PROXIES = ["10.0.0.0/8", "2001:db8:ffff::/48"]


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def request_of(
    kind: str, *values: str, name: str = "X-Forwarded-For", peer: str | None = PROXY, **more: Any
) -> Request:
    fields = [(name, value) for value in values]
    if kind == "wsgi":
        return WSGIRequest(wsgi_environ(client=peer, fields=fields, **more))
    return ASGIRequest(asgi_scope(client=peer, fields=fields, **more))


def behind(*values: str, name: str = "X-Forwarded-For", peer: str | None = PROXY, kind: str = "wsgi") -> str:
    """The client address of a request from `peer` with these lines of the field."""
    return ClientAddress(trusted_proxies=PROXIES, header=name)(request_of(kind, *values, name=name, peer=peer))


class TestWithoutProxies:
    def test_peer_address_is_the_key(self, kind: str) -> None:
        assert ClientAddress()(request_of(kind, peer=CLIENT)) == CLIENT

    def test_forwarding_fields_are_ignored(self, kind: str) -> None:
        request = request_of(kind, "1.2.3.4", peer=CLIENT)
        assert ClientAddress()(request) == CLIENT

    def test_unix_socket_peer_without_an_address_is_an_error(self, kind: str) -> None:
        with pytest.raises(InvalidLimiter, match=r'trusted_proxies=\["unix"\]'):
            ClientAddress()(request_of(kind, peer=None))

    def test_empty_peer_address_of_gunicorn_means_a_unix_socket(self) -> None:
        with pytest.raises(InvalidLimiter, match="Unix socket"):
            ClientAddress()(request_of("wsgi", peer=""))

    def test_peer_that_is_not_an_ip_address_is_its_own_key(self, kind: str) -> None:
        assert ClientAddress()(request_of(kind, peer="testclient")) == "testclient"


class TestPrefixes:
    @pytest.mark.parametrize(
        ("peer", "client"),
        [
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("2001:db8:1:2::", "2001:db8:1:2::/64"),
            ("2001:DB8:1:2::9%eth0", "2001:db8:1:2::/64"),
            ("::ffff:203.0.113.7", CLIENT),
            ("::ffff:cb00:7107", CLIENT),
            (CLIENT, CLIENT),
        ],
    )
    def test_ipv6_network_and_ipv4_address_are_one_key_each(self, peer: str, client: str) -> None:
        assert ClientAddress()(request_of("wsgi", peer=peer)) == client

    @pytest.mark.parametrize(
        ("prefix", "client"),
        [(1, "::/1"), (48, "2001:db8:1::/48"), (56, "2001:db8:1::/56"), (128, "2001:db8:1:2:3:4:5:6")],
    )
    def test_ipv6_prefix_sets_the_network_of_a_key(self, prefix: int, client: str) -> None:
        assert ClientAddress(ipv6_prefix=prefix)(request_of("wsgi", peer="2001:db8:1:2:3:4:5:6")) == client

    def test_ipv4_prefix_sets_the_network_of_a_key(self) -> None:
        assert ClientAddress(ipv4_prefix=24)(request_of("wsgi", peer=CLIENT)) == "203.0.113.0/24"

    def test_ipv6_addresses_of_a_network_share_a_key_behind_a_proxy(self) -> None:
        assert behind("2001:db8:1:2::1") == behind("2001:db8:1:2:ffff::9") != behind("2001:db8:1:3::1")


class TestForwardedFor:
    @pytest.mark.parametrize(
        ("lines", "client"),
        [
            ((CLIENT,), CLIENT),
            (("1.2.3.4, 203.0.113.7",), CLIENT),
            (("1.2.3.4", CLIENT), CLIENT),
            (("1.2.3.4, 5.6.7.8", f"9.9.9.9,{CLIENT}"), CLIENT),
            # A chain of proxies: each one appends the address of its peer.
            ((f"1.2.3.4, {CLIENT}, 10.0.0.2, 10.9.9.9",), CLIENT),
            ((f"1.2.3.4, {CLIENT}", "10.0.0.2", "2001:db8:ffff::1"), CLIENT),
            # The client forges the entry of a proxy.
            ((f"1.2.3.4, 10.0.0.2, {CLIENT}",), CLIENT),
            # Every entry is a proxy: one of them is the client.
            (("10.0.0.3, 10.0.0.2",), "10.0.0.3"),
            # Spellings that proxies use.
            ((f"{CLIENT}:4711",), CLIENT),
            (("[2001:db8::1]:4711",), "2001:db8::/64"),
            (("[2001:db8::1]",), "2001:db8::/64"),
            (("2001:db8::1",), "2001:db8::/64"),
            (("fe80::1%eth0",), "fe80::/64"),
            (("[fe80::1%25eth0]:80",), "fe80::/64"),
            (("::ffff:203.0.113.7",), CLIENT),
            (("::ffff:10.0.0.2, ",), PROXY),
            ((f"  {CLIENT}\t",), CLIENT),
            # An unreadable entry ends the parse: all its clients share the last proxy's address.
            (("",), PROXY),
            ((",",), PROXY),
            ((f"{CLIENT},",), PROXY),
            (("unknown",), PROXY),
            (("_hidden",), PROXY),
            ((f"{CLIENT}, unknown",), PROXY),
            ((f"{CLIENT}, unknown, 10.0.0.2",), "10.0.0.2"),
            (("203.0.113.7.9",), PROXY),
            (("203.0.113.007",), PROXY),
            (("0x7f.1",), PROXY),
            (("3405803783",), PROXY),
            (("[203.0.113.7",), PROXY),
            (("203.0.113.7]",), PROXY),
            (("2001:db8::1:::",), PROXY),
            (('"203.0.113.7"',), PROXY),
            (("\x00",), PROXY),
            (("\xb2\xb3.1.1.1",), PROXY),
        ],
    )
    def test_field_is_read_from_the_right(self, kind: str, lines: tuple[str, ...], client: str) -> None:
        assert behind(*lines, kind=kind) == client

    def test_field_of_an_untrusted_peer_is_ignored(self, kind: str) -> None:
        assert behind("1.2.3.4", peer=CLIENT, kind=kind) == CLIENT
        assert behind("10.0.0.2", peer=CLIENT, kind=kind) == CLIENT

    def test_proxy_is_the_client_without_the_field(self, kind: str) -> None:
        assert behind(kind=kind) == PROXY

    def test_only_the_configured_field_is_read(self, kind: str) -> None:
        by_forwarded = ClientAddress(trusted_proxies=PROXIES, header="Forwarded")
        assert by_forwarded(request_of(kind, "1.2.3.4", name="X-Forwarded-For")) == PROXY

    def test_ipv4_mapped_proxy_is_trusted(self) -> None:
        assert behind(CLIENT, peer="::ffff:10.0.0.1") == CLIENT

    @pytest.mark.parametrize("network", ["::ffff:10.0.0.0/104", "::ffff:10.0.0.1"])
    def test_network_of_ipv4_mapped_addresses_is_the_ipv4_network(self, network: str) -> None:
        client = ClientAddress(trusted_proxies=[network], header="X-Forwarded-For")
        assert client(request_of("wsgi", CLIENT)) == CLIENT

    def test_single_address_field_is_read(self) -> None:
        assert behind(CLIENT, name="X-Real-IP") == CLIENT

    def test_very_long_field_is_read(self, kind: str) -> None:
        assert behind("1.2.3.4," * 8000 + CLIENT, kind=kind) == CLIENT
        assert behind("a" * 65000 + "," + CLIENT, kind=kind) == CLIENT
        assert behind("a" * 65000, kind=kind) == PROXY
        assert behind("10.0.0.2," * 7000 + "10.0.0.3", kind=kind) == "10.0.0.2"

    def test_keys_stay_equal_when_the_cache_is_full(self) -> None:
        client = ClientAddress(trusted_proxies=PROXIES, header="X-Forwarded-For")
        first = [client(request_of("wsgi", f"1.2.{i // 250}.{i % 250}")) for i in range(5000)]
        assert first == [client(request_of("wsgi", f"1.2.{i // 250}.{i % 250}")) for i in range(5000)]
        assert len(set(first)) == 5000


class TestUnixSockets:
    def client(self, *values: str, kind: str = "wsgi") -> str:
        trusting = ClientAddress(trusted_proxies=["unix", "10.0.0.0/8"], header="X-Forwarded-For")
        return trusting(request_of(kind, *values, peer=None))

    def test_every_peer_of_a_unix_socket_is_trusted(self, kind: str) -> None:
        assert self.client(f"1.2.3.4, {CLIENT}", kind=kind) == CLIENT
        assert self.client(f"1.2.3.4, {CLIENT}, 10.0.0.2", kind=kind) == CLIENT

    @pytest.mark.parametrize("values", [(), ("",), ("unknown",), ("a, b",)])
    def test_unix_peers_without_the_field_share_a_key(self, values: tuple[str, ...]) -> None:
        assert self.client(*values) == "unix"

    def test_peer_with_an_address_is_not_trusted_as_a_unix_peer(self) -> None:
        trusting = ClientAddress(trusted_proxies="unix", header="X-Forwarded-For")
        assert trusting(request_of("wsgi", "1.2.3.4", peer=CLIENT)) == CLIENT


class TestForwarded:
    @pytest.mark.parametrize(
        ("lines", "client"),
        [
            ((f"for={CLIENT}",), CLIENT),
            ((f"for=1.2.3.4, for={CLIENT}",), CLIENT),
            (("for=1.2.3.4", f"for={CLIENT}"), CLIENT),
            ((f"for={CLIENT}, for=10.0.0.2",), CLIENT),
            ((f"For={CLIENT};Proto=https;by=10.0.0.9",), CLIENT),
            ((f"by=10.0.0.9; proto=http ; for={CLIENT}",), CLIENT),
            ((f'for="{CLIENT}:4711"',), CLIENT),
            (('for="[2001:db8:1:2::5]:4711"',), "2001:db8:1:2::/64"),
            (('for="[2001:db8:1:2::5]"',), "2001:db8:1:2::/64"),
            ((r'for="203.0.11\3.7"',), CLIENT),
            ((f'for={CLIENT};ext="a, for=1.2.3.4; \\" for=5.6.7.8"',), CLIENT),
            ((f'ext=";for=1.2.3.4";for={CLIENT}',), CLIENT),
            # The client forged the entries on the left, with invalid syntax.
            ((f'for="evil, for={CLIENT}',), CLIENT),
            ((f'for="evil\\, for="{CLIENT}"',), CLIENT),
            ((f'x=", for="{CLIENT}:1"',), CLIENT),
            ((f'x="\\", for="{CLIENT}:1", for=10.0.0.2',), CLIENT),
            ((f'", for={CLIENT}',), CLIENT),
            ((f";;;,=,for=, for={CLIENT}",), CLIENT),
            # An ambiguous entry ends the parse.
            (("for=unknown",), PROXY),
            (("for=_hidden",), PROXY),
            (('for="_gazonk:_port"',), PROXY),
            (("proto=https",), PROXY),
            ((CLIENT,), PROXY),
            ((f"for = {CLIENT}",), PROXY),
            ((f"for={CLIENT};for=1.2.3.4",), PROXY),
            (("for=[2001:db8::1]",), PROXY),
            ((f'for="{CLIENT}',), PROXY),
            ((f'for={CLIENT}"',), PROXY),
            (("",), PROXY),
            ((f"for={CLIENT}, for=unknown, for=10.0.0.2",), "10.0.0.2"),
        ],
    )
    def test_forwarded_is_read_from_the_right(self, kind: str, lines: tuple[str, ...], client: str) -> None:
        assert behind(*lines, name="Forwarded", kind=kind) == client

    @pytest.mark.parametrize("forged", ['"' * 30_000, '"a",' * 15_000, "\\" * 60_000, "for=" * 15_000, ";" * 60_000])
    def test_very_long_forwarded_field_is_read(self, forged: str) -> None:
        assert behind(f"{forged}, for={CLIENT}", name="Forwarded") == CLIENT
        assert behind(forged, name="Forwarded") == PROXY


class TestRefusedOptions:
    def test_proxies_without_a_field_are_refused(self) -> None:
        with pytest.raises(InvalidLimiter, match=r'10\.0\.0\.0/8.*no field is named.*header="X-Forwarded-For"'):
            ClientAddress(trusted_proxies=["10.0.0.0/8"])

    def test_field_without_proxies_is_refused(self) -> None:
        with pytest.raises(InvalidLimiter, match=r"would be trusted from every client.*trusted_proxies="):
            ClientAddress(header="X-Forwarded-For")

    @pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0"])
    def test_network_of_all_addresses_is_refused(self, network: str) -> None:
        with pytest.raises(InvalidLimiter, match=network):
            ClientAddress(trusted_proxies=[network], header="X-Forwarded-For")

    @pytest.mark.parametrize(
        "network", ["10.0.0.1/8", "localhost", "10.0.0.0/33", "", "10.0.0", "*", 5, b"\x0a\0\0\0", None, 2**32, [""]]
    )
    def test_invalid_network_is_refused(self, network: Any) -> None:
        with pytest.raises(InvalidLimiter, match=r'network such as "10\.0\.0\.0/8"'):
            ClientAddress(trusted_proxies=[network], header="X-Forwarded-For")

    @pytest.mark.parametrize("proxies", [None, 5, b"10.0.0.0/8"])
    def test_invalid_list_of_networks_is_refused(self, proxies: Any) -> None:
        with pytest.raises(InvalidLimiter):
            ClientAddress(trusted_proxies=proxies, header="X-Forwarded-For")

    @pytest.mark.parametrize(
        "name", ["", 5, b"X-Forwarded-For", "X Forwarded For", "X-Forwarded-For:", "X-Forw\xe4rded"]
    )
    def test_invalid_field_name_is_refused(self, name: Any) -> None:
        with pytest.raises(InvalidLimiter, match="field"):
            ClientAddress(trusted_proxies=["10.0.0.0/8"], header=name)

    @pytest.mark.parametrize("name", ["ipv4_prefix", "ipv6_prefix"])
    @pytest.mark.parametrize("prefix", [0, -1, 129, True, 24.0, "24", None])
    def test_invalid_prefix_is_refused(self, name: str, prefix: Any) -> None:
        with pytest.raises(InvalidLimiter, match=rf"{name} is from 1 to \d+ bits"):
            ClientAddress(**{name: prefix})

    def test_single_network_is_given_as_text(self) -> None:
        client = ClientAddress(trusted_proxies="10.0.0.0/8", header="X-Forwarded-For")
        assert client(request_of("wsgi", CLIENT)) == CLIENT

    def test_repr_names_the_trusted_proxies(self) -> None:
        expected = repr(ClientAddress(trusted_proxies=["10.0.0.0/8", "unix"], header="Forwarded"))
        assert expected == "ClientAddress(trusted_proxies=['10.0.0.0/8', 'unix'], header='Forwarded')"
        assert "unix" in repr(ClientAddress(trusted_proxies=["unix"], header="Forwarded"))


class TestOtherKeys:
    def test_everyone_gives_all_clients_one_key(self, kind: str) -> None:
        assert everyone(request_of(kind)) == everyone(request_of(kind, peer="1.1.1.1"))

    def test_header_field_is_a_key(self, kind: str) -> None:
        key = header("X-API-Key", otherwise=ClientAddress())
        assert key(request_of(kind, "a", name="x-api-key")) == key(
            request_of(kind, "a", name="X-API-KEY", peer="1.1.1.1")
        )
        assert key(request_of(kind, "a", name="X-API-Key")) != key(request_of(kind, "b", name="X-API-Key"))

    @pytest.mark.parametrize("values", [(), ("",)])
    def test_request_without_the_field_has_the_otherwise_key(self, kind: str, values: tuple[str, ...]) -> None:
        key = header("X-API-Key", otherwise=ClientAddress())
        assert key(request_of(kind, *values, name="X-API-Key", peer=CLIENT)) == CLIENT

    def test_no_field_value_equals_the_key_of_a_request_without_it(self, kind: str) -> None:
        key = header("X-API-Key", otherwise=ClientAddress())
        assert key(request_of(kind, CLIENT, name="X-API-Key", peer="1.1.1.1")) != key(request_of(kind, peer=CLIENT))

    def test_equal_values_of_different_fields_are_different_keys(self, kind: str) -> None:
        key = header("X-API-Key", otherwise=header("X-Tenant", otherwise=everyone))
        assert key(request_of(kind, "ada", name="X-API-Key")) != key(request_of(kind, "ada", name="X-Tenant"))
        by_user = header("X-API-Key", otherwise=user(otherwise=everyone))
        assert by_user(request_of(kind, "ada", name="X-API-Key")) != by_user(request_of(kind, user="ada"))

    def test_several_lines_of_a_field_are_one_value(self, kind: str) -> None:
        assert request_of(kind, "a", "b", name="X-Key").header("x-key") in {"a,b", "a, b"}

    def test_wsgi_content_fields_are_keys(self) -> None:
        environ = wsgi_environ(body=b"abc") | {"CONTENT_TYPE": "text/csv"}
        assert WSGIRequest(environ).header("Content-Type") == "text/csv"
        assert WSGIRequest(environ).header("content-length") == "3"

    @pytest.mark.parametrize("name", ["", 5, None, b"X-Key"])
    def test_invalid_header_name_is_refused(self, name: Any) -> None:
        with pytest.raises(InvalidLimiter, match="name of a header field is text"):
            header(name, otherwise=everyone)

    def test_user_is_a_key(self, kind: str) -> None:
        key = user(otherwise=ClientAddress())
        assert key(request_of(kind, user="ada")) == key(request_of(kind, user="ada", peer="1.1.1.1"))
        assert key(request_of(kind, user="ada")) != key(request_of(kind, user="eve"))
        assert key(request_of(kind, peer=CLIENT)) == CLIENT


class TestStarlettesUsers:
    def name(self, user: Any) -> str | None:
        return ASGIRequest(asgi_scope(user=user)).user

    def test_display_name_is_the_key_without_an_identity(self) -> None:
        class BaseUser:
            is_authenticated = True
            display_name = "ada"

            @property
            def identity(self) -> str:
                raise NotImplementedError

        assert self.name(BaseUser()) == "ada"

    def test_identity_is_the_key(self) -> None:
        class User:
            is_authenticated, identity, display_name = True, "42", "ada"

        assert self.name(User()) == "42"

    def test_unauthenticated_user_has_no_key(self) -> None:
        class Unauthenticated:
            is_authenticated, display_name = False, ""

        assert self.name(Unauthenticated()) is None

    def test_object_without_a_name_has_no_key(self) -> None:
        assert self.name(object()) is None


class TestRequests:
    def test_path_is_decoded_text(self) -> None:
        assert WSGIRequest(wsgi_environ("/caf\xc3\xa9")).path == "/caf\xe9"
        assert WSGIRequest(wsgi_environ("/\xff")).path == "/\ufffd"
        assert ASGIRequest(asgi_scope("/caf\xe9")).path == "/caf\xe9"

    def test_path_of_a_mounted_application_starts_at_the_root(self) -> None:
        assert WSGIRequest(wsgi_environ("/b") | {"SCRIPT_NAME": "/a"}).path == "/a/b"

    def test_method_is_in_upper_case(self, kind: str) -> None:
        if kind == "wsgi":
            assert WSGIRequest(wsgi_environ(method="post")).method == "POST"
        else:
            assert ASGIRequest(asgi_scope(method="post")).method == "POST"


def test_cache_of_keys_is_cleared_when_it_is_full() -> None:
    class Counting(PeerKey):
        calls = 0

        def key_of(self, peer: str | None, field: str | None) -> str:
            self.calls += 1
            return f"{peer} {field}"

    for name in (None, "X-Real-IP"):
        key = Counting(name)
        request = request_of("wsgi", "1.2.3.4", name="X-Real-IP")
        expected = f"{PROXY} {None if name is None else '1.2.3.4'}"
        assert [key(request), key(request)] == [expected, expected]
        assert key.calls == 1
        for number in range(5000):
            key(request_of("wsgi", peer=f"peer {number}"))
        assert key(request) == expected
        assert key.calls == 5002


def test_long_fields_are_not_cached() -> None:
    field = "1.2.3.4" + " " * 300 + ", 203.0.113.9"
    key = ClientAddress(trusted_proxies=PROXIES, header="X-Forwarded-For")
    assert {key(request_of("wsgi", field)) for _ in range(3)} == {"203.0.113.9"}


def test_copy_is_the_same_object() -> None:
    client = ClientAddress()
    assert copy.deepcopy({"client": client})["client"] is copy.copy(client) is client
