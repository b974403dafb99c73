"""Whether Redis is asked at all: a circuit breaker that all processes of a host share.

The argument
------------
What the host knows of a server are cells of a ``Store``, kept by forebay's own limiters, so each step is one CAS and
lock-free, and what a process that is killed leaves behind is a state that others go on from:

* *trouble*: a count, of which each state is a range. 0: closed, the usual state, in which this cell is read and nothing
  is written. 1 and 2: so many calls have failed since the last one that was answered. 3 (``THRESHOLD``): open; nobody
  counts on. From ``RECOVERING`` on: recovering, and the rest are the calls that have failed meanwhile.
* *probes*: when the next one may try while it is open. Whoever takes this permit is the prober: one per interval and
  host. A prober that is killed, or never comes back, has taken nothing but its own turn.
* *recovering*: for how long.
* *at once*: the permits of those who may be at the server at one time meanwhile. A process that is killed gives its own
  back by its end.

::

    closed ----- THRESHOLD calls in a row fail ----> open
    open ------- a probe is answered --------------> recovering
    recovering - RECOVERY_S have passed -----------> closed
    recovering - THRESHOLD calls fail meanwhile ---> open

Who moves what: a failed call adds to *trouble*, up to the end of its range. An answered call that found 1 or 2 empties
it, unless the answer took more than half of the deadline: of a server that is so slow, some calls fail and others just
don't. A web request that has waited for its whole deadline is a failed call, however each of its calls went. An
answered call that found it full was a probe: it sets *recovering* and then moves *trouble* to its range; a crash
between the two leaves it open, and the next probe does both. Who finds *recovering* over empties *trouble*. Whoever
fills the range of recovering empties it and then fills that of open: a crash between leaves it closed, and
``THRESHOLD`` calls have to fail again. The same comes of all that is not seen in time: a late answer to a call from
before, a cell that a full store has forgotten, the end of ``FORGET_NS``. Never does any of it leave the breaker open
without probes.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

from redis import exceptions

from forebay.core.concurrency import Concurrency, Lease
from forebay.core.min_interval import MinInterval
from forebay.core.token_bucket import TokenBucket
from forebay.core.window import FixedWindow
from forebay.errors import StoreUnavailable
from forebay.rate import Rate
from forebay.store import Store

__all__ = ["Breaker", "RedisStatus", "is_failure"]

NS: Final = 1_000_000_000
THRESHOLD: Final = 3
FORGET_NS: Final = 86_400 * NS
RECOVERY_S: Final = 1
# In counts of failed calls.
RECOVERING: Final = 100
MOST: Final = RECOVERING + THRESHOLD
AT_ONCE: Final = 8
# Of the deadline: who takes longer doesn't end a row of failures.
SLOW: Final = 0.5
LEAST_PROBE_INTERVAL_S: Final = 1.0
# Hosts that lost a server together don't come back to it together.
PROBE_JITTER: Final = 0.25
MOST_COUNTED: Final = 2**32
# Limiters' names in the host's store.
RESERVED: Final = "forebay.redis "

_FAILURES: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    OSError,
)
# What a server says that is there and can't do its work. In scripts some versions say it behind words of their own.
_CANT_WORK: Final = re.compile(
    r"\b(LOADING|READONLY|OOM|MASTERDOWN|CLUSTERDOWN|MISCONF|NOREPLICAS|TRYAGAIN|BUSY|UNKILLABLE)\b"
)


def is_failure(error: BaseException | None) -> bool:
    """Whether an error says that the server can't be reached or can't work; not that it didn't like a request."""
    # Those of clusters that are down, and of a client with no connection left, have classes of their own, by version.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MaxConnectionsError", "AuthenticationError", "AuthorizationError"}:
        # One store's password is nothing that the others need to know.
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
    """What a host knows of a Redis server: the same in each of its processes that has the same ``host`` store."""

    state: Literal["closed", "open", "recovering"]
    """``closed``: every call goes to Redis. ``open``: one per interval does, the others are for the policy.
    ``recovering``: few at once do."""
    failures: int
    """Calls that have failed since the last one that was answered, up to the number that opens the breaker."""
    failing_for_s: float
    """Seconds since the first of these failures; 0.0 if there are none."""
    decided_by_policy: int
    """Answers that the policy gave instead of Redis: ``StoreUnavailable`` raised, allowed, or by the host's share."""


class Cells:
    """The limiters that keep what is known of servers, in one store."""

    def __init__(self, store: Store) -> None:
        self.trouble = FixedWindow(store, RESERVED + "trouble", Rate.per_ns(MOST, FORGET_NS), "first")
        self.probes = TokenBucket(store, RESERVED + "probes", "1/second", burst=1)
        self.recovering = MinInterval(store, RESERVED + "recovering", RECOVERY_S)
        self.at_once = Concurrency(store, RESERVED + "at once", AT_ONCE, lease="1 minute", keys=64)
        self.decided = FixedWindow(store, RESERVED + "decided", Rate.per_ns(MOST_COUNTED, 366 * FORGET_NS), "first")


class Passage:
    """A context manager around one call to Redis: its end tells the breaker what became of it."""

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
    """Of one server, for all processes that share `host`; for this process and those that it forks if that is None.

    ``with breaker.passage():`` around each call, which raises ``StoreUnavailable`` when it is not this one's turn. Or
    for who is in a hurry ``breaker.enter()``, which gives None in the usual state: then ``failed`` is to be told.

    *Threads*, *processes*, *fork*: safe. O(1); in the usual state one cell is read.
    """

    def __init__(self, host: Store | None, server: str, timeout_s: float) -> None:
        clock = None if host is None else host.manual_clock
        self._slow_s = SLOW * timeout_s
        self._own = Store.private(keys=64, clock=clock or "monotonic")
        self._server = server
        # A probe is over before the next one.
        self._probe_interval_s = max(LEAST_PROBE_INTERVAL_S, 2 * timeout_s)
        self._up_to_open = Rate.per_ns(THRESHOLD, FORGET_NS)
        self._usual = Passage(self, is_watched=False)
        self._last_error = ""
        self._shared_cells = Cells(self._own if host is None else host)
        self._own_cells = Cells(self._own)
        self._use(self._shared_cells)

    def _use(self, cells: Cells) -> None:
        self._cells = cells
        self._peek = cells.trouble.peek

    def close(self) -> None:
        self._own.close()

    def enter(self) -> Passage | None:
        remaining = self._peek(self._server).remaining
        return None if remaining == MOST else self._enter_in_trouble(MOST - remaining)

    def passage(self) -> Passage:
        return self.enter() or self._usual

    def _enter_in_trouble(self, trouble: int) -> Passage:
        server = self._server
        if trouble < THRESHOLD:
            return Passage(self, is_watched=True)
        if trouble < RECOVERING:
            if self._is_elected():
                return Passage(self, is_watched=True)
            raise StoreUnavailable(
                f"Redis has not decided: {server} has not answered the last {THRESHOLD} calls of this host, and is "
                f"asked again within {self._probe_interval_s * (1 + PROBE_JITTER):.3g} s{self._last_error}"
            )
        if self._cells.recovering.peek(server).allowed:
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
        if self._cells is not self._own_cells and self._peek(self._server).remaining == MOST:
            # There was no room to count it; or it was over by now, and this process is alone until the next answer.
            self._use(self._own_cells)
            self._count_failure()

    def _count_failure(self) -> None:
        trouble = self._cells.trouble
        recovers = MOST - trouble.peek(self._server).remaining >= RECOVERING
        counted = trouble.hit(self._server, rate=None if recovers else self._up_to_open)
        if counted.allowed and counted.remaining == 0:
            # It opens: the first who tries again does so after an interval.
            self._is_elected()
            if recovers:
                trouble.reset(self._server)
                trouble.hit(self._server, THRESHOLD)

    def answered(self, after_s: float) -> None:
        cells = self._cells
        trouble = MOST - cells.trouble.peek(self._server).remaining
        if THRESHOLD <= trouble < RECOVERING:
            cells.recovering.allow(self._server)
            cells.trouble.hit(self._server, RECOVERING - trouble)
        elif trouble < THRESHOLD and after_s < self._slow_s:
            self._close()

    def _close(self) -> None:
        self._cells.trouble.reset(self._server)
        self._use(self._shared_cells)

    def decided(self) -> None:
        """The policy gave an answer."""
        self._shared_cells.decided.allow(self._server)

    def status(self) -> RedisStatus:
        cells = self._cells
        seen = cells.trouble.peek(self._server)
        trouble = MOST - seen.remaining
        recovers = trouble >= RECOVERING and not cells.recovering.peek(self._server).allowed
        failures = trouble % RECOVERING
        return RedisStatus(
            "recovering" if recovers else "open" if THRESHOLD <= trouble < RECOVERING else "closed",
            failures,
            (FORGET_NS - seen.reset_after_ns) / NS if failures else 0.0,
            MOST_COUNTED - self._shared_cells.decided.peek(self._server).remaining,
        )

    def _is_elected(self) -> bool:
        interval_s = self._probe_interval_s * random.uniform(1 - PROBE_JITTER, 1 + PROBE_JITTER)
        one = Rate.per_ns(1, round(interval_s * NS))
        elected: bool = self._cells.probes.hit(self._server, rate=one).allowed
        if self._cells is not self._own_cells and self._cells.probes.peek(self._server, rate=one).allowed:
            # There was no room: whoever was elected, no cell knows of it.
            elected = self._own_cells.probes.hit(self._server, rate=one).allowed
        return elected
