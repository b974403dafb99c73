"""The gain of an attacker who makes up keys.

*Crafted keys.* Where a key lives follows from its hash under a key that is random per segment. An attacker who knows
the source but not that key can choose no better than chance: keys that all collide under one hash key are spread like
any others under another.

*A flood of one-off keys* with ``on_full="evict"``. A newcomer that finds all 48 cells of its probe set live takes that
of the key that has used least; of several, the one that expires first. So a key can be evicted only if each of the 47
others in a probe set has used as much. A flood of keys that come once never resets a key that is at its limit, however
long it lasts. To reset one, a flood must use about as much of each of its keys, and it takes about as many of them as
the table has cells:

* token bucket and leaky bucket: states expire in the order of use. An eviction forgives no more permits than each of
  those 47 was charged. So it is in a token bucket in intervals, and in fixed and sliding window within one window.
* sliding log, bucketed window, concurrency: the record has the exact number.
* ``align="first"`` and ``align="stagger"``: the state tells how many bits the count has, up to 7. So a flood must use
  64 permits of each of its keys, or for a smaller limit at least half as many as the key at its limit.

Some floods are cheaper still. If one request uses up a limit, each live key has used all of it: so without an `on_full`
such limits deny. A sliding window that has not been used in this window yet, and limiters of one store that forget at
different times, are ordered by the last use: there newcomers outlast a key with one request each.
"""

from __future__ import annotations

import random
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import pytest
from process_helpers import path_of, read_cells

from forebay import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.segment import layout
from forebay.testing import ManualClock

Record = Callable[[str, object], None]
HashKey = tuple[int, int]

MASK: Final = 2**64 - 1
CELLS: Final = layout.MIN_GROUPS * layout.LINES_PER_GROUP * layout.CELLS_PER_LINE
LINES: Final = CELLS // layout.CELLS_PER_LINE
EXTENT_KEYS: Final = 780  # that an extent of as many cells is made for
LIMITER: Final = "login"


# Crafted keys.


def sip13(key: HashKey, data: bytes) -> int:
    """SipHash-1-3."""
    v0, v1 = key[0] ^ 0x736F6D6570736575, key[1] ^ 0x646F72616E646F6D
    v2, v3 = key[0] ^ 0x6C7967656E657261, key[1] ^ 0x7465646279746573
    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) % 256])
    words = [int.from_bytes(padded[start : start + 8], "little") for start in range(0, len(padded), 8)]
    for word in [*words, None, None, None]:
        if word is None:
            # The first of three rounds that end it.
            v2 ^= 0xFF if words else 0
            words = []
        else:
            v3 ^= word
        v0, v2 = v0 + v1 & MASK, v2 + v3 & MASK
        v1, v3 = (v1 << 13 & MASK | v1 >> 51) ^ v0, (v3 << 16 & MASK | v3 >> 48) ^ v2
        v0, v2 = (v0 << 32 & MASK | v0 >> 32) + v3 & MASK, v2 + v1 & MASK
        v1, v3 = (v1 << 17 & MASK | v1 >> 47) ^ v2, (v3 << 21 & MASK | v3 >> 43) ^ v0
        v2 = v2 << 32 & MASK | v2 >> 32
        if word is not None:
            v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3


def key_of_limiter(segment_key: HashKey) -> HashKey:
    """Under which a token bucket hashes its keys; integers in a domain of their own."""
    return (
        sip13(segment_key, b"0" + LIMITER.encode()),
        sip13(segment_key, b"1" + LIMITER.encode()) ^ 2,
    )


def home_of(tag: int) -> int:
    """The home line of the key with this tag, in the smallest table."""
    fingerprint = tag >> layout.KIND_BITS << layout.KIND_BITS
    group = fingerprint * layout.MIN_GROUPS >> 64
    return group * layout.LINES_PER_GROUP + (fingerprint >> layout.KIND_BITS) % layout.LINES_PER_GROUP


def craft(segment_key: HashKey, count: int, line: int) -> list[int]:
    """Keys that share a home line under this hash key."""
    key = key_of_limiter(segment_key)
    found: list[int] = []
    candidate = 0
    while len(found) < count:
        if home_of(sip13(key, candidate.to_bytes(8, "little"))) == line:
            found.append(candidate)
        candidate += 1
    return found


def hash_key_of(name: str) -> HashKey:
    with open(path_of(name), "rb") as file:
        first, second = struct.unpack_from("<QQ", file.read(layout.HEADER.size), layout.HEADER_HASH_KEY)
    return first, second


def set_hash_key(name: str, key: HashKey) -> None:
    """Set the hash key of a segment that has not been used yet."""
    with open(path_of(name), "r+b") as file:
        head = bytearray(file.read(layout.HEADER_CHECKSUM))
        struct.pack_into("<QQ", head, layout.HEADER_HASH_KEY, *key)
        file.seek(0)
        file.write(head + struct.pack("<I", zlib.crc32(head)))


@dataclass(frozen=True)
class Spread:
    """Where keys came to lie."""

    most_of_a_line: int
    """Keys that have one line for their home."""
    chi_squared: float
    """Of their numbers per home line: with keys spread by chance, LINES - 1 on average."""
    away: int
    """Keys that found no room in their home line."""


def spread(name: str, keys: Iterable[int], segment_key: HashKey) -> Spread:
    keys = list(keys)
    Store(name, keys=1).close()
    set_hash_key(name, segment_key)
    try:
        with Store(name, keys=1, on_full="deny") as store:
            TokenBucket(store, LIMITER, "1/year").allow_many(keys)
        cells = read_cells(path_of(name))
    finally:
        Store.unlink(name)
    taken = [(at // layout.CELLS_PER_LINE, home_of(tag)) for at, (tag, _) in enumerate(cells) if tag]
    counts = Counter(home for _, home in taken)
    mean = len(keys) / LINES
    return Spread(
        max(counts.values()),
        sum((counts[line] - mean) ** 2 / mean for line in range(LINES)),
        len(keys) - sum(line == home for line, home in taken),
    )


def test_a_key_lives_where_this_file_computes(name: str) -> None:
    with Store(name, keys=1) as store:
        key = key_of_limiter(hash_key_of(name))
        TokenBucket(store, LIMITER, "1/year").allow_many(range(100))
        tags = {tag for tag, _ in read_cells(path_of(name)) if tag}
    hashes = {sip13(key, number.to_bytes(8, "little")) for number in range(100)}
    assert {tag >> layout.KIND_BITS for tag in tags} == {value >> layout.KIND_BITS for value in hashes}


def test_keys_that_collide_under_one_hash_key_do_not_under_others(name: str, full: bool, record: Record) -> None:
    draws = random.Random(8)
    known = (draws.getrandbits(64), draws.getrandbits(64))
    crafted = craft(known, 300, line=77)

    # That the attack is one: with the hash key known, nearly every key is away from home, and every probe a long one.
    hit = spread(name, crafted, known)
    assert hit.most_of_a_line > 250
    assert hit.away == 300 - layout.CELLS_PER_LINE

    others = [(draws.getrandbits(64), draws.getrandbits(64)) for _ in range(1000 if full else 100)]
    spreads = [spread(name, crafted, other) for other in others]
    ordinary = [spread(name, draws.sample(range(10**15), 300), other) for other in others]
    for measured in (spreads, ordinary):
        # Six standard deviations of the sum of so many chi-squared statistics.
        freedom = (LINES - 1) * len(others)
        assert abs(sum(each.chi_squared for each in measured) - freedom) < 6 * (2 * freedom) ** 0.5
        assert max(each.most_of_a_line for each in measured) <= 12
    mean = [sum(each.away for each in measured) / len(others) for measured in (spreads, ordinary)]
    record(
        "flooding, of 300 keys with one home line, away from it",
        f"{hit.away} under the hash key that they are for; under {len(others)} others {mean[0]:.1f}, "
        f"of keys by chance {mean[1]:.1f}",
    )


def test_every_segment_has_a_hash_key_of_its_own(make_name: Callable[[], str]) -> None:
    """From the system's entropy: the same seed makes another key."""
    names = [make_name() for _ in range(64)]
    for name in names:
        random.seed(1)
        Store(name, keys=1).close()
    keys = [hash_key_of(name) for name in names]
    words = [word for key in keys for word in key]
    assert len(set(words)) == len(words)
    ones = sum(word.bit_count() for word in words)
    # Six standard deviations.
    assert abs(ones - 32 * len(words)) < 6 * (16 * len(words)) ** 0.5


def test_no_public_value_reveals_the_hash_key(name: str) -> None:
    with Store(name, keys=1) as store:
        bucket = TokenBucket(store, LIMITER, "1/minute")
        texts = " ".join(_texts_of([store, store.stats(), bucket, bucket.hit("k"), bucket.reserve("k", max_delay=60)]))
        key = hash_key_of(name)
    numbers = {int(number, 0) for number in re.findall(r"\b(?:0x[0-9a-f]+|[1-9]\d*)\b", texts)}
    assert LIMITER in texts
    assert not numbers & {*key, *key_of_limiter(key)}
    assert not any(f"{word:x}" in texts for word in key)


def _texts_of(things: Iterable[Any]) -> Iterator[str]:
    for thing in things:
        yield repr(thing)
        for attribute in dir(thing):
            if not attribute.startswith("_"):
                yield repr(getattr(thing, attribute))


# Floods.

HOUR_S: Final = 3600
LIMIT: Final = 100
VICTIMS: Final = [f"victim {number}" for number in range(24)]
START_S: Final = 1000 * HOUR_S  # the beginning of a window


@dataclass(frozen=True)
class Kind:
    """A limiter of so many permits an hour."""

    name: str
    make: Callable[[Store, int], Any]


TOKEN_BUCKET: Final = Kind("token bucket", lambda store, limit: TokenBucket(store, LIMITER, f"{limit}/hour"))
INTERVALS: Final = Kind(
    "token bucket, intervals", lambda store, limit: TokenBucket(store, LIMITER, f"{limit}/hour", refill="interval")
)
LEAKY_BUCKET: Final = Kind("leaky bucket", lambda store, limit: LeakyBucket(store, LIMITER, f"{limit}/hour", limit))
FIXED_WINDOW: Final = Kind("fixed window", lambda store, limit: FixedWindow(store, LIMITER, f"{limit}/hour"))
SLIDING_WINDOW: Final = Kind("sliding window", lambda store, limit: SlidingWindow(store, LIMITER, f"{limit}/hour"))

ORDERED_BY_EXPIRY: Final = [TOKEN_BUCKET, INTERVALS, LEAKY_BUCKET, FIXED_WINDOW, SLIDING_WINDOW]


@dataclass(frozen=True)
class Ordered:
    """A limiter whose keys eviction compares by what they have used."""

    kind: Kind
    resets: int
    """How much of a limit of 100 a flood must use of each of its keys to reset one at its limit."""


ORDERED_BY_USE: Final = [
    Ordered(
        Kind("fixed window, first", lambda store, limit: FixedWindow(store, LIMITER, f"{limit}/hour", align="first")),
        # A count of seven bits.
        64,
    ),
    Ordered(
        Kind(
            "fixed window, stagger", lambda store, limit: FixedWindow(store, LIMITER, f"{limit}/hour", align="stagger")
        ),
        64,
    ),
    Ordered(
        Kind(
            "bucketed window",
            lambda store, limit: BucketedWindow(store, LIMITER, f"{limit}/hour", keys=EXTENT_KEYS),
        ),
        LIMIT,
    ),
    Ordered(
        Kind("sliding log", lambda store, limit: SlidingLog(store, LIMITER, f"{limit}/hour", keys=EXTENT_KEYS)), LIMIT
    ),
    Ordered(
        Kind("concurrency", lambda store, limit: Concurrency(store, LIMITER, limit, lease="1h", keys=EXTENT_KEYS)),
        LIMIT,
    ),
]
INITIAL: Final = Kind(
    "token bucket, initial", lambda store, limit: TokenBucket(store, LIMITER, "100/hour", initial=limit)
)
MIN_INTERVAL: Final = Kind("minimum interval", lambda store, limit: MinInterval(store, LIMITER, "1 hour"))

FILLS: Final = (0.0, 0.4, 0.76)
fills = pytest.mark.parametrize("fill", FILLS)


@contextmanager
def flooded(kind: Kind, fill: float, limit: int = LIMIT) -> Iterator[tuple[Any, ManualClock, Store]]:
    """A limiter in a table of which `fill` is taken by keys of ordinary use, and in which the victims are at their
    limit.
    """
    draws = random.Random(7)
    clock = ManualClock(START_S)
    with Store.private(keys=1, on_full="evict", clock=clock) as store:
        limiter = kind.make(store, limit)
        ordinary = [f"ordinary {number}" for number in range(round(fill * CELLS) - len(VICTIMS))]
        for _ in range(30):
            clock.advance(10)
            asking = draws.sample(ordinary, len(ordinary) // 10)
            limiter.allow_many(asking, [draws.choice((1, 1, 1, 2, 5)) if limit > 5 else 1 for _ in asking])
        use_up(limiter, VICTIMS)
        yield limiter, clock, store


def use_up(limiter: Any, keys: list[str]) -> None:
    for key in keys:
        while limiter.allow(key):
            pass


def is_reset(limiter: Any, key: str) -> bool:
    return bool(limiter.peek(key, 0).reset_after_ns == 0)


class Flood:
    """Keys that come once, each with one request of the same cost, some milliseconds apart."""

    def __init__(self, limiter: Any, clock: ManualClock, cost: int = 1, pause_s: float = 0.005) -> None:
        self._limiter, self._clock, self._cost, self._pause_s = limiter, clock, cost, pause_s
        self.keys = 0

    def go_on(self, count: int = 16) -> None:
        self._limiter.allow_many(range(self.keys, self.keys + count), [self._cost] * count)
        self.keys += count
        self._clock.advance(self._pause_s)

    def until_reset(self, limiter: Any, victims: list[str], most: int = 40 * CELLS) -> list[int]:
        """After how many keys each victim was reset; those are left out that weren't before they would have been."""
        began_s = self._clock.now()
        after: list[int] = []
        left = {victim: began_s + limiter.peek(victim, 0).reset_after for victim in victims}
        while left and self.keys < most:
            self.go_on()
            ends_s = [left.pop(victim) for victim in list(left) if is_reset(limiter, victim)]
            after += [self.keys for end_s in ends_s if self._clock.now() < end_s]
        return after


def record_after(record: Record, what: str, after: list[int]) -> None:
    record(
        f"flooding, {what}: reset by one-off keys",
        f"{min(after) / CELLS:.2f} to {max(after) / CELLS:.2f} per cell, {median(after) / CELLS:.2f} in the middle",
    )


# What orders by use.


@fills
@pytest.mark.parametrize(
    "kind", [*ORDERED_BY_EXPIRY, *(ordered.kind for ordered in ORDERED_BY_USE)], ids=lambda kind: kind.name
)
def test_keys_that_come_once_never_reset_one_at_its_limit(kind: Kind, fill: float, record: Record) -> None:
    with flooded(kind, fill) as (limiter, clock, store):
        flood = Flood(limiter, clock)
        assert flood.until_reset(limiter, VICTIMS) == []
        assert store.stats().total.evicted > 30 * CELLS, "this was no flood"
        live = [victim for victim in VICTIMS if not is_reset(limiter, victim)]
        # A staggered window may have ended meanwhile.
        assert len(live) == len(VICTIMS) or (kind.name == "fixed window, stagger" and len(live) > len(VICTIMS) // 2)
        assert max(limiter.peek(victim).remaining for victim in live) == 0
    if fill == max(FILLS):
        record(f"flooding, {kind.name}: not reset by one-off keys", f"{flood.keys / CELLS:.0f} per cell")


@pytest.mark.parametrize("charged", [1, 2, 5, 20])
@pytest.mark.parametrize("kind", [TOKEN_BUCKET, LEAKY_BUCKET], ids=lambda kind: kind.name)
def test_an_evicted_bucket_is_forgiven_no_more_than_each_key_of_the_flood_was_charged(kind: Kind, charged: int) -> None:
    limit = 20
    permit_ns = HOUR_S * 10**9 // limit
    forgiven_ns = []
    with flooded(kind, 0.4, limit) as (limiter, clock, _):
        # In the time of one permit, more keys than there are cells.
        flood = Flood(limiter, clock, charged, pause_s=0)
        left = set(VICTIMS)
        while left:
            clock.advance(permit_ns / 8e9)
            missing_ns = {victim: limiter.peek(victim, 0).reset_after_ns for victim in left}
            flood.go_on(256)
            for victim in [victim for victim in left if is_reset(limiter, victim)]:
                left.remove(victim)
                forgiven_ns.append(missing_ns[victim])
    assert max(forgiven_ns) <= charged * permit_ns
    # And that much it can be: the bound is a tight one.
    assert max(forgiven_ns) > (charged - 1) * permit_ns * 3 // 4


@pytest.mark.parametrize("charged", [1, 3, 4, 30, LIMIT])
@pytest.mark.parametrize("kind", [INTERVALS, FIXED_WINDOW, SLIDING_WINDOW], ids=lambda kind: kind.name)
def test_an_evicted_count_was_no_higher_than_that_of_each_key_of_the_flood(kind: Kind, charged: int) -> None:
    """In fours: the two lowest bits of a state are below a nanosecond. A bucket's begin with 0 for one permit."""
    first = 1 if kind is INTERVALS else 0
    with flooded(kind, 0.4) as (limiter, clock, _):
        counts = {f"count {count}": count for count in range(1, LIMIT + 1)}
        assert all(limiter.hit(key, count) for key, count in counts.items())
        flood = Flood(limiter, clock, charged)
        while flood.keys < 10 * CELLS:
            flood.go_on()
        lost = {count for key, count in counts.items() if is_reset(limiter, key)}
    four = (charged - first) // 4
    assert lost >= {count for count in counts.values() if (count - first) // 4 < four}
    assert max(lost, default=0) <= four * 4 + 3 + first


@pytest.mark.parametrize("kind", [TOKEN_BUCKET, LEAKY_BUCKET], ids=lambda kind: kind.name)
def test_the_cost_of_resetting_a_bucket_at_its_limit(kind: Kind, record: Record) -> None:
    """Every key of the flood must be driven as far; then it takes about as many of them as there are cells."""
    with flooded(kind, max(FILLS)) as (limiter, clock, _):
        after = Flood(limiter, clock, LIMIT).until_reset(limiter, VICTIMS)
    assert len(after) == len(VICTIMS)
    assert min(after) > CELLS // 4
    record(
        f"flooding, {kind.name} of {LIMIT}: reset by permits for other keys",
        f"{min(after) * LIMIT / CELLS:.0f} to {max(after) * LIMIT / CELLS:.0f} per cell",
    )


@pytest.mark.parametrize("ordered", ORDERED_BY_USE, ids=lambda ordered: ordered.kind.name)
def test_a_flood_resets_a_key_only_if_it_uses_as_much_of_each_of_its_own(ordered: Ordered, record: Record) -> None:
    for charged in (2, LIMIT // 2, ordered.resets - 1):
        with flooded(ordered.kind, 0.4) as (limiter, clock, _):
            assert Flood(limiter, clock, charged).until_reset(limiter, VICTIMS, most=4 * CELLS) == []
    # No other keys: one that comes to the cell of an evicted key of a concurrency limit finds the permits there held.
    with flooded(ordered.kind, 0.0) as (limiter, clock, _):
        after = Flood(limiter, clock, ordered.resets).until_reset(limiter, VICTIMS, most=4 * CELLS)
    assert after
    assert min(after) > CELLS // 16
    record(
        f"flooding, {ordered.kind.name} of {LIMIT}: reset by permits for other keys",
        f"{min(after) * ordered.resets / CELLS:.0f} to {max(after) * ordered.resets / CELLS:.0f} per cell, "
        f"{len(after)} of {len(VICTIMS)} keys",
    )


@pytest.mark.parametrize("ordered", ORDERED_BY_USE, ids=lambda ordered: ordered.kind.name)
def test_the_key_that_has_used_less_goes_first_though_it_expires_last(ordered: Ordered) -> None:
    """Keys at their limit come first, and all others later, so theirs expire later."""
    with flooded(ordered.kind, 0.0) as (limiter, clock, store):
        # A staggered window may end in between.
        lasting = [victim for victim in VICTIMS if limiter.peek(victim, 0).reset_after > 60]
        clock.advance(60)
        limiter.allow_many(range(3 * CELLS))
        assert store.stats().total.evicted > CELLS
        assert len(lasting) > len(VICTIMS) // 2
        assert not any(limiter.allow_many(lasting))


NOT_BY_THE_CLOCK: Final = [ordered.kind for ordered in ORDERED_BY_USE[:2]]


@pytest.mark.parametrize("kind", NOT_BY_THE_CLOCK, ids=lambda kind: kind.name)
def test_keys_that_come_once_never_reset_one_at_a_lower_limit_of_its_own(kind: Kind) -> None:
    with flooded(kind, 0.4, 10**6) as (limiter, clock, store):
        own = [f"own {number}" for number in range(24)]
        for key in own:
            while limiter.hit(key, rate="3/hour"):
                pass
        assert Flood(limiter, clock).until_reset(limiter, own) == []
        assert store.stats().total.evicted > 30 * CELLS, "this was no flood"
        assert not any(limiter.hit(key, rate="3/hour") for key in own if not is_reset(limiter, key))


@pytest.mark.parametrize("kind", NOT_BY_THE_CLOCK, ids=lambda kind: kind.name)
def test_a_flood_of_buckets_that_expire_sooner_never_resets_a_window(kind: Kind) -> None:
    """Not even one that has used little, though a bucket can't tell how little it has used."""
    with flooded(kind, 0.0) as (limiter, clock, store):
        little = [f"little {number}" for number in range(24)]
        assert all(limiter.allow_many(little))
        flood = Flood(TokenBucket(store, "quick", "1000/hour"), clock, pause_s=0)
        assert flood.until_reset(limiter, little, most=8 * CELLS) == []
        assert store.stats().total.evicted > 6 * CELLS, "this was no flood"


@pytest.mark.parametrize("kind", NOT_BY_THE_CLOCK, ids=lambda kind: kind.name)
def test_windows_beside_buckets_that_expire_sooner_don_t_evict_each_other(kind: Kind) -> None:
    with flooded(kind, 0.0) as (limiter, clock, store):
        Flood(TokenBucket(store, "quick", "1000/hour"), clock, pause_s=0).go_on(8 * CELLS)
        names = [f"new {number}" for number in range(64)]
        admitted = 0
        for _ in range(2 * LIMIT):
            admitted += limiter.allow_many(names).count(True)
        assert admitted == LIMIT * len(names)


# What doesn't.


@fills
def test_how_many_keys_that_come_once_reset_one_of_a_minimum_interval(fill: float, record: Record) -> None:
    with flooded(MIN_INTERVAL, fill, 1) as (limiter, clock, _):
        after = Flood(limiter, clock, pause_s=0.9).until_reset(limiter, VICTIMS)
    assert len(after) == len(VICTIMS)
    # No attacker can aim, so there must be many before one of them comes to the right place.
    assert min(after) > CELLS // 16
    if fill in (0, max(FILLS)):
        record_after(record, f"{MIN_INTERVAL.name}, {fill:.0%} full", after)


@pytest.mark.parametrize(
    "kind",
    [MIN_INTERVAL, INITIAL, *ORDERED_BY_EXPIRY, *(ordered.kind for ordered in ORDERED_BY_USE)],
    ids=lambda kind: kind.name,
)
def test_a_limit_that_one_request_uses_up_denies_new_keys_unless_the_store_says_otherwise(kind: Kind) -> None:
    clock = ManualClock(START_S)
    with Store.private(keys=1, clock=clock) as store:
        limiter = kind.make(store, 1)
        use_up(limiter, VICTIMS)
        assert Flood(limiter, clock).until_reset(limiter, VICTIMS) == []
        total = store.stats().total
        assert total.evicted == 0
        assert total.full > 30 * CELLS


def test_a_sliding_window_that_goes_on_is_reset_in_the_window_after_unless_it_was_used_in_it(record: Record) -> None:
    for used in (False, True):
        with flooded(SLIDING_WINDOW, 0.4) as (limiter, clock, _):
            clock.set(START_S + HOUR_S + 40)
            # A hundredth of the last window has left: one permit.
            assert not used or limiter.allow_many(VICTIMS) == [True] * len(VICTIMS)
            after = Flood(limiter, clock).until_reset(limiter, VICTIMS)
        if used:
            assert after == []
        else:
            assert len(after) == len(VICTIMS)
            record_after(record, "sliding window not yet used in this window, 40% full", after)


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("kind", ORDERED_BY_EXPIRY, ids=lambda kind: kind.name)
def test_keys_that_come_once_never_reset_one_at_a_limit_below_four(kind: Kind, limit: int) -> None:
    """The two lowest bits of a count, which are below the unit of an expiry, order keys, too."""
    with flooded(kind, 0.4, limit) as (limiter, clock, _):
        assert Flood(limiter, clock).until_reset(limiter, VICTIMS) == []


def test_marks_of_requests_never_reset_a_key_at_its_limit() -> None:
    """They are kept for longer than a key, and yet evicted first."""
    with flooded(TOKEN_BUCKET, 0.4) as (limiter, clock, store):
        for number in range(8 * CELLS):
            assert limiter.hit(number, request_id=number, request_ttl="1 day")
            clock.advance(0.0001)
        assert store.stats().total.evicted > 8 * CELLS, "this was no flood"
        assert not any(limiter.allow_many(VICTIMS))


def test_a_flood_of_another_limiter_of_the_store_that_forgets_later(record: Record) -> None:
    """Limiters of one store share its table: the key that expires first is evicted, whatever its limiter."""
    with flooded(TOKEN_BUCKET, 0.4) as (limiter, clock, store):
        after = Flood(TokenBucket(store, "slow", "1/day"), clock).until_reset(limiter, VICTIMS)
    assert len(after) == len(VICTIMS)
    assert min(after) > CELLS // 8
    record_after(record, "token bucket of an hour beside one of a day, 40% full", after)
