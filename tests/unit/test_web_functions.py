"""The functions that rules are given: awaited under ASGI, refused elsewhere, and held to what they are to return."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from web_requests import CLIENT, Answered, Kind, Site, ask_asgi, ask_wsgi

from forebay import Concurrency, FixedWindow, InvalidCost, InvalidKey, InvalidLimiter, SlidingWindow, Store
from forebay.testing import ManualClock
from forebay.web import Answer, ClientAddress, Gate, Rule, everyone, header, user
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
    """The same as a coroutine function, which really waits."""

    async def coroutine(about: Any) -> Any:
        await asyncio.sleep(0)
        return function(about)

    return coroutine


class Called:
    """An object that is called like a coroutine function."""

    async def __call__(self, about: Any) -> Any:
        await asyncio.sleep(0)
        return about.header("X-Who")


ROOT = [("X-Who", "root")]


class TestAwaited:
    def ask(self, rules: Any, times: int = 5, **options: Any) -> list[int]:
        handle = options.pop("handle", lambda: 200)
        site = Site("asgi", rules, {"client": options.pop("client", None)}, handle)
        return [site.ask(**options).status for _ in range(times)]

    @pytest.mark.parametrize("path", [None, "/*"])
    def test_exempt(self, limit: FixedWindow, path: str | None) -> None:
        rule = Rule(limit, exempt=later(lambda request: request.header("X-Who") == "root"), path=path)
        assert self.ask([rule]) == [200, 200, 200, 429, 429]
        assert self.ask([rule], fields=ROOT) == [200] * 5

    def test_async_exempt_is_not_awaited_if_the_path_does_not_match(self, limit: FixedWindow) -> None:
        async def fail(request: Any) -> bool:
            raise AssertionError("nobody is to be asked")

        assert self.ask([Rule(limit, exempt=fail, path="/other")]) == [200] * 5

    @pytest.mark.parametrize("make", [lambda: Called(), lambda: later(lambda request: request.header("X-Who"))])
    def test_key(self, limit: FixedWindow, make: Any) -> None:
        assert self.ask([Rule(limit, key=make())], fields=ROOT) == [200, 200, 200, 429, 429]
        assert (left(limit, "root"), left(limit)) == (0, 3)

    def test_key_by_a_partial_function(self, limit: FixedWindow) -> None:
        async def key(prefix: str, request: Any) -> str:
            return prefix + request.header("X-Who")

        assert self.ask([Rule(limit, key=functools.partial(key, "my "))], times=1, fields=ROOT) == [200]
        assert left(limit, "my root") == 2

    def test_async_client_is_awaited_once_for_several_rules(self, store: Store, limit: FixedWindow) -> None:
        asked = []
        other = FixedWindow(store, "other", "2/hour")
        client = later(lambda request: asked.append(request) or ("a", "b"))
        assert self.ask([Rule(limit), Rule(other)], client=client) == [200, 200, 429, 429, 429]
        assert len(asked) == 5
        assert left(limit, ("a", "b")) == 1

    def test_cost(self, store: Store, limit: FixedWindow) -> None:
        other = FixedWindow(store, "other", "9/hour")
        assert self.ask([Rule(limit, cost=later(lambda request: 2)), Rule(other, key=everyone)]) == [200] + [429] * 4
        assert (left(limit), left(other, "everyone")) == (1, 8)

    def test_async_cost_of_held_permits_is_awaited(self, store: Store) -> None:
        slots = Concurrency(store, "slots", 2)
        rule = Rule(slots, cost=later(lambda request: 3 if request.header("X-Who") else 2), key=later(lambda _: "k"))
        assert self.ask([rule], times=2) == [200, 200]
        assert self.ask([rule], times=1, fields=ROOT) == [429]
        assert left(slots, "k") == 2

    def test_async_otherwise_is_awaited(self, limit: FixedWindow) -> None:
        for ready_made in (header("X-Key", otherwise=Called()), user(otherwise=Called())):
            assert self.ask([Rule(limit, key=ready_made)], times=1, fields=ROOT) == [200]
        assert left(limit, "root") == 1
        assert self.ask([Rule(limit, key=header("X-Who", otherwise=Called()))], times=1, fields=ROOT) == [200]
        assert left(limit, ("header", "x-who", "root")) == 2

    def test_charge_on(self, limit: FixedWindow) -> None:
        statuses = iter([200, 401, 200, 401, 401, 200])
        rule = Rule(limit, charge_on=later(lambda status: status == 401))
        assert self.ask([rule], times=6, handle=lambda: next(statuses)) == [200, 401, 200, 401, 401, 429]
        assert left(limit) == 0

    @pytest.mark.parametrize("said", [ValueError("nobody knows"), None, "yes"])
    def test_charge_on_that_fails_charges(
        self, limit: FixedWindow, said: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def charge_on(status: int) -> Any:
            if isinstance(said, Exception):
                raise said
            return said

        with caplog.at_level(logging.ERROR, "forebay.web"):
            assert self.ask([Rule(limit, charge_on=charge_on)], times=4) == [200, 200, 200, 429]
        assert "stays charged" in caplog.records[0].message
        assert "'limit'" in caplog.records[0].message

    def test_with_partition_keys(self, limit: FixedWindow) -> None:
        site = Site("asgi", [Rule(limit, key=Called())], {"partition_keys": True})
        answers = [site.ask(fields=ROOT) for _ in range(4)]
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

    def test_async_answer_is_refused(self, limit: FixedWindow) -> None:
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
    def test_statuses(self, limit: FixedWindow, statuses: Any) -> None:
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
    def test_functions_that_would_fail_at_a_request_are_refused_at_start(
        self, limit: FixedWindow, options: Any, message: str
    ) -> None:
        with pytest.raises(InvalidLimiter, match=message):
            Rule(limit, **options)

    @pytest.mark.parametrize("rules", ["", b"", {}, {"api": 1}])
    def test_empty_rules_of_a_wrong_type_are_refused(self, rules: Any) -> None:
        with pytest.raises(InvalidLimiter, match="rules are of Rule and BodyLimit, in a list"):
            Gate(rules)

    def test_wrong_styles_of_fields_are_refused(self, limit: FixedWindow) -> None:
        nothing: Any = {}
        with pytest.raises(InvalidLimiter, match="headers is the name of a style or several"):
            Gate([Rule(limit)], headers=nothing)

    @pytest.mark.parametrize("options", [{"client": ClientAddress}, {"partition_keys": "no"}, {"partition_keys": 1}])
    def test_wrong_options_of_a_gate_are_refused(self, limit: FixedWindow, options: Any) -> None:
        with pytest.raises(InvalidLimiter, match=next(iter(options))):
            Gate([Rule(limit)], **options)

    @pytest.mark.parametrize("otherwise", [None, "everyone", ClientAddress, lambda: "k"])
    def test_wrong_otherwise_is_refused(self, otherwise: Any) -> None:
        for make in (user, functools.partial(header, "X-Key")):
            with pytest.raises(InvalidLimiter, match="otherwise is a key function"):
                make(otherwise=otherwise)


async def coroutine(about: Any) -> bool:
    return True


class TestRefusedAtARequest:
    """Whatever else a function says might mean the one or the other."""

    @pytest.mark.parametrize("said", [None, 0, 1, "", "no", b"", 1.0, [], "a coroutine"])
    def test_exempt(self, site: MakeSite, limit: FixedWindow, said: Any) -> None:
        rule = Rule(limit, exempt=lambda request: coroutine(request) if said == "a coroutine" else said)
        with pytest.raises(
            InvalidLimiter, match=r"exempt of the rule of limiter 'limit' returned .*, not True or False"
        ):
            site([rule]).ask()
        assert left(limit) == 3

    def test_coroutine_returned_by_a_plain_function_is_an_error(self, site: MakeSite, limit: FixedWindow) -> None:
        rule = Rule(limit, key=lambda request: coroutine(request))
        with pytest.raises(InvalidKey, match=r"returned an awaitable \(only async def functions are awaited, "):
            site([rule]).ask()

    @pytest.mark.parametrize("said", [None, 0, 1, "no", "a coroutine"])
    def test_charge_on(self, site: MakeSite, limit: FixedWindow, said: Any) -> None:
        rule = Rule(limit, charge_on=lambda status: coroutine(status) if said == "a coroutine" else said)
        with pytest.raises(
            InvalidLimiter, match=r"charge_on of the rule of limiter 'limit' returned .*, not True or False"
        ):
            site([rule]).ask()
        assert left(limit) == 2

    @pytest.mark.parametrize("charge_on", [None, {401}])
    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("said", [None, 1.5, True, ["a", "b"], ["a"], {"a": 1}, ("a", None), "a coroutine"])
    def test_key(
        self, site: MakeSite, store: Store, limit: FixedWindow, several: bool, said: Any, charge_on: Any
    ) -> None:
        def key(request: Any) -> Any:
            return coroutine(request) if said == "a coroutine" else said

        more = [Rule(FixedWindow(store, "other", "5/hour"), key=key)] if several else []
        with pytest.raises(InvalidKey, match=r"key of the rule of limiter '\w+' returned .*, which is no key"):
            site([Rule(limit, key=key, charge_on=charge_on), *more]).ask()
        assert store.stats().live_keys == 0

    @pytest.mark.parametrize("charge_on", [None, {401}])
    @pytest.mark.parametrize("said", [None, 1.0, True, "1", -1, [1], "a coroutine"])
    def test_cost(self, site: MakeSite, store: Store, limit: FixedWindow, said: Any, charge_on: Any) -> None:
        rule = Rule(
            limit, cost=lambda request: coroutine(request) if said == "a coroutine" else said, charge_on=charge_on
        )
        other = Rule(SlidingWindow(store, "other", "5/hour"))
        for rules in ([rule], [rule, other]):
            with pytest.raises(InvalidCost, match=r"cost of the rule of limiter 'limit'"):
                site(rules).ask()
        assert left(limit) == 3

    def test_answer_that_cannot_be_sent_is_refused(self, site: MakeSite, limit: FixedWindow) -> None:
        asked = site([Rule(limit, cost=3, answer=lambda request, denial: Answer(429, body="no"))])  # type: ignore[arg-type]
        assert asked.ask().status == 200
        with pytest.raises(InvalidLimiter, match="an Answer has a body of bytes"):
            asked.ask()


def test_one_key_of_several_parts_is_one_key_for_several_rules(site: MakeSite, store: Store) -> None:
    one, two = FixedWindow(store, "one", "2/hour"), FixedWindow(store, "two", "5/hour")
    asked = site([Rule(one), Rule(two)], client=lambda request: ("user", "ada"))
    assert [asked.ask().status for _ in range(3)] == [200, 200, 429]
    assert (left(one, ("user", "ada")), left(two, ("user", "ada"))) == (0, 3)


@pytest.mark.parametrize("number", [17, 40])
def test_more_rules_than_one_all_of_takes_are_charged_together(site: MakeSite, store: Store, number: int) -> None:
    limits = [FixedWindow(store, f"limit {i}", "9/hour") for i in range(number)]
    scarce = FixedWindow(store, "scarce", "2/hour")
    for paths in (None, "/*"):
        for limit in (*limits, scarce):
            limit.reset(CLIENT)
        asked = site([*[Rule(limit, path=paths) for limit in limits], Rule(scarce, path=paths)])
        answers = [asked.ask() for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 429, 429]
        assert answers[0]["RateLimit"].count("r=") == number + 1
        assert answers[2].json["violated-policies"] == ["scarce"]
        # All or none.
        assert {left(limit) for limit in limits} == {7}
        # Whichever denies, among those that are asked one by one as well.
        limits[0].hit(CLIENT, 7)
        scarce.reset(CLIENT)
        assert asked.ask().json["violated-policies"] == ["limit 0"]
        assert [left(limit) for limit in (*limits[1:], scarce)] == [7] * (number - 1) + [2]


def test_fields_of_more_rules_than_one_all_of_takes_name_their_limits(site: MakeSite, store: Store) -> None:
    """The rules that exceed it are reserved before, and their decisions come last."""
    asked = site([Rule(FixedWindow(store, f"limit {i}", f"{i + 2}/hour")) for i in range(20)])
    remaining = re.findall(r'"limit (\d+)";r=(\d+)', asked.ask()["RateLimit"])
    assert {int(i): int(left) for i, left in remaining} == {i: i + 1 for i in range(20)}


class TestNoRoom:
    """Of a key for which the store has no room, nobody has counted a request."""

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
    def test_full_store_is_503_whatever_the_rule_answers(
        self, site: MakeSite, crowded: tuple[Store, FixedWindow, str], options: Any, more: bool
    ) -> None:
        store, limit, newcomer = crowded
        other = [Rule(FixedWindow(store, "other", "9/hour"), key=lambda request: "one")] if more else []
        store_had = left(FixedWindow(store, "other", "9/hour"), "one")
        asked = site([Rule(limit, key=lambda request: request.header("X-Key"), **options), *other])
        self.check(asked.ask(fields=[("X-Key", newcomer)]))
        assert left(FixedWindow(store, "other", "9/hour"), "one") == store_had

    def test_full_store_of_a_concurrency_is_503(self, site: MakeSite, clock: ManualClock) -> None:
        store = Store.private(keys=1, on_full="deny", clock=clock)
        slots = Concurrency(store, "slots", 1, keys=1)
        passed = [bool(slots.acquire(n)) for n in range(3000)]
        asked = site([Rule(slots, key=lambda request: passed.index(False))])
        self.check(asked.ask())

    def test_denial_beside_a_full_store_is_reported(
        self, site: MakeSite, crowded: tuple[Store, FixedWindow, str]
    ) -> None:
        store, limit, newcomer = crowded
        known = "192.0.2.0"
        assert not limit.hit(known)
        both = [
            Rule(limit, key=lambda request: known),
            Rule(FixedWindow(store, "other", "1/minute"), key=lambda request: newcomer),
        ]
        assert site(both).ask().status == 429


class TestNoAddress:
    @pytest.mark.parametrize(
        "options", [{}, {"charge_on": {401}}, {"status": 418, "answer": Answer(200)}, {"path": "/*"}]
    )
    @pytest.mark.parametrize("kind", ["wsgi", "asgi"])
    def test_missing_address_is_reported_to_client_and_operator(
        self,
        kind: Kind,
        limit: FixedWindow,
        options: Any,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("forebay.web.denials._logged_s", {})
        site = Site(kind, [Rule(limit, **options)])
        ask = ask_wsgi if kind == "wsgi" else ask_asgi
        with caplog.at_level(logging.ERROR, "forebay.web"):
            answers = [ask(site.app, client=None) for _ in range(3)]
        assert [answer.status for answer in answers] == [500] * 3
        assert site.handled == 0
        assert "doesn't report the client's address" in answers[0].json["detail"]
        assert "Retry-After" not in answers[0]
        # Once a minute.
        [record] = caplog.records
        assert 'ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")' in record.message

    def test_missing_address_is_reported_for_an_async_client(self, limit: FixedWindow) -> None:
        address = ClientAddress()
        site = Site("asgi", [Rule(limit)], {"client": later(address)})
        assert ask_asgi(site.app, client=None).status == 500
        assert ask_asgi(site.app).status == 200
