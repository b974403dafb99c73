"""Responses to denied requests: problem reports, custom answers, and the worked examples W25 and W26."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from web_requests import CLIENT, Kind, Site

from forebay import (
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock
from forebay.web import Answer, Denial, Request, Rule, everyone, problem_report

MakeSite = Callable[..., Site]
TYPES = "https://iana.org/assignments/http-problem-types#"


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=100, clock=clock)


def test_w25_denial_is_a_problem_report(site: MakeSite, store: Store, clock: ManualClock) -> None:
    """W25: a denial is a 429 with Retry-After and a JSON body of status and detail: the limit and its period."""
    limited = site([Rule(FixedWindow(store, "api", "2/minute"))])
    clock.set(61.5)
    assert [limited.request().status for _ in range(2)] == [200, 200]
    answer = limited.request()
    assert answer.status == 429
    assert answer["content-type"] == "application/problem+json"
    assert answer["retry-after"] == "59"
    assert answer["content-length"] == str(len(answer.body))
    assert answer.json["status"] == 429
    assert answer.json["title"] == "Too Many Requests"
    assert answer.json["type"] == TYPES + "quota-exceeded"
    assert answer.json["violated-policies"] == ["api"]
    assert answer.json["detail"] == "The limit is 2 requests per minute: ask again in 59 seconds."
    assert limited.handled == 2


def test_w26_shadow_ban_gets_a_success(site: MakeSite, store: Store) -> None:
    """W26: a known abuser gets a 200, and the handler does not run."""
    welcome = Answer(200, (("Content-Type", "text/plain"),), b"done")
    abusers = {"203.0.113.66"}
    limit = FixedWindow(store, "abusers", "1/day")
    limited = site([Rule(limit, cost=2, exempt=lambda request: request.peer not in abusers, answer=welcome)])
    honest, banned = limited.request(), limited.request(client="203.0.113.66")
    assert (honest.status, honest.body) == (banned.status, banned.body) == (200, b"done")
    assert limited.handled == 1


def test_shadow_ban_has_the_header_fields_of_a_success(site: MakeSite, store: Store) -> None:
    """No response, admitted or denied, reveals that the limit exists."""
    welcome = Answer(200, (("Content-Type", "text/plain"),), b"done")
    shadow, shown = FixedWindow(store, "shadow", "2/day"), FixedWindow(store, "shown", "99/day")
    limited = site([Rule(shadow, answer=welcome), Rule(shown)])
    answers = [limited.request() for _ in range(4)]
    assert limited.handled == 2
    for answer in answers:
        assert (answer.status, answer.body) == (200, b"done")
        assert "retry-after" not in answer
        assert "shadow" not in repr(answer)
        assert answer["ratelimit-policy"] == '"shown";q=99;w=86400'
        assert "ratelimit" in answer


@pytest.mark.parametrize(
    ("make", "allowance"),
    [
        (lambda s: FixedWindow(s, "x", "1/second"), "1 request per second"),
        (lambda s: FixedWindow(s, "x", "1000/hour"), "1000 requests per hour"),
        (lambda s: SlidingLog(s, "x", "5 per 10 seconds", keys=10), "5 requests per 10 seconds"),
        (lambda s: TokenBucket(s, "x", "3 per 1.5 seconds", burst=3), "3 requests per 1500 milliseconds"),
        (lambda s: LeakyBucket(s, "x", "7/day", 2), "7 requests per day"),
        (lambda s: MinInterval(s, "x", "2s"), "1 request per 2 seconds"),
        (lambda s: Concurrency(s, "x", 4), "4 requests at a time"),
    ],
)
def test_detail_states_the_limit_and_its_period(
    site: MakeSite, store: Store, make: Callable[[Store], Any], allowance: str
) -> None:
    answer = site([Rule(make(store), cost=1000_000)]).request()
    assert (
        answer.json["detail"] == f"The limit is {allowance}: this request costs more than that, so it is never allowed."
    )


def test_detail_writes_one_second_in_the_singular(site: MakeSite, store: Store) -> None:
    limited = site([Rule(FixedWindow(store, "x", "1/second"))])
    limited.request()
    assert limited.request().json["detail"].endswith("ask again in 1 second.")


@pytest.mark.parametrize(
    "name", ["a", 'quo"ted', "back\\slash", "caf\xe9", "\u20ac \U0001f600", "\n\t", " ", "\x7f", "a;b=c, d"]
)
def test_report_carries_any_limiter_name(site: MakeSite, store: Store, name: str) -> None:
    limited = site([Rule(FixedWindow(store, name, "1/minute"))], headers=("draft-10", "x-ratelimit"))
    allowed, denied = limited.request(), limited.request()
    assert (allowed.status, denied.status) == (200, 429)
    for answer in (allowed, denied):
        for field, value in answer.fields:
            assert value.isprintable(), field
            assert value.isascii(), field


def test_report_forbids_caching(site: MakeSite, store: Store) -> None:
    assert site([Rule(FixedWindow(store, "x", "1/minute"), cost=2)]).request()["cache-control"] == "no-store"


def test_denied_head_request_gets_no_body(site: MakeSite, store: Store) -> None:
    """If a server sent the body, the client would read it as the start of the connection's next response."""
    limited = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2)])
    if limited.kind == "wsgi":
        answer = limited.request(method="HEAD")
        assert (answer.status, answer.body) == (429, b"")
        assert int(answer["content-length"]) > 0


class TestStatuses:
    @pytest.mark.parametrize(("status", "kind"), [(429, "quota-exceeded"), (503, "temporary-reduced-capacity")])
    def test_rule_chooses_the_status(self, site: MakeSite, store: Store, status: int, kind: str) -> None:
        answer = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2, status=status)]).request()
        assert (answer.status, answer.json["status"], answer.json["type"]) == (status, status, TYPES + kind)

    def test_status_without_a_reason_phrase_is_sent(self, site: MakeSite, store: Store) -> None:
        answer = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2, status=499)]).request()
        assert (answer.status, answer.json["title"]) == (499, "Refused")

    @pytest.mark.parametrize(
        ("options", "status"),
        [({"key": everyone}, 503), ({}, 429), ({"key": everyone, "status": 429}, 429), ({"status": 503}, 503)],
    )
    def test_concurrency_shared_by_all_clients_denies_with_503(
        self, site: MakeSite, store: Store, options: Any, status: int
    ) -> None:
        held = Concurrency(store, "held", 1)
        with held.acquire("everyone"), held.acquire(CLIENT):
            assert site([Rule(held, **options)]).request().status == status

    def test_rate_shared_by_all_clients_denies_with_429(self, site: MakeSite, store: Store) -> None:
        limited = site([Rule(FixedWindow(store, "x", "1/minute"), key=everyone)])
        assert [limited.request().status for _ in range(2)] == [200, 429]


class TestCustomAnswers:
    def test_answer_of_a_rule_is_sent(self, site: MakeSite, store: Store) -> None:
        teapot = Answer(418, (("Content-Type", "text/plain"), ("X-Tea", "yes")), b"short and stout")
        answer = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2, answer=teapot)]).request()
        assert answer.status == 418
        assert answer.fields == [("content-type", "text/plain"), ("x-tea", "yes"), ("content-length", "15")]
        assert answer.body == b"short and stout"

    def test_answer_has_one_content_length(self, site: MakeSite, store: Store) -> None:
        own = Answer(429, (("Content-Type", "text/plain"), ("content-length", "2")), b"no")
        answer = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2, answer=own)]).request()
        assert answer["content-length"] == "2"

    def test_callable_answer_gets_the_request_and_the_denial(self, site: MakeSite, store: Store) -> None:
        calls: list[tuple[str, Denial]] = []

        def answer(request: Request, denial: Denial) -> Answer:
            calls.append((request.path, denial))
            return Answer(429, (("Content-Type", "text/html"), *denial.fields), b"<p>Later!</p>")

        rule = Rule(FixedWindow(store, "x", "1/minute"), answer=answer)
        limited = site([rule])
        limited.request("/a")
        denied = limited.request("/a")
        (path, denial), *_ = calls
        assert (denied.body, path, len(calls)) == (b"<p>Later!</p>", "/a", 1)
        assert denied["ratelimit"].startswith('"x";r=0;t=')
        assert denial.rule is rule
        assert denial.violated == ("x",)
        assert denial.decision is not None
        assert not denial.decision
        assert 0 < denial.decision.retry_after <= (denial.retry_after_s or 0)

    def test_callable_answer_extends_the_report(self, site: MakeSite, store: Store) -> None:
        def answer(request: Request, denial: Denial) -> Answer:
            report = problem_report(denial)
            return report._replace(headers=(*report.headers, ("X-More", "yes")))

        denied = site([Rule(FixedWindow(store, "x", "1/minute"), cost=2, answer=answer)]).request()
        assert (denied.status, denied["x-more"]) == (429, "yes")

    def test_binding_rule_gives_the_answer(self, site: MakeSite, store: Store) -> None:
        def answer(body: bytes) -> Answer:
            return Answer(429, (("Content-Type", "text/plain"),), body)

        limited = site(
            [
                Rule(FixedWindow(store, "short", "1/second"), answer=answer(b"short")),
                Rule(FixedWindow(store, "long", "1/day"), answer=answer(b"long")),
            ]
        )
        limited.request()
        assert limited.request().body == b"long"


@pytest.mark.parametrize("wrong", [None, (429, (), b""), "no"])
def test_callable_that_returns_another_type_is_an_error(site: MakeSite, store: Store, wrong: Any) -> None:
    limited = site([Rule(FixedWindow(store, "x", "1/day"), answer=lambda request, denial: wrong)])
    assert limited.request().status == 200
    with pytest.raises(InvalidLimiter, match=r"returned .*, not an Answer\(status, headers, body\)"):
        limited.request()


@pytest.mark.parametrize("others", [[], [{"charge_on": {200}}]])
def test_error_of_a_limiter_inside_a_key_function_is_raised(
    site: MakeSite, store: Store, others: list[dict[str, Any]]
) -> None:
    own = FixedWindow(store, "own", "1/day")
    rules = [Rule(FixedWindow(store, "x", "9/day"), key=lambda request: str(own.hit("key", 2)))]
    rules += [Rule(FixedWindow(store, "y", "9/day"), **options) for options in others]
    with pytest.raises(CostExceedsLimit, match="own"):
        site(rules).request()
