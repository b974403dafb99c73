"""Load shedders among the rules, under WSGI and ASGI: the worked examples W20 and W21, and adaptive limits."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_requests import Kind, Site, call_asgi, call_wsgi, wsgi_environ

from forebay import Concurrency, InvalidLimiter, Store, TokenBucket
from forebay.contrib.views import AppGates, Visit, rules_of
from forebay.shedding import AIMD, AdaptiveLimit, Admission, BusyWorkers, ReservedSlots
from forebay.testing import ManualClock
from forebay.web import (
    Answer,
    ASGIMiddleware,
    Denial,
    Gate,
    Passage,
    Request,
    Rule,
    Shed,
    WSGIMiddleware,
    everyone,
    header,
    problem_report,
)
from forebay.web.native_requests import WSGIRequest

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def site(kind: Kind) -> MakeSite:
    return lambda rules, handle=lambda: 200, **options: Site(kind, rules, options, handle)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def importance(request: Request) -> str:
    """Payments are critical, test traffic is the least important."""
    if request.path.startswith("/pay"):
        return "critical"
    return "test" if request.path.startswith("/test") else "default"


def test_w20_others_get_503_above_their_80_per_cent_and_critical_requests_pass(site: MakeSite, store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 10, {"critical": "20%", "default": 0})
    limited = site([Shed(fleet, priority=lambda request: "critical" if request.path == "/pay" else "default")])
    # Requests of others that are in flight in another worker.
    others = [fleet.admit("default") for _ in range(7)]
    assert limited.request("/").status == 200
    others.append(fleet.admit("default"))
    denied = limited.request("/")
    assert denied.status == 503
    assert 2 <= int(denied["retry-after"]) <= 4
    assert denied.json == {
        "type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
        "title": "Service Unavailable",
        "status": 503,
        "detail": f"This service is overloaded: ask again in {denied['retry-after']} seconds.",
        "violated-policies": ["fleet"],
    }
    # Critical requests hold the other two slots, one after the other.
    critical = fleet.admit("critical")
    assert limited.request("/pay").status == 200
    assert fleet.admit("critical")
    assert limited.request("/pay").status == 503
    critical.end()
    assert limited.request("/pay").status == 200
    assert limited.request("/").status == 503
    others[0].end()
    assert limited.request("/").status == 200


def test_w21_the_lowest_priority_is_shed_first_little_by_little_and_comes_back_so(
    site: MakeSite, store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(21)
    monkeypatch.setattr(random, "random", draw.random)
    workers = BusyWorkers(store, "workers", 16, ["critical", "default", "test"], step=0.25, interval="1s")
    limited = site([Shed(workers, priority=importance)])

    def parts_shed() -> list[float]:
        statuses = [[limited.request(path).status for _ in range(60)] for path in ("/pay", "/shop", "/test")]
        assert {status for of_one in statuses for status in of_one} <= {200, 503}
        return [of_one.count(503) / 60 for of_one in statuses]

    # Other requests keep fifteen of sixteen workers busy.
    held = [workers.admit("critical") for _ in range(15)]
    for interval in range(1, 9):
        clock.advance(1)
        level = min(interval * 0.25, 2)
        expected = [0, max(0.0, level - 1), min(1.0, level)]
        assert parts_shed() == pytest.approx(expected, abs=0.2)
        assert workers.level == pytest.approx(level, abs=0.02)
    # Twelve of sixteen are in between: it goes on as it does.
    for one in held[:3]:
        one.end()
    for _ in range(5):
        clock.advance(1)
        assert parts_shed() == pytest.approx([0, 1, 1], abs=0.2)
    for one in held[3:8]:
        one.end()
    for interval in range(1, 9):
        clock.advance(1)
        level = 2 - interval * 0.25
        assert parts_shed() == pytest.approx([0, max(0.0, level - 1), min(1.0, level)], abs=0.2)
    assert workers.level == 0


def test_an_adaptive_limit_learns_from_responses(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "backend", AIMD(initial=2))
    statuses = iter([200] * 10 + [404] * 10 + [500] * 20 + [503, 200] + [200] * 20)

    def handle() -> int:
        clock.advance(0.1)
        return next(statuses)

    limited = site([Shed(limit)], handle)
    limits = []
    for _ in range(60):
        limited.request()
        limits.append(limit.limit)
    # Each ten requests take a second, and are a window. One in flight is at least half of two, and less of three.
    assert limits[0] == 2
    # A 404 is a sample, an error of the handler is none, and a 503 is a drop.
    assert set(limits[20:40]) == {3}
    assert min(limits[41:]) < limits[40]
    assert limit.in_flight == 0


def test_a_request_counts_until_its_response_was_sent(kind: Kind, store: Store) -> None:
    workers = BusyWorkers(store, "workers", 4, ["critical", "test"], interval="1s")
    shed = Shed(workers, priority=lambda request: "critical")
    busy: list[int] = []

    def wsgi(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        busy.append(workers.busy)
        yield b"a"
        busy.append(workers.busy)
        yield b"b"

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        busy.append(workers.busy)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        busy.append(workers.busy)
        await send({"type": "http.response.body", "body": b"b"})

    if kind == "wsgi":
        assert call_wsgi(WSGIMiddleware(wsgi, [shed]), "/", "GET").body == b"ab"
    else:
        assert call_asgi(ASGIMiddleware(asgi, [shed]), "/", "GET").body == b"ab"
    assert busy == [1, 1]
    assert workers.busy == 0


def test_a_handler_that_raises_ends_the_request(site: MakeSite, store: Store) -> None:
    workers = BusyWorkers(store, "workers", 4, ["critical", "test"], interval="1s")

    def fail() -> int:
        raise RuntimeError("a bug")

    limited = site([Shed(workers, priority=lambda request: "critical")], fail)
    with pytest.raises(RuntimeError, match="a bug"):
        limited.request()
    assert workers.busy == 0


def test_a_request_that_a_rule_denies_no_longer_counts(site: MakeSite, store: Store) -> None:
    workers = BusyWorkers(store, "workers", 4, ["critical", "test"], interval="1s")
    rules = [
        Shed(workers, priority=lambda request: "critical"),
        Rule(TokenBucket(store, "api", "1/minute", burst=1)),
    ]
    limited = site(rules)
    assert [limited.request().status for _ in range(3)] == [200, 429, 429]
    assert workers.busy == 0


def test_a_request_that_is_shed_is_charged_by_no_rule(site: MakeSite, store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    api = TokenBucket(store, "api", "1/minute", burst=5)
    limited = site([Rule(api, key=everyone), Shed(fleet, priority=lambda request: "default")])
    with fleet.admit("default"):
        assert limited.request().status == 503
    assert store.stats().limiters["api"].allowed == 0
    assert limited.request().status == 200


def test_a_shed_stands_beside_rules_that_hold_permits(site: MakeSite, store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    reports = Concurrency(store, "reports", 1)
    rules = [
        Shed(fleet, priority=lambda request: "default"),
        Rule(reports, key=everyone),
        Rule(TokenBucket(store, "api", "100/minute"), charge_on={500}),
    ]
    counted = []

    def handle() -> int:
        counted.append((fleet.limiters[1].peek("all").remaining, reports.peek("").remaining))
        return 200

    limited = site(rules, handle)
    assert [limited.request().status for _ in range(3)] == [200] * 3
    assert [one[0] for one in counted] == [1] * 3
    assert fleet.limiters[1].peek("all").remaining == 2


def test_a_shed_is_for_its_paths_and_methods(site: MakeSite, store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    limited = site([Shed(fleet, priority=lambda request: "default", path="/search/*", methods="GET")])
    with fleet.admit("default"):
        assert limited.request("/search/shoes").status == 503
        assert limited.request("/search/shoes", "POST").status == 200
        assert limited.request("/orders").status == 200


def test_all_sheds_have_to_admit_a_request(site: MakeSite, store: Store) -> None:
    """A shed that denies it leaves no slot of another one held."""
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    search = AdaptiveLimit(store, "search", AIMD(initial=1))
    limited = site([Shed(fleet, priority=lambda request: "default"), Shed(search)])
    held = search.admit()
    assert limited.request()["retry-after"] in {"2", "3", "4"}
    assert fleet.limiters[1].peek("all").remaining == 2
    held.end()
    assert limited.request().status == 200


def test_a_denial_has_the_status_and_the_answer_that_were_asked_for(site: MakeSite, store: Store) -> None:
    search = AdaptiveLimit(store, "search", AIMD(initial=1))
    seen: list[Denial] = []

    def answer(request: Request, denial: Denial) -> Answer:
        seen.append(denial)
        return problem_report(denial)._replace(body=b"busy")

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("forebay.web.denied")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        limited = site([Shed(search, status=429, answer=answer, retry_after="1 minute")])
        with search.admit():
            denied = limited.request()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert (denied.status, denied.body) == (429, b"busy")
    assert 60 <= int(denied["retry-after"]) <= 120
    assert seen[0].violated == ("search",)
    assert isinstance(seen[0].rule, Shed)
    assert logged == ["429 for 'GET' '/' by search"]


def test_retry_after_is_spread(site: MakeSite, store: Store) -> None:
    search = AdaptiveLimit(store, "search", AIMD(initial=1))
    limited = site([Shed(search, retry_after="1 minute")])
    with search.admit():
        waits = {int(limited.request()["retry-after"]) for _ in range(50)}
    assert len(waits) > 10
    assert waits <= set(range(60, 121))


def test_an_async_priority_is_awaited_and_refused_without_a_loop(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})

    async def importance_of(request: Request) -> str:
        await asyncio.sleep(0)
        return "default"

    limited = Site("asgi", [Shed(fleet, priority=importance_of, path="/a")])
    with fleet.admit("default"):
        assert limited.request("/a").status == 503
        assert limited.request("/b").status == 200
    assert limited.request("/a").status == 200
    with pytest.raises(InvalidLimiter, match="has to be awaited, and this application has no event loop"):
        Site("wsgi", [Shed(fleet, priority=importance_of)])


def test_a_priority_that_is_not_known_fails_the_request(site: MakeSite, store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    limited = site([Shed(fleet, priority=header("X-Priority", otherwise=everyone))])
    with pytest.raises(InvalidLimiter, match="the priority of a request is for shedder 'fleet' one of"):
        limited.request()


@pytest.mark.parametrize(("when", "status"), [("503", 503), ("429", 429), ("allow", 200)])
def test_a_store_that_fails_is_answered_as_the_rules_are(site: MakeSite, store: Store, when: str, status: int) -> None:
    limited = site([Shed(AdaptiveLimit(store, "search"))], when_unavailable=when)
    store.close()
    assert limited.request().status == status


def test_limits_that_are_switched_off_shed_nothing(site: MakeSite, store: Store) -> None:
    search = AdaptiveLimit(store, "search", AIMD(initial=1))
    with warnings.catch_warnings(action="ignore"):
        limited = site([Shed(search)], enabled=False)
    with search.admit():
        assert limited.request().status == 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda search, fleet: Shed(None), "a Shed is for a shedder, not None"),
        (lambda search, fleet: Shed(fleet), "has the priorities .* so its Shed needs a priority="),
        (lambda search, fleet: Shed(search, priority=len), "has no priorities, so its Shed takes no priority="),
        (lambda search, fleet: Shed(fleet, priority="high"), "priority is a callable that takes a request"),
        (lambda search, fleet: Shed(search, status=None), "status is an HTTP status such as 503, not None"),
        (lambda search, fleet: Shed(search, status=99), "status is an HTTP status such as 429, not 99"),
    ],
)
def test_a_shed_that_makes_no_sense_is_refused(store: Store, make: Callable[..., Shed], message: str) -> None:
    search = AdaptiveLimit(store, "search")
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    with pytest.raises(InvalidLimiter, match=message):
        make(search, fleet)


def test_a_gate_ends_what_it_has_counted_if_a_rule_fails(store: Store) -> None:
    workers = BusyWorkers(store, "workers", 4, ["critical", "test"], interval="1s")

    def key(request: Request) -> str:
        raise RuntimeError("a bug")

    gate = Gate([Shed(workers, priority=lambda request: "critical"), Rule(TokenBucket(store, "a", "1/s"), key=key)])
    with pytest.raises(RuntimeError, match="a bug"):
        gate.enter(WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}))
    assert workers.busy == 0


def test_a_shedder_whose_store_closes_meanwhile_keeps_no_permit(store: Store) -> None:
    held = Concurrency(store, "held", 1)
    other = Store.private(keys=100)

    def key(request: Request) -> str:
        other.close()
        return "key"

    gate = Gate([Shed(AdaptiveLimit(other, "search")), Rule(held, key=key)])
    passage = gate.enter(WSGIRequest(wsgi_environ()))
    assert isinstance(passage, Passage)
    assert passage.cleanup is not None
    passage.cleanup.end(200)
    assert held.peek("key", 0).remaining == 1


def test_a_long_request_renews_its_slots(kind: Kind, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ASGI while the handler runs, under WSGI with each part of the response."""
    search = AdaptiveLimit(store, "search", lease="30ms")
    renewals: list[Admission] = []
    enough = asyncio.Event()

    def renew(admission: Admission) -> None:
        renewals.append(admission)
        if len(renewals) == 3:
            enough.set()

    monkeypatch.setattr(Admission, "renew", renew)

    def wsgi(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield from (b"a", b"b", b"c")

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await enough.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc"})

    if kind == "wsgi":
        assert call_wsgi(WSGIMiddleware(wsgi, [Shed(search)]), "/", "GET").body == b"abc"
    else:
        assert call_asgi(ASGIMiddleware(asgi, [Shed(search)]), "/", "GET").body == b"abc"
    assert len(renewals) >= 3
    assert len(set(map(id, renewals))) == 1


def test_a_request_that_waits_for_its_turn_is_no_slow_one(site: MakeSite, store: Store, clock: ManualClock) -> None:
    """The latency of an adaptive limit is that of the handler."""
    search = AdaptiveLimit(store, "search")

    def handle() -> int:
        clock.advance(0.05)
        return 200

    limited = site([Shed(search), Rule(TokenBucket(store, "api", "1/second", burst=1), delay="1 hour")], handle)
    for _ in range(25):
        assert limited.request().status == 200
    assert search.latency == pytest.approx(0.05, rel=1e-3)
    assert search.in_flight == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_waits_for_its_turn_at_a_view_is_no_slow_one(
    store: Store, clock: ManualClock, is_async: bool
) -> None:
    search = AdaptiveLimit(store, "search")
    gates = AppGates(Gate([Shed(search)]))
    rules = rules_of([TokenBucket(store, "view", "1/second", burst=1)], {"delay": "1 hour"})
    request = WSGIRequest(wsgi_environ())
    for _ in range(25):
        visit = Visit()
        for limits in (None, rules):
            decided = gates.decide_async(request, visit, limits) if is_async else gates.decide(request, visit, limits)
            assert (asyncio.run(decided) if inspect.iscoroutine(decided) else decided) is None
        clock.advance(0.05)
        visit.cleanup.end(200)
    assert search.latency == pytest.approx(0.05, rel=1e-3)
