"""Header fields of responses, read with a parser of structured fields and compared with the limiter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import http_sf
import pytest
from web_requests import CLIENT, Answered, Kind, Site

from forebay import Concurrency, FixedWindow, InvalidLimiter, LeakyBucket, MinInterval, Store, TokenBucket
from forebay.testing import ManualClock
from forebay.web import Gate, Passage, Rule
from forebay.web.header_fields import Policy, header_writer
from forebay.web.native_requests import WSGIRequest

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param
    return lambda rules, **options: Site(kind, rules, options)


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=100, clock=clock)


def items(answer: Answered, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """The values and parameters of a List whose members are Items."""
    found: Any = http_sf.parse(answer[name].encode(), tltype="list")
    return list(found)


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (lambda s: FixedWindow(s, "x", "100/minute"), {"q": 100, "w": 60}),
        (lambda s: TokenBucket(s, "x", "100/minute", burst=20), {"q": 100, "w": 60}),
        (lambda s: FixedWindow(s, "x", "5 per 10 seconds"), {"q": 5, "w": 10}),
        (lambda s: FixedWindow(s, "x", "5 per 100 ms"), {"q": 50, "w": 1}),
        (lambda s: FixedWindow(s, "x", "5 per 1.5 seconds"), {"q": 5}),
        (lambda s: FixedWindow(s, "x", "1000000 per 1 ms"), {"q": 1_000_000_000, "w": 1}),
        (lambda s: TokenBucket(s, "x", "1099511627776/year", burst=1), {"q": 2**40, "w": 31_536_000}),
        (lambda s: LeakyBucket(s, "x", "7/day", 2), {"q": 7, "w": 86400}),
        (lambda s: MinInterval(s, "x", "2s"), {"q": 1, "w": 2}),
        (lambda s: Concurrency(s, "x", 4), {"q": 4, "qu": "concurrent-requests"}),
    ],
)
def test_policy_states_the_quota_and_the_window(
    site: MakeSite, store: Store, make: Callable[[Store], Any], policy: dict[str, Any]
) -> None:
    assert items(site([Rule(make(store))]).request(), "ratelimit-policy") == [("x", policy)]


def test_both_fields_have_an_item_for_every_limit(site: MakeSite, store: Store) -> None:
    fast, slow = FixedWindow(store, "fast", "10/minute"), FixedWindow(store, "slow", "99/day")
    booked, held = TokenBucket(store, "booked", "5/minute"), Concurrency(store, "held", 3)
    answer = site([Rule(held), Rule(booked, charge_on={200}), Rule(fast), Rule(slow, cost=9)]).request()
    assert dict(items(answer, "ratelimit-policy")) == {
        "fast": {"q": 10, "w": 60},
        "slow": {"q": 99, "w": 86400},
        "booked": {"q": 5, "w": 60},
        "held": {"q": 3, "qu": "concurrent-requests"},
    }
    members = dict(items(answer, "ratelimit"))
    assert {name: item["r"] for name, item in members.items()} == {"fast": 9, "slow": 90, "booked": 4}
    assert all(item["t"] > 0 for item in members.values())


def test_more_than_the_burst_remains_if_permits_were_added(site: MakeSite, store: Store) -> None:
    bucket = TokenBucket(store, "x", "5/minute")
    bucket.add(CLIENT, 20)
    answer = site([Rule(bucket)]).request()
    assert items(answer, "ratelimit-policy") == [("x", {"q": 5, "w": 60})]
    assert items(answer, "ratelimit") == [("x", {"r": 24})]
    older = site([Rule(bucket)], headers="draft-06").request()
    assert (older["ratelimit-remaining"], older["ratelimit-reset"]) == ("23", "0")


def test_denied_request_has_the_same_policies(site: MakeSite, store: Store) -> None:
    limited = site([Rule(FixedWindow(store, "a", "1/minute")), Rule(FixedWindow(store, "b", "9/minute"))])
    allowed, denied = limited.request(), limited.request()
    assert allowed["ratelimit-policy"] == denied["ratelimit-policy"]
    assert items(denied, "ratelimit") == [("a", {"r": 0, "t": int(denied["retry-after"])})]


@pytest.mark.parametrize(
    "name",
    ["a", 'quo"ted', "back\\slash", '\\"', "caf\xe9", "\u20ac \U0001f600", "\n\t", " ", "\x7f", 'a";r=9, "b', "x" * 48],
)
def test_any_two_names_stay_distinct_and_parse(site: MakeSite, store: Store, name: str) -> None:
    limited = site([Rule(FixedWindow(store, name, "1/minute"))])
    for answer in (limited.request(), limited.request()):
        ((policy, parameters),) = items(answer, "ratelimit-policy")
        assert parameters == {"q": 1, "w": 60}
        assert [item for item, _ in items(answer, "ratelimit")] == [policy]
        if answer.status == 429:
            assert answer.json["violated-policies"] == [policy]
        if name.isprintable() and name.isascii():
            assert policy == name


def test_ratelimit_field_has_the_remaining_permits_and_the_reset_time(
    site: MakeSite, store: Store, clock: ManualClock
) -> None:
    limited = site([Rule(TokenBucket(store, "x", "6/minute", burst=3))])
    seen = []
    for _ in range(4):
        seen.append(items(limited.request(), "ratelimit")[0][1])
        clock.advance(1)
    # One permit refills every ten seconds, and the first one was spent at 0.
    assert seen == [{"r": 2, "t": 10}, {"r": 1, "t": 9}, {"r": 0, "t": 8}, {"r": 0, "t": 7}]


def test_reset_time_of_a_denial_equals_retry_after(site: MakeSite, store: Store, clock: ManualClock) -> None:
    limited = site([Rule(FixedWindow(store, "x", "1/minute"))], headers=("draft-10", "x-ratelimit"))
    clock.set(120.001)
    limited.request()
    before = time.time()
    denied = limited.request()
    assert (denied["retry-after"], denied["ratelimit"]) == ("60", '"x";r=0;t=60')
    assert before + 60 <= int(denied["x-ratelimit-reset"]) <= time.time() + 61


class TestForerunners:
    def test_draft_06_writes_its_three_fields(self, site: MakeSite, store: Store) -> None:
        fast, slow = FixedWindow(store, "fast", "10/minute"), FixedWindow(store, "slow", "99/day")
        slow.hit(CLIENT, 95)
        answer = site([Rule(fast), Rule(slow), Rule(Concurrency(store, "held", 3))], headers="draft-06").request()
        assert http_sf.parse(answer["ratelimit-limit"].encode(), tltype="item") == (99, {})
        assert http_sf.parse(answer["ratelimit-remaining"].encode(), tltype="item") == (3, {})
        reset: Any = http_sf.parse(answer["ratelimit-reset"].encode(), tltype="item")
        assert 60 < reset[0] <= 86400
        policies = items(answer, "ratelimit-policy")
        assert (10, {"w": 60}) in policies
        assert (99, {"w": 86400}) in policies
        assert "ratelimit" not in answer

    def test_x_ratelimit_writes_its_three_fields(self, site: MakeSite, store: Store) -> None:
        before = time.time()
        answer = site([Rule(FixedWindow(store, "x", "10/minute"))], headers="x-ratelimit").request()
        assert (answer["x-ratelimit-limit"], answer["x-ratelimit-remaining"]) == ("10", "9")
        assert before < int(answer["x-ratelimit-reset"]) <= time.time() + 61
        assert "ratelimit" not in answer
        assert "ratelimit-policy" not in answer

    def test_empty_styles_write_no_fields(self, site: MakeSite, store: Store) -> None:
        limited = site([Rule(FixedWindow(store, "x", "1/minute"))], headers=())
        assert limited.request().fields == [("content-type", "text/plain")]
        denied = limited.request()
        assert "ratelimit" not in denied
        assert "retry-after" in denied

    def test_both_drafts_at_once_are_refused(self, store: Store) -> None:
        with pytest.raises(InvalidLimiter, match=r"draft-10.*draft-06"):
            Gate([Rule(FixedWindow(store, "x", "1/minute"))], headers=("draft-10", "draft-06"))

    @pytest.mark.parametrize("order", [("slow", "fast"), ("fast", "slow")])
    def test_longest_wait_of_several_denials_is_reported(
        self, site: MakeSite, store: Store, order: tuple[str, str]
    ) -> None:
        limits = {"slow": TokenBucket(store, "slow", "10/hour"), "fast": TokenBucket(store, "fast", "10/minute")}
        limits["slow"].hit(CLIENT, 8)
        limits["fast"].hit(CLIENT, 10)
        denied = site([Rule(limits[name], cost=5) for name in order], headers="draft-06").request()
        assert denied["ratelimit-reset"] == denied["retry-after"] == "1080"

    @pytest.mark.parametrize("headers", ["draft-06", "x-ratelimit"])
    def test_concurrency_has_no_remaining_permits_in_older_styles(
        self, site: MakeSite, store: Store, headers: str
    ) -> None:
        answer = site([Rule(Concurrency(store, "held", 3))], headers=headers).request()
        assert answer.status == 200
        assert "ratelimit-remaining" not in answer
        assert "x-ratelimit-remaining" not in answer


def test_partition_key_is_a_hash_equal_in_all_processes(name: str) -> None:
    """Key and limiter determine the hash, which reveals no part of the key."""
    with Store(name, keys=10) as store, Store(name, keys=10) as same:
        hashes = []
        for each in (store, same):
            rules = [Rule(FixedWindow(each, "hour", "5/hour")), Rule(FixedWindow(each, "day", "9/day"))]
            gate = Gate(rules, headers="draft-10", partition_keys=True)
            for address in ("192.0.2.1", "192.0.2.2"):
                passage = gate.enter(WSGIRequest({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": address}))
                assert isinstance(passage, Passage)
                fields = dict(passage.fields)
                items = http_sf.parse(fields["RateLimit"].encode(), tltype="list")
                hashes.append([parameters["pk"] for _, parameters in items])
                assert "192.0.2" not in fields["RateLimit"]
        assert hashes[:2] == hashes[2:]
        assert len({pk for pks in hashes[:2] for pk in pks}) == 4


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("partition_keys", [False, True])
def test_many_limits_with_long_names_are_not_truncated(
    site: MakeSite, store: Store, clock: ManualClock, count: int, partition_keys: bool
) -> None:
    names = [f"{n:02}" + "\\" * 20 for n in range(count)]
    limits = [10 ** (n + 1) if n < 11 else 2**40 for n in range(count)]
    limiters = [TokenBucket(store, name, f"{limit}/year") for name, limit in zip(names, limits, strict=True)]
    limited = site([Rule(limiter, cost=2) for limiter in limiters], partition_keys=partition_keys)
    limited.request()
    clock.advance(1e-9)
    members = dict(items(limited.request(), "ratelimit"))
    decisions = {limiter.name: limiter.peek(CLIENT) for limiter in limiters}
    assert {name: item["r"] for name, item in members.items()} == {n: d.remaining for n, d in decisions.items()}
    assert {name: item["t"] for name, item in members.items()} == {
        n: -(-d.next_after_ns // 10**9) for n, d in decisions.items()
    }
    assert {len(item.get("pk", b"")) for item in members.values()} == {9 if partition_keys else 0}


def test_wrong_number_of_decisions_is_refused(store: Store) -> None:
    limiter = FixedWindow(store, "x", "10/minute")
    write = header_writer(["draft-10"], [Policy(limiter)], [Policy(limiter)], False)
    with pytest.raises(ValueError, match="2 decisions for 1 limits"):
        write([limiter.peek("k")] * 2, ())
    with pytest.raises(ValueError, match="2 partitions for 1 limits"):
        write([limiter.peek("k")], ("", ""))
    for wrong in ("no decision", None):
        with pytest.raises(TypeError):
            write([wrong], ())  # type: ignore[list-item]
    with pytest.raises(InvalidLimiter, match="twice"):
        Gate([Rule(limiter)], headers=("draft-10", "draft-10"))
