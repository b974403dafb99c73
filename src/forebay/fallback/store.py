"""Stores hold the state of limiters in this process's memory."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal, NoReturn, Self

from forebay import forking
from forebay.clock import ManualClock
from forebay.errors import ClockMismatch, NeedsCompiledCore, SegmentMissing, SegmentSizeWarning, StoreClosed
from forebay.fallback.memory import Memory
from forebay.names import LimiterNames
from forebay.segment import layout
from forebay.stats import HotKey, LimiterStats, StoreStats
from forebay.store_options import check_options, checked_mode, default_path, path_of

__all__ = ["DIRECTORY", "HotKey", "LimiterStats", "Store", "StoreStats", "clear", "default_path"]

DIRECTORY: Final = None
"""Where ``forebay.testing.private_stores`` makes a directory, whose name its stores have: anywhere."""
CLOCK_NAMES: Final = {
    layout.CLOCK_MONOTONIC: "monotonic",
    layout.CLOCK_MANUAL: "manual",
    layout.CLOCK_PYTHON: "Python (time.time)",
}


class Attachment:
    """The part of a store's hold on its memory that web middlewares and the Redis store read."""

    is_inherited: Final = False
    """Whether a parent process made the store, and so shares it: no process shares this memory."""
    allows_other_clock: bool = False


class Store:
    """The state of any number of limiters, in this process.

    forebay runs without its compiled core here, so no other process sees this state: several workers allow several
    times each limit. It is for development. All arguments are those of the compiled core's ``Store``, and are checked
    as there. Stores of one name (or path, or name and directory) share their state, as long as the process runs, until
    ``Store.unlink``. `mode` and `group` have no effect, as there is no file.

    *Threads*: safe. *Fork*: the child has a copy of the state, and counts apart. As a context manager, it closes
    itself.
    """

    name: str
    """The name that it was made with; ``"private"`` for ``Store.private``."""
    path: None
    """There is no file."""
    keys: int
    """Live keys that the memory was made for."""
    on_full: str | None
    manual_clock: ManualClock | None
    attachment: Attachment
    segment: Memory
    names: LimiterNames

    def __init__(
        self,
        name: str,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] | None = None,
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
        mode: int = 0o600,
        group: str | int | None = None,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        hot_keys: int | None = None,
    ) -> None:
        check_options(keys, on_full, clock, hot_keys)
        refuse_record(hot_keys)
        target = path_of(name, path, directory)
        checked_mode(mode, group)
        kind = _clock_kind(clock)
        with _lock:
            memory = _by_path.get(target)
            if memory is None:
                memory = _by_path[target] = Memory(target, keys, kind)
        if memory.clock_kind != kind:
            raise ClockMismatch(
                target,
                f"a segment with a {CLOCK_NAMES[memory.clock_kind]} clock",
                f"one with a {CLOCK_NAMES[kind]} clock",
                "give every store of that name the same kind of clock, or call Store.unlink",
            )
        if memory.keys != keys:
            warnings.warn(
                f"the store {target} was made for {memory.keys} keys and keeps that size, although this one has "
                f"keys={keys}; to change it, call Store.unlink",
                SegmentSizeWarning,
                stacklevel=2,
            )
        self.take_memory(name, memory, on_full, clock)

    def take_memory(self, name: str, memory: Memory, on_full: str | None, clock: object) -> None:
        self.name, self.path, self.keys, self.on_full = name, None, memory.keys, on_full
        self.manual_clock = clock if isinstance(clock, ManualClock) else None
        self.names = LimiterNames()
        self.attachment = Attachment()
        self.segment = memory
        self._closed = False
        if self.manual_clock is not None:
            self.manual_clock.attach(memory)

    @classmethod
    def private(
        cls,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] | None = None,
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
        hot_keys: int | None = None,
    ) -> Self:
        """A store without a name, which shares its state with no other."""
        check_options(keys, on_full, clock, hot_keys)
        refuse_record(hot_keys)
        store = cls.__new__(cls)
        store.take_memory("private", Memory("private", keys, _clock_kind(clock)), on_full, clock)
        return store

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Raises ``NeedsCompiledCore``: no other process's store can be seen from here."""
        raise NeedsCompiledCore(
            "Store.attach needs forebay's compiled core, which this process runs without: here each process has stores "
            "of its own"
        )

    @staticmethod
    def unlink(
        name: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        missing_ok: bool = False,
    ) -> None:
        """Forget the state of that name, in that directory, or at that path.

        Stores that have it keep it; the next one of that name begins afresh. Raises ``SegmentError`` if there is none
        and `missing_ok` is false.
        """
        if (name is None) == (path is None):
            raise ValueError("Store.unlink takes a name or a path")
        target = path_of(name, path, directory)
        with _lock:
            memory = _by_path.pop(target, None)
        if memory is None and not missing_ok:
            remedy = "check the name, or give missing_ok=True if there may be none"
            raise SegmentMissing(target, "no such file", "a segment to remove", remedy)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """End the use of the store. Its limiters raise ``StoreClosed`` from now on; the state of a name stays."""
        if not getattr(self, "_closed", True):
            self._closed = True
            if self.manual_clock is not None:
                self.manual_clock.detach(self.segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"keys={self.keys}, on_full={self.on_full!r}"
        return f"<Store {self.name} {state}, in this process alone>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} can't be pickled: make it by name in the other process, which counts apart")

    def stats(self) -> StoreStats:
        """Counts of every limiter in this process, and how full the store is. ``bytes`` is 0: there is no file.

        Reads all keys.
        """
        if self.closed:
            raise StoreClosed(f"{self!r} has no statistics any more")
        return StoreStats(self.keys, self.segment.count_live(), 0, self.segment.stats())

    def hot_keys(self) -> list[HotKey]:
        """Raises ``NeedsCompiledCore``: there is no record of hot keys here."""
        raise no_record()

    def now_ns(self) -> int:
        """The store's time in nanoseconds, for waiters."""
        if self.closed:
            raise StoreClosed(f"{self!r} has no time any more")
        return self.segment.now_ns()


def clear(store: Store) -> None:
    """Forget all keys and counts of a store, for ``forebay.testing.reset_store``."""
    if store.closed:
        raise StoreClosed(f"{store!r} can't be reset by this process")
    store.segment.clear()


def no_record() -> NeedsCompiledCore:
    return NeedsCompiledCore(
        "a record of hot keys needs forebay's compiled core, which this process runs without: leave out hot_keys"
    )


def refuse_record(hot_keys: int | None) -> None:
    if hot_keys is not None:
        raise no_record()


def _clock_kind(clock: object) -> int:
    if isinstance(clock, ManualClock):
        return layout.CLOCK_MANUAL
    return layout.CLOCK_PYTHON if clock == "time" else layout.CLOCK_MONOTONIC


_by_path: dict[str, Memory] = {}
_lock = threading.Lock()


def _reset_in_child() -> None:
    global _lock
    _lock = threading.Lock()


forking.in_child(_reset_in_child)
