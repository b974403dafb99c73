"""The base of all shedders: priorities of requests, and admissions that last as long as a request."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.errors import InvalidLimiter, LimitExceeded, StoreClosed, short_repr
from forebay.rate import Duration
from forebay.segment import layout
from forebay.store import Store

__all__ = [
    "LEASE",
    "Admission",
    "Outcome",
    "Shedder",
    "check_count",
    "checked_priorities",
    "checked_store",
    "per_cent",
    "slots_of",
]

Outcome: TypeAlias = Literal["done", "dropped", "ignored"]
"""How a request ended: it was answered; what it needs refused it or timed out; or it says nothing about the load."""

OUTCOMES: Final = get_args(Outcome)
LEASE: Final = "60s"
RETRY_AFTER_S: Final = 1.0
_PERCENT: Final = re.compile(r"\s*(\d{1,3})\s*%\s*", re.ASCII)
ALL: Final = "all"
"""The one key of a shedder's slots."""


class Admission:
    """The result of ``Shedder.admit``. True if the request is admitted, as is ``allowed``.

    Call ``end`` when the request has ended, or use the admission as a context manager: a block that raises an exception
    ends as ``"ignored"``, and one that isn't admitted raises ``LimitExceeded``. A request that takes longer than the
    shedder's lease calls ``renew`` meanwhile; if its lease ends, it no longer counts as in flight. If its process ends,
    it no longer counts either.

    *Threads*: safe. *Fork*: the request belongs to the process that admitted it.
    """

    __slots__ = ("_leases", "_shedder", "allowed", "begun_ns", "in_flight", "renewed_ns")

    def __init__(
        self, shedder: Shedder, leases: tuple[Lease, ...] | None, begun_ns: int = 0, in_flight: int = 0
    ) -> None:
        """`leases` None: the request is shed."""
        self._shedder, self._leases = shedder, leases or ()
        self.allowed = leases is not None
        self.begun_ns = begun_ns
        """When its work began, by the store's clock, if the shedder needs that."""
        self.renewed_ns = begun_ns
        """When its leases began, as ``begun_ns``."""
        self.in_flight = in_flight
        """How many requests were in flight then, with this one, if the shedder needs that."""

    def __bool__(self) -> bool:
        return self.allowed

    def begin(self) -> None:
        """The request's work begins now, if it has waited since it was admitted: its latency counts from here.

        Does nothing after the store was closed.
        """
        if self.begun_ns:
            with suppress(StoreClosed):
                self.begun_ns = self._shedder.store.now_ns()

    def renew(self) -> None:
        """Begin the leases of its slots anew."""
        for lease in self._leases:
            lease.renew()
        if self.renewed_ns:
            self.renewed_ns = self._shedder.store.now_ns()

    def end(self, outcome: Outcome = "done") -> None:
        """The request has ended. A second call does nothing, nor does one after the store was closed.

        Raises ``ValueError`` for an unknown outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f'an outcome is "done", "dropped" or "ignored", not {short_repr(outcome)}')
        leases, self._leases = self._leases, ()
        if leases:
            # A request that outlives the store has been answered all the same.
            with suppress(StoreClosed):
                self._shedder.finish(self, leases, outcome)

    def __enter__(self) -> Self:
        if not self.allowed:
            raise LimitExceeded(self._shedder.name, self._shedder.slots, RETRY_AFTER_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("done" if error is None else "ignored")


class Shedder(ABC):
    """Base class of the shedders; not used by itself.

    A shedder has a ``name`` in a ``store``, and ``slots``: how many requests in flight it counts at most. All processes
    that make it with the same name and slots share its slots, and with the same `window` or `interval` also what it
    measures. ``priorities`` are names, the most important first; empty if it treats all requests alike. ``lease_ns`` is
    the lease of a slot.

    *Threads*: safe. *Processes*: each makes its own. *Fork*: a shedder made before a fork works in parent and child.
    """

    store: Store
    name: str
    slots: int
    priorities: tuple[str, ...]
    lease_ns: int

    @property
    @abstractmethod
    def limiters(self) -> tuple[Concurrency, ...]:
        """The limiters that hold its slots; they have their own counts in ``Store.stats``."""

    @abstractmethod
    def admit(self, priority: str | None = None) -> Admission:
        """Whether a request of this priority may be handled: an ``Admission``, which is true if it may.

        Raises ``InvalidLimiter`` for a priority that isn't one of ``priorities``, and ``StoreClosed``.
        """

    def finish(self, admission: Admission, leases: Iterable[Lease], outcome: Outcome) -> bool:
        """Called by an admission that ends: gives its slots back. Whether it held all of them until now."""
        # Of two threads that end a request at once, one gives its slots back.
        held = [lease.release() for lease in leases]
        return all(held)

    def rank(self, priority: Any) -> int:
        """The place of a priority: 0 is the most important. Raises ``InvalidLimiter``."""
        if not self.priorities and priority is None:
            return 0
        try:
            return self.priorities.index(priority)
        except ValueError:
            known = f"one of {', '.join(map(repr, self.priorities))}" if self.priorities else "None: it has no others"
            raise InvalidLimiter(
                f"the priority of a request is for shedder {self.name!r} {known}, not {short_repr(priority)}"
            ) from None


def check_count(what: str, count: Any) -> None:
    """Raises ``InvalidLimiter`` unless it is so many requests as may be in flight."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= layout.MAX_CONCURRENCY_LIMIT:
        raise InvalidLimiter(
            f"{what} is a whole number of requests from 1 to {layout.MAX_CONCURRENCY_LIMIT}, not {short_repr(count)}"
        )


def slots_of(store: Store, name: str, slots: int, lease: Duration) -> Concurrency:
    """A limiter that holds so many slots. Raises ``InvalidLimiter`` and what ``Concurrency`` raises."""
    return Concurrency(store, name, slots, lease, keys=1)


def checked_store(kind: type, store: Any, name: Any) -> None:
    """Raises ``InvalidLimiter``."""
    if not isinstance(store, Store):
        raise InvalidLimiter(
            f"a shedder counts the requests of one host, in its memory, and {short_repr(store)} is no Store: "
            f'write {kind.__name__}(Store("shop", keys=1000), ...)'
        )
    if not isinstance(name, str):
        raise InvalidLimiter(f'the name of a shedder is text such as "web", not {short_repr(name)}')


def per_cent(text: Any) -> int | None:
    """The number in text such as ``"20%"``; None for anything else."""
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    return None if match is None or int(match[1]) > 100 else int(match[1])


def checked_priorities(kind: type, priorities: Any, most: int) -> tuple[str, ...]:
    """Two or more names, the most important first. Raises ``InvalidLimiter``."""
    names = tuple(priorities) if isinstance(priorities, Iterable) and not isinstance(priorities, (str, bytes)) else ()
    if not 2 <= len(names) <= most or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise InvalidLimiter(
            f"{kind.__name__} has from 2 to {most} priorities, each once and the most important first, as "
            f'["critical", "default"], not {short_repr(priorities)}'
        )
    return names
