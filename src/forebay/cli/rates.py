"""Rates of a store's limiters, from looks at its segment again and again."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from forebay.errors import SegmentError
from forebay.metrics.readings import COUNTERS, OWN_COUNTERS, POLICY, SHEDDER, Memory, is_own
from forebay.metrics.segments import attached_processes, hot_keys_of, limiters_of, occupancy_of
from forebay.segment import layout
from forebay.segment.file_users import file_users
from forebay.stats import HotKey, LimiterStats
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["COLUMNS", "Frame", "Row", "Watch"]

SHARE: Final = 0.001
"""The part of the time that one slow look may take."""
LEAST_S: Final = 1.0
"""The time between two slow looks, and over which a rate is taken, at least."""
COLUMNS: Final = 60
"""Values of a course that are kept."""

HOT_KEYS: Final = 20
"""Hot keys that are shown, at most."""

T = TypeVar("T")
Counts = dict[tuple[str, str], LimiterStats]
Look = tuple[float, Counts]
"""A time in seconds, and the counts then."""


@dataclass(frozen=True, slots=True)
class Row:
    """A limiter."""

    name: str
    algorithm: str
    counts: dict[str, int]
    """Since the store was made, by the names in ``LimiterStats``."""
    per_second: dict[str, float]
    """The same, as rates."""
    memory: Memory | None
    """Its own memory; that which is fullest."""

    @property
    def decided(self) -> float:
        """Decisions each second."""
        return self.per_second["allowed"] + self.per_second["denied"]

    @property
    def denied_share(self) -> float:
        """The part of the decisions that denied."""
        return self.per_second["denied"] / self.decided if self.decided else 0.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A store at one moment."""

    keys: int
    live_keys: int
    bytes: int
    processes: int
    """Processes that use it."""
    threads: int | None
    """Their threads, as far as this user may see them; None if it sees no process."""
    rules_version: int
    removed: bool
    """Whether the store's file is gone, or replaced by one that can't be read: only processes that had it open use it
    still.
    """
    policy_per_second: float
    """Requests that were decided in place of Redis."""
    limiters: tuple[Row, ...]
    hot_keys: tuple[HotKey, ...] | None
    """The most denied keys of late, and behind them the most allowed ones; None if the store has no record of them."""


class Watch:
    """Looks at a store's segment. It reads only, and follows a store that is made again.

    A look reads the counters, in 0.1 ms. What takes longer is read so seldom that it takes `SHARE` of the time.
    """

    def __init__(self, path: str) -> None:
        """Raises ``SegmentError`` if there is no segment at the path."""
        self._path = path
        self._begin(MappedSegment(path))

    def _begin(self, segment: MappedSegment) -> None:
        self._segment = segment
        self._looks: deque[Look] = deque()
        self._marks: deque[Look] = deque(maxlen=COLUMNS + 1)
        self._occupancy = _Seldom(lambda: occupancy_of(segment))
        self._users = _Seldom(lambda: _users_of(segment))
        self._hot_keys = _Seldom(lambda: hot_keys_of(segment))

    def close(self) -> None:
        self._segment.close()

    def look(self) -> Frame:
        """The store now, with rates since the look of a second ago."""
        is_removed = self._follow()
        segment = self._segment
        now_s, counts = time.monotonic(), limiters_of(segment)
        self._looks.append((now_s, counts))
        # The latest look of a second ago or longer, if there is one.
        while len(self._looks) > 1 and now_s - self._looks[1][0] >= LEAST_S:
            self._looks.popleft()
        before_s, before = self._looks[0]
        if not self._marks or now_s - self._marks[-1][0] >= LEAST_S:
            self._marks.append((now_s, counts))
        live_keys, memories, _ = self._occupancy.value()
        processes, threads = self._users.value()
        hot_keys = self._hot_keys.value()

        def row_of(limiter: tuple[str, str], stats: LimiterStats) -> Row:
            # One that was made since began at 0.
            earlier = before.get(limiter, NOTHING)
            counts = {count: getattr(stats, count) for count in COUNTERS}
            grown = {count: max(value - getattr(earlier, count), 0) for count, value in counts.items()}
            per_second = {count: value / ((now_s - before_s) or 1.0) for count, value in grown.items()}
            return Row(*limiter, counts, per_second, _fullest(limiter, memories))

        rows = [row_of(limiter, stats) for limiter, stats in counts.items() if limiter[1] != SHEDDER]
        return Frame(
            keys=segment.table.keys,
            live_keys=live_keys,
            bytes=segment.status.st_size,
            processes=processes,
            threads=threads,
            rules_version=segment.u64(layout.HEADER_RULES_VERSION),
            removed=is_removed,
            policy_per_second=sum(row.per_second["allowed"] for row in rows if OWN_COUNTERS.get(row.name) is POLICY),
            limiters=tuple(row for row in rows if not is_own(row.name)),
            hot_keys=None if hot_keys is None else tuple(hot_keys[:HOT_KEYS]),
        )

    @property
    def marked_s(self) -> float:
        """The time of the last value of all courses: they stay as they are for a second."""
        return self._marks[-1][0]

    def course(self, limiter: tuple[str, str], count: int) -> list[float]:
        """Decisions each second, in each of the last seconds or intervals; the latest last."""
        marks = list(self._marks)[-count - 1 :]
        sums = [(at_s, stats.allowed + stats.denied) for at_s, one in marks for stats in [one.get(limiter, NOTHING)]]
        return [
            max(total - earlier, 0) / (at_s - before_s)
            for (before_s, earlier), (at_s, total) in itertools.pairwise(sums)
        ]

    def _follow(self) -> bool:
        """Take the segment that is at the path now. Whether there is none that can be read."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return True
        if os.path.samestat(status, self._segment.status):
            return False
        try:
            following = MappedSegment(self._path)
        except SegmentError:
            # One that is being made is there at a later look. This user may not read another's.
            return True
        self._segment.close()
        self._begin(following)
        return False


NOTHING: Final = LimiterStats()


class _Seldom(Generic[T]):
    """A value that is computed again when enough time has passed since the last time."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._due_s = 0.0

    def value(self) -> T:
        begun_s = time.monotonic()
        if begun_s >= self._due_s:
            self._value = self._compute()
            took_s = time.monotonic() - begun_s
            self._due_s = begun_s + max(LEAST_S, took_s / SHARE)
        return self._value


def _fullest(limiter: tuple[str, str], memories: tuple[Memory, ...]) -> Memory | None:
    own = [memory for memory in memories if (memory.limiter, memory.algorithm) == limiter]
    if not own:
        return None
    fullest = max(own, key=lambda memory: memory.live_keys / memory.keys)
    return replace(fullest, held=sum(memory.held for memory in own))


def _users_of(segment: MappedSegment) -> tuple[int, int | None]:
    """The processes that use the segment, and their threads."""
    pids = file_users().pids_of(segment.status)
    # This process has it mapped, too.
    pids = [pid for pid in pids if pid != os.getpid()]
    threads = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            threads += len(os.listdir(f"/proc/{pid}/task"))
    return max(len(pids), attached_processes(segment)), threads if pids else None
