"""Rules in the shadow: they decide and count, and deny nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site, asgi_scope

from forebay import Concurrency, FixedWindow, InvalidLimiter, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Ban, Gate, Request, Rule, everyone
from forebay.web.native_requests import ASGIRequest

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, handle=lambda: 200, **options: Site(kind, rules, options, handle)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def statuses(site: Site, count: int) -> list[int]:
    return [site.request().status for _ in range(count)]


def denied(store: Store, name: str) -> int:
    return store.stats().limiters[name].denied


def test_shadow_rule_counts_and_logs_its_denials_and_denies_nothing(
    site: MakeSite, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.web.denied")
    called: list[Any] = []
    rules = [Rule(FixedWindow(store, "api", "9/hour")), Rule(FixedWindow(store, "new", "2/hour"), shadow=True)]
    limited = site(rules, on_denied=lambda request, denial: called.append(denial))
    assert statuses(limited, 5) == [200] * 5
    assert limited.handled == 5
    assert denied(store, "new") == 3
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["in the shadow, 429 for 'GET' '/' by new"] * 3
    assert all(record.forebay_is_shadow for record in caplog.records)  # type: ignore[attr-defined]
    assert called == []


def test_no_field_shows_a_shadow_rule(site: MakeSite, store: Store) -> None:
    shadow = Rule(FixedWindow(store, "new", "1/hour"), shadow=True)
    answer = site([Rule(FixedWindow(store, "api", "9/hour")), shadow]).request()
    assert answer["ratelimit-policy"] == '"api";q=9;w=3600'
    assert answer["ratelimit"].startswith('"api";r=8')
    alone = site([shadow])
    assert not any("ratelimit" in name for _ in range(2) for name, _ in alone.request().fields)


def test_shadow_rule_decides_only_about_requests_that_others_allow(site: MakeSite, store: Store) -> None:
    new = FixedWindow(store, "new", "9/hour")
    assert statuses(site([Rule(FixedWindow(store, "api", "2/hour")), Rule(new, shadow=True)]), 5)[-1] == 429
    assert new.peek(CLIENT, 0).remaining == 7


def test_shadow_rules_decide_one_by_one(site: MakeSite, store: Store) -> None:
    rules = [Rule(FixedWindow(store, name, rate), shadow=True) for name, rate in (("a", "1/hour"), ("b", "9/hour"))]
    assert statuses(site(rules), 4) == [200] * 4
    # All or none, the denials of the first would keep the second from counting.
    assert (denied(store, "a"), FixedWindow(store, "b", "9/hour").peek(CLIENT, 0).remaining) == (3, 5)


def test_permits_of_a_shadow_rule_come_back_with_the_request(site: MakeSite, store: Store) -> None:
    held = Concurrency(store, "held", 1)
    failures = FixedWindow(store, "failures", "2/hour")
    rules = [
        Rule(Concurrency(store, "real", 1)),
        Rule(held, key=everyone, shadow=True),
        Rule(failures, charge_on={401}, shadow=True),
    ]
    seen: list[int] = []
    answers = iter([200, 401, 200, 401, 200])

    def handle() -> int:
        seen.append(held.peek("everyone", 0).remaining)
        return next(answers)

    limited = site(rules, handle)
    assert statuses(limited, 5) == [200, 401, 200, 401, 200]
    assert seen == [0] * 5
    assert held.peek("everyone", 0).remaining == 1
    assert failures.peek(CLIENT, 0).remaining == 0
    # Also without an enforced rule.
    seen.clear()
    assert site([rules[1]], lambda: seen.append(held.peek("everyone", 0).remaining) or 200).request().status == 200
    assert (seen, held.peek("everyone", 0).remaining) == ([0], 1)


def test_shadow_rule_with_a_delay_holds_no_request_back(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([Rule(TokenBucket(store, "slow", "1/second", burst=1), delay="2s", shadow=True)])
    before_ns = clock.now_ns()
    assert statuses(limited, 5) == [200] * 5
    assert clock.now_ns() == before_ns
    assert TokenBucket(store, "slow", "1/second", burst=1).peek(CLIENT).retry_after_ns == 3_000_000_000


def test_shadow_rule_with_a_delay_counts_no_request_as_held_back(site: MakeSite, store: Store) -> None:
    rule = Rule(TokenBucket(store, "slow", "1/second", burst=1), delay="1 minute", most_delayed=2, shadow=True)
    assert statuses(site([rule]), 9) == [200] * 9
    assert not rule.held_back.is_full
    # All have booked: none was denied in the shadow for want of room.
    assert TokenBucket(store, "slow", "1/second", burst=1).peek(CLIENT).retry_after_ns == 9_000_000_000


@pytest.mark.parametrize("what", ["key", "cost", "tier", "exempt"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_default", [False, True])
def test_error_of_a_shadow_rule_fails_no_request(
    site: MakeSite,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    what: str,
    is_async: bool,
    is_default: bool,
) -> None:
    def fail(request: Request) -> Any:
        raise RuntimeError("no such user")

    async def fail_async(request: Request) -> Any:
        raise RuntimeError("no such user")

    if is_async and site([]).kind == "wsgi":
        return
    options: dict[str, Any] = {what: fail_async if is_async else fail}
    if what == "tier":
        options["tiers"] = {"internal": None}
    tried = Rule(FixedWindow(store, "new", "1/hour"), **options, shadow=True, otherwise=is_default)
    limited = site([tried, Rule(FixedWindow(store, "login", "1/hour"), path="/login")])
    assert statuses(limited, 3) == [200] * 3
    (record,) = caplog.records  # once a minute
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
    assert "a shadow rule has failed" in record.getMessage()


def test_tier_of_a_shadow_rule_is_in_the_shadow(site: MakeSite, store: Store) -> None:
    strict = FixedWindow(store, "strict", "1/hour")
    rule = Rule(FixedWindow(store, "free", "9/hour"), tiers={"pro": strict}, tier=lambda request: "pro", shadow=True)
    assert statuses(site([rule]), 3) == [200] * 3
    assert denied(store, "strict") == 2


def test_functions_of_shadow_rules_are_awaited(store: Store) -> None:
    async def key(request: Request) -> str:
        return "ada"

    new = FixedWindow(store, "new", "1/hour")
    limited = Site("asgi", [Rule(FixedWindow(store, "api", "9/hour")), Rule(new, key=key, shadow=True)])
    assert statuses(limited, 3) == [200] * 3
    assert denied(store, "new") == 2


def test_cancelled_decision_of_a_shadow_rule_gives_the_enforced_permits_back(store: Store) -> None:
    async def key(request: Request) -> str:
        await asyncio.Event().wait()
        return "never"

    held = Concurrency(store, "held", 1)
    gate = Gate([Rule(held), Rule(FixedWindow(store, "new", "1/hour"), key=key, shadow=True)], in_loop=True)

    async def cancelled() -> None:
        task = asyncio.ensure_future(gate.enter_unguarded(ASGIRequest(asgi_scope())))
        await asyncio.sleep(0)
        assert held.peek(CLIENT, 0).remaining == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert held.peek(CLIENT, 0).remaining == 1


def test_shadow_is_true_or_false(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match="shadow is True or False, not 'no'"):
        Rule(FixedWindow(store, "new", "1/hour"), shadow="no")  # type: ignore[arg-type]


def test_shadow_rule_bans_no_key(store: Store) -> None:
    """A ban may be that of an enforced rule, too."""
    with pytest.raises(InvalidLimiter, match="in the shadow bans no key: leave ban or shadow out"):
        Rule(FixedWindow(store, "new", "1/hour"), ban=Ban(store, "bad", "2/minute", lasts="1h"), shadow=True)
