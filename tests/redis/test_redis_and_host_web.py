"""Web rules of several stores in one middleware: the host's limits decide before those of Redis, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis_server import RedisServer, redis_server
from web_requests import CLIENT, Answered, Site, Wire, asgi_scope

from forebay import BucketedWindow, Concurrency, FixedWindow, InvalidLimiter, LeakyBucket, Store, TokenBucket
from forebay.redis import AsyncRedisStore, LeasedStore, RedisStore
from forebay.web import Rule, everyone


class World:
    """A host, a Redis store, and an application with rules over both."""

    def __init__(self, kind: Any, url: str, **options: Any) -> None:
        self.kind = kind
        self.loop = asyncio.new_event_loop()
        self.host = Store.private(keys=1000)
        self.redis: Any = (RedisStore if kind == "wsgi" else AsyncRedisStore)(url, **{"timeout": 30, **options})

    def site(self, *rules: Rule, **options: Any) -> Site:
        return Site(self.kind, list(rules), options)

    def ask(self, site: Site) -> Answered:
        if self.kind == "wsgi":
            return site.request()
        return self.loop.run_until_complete(self.ask_async(site))

    async def ask_async(self, site: Site) -> Answered:
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        await site.app(asgi_scope("/", "GET"), wire.receive, wire.send)
        return wire.answered()

    def close(self) -> None:
        closing = self.redis.close()
        if closing is not None:
            self.loop.run_until_complete(closing)
        self.loop.close()
        self.host.close()


@pytest.fixture(params=["wsgi", "asgi"])
def world_at(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(url: str, **options: Any) -> World:
        made.append(World(request.param, url, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(world_at: Callable[..., World], server: RedisServer) -> World:
    return world_at(server.url)


def decisions_of(client: redis.Redis) -> int:
    """The scripts that Redis has run."""
    statistics: Any = client.info("commandstats")
    return sum(statistics.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "fcall"))


def test_all_or_none(world: World) -> None:
    here, there = TokenBucket(world.host, "here", "3/year"), TokenBucket(world.redis, "there", "2/year")
    site = world.site(Rule(there), Rule(here))
    answers = [world.ask(site) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 429, 429]
    assert answers[2].json["violated-policies"] == ["there"]
    assert here.peek(CLIENT, 0).remaining == 1
    assert answers[0]["ratelimit-policy"] == '"there";q=2;w=31536000, "here";q=3;w=31536000'
    assert answers[1]["ratelimit"].startswith('"there";r=0')
    assert '"here";r=1' in answers[1]["ratelimit"]


def test_a_request_that_the_host_denies_does_not_ask_redis(world: World, client: redis.Redis) -> None:
    site = world.site(
        Rule(TokenBucket(world.redis, "there", "9/year")), Rule(TokenBucket(world.host, "here", "1/year"))
    )
    assert world.ask(site).status == 200
    before = decisions_of(client)
    assert [world.ask(site).json["violated-policies"] for _ in range(3)] == [["here"]] * 3
    assert decisions_of(client) == before


@pytest.mark.parametrize("kind", [TokenBucket, FixedWindow, BucketedWindow, LeakyBucket])
def test_what_redis_denies_is_not_counted_here(world: World, kind: Any) -> None:
    here = kind(world.host, "here", "5/year", **({"capacity": 5} if kind is LeakyBucket else {}))
    site = world.site(Rule(here), Rule(TokenBucket(world.redis, "there", "1/year")))
    assert [world.ask(site).status for _ in range(9)] == [200] + [429] * 8
    assert here.peek(CLIENT, 0).remaining == 4


def test_held_permits_of_both_come_back(world: World) -> None:
    here, there = Concurrency(world.host, "here", 1), Concurrency(world.redis, "there", 1)
    bucket = TokenBucket(world.redis, "bucket", "2/year")
    site = world.site(Rule(there, key=everyone), Rule(here, key=everyone), Rule(bucket))
    assert [world.ask(site).status for _ in range(4)] == [200, 200, 429, 429]
    assert here.peek("everyone", 0).remaining == here.limit == 1


def test_only_failures_are_charged_in_both(world: World) -> None:
    here = TokenBucket(world.host, "here", "3/year")
    site = world.site(
        Rule(here, charge_on={401}),
        Rule(TokenBucket(world.redis, "there", "2/year"), charge_on={401}),
        Rule(FixedWindow(world.redis, "all", "5/year")),
    )
    assert [world.ask(site).status for _ in range(3)] == [200] * 3
    assert here.peek(CLIENT, 0).remaining == 3
    site.handle = lambda: 401
    assert [world.ask(site).status for _ in range(3)] == [401, 401, 429]
    assert here.peek(CLIENT, 0).remaining == 1


def test_limits_come_back_here_while_redis_is_gone(world_at: Callable[..., World]) -> None:
    with redis_server() as server:
        url = server.url
    world = world_at(url)
    here, held = TokenBucket(world.host, "here", "3/year"), Concurrency(world.host, "held", 1)
    site = world.site(Rule(here), Rule(held), Rule(TokenBucket(world.redis, "there", "2/year")))
    assert [world.ask(site).status for _ in range(5)] == [503] * 5
    assert (here.peek(CLIENT, 0).remaining, held.peek(CLIENT, 0).remaining) == (3, 1)


def test_limits_of_the_host_hold_while_redis_is_gone_and_requests_are_admitted(
    world_at: Callable[..., World],
) -> None:
    world = world_at("redis://127.0.0.1:1/0", timeout=0.2)
    here, jobs = TokenBucket(world.host, "here", "2/year"), Concurrency(world.host, "jobs", 1)
    paid = TokenBucket(world.host, "paid", "9/year")
    there = TokenBucket(world.redis, "there", "1/year")
    site = world.site(Rule(here), Rule(jobs), Rule(paid, charge_on={500}), Rule(there), when_unavailable="allow")
    assert [world.ask(site).status for _ in range(4)] == [200, 200, 429, 429]
    assert jobs.peek(CLIENT, 0).remaining == 1
    assert paid.peek(CLIENT, 0).remaining == 9


def test_a_cancelled_request_gives_back_here(server: RedisServer, client: redis.Redis) -> None:
    world = World("asgi", server.url)
    here, held = TokenBucket(world.host, "here", "3/year"), Concurrency(world.host, "held", 1)
    site = world.site(Rule(here), Rule(held), Rule(TokenBucket(world.redis, "there", "2/year")))

    async def cancelled() -> None:
        task = asyncio.ensure_future(world.ask_async(site))
        while held.peek(CLIENT, 0).remaining != 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        assert world.ask(site).status == 200
        client.client_pause(60_000, all=False)
        world.loop.run_until_complete(cancelled())
        assert (here.peek(CLIENT, 0).remaining, held.peek(CLIENT, 0).remaining) == (2, 1)
    finally:
        client.client_unpause()
        world.close()


def test_keys_are_partitioned_by_a_secret_of_the_host(world: World) -> None:
    rules = [Rule(TokenBucket(world.redis, "there", "9/year")), Rule(TokenBucket(world.host, "here", "9/year"))]
    answer = world.ask(world.site(*rules, partition_keys=True))
    assert answer["ratelimit"].count("pk=:") == 2


def test_stores_that_can_not_decide_together_are_refused(world: World, server: RedisServer) -> None:
    there = TokenBucket(world.redis, "there", "2/year")
    with RedisStore(server.url) as another, RedisStore(server.url) as lender:
        if world.kind == "wsgi":
            with pytest.raises(InvalidLimiter, match="over Redis belong to one store"):
                world.site(Rule(there), Rule(TokenBucket(another, "b", "1/s")))
            with LeasedStore(lender, world.host) as leased, pytest.raises(InvalidLimiter, match="beside leased"):
                world.site(Rule(there), Rule(TokenBucket(leased, "b", "1/s")))
