"""Rules over Redis: Python charges the limits, and the server answers whatever Redis does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from decision_server import Both, DecisionServer
from envoy.service.auth.v3.external_auth_pb2 import CheckRequest
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from google.protobuf.wrappers_pb2 import UInt64Value
from grpc_client import OK, OVER_LIMIT, Client, Entries, descriptor, fields_of
from redis_server import RedisServer, free_port, redis_server, until
from scripts_clock import ServerClock, moved_by_tests
from test_server_live import Host
from test_server_live import rules as live
from test_server_process import is_accepted
from test_server_retries import ALONE, IDS, KEY, MANY, compare_retries, statuses
from test_server_rules import KEYS, KINDS, LIMIT, RULE, RULES, compare, drawn, have_same_key

from forebay import InvalidRuleFile, Store, TokenBucket, connect
from forebay.redis import LeasedStore, RedisStore
from forebay.serving.plan import plan_of
from forebay.serving.taken import TakenCharges

Serve = Callable[..., DecisionServer]

THREE = """
[limits.api]
algorithm = "token-bucket"
rate = "3/day"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
"""
ASKED = {"X-Forwarded-Uri": "/api/x?a=1", "X-Forwarded-Method": "GET", "X-Forwarded-For": "192.0.2.7"}
MODES = ["strict", "leased", "synced"]


def url_of(server: RedisServer, mode: str, store_name: str, *options: str) -> str:
    host = f"host=shm:///{store_name}?keys=10000"
    own = {
        "strict": ("timeout=60",),
        "leased": ("timeout=60", host),
        "synced": ("timeout=60", host, "keys=100", "interval=0.01"),
    }
    scheme = "" if mode == "strict" else f"{mode}+"
    return f"{scheme}{server.url}?{'&'.join([*own[mode], *options])}"


def asked(server: DecisionServer, **fields: str) -> int:
    return server.get("/auth/traefik", {**ASKED, **fields})[0]


def unanswered(server: DecisionServer) -> dict[str, int]:
    """The questions that Python hasn't decided, by the reasons."""
    lines = server.get("/metrics")[2].decode().splitlines()
    found = [line for line in lines if line.startswith("forebay_server_unanswered_total{")]
    return {line.split('"')[1]: int(line.split()[-1]) for line in found}


# Decisions


def test_the_server_answers_as_the_gate_does(redis: RedisServer, tmp_path: Path) -> None:
    with redis.client() as client, moved_by_tests():
        clock = ServerClock(client)
        stores = (RedisStore(redis.url, namespace=name, timeout=60) for name in ("served", "own"))
        with next(stores) as served, next(stores) as own:
            # Bans are kept in the memory of a host.
            rules = re.sub(r"\[bans\.[^\]]*\]\n(?:.+\n){2}|ban = .*\n", "", RULES)
            pair = Both(tmp_path / "limits.toml", rules, served, own)
            compare(pair, drawn(2000), lambda pause_ns: clock.set_us(clock.now_us + pause_ns // 1000), KINDS[:-1])


@pytest.mark.parametrize(("key", "target", "fields"), KEYS)
def test_a_key_is_the_same_for_the_server_and_for_python(
    redis: RedisServer, tmp_path: Path, key: str, target: bytes, fields: list[tuple[str, str]]
) -> None:
    with RedisStore(redis.url, timeout=60) as store:
        have_same_key(tmp_path, store, key, target, fields)


@pytest.mark.parametrize("mode", MODES)
def test_python_and_the_server_share_a_limit(
    redis: RedisServer, serve: Serve, store_name: str, tmp_path: Path, mode: str
) -> None:
    url = url_of(redis, mode, store_name)
    server = serve(THREE, store=url)
    (tmp_path / "python").mkdir()
    with connect(url) as store:
        python = Both(tmp_path / "python" / "limits.toml", THREE, store, store)
        request = ("GET", b"/api/x", [("x-forwarded-for", "192.0.2.7")], "127.0.0.1")
        assert [asked(server), python.ask_python(*request)[0], asked(server)] == [200] * 3
        assert [asked(server), python.ask_python(*request)[0]] == [429] * 2
        assert asked(server, **{"X-Forwarded-For": "192.0.2.8"}) == 200
    assert server.stop() == 0


def test_the_server_charges_retries_as_the_gate_does(redis: RedisServer, tmp_path: Path) -> None:
    with redis.client() as client, moved_by_tests():
        clock = ServerClock(client)
        stores = (RedisStore(redis.url, namespace=name, timeout=60) for name in ("served", "own"))
        with next(stores) as served, next(stores) as own:
            # Bans are kept in the memory of a host, and rules in the shadow are charged later.
            rules = re.sub(r"\[bans\.eager\]\n(?:.+\n){2}|\[limits\.tried\]\n(?:.+\n){3}|ban = .*\n", "", MANY)
            rules, _, _ = rules.partition('[[rules]]\nname = "tried"')
            pair = Both(tmp_path / "limits.toml", rules, served, own)
            assert len(compare_retries(pair, 800, lambda pause_ns: clock.set_us(clock.now_us + pause_ns // 1000))) > 3


@pytest.mark.parametrize("mode", MODES)
def test_python_and_the_server_share_request_ids(
    redis: RedisServer, serve: Serve, store_name: str, tmp_path: Path, mode: str
) -> None:
    # The other limit counts each attempt.
    other = (
        '[limits.often]\nalgorithm = "token-bucket"\nrate = "5/day"\n[[rules]]\nname = "often"\nlimits = ["often"]\n'
    )
    rules = (
        ALONE.replace("fixed-window", "token-bucket").replace('align = "first"\n', "").replace("2/hour", "2/day")
        + other
    )
    url = url_of(redis, mode, store_name)
    server = serve(rules, store=url)
    (tmp_path / "python").mkdir()
    with connect(url) as store:
        python = Both(tmp_path / "python" / "limits.toml", rules, store, store)
        fields = [("x-forwarded-for", "192.0.2.7"), (KEY, "one")]
        retry = ("POST", b"/api/x", fields, "127.0.0.1")
        # One charge and two retries, whoever asks; and then another charge.
        assert [*statuses(server, 1), python.ask_python(*retry)[0], *statuses(server, 1)] == [200] * 3
        assert python.ask_server("POST", b"/api/x", fields[:1], "127.0.0.1")[0] == 200
        assert statuses(server, 1) == [429]
        # The request that is denied is charged to no limit.
        assert statuses(server, 1, X_Forwarded_Uri="/other", Idempotency_Key="") == [200]
        assert statuses(server, 1, X_Forwarded_Uri="/other", Idempotency_Key="") == [429]


def test_servers_share_request_ids_in_redis(redis: RedisServer, serve: Serve, store_name: str) -> None:
    rules = ALONE.replace("2/hour", "1/hour")
    first, second = (serve(rules, store=url_of(redis, "strict", store_name)) for _ in range(2))
    assert [*statuses(first, 1), *statuses(second, 1), *statuses(first, 2)] == [200, 200, 200, 429]
    # A peek doesn't know which requests are retries.
    question: dict[str, Any] = {"uri": "/api/x", "client": "192.0.2.7", "method": "POST", "headers": {KEY: "one"}}
    assert not first.ask("peek", **question)["allowed"]


def test_two_hosts_share_a_strict_limit(redis: RedisServer, serve: Serve, store_name: str) -> None:
    url = url_of(redis, "strict", store_name)
    first, second = serve(THREE, store=url), serve(THREE, store=url)
    assert [asked(one) for one in (first, second, second, first, second)] == [200] * 3 + [429] * 2


def test_each_way_to_ask(redis: RedisServer, serve: Serve, store_name: str) -> None:
    server = serve(THREE, store=url_of(redis, "strict", store_name))
    nginx = {"X-Original-URI": "/api/x", "X-Original-Method": "GET", "X-Forwarded-For": "192.0.2.7"}
    status, fields, body = server.get("/auth/nginx", nginx)
    assert (status, body, dict(fields)["ratelimit"].partition(";t=")[0]) == (200, b"", '"api";r=2')
    assert server.get("/auth/envoy/api/x?a=1", {"X-Forwarded-For": "192.0.2.7"}, "POST")[0] == 200
    with Client(server) as client:
        response = client.check("/api/x?a=1")
        added = fields_of(one.header for one in response.ok_response.response_headers_to_add)
        assert added["ratelimit"].startswith('"api";r=0')
        denied = client.check("/%61pi/x").denied_response
        assert (denied.status.code, json.loads(denied.body)["violated-policies"]) == (429, ["api"])
        assert client.check("/other").status.code == 0
    status, fields, body = server.get("/auth/caddy", ASKED)
    assert (status, json.loads(body)["violated-policies"]) == (429, ["api"])
    wait_s = int(dict(fields)["retry-after"])
    assert 20_000 < wait_s <= 28_800
    status, fields, _ = server.get("/auth/nginx", nginx)
    assert (status, dict(fields)["x-forebay-status"]) == (403, "429")
    reply = server.ask("decide", uri="/api/x", client="192.0.2.7")
    assert (reply["http"], reply["allowed"], reply["status"]) == (200, False, 429)
    [limit] = reply["limits"]
    assert (limit["name"], limit["allowed"], limit["limit"], limit["remaining"]) == ("api", False, 3, 0)
    assert wait_s - 60 < limit["retry_after"] <= wait_s
    assert wait_s - 60 < reply["retry_after"] <= wait_s
    assert json.loads(reply["body"])["status"] == 429
    reply = server.ask("decide", uri="/api/x", client="192.0.2.8")
    assert (reply["allowed"], reply["status"], reply["retry_after"], reply["body"]) == (True, 200, None, "")
    assert {field["name"]: field["value"] for field in reply["headers"]}["RateLimit"].startswith('"api";r=2')
    assert [(limit["name"], limit["allowed"], limit["remaining"]) for limit in reply["limits"]] == [("api", True, 2)]
    # Those that are wrong are refused as with limits of the host.
    assert server.get("/auth/traefik", {"X-Forwarded-For": "192.0.2.7"})[0] == 500
    assert server.ask("decide", uri="/api/x")["http"] == 422


def test_a_service_names_a_proxy_as_the_client(redis: RedisServer, serve: Serve, store_name: str) -> None:
    deny = '[[deny]]\nname = "listed"\naddress = ["10.9.0.0/16"]\n'
    over_redis = serve(deny + THREE, store=url_of(redis, "strict", store_name))
    in_memory = serve(deny + THREE, name="memory")
    for client in ("10.9.0.7", "10.8.0.7", "192.0.2.7"):
        question = {"uri": "/api/x", "client": client, "headers": {"X-Forwarded-For": "10.9.0.9"}}
        replies = [server.ask("decide", **question) for server in (over_redis, in_memory)]
        assert replies[0]["status"] == replies[1]["status"] == (403 if client == "10.9.0.7" else 200)


def steady(reply: Any) -> Any:
    """A reply without the seconds in it."""
    if isinstance(reply, list):
        return [steady(one) for one in reply]
    if isinstance(reply, dict):
        return {word: steady(value) for word, value in reply.items() if word not in ("retry_after", "reset_after")}
    return re.sub(r"in \d+ second|(?<=;t=)\d+", "", reply) if isinstance(reply, str) else reply


@pytest.mark.parametrize("mode", MODES)
def test_services_are_answered_as_in_memory(redis: RedisServer, serve: Serve, store_name: str, mode: str) -> None:
    pair = [serve(DESCRIBED, store=store) for store in (url_of(redis, mode, store_name), "")]

    def compare_replies(call: str, **question: Any) -> Any:
        over_redis, in_memory = (steady(server.ask(call, **question)) for server in pair)
        if mode == "leased":
            # A host knows what remains of its loan.
            for reply in (*over_redis.get("replies", [over_redis]), *in_memory.get("replies", [in_memory])):
                reply["headers"] = [one for one in reply["headers"] if one["name"] not in ("RateLimit", "Retry-After")]
                for limit in reply["limits"]:
                    limit["remaining"] = None
        for reply in (over_redis, in_memory):
            for one in reply.get("replies", [reply]):
                one["headers"] = [field for field in one["headers"] if field["name"] != "Retry-After"]
        assert over_redis == in_memory
        return over_redis

    posted = {"uri": "/api/x", "method": "POST", "client": "192.0.2.7"}
    got = {"uri": "/api/x", "client": "192.0.2.7", "headers": {"user": "a"}}
    exported = {"uri": "/", "client": "192.0.2.8", "headers": {"generic_key": "export", "user": "b"}}
    listed = {"uri": "/", "client": "50.0.0.5"}
    for _ in range(2):
        assert compare_replies("peek", **got)["allowed"]
    assert compare_replies("decide", **posted)["allowed"]
    replies = compare_replies("batch", requests=[got, posted, listed, exported, exported, exported])["replies"]
    assert [reply["status"] for reply in replies] == [200, 200, 403, 200, 200, 429]
    # The one that is denied is charged to none of its limits.
    assert compare_replies("peek", **{**exported, "headers": {"user": "b"}})["allowed"]
    denied = compare_replies("peek", **posted)
    assert (denied["status"], denied["body"]) == (420, "calm")
    assert compare_replies("decide", **posted)["status"] == 420
    assert compare_replies("peek", **listed)["status"] == 403


def test_a_batch_with_one_bad_question_charges_nothing(redis: RedisServer, serve: Serve, store_name: str) -> None:
    server = serve(THREE, store=url_of(redis, "strict", store_name))
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    reply = server.ask("batch", requests=[question, {"uri": "/api/x"}])
    assert reply["http"] == 422
    assert reply["error"].startswith("requests[1]: the rules need the client's address")
    assert server.ask("batch", requests=[question] * 257)["error"] == "a batch has at most 256 requests"
    assert server.ask("batch", requests=[])["replies"] == []
    assert [asked(server) for _ in range(4)] == [200] * 3 + [429]


def test_callers_of_other_hosts_may_only_peek(redis: RedisServer, serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    server = serve(THREE, "--token-file", str(token), store=redis.url)
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    assert [server.ask(call, **question)["http"] for call in ("peek", "decide", "batch")] == [200, 401, 401]


@pytest.mark.parametrize("mode", MODES)
def test_a_charge_is_given_back_once(redis: RedisServer, serve: Serve, store_name: str, mode: str) -> None:
    url = url_of(redis, mode, store_name)
    server, other = serve(THREE, store=url), serve(THREE, store=url)
    question = {"uri": "/api/x", "client": "192.0.2.7", "refundable": True}
    [reply, uncharged] = server.ask("batch", requests=[question, {**question, "uri": "/other"}])["replies"]
    assert [reply["allowed"], uncharged["limits"]] == [True, []]
    # Each server knows its own charges.
    assert other.ask("refund", charge=reply["charge"])["refunded"] is False
    for charge in (reply["charge"], uncharged["charge"]):
        assert [server.ask("refund", charge=charge)["refunded"] for _ in range(2)] == [True, False]
    replies = [server.ask("decide", **question) for _ in range(4)]
    assert [(one["allowed"], "charge" in one) for one in replies] == [(True, True)] * 3 + [(False, False)]
    assert "charge" not in server.ask("decide", uri="/other", client="192.0.2.7")
    assert server.ask("refund", charge="")["refunded"] is False


def test_a_charge_comes_back_in_its_own_window(redis: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    rules = [LIMIT.replace("a]", f"{name}]") + RULE.replace('"a"', f'"{name}"') for name in "ab"]
    file.write_text("version = 1\n" + "".join(f'{rule}key = "everyone"\n' for rule in rules))
    with redis.client() as client, moved_by_tests(), RedisStore(redis.url, timeout=60) as store:
        clock = ServerClock(client)
        plan: Any = plan_of(file, store)
        uses = [(0, "everyone", 1), (1, "everyone", 2)]
        first, second = (plan.charging.take(uses) for _ in range(2))
        assert first[0]
        assert second[0]
        assert plan.charging.give_back(first.charge)
        peeked = plan.charging.peek([(0, "everyone", 1), (1, "everyone", 0)])
        assert [(numbers[0], numbers[2]) for numbers in peeked[1]] == [(True, 4), (True, 3)]
        clock.set_us(clock.now_us + 3_600_000_000)
        assert plan.charging.hit([(0, "everyone", 5), (1, "everyone", 5)], None)[0]
        assert plan.charging.give_back(second.charge)
        assert not plan.charging.hit(uses[:1], None)[0]
        assert not plan.charging.hit(uses[1:], None)[0]


BOOKED = """
[limits.slow]
algorithm = "token-bucket"
rate = "1/hour"
burst = 1
[limits.day]
algorithm = "fixed-window"
rate = "3/day"
[[rules]]
name = "slow"
limits = ["day", "slow"]
"""


@pytest.mark.parametrize("mode", ["strict", "synced", ""])
def test_a_reservation_books_ahead_and_is_given_back(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    server = serve(BOOKED, store=url_of(redis, mode, store_name) if mode else "")

    def reserve(max_delay: float) -> Any:
        return server.ask("reserve", uri="/", client="192.0.2.7", max_delay=max_delay)

    first, second = reserve(0), reserve(0.5)
    assert (first["allowed"], first["delay"], second["allowed"], second["status"]) == (True, 0, False, 429)
    assert [(limit["name"], limit["remaining"]) for limit in first["limits"]] == [("day", 2), ("slow", 0)]
    [limit] = second["limits"]
    assert (limit["name"], limit["allowed"], limit["limit"], limit["remaining"]) == ("slow", False, 1, 0)
    assert 3500 < limit["retry_after"] <= 3600
    second, third = reserve(86_400), reserve(86_400)
    assert 3500 < second["delay"] <= 3600 < 7100 < third["delay"] <= 7200
    assert reserve(86_400)["limits"][0]["name"] == "day"
    assert server.ask("refund", charge=third["charge"])["refunded"]
    again = reserve(86_400)
    assert (again["allowed"], 7100 < again["delay"] <= 7200) == (True, True)


def test_leased_limits_do_not_book_ahead(redis: RedisServer, serve: Serve, store_name: str) -> None:
    server = serve(THREE, store=url_of(redis, "leased", store_name))
    reply = server.ask("reserve", uri="/api/x", client="192.0.2.7", max_delay=0)
    assert (reply["http"], "leased limits can't book ahead" in reply["error"]) == (501, True)


@pytest.mark.parametrize("policy", ["deny", "allow"])
def test_a_charge_that_redis_may_not_have_given_back_is_not_given_back_again(
    own_redis: RedisServer, serve: Serve, policy: str
) -> None:
    server = serve(THREE, store=f"{own_redis.url}?when_unavailable={policy}")
    charge = server.ask("decide", uri="/api/x", client="192.0.2.7", refundable=True)["charge"]
    own_redis.process.kill()
    own_redis.process.wait()
    reply = server.ask("refund", charge=charge)
    assert (reply["http"], "has come back, or stays" in reply["error"]) == (503, True)
    assert server.ask("refund", charge=charge)["refunded"] is False
    reserved = server.ask("reserve", uri="/api/x", client="192.0.2.7", max_delay=1)
    assert reserved["status"] == (503 if policy == "deny" else 200)


@pytest.mark.parametrize("mode", ["leased", "synced"])
def test_a_policy_gives_no_charge_back(own_redis: RedisServer, serve: Serve, store_name: str, mode: str) -> None:
    server = serve(THREE, store=url_of(own_redis, mode, store_name, "when_unavailable=allow"))
    charge = server.ask("decide", uri="/api/x", client="192.0.2.7", refundable=True)["charge"]
    own_redis.process.kill()
    own_redis.process.wait()
    reply = server.ask("refund", charge=charge)
    # The charge of a synced limit is in the memory of the host.
    assert reply["http"] == (503 if mode == "leased" else 200)


def test_the_newest_charges_are_remembered() -> None:
    charges = TakenCharges()
    first, *others = (charges.add([("header", "a" * 65_000), "b"], [number]) for number in range(1000))
    assert charges.pop(first) is None
    assert charges.pop(others[-1]) == [999]
    assert charges.pop(others[-1]) is None
    known = [charges.pop(one) is not None for one in others[:-1]]
    assert (sum(known), known) == (984, [False] * 14 + [True] * 984)


SEVENTEEN = "".join(
    f'[limits.l{n}]\nalgorithm = "token-bucket"\nrate = "9/day"\n[[rules]]\nname = "r{n}"\nlimits = ["l{n}"]\n'
    for n in range(17)
)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_with_more_charges_than_are_made_at_once_is_refused(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    few = SEVENTEEN.replace('name = "r16"\n', 'name = "r16"\npath = "/all"\n')
    # Those of rules in the shadow are made one by one.
    shadow = '[[rules]]\nname = "seen"\nlimits = ["l0"]\nshadow = true\nkey = "everyone"\n'
    server = serve(few + shadow, store=url_of(redis, mode, store_name))
    status, _, body = server.get("/auth/envoy/all", {"X-Forwarded-For": "192.0.2.7"})
    assert status == 500
    assert "has 17 charges, and over Redis at most 16 are made at once" in json.loads(body)["detail"]
    reply = server.ask("decide", uri="/all", client="192.0.2.7")
    assert (reply["http"], reply["allowed"], reply["status"]) == (200, False, 500)
    with Client(server) as client:
        assert client.check("/all").denied_response.status.code == 500
    reply = server.ask("decide", uri="/", client="192.0.2.7")
    assert [(limit["name"], limit["allowed"]) for limit in reply["limits"]] == [(f"l{n}", True) for n in range(16)]
    if mode != "leased":
        assert {limit["remaining"] for limit in reply["limits"]} == {8}


def test_a_rule_that_needs_a_client_needs_proxies_over_redis_too(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'version = 1\nstore = "redis://127.0.0.1:1/0"\n{LIMIT}{RULE}charge_on = [401]\n')
    with pytest.raises(InvalidRuleFile, match="trusted_proxies") as caught:
        plan_of(file)
    assert "rules[0].charge_on: the server sees no response" in str(caught.value)


# Descriptors

DESCRIBED = """
[limits.user]
algorithm = "token-bucket"
rate = "3/day"
[limits.path]
algorithm = "token-bucket"
rate = "5/day"
[limits.everyone]
algorithm = "token-bucket"
rate = "4/day"
burst = 2
[limits.seen]
algorithm = "token-bucket"
rate = "100/day"
[limits.other]
algorithm = "token-bucket"
rate = "1/day"

[[deny]]
name = "listed"
address = ["50.0.0.5"]
[[rules]]
name = "user"
limits = ["user"]
key = "header:user | address"
[[rules.overrides]]
key = { "header:user" = "guest" }
limits = ["other"]
until = 2999-01-01T00:00:00Z
[[rules]]
name = "users seen"
limits = ["seen"]
key = "header:user | address"
shadow = true
[[rules]]
name = "path"
limits = ["path"]
path = "/api/*"
methods = "POST"
key = "address"
cost = 2
response = { status = 420, body = "calm" }
[[rules]]
name = "exports"
limits = ["everyone"]
headers = { generic_key = "export*" }
key = "everyone"
"""
USERS = """
[limits.user]
algorithm = "token-bucket"
rate = "3/day"
[[rules]]
name = "user"
limits = ["user"]
key = "header:user | everyone"
IDS
[[rules]]
name = "users seen"
limits = ["user"]
headers = { user = "*" }
key = "everyone"
shadow = true
[[rules]]
name = "visitors seen"
limits = ["user"]
headers = { visitor = "*" }
key = "header:visitor | everyone"
shadow = true
IDS
""".replace("IDS\n", IDS)
PATH = [("path", "/api/x?a=1"), ("method", "POST"), ("remote_address", "192.0.2.7")]
FREE = [("unnamed", "a")]


def user(name: str) -> Entries:
    return [("user", name)]


def hits(count: int, entries: Entries) -> Any:
    return descriptor(entries, hits_addend=UInt64Value(value=count))


REQUESTS: list[tuple[int, list[Any]]] = [
    (0, [user("a")]),
    (0, [user("a"), PATH]),
    # One descriptor is over its limit, so none is charged.
    (0, [user("b"), hits(2, user("a"))]),
    (0, [hits(0, user("a")), hits(0, user("b")), hits(0, PATH)]),
    (2, [user("b"), FREE]),
    (0, [hits(1, user("b")), hits(0, PATH)]),
    (0, [user("b")]),
    (0, [user("guest")]),
    (0, [PATH, user("guest")]),
    (0, [FREE]),
    (0, [[("remote_address", "50.0.0.5")], user("c")]),
    (0, [[("generic_key", "export")]]),
    (0, [[("generic_key", "export")], user("c")]),
    (0, [user("c"), [("generic_key", "export of all")]]),
    (0, [hits(0, user("c")), hits(0, PATH)]),
]


def summary(response: RateLimitResponse) -> dict[str, Any]:
    """A response without the seconds in it."""
    fields = fields_of(response.response_headers_to_add)
    if "ratelimit" in fields:
        fields["ratelimit"] = re.sub(r";t=\d+", "", fields["ratelimit"])
    return {
        "code": response.overall_code,
        "statuses": [(one.code, one.current_limit, one.limit_remaining) for one in response.statuses],
        "has reset": [one.HasField("duration_until_reset") for one in response.statuses],
        "fields": {name: "some" if name == "retry-after" else value for name, value in fields.items()},
        "body": re.sub(rb"in \d+ second", b"", response.raw_body),
    }


@pytest.mark.parametrize("mode", MODES)
def test_descriptors_are_decided_as_in_memory(redis: RedisServer, serve: Serve, store_name: str, mode: str) -> None:
    with contextlib.ExitStack() as clients:
        stores = (url_of(redis, mode, store_name), "")
        pair = [clients.enter_context(Client(serve(DESCRIBED, store=store))) for store in stores]
        for number, (addend, descriptors) in enumerate(REQUESTS):
            over_redis, in_memory = (summary(one.should_rate_limit(*descriptors, hits=addend)) for one in pair)
            if mode == "leased":
                # A host knows what remains of its loan.
                for one in (over_redis, in_memory):
                    one["statuses"] = [(code, limit) for code, limit, _ in one["statuses"]]
                    one["fields"].pop("ratelimit", None)
            assert over_redis == in_memory, number


def test_descriptors_and_python_share_a_limit(redis: RedisServer, serve: Serve, store_name: str) -> None:
    with (
        RedisStore(redis.url, timeout=60) as store,
        Client(serve(DESCRIBED, store=redis.url + "?timeout=60")) as client,
    ):
        limits = {name: TokenBucket(store, name, rate) for name, rate in (("user", "3/day"), ("seen", "100/day"))}
        key = ("header", "user", "a")
        assert client.codes(2, user("a")) == ["OK"] * 2
        assert limits["user"].hit(key)
        assert client.codes(1, user("a")) == ["OVER_LIMIT"]
        # The rule in the shadow is charged for requests that are admitted.
        until(lambda: limits["seen"].peek(key, 0).remaining == 98, "the rule in the shadow is charged")
        assert limits["user"].hit("192.0.2.7", 3)
        assert client.codes(1, [("remote_address", "192.0.2.7")]) == ["OVER_LIMIT"]


@pytest.mark.parametrize("mode", MODES)
def test_descriptors_of_one_key_are_charged_one_after_the_other(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    with Client(serve(DESCRIBED, store=url_of(redis, mode, store_name))) as client:
        exports: list[Entries] = [[("generic_key", f"export{number}")] for number in range(3)]
        assert client.codes(1, *exports) == ["OVER_LIMIT"]
        assert client.codes(2, *exports[:2]) == ["OK", "OVER_LIMIT"]


@pytest.mark.parametrize("mode", MODES)
def test_at_most_16_limits_are_charged_all_or_none(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    with Client(serve(DESCRIBED, store=url_of(redis, mode, store_name))) as client:
        # Each has a limit, and one in the shadow, which is charged later.
        users = [user(f"u{number}") for number in range(17)]
        with pytest.raises(grpc.RpcError) as caught:
            client.should_rate_limit(*users)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "has 17 charges, and over Redis at most 16 are made" in caught.value.details()
        assert client.codes(3, users[4]) == ["OK"] * 3
        response = client.should_rate_limit(*users[:16])
        assert response.overall_code == OVER_LIMIT
        assert [number for number, one in enumerate(response.statuses) if one.code == OVER_LIMIT] == [4]
        del users[4]
        assert client.codes(4, *users) == ["OK"] * 3 + ["OVER_LIMIT"]


@pytest.mark.parametrize("mode", MODES)
def test_a_cost_that_can_never_be_allowed_is_denied_without_redis(
    own_redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    url = url_of(own_redis, mode, store_name).replace("timeout=60", "timeout=1")
    with Client(serve(DESCRIBED, store=url)) as client, own_redis.stopped():
        for descriptors in ([user("a")], [user("a"), hits(1, user("b")), user("c")]):
            response = client.should_rate_limit(*descriptors, hits=4)
            assert response.overall_code == OVER_LIMIT
            codes = ["OVER_LIMIT", "OK", "OVER_LIMIT"][: len(descriptors)]
            assert [RateLimitResponse.Code.Name(one.code) for one in response.statuses] == codes
            report = json.loads(response.raw_body)
            assert report["violated-policies"] == ["user"]
            assert "4 at once are never allowed" in report["detail"]


@pytest.mark.parametrize("mode", MODES[1:])
def test_descriptors_are_banned_in_the_memory_of_the_host(
    redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    ban = '[bans.users]\ndenials = "2/hour"\nlasts = "1 hour"\n'
    rules = DESCRIBED.replace('name = "user"\n', 'name = "user"\nban = "users"\n') + ban
    server = serve(rules, store=url_of(redis, mode, store_name))
    with Client(server) as client:
        assert client.codes(5, user("a")) == ["OK"] * 3 + ["OVER_LIMIT"] * 2
        response = client.should_rate_limit(user("a"), user("b"))
        assert [(one.code, one.HasField("current_limit")) for one in response.statuses] == [(OVER_LIMIT, False)] * 2
        # A proxy's question finds the ban, too.
        assert asked(server, **{"X-Forwarded-Uri": "/x", "user": "a"}) == 429
        assert client.codes(1, user("b")) == ["OK"]


def test_descriptors_that_cannot_be_decided_are_errors(redis: RedisServer, serve: Serve) -> None:
    server = serve(DESCRIBED, store=redis.url)
    with Client(server) as client:
        for code, domain, descriptors in (
            (grpc.StatusCode.NOT_FOUND, "other", [user("a")]),
            (grpc.StatusCode.INVALID_ARGUMENT, "limits", [user("a")] * 65),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                client.should_rate_limit(*descriptors, domain=domain)
            assert caught.value.code() == code
        assert client.codes(4, user("a")) == ["OK"] * 3 + ["OVER_LIMIT"]
        assert client.codes(1, FREE) == ["OK"]
    lines = server.get("/metrics")[2].decode().splitlines()
    for result, count in {"allowed": 3, "denied": 1, "unmatched": 1, "refused": 2}.items():
        assert f'forebay_server_questions_total{{asked_by="ratelimit",result="{result}"}} {count}' in lines


def failed(client: Client, *descriptors: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        client.should_rate_limit(*descriptors)
    code: grpc.StatusCode = caught.value.code()
    return code


# Redis fails


@pytest.mark.parametrize(
    ("option", "statuses"),
    [
        ("when_unavailable=deny", [503, 503, 503, 503]),
        ("when_unavailable=allow", [200, 200, 200, 200]),
        ("hosts=1&fallback=shm:///NAME?keys=1000", [200, 200, 200, 429]),
    ],
)
def test_redis_that_has_gone_leads_to_the_answer_of_the_policy(
    own_redis: RedisServer, serve: Serve, store_name: str, option: str, statuses: list[int]
) -> None:
    server = serve(THREE, store=f"{own_redis.url}?{option.replace('NAME', store_name)}")
    assert asked(server, **{"X-Forwarded-For": "192.0.2.1"}) == 200
    own_redis.process.kill()
    own_redis.process.wait()
    answers = [server.get("/auth/traefik", ASKED) for _ in statuses]
    assert [status for status, _, _ in answers] == statuses
    other: Entries = [("path", "/api/x"), ("remote_address", "192.0.2.9")]
    with Client(server) as client:
        for status in statuses:
            if status == 503:
                assert failed(client, other) == grpc.StatusCode.UNAVAILABLE
            else:
                assert client.codes(1, other) == ["OK" if status == 200 else "OVER_LIMIT"]
    if statuses[0] == 503:
        assert dict(answers[0][1])["retry-after"] == "1"
        assert b"can't be checked" in answers[0][2]
    assert set(unanswered(server).values()) == {0}
    assert server.stop() == 0


def test_a_server_starts_without_redis_and_finds_it_later(serve: Serve) -> None:
    port = free_port()
    server = serve(THREE, store=f"redis://127.0.0.1:{port}/0")
    assert asked(server) == 503
    with redis_server(port=port):
        until(lambda: asked(server) == 200, "the limit is decided")
        assert [asked(server) for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("mode", ["strict", "leased"])
def test_redis_that_hangs_is_answered_for(own_redis: RedisServer, serve: Serve, store_name: str, mode: str) -> None:
    url = url_of(own_redis, mode, store_name).replace("timeout=60", "timeout=1")
    server = serve(THREE, store=url)
    with own_redis.stopped():
        statuses: list[int] = []
        waiting = [threading.Thread(target=lambda: statuses.append(asked(server))) for _ in range(30)]
        for thread in waiting:
            thread.start()
        assert server.get("/healthz")[0] == 200
        with Client(server) as client:
            other: Entries = [("path", "/api/x"), ("remote_address", "192.0.2.9")]
            assert failed(client, other) == grpc.StatusCode.UNAVAILABLE
        for thread in waiting:
            thread.join()
        assert statuses == [503] * 30
        assert server.get("/healthz")[0] == 200
    until(lambda: asked(server) == 200, "the limit is decided again")


def test_questions_beyond_the_most_are_answered_at_once(own_redis: RedisServer, serve: Serve, store_name: str) -> None:
    text = THREE.replace("3/day", "100000/day")
    server = serve(text, store=url_of(own_redis, "strict", store_name))

    async def ask_many() -> tuple[list[int], dict[str, int]]:
        address = f"http://127.0.0.1:{server.port}"
        async with contextlib.AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=1)
            clients = [httpx.AsyncClient(http1=False, http2=True, timeout=120, limits=limits) for _ in range(12)]
            for client in clients:
                await stack.enter_async_context(client)
                await client.get(f"{address}/healthz")
            with own_redis.stopped():
                asking = [
                    asyncio.create_task(client.get(f"{address}/auth/traefik", headers=ASKED))
                    for _ in range(100)
                    for client in clients
                ]
                # Those that found no room.
                refused: list[int] = []
                for answered in asyncio.as_completed(asking):
                    refused.append((await answered).status_code)
                    if len(refused) == 100:
                        break
                assert set(refused) == {503}
                assert (await asyncio.to_thread(server.get, "/healthz"))[0] == 200
                found = await asyncio.to_thread(unanswered, server)
            answers = await asyncio.gather(*asking)
        return [answer.status_code for answer in answers], found

    statuses, found = asyncio.run(ask_many())
    assert found["full"] >= 100
    full = unanswered(server)["full"]
    assert statuses.count(503) == full
    assert statuses.count(200) == 1200 - full >= 1024


class GateServer(DecisionServer):
    """A server with a gate of its own.

    It charges the user /hang by saying so, and goes on after a line at the standard input. /slow takes a tenth of a
    second. For /fail it raises an error, for /few it lacks a decision, for /denied it allows what a limit denies, and
    for /waiting it says that it was asked.
    """

    CODE = """
import os, sys, time
import forebay_server

def act(name):
    if name.startswith("/slow"):
        time.sleep(0.1)
        print("slept", flush=True)
    if name == "/hang":
        print("hanging", flush=True)
        os.read(0, 1)
    if name == "/waiting":
        print("asked", flush=True)
    if name == "/fail":
        raise LookupError("nothing")

class Charging:
    def hit(self, uses, once):
        for _, key, _ in uses:
            act(key[-1])
        if uses[0][1][-1] == "/say":
            print(uses, once, flush=True)
        names = [key[-1] for _, key, _ in uses]
        decisions = [(name != "/denied", 9, 8, 0, 10**9, False, 0) for name in names]
        return "/no" not in names, decisions[1:] if names[-1] == "/few" else decisions, None, None, True

    def take(self, uses):
        return self.hit(uses, None)

    def give_back(self, charge):
        act(charge)
        return True

plan, within_s, takes_s = sys.argv[1], *map(float, sys.argv[2:])
gate = forebay_server.Gate(plan, [], Charging(), books=True, threads=1, within_s=within_s, takes_s=takes_s)
server = forebay_server.Server(
    gate, ["127.0.0.1:0"], threads=1, connections=9, idle_s=60, drain_s=60, reuse_port=False, token=None, proxies=True,
    live=None, tls=None,
)
assert 0 < server.run(lambda: print("listening on", server.addresses[0], flush=True)) <= 60
os._exit(0)
"""

    def __init__(self, folder: Path, within_s: float, takes_s: float = 0.0) -> None:
        file = folder / "limits.toml"
        file.write_text(f'store = "redis://127.0.0.1:1/0"\nversion = 1\n{USERS}')
        plan: Any = plan_of(file)
        command = [sys.executable, "-c", self.CODE, plan.document, str(within_s), str(takes_s)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.addresses = [self.said().removeprefix("listening on ")]

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def test_a_question_that_is_late_or_fails_is_no_permission(tmp_path: Path) -> None:
    failing = (("/fail", "failed"), ("/few", "failed"), ("/denied", "failed"), ("/hang", "late"), ("/waiting", "late"))
    with GateServer(tmp_path, within_s=0.5) as server:
        for name, reason in failing:
            before = unanswered(server)[reason]
            status, fields, body = server.get("/auth/envoy/", {"user": name})
            assert (status, dict(fields)["retry-after"], b"can't be checked" in body) == (503, "1", True)
            assert unanswered(server)[reason] == before + 1
        server.go_on()
        until(lambda: server.get("/auth/envoy/", {"user": "b"})[0] == 200, "the gate goes on")
        # Python says that the request is denied, whatever its decisions are.
        assert server.get("/auth/envoy/", {"user": "/no"})[0] == 429
        server.process.terminate()
        said, errors = server.process.communicate(timeout=60)
        # A question that is late before its turn is charged to no limit.
        assert said == "hanging\n"
        assert "forebay: a request can't be decided: LookupError: nothing" in errors
        assert server.process.returncode == 0


def test_a_batch_has_one_time_for_all(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=0.5) as server:
        requests = [{"uri": "/", "headers": {"user": name}} for name in ("a", "/hang", "/waiting", "b", "/waiting")]
        reply = server.ask("batch", requests=requests)
        assert [one["status"] for one in reply["replies"]] == [200, 503, 503, 503, 503]
        assert all("can't be checked" in one["body"] and one["limits"] == [] for one in reply["replies"][1:])
        assert unanswered(server) == {"full": 0, "late": 4, "failed": 0}
        server.go_on()
        until(lambda: server.ask("decide", **requests[0])["allowed"], "the gate goes on")
        assert [one["status"] for one in server.ask("batch", requests=[requests[0]] * 256)["replies"]] == [200] * 256
        server.process.terminate()
        said, _ = server.process.communicate(timeout=60)
        # Those that are left are charged to no limit.
        assert said == "hanging\n"


def test_a_batch_waits_no_longer_than_one_question(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=1.0) as server:
        reply = server.ask("batch", requests=[{"uri": "/", "headers": {"user": "/slow"}}] * 100)
        statuses = [one["status"] for one in reply["replies"]]
        assert statuses == sorted(statuses)
        assert statuses[-1] == 503
        assert server.stop() == 0
        said, _ = server.process.communicate()
        # Python was asked about one of those that are late, at most.
        assert statuses.count(200) <= said.count("slept") <= statuses.count(200) + 1


def test_a_question_that_would_be_late_is_not_asked(tmp_path: Path) -> None:
    # None has so much time left.
    with GateServer(tmp_path, within_s=600, takes_s=600) as server, Client(server) as client:
        assert server.get("/auth/envoy/", {"user": "/waiting"})[0] == 503
        requests = [{"uri": "/", "headers": {"user": "/waiting"}}] * 3
        assert [one["status"] for one in server.ask("batch", requests=requests)["replies"]] == [503] * 3
        with pytest.raises(grpc.RpcError, match="the limits can't be checked"):
            client.codes(1, user("/waiting"))
        refund = server.ask("refund", charge="/waiting")
        assert (refund["http"], refund["error"]) == (503, "the server has too many questions: ask again")
        assert unanswered(server) == {"full": 0, "late": 6, "failed": 0}
        server.process.terminate()
        assert server.process.communicate(timeout=60) == ("", "")


def test_the_questions_of_a_batch_have_its_time(tmp_path: Path) -> None:
    begins_within_s = 5
    with GateServer(tmp_path, within_s=600, takes_s=600 - begins_within_s) as server, ThreadPoolExecutor(1) as pool:
        requests = [{"uri": "/", "headers": {"user": name}} for name in ("/hang", "/waiting")]
        reply = pool.submit(server.ask, "batch", requests=requests)
        assert server.said() == "hanging"
        time.sleep(begins_within_s)
        server.go_on()
        assert [one["status"] for one in reply.result()["replies"]] == [200, 503]
        server.process.terminate()
        assert server.process.communicate(timeout=60)[0] == ""


def test_a_charge_is_given_back_before_others_are_made(tmp_path: Path) -> None:
    check = CheckRequest()
    check.attributes.request.http.method = "GET"
    check.attributes.request.http.path = "/"
    check.attributes.request.http.headers["user"] = "/slow"
    with GateServer(tmp_path, within_s=600) as server, Client(server) as client, ThreadPoolExecutor(1) as pool:
        asking = [client.authorization.Check.future(check, timeout=60) for _ in range(50)]
        assert server.said() == "slept"
        refund = pool.submit(server.ask, "refund", charge="/waiting")
        slept = list(iter(server.said, "asked"))
        # At the end of the queue, it would come after all of them.
        assert len(slept) < 40
        assert refund.result()["refunded"] is True
        assert all(call.result() for call in asking)


def test_a_question_has_its_turn_while_charges_are_given_back(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=600) as server, ThreadPoolExecutor(6) as pool:
        answered = threading.Event()

        def give_back(number: int) -> int:
            """Until the question is answered, and so often that it would wait for long without a turn."""
            given = 0
            while not answered.is_set() and given < 50:
                given += server.ask("refund", charge=f"/slow {number}")["refunded"]
            return given

        giving = [pool.submit(give_back, number) for number in range(5)]
        assert [server.said() for _ in range(5)] == ["slept"] * 5
        assert server.ask("decide", uri="/", headers={"user": "a"})["allowed"]
        answered.set()
        assert sum(one.result() for one in giving) < 200


def test_a_charge_that_cannot_be_given_back_is_no_permission(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=0.5) as server:
        reply = server.ask("decide", uri="/", headers={"user": "a"}, refundable=True)
        assert (reply["status"], "charge" in reply, unanswered(server)["failed"]) == (503, False, 1)
        assert server.ask("refund", charge="a")["refunded"] is True
        for charge, reason in (("/fail", "failed"), ("/hang", "late")):
            before = unanswered(server)[reason]
            assert server.ask("refund", charge=charge)["http"] == 503
            assert unanswered(server)[reason] == before + 1


def test_a_request_id_is_one_of_a_path_and_methods(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=600) as server, Client(server) as client:
        sent = {KEY: "one", "X-HTTP-Method": "put"}
        assert server.get("/auth/envoy/a%20b?c", {"user": "/say", **sent}, "POST")[0] == 200
        said = "[(0, ('header', 'user', '/say'), 1)]"
        assert server.said() == f"{said} (0, ['/a b', 'one', 'POST', 'PUT'])"
        assert server.get("/auth/envoy/a", {"user": "b", "visitor": "/say", **sent})[0] == 200
        assert server.said() == f"{said} (0, ['/a', 'one', 'GET', 'PUT'])".replace("user", "visitor")
        for fields in ({"user": "/say"}, {"user": "/say", KEY: ""}):
            assert server.get("/auth/envoy/a", fields)[0] == 200
            assert server.said() == f"{said} (0, None)"
        assert client.codes(1, user("/say")) == ["OK"]
        assert server.said() == f"{said} (0, None)"


def test_descriptors_that_are_late_or_fail_are_no_permission(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=0.5) as server, Client(server) as client:
        for name, reason in (("/fail", "failed"), ("/few", "failed"), ("/hang", "late"), ("/waiting", "late")):
            before = unanswered(server)[reason]
            assert failed(client, user("a"), user(name)) == grpc.StatusCode.UNAVAILABLE
            assert unanswered(server)[reason] == before + 1
        server.go_on()
        until(lambda: server.get("/auth/envoy/", {"user": "b"})[0] == 200, "the gate goes on")
        # One question for all descriptors.
        descriptors = [user("/say"), hits(2, user("b")), user("c"), user("/say"), hits(0, FREE)]
        response = client.should_rate_limit(*descriptors, hits=4)
        assert [one.limit_remaining for one in response.statuses] == [8, 8, 8, 8, 0]
        server.process.terminate()
        said, errors = server.process.communicate(timeout=60)
        costs = {"/say": 4, "b": 2, "c": 4}
        enforced = [(0, ("header", "user", name), costs[name]) for name in ("/say", "b", "c", "/say")]
        assert said == f"hanging\n{enforced} (0, None)\n"
        assert "forebay: a request can't be decided: LookupError: nothing" in errors


def test_nobody_waits_for_a_rule_in_the_shadow(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=600) as server, Client(server) as client:
        assert client.codes(1, [("visitor", "/fail")]) == ["OK"]
        assert client.codes(1, [("visitor", "/hang")]) == ["OK"]
        assert server.said() == "hanging"
        # Those that find no room are left out.
        assert client.codes(1100, [("visitor", "/waiting")]) == ["OK"] * 1100
        request = RateLimitRequest(domain="limits", descriptors=[descriptor(user("/say"))])
        enforced = client.rate_limits.ShouldRateLimit.future(request, timeout=60)
        # It is asked behind that question.
        assert client.codes(1, [("visitor", "/waiting")]) == ["OK"]
        server.go_on()
        assert enforced.result().overall_code == OK
        # The question came before the charges for which nobody waits.
        assert server.said() == "[(0, ('header', 'user', '/say'), 1)] (0, None)"
        assert [server.said() for _ in range(1024)] == ["asked"] * 1024
        assert set(unanswered(server).values()) == {0}
        server.process.terminate()
        said, errors = server.process.communicate(timeout=60)
        assert said == ""
        assert "forebay: a rule in the shadow can't be charged: LookupError: nothing" in errors


def test_rules_in_the_shadow_take_no_room_from_questions(tmp_path: Path) -> None:
    with GateServer(tmp_path, within_s=600) as server, Client(server) as client:
        assert client.codes(1, [("visitor", "/hang")]) == ["OK"]
        assert server.said() == "hanging"
        assert client.codes(300, [("visitor", "x" * 300_000)]) == ["OK"] * 300
        request = RateLimitRequest(domain="limits", descriptors=[descriptor(user("u" * 300_000))])
        enforced = client.rate_limits.ShouldRateLimit.future(request, timeout=60)
        assert client.codes(1, [("visitor", "/waiting")]) == ["OK"]
        server.go_on()
        assert enforced.result().overall_code == OK
        assert set(unanswered(server).values()) == {0}


@pytest.mark.parametrize("way", ["fields", "descriptors"])
def test_the_bytes_of_questions_that_wait_have_a_bound(tmp_path: Path, way: str) -> None:
    with GateServer(tmp_path, within_s=600) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server)) for _ in range(2)]
        check = CheckRequest()
        check.attributes.request.http.method = "GET"
        check.attributes.request.http.path = "/"
        check.attributes.request.http.headers["user"] = "/hang"
        check.attributes.request.http.headers["x-a"] = "a" * 450_000
        if way == "fields":
            asking = [client.authorization.Check.future(check, timeout=120) for _ in range(100) for client in clients]
        else:
            # No limit has a key that long.
            large = [("unnamed", "a" * 450_000)]
            request = RateLimitRequest(domain="limits", descriptors=map(descriptor, (user("/hang"), large)))
            calls = [client.rate_limits.ShouldRateLimit for client in clients]
            asking = [call.future(request, timeout=120) for _ in range(100) for call in calls]
        # Of 200, at most 140 have room.
        until(lambda: unanswered(server)["full"] >= 50, "there is no room for more")
        assert server.get("/healthz")[0] == 200
        check.attributes.request.http.headers["x-a"] = "a" * 20_000
        before = unanswered(server)["full"]
        asking += [clients[0].authorization.Check.future(check, timeout=120) for _ in range(50)]
        until(lambda: unanswered(server)["full"] > before, "there is no room for small ones")
        # What becomes of earlier replies has room.
        pool = stack.enter_context(ThreadPoolExecutor(1))
        refund = pool.submit(server.ask, "refund", charge="a" * 64)
        assert wait([refund], timeout=0.5).not_done
        # So long an id is none of a charge.
        assert server.ask("refund", charge="a" * 65)["refunded"] is False
        server.kill()
        assert refund.exception() is not None
        for call in asking:
            call.exception()


# Live rules


@pytest.mark.parametrize("mode", MODES)
def test_live_rules_are_those_of_the_host(redis: RedisServer, store_name: str, tmp_path: Path, mode: str) -> None:
    url = url_of(redis, mode, store_name, *([f"host=shm:///{store_name}?keys=10000"] if mode == "strict" else []))
    two = live('algorithm = "token-bucket"\nrate = "2/day"')
    question = {"uri": "/api/x", "client": "192.0.2.8", "refundable": True}
    with contextlib.ExitStack() as started:
        pair = Host(tmp_path / "live.toml", url, two, started)
        assert pair.ask_server()[0] == 200
        assert pair.ask_worker() is not None
        assert pair.ask_server()[0] == 429
        charge = pair.server.ask("decide", **question)["charge"]
        # Another limit counts anew.
        pair.publish(two.replace("2/day", "3/day").replace("api]", "other]").replace('["api"]', '["other"]'))
        assert [pair.ask_server()[0] for _ in range(4)] == [200, 200, 200, 429]
        assert [pair.server.ask("refund", charge=charge)["refunded"] for _ in range(2)] == [True, False]
        # The server can't decide this version, so it keeps the last good one.
        pair.publish(two.replace('path = "/api/*"', 'path = "/other"\ncharge_on = [401]'))
        assert pair.ask_server()[0] == 429
        # The first limit has what it had, and what was given back.
        pair.publish(two)
        assert pair.ask_server()[0] == 429
        assert [pair.server.ask("decide", **question)["allowed"] for _ in range(3)] == [True, True, False]
        with Client(pair.server) as client:
            assert client.codes(1, [("path", "/api/x"), ("remote_address", "192.0.2.9")], domain="live") == ["OK"]
        lines = pair.server.get("/metrics")[2].decode()
        assert f"forebay_server_rules_version {pair.rules.status().published}" in lines
        assert pair.server.stop() == 0
        assert "rules[0].charge_on: the server sees no response" in pair.server.process.communicate()[1]


def test_live_rules_over_redis_have_no_shares(redis: RedisServer, store_name: str, tmp_path: Path) -> None:
    url = url_of(redis, "strict", store_name, f"host=shm:///{store_name}?keys=10000")
    file = tmp_path / "live.toml"
    file.write_text(live('algorithm = "token-bucket"\nrate = "2/day"\non_change = "share"'))
    command = [sys.executable, "-m", "forebay", "serve", str(file), "--live", "--store", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is for limits in the memory of one host" in done.stderr


# The end


@pytest.mark.parametrize("way", ["HTTP", "descriptors"])
def test_sigterm_lets_a_question_end(tmp_path: Path, way: str) -> None:
    with GateServer(tmp_path, within_s=600) as server, Client(server) as client:
        statuses: list[int] = []

        def ask() -> None:
            if way == "HTTP":
                statuses.append(server.get("/auth/envoy/", {"user": "/hang"})[0])
            else:
                statuses.append({"OK": 200}[client.codes(1, user("/hang"))[0]])

        thread = threading.Thread(target=ask)
        thread.start()
        assert server.said() == "hanging"
        server.process.terminate()
        until(lambda: not is_accepted(server.port), "the server ends")
        server.go_on()
        thread.join()
        assert statuses == [200]
        assert server.process.wait(60) == 0


def is_asked(redis: RedisServer) -> bool:
    """Whether something is sent to this server that it hasn't read: a question, or a connection."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(line[1].endswith(f":{redis.port:04X}") and int(line[4].partition(":")[2], 16) > 0 for line in lines)


@pytest.mark.parametrize("mode", MODES)
def test_sigterm_ends_a_server_whose_redis_hangs(
    own_redis: RedisServer, serve: Serve, store_name: str, mode: str
) -> None:
    url = url_of(own_redis, mode, store_name).replace("timeout=60", "timeout=3600")
    server = serve(THREE, "--drain", "10", store=url)
    with own_redis.stopped():
        answers: list[int] = []

        def ask() -> None:
            answers.append(asked(server))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: is_asked(own_redis), "Redis is asked")
        assert server.get("/healthz")[0] == 200
        assert server.stop() == 0
        thread.join()
        # A synced limit asks nobody.
        assert answers == [200 if mode == "synced" else 503]


def test_leases_come_back_at_the_end(redis: RedisServer, serve: Serve, store_name: str) -> None:
    rules = THREE.replace("3/day", "1000/day")
    server = serve(rules, store=url_of(redis, "leased", store_name, "lease=60"))
    assert [asked(server) for _ in range(10)] == [200] * 10
    redis_store, host = RedisStore(redis.url, timeout=60), Store.private(keys=100)
    with LeasedStore(redis_store, host, lease=60, owns_stores=True) as store:
        limiter = TokenBucket(store, "api", "1000/day")
        assert limiter.peek("192.0.2.7").remaining < 990
        assert server.stop() == 0
        assert limiter.peek("192.0.2.7").remaining >= 990
