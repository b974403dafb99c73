"""Web rules with a request id over Redis and over leased limits, under WSGI and ASGI: a retry is charged once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis_cluster import RedisCluster
from redis_server import PATIENCE_S, RedisServer, redis_server
from web_requests import CLIENT, Answered, Site, Wire, asgi_scope

from forebay import Concurrency, FixedWindow, InvalidLimiter, LeakyBucket, SlidingWindow, Store, TokenBucket
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore
from forebay.rules import load_rules
from forebay.web import RequestId, Rule, everyone

IDS = RequestId("Idempotency-Key", retries=2)


@dataclass
class World:
    """A store over Redis or a leased one, for WSGI or ASGI."""

    kind: Any
    is_leased: bool
    url: str
    host: Store
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store: Any
        if self.kind == "wsgi":
            self.redis_store: Any = RedisStore(self.url, **{"timeout": PATIENCE_S, **self.options})
            self.store = LeasedStore(self.redis_store, self.host) if self.is_leased else self.redis_store
        else:
            self.redis_store = AsyncRedisStore(self.url, **{"timeout": PATIENCE_S, **self.options})
            self.store = AsyncLeasedStore(self.redis_store, self.host) if self.is_leased else self.redis_store

    def site(self, *rules: Rule) -> Site:
        return Site(self.kind, list(rules))

    def post(self, site: Site, sent: str | None = "one", path: str = "/orders") -> Answered:
        fields = [] if sent is None else [("Idempotency-Key", sent)]
        if self.kind == "wsgi":
            return site.request(path, "POST", fields=fields)
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        self.loop.run_until_complete(site.app(asgi_scope(path, "POST", fields=fields), wire.receive, wire.send))
        return wire.answered()

    def remaining(self, limiter: Any, key: Any = CLIENT) -> int:
        decision = limiter.peek(key, 0)
        if asyncio.iscoroutine(decision):
            decision = self.loop.run_until_complete(decision)
        return int(decision.remaining)

    def close(self) -> None:
        for store in (self.store, self.redis_store):
            closing = store.close()
            if closing is not None:
                self.loop.run_until_complete(closing)
        self.loop.close()
        self.host.close()


@pytest.fixture(params=["wsgi redis", "asgi redis", "wsgi leased", "asgi leased"])
def world(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[World]:
    kind, _, place = request.param.partition(" ")
    opened = World(kind, place == "leased", server.url, Store.private(keys=10_000))
    yield opened
    opened.close()


def test_a_retry_is_charged_once(world: World) -> None:
    limit = FixedWindow(world.store, "orders", "10/year")
    site = world.site(Rule(limit, request_id=IDS))
    answers = [world.post(site) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert world.remaining(limit) == 9
    # A fourth attempt, and requests without an id or with another one.
    for sent in ("one", None, None, "two"):
        assert world.post(site, sent).status == 200
    assert world.remaining(limit) == 5
    assert site.handled == 7


def test_an_id_is_worth_its_retries_and_no_more(world: World) -> None:
    site = world.site(Rule(FixedWindow(world.store, "orders", "10/year"), request_id=IDS))
    assert [world.post(site).status for _ in range(14)] == [200] * 12 + [429] * 2
    assert site.handled == 12


def test_denied_attempts_use_up_nothing(world: World) -> None:
    limit = FixedWindow(world.store, "orders", "1/year")
    site = world.site(Rule(limit, request_id=IDS))
    assert world.post(site, "other").status == 200
    denied = [world.post(site) for _ in range(5)]
    assert [answer.status for answer in denied] == [429] * 5
    assert denied[0].json["violated-policies"] == ["orders"]
    reset = limit.reset(CLIENT)
    if asyncio.iscoroutine(reset):
        world.loop.run_until_complete(reset)
    assert [world.post(site).status for _ in range(4)] == [200] * 3 + [429]


def test_rules_with_ids_are_charged_as_one_and_after_the_others(world: World) -> None:
    orders = FixedWindow(world.store, "orders", "10/year")
    tight = FixedWindow(world.store, "tight", "2/year")
    attempts = FixedWindow(world.store, "attempts", "40/year")
    site = world.site(
        Rule(orders, request_id=IDS), Rule(tight, key=everyone, request_id=IDS), Rule(attempts, key=everyone)
    )
    assert [world.post(site).status for _ in range(3)] == [200] * 3
    assert [world.remaining(orders), world.remaining(tight, "everyone")] == [9, 1]
    assert world.post(site, "two").status == 200
    # The tight one denies: nothing is charged, also not by the rule without an id.
    assert world.post(site, "three").json["violated-policies"] == ["tight"]
    assert [world.remaining(orders), world.remaining(tight, "everyone")] == [8, 0]
    assert world.remaining(attempts, "everyone") == 36
    # A retry passes all the same, and counts where each attempt does.
    assert world.post(site, "two")["ratelimit-policy"].count("q=") == 3
    assert world.remaining(attempts, "everyone") == 35


def test_limits_of_the_host_stand_beside_ids(world: World) -> None:
    here = SlidingWindow(world.host, "here", "4/year")
    site = world.site(Rule(here), Rule(TokenBucket(world.store, "there", "1/year"), request_id=IDS))
    assert [world.post(site).status for _ in range(3)] == [200] * 3
    # Redis denies, and the host gives back.
    assert [world.post(site, "two").status for _ in range(3)] == [429] * 3
    assert world.remaining(here) == 1


def test_ids_of_the_host_stand_beside_limits_over_redis(world: World) -> None:
    here = FixedWindow(world.host, "here", "1/year")
    there = FixedWindow(world.store, "there", "10/year")
    site = world.site(Rule(there), Rule(here, request_id=IDS))
    assert [world.post(site).status for _ in range(3)] == [200] * 3
    assert world.post(site, "two").json["violated-policies"] == ["here"]
    assert world.remaining(here) == 0
    # Under ASGI permits come back in the background.
    end = time.monotonic() + 30
    while (left := world.remaining(there)) != 7 and time.monotonic() < end:
        world.loop.run_until_complete(asyncio.sleep(0.01))
    assert left == 7


def test_all_hosts_share_ids_over_redis_and_none_those_of_leases(world: World) -> None:
    with Store.private(keys=1000) as other_host:
        other = World(world.kind, world.is_leased, world.url, other_host)
        sites = [one.site(Rule(FixedWindow(one.store, "orders", "10/year"), request_id=IDS)) for one in (world, other)]
        world.post(sites[0]), other.post(sites[1])
        limit = FixedWindow(world.store, "orders", "10/year")
        assert world.remaining(limit) <= 8 if world.is_leased else world.remaining(limit) == 9
        other.close()


def test_a_server_that_is_gone_is_answered_by_503() -> None:
    with redis_server() as server:
        url = server.url
    for kind in ("wsgi", "asgi"):
        world = World(kind, False, url, Store.private(keys=1000))
        site = world.site(Rule(FixedWindow(world.store, "orders", "10/year"), request_id=IDS))
        assert world.post(site).status == 503
        assert world.post(site, None).status == 503
        world.close()


@pytest.mark.parametrize("when", ["allow", "local"])
def test_a_fallback_decides_while_the_server_is_gone(when: str) -> None:
    with redis_server() as server:
        url = server.url
    for kind in ("wsgi", "asgi"):
        host = Store.private(keys=1000)
        options = {"when_unavailable": when, **({"host": host, "hosts": 1} if when == "local" else {})}
        world = World(kind, False, url, host, options)
        rules = [FixedWindow(world.store, "orders", "3/year"), FixedWindow(world.store, "more", "4/year")]
        site = world.site(*[Rule(limit, request_id=IDS) for limit in rules])
        statuses = [world.post(site).status for _ in range(3)] + [world.post(site, "two").status for _ in range(3)]
        assert statuses == [200] * 6
        assert [world.post(site, None).status for _ in range(2)] == ([200] * 2 if when == "allow" else [200, 429])
        world.close()


def test_rules_of_one_cluster_need_one_key(cluster: RedisCluster) -> None:
    with RedisStore(cluster.url, timeout=PATIENCE_S) as store:
        limits = [FixedWindow(store, name, "10/year") for name in ("a", "b")]
        with pytest.raises(InvalidLimiter, match="need the same key function"):
            Site("wsgi", [Rule(limits[0], request_id=IDS), Rule(limits[1], key=everyone, request_id=IDS)])
        site = Site("wsgi", [Rule(limit, request_id=IDS) for limit in limits])
        for _ in range(3):
            assert site.request(fields=[("Idempotency-Key", "one")]).status == 200
        assert [limit.peek(CLIENT, 0).remaining for limit in limits] == [9, 9]


def test_limits_that_take_no_ids_are_refused(world: World) -> None:
    with pytest.raises(InvalidLimiter, match="takes no request_id: its permits come back"):
        Rule(Concurrency(world.redis_store, "held", 2), request_id=IDS)
    if not world.is_leased:
        with pytest.raises(InvalidLimiter, match="has a request_id and charge_on"):
            Rule(LeakyBucket(world.store, "queue", "1/second", 2), request_id=IDS, charge_on={200})
    with Store.private(keys=100, on_full="allow") as careless, RedisStore(world.url) as redis_store:
        limit = FixedWindow(LeasedStore(redis_store, careless), "careless", "1/year")
        with pytest.raises(InvalidLimiter, match="on_full='allow'"):
            Rule(limit, request_id=IDS)


def test_a_file_over_redis_has_request_ids(server: RedisServer, tmp_path: Any) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        'version = 1\n[limits.a]\nalgorithm = "fixed-window"\nrate = "2/year"\n'
        '[[rules]]\nname = "a"\nlimits = ["a"]\nrequest_id = {}\n'
    )
    with RedisStore(server.url, timeout=PATIENCE_S) as store:
        site = Site("wsgi", load_rules(file, store=store))
        assert [site.request(fields=[("Idempotency-Key", "one")]).status for _ in range(6)] == [200] * 5 + [429]
