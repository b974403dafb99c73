"""Rules of several stores of one host in one middleware."""

from __future__ import annotations

from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site

from forebay import Concurrency, FixedWindow, Store
from forebay.testing import ManualClock
from forebay.web import Rule


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"charge_on": {200}}, {"path": "/"}])
@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_all_or_none(kind: Kind, clock: ManualClock, options: Any, is_first: bool) -> None:
    with Store.private(keys=10, clock=clock) as store, Store.private(keys=10, clock=clock) as another:
        limit, other = FixedWindow(store, "limit", "5/hour"), FixedWindow(another, "other", "2/hour")
        rules = [Rule(other, **options), Rule(limit)]
        site = Site(kind, rules if is_first else rules[::-1])
        answers = [site.request() for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 429, 429]
        assert (limit.peek(CLIENT, 0).remaining, other.peek(CLIENT, 0).remaining) == (3, 0)
        assert answers[2].json["violated-policies"] == ["other"]
        assert answers[0]["ratelimit"].count("r=") == 2


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_permits_of_another_store_are_held(kind: Kind, clock: ManualClock) -> None:
    with Store.private(keys=10, clock=clock) as store, Store.private(keys=10, clock=clock) as another:
        limit, places = FixedWindow(store, "limit", "2/hour"), Concurrency(another, "places", 1)
        site = Site(kind, [Rule(limit), Rule(places)])

        def handle() -> int:
            assert places.peek(CLIENT, 0).remaining == 0
            return 200

        site.handle = handle
        assert [site.request().status for _ in range(3)] == [200, 200, 429]
        assert places.peek(CLIENT, 0).remaining == 1


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"charge_on": {200}}])
@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_cost_above_its_limit_is_answered_by_its_own_rule(
    kind: Kind, clock: ManualClock, options: Any, is_first: bool
) -> None:
    """Limiters of several stores may have one name, and rules of one store, too."""
    with Store.private(keys=10, clock=clock) as store, Store.private(keys=10, clock=clock) as another:
        small, large = FixedWindow(store, "limit", "5/hour"), FixedWindow(another, "limit", "50/hour")
        rules = [
            Rule(small, status=418),
            Rule(large, cost=60, status=451, **options),
            Rule(Concurrency(store, "limit", 5), status=509),
        ]
        answer = Site(kind, rules if is_first else rules[::-1]).request()
        assert (answer.status, answer.json["violated-policies"]) == (451, ["limit"])
        assert "50 requests per hour" in answer.json["detail"]


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_of_two_limiters_of_one_name_the_one_that_raises_answers(kind: Kind, store: Store) -> None:
    rules = [
        Rule(FixedWindow(store, "limit", "5/hour"), cost=lambda request: 2, status=418),
        Rule(FixedWindow(store, "limit", "5/day"), cost=lambda request: 7, status=451),
    ]
    answer = Site(kind, rules).request()
    assert (answer.status, "5 requests per day" in answer.json["detail"]) == (451, True)
