"""The bounds of docs/arithmetic.md: the largest value of each field works, and the next is refused by name."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from process_helpers import read_cells

from forebay import (
    BucketedWindow,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    InvalidCost,
    InvalidLimiter,
    InvalidRate,
    LeakyBucket,
    MinInterval,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.segment import layout
from forebay.segment.process_identity import this_process
from forebay.testing import ManualClock

ROOT = Path(__file__).parents[2]
NS = 1_000_000_000
YEAR = 31_536_000
LONGEST = Fraction(10 * YEAR)
ONE_NS = Fraction(1, NS)
LAST_NS = 2**61
MASK = 2**64 - 1

Make = Callable[[Store], Any]


def at_ns(now_ns: int) -> ManualClock:
    return ManualClock(Fraction(now_ns, NS))  # type: ignore[arg-type]  # exact, where a float would round


def rate(limit: int, period: Fraction | int) -> Rate:
    return Rate(limit, period)  # type: ignore[arg-type]  # likewise


# Arguments.

# For each bound: a limiter with the largest value, one beyond it, the error and the name in its message.
BOUNDS: dict[str, tuple[Make, Make, type[Exception], str]] = {
    "limit of a rate": (
        lambda store: FixedWindow(store, "x", rate(2**40, LONGEST)),
        lambda store: rate(2**40 + 1, LONGEST),
        InvalidRate,
        r"at most 2\*\*40",
    ),
    "speed of a rate": (
        lambda store: TokenBucket(store, "x", rate(10**9, 1)),
        lambda store: rate(10**9 + 1, 1),
        InvalidRate,
        "too fast",
    ),
    "period of a rate": (
        lambda store: FixedWindow(store, "x", rate(1, LONGEST)),
        lambda store: rate(1, LONGEST + ONE_NS),
        InvalidRate,
        "10 years",
    ),
    "shortest period": (
        lambda store: FixedWindow(store, "x", rate(1, ONE_NS)),
        lambda store: rate(1, ONE_NS / 2),
        InvalidRate,
        "1 ns to 10 years",
    ),
    "interval": (
        lambda store: MinInterval(store, "x", 10 * YEAR),
        lambda store: MinInterval(store, "x", 10 * YEAR + 1),
        InvalidRate,
        "10 years",
    ),
    "burst of a permit a second": (
        lambda store: TokenBucket(store, "x", "1/second", burst=2_305_843_009),
        lambda store: TokenBucket(store, "x", "1/second", burst=2_305_843_010),
        InvalidLimiter,
        "73 years to refill a burst",
    ),
    "burst of a permit a nanosecond": (
        lambda store: TokenBucket(store, "x", "1_000_000_000/second", burst=2**61 - 1),
        lambda store: TokenBucket(store, "x", "1_000_000_000/second", burst=2**61),
        InvalidLimiter,
        "73 years to refill a burst",
    ),
    "capacity": (
        lambda store: LeakyBucket(store, "x", "1_000_000_000/second", 2**61 - 1),
        lambda store: LeakyBucket(store, "x", "1_000_000_000/second", 2**61),
        InvalidLimiter,
        "73 years to refill a capacity",
    ),
    "burst in intervals": (
        lambda store: TokenBucket(store, "x", "1/year", burst=72, refill="interval"),
        lambda store: TokenBucket(store, "x", "1/year", burst=73, refill="interval"),
        InvalidLimiter,
        "too long to refill a burst of 73",
    ),
    "burst in the longest intervals": (
        lambda store: TokenBucket(store, "x", rate(1000, LONGEST), burst=6000, refill="interval"),
        lambda store: TokenBucket(store, "x", rate(1000, LONGEST), burst=6001, refill="interval"),
        InvalidLimiter,
        "too long to refill a burst of 6001",
    ),
    "limit of a sliding window of a second": (
        lambda store: SlidingWindow(store, "x", rate(2**26 - 1, 1)),
        lambda store: SlidingWindow(store, "x", rate(2**26, 1)),
        InvalidLimiter,
        "too much for a sliding window",
    ),
    "limit of a bucketed window": (
        lambda store: BucketedWindow(store, "x", rate(2**30 - 1, LONGEST), 2, keys=1),
        lambda store: BucketedWindow(store, "x", rate(2**30, LONGEST), 2, keys=1),
        InvalidLimiter,
        "a limit can be at most",
    ),
    "buckets": (
        lambda store: BucketedWindow(store, "x", "5/hour", 2**16, keys=1),
        lambda store: BucketedWindow(store, "x", "5/hour", 2**16 + 1, keys=1),
        InvalidLimiter,
        r"1 to 2\*\*16",
    ),
    "limit of a sliding log": (
        lambda store: SlidingLog(store, "x", rate(2**23, LONGEST), keys=1),
        lambda store: SlidingLog(store, "x", rate(2**23 + 1, LONGEST), keys=1),
        InvalidLimiter,
        r"up to 2\*\*23",
    ),
    "limit of a sliding log of 1024 ns": (
        lambda store: SlidingLog(store, "x", rate(1024, 1024 * ONE_NS), keys=1),
        lambda store: SlidingLog(store, "x", rate(1023, 1023 * ONE_NS), keys=1),
        InvalidLimiter,
        "too fast for a sliding log",
    ),
    "slots": (
        lambda store: Concurrency(store, "x", 2**16, keys=2),
        lambda store: Concurrency(store, "x", 2**24 + 1, keys=1),
        InvalidLimiter,
        r"1 to 2\*\*24",
    ),
    "lease": (
        lambda store: Concurrency(store, "x", 1, lease=10 * YEAR, keys=2),
        lambda store: Concurrency(store, "x", 1, lease=10 * YEAR + 1, keys=2),
        InvalidRate,
        "10 years",
    ),
    "keys of an extent": (
        lambda store: SlidingLog(store, "x", "1/hour", keys=1000),
        lambda store: SlidingLog(store, "x", "1/hour", keys=2**32 + 1),
        InvalidLimiter,
        r"1 to 2\*\*32",
    ),
    "keys of a store": (
        lambda store: None,
        lambda store: Store.private(keys=2**36 + 1),
        ValueError,
        r"1 to 2\*\*36",
    ),
    "clock": (
        lambda store: at_ns(LAST_NS),
        lambda store: at_ns(LAST_NS + 1),
        ValueError,
        "2305843009 seconds",
    ),
}


@pytest.mark.parametrize("now_ns", [0, LAST_NS])
@pytest.mark.parametrize(("largest", "beyond", "refusal", "named"), BOUNDS.values(), ids=BOUNDS)
def test_largest_value_works_and_the_next_is_refused_by_name(
    now_ns: int, largest: Make, beyond: Make, refusal: type[Exception], named: str
) -> None:
    with Store.private(keys=1, clock=at_ns(now_ns)) as store:
        limiter = largest(store)
        if hasattr(limiter, "hit"):
            most = limiter.hit("k").limit
            assert limiter.peek("k").remaining == most - 1
            assert most == 1 or limiter.hit("k", most - 1)
            assert [limiter.allow("k") for _ in range(3)] == [False] * 3
            assert limiter.allow("another")
        with pytest.raises(refusal, match=named):
            beyond(store)


EDGES = [2**bits + off for bits in (31, 32, 40, 53, 61, 62, 63, 64) for off in (-1, 0, 1)]

# Each has a limit of 2**31, or as close as its algorithm allows, and the largest burst.
LIMITERS: dict[str, Make] = {
    "token bucket": lambda store: TokenBucket(store, "x", "1_000_000_000/second", burst=2**61 - 1),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "1_000_000_000/second", 2**61 - 1),
    "token bucket, intervals": lambda store: TokenBucket(store, "x", rate(2**40, 3600), burst=2**53, refill="interval"),
    "fixed window": lambda store: FixedWindow(store, "x", rate(2**40, LONGEST)),
    "fixed window, first": lambda store: FixedWindow(store, "x", rate(2**40, LONGEST), align="first"),
    "fixed window, stagger": lambda store: FixedWindow(store, "x", rate(2**40, LONGEST), align="stagger"),
    "sliding window": lambda store: SlidingWindow(store, "x", rate(2**31, LONGEST)),
    "bucketed window": lambda store: BucketedWindow(store, "x", rate(2**30 - 1, LONGEST), 3, keys=50),
    "sliding log": lambda store: SlidingLog(store, "x", rate(1000, LONGEST), keys=50),
    "minimum interval": lambda store: MinInterval(store, "x", 10 * YEAR),
    "concurrency": lambda store: Concurrency(store, "x", 1000, lease=10 * YEAR, keys=50),
}
every_limiter = pytest.mark.parametrize("make", LIMITERS.values(), ids=LIMITERS)


@every_limiter
@pytest.mark.parametrize("now_ns", [0, LAST_NS // 2, LAST_NS])
def test_costs_at_powers_of_two_are_charged_exactly(make: Make, now_ns: int) -> None:
    with Store.private(keys=1, clock=at_ns(now_ns)) as store:
        limiter = make(store)
        most = limiter.peek("k").limit
        for cost in EDGES:
            key = ("cost", cost)
            if cost <= most:
                assert limiter.hit(key, cost)
                assert limiter.peek(key).remaining == most - cost
                assert limiter.allow_many([key, key], [most - cost + 1, most - cost]) == [False, True]
                assert not limiter.allow(key)
            else:
                limiter.refund(key, cost)
                for method in (limiter.hit, limiter.peek, limiter.reserve):
                    with pytest.raises(CostExceedsLimit) as caught:
                        method(key, cost)
                    assert (caught.value.cost, caught.value.limit) == (cost, most)
                with pytest.raises(CostExceedsLimit):
                    limiter.allow_many([key], [cost])
                assert limiter.peek(key).remaining == most
            with pytest.raises(InvalidCost):
                limiter.hit(key, -cost)


@every_limiter
@pytest.mark.parametrize("years", [1, 11, 60])
def test_key_idle_for_years_is_fresh(make: Make, years: int) -> None:
    clock = ManualClock(12_345)
    with Store.private(keys=1, clock=clock) as store:
        limiter = make(store)
        most = limiter.peek("k").limit
        assert limiter.hit("k", most)
        reset_after_ns = limiter.peek("k").reset_after_ns
        clock.advance(years * YEAR)
        left_ns = max(0, reset_after_ns - years * YEAR * NS)
        assert limiter.peek("k").reset_after_ns == left_ns
        if left_ns == 0:
            assert store.stats().live_keys == 0
            assert limiter.hit("k", most)


@every_limiter
def test_clock_that_jumps_years_ahead_and_back_grants_no_permits(make: Make) -> None:
    """A manual clock may go back. A charge from a later time counts at least as a charge of now."""
    clock = ManualClock(40 * YEAR)
    with Store.private(keys=1, clock=clock) as store:
        limiter = make(store)
        most = limiter.peek("k").limit
        assert limiter.hit("k", most)
        for years in (30, 1, 0):
            clock.set(years * YEAR)
            assert not limiter.allow("k")
            assert limiter.peek("k").retry_after_ns > 0
        clock.set(70 * YEAR)
        # The charge of 30 years ago.
        if not limiter.hit("k", most):
            assert limiter.peek("k", most).retry_after_ns > 0


# The largest buckets, in years.
BUCKETS: dict[str, Make] = {
    "token bucket": lambda store: TokenBucket(store, "x", "1/year", burst=60),
    "token bucket, intervals": lambda store: TokenBucket(store, "x", "1/year", burst=60, refill="interval"),
    "token bucket, long intervals": lambda store: TokenBucket(
        store, "x", rate(10, LONGEST), burst=60, refill="interval"
    ),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "1/year", 60),
    "minimum interval": lambda store: MinInterval(store, "x", 10 * YEAR),
}


@pytest.mark.parametrize("make", BUCKETS.values(), ids=BUCKETS)
def test_bookings_at_the_last_time_are_refused_eventually(make: Make) -> None:
    """A state that wrapped would read as long expired, and every request would be allowed."""
    with Store.private(keys=1, clock=at_ns(LAST_NS)) as store:
        limiter = make(store)
        most = limiter.peek("k").limit
        assert limiter.reserve("k", most).delay == 0
        booked = [limiter.reserve("k") for _ in range(100)]
        delays_ns = [each.delay_ns for each in booked if each]
        assert len(delays_ns) < 14
        assert delays_ns == sorted(delays_ns)
        assert max(delays_ns, default=0) < LAST_NS
        assert not any(limiter.reserve("k", cost) for cost in (1, most // 2 or 1, most))
        assert not limiter.allow("k")


# ``time.time`` can be set to any time, also beyond the range of the other clocks.

LAST_PYTHON_S = (2**62 - 3 * 10 * YEAR * NS) // NS
IN_2065 = 3_000_000_000

PYTHON_LIMITERS: dict[str, Make] = {
    "token bucket": lambda store: TokenBucket(store, "x", "1/year", burst=20),
    "token bucket, intervals": lambda store: TokenBucket(store, "x", "1/year", burst=19, refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "1/year", 20),
    "minimum interval": lambda store: MinInterval(store, "x", 10 * YEAR),
    "fixed window": lambda store: FixedWindow(store, "x", rate(5, LONGEST)),
    "fixed window, first": lambda store: FixedWindow(store, "x", rate(5, LONGEST), align="first"),
    "fixed window, stagger": lambda store: FixedWindow(store, "x", rate(5, LONGEST), align="stagger"),
    "sliding window": lambda store: SlidingWindow(store, "x", rate(5, LONGEST)),
    "sliding window of many": lambda store: SlidingWindow(store, "x", rate(2**31, LONGEST)),
    "bucketed window": lambda store: BucketedWindow(store, "x", rate(5, LONGEST), 2, keys=1),
    "sliding log": lambda store: SlidingLog(store, "x", rate(5, LONGEST), keys=1),
    "concurrency": lambda store: Concurrency(store, "x", 5, lease=10 * YEAR, keys=1),
}


@pytest.mark.parametrize("now_s", [IN_2065, LAST_PYTHON_S])
@pytest.mark.parametrize("make", PYTHON_LIMITERS.values(), ids=PYTHON_LIMITERS)
def test_no_limit_wraps_at_the_last_times_of_time_time(make: Make, now_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: float(now_s))
    with Store.private(keys=1, clock="time") as store:
        limiter = make(store)
        most = limiter.peek("k").limit
        assert limiter.hit("k", most - 1)
        assert [limiter.allow("k") for _ in range(4)] == [True, False, False, False]
        assert sum([bool(limiter.reserve("k")) for _ in range(100)]) < 20
        assert not limiter.reserve("k", most)
        assert not limiter.allow("k")
        assert limiter.peek("k").reset_after_ns <= 20 * YEAR * NS


def test_longer_refills_are_refused_with_time_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.private(keys=1, clock="time") as store:
        for refused in (
            lambda: TokenBucket(store, "x", "1/year", burst=21),
            lambda: TokenBucket(store, "x", "1/year", burst=70),
            lambda: LeakyBucket(store, "x", "1/year", 21),
        ):
            with pytest.raises(InvalidLimiter, match="more than 20 years to refill"):
                refused()
        with pytest.raises(InvalidLimiter, match="too long to refill"):
            TokenBucket(store, "x", "1/year", burst=20, refill="interval")
        limiter = TokenBucket(store, "x", "1/year", burst=20)
        monkeypatch.setattr(time, "time", lambda: LAST_PYTHON_S + 1)
        with pytest.raises(ValueError, match="from 1970 to 2086"):
            limiter.allow("k")


def test_request_mark_at_the_last_time_counts_once() -> None:
    with Store.private(keys=1, clock=at_ns(LAST_NS)) as store:
        limiter = TokenBucket(store, "x", "5/minute")
        for _ in range(3):
            assert limiter.hit("k", request_id="once", request_ttl=10 * YEAR)
        assert limiter.peek("k").remaining == 4


# Fields of a segment's words.

CLAIM_UNIT_BITS = 30
CLAIM_LIFE = 2


def log_of(limit: int) -> Make:
    return lambda store: SlidingLog(store, "x", rate(limit, LONGEST), keys=1)


# The number of bits that stay with the cell, and of those for a claim's stamp.
CLAIMS: dict[str, tuple[Make, int, int]] = {
    "one bit kept": (log_of(1), 1, 23),
    "16 bits kept": (log_of(2**15), 16, 8),
    "17 bits kept": (log_of(2**16), 17, 15),
    "24 bits kept": (log_of(2**23), 24, 8),
    "32 bits kept": (lambda store: BucketedWindow(store, "x", rate(5, LONGEST), 2, keys=1), 32, 4),
}


@pytest.mark.parametrize(("make", "kept_bits", "stamp_bits"), CLAIMS.values(), ids=CLAIMS)
def test_abandoned_claim_can_be_taken_after_two_units_and_again_after_its_stamp_wraps(
    store_name: str, make: Make, kept_bits: int, stamp_bits: int
) -> None:
    """Only another key waits: the claim's own key continues at any time. A wrapped stamp looks fresh for four units."""
    begun, round_ = 1000, 1 << stamp_bits
    clock = ManualClock()
    set_units(clock, begun)
    with Store(store_name, keys=1, on_full="deny", clock=clock) as store:
        limiter = make(store)
        path = Path(store.path or "")
        ((_, offset, *_),) = layout.EXTENT_ENTRY.iter_unpack(
            path.read_bytes()[layout.EXTENTS_OFFSET :][: layout.EXTENT_ENTRY.size]
        )
        assert limiter.allow("own")
        tag, _ = read_cell(path, offset)
        own = tag >> layout.KIND_BITS << layout.KIND_BITS | layout.KIND_CLAIM
        other = own ^ 1 << 40
        for age in [0, 1, 2, 3, round_ - 3, round_ - 2, round_ - 1, round_, round_ + 1, round_ + 2]:
            fresh = (age + CLAIM_LIFE) % round_ < 2 * CLAIM_LIFE
            for claimant, allowed in ((own, True), (other, not fresh)):
                limiter.reset("own")
                kept = read_cell(path, offset)[1] % (1 << kept_bits)
                with path.open("r+b") as file:
                    file.seek(offset)
                    file.write(layout.CELL.pack(claimant, begun % round_ << 64 - stamp_bits | 77 << kept_bits | kept))
                set_units(clock, begun + age)
                decision = limiter.hit("own")
                assert decision.allowed is allowed, f"{age} units old"
                if not allowed:
                    # By then the claim can be taken, or another one stands in the cell.
                    assert decision.retry_after_ns == CLAIM_LIFE + 1 << CLAIM_UNIT_BITS


def read_cell(path: Path, offset: int) -> tuple[int, int]:
    tag, state = layout.CELL.unpack(path.read_bytes()[offset : offset + layout.CELL.size])
    return tag, state


def set_units(clock: ManualClock, units: int) -> None:
    clock.set(Fraction(units << CLAIM_UNIT_BITS, NS))  # type: ignore[arg-type]


RANKED: dict[str, Make] = {
    "token bucket": lambda store: TokenBucket(store, "x", "100/hour"),
    "token bucket, intervals": lambda store: TokenBucket(store, "x", "100/hour", refill="interval"),
    "token bucket, many intervals": lambda store: TokenBucket(store, "x", "3/minute", burst=100, refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "100/hour", 100),
    "fixed window": lambda store: FixedWindow(store, "x", "100/hour"),
    "sliding window": lambda store: SlidingWindow(store, "x", "100/hour"),
}


@pytest.mark.parametrize("now_s", [3600, 3600 + 100, 7200 - 1])
@pytest.mark.parametrize("make", RANKED.values(), ids=RANKED)
def test_larger_use_gives_a_larger_state(store_name: str, make: Make, now_s: int) -> None:
    """The smallest state is evicted first, so the key that used more stays longer."""
    states = []
    for cost in range(1, 101):
        with Store(store_name, keys=1, clock=ManualClock(now_s)) as store:
            make(store).hit("k", cost)
            ((_, state),) = [cell for cell in read_cells(store.path or "") if cell[0]]
            states.append(state)
        Store.unlink(store_name)
    assert states == sorted(set(states))


DAMAGED: dict[str, Make] = {
    "token bucket": lambda store: TokenBucket(store, "x", "2/second", burst=4),
    "leaky bucket": lambda store: LeakyBucket(store, "x", "2/second", 4),
    "minimum interval": lambda store: MinInterval(store, "x", 2),
}


@pytest.mark.parametrize("state", [2**62, 2**63, MASK])
@pytest.mark.parametrize("make", DAMAGED.values(), ids=DAMAGED)
def test_cost_of_0_over_a_damaged_state_has_no_delay(store_name: str, make: Make, state: int) -> None:
    """A state from 2**62 on, which no limiter writes, is read as fresh."""
    clock = ManualClock(1000)
    with Store(store_name, keys=1, on_full="deny", clock=clock) as store:
        limiter = make(store)
        assert limiter.allow("k")
        (cell,) = [number for number, (tag, _) in enumerate(read_cells(store.path or "")) if tag]
        with open(store.path or "", "r+b") as file:
            file.seek(layout.TABLE_OFFSET + cell * layout.CELL.size + 8)
            file.write(struct.pack("<Q", state))
        for booked in (limiter.reserve("k", 0), limiter.reserve("k", 0, 10), limiter.reserve("k", cost=0, max_delay=0)):
            assert (booked.allowed, booked.delay_ns) == (True, 0)
        assert limiter.wait("k", cost=0, timeout=1)
        assert clock.now() == 1000
        assert limiter.peek("k").remaining == limiter.peek("k").limit


def test_decisions_do_not_depend_on_counters_that_wrap(store_name: str) -> None:
    with Store(store_name, keys=1) as store:
        limiter = TokenBucket(store, "x", "2/hour")
        assert limiter.allow("k")
        line = next(
            start
            for start in range(layout.COUNTERS_OFFSET, layout.TABLE_OFFSET, layout.COUNTER_LINE.size)
            if Path(store.path or "").read_bytes()[start]
        )
        with open(store.path or "", "r+b") as file:
            # The claims' sequence wraps, too.
            file.seek(line + layout.COUNTER_LINE_CLAIMS)
            file.write(struct.pack("<7Q", *[MASK] * 7))
        assert [limiter.allow("k") for _ in range(3)] == [True, False, False]
        assert all(limiter.allow(f"k{number}") for number in range(100))
        counted = store.stats().limiters["x"]
        assert (counted.allowed, counted.denied, counted.inserted) == (100, 1, 99)


def test_process_identity_fits_into_a_word() -> None:
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) <= 2**22
    me = this_process()
    assert me < 2**64
    assert me % 2**22 == os.getpid()


# The functions in arithmetic.h, at the limits of their arguments.

PROGRAM = """
#include <inttypes.h>
#include <stdio.h>
#include "forebay/arithmetic.h"
int main(void) {
    uint64_t a, b, c, d;
    while (scanf("%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c, &d) == 4)
        printf("%d %" PRIu64 " %" PRIu64 " %d\\n", forebay_product_below(a, b, c, d),
               d ? forebay_multiply_divide_up(a, b, d) : 0, d ? forebay_multiply_divide_down(a, b, d) : 0,
               a ? forebay_lowest_bit(a) : -1);
}
"""


@pytest.mark.parametrize("optimization", ["-O0", "-O3"])
def test_products_quotients_and_the_lowest_bit_are_exact(tmp_path: Path, optimization: str) -> None:
    program = tmp_path / "arithmetic"
    compiler = [os.environ.get("CC", "cc"), "-std=gnu11", optimization, "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [
            *compiler,
            "-fsanitize=undefined",
            "-fno-sanitize-recover",
            f"-I{ROOT}/native/include",
            "-xc",
            "-",
            "-o",
            program,
        ],
        input=PROGRAM,
        text=True,
        check=True,
    )
    ends = [0, 1, 2, 3, 2**32 - 1, 2**32, 2**53 + 1, 2**61 - 1, 2**62, 2**63 - 1, 2**63, MASK - 1, MASK]
    questions = list(itertools.product(ends, repeat=4))
    answers = subprocess.run(
        [program],
        input="".join(f"{a} {b} {c} {d}\n" for a, b, c, d in questions),
        text=True,
        capture_output=True,
        check=True,
    ).stdout.splitlines()
    for (a, b, c, d), answer in zip(questions, answers, strict=True):
        below, up, down, lowest = map(int, answer.split())
        assert below == (a * b < c * d)
        assert lowest == (a & -a).bit_length() - 1
        # The caller guarantees that the quotient fits, and the product with the rounding addend.
        if d and -(-a * b // d) <= MASK and a * b + d - 1 < 2**128:
            assert (up, down) == (-(-a * b // d), a * b // d)
