"""Lists of addresses: whom a rule exempts, and whom a `Deny` refuses."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site, asgi_scope, wsgi_environ

from forebay import FixedWindow, InvalidLimiter, LimitsDisabledWarning, Store, UnseenPathsWarning
from forebay.contrib.views import AppGates, rules_of
from forebay.testing import ManualClock
from forebay.web import (
    AddressList,
    Answer,
    BodyLimit,
    ClientAddress,
    Denial,
    Deny,
    Gate,
    Request,
    Rule,
    everyone,
    header,
)
from forebay.web.native_requests import ASGIRequest, WSGIRequest

MakeSite = Callable[..., Site]
PROXY = "10.0.0.1"
OURS = AddressList(["10.0.0.0/8", "192.0.2.0/28"])
BEHIND = ClientAddress(trusted_proxies=["10.0.0.0/8"], header="X-Forwarded-For")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def limit() -> Iterator[FixedWindow]:
    with Store.private(keys=100, clock=ManualClock()) as opened:
        yield FixedWindow(opened, "limit", "1/hour")


@pytest.fixture
def wall_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the wall clock."""
    now_s = [NOW.timestamp()]
    monkeypatch.setattr("time.time", lambda: now_s[0])
    return now_s


def statuses(site: Site, count: int = 2, **options: Any) -> list[int]:
    return [site.request(**options).status for _ in range(count)]


def via(*hops: str) -> dict[str, Any]:
    """A request that the proxy passes on, with these lines of its field."""
    return {"client": PROXY, "fields": [("X-Forwarded-For", hop) for hop in hops]}


class TestLists:
    @pytest.mark.parametrize(
        ("networks", "inside", "outside"),
        [
            ("10.0.0.0/8", ["10.0.0.0", "10.255.255.255"], ["9.255.255.255", "11.0.0.0", "::a00:0"]),
            ("203.0.113.7", ["203.0.113.7"], ["203.0.113.6", "203.0.113.8"]),
            (["10.0.0.0/255.0.0.0"], ["10.1.2.3"], ["11.0.0.0"]),
            ("2001:db8::/32", ["2001:db8::", "2001:DB8:ffff::1"], ["2001:db9::", "32.1.13.184"]),
            ("::1", ["::1"], ["::2", "0.0.0.1"]),
            ("::ffff:10.0.0.0/104", ["10.1.2.3", "::ffff:10.1.2.3"], ["11.0.0.0", "::ffff:11.0.0.0"]),
            ("10.0.0.0/8", ["::ffff:10.1.2.3", " 10.1.2.3 "], ["2002:a00::1", "::10.1.2.3"]),
            (["10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32"], ["10.1.2.3", "10.9.9.9", "192.0.2.1"], ["192.0.2.2"]),
            ("fe80::/10", ["fe80::1%eth0"], ["fec0::1"]),
            ([], [], ["10.0.0.1", "::1"]),
        ],
    )
    def test_a_list_has_the_addresses_of_its_networks(
        self, networks: Any, inside: list[str], outside: list[str]
    ) -> None:
        listed = AddressList(networks)
        assert [address for address in inside if address not in listed] == []
        assert [address for address in outside if address in listed] == []
        assert all(ip_address(address.strip()) in listed for address in inside)
        assert not any(ip_address(address) in listed for address in outside)

    @pytest.mark.parametrize("address", [None, "", "unix", "unknown", "10", b"\n\0\0\1", 167772161, ("10.0.0.1", 80)])
    def test_what_is_no_address_is_in_no_list(self, address: Any) -> None:
        assert address not in AddressList(["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"])

    @pytest.mark.parametrize(
        ("networks", "message"),
        [
            ("10.0.0.1/8", r"has networks such as .* not '10.0.0.1/8': 10.0.0.1/8 has host bits set"),
            ("2001:db8::1/32", "has host bits set"),
            ("::ffff:10.0.0.1/104", "has host bits set"),
            ("office", "not 'office': 'office' does not appear to be an IPv4 or IPv6 network"),
            ("10.0.0.0/33", "not '10.0.0.0/33'"),
            ("10.0.0.0/8, 192.0.2.1", "not '10.0.0.0/8, 192.0.2.1'"),
            ("", "not ''"),
            (["10.0.0.0/8", None], "not None: it is NoneType"),
            ([["10.0.0.0/8"]], "it is list"),
            (b"10.0.0.0/8", "not 49: it is int"),
            (8, "has networks such as .* not 8"),
            ("fe80::1%eth0", "'fe80::1%eth0'"),
            ("0.0.0.0/0", "'0.0.0.0/0' is every address: a rule for all needs no list"),
            ("::/0", "'::/0' is every address"),
            ("::ffff:0.0.0.0/96", "is every address"),
            ({"10.0.0.0/8": NOW.replace(tzinfo=None)}, "ends at a datetime with a time zone, or at None for never"),
            ({"10.0.0.0/8": "2030-01-01"}, "write datetime"),
            ({"10.0.0.0/8": 5}, "ends at a datetime"),
        ],
    )
    def test_a_list_that_cannot_be_is_refused(self, networks: Any, message: str) -> None:
        with pytest.raises(InvalidLimiter, match=message):
            AddressList(networks)

    def test_entries_leave_the_list_at_their_end(self, wall_s: list[float]) -> None:
        minute = timedelta(minutes=1)
        listed = AddressList(
            {"10.0.0.0/8": NOW + minute, "10.1.0.0/16": NOW - minute, "10.2.0.0/16": None, "10.3.0.1": NOW + 2 * minute}
        )
        addresses = ["10.0.0.1", "10.1.0.1", "10.2.0.1", "10.3.0.1"]
        assert [listed.left_s(address) for address in addresses] == [60, 60, float("inf"), 120]
        wall_s[0] += 60
        assert [listed.left_s(address) for address in addresses] == [None, None, float("inf"), 60]
        assert [address in listed for address in addresses] == [False, False, True, True]

    def test_the_later_end_of_one_network_counts(self, wall_s: list[float]) -> None:
        assert "10.0.0.1" in AddressList({"10.0.0.1": None, "::ffff:10.0.0.1": NOW - timedelta(days=1)})
        assert "10.0.0.1" in AddressList({"10.0.0.1": NOW - timedelta(days=1), "::ffff:10.0.0.1": None})

    def test_a_list_says_how_many_networks_it_has(self) -> None:
        assert len(AddressList(["10.0.0.0/8", "10.0.0.0/8", "::1"])) == 2
        assert repr(AddressList("::1")) == "<AddressList of 1 network>"

    def test_a_lookup_reads_no_clock_unless_an_entry_has_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.time", lambda: 1 / 0)
        assert "10.0.0.1" in OURS
        with pytest.raises(ZeroDivisionError):
            AddressList({"10.0.0.1": NOW}).left_s("10.0.0.1")


class TestClients:
    @pytest.mark.parametrize(
        ("client", "peer", "hops", "address"),
        [
            (ClientAddress(), "203.0.113.7", [], "203.0.113.7"),
            (ClientAddress(ipv4_prefix=8), "203.0.113.7", [], "203.0.113.7"),
            (ClientAddress(), "2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2:3:4:5:6"),
            (ClientAddress(), "::ffff:203.0.113.7", [], "203.0.113.7"),
            (ClientAddress(), None, [], None),
            (ClientAddress(), "testclient", [], None),
            (BEHIND, PROXY, ["203.0.113.7"], "203.0.113.7"),
            (BEHIND, PROXY, ["10.9.9.9, 203.0.113.7"], "203.0.113.7"),
            (BEHIND, PROXY, ["203.0.113.7, 10.0.0.2"], "203.0.113.7"),
            (BEHIND, PROXY, ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            (BEHIND, "203.0.113.7", ["10.0.0.2"], "203.0.113.7"),
            # A proxy that names no client is not the client.
            (BEHIND, PROXY, [], None),
            (BEHIND, PROXY, ["unknown"], None),
            (BEHIND, PROXY, ["203.0.113.7, unknown"], None),
            (BEHIND, PROXY, ["unknown, 10.0.0.2"], None),
            (BEHIND, None, ["10.0.0.2"], None),
        ],
    )
    def test_the_address_of_a_client_is_known_or_none(
        self, client: ClientAddress, peer: str | None, hops: list[str], address: str | None
    ) -> None:
        fields = [("X-Forwarded-For", hop) for hop in hops]
        for request in (
            WSGIRequest(wsgi_environ(client=peer, fields=fields)),
            ASGIRequest(asgi_scope(client=peer, fields=fields)),
        ):
            for _ in range(2):  # the second time from the cache
                assert client.address_of(request) == (None if address is None else ip_address(address))

    @pytest.mark.parametrize(
        ("field", "address"), [("for=203.0.113.7", "203.0.113.7"), ("for=_x", None), ('for="', None), ("", None)]
    )
    def test_the_address_in_forwarded_is_known_or_none(self, field: str, address: str | None) -> None:
        client = ClientAddress(trusted_proxies=["unix"], header="Forwarded")
        expected = None if address is None else ip_address(address)
        request = WSGIRequest(wsgi_environ(client=None, fields=[("Forwarded", field)]))
        assert client.address_of(request) == expected
        client = ClientAddress(trusted_proxies=["10.0.0.0/8"], header="Forwarded")
        assert client.address_of(WSGIRequest(wsgi_environ(client=PROXY, fields=[("Forwarded", field)]))) == expected


class TestExempt:
    def test_a_rule_does_not_apply_to_addresses_of_its_list(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, exempt=OURS)])
        assert statuses(limited, client="10.1.2.3") == [200, 200]
        assert statuses(limited, client="::ffff:192.0.2.15") == [200, 200]
        assert statuses(limited, client="192.0.2.16") == [200, 429]

    def test_the_list_sees_the_client_that_the_gate_sees(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, exempt=OURS)], client=BEHIND)
        assert statuses(limited, **via("203.0.113.7")) == [200, 429]
        assert statuses(limited, **via("10.9.9.9, 203.0.113.8")) == [200, 429]
        assert statuses(limited, **via("192.0.2.5")) == [200, 200]
        assert statuses(limited, **via("10.2.2.2")) == [200, 200]

    @pytest.mark.parametrize("hops", [[], ["unknown"], ["203.0.113.7, unknown"], [""]])
    def test_a_proxy_that_names_no_client_is_not_exempt(
        self, site: MakeSite, limit: FixedWindow, hops: list[str]
    ) -> None:
        assert statuses(site([Rule(limit, exempt=OURS)], client=BEHIND), **via(*hops)) == [200, 429]

    def test_the_list_sees_the_client_that_the_rule_names(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, exempt=OURS, key=BEHIND)])
        assert statuses(limited, **via("203.0.113.7")) == [200, 429]
        assert statuses(limited, **via("192.0.2.5")) == [200, 200]
        limited = site([Rule(limit, exempt=OURS, key=BEHIND)], client=everyone)
        assert statuses(limited, **via("192.0.2.5")) == [200, 200]

    def test_a_client_behind_a_unix_socket_is_not_exempt(self, site: MakeSite, limit: FixedWindow) -> None:
        named = site([Rule(limit, exempt=OURS, key=everyone)], client=ClientAddress())
        assert statuses(named, client=None) == [200, 429]
        assert statuses(site([Rule(limit, exempt=OURS)]), client=None) == [500, 500]

    def test_a_list_without_a_client_address_is_refused_at_start(self, site: MakeSite, limit: FixedWindow) -> None:
        key = header("X-Key", otherwise=everyone)
        with pytest.raises(
            InvalidLimiter, match=r"write client=ClientAddress\(\), or behind proxies .*, not .*everyone"
        ):
            site([Rule(limit, exempt=OURS)], client=everyone)
        with pytest.raises(InvalidLimiter, match="an AddressList needs the client's address"):
            site([Deny(OURS), Rule(limit, key=BEHIND)], client=key)

    def test_a_list_does_not_take_the_proxy_for_the_client_of_a_key(self, site: MakeSite, limit: FixedWindow) -> None:
        """The key knows of proxies, and the default doesn't."""
        rule = Rule(limit, exempt=OURS, key=header("X-Key", otherwise=BEHIND))
        with pytest.raises(
            InvalidLimiter, match=r"an AddressList needs the client's address: .* not ClientAddress\(\)"
        ):
            site([rule])
        with pytest.raises(InvalidLimiter, match="an AddressList needs the client's address"):
            AppGates(Gate(())).gate_of((rule,))
        assert statuses(site([rule], client=BEHIND), **via("203.0.113.7")) == [200, 429]

    def test_a_rule_of_a_view_may_have_a_list(self, limit: FixedWindow) -> None:
        [rule] = rules_of([limit], {"exempt": OURS})
        assert rule.exempt is OURS

    @pytest.mark.parametrize("option", ["key", "tier", "cost"])
    def test_a_list_is_for_exempt_only(self, limit: FixedWindow, option: str) -> None:
        with pytest.raises(InvalidLimiter, match=option):
            Rule(limit, **{option: OURS})  # type: ignore[arg-type]


class TestDeny:
    def test_addresses_of_the_list_are_refused_and_not_charged(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit), Deny(OURS)])
        answer = limited.request(client="10.1.2.3")
        assert (answer.status, answer.json) == (
            403,
            {
                "type": "about:blank",
                "title": "Forbidden",
                "status": 403,
                "detail": "Requests from this address are refused.",
            },
        )
        assert answer["content-type"] == "application/problem+json"
        assert "retry-after" not in answer
        assert "ratelimit" not in answer
        assert limited.handled == 0
        assert limit.peek("10.1.2.3", 0).remaining == 1
        assert statuses(limited, client="203.0.113.7") == [200, 429]

    def test_a_deny_needs_no_rule_beside_it(self, site: MakeSite) -> None:
        limited = site(Deny(OURS))
        assert statuses(limited, client="10.1.2.3") == [403, 403]
        assert statuses(limited, client="203.0.113.7") == [200, 200]

    def test_a_deny_is_for_its_paths_and_methods(self, site: MakeSite) -> None:
        limited = site([Deny(OURS, path="/admin/*", methods="POST")])
        assert [
            limited.request(path, method, client=PROXY).status
            for path, method in [("/admin", "POST"), ("//admin/x", "POST"), ("/admin", "GET"), ("/", "POST")]
        ] == [403, 403, 200, 200]

    def test_a_client_cannot_forge_its_way_around(self, site: MakeSite) -> None:
        limited = site([Deny(AddressList("203.0.113.7"))], client=BEHIND)
        assert statuses(limited, 1, **via("192.0.2.5, 203.0.113.7")) == [403]
        assert statuses(limited, 1, client="203.0.113.7", fields=[("X-Forwarded-For", "192.0.2.5")]) == [403]
        assert statuses(limited, 1, **via("203.0.113.7, 192.0.2.5")) == [200]

    def test_the_end_of_a_refusal_is_its_retry_after(self, site: MakeSite, wall_s: list[float]) -> None:
        limited = site([Deny(AddressList({CLIENT: NOW + timedelta(seconds=90.5)}))])
        assert limited.request()["retry-after"] == "91"
        wall_s[0] += 90.4
        assert limited.request()["retry-after"] == "1"
        wall_s[0] += 0.1
        assert limited.request().status == 200

    def test_status_and_answer_are_chosen(self, site: MakeSite) -> None:
        assert statuses(site([Deny(OURS, status=404)]), 1, client=PROXY) == [404]
        hidden = site([Deny(OURS, answer=Answer(200, (("Content-Type", "text/json"),), b"{}"))])
        answer = hidden.request(client=PROXY)
        assert (answer.status, answer.body, answer["content-type"], hidden.handled) == (200, b"{}", "text/json", 0)

        def explain(request: Request, denial: Denial) -> Answer:
            assert isinstance(denial.rule, Deny)
            assert denial.is_ban
            assert not denial.is_unavailable
            return Answer(451, (("Content-Type", "text/plain"),), str(request.peer).encode())

        assert site([Deny(OURS, answer=explain)]).request(client=PROXY).body == PROXY.encode()

    def test_a_server_that_hides_addresses_refuses_all(self, site: MakeSite) -> None:
        limited = site([Deny(OURS, answer=Answer(200))])
        assert statuses(limited, 1, client=None) == [500]
        assert limited.handled == 0

    def test_what_the_server_calls_its_peer_is_refused_by_no_list(self, site: MakeSite) -> None:
        assert statuses(site([Deny(OURS)]), 1, client="testclient") == [200]
        trusting = ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")
        limited = site([Deny(OURS)], client=trusting)
        assert statuses(limited, 1, client=None) == [200]
        assert statuses(limited, 1, client=None, fields=[("X-Forwarded-For", "10.0.0.9")]) == [403]

    def test_a_deny_has_a_client_of_its_own(self, site: MakeSite) -> None:
        fields = [("X-Forwarded-For", "203.0.113.7")]
        deny = Deny(AddressList("203.0.113.7"), client=BEHIND)
        for options in ({}, {"client": lambda request: "everyone"}):
            assert statuses(site([deny], **options), 1, client=PROXY, fields=fields) == [403]
            assert statuses(site([deny], **options), 1, client="203.0.113.7") == [403]
            assert statuses(site([deny], **options), 1, client=PROXY) == [200]
        with pytest.raises(InvalidLimiter, match="client is a ClientAddress, not 'me'"):
            Deny(OURS, client="me")  # type: ignore[arg-type]

    def test_a_refusal_is_logged_and_observed(self, site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
        denials: list[Denial] = []
        limited = site([Deny(OURS)], on_denied=lambda request, denial: denials.append(denial))
        with caplog.at_level(logging.INFO, "forebay.web.denied"):
            limited.request(client=PROXY)
        assert [record.getMessage() for record in caplog.records] == ["403 for 'GET' '/' by a Deny"]
        assert vars(caplog.records[0])["forebay_is_ban"] is True
        assert [denial.is_ban for denial in denials] == [True]

    def test_a_deny_stands_beside_rules_that_are_awaited(self, limit: FixedWindow) -> None:
        async def key(request: Request) -> str:
            return "all"

        limited = Site("asgi", [Rule(limit, key=key), Deny(OURS), BodyLimit(10)])
        assert statuses(limited, client=PROXY) == [403, 403]
        assert statuses(limited, client=CLIENT) == [403, 403]
        assert statuses(limited, client="203.0.113.7") == [200, 429]

    def test_switched_off_limits_refuse_nobody(self, site: MakeSite) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LimitsDisabledWarning)
            limited = site([Deny(OURS)], enabled=False)
        assert statuses(limited, client=PROXY) == [200, 200]

    def test_a_path_that_is_never_requested_is_noticed(self, limit: FixedWindow) -> None:
        gate = Gate([Deny(OURS, path="/admni")])
        request = WSGIRequest(wsgi_environ("/admin"))
        for _ in range(1000):
            gate.enter(request)
        with pytest.warns(UnseenPathsWarning, match="no Deny's path, '/admni', has matched any of 1000 requests"):
            gate.enter(request)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"addresses": "10.0.0.0/8"}, "a Deny is for an AddressList, not '10.0.0.0/8'"),
            ({"status": 99}, "status is an HTTP status"),
            ({"status": None}, "status is an HTTP status such as 403, not None"),
            ({"answer": "no"}, "answer is an Answer or a callable"),
            ({"answer": Answer(99)}, "an Answer has a status"),
            ({"path": "admin"}, "a path pattern begins with"),
            ({"methods": ["A|B"]}, "several methods are a list"),
        ],
    )
    def test_a_deny_that_cannot_be_is_refused(self, options: Any, message: str) -> None:
        with pytest.raises(InvalidLimiter, match=message):
            Deny(**{"addresses": OURS, **options})
