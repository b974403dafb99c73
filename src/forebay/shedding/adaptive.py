"""AdaptiveLimit: a limit on requests in flight that follows the latency, shared by all processes of a host.

**State.** A slot for each request in flight, in a ``Concurrency`` of as many slots as the limit may reach; and three
words of shared memory: the limit, the long latency, and the samples of the window (`samples`).

**In flight.** A request takes a slot first and then counts the slots that are held. If these are more than the limit,
it gives its slot back and is denied. So of the requests that are admitted, the last one to take its slot has counted
all others: never more are admitted than the limit allowed at that time. Two that come at once may both be denied when
one had room. A request that finds the limit reached is denied before it takes a slot, so a flood of denied requests
takes none.

**Transitions.** A request that ends adds its latency to the window. The one that closes a window computes the estimate
from the two other words, and replaces each by one CAS from what it has read. If it loses one, which takes a process
that has stopped for a whole window, that window leaves the word unchanged.

**Crash and stall.** The two words are estimates of their own, each valid whatever the other is: a process that is
killed between the two CASes has changed one of them. A process that is killed with requests in flight adds no sample
for them, and its slots are free as soon as another process looks. A request whose lease has ended adds none either: its
process has stopped for longer than that, or has not renewed it.

**Damage.** Any word is a state: a limit is cut to what the algorithm allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from forebay.core.algorithms.concurrency import Lease
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, as_period_ns
from forebay.shedding.estimates import AIMD, Gradient2, LongLatency, Window
from forebay.shedding.measuring import MOST_PRIORITIES, MeasuringShedder
from forebay.shedding.samples import Samples, add_sample
from forebay.shedding.shedder import ALL, LEASE, Admission, Outcome, checked_priorities, checked_store, per_cent
from forebay.store import Store

__all__ = ["AdaptiveLimit"]

KIND: Final = 1
LIMIT: Final = 0
LONG: Final = 1
SAMPLES: Final = 2
LIMIT_UNIT: Final = 256
"""Fractions of a limit."""
LATENCY_UNIT: Final = 4096
"""Fractions of a microsecond: the long latency moves by less."""
WINDOWS_BITS: Final = 8
MOST_LATENCY: Final = 2 ** (64 - WINDOWS_BITS) - 1


class AdaptiveLimit(MeasuringShedder):
    """Sheds requests beyond a limit that follows the latency of the requests before.

    ``AdaptiveLimit(store, "search")`` admits so many requests at one time as the backend behind them answers without a
    queue. Nobody has to know that number, and it may change. `algorithm` is a ``Gradient2``, by default, or an
    ``AIMD``, with their own arguments. `window`: how long latencies are collected before the limit moves; text, seconds
    or a ``timedelta``. A window lasts longer if fewer than ten requests end in it. `lease`: how long a request counts
    as in flight without ``renew``.

    `reserved` has the priorities, the most important first, and which part of the limit each keeps from the less
    important ones. With ``{"critical": "20%", "default": "0%"}``, a request that isn't critical is admitted only while
    less than 80 % of the limit is in flight, or nothing. None: all requests are alike, and have no priority.

    ``limit`` is the limit now. All processes of the host share it, the requests in flight, and the latencies. A
    request's latency counts if its admission ended as ``"done"``. One that ended as ``"dropped"`` makes an ``AIMD``
    shrink.

    Raises ``InvalidLimiter``, ``InvalidRate``, ``TooManyLimiters``, ``SegmentSpaceError``. ``admit`` reads all slots,
    as many as the algorithm's `most`, twice.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        algorithm: Gradient2 | AIMD | None = None,
        *,
        reserved: Mapping[str, str] | None = None,
        window: Duration = "1s",
        lease: Duration = LEASE,
    ) -> None:
        checked_store(AdaptiveLimit, store, name)
        self.algorithm = Gradient2() if algorithm is None else algorithm
        if not isinstance(self.algorithm, (Gradient2, AIMD)):
            raise InvalidLimiter(f"algorithm is a Gradient2 or an AIMD, not {short_repr(algorithm)}")
        if reserved is not None and not isinstance(reserved, Mapping):
            raise InvalidLimiter(
                f'reserved has the part of each priority, as {{"critical": "20%", "default": "0%"}}, not '
                f"{short_repr(reserved)}"
            )
        self.priorities = () if reserved is None else checked_priorities(AdaptiveLimit, reserved, MOST_PRIORITIES)
        self._parts = _parts_of(reserved or {})
        self._window_ns = as_period_ns(window)
        super().__init__(store, name, self.algorithm.most, lease, KIND, self._window_ns)

    def __repr__(self) -> str:
        return f"<AdaptiveLimit {self.name!r} {type(self.algorithm).__name__}, up to {self.slots}>"

    @property
    def limit(self) -> int:
        """How many requests may be in flight now."""
        return int(self._estimate(self.words.load(LIMIT)))

    @property
    def latency(self) -> float:
        """The long latency in seconds; 0 if it isn't known yet, or with an ``AIMD``."""
        return _long_of(self.words.load(LONG)).latency_us / 1e6

    @property
    def in_flight(self) -> int:
        """How many requests are in flight now."""
        return self._slots_held()

    def admit(self, priority: str | None = None) -> Admission:
        """As the base class's."""
        limit = max(1, self.limit * self._parts[self.rank(priority)] // 100)
        if self.in_flight >= limit:
            return Admission(self, None)
        lease = self._slots.acquire(ALL)
        if not lease:
            return Admission(self, None)
        try:
            in_flight, now_ns = self.in_flight, self.store.now_ns()
        except BaseException:
            lease.release()
            raise
        if in_flight > limit:
            lease.release()
            return Admission(self, None)
        return Admission(self, (lease,), now_ns, in_flight)

    def finish(self, admission: Admission, leases: Iterable[Lease], outcome: Outcome) -> bool:
        """As the base class's."""
        was_held = super().finish(admission, leases, outcome)
        if was_held and outcome != "ignored":
            self._sample(admission, outcome == "dropped")
        return was_held

    def _sample(self, admission: Admission, is_dropped: bool) -> None:
        now_ns = self.store.now_ns()
        if now_ns - admission.renewed_ns >= self.lease_ns:
            # The process has stood still: that is no latency of the backend.
            return
        latency_us = max(now_ns - admission.begun_ns, 0) // 1000
        is_used = 2 * admission.in_flight >= self.limit
        one = Samples.first(now_ns // self._window_ns, latency_us, is_used, is_dropped)
        closed = add_sample(self.words, SAMPLES, one)
        if closed is not None:
            self._update(closed)

    def _update(self, window: Window) -> None:
        limit_word, long_word = self.words.load(LIMIT), self.words.load(LONG)
        limit, long = self.algorithm.after(self._estimate(limit_word), _long_of(long_word), window)
        self.words.replace(LONG, long_word, _long_word(long))
        self.words.replace(LIMIT, limit_word, round(limit * LIMIT_UNIT))

    def _estimate(self, word: int) -> float:
        algorithm = self.algorithm
        return min(max(word / LIMIT_UNIT, algorithm.least), algorithm.most) if word else algorithm.initial


def _parts_of(reserved: Mapping[str, str]) -> list[int]:
    """For each rank, up to how many per cent of the limit may be in flight for a request to be admitted."""
    parts = [100]
    for priority, text in reserved.items():
        kept = per_cent(text)
        if kept is None or kept >= parts[-1]:
            raise InvalidLimiter(
                f'{priority!r} keeps a part of the limit from less important requests, such as "20%", and leaves them '
                f"more than 0 %; not {short_repr(text)}"
            )
        parts.append(parts[-1] - kept)
    return parts


def _long_of(word: int) -> LongLatency:
    return LongLatency((word >> WINDOWS_BITS) / LATENCY_UNIT, word & 2**WINDOWS_BITS - 1)


def _long_word(long: LongLatency) -> int:
    return min(round(long.latency_us * LATENCY_UNIT), MOST_LATENCY) << WINDOWS_BITS | long.windows
