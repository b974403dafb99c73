"""CORS preflights: they leave a client its limit, and are limited all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site

from forebay import BucketedWindow, Concurrency, FixedWindow, LeakyBucket, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Gate, Passage, Request, Rule, everyone, header

MakeSite = Callable[..., Site]
ASKS = [("Origin", "https://shop.example"), ("Access-Control-Request-Method", "POST")]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


def preflight(site: Site, *more: tuple[str, str], method: str = "OPTIONS") -> int:
    return site.request(method=method, fields=[*ASKS, *more]).status


def left(limiter: Any, key: Any = CLIENT) -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


def one(store: Store) -> list[Rule]:
    return [Rule(FixedWindow(store, "a", "2/hour"))]


def several(store: Store) -> list[Rule]:
    return [*one(store), Rule(TokenBucket(store, "b", "9/hour")), Rule(BucketedWindow(store, "c", "9/hour", 4, keys=9))]


def by_field(store: Store) -> list[Rule]:
    return [Rule(FixedWindow(store, "a", "2/hour"), key=header("X-Key", otherwise=everyone))]


def by_path(store: Store) -> list[Rule]:
    return [Rule(FixedWindow(store, "a", "2/hour"), path="/*"), Rule(TokenBucket(store, "b", "9/hour"))]


def refunded(store: Store) -> list[Rule]:
    return [Rule(FixedWindow(store, "a", "2/hour"), charge_on={200})]


def held(store: Store) -> list[Rule]:
    return [*one(store), Rule(Concurrency(store, "held", 1))]


def by_coroutine(store: Store) -> list[Rule]:
    async def client(request: Request) -> str:
        return str(request.peer)

    return [Rule(FixedWindow(store, "a", "2/hour"), key=client)]


MAKERS = [one, several, by_field, by_path, refunded, held]


@pytest.mark.parametrize("rules", MAKERS)
def test_preflights_leave_a_client_its_limit(site: MakeSite, store: Store, rules: Any) -> None:
    limited = site(rules(store))
    assert [preflight(limited) for _ in range(2)] == [200, 200]
    assert [limited.request().status for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("rules", MAKERS)
def test_preflights_are_limited_themselves(site: MakeSite, store: Store, rules: Any) -> None:
    """An application that handles ``OPTIONS`` as any method handles twice the limit, and no more."""
    limited = site(rules(store))
    assert [preflight(limited) for _ in range(4)] == [200, 200, 429, 429]
    assert limited.handled == 2


def test_preflights_leave_a_client_the_limit_of_an_awaited_key(store: Store) -> None:
    limited = Site("asgi", by_coroutine(store))
    assert [preflight(limited) for _ in range(3)] == [200, 200, 429]
    assert [limited.request().status for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("fields", [[], ASKS[:1], ASKS[1:], [("Origin", ""), ASKS[1]], [ASKS[0], (ASKS[1][0], "")]])
def test_options_without_a_field_of_preflights_are_charged(site: MakeSite, store: Store, fields: Any) -> None:
    [rule] = one(store)
    limited = site([rule])
    limited.request(method="OPTIONS", fields=fields)
    assert left(rule.limiter) == 1


@pytest.mark.parametrize("method", ["GET", "POST", "TRACE"])
def test_other_methods_with_the_fields_of_preflights_are_charged(site: MakeSite, store: Store, method: str) -> None:
    [rule] = one(store)
    preflight(site([rule]), method=method)
    assert left(rule.limiter) == 1


def test_options_in_small_letters_are_options(store: Store) -> None:
    limited = Site("asgi", one(store))
    assert [preflight(limited, method=method) for method in ("options", "OPTIONS", "Options")] == [200, 200, 429]


@pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
@pytest.mark.parametrize("override", ["POST", "options"])
def test_an_overridden_method_is_no_preflight(site: MakeSite, store: Store, name: str, override: str) -> None:
    [rule] = one(store)
    limited = site([rule])
    assert [preflight(limited, (name, override)) for _ in range(3)] == [200, 200, 429]
    assert left(rule.limiter) == 0


@pytest.mark.parametrize("methods", ["OPTIONS", {"get", "options"}])
def test_a_rule_that_names_options_charges_preflights(site: MakeSite, store: Store, methods: Any) -> None:
    named = Rule(FixedWindow(store, "named", "2/hour"), methods=methods)
    other = Rule(FixedWindow(store, "all", "9/hour"))
    limited = site([named, other])
    assert [preflight(limited) for _ in range(3)] == [200, 200, 429]
    assert (left(named.limiter), left(other.limiter)) == (0, 9)


def test_a_rule_of_other_methods_is_not_for_preflights(site: MakeSite, store: Store) -> None:
    limited = site([Rule(FixedWindow(store, "a", "2/hour"), methods={"GET", "POST"})])
    assert [preflight(limited) for _ in range(5)] == [200] * 5


def test_fields_of_a_preflight_are_those_of_its_key(site: MakeSite, store: Store) -> None:
    limited = site(one(store), partition_keys=True)
    first, other = limited.request(), limited.request(method="OPTIONS", fields=ASKS)
    assert first["ratelimit"].startswith('"a";r=1')
    assert other["ratelimit"].startswith('"a";r=1')
    assert first["ratelimit"].partition("pk=")[2] != other["ratelimit"].partition("pk=")[2]


def test_the_cost_of_a_preflight_is_that_of_the_rule(site: MakeSite, store: Store) -> None:
    limiter = LeakyBucket(store, "a", "1/hour", capacity=6)
    limited = site([Rule(limiter, cost=lambda request: 3 if request.method == "OPTIONS" else 2)])
    assert [preflight(limited) for _ in range(3)] == [200, 200, 429]
    assert [limited.request().status for _ in range(4)] == [200, 200, 200, 429]


def test_extensions_that_ask_the_gate_leave_a_client_its_limit(store: Store) -> None:
    """A request of a framework, which is neither WSGI's nor ASGI's."""
    fields = {name.lower(): value for name, value in ASKS}
    request: Any = SimpleNamespace(peer=CLIENT, method="OPTIONS", methods=("OPTIONS",), header=fields.get)
    [rule] = one(store)
    gate = Gate([rule])
    assert [isinstance(gate.admit(request), Passage) for _ in range(3)] == [True, True, False]
    assert left(rule.limiter) == 2
    request.method, request.methods = "GET", ("GET",)
    assert isinstance(gate.admit(request), Passage)
    assert left(rule.limiter) == 1


def test_a_websocket_has_no_method_and_is_charged(store: Store) -> None:
    [rule] = one(store)
    limited = Site("asgi", [rule])
    scope = {"type": "websocket", "path": "/", "headers": [], "client": (CLIENT, 1)}

    async def nothing(*_: Any) -> Any: ...

    asyncio.run(limited.app(scope, nothing, nothing))
    assert left(rule.limiter) == 1
