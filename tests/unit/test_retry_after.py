"""``Retry-After`` fields, and the pauses they begin: as long as the field says, not added up, shared by processes."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_helpers import Crew, Meeting

from forebay import (
    AllOf,
    Concurrency,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    SlidingLog,
    Store,
    TokenBucket,
)
from forebay.contrib import outbound
from forebay.contrib.outbound import OutboundLimiter, OutboundRequest, WaitTimeout, pause_s, release
from forebay.testing import ManualClock

NS: Final = 1_000_000_000
SERVER_DATE: Final = "Sun, 06 Nov 1994 08:49:30 GMT"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        ("\t007 ", 7),
        ("99999999999", 10**10),
        ("9" * 10_000, 10**10),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 7),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 7),
        ("Sun Nov  6 08:49:37 1994", 7),
        ("Sun, 06 Nov 1994 08:49:60 GMT", 29),
        ("Sun, 06 Nov 1994 08:49:29 GMT", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 661_300_710),
    ],
)
def test_forms_of_rfc_9110_are_parsed(text: str, seconds: int) -> None:
    assert pause_s(text, SERVER_DATE) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "+1",
        "1.5",
        "1e3",
        "1_000",
        "١٢",
        "120, 120",
        "soon",
        "0x10",
        "1\n",
        "Sun, 06 Nov 1994 08:49:37",
        "Sun, 06 Nov 1994 08:49:37 CET",
        "Sun, 06 Nov 1994 08:49:37 +0100",
        "sun, 06 nov 1994 08:49:37 gmt",
        "Sun, 6 Nov 1994 08:49:37 GMT",
        "06 Nov 1994 08:49:37 GMT",
        "Sun, 31 Feb 1994 08:49:37 GMT",
        "Sun, 06 Nov 0000 08:49:37 GMT",
        "Sun, 06 Nov 1994 24:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:61 GMT",
        "Sun, 06 Nov 1994 08:49:37 GMT, Sun, 06 Nov 1994 08:49:37 GMT",
        "1994-11-06T08:49:37Z",
    ],
)
def test_invalid_fields_are_ignored(text: str) -> None:
    assert pause_s(text, SERVER_DATE) is None


def test_missing_field_is_no_pause() -> None:
    assert pause_s(None) is None


def test_date_without_a_servers_date_is_compared_with_our_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 784_111_770.9)
    assert pause_s("Sun, 06 Nov 1994 08:49:37 GMT") == pause_s("Sun, 06 Nov 1994 08:49:37 GMT", "today") == 7


@given(st.text(), st.none() | st.text())
def test_no_text_raises(text: str, date: str | None) -> None:
    seconds = pause_s(text, date)
    assert seconds is None or 0 <= seconds <= 10**10


@given(st.integers(0, 10**9))
def test_every_date_is_parsed(seconds: int) -> None:
    server = datetime(2026, 11, 21, tzinfo=UTC)
    until = server + timedelta(seconds=seconds)
    assert pause_s(format_datetime(until, usegmt=True), format_datetime(server, usegmt=True)) == seconds
    assert pause_s(until.strftime("%a %b %e %H:%M:%S %Y"), format_datetime(server, usegmt=True)) == seconds


def outbound_limiter(limiter: Any, **options: Any) -> OutboundLimiter[str]:
    return OutboundLimiter(limiter, lambda request: request, WaitTimeout, options)  # type: ignore[arg-type]


@pytest.fixture
def bucket(store: Store) -> TokenBucket:
    return TokenBucket(store, "partner", "1/second", burst=2)


def respond(
    outgoing: OutboundRequest, retry_after: str | None, *, status: int = 429, method: str = "GET", again: bool
) -> None:
    assert outgoing.is_resent(method, status, retry_after, None, replayable=True) is again


def test_requests_wait_for_the_end_of_a_pause_and_then_for_a_permit(bucket: TokenBucket, clock: ManualClock) -> None:
    limited = outbound_limiter(bucket)
    respond(limited.request("a"), "30", again=True)
    for waited in (30, 30, 31, 32):
        limited.request("a").admit()
        assert waited <= clock.now() - 1000 <= waited + 0.001
    assert limited.request("b").admit() == []


def test_pause_is_the_longest_one_requested(bucket: TokenBucket, clock: ManualClock) -> None:
    limited = outbound_limiter(bucket)
    key = limited.request("a").pause_key
    for seconds, longest in ((10, 10), (10, 10), (4, 10), (30, 30), (29, 30)):
        assert limited.pause(key, seconds * NS) == limited.paused_ns(key) == longest * NS
    clock.advance(25.0000005)
    assert limited.paused_ns(key) == 4_999_999_500
    assert 5 * NS <= limited.pause(key, 5 * NS) <= 5 * NS + outbound.GRAIN_NS
    clock.advance(10)
    assert limited.paused_ns(key) == 0


def test_pauses_of_many_processes_do_not_add_up(crew: Crew, name: str) -> None:
    count, rounds = 4, 300
    meeting = Meeting(count)

    def pause_together(worker: int) -> list[int]:
        clock = ManualClock(1000)
        with Store(name, keys=100, clock=clock) as store:
            limited = outbound_limiter(TokenBucket(store, "partner", "1/second"))
            meeting.wait(worker)
            seen = []
            for turn in range(rounds):
                # Each process requests another length; time stands still. The longest is this turn's process's.
                seconds = 10 + (worker + turn) % count
                assert limited.pause(str(turn), seconds * NS) >= seconds * NS
                meeting.wait(worker)
                seen.append(limited.paused_ns(str(turn)))
            return seen

    for seen in crew.run(count, pause_together):
        assert seen == [13 * NS] * rounds


def test_permit_overtaken_by_a_pause_is_given_up(store: Store, clock: ManualClock) -> None:
    log = SlidingLog(store, "log", "2/second", keys=1)

    class Overtaken:
        """A limiter whose first permits come just before another process begins a pause."""

        name, store = log.name, log.store
        taken = 0

        def wait(self, key: Any, cost: int, timeout: float | None) -> bool:
            allowed = log.wait(key, cost, timeout)
            self.taken += 1
            if self.taken == 1:
                limited.pause(limited.request("a").pause_key, 5 * NS)
            return allowed

        def wait_async(self, key: Any, cost: int, timeout: float | None) -> None: ...

    limiter = Overtaken()
    limited = outbound_limiter(limiter)
    limited.request("a").admit()
    assert limiter.taken == 2
    assert 5 <= clock.now() - 1000 <= 5.001


def test_leases_overtaken_by_a_pause_are_released(store: Store, clock: ManualClock) -> None:
    slots = Concurrency(store, "slots", 1)
    limited = outbound_limiter(slots)
    outgoing = limited.request("a")
    steps = outgoing.steps()
    assert next(steps)[0] is slots
    assert slots.wait("a")
    limited.pause(outgoing.pause_key, NS)
    assert steps.send(True)[0] is limited.pauses
    assert slots.allow("a")


def test_request_of_several_limits_holds_only_concurrency_permits(store: Store) -> None:
    slots, other = Concurrency(store, "slots", 2), Concurrency(store, "other", 1)
    limits = AllOf(TokenBucket(store, "bucket", "1/second", burst=9), slots, other)
    limited = outbound_limiter(limits, key=lambda request: ["x", request, "everybody"], timeout=0)
    leases = limited.request("a").admit()
    assert len(leases) == 2
    with pytest.raises(WaitTimeout, match=r"not sent: a permit of limiter 'bucket \+ slots \+ other' for \['x', 'b', "):
        limited.request("b").admit()
    release(leases)
    release(limited.request("b").admit())
    assert slots.acquire("a", 2)


def test_only_repeatable_requests_are_sent_again(bucket: TokenBucket) -> None:
    limited = outbound_limiter(bucket, retries=1)
    for method in ("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"):
        respond(limited.request("a"), "1", status=503, method=method, again=True)
    for method in ("POST", "PATCH", "CONNECT", "LOCK"):
        respond(limited.request("a"), "1", status=503, method=method, again=False)
        respond(limited.request("a"), "1", status=429, method=method, again=True)
    for status in (200, 301, 400, 500, 502):
        respond(limited.request("b"), "1", status=status, again=False)
    respond(limited.request("b"), "soon", again=False)
    respond(limited.request("b"), None, again=False)
    assert limited.paused_ns(limited.request("b").pause_key) == 0
    respond(limited.request("b"), "0", again=True)
    assert not limited.request("c").is_resent("GET", 429, "1", None, replayable=False)


def test_request_is_resent_at_most_as_often_as_retries(bucket: TokenBucket) -> None:
    outgoing = outbound_limiter(bucket, retries=2).request("a")
    respond(outgoing, "1", again=True)
    respond(outgoing, "1", again=True)
    respond(outgoing, "1", again=False)
    respond(outbound_limiter(bucket, retries=0).request("a"), "1", again=False)


def test_longer_pause_is_capped_and_its_request_not_sent_again(bucket: TokenBucket) -> None:
    limited = outbound_limiter(bucket, max_pause="1 minute")
    respond(limited.request("a"), "60", again=True)
    respond(limited.request("a"), "61", again=False)
    respond(limited.request("a"), "9" * 100, again=False)
    assert limited.paused_ns(limited.request("a").pause_key) == 60 * NS


def test_request_is_not_sent_again_after_its_timeout(bucket: TokenBucket, clock: ManualClock) -> None:
    outgoing = outbound_limiter(bucket, timeout=10).request("a")
    clock.advance(4)
    respond(outgoing, "7", again=False)
    outgoing = outbound_limiter(bucket, timeout=10).request("b")
    respond(outgoing, "9", again=True)
    outgoing.admit()
    respond(outgoing, "2", again=False)


def test_timeout_error_names_the_pause(bucket: TokenBucket) -> None:
    limited = outbound_limiter(bucket, timeout="1500 ms")
    respond(limited.request("a"), "2", again=False)
    with pytest.raises(WaitTimeout) as caught:
        limited.request("a").admit()
    assert str(caught.value) == (
        "not sent: the end of the pause that the server demanded of limiter 'partner' for 'a' would have taken longer "
        "than 1.5 s"
    )
    assert (caught.value.limiter, caught.value.key, caught.value.timeout, caught.value.paused) == (
        "partner",
        "a",
        1.5,
        True,
    )
    bucket.hit("b", 2)
    bucket.reserve("b", 2)
    with pytest.raises(WaitTimeout, match=r"not sent: a permit of limiter 'partner' for 'b' would") as caught:
        limited.request("b").admit()
    assert not caught.value.paused


@pytest.mark.parametrize(
    ("on_full", "again"), [("deny", False), ("allow", False), ("evict", True)], ids=["deny", "allow", "evict"]
)
def test_full_store_causes_no_endless_loop(clock: ManualClock, on_full: Any, again: bool) -> None:
    with Store.private(keys=1, clock=clock, on_full=on_full) as store:
        other = TokenBucket(store, "other", "1/hour")
        for number in range(2000):
            other.hit(number)
        respond(outbound_limiter(TokenBucket(store, "partner", "1/second")).request("a"), "10", again=again)


def test_limiters_of_one_store_pause_separately(store: Store) -> None:
    limited, other = (outbound_limiter(TokenBucket(store, name, "1/second")) for name in ("one", "other"))
    respond(limited.request("a"), "10", again=True)
    assert limited.paused_ns(limited.request("a").pause_key)
    assert not other.paused_ns(other.request("a").pause_key)


def test_pauses_can_be_kept_in_another_store(bucket: TokenBucket, clock: ManualClock) -> None:
    with Store.private(keys=10, clock=clock) as elsewhere:
        assert outbound_limiter(bucket, store=elsewhere).pauses.store is elsewhere


async def fetch(request: object) -> int:
    return 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"timeout": -1}, ValueError, "timeout is None or a length of time of at least 0, not -1"),
        ({"timeout": float("inf")}, ValueError, "not inf"),
        ({"retries": 1.5}, ValueError, "retries is a whole number of at least 0, not 1.5"),
        ({"retries": True}, ValueError, "not True"),
        ({"cost": 1.5}, InvalidCost, "cost is a whole number of at least 0 or a callable, not 1.5"),
        ({"cost": True}, InvalidCost, "not True"),
        ({"cost": "1"}, InvalidCost, "not '1'"),
        ({"cost": lambda: 1}, InvalidLimiter, "cost .* can't be called so"),
        ({"cost": int}, InvalidLimiter, "cost .* is a class"),
        ({"cost": fetch}, InvalidLimiter, "cost is a plain function, .* has to be awaited"),
        ({"key": fetch}, InvalidLimiter, "key is a plain function, .* has to be awaited"),
        ({"key": 1.5}, InvalidKey, "not 1.5"),
        ({"key": True}, InvalidKey, "not True"),
        ({"key": ("a", None)}, InvalidKey, "not .'a', None"),
        ({"max_pause": "soon"}, InvalidRate, "'soon' is not a length of time"),
        (
            {"retry": 1},
            TypeError,
            "there is no option 'retry': those are key, cost, timeout, retries, max_pause, store",
        ),
    ],
)
def test_invalid_options_are_refused(
    bucket: TokenBucket, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        outbound_limiter(bucket, **options)


def test_one_key_may_have_as_many_parts_as_limiters(bucket: TokenBucket, clock: ManualClock) -> None:
    """The origin of a request is such a key: scheme, host and port."""
    others = [TokenBucket(bucket.store, name, "1/second", burst=2) for name in ("two", "three")]
    limited = OutboundLimiter(AllOf(bucket, *others), lambda _: ("https", "example.com", 443), WaitTimeout, {})
    respond(limited.request("a"), "30", again=True)
    limited.request("a").admit()
    assert clock.now() >= 1030
    assert [limiter.peek(("https", "example.com", 443)).remaining for limiter in (bucket, *others)] == [1, 1, 1]


def test_object_that_is_no_limiter_is_refused() -> None:
    with pytest.raises(InvalidLimiter, match="not for namespace"):
        outbound_limiter(SimpleNamespace(wait=None))


def test_origin_has_the_schemes_default_port() -> None:
    assert outbound.origin("https", "example.com", None) == ("https", "example.com", 443)
    assert outbound.origin("http", "::1", 8000) == ("http", "::1", 8000)


def test_pause_gives_up_after_a_number_of_lost_races(bucket: TokenBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are always faster lengthen the pause, so nothing is lost, and no process loops for ever."""
    limited = outbound_limiter(bucket)
    calls: list[int] = []

    def lose(*_: object, **__: object) -> bool:
        calls.append(1)
        return False

    monkeypatch.setattr(limited, "pauses", SimpleNamespace(peek=limited.pauses.peek, hit=lose))
    assert limited.pause("a", NS) == 0
    assert len(calls) == outbound.ATTEMPTS
