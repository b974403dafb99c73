"""Rules with a `request_id`: a request and its retries are charged once, as by Python's gate."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from decision_server import Both, DecisionServer
from grpc_client import Client

from forebay import FixedWindow
from forebay.testing import ManualClock

Serve = Callable[..., DecisionServer]

IDS = 'request_id = { retries = 2, lasts = "1 hour" }\n'
RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "2/hour"
align = "first"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
"""
ALONE = RULES + IDS
MANY = f"""
[limits.quota]
algorithm = "fixed-window"
rate = "9/day"
align = "first"
[limits.spent]
algorithm = "token-bucket"
rate = "20/day"
[limits.twice]
algorithm = "sliding-window"
rate = "12/day"
[limits.often]
algorithm = "fixed-window"
rate = "4/second"
align = "first"
[limits.queue]
algorithm = "leaky-bucket"
rate = "2/second"
capacity = 3
[limits.tried]
algorithm = "fixed-window"
rate = "5/day"
align = "first"
[bans.eager]
denials = "20/day"
lasts = "30 seconds"

[[rules]]
name = "quota"
limits = ["quota", "spent"]
path = "/pay/*"
{IDS}ban = "eager"
[[rules]]
name = "twice"
limits = ["twice"]
path = "/pay/twice"
cost = 2
{IDS}
[[rules]]
name = "often"
limits = ["queue", "often"]
[[rules]]
name = "tried"
limits = ["tried"]
path = "/pay/*"
shadow = true
{IDS}
"""
KEY = "Idempotency-Key"
CLIENT = "192.0.2.7"
TRAEFIK = {"X-Forwarded-Uri": "/api/x", "X-Forwarded-Method": "POST", "X-Forwarded-For": CLIENT}


def statuses(server: DecisionServer, count: int, **changed: str) -> list[int]:
    fields = {**TRAEFIK, KEY: "one", **{name.replace("_", "-"): value for name, value in changed.items()}}
    return [server.get("/auth/traefik", fields)[0] for _ in range(count)]


def test_the_server_charges_retries_as_the_gate_does(both: Callable[[str], Both], clock: ManualClock) -> None:
    pair = both(MANY)
    assert len(compare_retries(pair, 1500, lambda pause_ns: clock.set_ns(clock.now_ns() + pause_ns))) > 4
    # No response has the decisions of the rule in the shadow.
    ours, theirs = (FixedWindow(store, "tried", "5/day", align="first") for store in (pair.served, pair.own))
    tried = [ours.peek(f"192.0.2.{number}").remaining for number in range(8)]
    assert tried == [theirs.peek(f"192.0.2.{number}").remaining for number in range(8)]
    assert len(set(tried)) > 1


def compare_retries(pair: Both, count: int, move: Callable[[int], None]) -> set[Any]:
    """Ask both about so many requests, after `move` has let the time of each go by. Returns the kinds of answers."""
    draw = random.Random(1)
    seen = set()
    for number in range(count):
        move(draw.choice([0, 0, 0, 200_000_000, 500_000_000]))
        fields = [("x-forwarded-for", f"192.0.2.{draw.randrange(3) + number // 300}")]
        fields += draw.choice([[], [(KEY, f"{draw.randrange(12)}")], [(KEY, f"{draw.randrange(12)}")], [(KEY, "")]])
        request = (draw.choice(["POST", "PUT"]), draw.choice([b"/pay/once", b"/pay/twice", b"/"]), fields, "127.0.0.1")
        ours, theirs = pair.ask_server(*request), pair.ask_python(*request)
        assert ours == theirs, (number, request)
        seen.add((ours[0], ours[2].partition(b"violated")[2]))
    return seen


def test_retries_are_charged_once_up_to_their_number(serve: Serve) -> None:
    server = serve(ALONE)
    # One charge and two retries, and once more.
    assert statuses(server, 7) == [200] * 4 + [429] * 3


@pytest.mark.parametrize(
    "changed", [{KEY: "two"}, {KEY: ""}, {"X-Forwarded-Uri": "/api/y"}, {"X-Forwarded-Method": "PUT"}]
)
def test_another_request_is_no_retry(serve: Serve, changed: Mapping[str, str]) -> None:
    server = serve(ALONE.replace("2/hour", "1/hour"))
    assert statuses(server, 2) == [200, 200]
    assert server.get("/auth/traefik", {**TRAEFIK, KEY: "one", **changed})[0] == 429


def test_a_denied_request_is_none_of_the_retries(serve: Serve) -> None:
    server = serve(ALONE)
    assert statuses(server, 1, Idempotency_Key="two") + statuses(server, 1, Idempotency_Key="three") == [200, 200]
    assert statuses(server, 5) == [429] * 5
    assert statuses(server, 3, Idempotency_Key="two") == [200, 200, 429]


def test_other_limits_count_each_attempt(serve: Serve) -> None:
    often = '[limits.often]\nalgorithm = "fixed-window"\nrate = "2/hour"\nalign = "first"\n[[rules]]\n'
    server = serve(f'{ALONE}{often}name = "often"\nlimits = ["often"]\n')
    assert statuses(server, 3) == [200, 200, 429]
    # The retry that another limit denies was charged to none.
    assert left(server, "api") == 1


def left(server: DecisionServer, limit: str, **question: Any) -> Any:
    limits = server.ask("peek", uri="/api/x", client=CLIENT, method="POST", **question)["limits"]
    return next(one["remaining"] for one in limits if one["name"] == limit)


def test_services_send_the_field_with_their_question(serve: Serve) -> None:
    server = serve(ALONE)
    question: dict[str, Any] = {"uri": "/api/x", "client": CLIENT, "method": "POST", "headers": {KEY: "one"}}
    assert [server.ask("decide", **question)["limits"][0]["remaining"] for _ in range(3)] == [1, 1, 1]
    assert [server.ask("decide", **question)["allowed"] for _ in range(2)] == [True, False]


def test_a_peek_allows_what_passes_as_a_retry(serve: Serve) -> None:
    server = serve(ALONE.replace("2/hour", "1/hour"))
    question: dict[str, Any] = {"uri": "/api/x", "client": CLIENT, "method": "POST"}
    assert server.ask("decide", **question, headers={KEY: "one"})["allowed"]
    assert [server.ask("peek", **question, headers={KEY: key})["allowed"] for key in ("one", "two")] == [True, False]
    assert statuses(server, 3) == [200, 200, 429]


def test_a_charge_that_can_be_given_back_is_made_each_time(serve: Serve) -> None:
    server = serve(ALONE)
    question: dict[str, Any] = {"uri": "/api/x", "client": CLIENT, "method": "POST", "headers": {KEY: "one"}}
    first = server.ask("decide", **question, refundable=True)
    second = server.ask("reserve", **question, max_delay=0)
    assert (first["limits"][0]["remaining"], second["limits"][0]["remaining"]) == (1, 0)
    assert all(server.ask("refund", charge=reply["charge"])["refunded"] for reply in (first, second))
    assert statuses(server, 7) == [200] * 4 + [429] * 3


def test_descriptors_are_charged_each_time(serve: Serve) -> None:
    server = serve(ALONE.replace('path = "/api/*"', f'key = "header:{KEY} | address"'))
    with Client(server) as client:
        assert client.codes(3, [(KEY.lower(), "one")]) == ["OK", "OK", "OVER_LIMIT"]
