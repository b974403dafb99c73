"""Samples of latency, from all processes, summed up in one word for each window of time.

**State.** The number of the window in which the first sample came, how many samples there are, the sum of their
latencies, and two flags: a sample saw at least half of the limit in flight; a request was dropped.

**Transitions.** A process adds a sample by one CAS of the word. If the window is over and has enough samples, the CAS
replaces the word by one with the new sample alone, and the process that wins it has *closed* the window: it alone has
read what it replaced. A process that loses a CAS tries again; another one has added a sample then.

**Invariant.** Each sample is in the word or in one closed window.

**Crash and stall.** A process that is killed before its CAS leaves its own sample out. One that is killed after it has
closed a window takes that window's samples with it, and the estimate stays as it was. No step waits for another
process.

**Damage.** Any word is a state. It has at most one window of wrong samples.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from forebay.shedding.estimates import Window

__all__ = ["Samples", "Words", "add_sample"]

LEAST_SAMPLES: Final = 10
"""A window lasts until it has so many, or a drop."""
SUM_BITS: Final = 32
COUNT_BITS: Final = 14
WINDOW_BITS: Final = 16
MOST_US: Final = 2**SUM_BITS - 1
MOST_SAMPLES: Final = 2**COUNT_BITS - 1


class Words(Protocol):
    """The part of ``SharedWords`` that is needed."""

    def load(self, number: int, /) -> int: ...
    def replace(self, number: int, seen: int, value: int, /) -> bool: ...


class Samples(NamedTuple):
    """The fields of the word."""

    window: int
    samples: int
    total_us: int
    is_used: bool
    has_drop: bool

    @classmethod
    def of(cls, word: int) -> Samples:
        flags = word >> SUM_BITS + COUNT_BITS + WINDOW_BITS
        return cls(
            word >> SUM_BITS + COUNT_BITS & 2**WINDOW_BITS - 1,
            word >> SUM_BITS & MOST_SAMPLES,
            word & MOST_US,
            bool(flags & 1),
            bool(flags & 2),
        )

    @classmethod
    def first(cls, window: int, latency_us: int, is_used: bool, is_dropped: bool) -> Samples:
        """A window with one sample. A dropped request has no latency: it may have failed at once."""
        if is_dropped:
            return cls(window & 2**WINDOW_BITS - 1, 0, 0, is_used, True)
        return cls(window & 2**WINDOW_BITS - 1, 1, min(latency_us, MOST_US), is_used, False)

    @property
    def word(self) -> int:
        flags = self.is_used | self.has_drop << 1
        return (flags << WINDOW_BITS | self.window) << COUNT_BITS + SUM_BITS | self.samples << SUM_BITS | self.total_us

    @property
    def closed(self) -> Window:
        """The figures that an estimate needs of it."""
        return Window(self.total_us / self.samples if self.samples else 0.0, self.is_used, self.has_drop)

    def is_over(self, one: Samples) -> bool:
        """Whether the sample `one` begins a new window, because this one has enough, or has no room."""
        is_full = self.samples + one.samples > MOST_SAMPLES or self.total_us + one.total_us > MOST_US
        return is_full or (self.window != one.window and (self.samples >= LEAST_SAMPLES or self.has_drop))

    def with_one(self, one: Samples) -> Samples:
        """With a sample."""
        return Samples(
            one.window if self.samples == 0 and not self.has_drop else self.window,
            self.samples + one.samples,
            self.total_us + one.total_us,
            self.is_used or one.is_used,
            self.has_drop or one.has_drop,
        )


def add_sample(words: Words, number: int, one: Samples) -> Window | None:
    """Add a sample to the word of this number: the window that this closed, or None. Lock-free."""
    while True:
        word = words.load(number)
        seen = Samples.of(word)
        is_over = seen.is_over(one)
        if words.replace(number, word, (one if is_over else seen.with_one(one)).word):
            return seen.closed if is_over else None
