"""Rules that hold requests back until their turn, as nginx's ``burst`` without ``nodelay``."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scrapes import scraped
from web_requests import CLIENT, HeldRequests, Kind, Site, wsgi_environ

from forebay import Concurrency, FixedWindow, InvalidLimiter, LeakyBucket, MinInterval, SlidingLog, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import ASGIMiddleware, Ban, Rule, WSGIMiddleware, everyone, turns

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def departures(site: Site, clock: ManualClock, count: int) -> list[tuple[int, float]]:
    """Statuses, and the times at which requests have been handled since now."""
    begin = clock.now()
    return [(site.request().status, round(clock.now() - begin, 9)) for _ in range(count)]


def test_a_leaky_bucket_spaces_requests(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([Rule(LeakyBucket(store, "queue", "2/second", capacity=10), delay="2s")])
    assert departures(limited, clock, 4) == [(200, 0.0), (200, 0.5), (200, 1.0), (200, 1.5)]


def test_a_token_bucket_delays_what_is_above_its_burst(site: MakeSite, store: Store, clock: ManualClock) -> None:
    """As nginx's ``limit_req ... burst=6 delay=2``."""
    limited = site([Rule(TokenBucket(store, "api", "1/second", burst=3), delay=10)])
    assert departures(limited, clock, 5) == [(200, 0.0), (200, 0.0), (200, 0.0), (200, 1.0), (200, 2.0)]


def test_a_longer_delay_is_a_denial(site: MakeSite, store: Store, clock: ManualClock) -> None:
    bucket = MinInterval(store, "gap", "10s")
    bucket.reserve(CLIENT)
    bucket.reserve(CLIENT)  # another waits already
    limited = site([Rule(bucket, delay="12s")])
    answer = limited.request()
    assert (answer.status, answer["retry-after"], limited.handled) == (429, "20", 0)
    clock.advance(8)
    assert departures(limited, clock, 1) == [(200, 12.0)]


def test_a_denial_by_another_rule_gives_the_turn_back(site: MakeSite, store: Store, clock: ManualClock) -> None:
    queue, never = MinInterval(store, "gap", "1s"), FixedWindow(store, "few", "1/hour")
    limited = site([Rule(queue, delay="5s"), Rule(never)])
    assert departures(limited, clock, 2) == [(200, 0.0), (429, 0.0)]
    assert queue.peek(CLIENT).retry_after == 1.0


def test_a_delay_stands_beside_other_rules(site: MakeSite, store: Store, clock: ManualClock) -> None:
    bucket, jobs = TokenBucket(store, "api", "5/minute"), Concurrency(store, "jobs", 1)
    slow, slower = MinInterval(store, "gap", "1s"), MinInterval(store, "wide", "3s")
    limited = site([Rule(bucket), Rule(slow, delay=9), Rule(slower, delay=9), Rule(jobs)])
    assert departures(limited, clock, 3) == [(200, 0.0), (200, 3.0), (200, 6.0)]
    assert jobs.peek(CLIENT, 0).remaining == 1
    assert limited.request()["ratelimit-policy"].startswith('"api";q=5;w=60, "gap"')


def test_requests_that_are_held_back_are_counted(site: MakeSite, store: Store, clock: ManualClock) -> None:
    slow, slower = MinInterval(store, "gap", "1s"), MinInterval(store, "wide", "3s")
    hidden, few = TokenBucket(store, "hidden", "1/hour"), FixedWindow(store, "few", "4/hour")
    limited = site([Rule(slow, delay=9), Rule(few), Rule(hidden, delay="9 hours", shadow=True)])
    delayed = "forebay_delayed_total", "private"
    assert scraped(store)[delayed] == 0
    assert departures(limited, clock, 3) == [(200, 0.0), (200, 1.0), (200, 2.0)]
    assert scraped(store)[delayed] == 2
    clock.advance(60)
    assert departures(limited, clock, 2) == [(200, 0.0), (429, 0.0)]
    assert scraped(store)[delayed] == 2
    # By each rule that it has still to wait for.
    both = site([Rule(slow, delay=9), Rule(slower, delay=9)])
    clock.advance(60)
    assert departures(both, clock, 2) == [(200, 0.0), (200, 3.0)]
    assert scraped(store)[delayed] == 4
    # A count has no key.
    assert store.stats().limiters["forebay.delayed"].inserted == 0


def test_an_uncharged_response_gives_its_place_back(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([Rule(TokenBucket(store, "api", "1/minute"), delay="2 minutes", charge_on={401})])
    assert departures(limited, clock, 2) == [(200, 0.0), (200, 0.0)]
    limited.handle = lambda: 401
    assert departures(limited, clock, 2) == [(401, 0.0), (401, 60.0)]


def real(kind: type, *arguments: Any, **options: Any) -> Rule:
    """Over the host's clock."""
    return Rule(kind(Store.private(keys=10), "gap", *arguments), key=everyone, **options)


def test_only_so_many_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = real(MinInterval, "1 hour", delay="9 hours", most_delayed=1)
    asleep, is_due = threading.Event(), threading.Event()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        asleep.set()
        is_due.wait()

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=sleep))

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b""]

    limited = WSGIMiddleware(app, [rule])
    statuses: list[str] = []

    def ask() -> None:
        for _ in limited(wsgi_environ(), lambda status, fields, exc_info=None: statuses.append(status)):
            pass

    ask()
    waiting = threading.Thread(target=ask)
    waiting.start()
    asleep.wait()
    ask()
    assert statuses == ["200 OK", "429 Too Many Requests"]
    is_due.set()
    waiting.join()
    assert statuses[2:] == ["200 OK"]
    assert [round(seconds / 60) for seconds in slept] == [60]
    # The denied one has given its place back: the next one is due after two intervals, not three.
    assert 3600 < rule.limiter.peek("everyone").retry_after <= 7200  # type: ignore[union-attr]


def test_a_cancelled_request_gives_its_place_back() -> None:
    rule = real(MinInterval, "1 hour", delay="3 hours", charge_on=range(100, 600))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limited = ASGIMiddleware(app, [rule])
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": (CLIENT, 1)}

    async def nothing(*_: Any) -> Any: ...

    async def ask() -> None:
        await limited(dict(scope), nothing, nothing)
        waiting = asyncio.create_task(limited(dict(scope), nothing, nothing))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        while rule.limiter.peek("everyone").retry_after < 3601:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(ask())
    assert 3500 < rule.limiter.peek("everyone").retry_after <= 3600  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda store: FixedWindow(store, "x", "1/s"), {"delay": 1}, "can't delay requests, as it books no turns"),
        (lambda store: SlidingLog(store, "x", "1/s", keys=2), {"delay": 1}, "books no turns"),
        (lambda store: Concurrency(store, "x", 1), {"delay": 1}, "books no turns"),
        (lambda store: MinInterval(store, "x", "1s"), {"delay": "soon"}, "delay is None or a length of time"),
        (lambda store: MinInterval(store, "x", "1s"), {"delay": -1}, "delay is None or a length of time"),
        (lambda store: MinInterval(store, "x", "1s"), {"most_delayed": 5}, "for a rule with a delay"),
        (lambda store: MinInterval(store, "x", "1s"), {"delay": 1, "most_delayed": 0}, "at least 1"),
        (lambda store: MinInterval(store, "x", "1s"), {"delay": 1, "most_delayed": True}, "at least 1"),
    ],
)
def test_a_delay_that_cannot_be_is_refused(store: Store, make: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(make(store), **options)


def test_a_leaky_bucket_without_a_delay_says_what_it_does(
    site: MakeSite, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    site([Rule(LeakyBucket(store, f"queue of {id(store)}", "2/second", capacity=10), delay="2s")])
    assert not caplog.records
    for _ in range(2):
        site([Rule(LeakyBucket(store, f"queue of {id(store)}", "2/second", capacity=10))])
    [record] = caplog.records
    assert "admits up to 10 requests at once, and spaces none: give the rule a delay" in record.getMessage()


def test_the_error_of_a_delay_is_forebays(store: Store) -> None:
    with pytest.raises(InvalidLimiter):
        Rule(FixedWindow(store, "x", "1/s"), delay=1)


def test_turns_of_stores_of_different_age_are_all_waited_for(site: MakeSite) -> None:
    old, new = ManualClock(), ManualClock()
    with Store.private(keys=9, clock=old) as old_store, Store.private(keys=9, clock=new) as new_store:
        old.advance(1000)
        limited = site(
            [Rule(MinInterval(old_store, "gap", "1s"), delay=9), Rule(MinInterval(new_store, "wide", "3s"), delay=9)]
        )
        begin = old.now(), new.now()
        assert [limited.request().status for _ in range(3)] == [200] * 3
        assert (old.now() - begin[0], new.now() - begin[1]) == (2, 6)


def test_a_request_above_the_most_delayed_is_denied_as_any_other() -> None:
    """No rule charges it, and its ban counts it."""
    with Store.private(keys=99) as store:
        quota = FixedWindow(store, "quota", "9/day")
        ban = Ban(store, "pushers", "2/day", lasts="1 hour")

        async def ask() -> None:
            gap = real(MinInterval, "1 hour", delay="9 hours", most_delayed=1, ban=ban)
            held = HeldRequests([Rule(quota, key=everyone), gap])
            assert [await held.ask() for _ in range(4)] == [200, None, 429, 429]
            assert quota.peek("everyone").remaining == 7
            assert not ban.peek("everyone")
            await held.cancel()
            ban.lift("everyone")
            assert [await held.ask() for _ in range(2)] == [None, 429]
            await held.cancel()

        asyncio.run(ask())


def test_each_rule_bounds_the_requests_that_it_holds_back() -> None:
    """Not only the one whose turn comes last; and the tiers of a rule count together."""

    async def ask() -> None:
        short = real(MinInterval, "1 hour", delay="9 hours", most_delayed=1)
        held = HeldRequests([short, real(MinInterval, "2 hours", delay="9 hours")])
        assert [await held.ask() for _ in range(3)] == [200, None, 429]
        await held.cancel()
        with Store.private(keys=9) as store:
            tiers = {name: MinInterval(store, name, "1 hour") for name in ("one", "two")}
            tiered = real(
                MinInterval,
                "1 hour",
                tiers=tiers,
                tier=lambda request: request.header("tier"),
                delay=9e3,
                most_delayed=1,
            )
            held = HeldRequests([tiered])
            assert [await held.ask(tier) for tier in (b"one", b"two", b"one", b"two")] == [200, 200, None, 429]
            await held.cancel()
            assert await held.ask(b"two") is None
            await held.cancel()

    asyncio.run(ask())


def test_a_child_holds_none_of_its_parents_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = real(MinInterval, "1 hour", delay="9 hours", most_delayed=1)
    asleep, is_due = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        is_due.wait()

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=sleep))
    limited = Site("wsgi", [rule])
    assert limited.request().status == 200
    waiting = threading.Thread(target=limited.request)
    waiting.start()
    asleep.wait()
    assert limited.request().status == 429
    if (child := os.fork()) == 0:
        status = 1
        try:
            monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=lambda seconds: None))
            status = int(limited.request().status != 200)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    is_due.set()
    waiting.join()
