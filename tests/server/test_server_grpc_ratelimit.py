"""Envoy's rate limit service by gRPC: descriptors, and which rules they charge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from decision_server import DecisionServer
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitResponse
from google.protobuf.wrappers_pb2 import UInt64Value
from grpc_client import OK, OVER_LIMIT, Client, Entries, descriptor, fields_of

Serve = Callable[..., DecisionServer]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
Unit = RateLimitResponse.RateLimit.Unit

RULES = """
[limits.user]
algorithm = "fixed-window"
rate = "3/hour"
align = "first"
[limits.path]
algorithm = "token-bucket"
rate = "600/10 minutes"
burst = 5
[limits.everyone]
algorithm = "fixed-window"
rate = "2/day"
align = "first"

[[rules]]
name = "user"
limits = ["user"]
key = "header:user | address"
[[rules]]
name = "path"
limits = ["path"]
path = "/api/*"
key = "address"
[[rules]]
name = "exports"
limits = ["everyone"]
headers = { generic_key = "export*" }
key = "everyone"
"""


# The configurations in the README of Envoy's ratelimit, as rules.

# On the page.
_, MESSAGING = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
DATABASES = """
[limits.users]
algorithm = "fixed-window"
rate = "500/second"
align = "first"
[[rules]]
name = "users"
limits = ["users"]
headers = { database = "users" }
key = "everyone"
[[rules]]
name = "default"
limits = ["users"]
headers = { database = "default" }
key = "header:database | address"
"""
ADDRESSES = """
[limits.address]
algorithm = "fixed-window"
rate = "10/hour"
align = "first"
[[deny]]
name = "listed"
address = ["50.0.0.5"]
[[rules]]
name = "address"
limits = ["address"]
key = "address"
[[rules.overrides]]
key = { address = "50.0.0.6" }
exempt = true
until = 2999-01-01T00:00:00Z
"""
# The example of limitador.
USERS = """
[limits.get]
algorithm = "fixed-window"
rate = "10/minute"
align = "first"
[limits.post]
algorithm = "fixed-window"
rate = "5/minute"
align = "first"
[[rules]]
name = "get"
limits = ["get"]
headers = { "req.method" = "GET" }
key = "header:user_id | address"
[[rules]]
name = "post"
limits = ["post"]
headers = { "req.method" = "POST" }
key = "header:user_id | address"
"""


def test_a_message_is_charged_to_each_of_its_descriptors(serve: Serve) -> None:
    typed, number = [("message_type", "marketing"), ("to_number", "2061111111")], [("to_number", "2061111111")]
    rules = MESSAGING.replace('store = "shm:///messages?keys=1000000"\n', "")
    with Client(serve(rules, head="", name="messaging")) as client:
        assert client.codes(6, typed, number, domain="messaging") == ["OK"] * 5 + ["OVER_LIMIT"]
        response = client.should_rate_limit(typed, number, domain="messaging")
        assert [one.code for one in response.statuses] == [OVER_LIMIT, OK]
        # Charged by five messages: all of a request is charged, or nothing.
        assert [one.limit_remaining for one in response.statuses] == [0, 95]
        assert client.codes(96, number, domain="messaging") == ["OK"] * 95 + ["OVER_LIMIT"]
        # Others have limits of their own.
        other = [("message_type", "marketing"), ("to_number", "2062222222")]
        assert client.codes(6, other, domain="messaging") == ["OK"] * 5 + ["OVER_LIMIT"]
        # This one leads to no limit.
        response = client.should_rate_limit([("message_type", "marketing")], domain="messaging")
        assert (response.overall_code, response.statuses[0].HasField("current_limit")) == (OK, False)


def test_databases_have_their_limits(serve: Serve) -> None:
    with Client(serve(DATABASES, name="mongo_cps")) as client:
        response = client.should_rate_limit([("database", "users")], domain="mongo_cps")
        limit = response.statuses[0].current_limit
        assert (response.overall_code, limit.requests_per_unit, limit.unit) == (OK, 500, Unit.SECOND)
        assert response.statuses[0].limit_remaining == 499
        assert not client.should_rate_limit([("database", "x")], domain="mongo_cps").statuses[0].limit_remaining


def test_addresses_have_limits_lists_and_exemptions(serve: Serve) -> None:
    with Client(serve(ADDRESSES, name="edge_proxy_per_ip")) as client:
        for address, codes in {
            "50.0.0.4": ["OK"] * 10 + ["OVER_LIMIT"] * 2,
            "50.0.0.5": ["OVER_LIMIT"] * 12,
            "50.0.0.6": ["OK"] * 12,
        }.items():
            assert client.codes(12, [("remote_address", address)], domain="edge_proxy_per_ip") == codes
        with_more = [("remote_address", "50.0.0.5"), ("path", "/")]
        assert client.codes(1, with_more, domain="edge_proxy_per_ip") == ["OVER_LIMIT"]


def test_users_have_a_limit_for_each_method(serve: Serve) -> None:
    with Client(serve(USERS, name="test_namespace")) as client:
        for method, most in (("GET", 10), ("POST", 5)):
            for user in ("1", "2"):
                entries = [("req.method", method), ("user_id", user)]
                codes = client.codes(most + 1, entries, domain="test_namespace")
                assert codes == ["OK"] * most + ["OVER_LIMIT"]


DESCRIPTORS: list[tuple[Entries, int | None]] = [
    ([("user", "a")], 3),
    ([("User", "a")], 3),
    ([("path", "/api/x?page=2"), ("remote_address", "192.0.2.7")], 5),
    ([("remote_address", "192.0.2.7"), ("path", "/api/x")], 5),
    ([("path", "//api/x"), ("remote_address", "[2001:db8::7]:443")], 5),
    ([("generic_key", "exports")], 2),
    # A rule names all entries, and needs all that it names.
    ([("user", "")], None),
    ([("user", "a"), ("path", "/api/x")], None),
    ([("path", "/api/x")], None),
    # A part of a key takes the first value that there is.
    ([("remote_address", "192.0.2.7")], 3),
    ([("path", "/other"), ("remote_address", "192.0.2.7")], None),
    ([("path", "/api/x"), ("remote_address", "192.0.2.7"), ("method", "GET")], None),
    ([("generic_key", "import")], None),
    ([("user", "a"), ("no name", "b")], None),
    ([], None),
]


def test_a_descriptor_is_for_the_rules_that_name_its_entries(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for entries, remaining in DESCRIPTORS:
            response = client.should_rate_limit(descriptor(entries, hits_addend=UInt64Value(value=0)))
            [status] = response.statuses
            assert (response.overall_code, status.code) == (OK, OK)
            assert (status.limit_remaining if status.HasField("current_limit") else None) == remaining, entries


def test_a_status_has_the_limit_and_when_more_is_allowed(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for left in (2, 1, 0):
            response = client.should_rate_limit([("user", "a")])
            [status] = response.statuses
            assert (response.overall_code, status.code, status.limit_remaining) == (OK, OK, left)
            limit = status.current_limit
            assert (limit.name, limit.requests_per_unit, limit.unit) == ("user", 3, Unit.HOUR)
            assert 3000 < status.duration_until_reset.seconds <= 3600
            fields = fields_of(response.response_headers_to_add)
            assert fields["ratelimit"].startswith(f'"user";r={left};t=')
            assert (fields["ratelimit-policy"], response.raw_body) == ('"user";q=3;w=3600', b"")
        response = client.should_rate_limit([("user", "a")])
        [status] = response.statuses
        assert (response.overall_code, status.code, status.limit_remaining) == (OVER_LIMIT, OVER_LIMIT, 0)
        fields = fields_of(response.response_headers_to_add)
        assert 3000 < int(fields["retry-after"]) <= 3600
        assert fields["content-type"] == "application/problem+json"
        assert json.loads(response.raw_body)["violated-policies"] == ["user"]
        # A period of several units.
        limit = client.should_rate_limit([("path", "/api/"), ("remote_address", "192.0.2.7")]).statuses[0].current_limit
        assert (limit.requests_per_unit, limit.unit) == (600, Unit.MINUTE)


def test_hits_are_charged_at_once(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        assert client.should_rate_limit([("user", "a")], hits=2).statuses[0].limit_remaining == 1
        response = client.should_rate_limit([("user", "a")], hits=2)
        assert (response.overall_code, response.statuses[0].limit_remaining) == (OVER_LIMIT, 1)
        # More than the limit can never be allowed: there is no time to wait for.
        response = client.should_rate_limit([("user", "a")], hits=2**32 - 1)
        assert (response.overall_code, response.statuses[0].limit_remaining) == (OVER_LIMIT, 1)
        assert "retry-after" not in fields_of(response.response_headers_to_add)
        assert client.should_rate_limit([("user", "a")]).statuses[0].limit_remaining == 0


def test_a_descriptor_has_hits_of_its_own(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        own = descriptor([("user", "a")], hits_addend=UInt64Value(value=2))
        response = client.should_rate_limit(own, [("user", "b")])
        assert [one.limit_remaining for one in response.statuses] == [1, 2]
        # 0 asks without a charge.
        asking = descriptor([("user", "a")], hits_addend=UInt64Value(value=0))
        for _ in range(3):
            assert client.should_rate_limit(asking, hits=3).statuses[0].limit_remaining == 1


def test_a_rule_of_several_limits_reports_the_one_that_binds(serve: Serve) -> None:
    rules = RULES.replace('limits = ["user"]', 'limits = ["user", "everyone"]')
    with Client(serve(rules)) as client:
        names = [client.should_rate_limit([("user", "a")]).statuses[0].current_limit.name for _ in range(3)]
    assert names == ["everyone"] * 3


ERRORS: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"domain": "other"}, grpc.StatusCode.NOT_FOUND, 'the domain is "limits"'),
    ({"domain": ""}, grpc.StatusCode.NOT_FOUND, "rename one of them"),
    ({"descriptors": []}, grpc.StatusCode.INVALID_ARGUMENT, "1 to 64 descriptors"),
    ({"descriptors": [[("user", "a")]] * 65}, grpc.StatusCode.INVALID_ARGUMENT, "1 to 64 descriptors"),
    ({"descriptors": [[("remote_address", "x")]]}, grpc.StatusCode.INVALID_ARGUMENT, '"x"'),
    ({"descriptors": [[("path", "/"), ("path", "/a")]]}, grpc.StatusCode.INVALID_ARGUMENT, "path twice"),
    # More than a table of fields has room for.
    ({"descriptors": [[(f"x{one:x}", "") for one in range(40_000)]]}, grpc.StatusCode.INVALID_ARGUMENT, "64 entries"),
    # A long status would reach nobody.
    ({"domain": "\x01" * 300_000}, grpc.StatusCode.NOT_FOUND, "rename one of them"),
    ({"descriptors": [[("remote_address", "x" * 60_000)]]}, grpc.StatusCode.INVALID_ARGUMENT, '"xxxx'),
    ({"descriptors": [[("user", "a" * 600_000)]]}, grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 524288 bytes"),
    (
        {"descriptors": [RateLimitDescriptor(limit=RateLimitDescriptor.RateLimitOverride(requests_per_unit=9))]},
        grpc.StatusCode.UNIMPLEMENTED,
        "the rule file has the limits",
    ),
]


def test_a_request_that_cannot_be_decided_is_an_error(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for request, code, reason in ERRORS:
            descriptors = request.get("descriptors", [[("user", "a")]])
            with pytest.raises(grpc.RpcError) as caught:
                client.should_rate_limit(*descriptors, domain=request.get("domain", "limits"))
            assert (caught.value.code(), reason in caught.value.details()) == (code, True), caught.value
        assert client.should_rate_limit([("user", "a")]).statuses[0].limit_remaining == 2


def test_any_text_is_the_value_of_an_entry(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for text in ("\x00", "a\nb", "\x7f", "\u00e9", "\U0001f600", " ", "a" * 60_000, "b" * 200_000):
            assert client.codes(4, [("user", text)]) == ["OK"] * 3 + ["OVER_LIMIT"]


def test_a_peer_that_is_no_proxy_is_refused(serve: Serve) -> None:
    with Client(
        serve(RULES, head='version = 1\nclient = { trusted_proxies = ["10.0.0.1"], header = "X-Forwarded-For" }\n')
    ) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.should_rate_limit([("user", "a")])
        assert (caught.value.code(), "127.0.0.1" in caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, True)


def test_services_and_the_middleware_share_a_limit(serve: Serve) -> None:
    server = serve(RULES)
    with Client(server) as client:
        assert client.should_rate_limit([("user", "a")]).statuses[0].limit_remaining == 2
        reply = server.ask("decide", uri="/", client="192.0.2.7", headers={"user": "a"})
        assert reply["limits"][0]["remaining"] == 1


def test_metrics_count_rate_limits(serve: Serve) -> None:
    server = serve(RULES)
    with Client(server) as client:
        client.codes(4, [("user", "a")])
        client.codes(2, [("nobody", "a")])
        with pytest.raises(grpc.RpcError):
            client.should_rate_limit([("user", "a")], domain="x")
    lines = server.get("/metrics")[2].decode().splitlines()
    for result, count in {"allowed": 3, "denied": 1, "unmatched": 2, "refused": 1}.items():
        assert f'forebay_server_questions_total{{asked_by="ratelimit",result="{result}"}} {count}' in lines


def test_a_check_without_hits_counts_for_no_ban(serve: Serve) -> None:
    ban = '[bans.users]\ndenials = "2/hour"\nlasts = "1 hour"\n'
    rules = RULES.replace('key = "header:user | address"', 'key = "header:user | address"\nban = "users"') + ban
    with Client(serve(rules)) as client:
        client.codes(3, [("user", "a")])
        asking = descriptor([("user", "a")], hits_addend=UInt64Value(value=0))
        for _ in range(5):
            assert client.should_rate_limit(asking).statuses[0].HasField("current_limit")
        assert client.codes(2, [("user", "a")]) == ["OVER_LIMIT"] * 2
        # A ban denies without the decision of a limit.
        response = client.should_rate_limit([("user", "a")], [("user", "b")])
        assert [one.HasField("current_limit") for one in response.statuses] == [False, False]
        assert [one.code for one in response.statuses] == [OVER_LIMIT, OVER_LIMIT]


def test_a_deny_list_of_a_place_is_for_descriptors_that_tell_it(serve: Serve) -> None:
    deny = '[[deny]]\nname = "listed"\naddress = ["50.0.0.5"]\npath = "/api/*"\nmethods = "POST"\n'
    address, path, method = ("remote_address", "50.0.0.5"), ("path", "/api/x"), ("method", "POST")
    with Client(serve(RULES + deny)) as client:
        for entries in ([address], [address, path], [address, method], [address, method, ("path", "/")]):
            assert client.codes(1, entries) == ["OK"]
        assert client.codes(1, [address, path, method]) == ["OVER_LIMIT"]
        assert client.codes(1, [address, path, ("method", "GET")]) == ["OK"]
