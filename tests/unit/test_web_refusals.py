"""``refusal``: the standard response from a decision or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forebay import Concurrency, CostExceedsLimit, LimitExceeded, MinInterval, Store, StoreUnavailable, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Answer, refusal

TYPES = "https://iana.org/assignments/http-problem-types#"


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def parts(answer: Answer) -> tuple[int, str | None, Any]:
    """The status, ``Retry-After``, and the report."""
    fields = dict(answer.headers)
    assert fields["Content-Type"] == "application/problem+json"
    assert fields["Cache-Control"] == "no-store"
    report = json.loads(answer.body)
    assert report["status"] == answer.status
    return answer.status, fields.get("Retry-After"), report


def test_a_denied_decision_is_a_429(store: Store) -> None:
    bucket = TokenBucket(store, "api", "2/minute")
    bucket.hit("k", 2)
    status, wait, report = parts(refusal(bucket.hit("k")))
    assert (status, wait, report["type"]) == (429, "30", TYPES + "quota-exceeded")
    assert report["detail"] == "The limit is 2: ask again in 30 seconds."


def test_of_several_results_the_longest_wait_counts(store: Store) -> None:
    bucket, slow = TokenBucket(store, "api", "1/second"), MinInterval(store, "slow", "1 hour")
    allowed = bucket.hit("k")
    slow.hit("k")
    status, wait, report = parts(refusal(allowed, bucket.hit("k"), slow.hit("k")))
    assert (status, wait, report["detail"]) == (429, "3600", "The limit is 1: ask again in 3600 seconds.")


def test_errors_of_limits_have_their_responses(store: Store) -> None:
    bucket, jobs = TokenBucket(store, "api", "2/minute"), Concurrency(store, "jobs", 1)
    with pytest.raises(CostExceedsLimit) as too_much:
        bucket.hit("k", 3)
    status, wait, report = parts(refusal(too_much.value))
    assert (status, wait) == (429, None)
    assert report["detail"] == "The limit is 2: this request costs more than that, so it is never allowed."
    with jobs.hold("k", timeout=0), pytest.raises(LimitExceeded) as held, jobs.hold("k", timeout=0):
        pass
    assert parts(refusal(held.value))[0] == 429
    status, wait, report = parts(refusal(bucket.hit("other", 2), bucket.hit("other"), StoreUnavailable("gone")))
    assert (status, wait, report["type"]) == (503, "1", TYPES + "temporary-reduced-capacity")
    assert "gone" not in report["detail"]


def test_a_full_store_is_a_503(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        full = next(one for one in (bucket.hit(number) for number in range(10_000)) if one.reason == "no room")
        status, wait, report = parts(refusal(full))
    assert (status, wait is not None) == (503, True)
    assert "no room" in report["detail"]


@pytest.mark.parametrize("results", [(), ("allowed",), ("allowed", "allowed")])
def test_what_denies_nothing_is_no_refusal(store: Store, results: tuple[str, ...]) -> None:
    decisions = [TokenBucket(store, "api", "2/minute").hit("k") for _ in results]
    with pytest.raises(ValueError, match=r"none of .* denies"):
        refusal(*decisions)


@pytest.mark.parametrize("result", [False, None, 429, ValueError("no"), "denied"])
def test_other_objects_are_no_results(result: Any) -> None:
    with pytest.raises(TypeError, match="takes decisions, and StoreUnavailable"):
        refusal(result)
