"""Histograms of latencies: what is timed, in which bucket it counts, and who sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

import pytest
from scrapes import scraped
from web_requests import CLIENT, Kind, Site

from forebay import FixedWindow, Store, TokenBucket
from forebay.segment import layout
from forebay.testing import reset_store
from forebay.verification import verify
from forebay.web import Gate, Request, Rule
from forebay.web.native_requests import ASGIRequest

SAMPLED = 128
COUNT = "forebay_decision_latency_seconds_count"
LEAST_NS = layout.LATENCY_LEAST_NS


@pytest.fixture
def store(store_name: str) -> Iterator[Store]:
    with Store(store_name, keys=1000) as opened:
        yield opened


def decisions(store: Store) -> float:
    return scraped(store).get((COUNT, store.name), 0)


async def awaited_key(request: Request) -> str:
    return CLIENT


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize(
    "rule",
    [
        lambda limiter: Rule(limiter),
        lambda limiter: Rule(limiter, charge_on={200}),
        lambda limiter: Rule(limiter, path="/*"),
    ],
    ids=["usual", "in steps", "by path"],
)
def test_one_request_in_128_is_timed(kind: Kind, rule: Callable[[TokenBucket], Rule], store: Store) -> None:
    site = Site(kind, [rule(TokenBucket(store, "api", "1000/day"))])
    for timed in range(3):
        for _ in range(SAMPLED - 1):
            site.request()
        assert decisions(store) == timed
        site.request()
        assert decisions(store) == timed + 1


def test_all_gates_and_paths_of_a_process_take_turns(store: Store) -> None:
    limiter = TokenBucket(store, "api", "1000/day")
    for _ in range(4):
        site = Site("wsgi", [Rule(limiter, path=f"/{number}") for number in range(8)])
        for number in range(SAMPLED // 4):
            assert site.request(f"/{number % 8}").status == 200
    assert decisions(store) == 1


def test_denials_are_timed_too(store: Store) -> None:
    site = Site("wsgi", [Rule(FixedWindow(store, "api", "1/day"))])
    assert [site.request().status for _ in range(SAMPLED)] == [200] + [429] * (SAMPLED - 1)
    assert decisions(store) == 1


def test_decisions_with_functions_to_await_are_timed(store: Store) -> None:
    async def requests() -> None:
        gate = Gate([Rule(TokenBucket(store, "api", "1000/day"), key=awaited_key)])
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": (CLIENT, 1)}
        for _ in range(SAMPLED):
            assert await gate.enter_async(ASGIRequest(scope))

    asyncio.run(requests())
    assert decisions(store) == 1


def test_a_latency_counts_in_the_first_bucket_that_holds_it(store: Store) -> None:
    bounds = [LEAST_NS * 4**at for at in range(layout.LATENCY_BUCKETS - 1)]
    latencies = [0, *itertools.chain(*((bound, bound + 1) for bound in bounds)), 2**62]
    for took_ns in latencies:
        store.segment.note_redis_latency(took_ns)
    found = scraped(store)
    for bound in bounds:
        expected = sum(took_ns <= bound for took_ns in latencies)
        assert found["forebay_redis_latency_seconds_bucket", store.name, str(bound / 1e9)] == expected
    assert found["forebay_redis_latency_seconds_bucket", store.name, "+Inf"] == len(latencies)
    assert found["forebay_redis_latency_seconds_count", store.name] == len(latencies)
    assert found["forebay_redis_latency_seconds_sum", store.name] == pytest.approx(sum(latencies) / 1e9)
    assert (COUNT, store.name) not in found


def test_latencies_are_no_damage_and_a_reset_forgets_them(store: Store) -> None:
    store.segment.note_decision_latency(LEAST_NS)
    store.segment.note_redis_latency(LEAST_NS)
    assert verify(store.name).sound
    assert scraped(store.name)[COUNT, store.name] == 1  # from outside
    reset_store(store)
    assert not [name for name, *_ in scraped(store) if "latency" in name]


def test_a_limit_of_redis_alone_has_no_memory_to_time_in() -> None:
    redis = pytest.importorskip("forebay.redis")
    with redis.RedisStore("redis://127.0.0.1:1", timeout=0.1) as remote:
        gate = Gate([Rule(TokenBucket(remote, "api", "5/hour"))], when_unavailable="allow")
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": (CLIENT, 1)}
        assert all(gate.enter(ASGIRequest(scope)) for _ in range(SAMPLED))
