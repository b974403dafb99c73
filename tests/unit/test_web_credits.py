"""Rules of credits: what a client is told whose permits no time brings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import http_sf
import pytest
from web_requests import CLIENT, Answered, Kind, Site

from forebay import Credits, InvalidLimiter, LimitExceeded, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Answer, Denial, Request, Rule, refusal

MakeSite = Callable[..., Site]
STYLES = ("draft-10", "draft-06", "x-ratelimit")


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=100, clock=clock)


@pytest.fixture
def prepaid(store: Store) -> Credits:
    return Credits(store, "paid")


def items(answer: Answered, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """The values and parameters of a List whose members are Items."""
    found: Any = http_sf.parse(answer[name].encode(), tltype="list")
    return list(found)


def test_client_spends_what_was_added(site: MakeSite, prepaid: Credits) -> None:
    limited = site([Rule(prepaid, status=402)])
    assert limited.request().status == 402
    prepaid.add(CLIENT, 2)
    assert [limited.request().status for _ in range(3)] == [200, 200, 402]
    assert limited.handled == 2


def test_denial_states_what_is_left_and_no_time(site: MakeSite, prepaid: Credits) -> None:
    limited = site([Rule(prepaid, cost=3)])
    denied = limited.request()
    assert denied.status == 429
    assert "retry-after" not in denied
    assert denied.json["detail"] == "None of the prepaid permits are left, and this request needs more."
    assert denied.json["violated-policies"] == ["paid"]
    assert items(denied, "ratelimit") == [("paid", {"r": 0})]
    prepaid.add(CLIENT, 1)
    assert limited.request().json["detail"] == "1 of the prepaid permits is left, and this request needs more."
    prepaid.add(CLIENT, 1)
    assert b"Infinity" not in limited.request().body


def test_fields_report_what_is_left_and_no_quota(site: MakeSite, prepaid: Credits) -> None:
    prepaid.add(CLIENT, 5)
    answer = site([Rule(prepaid)]).request()
    assert items(answer, "ratelimit") == [("paid", {"r": 4})]
    assert "ratelimit-policy" not in answer


def test_fields_beside_a_limit_with_a_quota(site: MakeSite, store: Store, prepaid: Credits) -> None:
    prepaid.add(CLIENT, 5)
    limited = site([Rule(TokenBucket(store, "api", "10/minute")), Rule(prepaid)])
    answer = limited.request()
    assert items(answer, "ratelimit") == [("api", {"r": 9, "t": 6}), ("paid", {"r": 4})]
    assert items(answer, "ratelimit-policy") == [("api", {"q": 10, "w": 60})]


@pytest.mark.parametrize(("style", "prefix"), [("draft-06", "ratelimit"), ("x-ratelimit", "x-ratelimit")])
def test_older_fields_have_no_limit_and_no_reset(
    site: MakeSite, store: Store, prepaid: Credits, style: str, prefix: str
) -> None:
    prepaid.add(CLIENT, 2)
    limited = site([Rule(TokenBucket(store, "api", "10/minute")), Rule(prepaid)], headers=style)
    for _ in range(3):
        answer = limited.request()
    assert answer.status == 429
    assert answer[f"{prefix}-remaining"] == "0"
    assert f"{prefix}-limit" not in answer
    assert f"{prefix}-reset" not in answer


@pytest.mark.parametrize("style", STYLES)
def test_only_rule_of_credits_sends_no_empty_field(site: MakeSite, prepaid: Credits, style: str) -> None:
    prepaid.add(CLIENT, 1)
    limited = site([Rule(prepaid)], headers=style)
    for answer in (limited.request(), limited.request()):
        assert all(value for _, value in answer.fields)
        assert "ratelimit-policy" not in answer


def test_charge_of_a_failed_response_comes_back(prepaid: Credits) -> None:
    limited = Site("wsgi", [Rule(prepaid, charge_on={200})], {}, lambda: 500)
    prepaid.add(CLIENT, 1)
    assert [limited.request().status for _ in range(3)] == [500, 500, 500]
    assert prepaid.peek(CLIENT, 0).remaining == 1


def test_answer_may_offer_a_top_up(site: MakeSite, prepaid: Credits) -> None:
    def top_up(request: Request, denial: Denial) -> Answer:
        assert denial.retry_after_s is None
        assert denial.decision is not None
        body = b"%d left" % denial.decision.remaining
        return Answer(402, (("Content-Type", "text/plain"), ("Location", "/top-up")), body)

    answer = site([Rule(prepaid, answer=top_up, status=402)]).request()
    assert (answer.status, answer["location"], answer.body) == (402, "/top-up", b"0 left")


def test_credits_beside_a_bucket_bind_a_denial(site: MakeSite, store: Store, prepaid: Credits) -> None:
    bucket = TokenBucket(store, "api", "1/minute")
    limited = site([Rule(bucket), Rule(prepaid, status=402)])
    assert bucket.allow(CLIENT)
    denied = limited.request()
    assert (denied.status, "retry-after" in denied) == (402, False)
    prepaid.add(CLIENT, 1)
    denied = limited.request()
    assert (denied.status, denied["retry-after"]) == (429, "60")


def test_rule_with_a_delay_is_refused(prepaid: Credits) -> None:
    with pytest.raises(InvalidLimiter, match="can't delay requests"):
        Rule(prepaid, delay="2s")


def test_rule_in_the_shadow_is_refused(store: Store, prepaid: Credits) -> None:
    with pytest.raises(InvalidLimiter, match="would spend what keys have paid for"):
        Rule(prepaid, shadow=True)
    bucket = TokenBucket(store, "api", "1/minute")
    with pytest.raises(InvalidLimiter, match="would spend what keys have paid for"):
        Rule(bucket, tiers={"paid": prepaid}, tier=lambda request: "paid", shadow=True)


def test_refusal_has_no_time(prepaid: Credits, store: Store) -> None:
    prepaid.add("ada", 2)
    limited = TokenBucket(store, "api", "1/minute", burst=1)
    assert limited.allow("ada")
    for results in ([prepaid.hit("ada", 3)], [limited.hit("ada"), prepaid.hit("ada", 3)], [prepaid.exceeded("ada", 3)]):
        answer = refusal(*results)
        assert answer.status == 429
        assert "Retry-After" not in dict(answer.headers)
        assert b"2 of the prepaid permits are left" in answer.body
    assert math.isinf(LimitExceeded("x", 1, math.inf).retry_after)
