"""Functions of rules: awaited under ASGI, refused elsewhere, and checked for the type that they return."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from limiter_makers import OF_A_HUNDRED
from web_requests import CLIENT, Answered, Kind, Site, call_asgi, call_wsgi

from forebay import Concurrency, FixedWindow, InvalidCost, InvalidKey, InvalidLimiter, MinInterval, SlidingWindow, Store
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import Answer, ClientAddress, Gate, Rule, everyone, header, user
from forebay.web.denials import Denials
from forebay.web.rules import check_event_loop

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param

    def make(rules: Any, handle: Callable[[], int] = lambda: 200, **options: Any) -> Site:
        return Site(kind, rules, options, handle)

    return make


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=1000, clock=clock)


@pytest.fixture
def limit(store: Store) -> FixedWindow:
    return FixedWindow(store, "limit", "3/hour")


def left(limiter: Any, key: Any = CLIENT) -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


def later(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a function in a coroutine function that yields to the event loop."""

    async def coroutine(about: Any) -> Any:
        await asyncio.sleep(0)
        return function(about)

    return coroutine


class Called:
    """An object whose `__call__` is a coroutine function."""

    async def __call__(self, about: Any) -> Any:
        await asyncio.sleep(0)
        return about.header("X-Who")


ROOT = [("X-Who", "root")]


class TestAwaited:
    def request(self, rules: Any, times: int = 5, **options: Any) -> list[int]:
        handle = options.pop("handle", lambda: 200)
        site = Site("asgi", rules, {"client": options.pop("client", None)}, handle)
        return [site.request(**options).status for _ in range(times)]

    @pytest.mark.parametrize("path", [None, "/*"])
    def test_async_exempt_is_awaited(self, limit: FixedWindow, path: str | None) -> None:
        rule = Rule(limit, exempt=later(lambda request: request.header("X-Who") == "root"), path=path)
        assert self.request([rule]) == [200, 200, 200, 429, 429]
        assert self.request([rule], fields=ROOT) == [200] * 5

    def test_async_exempt_is_not_awaited_if_the_path_does_not_match(self, limit: FixedWindow) -> None:
        async def fail(request: Any) -> bool:
            raise AssertionError("exempt was called for another path")

        assert self.request([Rule(limit, exempt=fail, path="/other")]) == [200] * 5

    @pytest.mark.parametrize("make", [lambda: Called(), lambda: later(lambda request: request.header("X-Who"))])
    def test_async_key_is_awaited(self, limit: FixedWindow, make: Any) -> None:
        assert self.request([Rule(limit, key=make())], fields=ROOT) == [200, 200, 200, 429, 429]
        assert (left(limit, "root"), left(limit)) == (0, 3)

    def test_async_key_in_a_partial_is_awaited(self, limit: FixedWindow) -> None:
        async def key(prefix: str, request: Any) -> str:
            return prefix + request.header("X-Who")

        assert self.request([Rule(limit, key=functools.partial(key, "my "))], times=1, fields=ROOT) == [200]
        assert left(limit, "my root") == 2

    def test_async_object_in_a_partial_is_awaited(self, limit: FixedWindow) -> None:
        assert self.request([Rule(limit, key=functools.partial(Called()))], times=1, fields=ROOT) == [200]
        assert left(limit, "root") == 2

    def test_async_client_is_awaited_once_for_several_rules(self, store: Store, limit: FixedWindow) -> None:
        requests = []
        other = FixedWindow(store, "other", "2/hour")
        client = later(lambda request: requests.append(request) or ("a", "b"))
        assert self.request([Rule(limit), Rule(other)], client=client) == [200, 200, 429, 429, 429]
        assert len(requests) == 5
        assert left(limit, ("a", "b")) == 1

    def test_async_cost_is_awaited(self, store: Store, limit: FixedWindow) -> None:
        other = FixedWindow(store, "other", "9/hour")
        assert (
            self.request([Rule(limit, cost=later(lambda request: 2)), Rule(other, key=everyone)]) == [200] + [429] * 4
        )
        assert (left(limit), left(other, "everyone")) == (1, 8)

    def test_async_cost_of_a_concurrency_is_awaited(self, store: Store) -> None:
        slots = Concurrency(store, "slots", 2)
        rule = Rule(slots, cost=later(lambda request: 3 if request.header("X-Who") else 2), key=later(lambda _: "k"))
        assert self.request([rule], times=2) == [200, 200]
        assert self.request([rule], times=1, fields=ROOT) == [429]
        assert left(slots, "k") == 2

    def test_async_otherwise_is_awaited(self, limit: FixedWindow) -> None:
        for ready_made in (header("X-Key", otherwise=Called()), user(otherwise=Called())):
            assert self.request([Rule(limit, key=ready_made)], times=1, fields=ROOT) == [200]
        assert left(limit, "root") == 1
        assert self.request([Rule(limit, key=header("X-Who", otherwise=Called()))], times=1, fields=ROOT) == [200]
        assert left(limit, ("header", "x-who", "root")) == 2

    def test_async_charge_on_is_awaited(self, limit: FixedWindow) -> None:
        statuses = iter([200, 401, 200, 401, 401, 200])
        rule = Rule(limit, charge_on=later(lambda status: status == 401))
        assert self.request([rule], times=6, handle=lambda: next(statuses)) == [200, 401, 200, 401, 401, 429]
        assert left(limit) == 0

    @pytest.mark.parametrize("returned", [ValueError("unknown"), None, "yes"])
    def test_async_charge_on_that_fails_keeps_the_charge(
        self, limit: FixedWindow, returned: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def charge_on(status: int) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

        with caplog.at_level(logging.ERROR, "forebay.web"):
            assert self.request([Rule(limit, charge_on=charge_on)], times=4) == [200, 200, 200, 429]
        assert "stays charged" in caplog.records[0].message
        assert "'limit'" in caplog.records[0].message

    def test_async_key_gives_one_partition_key(self, limit: FixedWindow) -> None:
        site = Site("asgi", [Rule(limit, key=Called())], {"partition_keys": True})
        answers = [site.request(fields=ROOT) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert len({answer["RateLimit"].partition("pk=")[2] for answer in answers}) == 1


AWAITED: list[dict[str, Any]] = [{what: later(bool)} for what in ("key", "cost", "exempt", "charge_on")]
AWAITED.append({"key": header("X-Key", otherwise=Called())})


class TestRefusedAtStart:
    @pytest.mark.parametrize("options", AWAITED)
    def test_coroutine_functions_are_refused_without_an_event_loop(self, limit: FixedWindow, options: Any) -> None:
        rule = Rule(limit, **options)
        with pytest.raises(InvalidLimiter, match="has to be awaited, and this application has no event loop"):
            Site("wsgi", [rule])
        with pytest.raises(InvalidLimiter, match="has to be awaited"):
            check_event_loop([rule], in_loop=False)
        check_event_loop([rule], in_loop=True)
        check_event_loop([rule], in_loop=None)

    def test_async_client_is_refused_without_an_event_loop(self, limit: FixedWindow) -> None:
        with pytest.raises(InvalidLimiter, match="has to be awaited"):
            Site("wsgi", [Rule(limit)], {"client": Called()})

    def test_async_answer_is_refused_at_start(self, limit: FixedWindow) -> None:
        async def answer(request: Any, denial: Any) -> Answer:
            return Answer(429)

        wrong: Any = answer
        with pytest.raises(InvalidLimiter, match="answer is a plain function"):
            Rule(limit, answer=wrong)

    @pytest.mark.parametrize(
        "statuses",
        [
            *("401", b"401", {"401"}, ["401", 403], {401.0}, {True}, {4010}, {None}, {401: False}, 401),
            *(set(), (), range(0), range(600, 700), range(10**9, 10**9 + 5), HTTPStatus),
        ],
    )
    def test_statuses_that_charge_no_request_are_refused(self, limit: FixedWindow, statuses: Any) -> None:
        with pytest.raises(InvalidLimiter, match="charge_on"):
            Rule(limit, charge_on=statuses)

    @pytest.mark.parametrize("statuses", [{401, HTTPStatus.FORBIDDEN}, [401], range(401, 500, 100), {499}])
    def test_valid_statuses_are_accepted(self, limit: FixedWindow, statuses: Any) -> None:
        assert Rule(limit, charge_on=statuses).stays_charged(next(iter(statuses)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"exempt": bool}, "exempt is a callable that takes a request, and <class 'bool'> is a class"),
            ({"cost": int}, "cost .* is a class"),
            ({"key": ClientAddress}, "key .* is a class"),
            ({"charge_on": bool}, "charge_on .* is a class"),
            ({"exempt": lambda: True}, "exempt .* can't be called so: too many positional"),
            ({"key": user}, "key .* can't be called so"),
            ({"key": header}, "key .* can't be called so"),
            ({"cost": lambda request, more: 1}, "cost .* can't be called so: missing"),
            ({"charge_on": lambda: True}, "charge_on .* can't be called so"),
            ({"answer": lambda request: Answer(429)}, "answer .* can't be called so"),
            ({"answer": Answer("429")}, "an Answer has a status"),  # type: ignore[arg-type]
            ({"answer": Answer(True)}, "an Answer has a status"),
            ({"answer": Answer(429, {"A": "b"})}, "an Answer has headers"),  # type: ignore[arg-type]
            ({"answer": Answer(429, (("A", 1),))}, "an Answer has headers"),  # type: ignore[arg-type]
            ({"answer": Answer(429, (("A b", "c"),))}, "an Answer has headers"),
            ({"answer": Answer(429, (("A", "b\r\nC: d"),))}, "an Answer has headers"),
            ({"answer": Answer(429, (("A", "5 \u20ac"),))}, "an Answer has headers"),
            ({"answer": Answer(429, body="no")}, "an Answer has a body of bytes"),  # type: ignore[arg-type]
            ({"methods": {"POST": True}}, "methods is text or several texts"),
            ({"path": {"/a": 1}}, "path is text or several texts"),
        ],
    )
    def test_values_that_would_fail_at_a_request_are_refused(
        self, limit: FixedWindow, options: Any, message: str
    ) -> None:
        with pytest.raises(InvalidLimiter, match=message):
            Rule(limit, **options)

    @pytest.mark.parametrize("rules", ["", b"", {}, {"api": 1}])
    def test_empty_rules_of_another_type_are_refused(self, rules: Any) -> None:
        with pytest.raises(InvalidLimiter, match="rules are of Rule, Deny, Shed, BodyLimit and ByteRate, in a list"):
            Gate(rules)

    def test_unknown_header_styles_are_refused(self, limit: FixedWindow) -> None:
        nothing: Any = {}
        with pytest.raises(InvalidLimiter, match="headers is the name of a style or several"):
            Gate([Rule(limit)], headers=nothing)

    @pytest.mark.parametrize("options", [{"client": ClientAddress}, {"partition_keys": "no"}, {"partition_keys": 1}])
    def test_invalid_options_of_a_gate_are_refused(self, limit: FixedWindow, options: Any) -> None:
        with pytest.raises(InvalidLimiter, match=next(iter(options))):
            Gate([Rule(limit)], **options)

    @pytest.mark.parametrize("otherwise", [None, "everyone", ClientAddress, lambda: "k"])
    def test_invalid_otherwise_is_refused(self, otherwise: Any) -> None:
        for make in (user, functools.partial(header, "X-Key")):
            with pytest.raises(InvalidLimiter, match="otherwise is a key function"):
                make(otherwise=otherwise)


async def coroutine(about: Any) -> bool:
    return True


class TestRefusedAtARequest:
    """A function must return the exact type: another value is ambiguous."""

    @pytest.mark.parametrize("returned", [None, 0, 1, "", "no", b"", 1.0, [], "a coroutine"])
    def test_exempt_that_returns_no_bool_is_an_error(self, site: MakeSite, limit: FixedWindow, returned: Any) -> None:
        rule = Rule(limit, exempt=lambda request: coroutine(request) if returned == "a coroutine" else returned)
        with pytest.raises(
            InvalidLimiter, match=r"exempt of the rule of limiter 'limit' returned .*, not True or False"
        ):
            site([rule]).request()
        assert left(limit) == 3

    def test_coroutine_returned_by_a_plain_function_is_an_error(self, site: MakeSite, limit: FixedWindow) -> None:
        rule = Rule(limit, key=lambda request: coroutine(request))
        with pytest.raises(InvalidKey, match=r"returned an awaitable \(only async def functions are awaited, "):
            site([rule]).request()

    @pytest.mark.parametrize("returned", [None, 0, 1, "no", "a coroutine"])
    def test_charge_on_that_returns_no_bool_is_an_error(
        self, site: MakeSite, limit: FixedWindow, returned: Any
    ) -> None:
        rule = Rule(limit, charge_on=lambda status: coroutine(status) if returned == "a coroutine" else returned)
        with pytest.raises(
            InvalidLimiter, match=r"charge_on of the rule of limiter 'limit' returned .*, not True or False"
        ):
            site([rule]).request()
        assert left(limit) == 2

    @pytest.mark.parametrize("charge_on", [None, {401}])
    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("returned", [None, 1.5, True, ["a", "b"], ["a"], {"a": 1}, ("a", None), "a coroutine"])
    def test_key_that_returns_no_key_is_an_error(
        self, site: MakeSite, store: Store, limit: FixedWindow, several: bool, returned: Any, charge_on: Any
    ) -> None:
        def key(request: Any) -> Any:
            return coroutine(request) if returned == "a coroutine" else returned

        more = [Rule(FixedWindow(store, "other", "5/hour"), key=key)] if several else []
        with pytest.raises(InvalidKey, match=r"key of the rule of limiter '\w+' returned .*, which is no key"):
            site([Rule(limit, key=key, charge_on=charge_on), *more]).request()
        assert store.stats().live_keys == 0

    @pytest.mark.parametrize("charge_on", [None, {401}])
    @pytest.mark.parametrize("returned", [None, 1.0, True, "1", -1, [1], "a coroutine"])
    def test_cost_that_returns_no_whole_number_is_an_error(
        self, site: MakeSite, store: Store, limit: FixedWindow, returned: Any, charge_on: Any
    ) -> None:
        rule = Rule(
            limit,
            cost=lambda request: coroutine(request) if returned == "a coroutine" else returned,
            charge_on=charge_on,
        )
        other = Rule(SlidingWindow(store, "other", "5/hour"))
        for rules in ([rule], [rule, other]):
            with pytest.raises(InvalidCost, match=r"cost of the rule of limiter 'limit'"):
                site(rules).request()
        assert left(limit) == 3

    def test_answer_without_a_body_of_bytes_is_an_error(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=3, answer=lambda request, denial: Answer(429, body="no"))])  # type: ignore[arg-type]
        assert limited.request().status == 200
        with pytest.raises(InvalidLimiter, match="an Answer has a body of bytes"):
            limited.request()


def test_client_that_returns_a_tuple_gives_all_rules_one_key(site: MakeSite, store: Store) -> None:
    one, two = FixedWindow(store, "one", "2/hour"), FixedWindow(store, "two", "5/hour")
    limited = site([Rule(one), Rule(two)], client=lambda request: ("user", "ada"))
    assert [limited.request().status for _ in range(3)] == [200, 200, 429]
    assert (left(one, ("user", "ada")), left(two, ("user", "ada"))) == (0, 3)


@pytest.mark.parametrize("number", [17, 40])
def test_more_rules_than_an_all_of_holds_are_charged_all_or_none(site: MakeSite, store: Store, number: int) -> None:
    limits = [FixedWindow(store, f"limit {i}", "9/hour") for i in range(number)]
    scarce = FixedWindow(store, "scarce", "2/hour")
    for paths in (None, "/*"):
        for limit in (*limits, scarce):
            limit.reset(CLIENT)
        limited = site([*[Rule(limit, path=paths) for limit in limits], Rule(scarce, path=paths)])
        answers = [limited.request() for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 429, 429]
        assert answers[0]["RateLimit"].count("r=") == number + 1
        assert answers[2].json["violated-policies"] == ["scarce"]
        # Denied requests charged no rule.
        assert {left(limit) for limit in limits} == {7}
        # A rule beyond the capacity of the AllOf denies as well.
        limits[0].hit(CLIENT, 7)
        scarce.reset(CLIENT)
        assert limited.request().json["violated-policies"] == ["limit 0"]
        assert [left(limit) for limit in (*limits[1:], scarce)] == [7] * (number - 1) + [2]


def test_header_fields_of_more_rules_than_an_all_of_holds_name_their_limits(site: MakeSite, store: Store) -> None:
    """Rules beyond the capacity of the AllOf are reserved first, and their decisions come last."""
    limited = site([Rule(FixedWindow(store, f"limit {i}", f"{i + 2}/hour")) for i in range(20)])
    remaining = re.findall(r'"limit (\d+)";r=(\d+)', limited.request()["RateLimit"])
    assert {int(i): int(left) for i, left in remaining} == {i: i + 1 for i in range(20)}


EVERY_KIND: dict[str, Callable[[Store], Any]] = {
    **OF_A_HUNDRED,
    "stagger": lambda store: FixedWindow(store, "api", "100/hour", align="stagger"),
    "minimum interval": lambda store: MinInterval(store, "api", "1 hour"),
    "concurrency": lambda store: Concurrency(store, "api", 100, lease="1h", keys=64),
}


class TestNoRoom:
    """A full store cannot count a new key, so its requests get a 503."""

    @pytest.fixture
    def crowded(self, clock: ManualClock) -> tuple[Store, FixedWindow, str]:
        store = Store.private(keys=1, on_full="deny", clock=clock)
        limit = FixedWindow(store, "limit", "1/minute")
        passed = limit.allow_many([f"192.0.2.{n}" for n in range(5000)])
        return store, limit, f"192.0.2.{passed.index(False)}"

    def check(self, answer: Answered) -> None:
        assert answer.status == 503
        assert answer.json["title"] == "Service Unavailable"
        assert "no room to count another client" in answer.json["detail"]
        assert f"ask again in {answer['Retry-After']} second" in answer.json["detail"]
        assert answer["Content-Type"] == "application/problem+json"
        assert "RateLimit" not in answer

    @pytest.mark.parametrize("options", [{}, {"charge_on": {200}}, {"status": 418, "answer": Answer(200)}])
    @pytest.mark.parametrize("more", [False, True])
    def test_full_store_answers_503_for_every_kind_of_rule(
        self, site: MakeSite, crowded: tuple[Store, FixedWindow, str], options: Any, more: bool
    ) -> None:
        store, limit, newcomer = crowded
        other = [Rule(FixedWindow(store, "other", "9/hour"), key=lambda request: "one")] if more else []
        store_had = left(FixedWindow(store, "other", "9/hour"), "one")
        limited = site([Rule(limit, key=lambda request: request.header("X-Key"), **options), *other])
        self.check(limited.request(fields=[("X-Key", newcomer)]))
        assert left(FixedWindow(store, "other", "9/hour"), "one") == store_had

    def test_full_store_of_a_concurrency_answers_503(self, site: MakeSite, clock: ManualClock) -> None:
        store = Store.private(keys=1, on_full="deny", clock=clock)
        slots = Concurrency(store, "slots", 1, keys=1)
        passed = [bool(slots.acquire(n)) for n in range(3000)]
        limited = site([Rule(slots, key=lambda request: passed.index(False))])
        self.check(limited.request())

    @pytest.mark.parametrize("options", [{}, {"charge_on": {200}}])
    @pytest.mark.parametrize("kind", EVERY_KIND)
    def test_full_store_answers_503_for_every_limiter(
        self, site: MakeSite, clock: ManualClock, kind: str, options: Any
    ) -> None:
        if kind == "concurrency" and options:
            return  # a rule of a concurrency limit holds its permit until the end anyway
        # A minimum interval denies without being told.
        with Store.private(keys=1, on_full=None if kind == "minimum interval" else "deny", clock=clock) as store:
            limiter = EVERY_KIND[kind](store)
            newcomer = next(n for n in range(5000) if limiter.hit(n).full)
            assert limiter.hit(newcomer).reason == "no room"
            limited = site([Rule(limiter, key=lambda request: newcomer, **options)])
            self.check(limited.request())

    def test_denial_takes_precedence_over_a_full_store(
        self, site: MakeSite, crowded: tuple[Store, FixedWindow, str]
    ) -> None:
        store, limit, _ = crowded
        known = "192.0.2.0"
        assert not limit.hit(known)
        other = FixedWindow(store, "other", "1/minute")
        newcomer = next(n for n in range(5000) if other.hit(n).full)
        without_room = Rule(other, key=lambda request: newcomer)
        self.check(site([without_room]).request())
        answer = site([without_room, Rule(limit, key=lambda request: known)]).request()
        assert (answer.status, answer.json["violated-policies"]) == (429, ["limit"])


def test_denial_whose_permit_has_come_back_meanwhile_waits_a_second(limit: FixedWindow) -> None:
    rule = Rule(limit)
    denials = Denials([rule], rule, [], [], lambda request, rules: (), "503")
    request: Any = None
    denial = denials.by_decisions(request, [rule], [limit.peek(CLIENT)])
    assert denial.retry_after_s == 1


class TestNoAddress:
    @pytest.mark.parametrize(
        "options", [{}, {"charge_on": {401}}, {"status": 418, "answer": Answer(200)}, {"path": "/*"}]
    )
    @pytest.mark.parametrize("kind", ["wsgi", "asgi"])
    def test_missing_address_is_a_500_and_a_log_record(
        self,
        kind: Kind,
        limit: FixedWindow,
        options: Any,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("forebay.web.denials._log_turns", Seldom())
        site = Site(kind, [Rule(limit, **options)])
        call = call_wsgi if kind == "wsgi" else call_asgi
        with caplog.at_level(logging.ERROR, "forebay.web"):
            answers = [call(site.app, client=None) for _ in range(3)]
        assert [answer.status for answer in answers] == [500] * 3
        assert site.handled == 0
        assert "doesn't report the client's address" in answers[0].json["detail"]
        assert "Retry-After" not in answers[0]
        # Logged at most once a minute.
        [record] = caplog.records
        assert 'ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")' in record.message

    def test_missing_address_with_an_async_client_is_a_500(self, limit: FixedWindow) -> None:
        address = ClientAddress()
        site = Site("asgi", [Rule(limit)], {"client": later(address)})
        assert call_asgi(site.app, client=None).status == 500
        assert call_asgi(site.app).status == 200
