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
