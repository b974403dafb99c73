"""Buckets as one writes them by hand, to compare with."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext
from typing import Final

SECOND_NS: Final = 1_000_000_000


class DictBucket:
    """A token bucket in a dict: exact within one process and one thread, without a lock."""

    def __init__(self, limit_per_second: int, burst: int) -> None:
        self.increment_ns = SECOND_NS // limit_per_second
        self.room_ns = (burst - 1) * self.increment_ns
        self.states: dict[str, int] = {}

    def allow(self, key: str) -> bool:
        now_ns = time.monotonic_ns()
        start_ns = self.states.get(key, 0)
        if start_ns < now_ns:
            start_ns = now_ns
        if start_ns - now_ns > self.room_ns:
            return False
        self.states[key] = start_ns + self.increment_ns
        return True


class LockedBucket:
    """One key's bucket for all processes: a number in shared memory, with a lock."""

    def __init__(self, limit_per_second: int, burst: int, context: BaseContext | None = None) -> None:
        context = context or multiprocessing.get_context("spawn")
        self.increment_ns = SECOND_NS // limit_per_second
        self.room_ns = (burst - 1) * self.increment_ns
        self.lock = context.Lock()
        self.state = context.Value("q", 0, lock=False)

    def allow(self, key: str) -> bool:
        with self.lock:
            now_ns = time.monotonic_ns()
            start_ns = self.state.value
            if start_ns < now_ns:
                start_ns = now_ns
            if start_ns - now_ns > self.room_ns:
                return False
            self.state.value = start_ns + self.increment_ns
            return True


class ManagedBucket:
    """Buckets in a manager process's dict, under its lock: correct for all processes, at four messages a decision."""

    def __init__(
        self, limit_per_second: int, burst: int, states: MutableMapping[str, int], lock: AbstractContextManager[object]
    ) -> None:
        self.increment_ns = SECOND_NS // limit_per_second
        self.room_ns = (burst - 1) * self.increment_ns
        self.states = states
        self.lock = lock

    def allow(self, key: str) -> bool:
        with self.lock:
            now_ns = time.monotonic_ns()
            start_ns = max(self.states.get(key, 0), now_ns)
            if start_ns - now_ns > self.room_ns:
                return False
            self.states[key] = start_ns + self.increment_ns
            return True
