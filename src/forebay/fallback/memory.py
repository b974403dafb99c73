"""The memory of a store, in place of shared memory: the states of keys, the counts of limiters, and a clock."""

from __future__ import annotations

import heapq
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from forebay import forking
from forebay.alive import alive_in
from forebay.errors import TooManyLimiters
from forebay.host_time import host_ns
from forebay.rate import MAX_PERIOD_NS
from forebay.segment import layout
from forebay.segment.limiter_list import labels_of
from forebay.segment.sizes import BYTES_PER_KEY, CELLS_PER_GROUP, ExtentShape
from forebay.stats import LimiterStats

__all__ = ["Algorithm", "Charge", "Counts", "LimitParams", "Memory", "Table", "Tag", "Verdict"]

# As in the compiled core: states stay below 2**62 ns.
LAST_PYTHON_S: Final = (2**62 - 3 * MAX_PERIOD_NS) // 10**9
# Times are below this. A state that expires later is a number of permits, which is kept.
NEVER: Final = 2**62
# When there may be room again, if that is not known.
UNKNOWN_NS: Final = 3 * 2**30
# A full table forgets this part of its keys at once: choosing them reads all.
EVICTED_PART: Final = 16

Tag: TypeAlias = tuple[Any, ...]
"""A key of one limiter: what identifies the limiter's state, and the key."""


@dataclass(frozen=True, slots=True)
class LimitParams:
    """A limit in the units of its decision. Each algorithm uses the fields that it needs: see core/limiter.pxd."""

    limit: int
    rate_limit: int
    period_ns: int
    tolerance_ns: int = 0
    due_ns: int = 0
    may_exceed: bool = False
    missing_ns: int = 0
    phase_ns: int = 0
    steps: int = 0
    low_bits: int = 0
    used_bits: int = 0
    previous_bits: int = 0
    previous_shift: int = 0
    rounds_up: bool = False
    buckets: int = 0


@dataclass(slots=True)
class Charge:
    """The charge of one request to one limit."""

    amount: int
    """Added to the state: permits or ns."""
    room: int
    """The most that the state may hold before."""
    params: LimitParams
    max_wait_ns: int = 0
    """The longest delay of a booking, for limits that can be booked ahead."""
    charged_state: Any = None
    """To give a charge back: the state that it left; None for a refund of some earlier charge."""


@dataclass(slots=True)
class Verdict:
    """A decision and what it was made from."""

    tag: Tag
    now_ns: int
    state: Any
    """The state that it left when it allowed, or met when it denied. If the table was full: when a key expires."""
    allowed: bool
    full: bool = False


class Algorithm(Protocol):
    """The decision function of a limiter, and what else is known of its states."""

    fresh: Any
    """The state of a key that was never seen."""

    def take(self, tag: Tag, state: Any, now_ns: int, charge: Charge) -> Any:
        """The state that an allowed request leaves; None if it is denied."""
        ...

    def give_back(self, tag: Tag, state: Any, now_ns: int, charge: Charge) -> Any:
        """The state after a charge is undone; None if nothing of it counts."""
        ...

    def expiry_ns(self, state: Any) -> int:
        """From when on it is a fresh key's."""
        ...

    def used(self, state: Any, now_ns: int) -> int | None:
        """How much the key has used, to compare with other keys of the table. None: keys expire in that order."""
        ...


@dataclass(slots=True)
class Counts:
    """The counts of a limiter."""

    allowed: int = 0
    denied: int = 0
    inserted: int = 0
    evicted: int = 0
    full: int = 0


class Cell(NamedTuple):
    state: Any
    algorithm: Algorithm


class Table:
    """The states of keys. The caller holds the memory's lock.

    A signal handler, a finalizer or a callback of the garbage collector may decide, too, in the thread that holds it.
    So a loop over cells reads a copy.
    """

    def __init__(self, keys: int, capacity: int) -> None:
        self.keys, self.capacity = keys, capacity
        self._cells: dict[Tag, Cell] = {}

    def find(self, tag: Tag) -> Any:
        """A key's state; None if there is none."""
        cell = self._cells.get(tag)
        return None if cell is None else cell.state

    def put(self, tag: Tag, state: Any, algorithm: Algorithm) -> None:
        self._cells[tag] = Cell(state, algorithm)

    def remove(self, tag: Tag) -> None:
        self._cells.pop(tag, None)

    def clear(self) -> None:
        self._cells.clear()

    def count_live(self, now_ns: int) -> int:
        return sum(cell.algorithm.expiry_ns(cell.state) > now_ns for cell in self._cells.copy().values())

    def decide(
        self, tag: Tag, now_ns: int, algorithm: Algorithm, charge: Charge, on_full: str, counts: Counts
    ) -> Verdict:
        """Decide a request, and change the key's state if it is allowed."""
        state = self.find(tag)
        is_new = state is None
        if is_new:
            state = algorithm.fresh
            if algorithm.take(tag, state, now_ns, charge) is None:
                # It needs no room.
                return Verdict(tag, now_ns, state, False)
            room_ns = self._make_room(now_ns, on_full, counts)
            if room_ns is not None:
                counts.full += 1
                left = algorithm.take(tag, state, now_ns, charge) if on_full == "allow" else None
                return Verdict(tag, now_ns, room_ns if left is None else left, left is not None, full=True)
        left = algorithm.take(tag, state, now_ns, charge)
        if left is None:
            return Verdict(tag, now_ns, state, False)
        self.put(tag, left, algorithm)
        counts.inserted += is_new
        return Verdict(tag, now_ns, left, True)

    def give_back(self, tag: Tag, now_ns: int, algorithm: Algorithm, charge: Charge) -> bool:
        """Undo a charge. Whether anything of it counted."""
        state = self.find(tag)
        left = None if state is None else algorithm.give_back(tag, state, now_ns, charge)
        if left is None:
            return False
        self.put(tag, left, algorithm)
        return True

    def _make_room(self, now_ns: int, on_full: str, counts: Counts) -> int | None:
        """Make room for one more key: None, or the time at which there will be room."""
        if len(self._cells) < self.capacity:
            return None
        # A state that has no time stays.
        cells = {tag: cell for tag, cell in self._cells.copy().items() if cell.algorithm.expiry_ns(cell.state) < NEVER}
        if not cells:
            return now_ns + UNKNOWN_NS
        expiries = {tag: cell.algorithm.expiry_ns(cell.state) for tag, cell in cells.items()}
        victims = [tag for tag, expiry_ns in expiries.items() if expiry_ns <= now_ns]
        if not victims:
            if on_full != "evict":
                return min(expiries.values())
            victims = self._victims(cells, now_ns, expiries)
            counts.evicted += len(victims)
        for tag in victims:
            self.remove(tag)
        return None

    def _victims(self, cells: dict[Tag, Cell], now_ns: int, expiries: dict[Tag, int]) -> list[Tag]:
        """The keys to forget. See `choose_victim` in core/table/table.pyx.

        Some keys tell how much they have used: among these, the ones that have used least go first. The others go in
        the order in which they expire. Both orders have a first key. Of these two, the one that expires first goes, or
        the one that has used nothing.
        """
        telling: list[tuple[int, int, int, Tag]] = []
        others: list[tuple[int, int, int, Tag]] = []
        for number, (tag, cell) in enumerate(cells.items()):
            used = cell.algorithm.used(cell.state, now_ns)
            listed = others if used is None else telling
            # The number, because tags can't be compared.
            listed.append((used or 0, expiries[tag], number, tag))
        count = max(1, self.capacity // EVICTED_PART)
        telling, others = heapq.nsmallest(count, telling), heapq.nsmallest(count, others)
        victims: list[Tag] = []
        while len(victims) < count and (telling or others):
            tells = not others or (bool(telling) and (telling[0][0] == 0 or telling[0][1] < others[0][1]))
            victims.append((telling if tells else others).pop(0)[-1])
        return victims


class Memory:
    """All that the stores of one name share in this process.

    *Threads*: `lock` guards everything. *Fork*: the child has a copy, with a lock of its own.
    """

    def __init__(self, label: str, keys: int, clock_kind: int) -> None:
        self.label, self.keys, self.clock_kind = label, keys, clock_kind
        self.lock = threading.RLock()
        # As many as the compiled core has cells for so many keys.
        groups = max(layout.MIN_GROUPS, -(-keys * BYTES_PER_KEY // layout.GROUP_BYTES))
        self.table = Table(keys, groups * CELLS_PER_GROUP)
        self.extents: dict[Tag, Table] = {}
        self._shedders: dict[Tag, list[int]] = {}
        self.follows_python = clock_kind == layout.CLOCK_PYTHON
        # A manual clock and Python's clock show wall clock time, so their offset to the wall clock is 0.
        self.wall_epoch_ns = time.time_ns() if clock_kind == layout.CLOCK_MONOTONIC else 0
        self._epoch_ns = host_ns()
        self._set_ns = 0
        self._secret = secrets.token_bytes(16)
        self._counts: dict[tuple[str, str], Counts] = {}
        self._rules_version = 0
        _memories.add(self)

    def now_ns(self) -> int:
        """The time in nanoseconds."""
        if self.follows_python:
            seconds = time.time()
            if not 0 <= seconds <= LAST_PYTHON_S:
                raise ValueError(f"time.time() says {seconds!r}: a segment's time is from 1970 to 2086")
            # Today a double resolves seconds since 1970 to less than a microsecond, but not to a nanosecond.
            self._set_ns = max(self._set_ns, round(seconds * 1e6) * 1000)
        return self.last_ns()

    def last_ns(self) -> int:
        """The time, by Python's clock as it was last read."""
        return host_ns() - self._epoch_ns if self.clock_kind == layout.CLOCK_MONOTONIC else self._set_ns

    def set_manual_ns(self, now_ns: int, /) -> None:
        """Set the time of a memory with a manual clock."""
        if self.clock_kind != layout.CLOCK_MANUAL:
            raise ValueError("this segment's clock isn't moved by hand")
        self._set_ns = now_ns

    def secret(self, purpose: bytes) -> bytes:
        """16 bytes derived from those that all stores of this memory share."""
        return blake2b(purpose, key=self._secret, digest_size=16).digest()

    def rules_version(self) -> int:
        """The number of the live rules in force; 0 if none were published."""
        return self._rules_version

    def replace_rules_version(self, seen: int, version: int, /) -> bool:
        """Replace the version `seen` by another. False if another value is there."""
        with self.lock:
            if self._rules_version != seen:
                return False
            self._rules_version = version
            return True

    def note_redis_latency(self, took_ns: int, /) -> None:
        """Do nothing: only shared memory has histograms of latencies."""

    def counts_of(self, name: str, algorithm: str) -> Counts:
        """The counts of a limiter. Raises ``TooManyLimiters``."""
        with self.lock:
            if (name, algorithm) not in self._counts and len(self._counts) >= layout.LIMITER_CAPACITY:
                raise TooManyLimiters(
                    f"the store {self.label} has all its {layout.LIMITER_CAPACITY} limiters, so there is no place for "
                    f"{name!r}: tell users apart by keys instead of limiters, or make a second store"
                )
            return self._counts.setdefault((name, algorithm), Counts())

    def extent(self, identity: Tag, shape: ExtentShape) -> Table:
        """The table of a limiter that has one of its own."""
        with self.lock:
            return self.extents.setdefault(identity, Table(shape.keys, shape.used_cells))

    def shedder_words(self, identity: Tag, count: int) -> list[int]:
        """The words of a load shedder."""
        with self.lock:
            return self._shedders.setdefault(identity, [0] * count)

    def stats(self) -> dict[str, LimiterStats]:
        with self.lock:
            listed = self._counts.copy()
            labels = labels_of(listed)
            return {
                labels[name, algorithm]: LimiterStats(
                    counts.allowed, counts.denied, counts.inserted, counts.evicted, counts.full, algorithm=algorithm
                )
                for (name, algorithm), counts in listed.items()
            }

    def count_live(self) -> int:
        with self.lock:
            return self.table.count_live(self.now_ns())

    def clear(self) -> None:
        """Forget all keys and counts. Python's clock begins at the current time."""
        with self.lock:
            for table in (self.table, *self.extents.values()):
                table.clear()
            for words in self._shedders.values():
                words[:] = [0] * len(words)
            for counts in list(self._counts.values()):
                counts.__init__()  # type: ignore[misc]
            if self.follows_python:
                self._set_ns = 0


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def _reset_in_child() -> None:
    for memory in alive_in(_memories):
        memory.lock = threading.RLock()


# A forked child doesn't have the thread that holds the lock.
forking.in_child(_reset_in_child)
