"""Walks all schedules of programs in Python that share words of memory.

Each program runs in a thread of its own, and stops before each load and each CAS of a word. The walk lets one of them
take one step at a time, in every order there is, by depth first. It is for protocols that are written in Python;
native/interleave has the explorer of the compiled ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from forebay.shedding.samples import Samples

Program = Callable[[Any], Any]

WORDS: Final = 4


class StepWords:
    """Words of memory whose loads and CASes are the steps of a schedule. Without a schedule, they are taken at once."""

    def __init__(self) -> None:
        self.values = [0] * WORDS
        self.closed_counts: list[int] = []
        """How many samples each process has read that closed a window."""
        self.wait_for_turn: Callable[[], None] = lambda: None

    def load(self, number: int) -> int:
        self.wait_for_turn()
        return self.values[number]

    def replace(self, number: int, seen: int, value: int) -> bool:
        self.wait_for_turn()
        if not self.matches(number, seen):
            return False
        before, after = Samples.of(seen), Samples.of(value)
        if after.samples <= before.samples:
            self.closed_counts.append(before.samples)
        self.values[number] = value
        return True

    def matches(self, number: int, seen: int) -> bool:
        """The comparison of a CAS."""
        return self.values[number] == seen


class _Run:
    """One schedule: the programs' threads, of which one runs at a time."""

    def __init__(self, words: StepWords, programs: Sequence[Program]) -> None:
        self.words = words
        words.wait_for_turn = self._wait
        self.results: list[Any] = [None] * len(programs)
        self._turns = [threading.Semaphore(0) for _ in programs]
        self._stopped = threading.Semaphore(0)
        self.is_done = [False] * len(programs)
        self._threads = [
            threading.Thread(target=self._run, args=(number, program), daemon=True)
            for number, program in enumerate(programs)
        ]
        self._number = threading.local()
        for thread in self._threads:
            thread.start()
            self._stopped.acquire()

    def step(self, number: int) -> None:
        """Let a program take the step that it has stopped before, up to the next one."""
        self._turns[number].release()
        self._stopped.acquire()

    def _run(self, number: int, program: Program) -> None:
        self._number.value = number
        self.results[number] = program(self.words)
        self.is_done[number] = True
        self._stopped.release()

    def _wait(self) -> None:
        self._stopped.release()
        self._turns[self._number.value].acquire()


class Schedules:
    """Iterates over the words and the programs' results after each schedule. `walked` counts the schedules."""

    def __init__(self, words: Callable[[], StepWords], first: Sequence[int], programs: Sequence[Program]) -> None:
        self._words, self._first, self._programs = words, first, programs
        self.walked = 0

    def __iter__(self) -> Iterator[tuple[StepWords, list[Any]]]:
        prefix: list[int] = []
        while True:
            words = self._words()
            words.values[: len(self._first)] = self._first
            run = _Run(words, self._programs)
            taken: list[tuple[int, list[int]]] = []
            while not all(run.is_done):
                able = [number for number, is_done in enumerate(run.is_done) if not is_done]
                number = prefix[len(taken)] if len(taken) < len(prefix) else able[0]
                taken.append((number, able))
                run.step(number)
            self.walked += 1
            yield words, run.results
            # The next schedule: another choice at the last step that has one.
            while taken and taken[-1][0] == taken[-1][1][-1]:
                taken.pop()
            if not taken:
                return
            number, able = taken.pop()
            prefix = [one for one, _ in taken] + [able[able.index(number) + 1]]
