"""Web rules with leased limiters, under WSGI and ASGI: decided by the host's memory, and all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from redis_server import RedisServer, redis_server
from web_requests import CLIENT, Answered, Site, Wire, asgi_scope

from forebay import Concurrency, FixedWindow, InvalidLimiter, SlidingWindow, Store, TokenBucket
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore
from forebay.web import Ban, Rule, everyone


@dataclass
class World:
    """A host, its stores, and the event loop of its application if that is asynchronous."""

    kind: Any
    host: Store
    redis_store: Any
    leased: Any
    strict: RedisStore
    loop: asyncio.AbstractEventLoop

    def site(self, *rules: Rule, **options: Any) -> Site:
        return Site(self.kind, list(rules), options)

    def ask(self, site: Site) -> Answered:
        if self.kind == "wsgi":
            return site.request()
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        self.loop.run_until_complete(site.app(asgi_scope("/", "GET"), wire.receive, wire.send))
        return wire.answered()

    def finish(self, result: Any) -> None:
        if asyncio.iscoroutine(result):
            self.loop.run_until_complete(result)

    def used(self, name: str, key: str = CLIENT) -> int:
        """What counts as spent at Redis of a leased limit of 40 a year, when all is given back."""
        executor = self.leased.executor
        self.finish(executor.give_back(executor.holdings.unused(everything=True)))
        decision = FixedWindow(self.strict, name, "40/year").peek(key, 0)
        return 40 - decision.remaining

    def close(self) -> None:
        for store in (self.leased, self.redis_store):
            result = store.close()
            if result is not None:
                self.loop.run_until_complete(result)
        self.loop.close()
        self.strict.close()
        self.host.close()


def world_of(kind: str, url: str) -> World:
    loop = asyncio.new_event_loop()
    host = Store.private(keys=1000)
    redis_store: Any = (RedisStore if kind == "wsgi" else AsyncRedisStore)(url, timeout=30)
    leased: Any = (LeasedStore if kind == "wsgi" else AsyncLeasedStore)(redis_store, host, lease=60)
    return World(kind, host, redis_store, leased, RedisStore(url, timeout=30), loop)


@pytest.fixture(params=["wsgi", "asgi"])
def world(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[World]:
    made = world_of(request.param, server.url)
    yield made
    made.close()


def limits(world: World) -> tuple[Any, Any, Any]:
    """Two leased limits, and one of the host."""
    return (
        FixedWindow(world.leased, "first", "40/year"),
        FixedWindow(world.leased, "second", "40/year"),
        FixedWindow(world.host, "local", "5/year"),
    )


def test_a_leased_rule_limits_requests(world: World) -> None:
    site = world.site(Rule(TokenBucket(world.leased, "api", "40/year")))
    answers = [world.ask(site) for _ in range(41)]
    assert [answer.status for answer in answers] == [200] * 40 + [429]
    assert site.handled == 40
    assert answers[0]["ratelimit-policy"] == '"api";q=40;w=31536000'
    assert answers[0]["ratelimit"].startswith('"api";r=')
    assert answers[-1]["ratelimit"].startswith('"api";r=0;t=')
    assert int(answers[-1]["retry-after"]) > 3600


def test_several_rules_are_charged_as_one(world: World) -> None:
    first, second, local = limits(world)
    site = world.site(Rule(first), Rule(local), Rule(second))
    answers = [world.ask(site) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    items = [item.partition(";")[0].strip() for item in answers[0]["ratelimit"].split(",")]
    assert sorted(items) == ['"first"', '"local"', '"second"']
    # A denial names the limit that denies.
    assert answers[-1]["ratelimit"].startswith('"local";r=0')
    assert answers[-1].json["violated-policies"] == ["local"]
    assert (world.used("first"), world.used("second")) == (5, 5)


def test_a_denial_by_redis_charges_no_other_limit(world: World) -> None:
    first, second, local = limits(world)
    assert FixedWindow(world.strict, "second", "40/year").hit(CLIENT, 40)
    held = Concurrency(world.host, "held", 3)
    site = world.site(Rule(first), Rule(local), Rule(second), Rule(held, key=everyone))
    for _ in range(3):
        answer = world.ask(site)
        assert (answer.status, answer.json["violated-policies"]) == (429, ["second"])
        assert answer["ratelimit"].startswith('"second";r=0')
    assert (world.used("first"), world.used("second"), local.peek(CLIENT).remaining) == (0, 40, 5)
    assert held.peek("everyone", 0).remaining == 3


@pytest.mark.parametrize("cost", [1, 8])
def test_a_response_that_is_not_charged_gives_back(world: World, cost: int) -> None:
    """A cost of 8 is charged without a lease."""
    first, second, local = limits(world)
    site = world.site(Rule(first, charge_on={401}, cost=cost), Rule(local, charge_on={401}), Rule(second))
    assert world.ask(site).status == 200
    assert (world.used("first"), local.peek(CLIENT).remaining, world.used("second")) == (0, 5, 1)
    site.handle = lambda: 401
    assert world.ask(site).status == 401
    assert (world.used("first"), local.peek(CLIENT).remaining, world.used("second")) == (cost, 4, 2)
    assert FixedWindow(world.strict, "first", "40/year").hit(CLIENT, 40 - cost)
    answer = world.ask(site)
    assert (answer.status, answer.json["violated-policies"]) == (429, ["first"])
    assert (local.peek(CLIENT).remaining, world.used("second")) == (4, 2)


def test_a_reserved_lease_comes_back_if_a_later_rule_denies(world: World) -> None:
    first, _, local = limits(world)
    assert local.hit(CLIENT, 5)
    site = world.site(Rule(first, charge_on={401}), Rule(local))
    assert world.ask(site).status == 429
    going_on = getattr(world.redis_store.executor, "going_on", ())
    world.loop.run_until_complete(asyncio.sleep(0))
    while going_on:
        world.loop.run_until_complete(asyncio.wait(going_on))
    assert world.used("first") == 0


def test_held_permits_are_released(world: World) -> None:
    first, _, _ = limits(world)
    held = Concurrency(world.host, "held", 1)
    site = world.site(Rule(first), Rule(held))
    seen = []
    site.handle = lambda: seen.append(held.peek(CLIENT, 0).remaining) or 200  # type: ignore[func-returns-value]
    assert [world.ask(site).status for _ in range(3)] == [200] * 3
    assert seen == [0] * 3
    assert held.peek(CLIENT, 0).remaining == 1
    assert held.acquire(CLIENT)
    assert world.ask(site).status == 429
    assert world.used("first") == 3


def test_rules_for_one_path_alone_are_decided_by_their_store(world: World) -> None:
    first, _, local = limits(world)
    site = world.site(Rule(first, path="/leased"), Rule(local))
    assert world.ask(site).status == 200
    assert (world.used("first"), local.peek(CLIENT).remaining) == (0, 4)


def test_partitions_have_the_secret_of_the_host(world: World) -> None:
    first, _, local = limits(world)
    site = world.site(Rule(first), Rule(local), partition_keys=True)
    partitions = [part.partition(";")[0] for part in world.ask(site)["ratelimit"].split(";pk=")[1:]]
    again = [part.partition(";")[0] for part in world.ask(site)["ratelimit"].split(";pk=")[1:]]
    assert len(set(partitions)) == 2
    assert [part.partition(",")[0] for part in partitions] == [part.partition(",")[0] for part in again]


def test_a_cost_above_the_limit_is_denied(world: World) -> None:
    first, _, local = limits(world)
    site = world.site(Rule(first, cost=41), Rule(local))
    answer = world.ask(site)
    assert (answer.status, "retry-after" in answer) == (429, False)
    assert local.peek(CLIENT).remaining == 5


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_redis_is_gone(kind: str) -> None:
    with redis_server() as server:
        url = server.url
    world = world_of(kind, url)
    try:
        first, second, local = limits(world)
        held = Concurrency(world.host, "held", 1)
        for rules in (
            [Rule(first)],
            [Rule(local), Rule(first)],
            [Rule(held), Rule(local, charge_on={401}), Rule(first)],
            [Rule(local), Rule(held), Rule(first), Rule(second, charge_on={401})],
        ):
            answer = world.ask(world.site(*rules))
            assert (answer.status, answer["retry-after"]) == (503, "1")
            assert (local.peek(CLIENT).remaining, held.peek(CLIENT, 0).remaining) == (5, 1)
    finally:
        world.close()


def test_limits_that_can_not_stand_together_are_refused(world: World, server: RedisServer) -> None:
    first, _, local = limits(world)
    other = world_of("asgi" if world.kind == "wsgi" else "wsgi", server.url)
    try:
        with pytest.raises(InvalidLimiter, match="LeasedStore"):
            world.site(Rule(limits(other)[0]))
        strict: Any = SlidingWindow(world.redis_store, "strict", "5/year")
        for rules in ([Rule(first), Rule(strict)], [Rule(strict), Rule(local), Rule(first)]):
            with pytest.raises(InvalidLimiter, match="can't stand beside leased limiters"):
                world.site(*rules)
    finally:
        other.close()


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_a_request_that_is_cancelled_at_any_call_gives_back(server: RedisServer, number: int, is_after: bool) -> None:
    world = world_of("asgi", server.url)
    first, second, local = limits(world)
    held = Concurrency(world.host, "held", 1)
    site = world.site(Rule(first, charge_on={401}), Rule(local), Rule(second), Rule(held))
    # Redis then knows all scripts.
    assert world.ask(site).status == 200
    assert world.used("first") == 0
    before = local.peek(CLIENT).remaining, world.used("second")
    executor = world.redis_store.executor
    execute: Callable[..., Any] = executor.execute_command
    calls = 0

    async def work() -> None:
        stopped, go_on = asyncio.Event(), asyncio.Event()

        async def held_up(*call: Any) -> Any:
            nonlocal calls
            mine, calls = calls == number, calls + 1
            if mine and not is_after:
                stopped.set()
                await go_on.wait()
            answer = await execute(*call)
            if mine and is_after:
                stopped.set()
                await go_on.wait()
            return answer

        executor.execute_command = held_up
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        request = asyncio.ensure_future(site.app(asgi_scope("/", "GET"), wire.receive, wire.send))
        waiting = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({request, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert stopped.is_set()
        request.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait({request})
        executor.execute_command = execute
        await asyncio.sleep(0)
        while executor.going_on:
            await asyncio.wait(executor.going_on)

    try:
        world.loop.run_until_complete(work())
        assert held.peek(CLIENT, 0).remaining == 1
        is_admitted = number >= 2
        # The permits that a fetch under way has borrowed are lost, as with one leased limiter: here up to 2.
        lost = [2 * (is_after and number == fetch) for fetch in range(2)]
        assert 0 <= world.used("first") <= lost[0]
        assert before[1] + is_admitted <= world.used("second") <= before[1] + is_admitted + lost[1]
        assert local.peek(CLIENT).remaining == before[0] - is_admitted
    finally:
        world.close()


def test_leased_rules_ban_on_this_host(world: World) -> None:
    ban = Ban(world.host, "guessers", "2/hour", lasts="10 minutes")
    site = world.site(Rule(FixedWindow(world.leased, "leased", "3/year"), ban=ban))
    answers = [world.ask(site) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 3 + [429] * 3
    assert [answer.json["violated-policies"] for answer in answers[3:]] == [["leased"], ["leased"], ["guessers"]]
    ban.lift(CLIENT)
    assert world.ask(site).json["violated-policies"] == ["leased"]


def test_preflights_have_leased_permits_of_their_own(world: World) -> None:
    site = world.site(Rule(FixedWindow(world.leased, "leased", "3/year")))
    fields = [(b"origin", b"https://shop.example"), (b"access-control-request-method", b"POST")]

    def preflight() -> int:
        if world.kind == "wsgi":
            return site.request(method="OPTIONS", fields=[(k.decode(), v.decode()) for k, v in fields]).status
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        scope = asgi_scope("/", "OPTIONS", headers=fields)
        world.loop.run_until_complete(site.app(scope, wire.receive, wire.send))
        return wire.answered().status

    assert [preflight() for _ in range(4)] == [200, 200, 200, 429]
    assert [world.ask(site).status for _ in range(4)] == [200, 200, 200, 429]
