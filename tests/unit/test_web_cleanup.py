"""What a request holds until it ends, where two threads end it and add to it at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay import Concurrency, FixedWindow, Store
from forebay.web import Rule, everyone
from forebay.web.cleanup import RequestCleanup


class _Ending(list[Any]):
    """A list during whose reading another thread ends the request."""

    def __init__(self, items: list[Any], request: RequestCleanup) -> None:
        super().__init__(items)
        self._request = request

    def __iter__(self) -> Iterator[Any]:
        self._request.end(403)
        return super().__iter__()


def test_request_that_ends_while_its_view_takes_permits_keeps_none() -> None:
    with Store.private(keys=100) as store:
        held, window = Concurrency(store, "held", 2), FixedWindow(store, "window", "9/hour")
        request, view = RequestCleanup(), RequestCleanup()
        request.hold(Rule(held, key=everyone), held.acquire("key"))
        view.hold(Rule(held, key=everyone), held.acquire("key"))
        view.leases = _Ending(view.leases, request)
        view.reserved = [(Rule(window, charge_on={401}), window.reserve("key", 1, 0))]
        request.merge(view)
        assert request.ended_status == 403
        assert held.peek("key", 0).remaining == 2
        assert window.peek("key", 0).remaining == 9


def test_request_that_has_ended_holds_no_more() -> None:
    with Store.private(keys=100) as store:
        held = Concurrency(store, "held", 1)
        request, view = RequestCleanup(), RequestCleanup()
        request.end(200)
        view.hold(Rule(held, key=everyone), held.acquire("key"))
        request.merge(view)
        assert not request
        assert held.peek("key", 0).remaining == 1
