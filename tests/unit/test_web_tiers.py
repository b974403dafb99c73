"""Rules with tiers: the limiter of a request is chosen by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site

from forebay import Concurrency, FixedWindow, InvalidLimiter, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Request, Rule, everyone

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def plan(request: Request) -> str:
    return request.header("X-Plan") or "free"


def tiered(store: Store, **more: Any) -> Rule:
    pro = FixedWindow(store, "pro", "3/hour")
    return Rule(TokenBucket(store, "free", "1/minute"), tiers={"pro": pro, "internal": None}, tier=plan, **more)


def statuses(site: Site, tier: str, count: int, path: str = "/") -> list[int]:
    return [site.request(path, fields=[("X-Plan", tier)]).status for _ in range(count)]


def test_each_tier_has_its_limit(site: MakeSite, store: Store) -> None:
    limited = site([tiered(store)])
    assert statuses(limited, "pro", 4) == [200, 200, 200, 429]
    assert statuses(limited, "free", 2) == [200, 429]
    assert statuses(limited, "unheard of", 1) == [429]  # as those without a tier
    assert statuses(limited, "internal", 5) == [200] * 5


def test_fields_and_reports_are_those_of_the_tier(site: MakeSite, store: Store) -> None:
    limited = site([tiered(store)])
    answers = [limited.request(fields=[("X-Plan", "pro")]) for _ in range(4)]
    assert answers[0]["ratelimit-policy"] == '"pro";q=3;w=3600'
    assert answers[0]["ratelimit"].startswith('"pro";r=2')
    assert answers[3].json["detail"].startswith("The limit is 3 requests per hour")
    assert answers[3].json["violated-policies"] == ["pro"]
    assert limited.request()["ratelimit-policy"] == '"free";q=1;w=60'
    assert "ratelimit-policy" not in limited.request(fields=[("X-Plan", "internal")]).fields


def test_a_tier_stands_beside_other_rules_and_conditions(site: MakeSite, store: Store) -> None:
    everything = Rule(TokenBucket(store, "everything", "4/minute"))
    limited = site([tiered(store, path="/api/*", exempt=lambda request: request.path == "/api/free"), everything])
    assert statuses(limited, "free", 2, "/api/x") == [200, 429]
    assert statuses(limited, "pro", 1, "/api/x") == [200]
    assert statuses(limited, "free", 1, "/api/free") == [200]
    assert statuses(limited, "free", 2, "/elsewhere") == [200, 429]  # of everything, the fifth


def test_charges_by_status_and_held_permits_are_those_of_the_tier(site: MakeSite, store: Store) -> None:
    failed = Rule(
        TokenBucket(store, "few", "1/hour"),
        tiers={"pro": TokenBucket(store, "many", "2/hour")},
        tier=plan,
        charge_on={401},
        key=everyone,
    )
    limited = site([failed])
    limited.handle = lambda: 401
    assert statuses(limited, "pro", 3) == [401, 401, 429]
    assert statuses(limited, "free", 2) == [401, 429]
    held = Rule(Concurrency(store, "one", 1), tiers={"pro": Concurrency(store, "two", 2)}, tier=plan, key=everyone)
    busy = site([held])
    busy.handle = lambda: 200 if held.by_tier["pro"].limiter.peek("everyone", 0).remaining == 1 else 500  # type: ignore[union-attr]
    assert statuses(busy, "pro", 3) == [200] * 3


def test_a_tier_may_be_awaited(store: Store) -> None:
    async def plan_of(request: Request) -> str:
        return plan(request)

    rule = Rule(TokenBucket(store, "free", "1/minute"), tiers={"pro": None}, tier=plan_of)
    limited = Site("asgi", [rule])
    assert statuses(limited, "free", 2) == [200, 429]
    assert statuses(limited, "pro", 2) == [200, 200]
    with pytest.raises(InvalidLimiter, match="has to be awaited, and this application has no event loop"):
        Site("wsgi", [rule])


@pytest.mark.parametrize("value", [None, 7, True, b"pro"])
def test_a_tier_that_is_no_text_is_an_error(site: MakeSite, store: Store, value: Any) -> None:
    limited = site([Rule(TokenBucket(store, "free", "1/minute"), tiers={"pro": None}, tier=lambda request: value)])
    with pytest.raises(InvalidLimiter, match=r"tier of the rule of limiter 'free' returned .*, which is no tier"):
        limited.request()
    assert limited.handled == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": {"pro": None}}, "only one of tiers and tier"),
        ({"tier": plan}, "only one of tiers and tier"),
        ({"tiers": [1], "tier": plan}, "tiers are limiters by name"),
        ({"tiers": {1: None}, "tier": plan}, "tiers are limiters by name"),
        ({"tiers": {"pro": "10/minute"}, "tier": plan}, "a rule is for one limiter, not '10/minute'"),
        ({"tiers": {"pro": None}, "tier": "pro"}, "tier is a callable that takes a request, not 'pro'"),
    ],
)
def test_tiers_that_cannot_be_chosen_are_refused(store: Store, options: Any, message: str) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        Rule(TokenBucket(store, "free", "1/minute"), **options)


def test_a_tier_may_be_in_another_store(site: MakeSite, store: Store) -> None:
    with Store.private(keys=100) as other:
        pro = TokenBucket(other, "b", "2/hour")
        limited = site([Rule(TokenBucket(store, "a", "1/hour"), tiers={"pro": pro}, tier=plan)])
        assert statuses(limited, "pro", 3) == [200, 200, 429]
        assert statuses(limited, "free", 2) == [200, 429]


def test_keys_of_tiers_are_the_clients(site: MakeSite, store: Store) -> None:
    rule = tiered(store)
    limited = site([rule])
    statuses(limited, "pro", 1)
    pro = rule.by_tier["pro"]
    assert pro is not None
    assert pro.limiter.peek(CLIENT, 0).remaining == 2  # type: ignore[union-attr]
