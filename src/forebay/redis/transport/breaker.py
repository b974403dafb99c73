"""A circuit breaker for one Redis server, shared by all processes of a host.

State
-----
Four limiters in the host's ``Store`` keep it, under the server's name as the key. Every step on a cell is one CAS, so
the breaker is lock-free.

The first three are token buckets, as a full store evicts a bucket's key last if it takes longest to refill. It would
evict a window of so few counts first, and deny a ``MinInterval``.

* *trouble*, a ``TokenBucket``: a count whose ranges are the breaker's states. It falls by 1 in ``FORGET_NS``.

  - 0: closed. In this usual state a call reads this cell and writes nothing.
  - 1 and 2: closed; so many calls have failed since the last answered one.
  - 3 (``THRESHOLD``): open. No process adds to it.
  - above 3: recovering, the field's *half-open*. It begins at ``RECOVERING``; the rest counts the calls that failed
    meanwhile.

* *probes*, a ``TokenBucket``: elects the prober while the breaker is open, one per interval and host.
* *recovering*, a ``TokenBucket``: ends the recovery after ``RECOVERY_S``.
* *at once*, a ``Concurrency``: during the recovery, at most ``AT_ONCE`` calls of the host are at the server.

Transitions
-----------
::

    closed ----- THRESHOLD calls in a row fail ----> open
    open ------- a probe is answered --------------> recovering
    recovering - RECOVERY_S have passed -----------> closed
    recovering - THRESHOLD calls fail meanwhile ---> open

* A failed call adds 1 to *trouble*, up to the end of the current range. The call that fills a range takes the probe of
  the first interval, so that the first probe comes an interval later. A web request that waits for its whole deadline
  counts as a failed call, however each of its calls went.
* An answered call that found 1 or 2 resets *trouble*, unless the reply took more than half of the deadline
  (``SLOW``): a server that slow answers some calls just in time and misses others.
* An answered probe sets *recovering*, then moves *trouble* to ``RECOVERING``.
* A call that finds *recovering* over resets *trouble*.
* The call that fills the recovering range resets *trouble*, then fills the open range.

Invariant
---------
The breaker is never open without probes: each interval elects one.

Proof
-----
Only the prober's election depends on time, and each election expires by itself. A prober that never returns has used
up one interval's probe and nothing else.

Crash and stall
---------------
* Between the two steps of an answered probe: the breaker stays open; the next probe does both steps.
* Between the two steps that reopen it: the breaker is closed, and ``THRESHOLD`` calls must fail again.
* A process killed during the recovery: its permit of *at once* comes back when the process ends.

Not handled
-----------
A late reply to a call from an earlier state, a cell that a full store has evicted, and the end of ``FORGET_NS`` can
each close the breaker. ``THRESHOLD`` failed calls then open it again.

After a fork into another time namespace, a breaker without `host` reads another clock. Its times then end early or late
by as much as the two clocks are apart. Before the time at which the breaker was made, it stays closed.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

from redis import exceptions

from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow
from forebay.errors import StoreUnavailable
from forebay.rate import NS, Rate
from forebay.store import Store

__all__ = ["Breaker", "RedisStatus", "is_failure"]

THRESHOLD: Final = 3
FORGET_NS: Final = 86_400 * NS
FORGETTING: Final = Rate.per_ns(1, FORGET_NS)
RECOVERY_S: Final = 1
# In counts of failed calls.
RECOVERING: Final = 100
MOST: Final = RECOVERING + THRESHOLD
AT_ONCE: Final = 8
# A fraction of the deadline. A reply that takes longer doesn't end a row of failures.
SLOW: Final = 0.5
LEAST_PROBE_INTERVAL_S: Final = 1.0
# Spreads the probes of hosts that lost the server at the same moment.
PROBE_JITTER: Final = 0.25
MOST_COUNTED: Final = 2**32
WHOLE: Final = 2
"""The permits of *recovering*, which are taken together."""
# Limiters' names in the host's store.
RESERVED: Final = "forebay.redis "

_FAILURES: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
)
# Errors of a server that is reachable and can't work. Some versions prefix them with other text inside a script.
_CANT_WORK: Final = re.compile(
    r"\b(LOADING|READONLY|OOM|MASTERDOWN|CLUSTERDOWN|MISCONF|NOREPLICAS|TRYAGAIN|BUSY|UNKILLABLE)\b"
)


def is_failure(error: BaseException | None) -> bool:
    """Whether an error means that the server can't be reached or can't work, not that it rejected one request."""
    # By name: redis-py's classes for a cluster that is down and for an exhausted pool differ between its versions.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MaxConnectionsError", "AuthenticationError", "AuthorizationError"}:
        # One store's wrong password or exhausted pool is no sign that the other stores' calls fail.
        return False
    if isinstance(error, _FAILURES):
        return True
    if isinstance(error, exceptions.NoScriptError):
        return False
    if names & {"ClusterDownError", "RedisClusterException", "ClusterError"}:
        return True
    return "ResponseError" in names and _CANT_WORK.search(str(error)) is not None


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """A Redis server as a host knows it. All processes that share the ``host`` store read the same status."""

    state: Literal["closed", "open", "recovering"]
    """``closed``: every call goes to Redis. ``open``: one call per interval does, and `when_unavailable` decides the
    others. ``recovering``: at most 8 calls of the host are at Redis at one time."""
    failures: int
    """Calls that have failed since the last answered one, up to the number that opens the breaker."""
    failing_for_s: float
    """Seconds since the first of these failures; 0.0 if there are none."""
    decided_by_policy: int
    """Requests that `when_unavailable` decided: ``StoreUnavailable`` raised, allowed, or by the host's share."""


class Cells:
    """The limiters that hold the breaker's state, in one store."""

    def __init__(self, store: Store) -> None:
        self.trouble = TokenBucket(store, RESERVED + "trouble", FORGETTING, burst=MOST)
        # With a burst of 1, a full store would deny new keys by default. Each call of the probes has a rate of its own.
        self.probes = TokenBucket(store, RESERVED + "probes", "1/second", burst=2)
        self.recovering = TokenBucket(store, RESERVED + "recovering", Rate(WHOLE, RECOVERY_S))
        self.at_once = Concurrency(store, RESERVED + "at once", AT_ONCE, lease="1 minute", keys=64)
        self.decided = FixedWindow(store, RESERVED + "decided", Rate.per_ns(MOST_COUNTED, 366 * FORGET_NS))


class Passage:
    """A context manager around one call to Redis. It reports the call's outcome to the breaker."""

    __slots__ = ("_breaker", "_is_watched", "_lease", "_since_s")

    def __init__(self, breaker: Breaker, is_watched: bool, lease: Lease | None = None) -> None:
        self._breaker, self._is_watched, self._lease = breaker, is_watched, lease

    def __enter__(self) -> None:
        if self._is_watched:
            self._since_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.release()
        if error is not None:
            self._breaker.failed(error)
        elif self._is_watched:
            self._breaker.answered(time.monotonic() - self._since_s)


class Breaker:
    """The circuit breaker of one server.

    All processes that share the store `host` share it. Without `host`, this process and its forks do.

    Wrap each call in ``with breaker.passage():``. It raises ``StoreUnavailable`` if this call may not go to Redis. The
    faster ``breaker.enter()`` returns None in the usual state; its caller then reports an error to ``failed`` itself.

    *Threads*, *processes*, *fork*: safe. O(1). In the usual state a call reads one cell.
    """

    def __init__(self, host: Store | None, server: str, timeout_s: float) -> None:
        clock = None if host is None else host.manual_clock
        self._slow_s = SLOW * timeout_s
        self._own = Store.private(keys=64, clock=clock or "monotonic")
        # In another time namespace, the wrong clock moves only the breaker's times, and no limit.
        self._own.attachment.allows_other_clock = True
        self._server = server
        self.is_shared = host is not None
        """Whether all processes that share a store have this breaker."""
        # Twice the deadline, so that a probe ends before the next one begins.
        self._probe_interval_s = max(LEAST_PROBE_INTERVAL_S, 2 * timeout_s)
        self._usual = Passage(self, is_watched=False)
        self._last_error = ""
        self._shared_cells = Cells(self._own if host is None else host)
        self._own_cells = Cells(self._own)
        self._cells = self._shared_cells

    def close(self) -> None:
        self._own.close()

    def enter(self) -> Passage | None:
        remaining = self._cells.trouble.peek(self._server).remaining
        return None if remaining == MOST else self._enter_in_trouble(MOST - remaining)

    def passage(self) -> Passage:
        return self.enter() or self._usual

    def _enter_in_trouble(self, trouble: int) -> Passage:
        server = self._server
        if trouble < THRESHOLD:
            return Passage(self, is_watched=True)
        if trouble == THRESHOLD:
            if self._is_elected():
                return Passage(self, is_watched=True)
            raise StoreUnavailable(
                f"Redis has not decided: {server} has not answered the last {THRESHOLD} calls of this host, and is "
                f"asked again within {self._probe_interval_s * (1 + PROBE_JITTER):.3g} s{self._last_error}"
            )
        if self._cells.recovering.peek(server, WHOLE).allowed:
            self._close()
            return self._usual
        lease = self._cells.at_once.acquire(server)
        if lease:
            return Passage(self, is_watched=False, lease=lease)
        raise StoreUnavailable(
            f"Redis has not decided: {server} is back just now, and {AT_ONCE} calls of this host are there already"
        )

    def failed(self, error: BaseException) -> None:
        if not is_failure(error):
            return
        self._last_error = f"; to this process it said last: {type(error).__name__}: {error}".removesuffix(": ")
        self._count_failure()
        if self._cells is not self._own_cells and self._cells.trouble.peek(self._server).remaining == MOST:
            # The host's store had no room for the count, or another process has just closed the breaker. This process
            # counts by itself until the next answer.
            self._cells = self._own_cells
            self._count_failure()

    def _count_failure(self) -> None:
        trouble = self._cells.trouble
        recovers = MOST - trouble.peek(self._server).remaining > THRESHOLD
        counted = trouble.hit(self._server, rate=FORGETTING, burst=MOST if recovers else THRESHOLD)
        if counted.allowed and counted.remaining == 0:
            # The breaker opens. Taking this interval's probe delays the first probe by an interval.
            self._is_elected()
            if recovers:
                trouble.reset(self._server)
                trouble.hit(self._server, THRESHOLD)

    def answered(self, after_s: float) -> None:
        cells = self._cells
        trouble = MOST - cells.trouble.peek(self._server).remaining
        if trouble == THRESHOLD:
            cells.recovering.hit(self._server, WHOLE)
            cells.trouble.hit(self._server, RECOVERING - trouble)
        elif trouble < THRESHOLD and after_s < self._slow_s:
            self._close()

    def _close(self) -> None:
        self._cells.trouble.reset(self._server)
        self._cells = self._shared_cells

    def decided(self) -> None:
        """Count a request that `when_unavailable` decided."""
        self._shared_cells.decided.allow(self._server)

    def status(self) -> RedisStatus:
        cells = self._cells
        seen = cells.trouble.peek(self._server)
        trouble = MOST - seen.remaining
        recovers = trouble > THRESHOLD and not cells.recovering.peek(self._server, WHOLE).allowed
        failures = trouble if trouble <= THRESHOLD else max(trouble - RECOVERING, 0)
        return RedisStatus(
            "recovering" if recovers else "open" if trouble == THRESHOLD else "closed",
            failures,
            (trouble * FORGET_NS - seen.reset_after_ns) / NS if failures else 0.0,
            MOST_COUNTED - self._shared_cells.decided.peek(self._server).remaining,
        )

    def _is_elected(self) -> bool:
        interval_s = self._probe_interval_s * random.uniform(1 - PROBE_JITTER, 1 + PROBE_JITTER)
        one = Rate.per_ns(1, round(interval_s * NS))
        elected: bool = self._cells.probes.hit(self._server, rate=one).allowed
        if self._cells is not self._own_cells and self._cells.probes.peek(self._server, rate=one).allowed:
            # The host's store had no room for the election, so no cell records it: elect within this process.
            elected = self._own_cells.probes.hit(self._server, rate=one).allowed
        return elected
