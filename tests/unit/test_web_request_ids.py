"""Request ids: a client's retry of a request is charged once, and an id is worth a bounded number of retries."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from web_requests import CLIENT, Answered, Kind, Site

from forebay import (
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    InvalidRate,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.redis import RedisStore
from forebay.testing import ManualClock
from forebay.web import Ban, RequestId, Rule, everyone, header

IDS = RequestId("Idempotency-Key")


def post(site: Site, sent: str | None = "one", path: str = "/orders", **more: Any) -> Answered:
    fields = [] if sent is None else [("Idempotency-Key", sent)]
    return site.request(path, "POST", fields=[*fields, *more.pop("fields", ())], **more)


@pytest.fixture
def limit(store: Store) -> FixedWindow:
    return FixedWindow(store, "orders", "10/day")


def left(limit: Any, key: Any = CLIENT) -> int:
    return int(limit.peek(key, 0).remaining)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_retry_is_charged_once(kind: Kind, limit: FixedWindow) -> None:
    site = Site(kind, [Rule(limit, request_id=IDS)])
    answers = [post(site) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert [answer["ratelimit"] for answer in answers] == [answers[0]["ratelimit"]] * 4
    assert left(limit) == 9
    assert site.handled == 4


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_an_id_is_worth_its_retries_and_no_more(kind: Kind, limit: FixedWindow) -> None:
    """A client that sends one id with every request gets 1 + retries times its limit."""
    site = Site(kind, [Rule(limit, request_id=RequestId(retries=2))])
    statuses = [post(site).status for _ in range(20)]
    assert statuses == [200] * 12 + [429] * 8
    assert left(limit) == 0


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize(
    ("other", "charged"),
    [
        ({"sent": "two"}, 2),
        ({"sent": None}, 2),
        ({"sent": ""}, 2),
        ({"path": "/orders/5"}, 2),
        ({"fields": [("X-Cost", "4")]}, 5),
        ({"fields": [("X-HTTP-Method-Override", "PUT")]}, 2),
        ({}, 1),
    ],
)
def test_another_request_with_the_same_id_is_charged(
    kind: Kind, limit: FixedWindow, other: dict[str, Any], charged: int
) -> None:
    site = Site(kind, [Rule(limit, request_id=IDS, cost=lambda request: int(request.header("X-Cost") or 1))])
    post(site)
    assert post(site, **other).status == 200
    assert left(limit) == 10 - charged


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_an_id_is_of_its_key(kind: Kind, store: Store, limit: FixedWindow) -> None:
    site = Site(kind, [Rule(limit, request_id=IDS, key=header("X-Customer", otherwise=everyone))])
    for name in ("ada", "bob"):
        post(site, fields=[("X-Customer", name)])
        post(site, fields=[("X-Customer", name)])
        assert left(limit, ("header", "x-customer", name)) == 9


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_retry_passes_although_the_limit_is_used_up(kind: Kind, store: Store) -> None:
    site = Site(kind, [Rule(FixedWindow(store, "orders", "1/day"), request_id=IDS)])
    assert [post(site).status, post(site, "two").status, post(site).status] == [200, 429, 200]
    denied = post(site, "two")
    assert (denied["ratelimit"], denied.json["violated-policies"]) == ('"orders";r=0;t=85400', ["orders"])


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_denied_attempts_use_up_nothing(kind: Kind, store: Store, clock: ManualClock) -> None:
    bucket = TokenBucket(store, "orders", "1/minute")
    site = Site(kind, [Rule(bucket, request_id=RequestId(retries=1))])
    post(site, "first")
    assert [post(site).status for _ in range(9)] == [429] * 9
    clock.advance(60)
    assert [post(site).status for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_an_id_ends(kind: Kind, limit: FixedWindow, clock: ManualClock) -> None:
    site = Site(kind, [Rule(limit, request_id=RequestId(lasts="1 minute"))])
    post(site)
    clock.advance(59)
    assert (post(site).status, left(limit)) == (200, 9)
    clock.advance(1)
    assert (post(site).status, left(limit)) == (200, 8)


@pytest.mark.parametrize("late", [0.0, 30.0, 59.9])
def test_no_retry_passes_beyond_the_time_that_counts_it(store: Store, clock: ManualClock, late: float) -> None:
    """The mark of a request that was charged late, after denied attempts, ends with the window that counts its
    retries: else a second window would let as many pass once more.
    """
    bucket = TokenBucket(store, "orders", "1/year", burst=1)
    site = Site("wsgi", [Rule(bucket, request_id=RequestId(retries=2, lasts="1 minute"))])
    post(site, "first")
    post(site)  # denied
    clock.advance(late)
    bucket.reset(CLIENT)
    passed = 0
    for _ in range(400):
        passed += post(site).status == 200
        clock.advance(0.5)
    assert 1 <= passed <= 3


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_rules_with_ids_are_charged_as_one(kind: Kind, store: Store, limit: FixedWindow) -> None:
    narrow = SlidingWindow(store, "narrow", "2/day")
    site = Site(kind, [Rule(limit, request_id=IDS), Rule(narrow, request_id=IDS)])
    assert [post(site, sent).status for sent in ("one", "one", "two", "three", "two")] == [200, 200, 200, 429, 200]
    assert (left(limit), left(narrow)) == (8, 0)
    assert [post(site, None).status, left(limit)] == [429, 8]


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize("options", [{}, {"charge_on": {200}}])
def test_a_rule_that_denies_a_retry_gives_no_charge_back(
    kind: Kind, store: Store, limit: FixedWindow, clock: ManualClock, options: Any
) -> None:
    """Else a client could send each request a second time, to be denied, and be charged for none."""
    gap = TokenBucket(store, "gap", "1/second", burst=1)
    site = Site(kind, [Rule(limit, request_id=IDS), Rule(gap, **options), Rule(Concurrency(store, "held", 2))])
    for number in range(3):
        assert [post(site, str(number)).status for _ in range(2)] == [200, 429]
        assert left(limit) == 9 - number
        clock.advance(1)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_denial_by_a_rule_with_ids_gives_the_others_charges_back(
    kind: Kind, store: Store, clock: ManualClock
) -> None:
    with Store.private(keys=10, clock=clock) as another:
        wide, elsewhere = TokenBucket(store, "wide", "9/day"), FixedWindow(another, "elsewhere", "9/day")
        held = Concurrency(store, "held", 2)
        narrow = TokenBucket(store, "narrow", "1/day")
        site = Site(kind, [Rule(narrow, request_id=IDS), Rule(wide), Rule(elsewhere), Rule(held)])
        assert [post(site, sent).status for sent in ("one", "two")] == [200, 429]
        assert (left(wide), left(elsewhere), left(held)) == (8, 8, 2)
        answer = post(site)
        assert answer.status == 200
        assert answer["ratelimit"].count("r=") == 3


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_bans_shadows_and_tiers_stand_beside_ids(kind: Kind, store: Store, clock: ManualClock) -> None:
    limit, pro = TokenBucket(store, "limit", "1/day"), TokenBucket(store, "pro", "5/day")
    ban = Ban(store, "guessers", "2/day", lasts="1 hour")
    rule = Rule(
        limit,
        request_id=IDS,
        ban=ban,
        tiers={"pro": pro},
        tier=lambda request: request.header("X-Tier") or "free",
    )
    tried = Rule(TokenBucket(store, "tried", "1/day"), request_id=IDS, shadow=True)
    site = Site(kind, [rule, tried])
    assert [post(site, sent).status for sent in ("one", "one", "two", "three", "one")] == [200, 200, 429, 429, 429]
    assert left(pro) == 5
    ban.lift(CLIENT)
    assert [post(site, "one", fields=[("X-Tier", "pro")]).status for _ in range(2)] == [200, 200]
    assert left(pro) == 4


def test_async_keys_and_costs_are_awaited(store: Store, limit: FixedWindow) -> None:
    async def key(request: Any) -> str:
        return "ada"

    async def cost(request: Any) -> int:
        return 2

    site = Site("asgi", [Rule(limit, request_id=IDS, key=key, cost=cost)])
    assert [post(site).status for _ in range(2)] == [200, 200]
    assert left(limit, "ada") == 8


@pytest.mark.parametrize("make", [LeakyBucket, SlidingLog, SlidingWindow, TokenBucket])
def test_every_limiter_with_ids_takes_them(store: Store, make: Any) -> None:
    more = {LeakyBucket: {"capacity": 5}, SlidingLog: {"keys": 10}}.get(make, {})
    limit = make(store, "orders", "5/day", **more)
    site = Site("wsgi", [Rule(limit, request_id=IDS)])
    assert [post(site).status for _ in range(3)] == [200] * 3
    assert left(limit) == 4


def test_of_requests_that_come_at_once_no_more_pass_uncharged(store: Store) -> None:
    limit = FixedWindow(store, "orders", "100/day")
    site = Site("wsgi", [Rule(limit, request_id=IDS)])
    barrier = threading.Barrier(8)

    def send() -> None:
        barrier.wait()
        for _ in range(5):
            assert post(site).status == 200

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of 40 attempts 3 are free.
    assert left(limit) == 100 - 37


def test_a_full_store_charges_retries(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock, on_full="deny") as store:
        limit = FixedWindow(store, "orders", "50/day")
        fill = FixedWindow(store, "fill", "1/day")
        site = Site("wsgi", [Rule(limit, request_id=IDS)])
        post(site, None)
        key = 0
        while fill.hit(key := key + 1).reason != "no room" or key < 200:
            pass
        before = left(limit)
        assert [post(site).status for _ in range(10)] == [200] * 10
        assert left(limit) <= before - 7


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"field": ""}, "a header field has a name such as \"Idempotency-Key\", not ''"),
        ({"field": "Idempotency Key"}, "not 'Idempotency Key'"),
        ({"field": 5}, "not 5"),
        ({"retries": 0}, "retries is a whole number from 1 to 100, not 0"),
        ({"retries": 101}, "not 101"),
        ({"retries": True}, "not True"),
        ({"lasts": "a while"}, "a while"),
        ({"lasts": 0}, "0"),
    ],
)
def test_invalid_ids_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((InvalidLimiter, InvalidRate), match=message):
        RequestId(**arguments)


def test_rules_that_cannot_take_ids_are_refused(store: Store, limit: FixedWindow) -> None:
    with pytest.raises(InvalidLimiter, match=r"request_id is a RequestId, not 'Idempotency-Key': write RequestId"):
        Rule(limit, request_id="Idempotency-Key")  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match=r"the rule of <Concurrency 'held'.* takes no request_id"):
        Rule(Concurrency(store, "held", 2), request_id=IDS)
    with pytest.raises(InvalidLimiter, match=r"the rule of <FixedWindow 'orders'.* has a request_id and charge_on"):
        Rule(limit, request_id=IDS, charge_on={200})
    with pytest.raises(InvalidLimiter, match=r"the rule of <TokenBucket 'held back'.* has a request_id and delay"):
        Rule(TokenBucket(store, "held back", "1/second"), request_id=IDS, delay="2s")
    with RedisStore("redis://127.0.0.1:1") as redis:
        over_redis = Rule(TokenBucket(redis, "over redis", "1/second"), path="/there", request_id=IDS)
        with pytest.raises(InvalidLimiter, match="need the same request_id and one store"):
            Site("wsgi", [Rule(limit, path="/here", request_id=IDS), over_redis])
    with (
        Store.private(keys=10, on_full="allow") as careless,
        pytest.raises(InvalidLimiter, match="on_full='allow' would let any number of retries pass uncounted"),
    ):
        Rule(TokenBucket(careless, "careless", "1/second"), request_id=IDS)
    with Store.private(keys=10) as another:
        other = Rule(FixedWindow(another, "other", "1/day"), path="/other", request_id=IDS)
        for rule in (other, Rule(limit, path="/other", request_id=RequestId(retries=1))):
            with pytest.raises(InvalidLimiter, match="need the same request_id and one store"):
                Site("wsgi", [Rule(limit, path="/orders", request_id=IDS), rule])
