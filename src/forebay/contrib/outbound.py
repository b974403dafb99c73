"""The common part of the limited HTTP clients: when a request may be sent, and whether it is sent again.

A *pause* is a time without requests that a server demands by ``Retry-After``. The store keeps it as the state of a
token bucket: the time until which a key is paused, so all processes of the host see it. A request checks for a pause
before it waits for a permit, so that none is charged for a time at which it can't be used, and after, because a pause
may have started meanwhile. A permit that a pause has overtaken is released, not kept for the end of the pause:
otherwise all kept permits would be used at once then, and the server would see more than the limit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterable
from datetime import UTC, datetime
from email.utils import parsedate
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypedDict, TypeVar

from forebay.core.algorithms.concurrency import Concurrency, Lease, lease_taken
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.all_of import AllOf
from forebay.errors import ForebayError, InvalidCost, InvalidKey, InvalidLimiter, short_repr
from forebay.rate import NS, Duration, as_delay_ns, as_period_ns
from forebay.web.functions import check_function, has_to_be_awaited, is_cost, is_key
from forebay.web.rules import kind_of

if TYPE_CHECKING:
    from forebay.core.limiter import Limiter
    from forebay.core.table.keys import Key
    from forebay.store import Store

    _Keys: TypeAlias = Key | list[Key]
    # A limiter and the arguments of its `wait`.
    _Wait: TypeAlias = tuple[Limiter | AllOf, Any, int, float | None]

__all__ = ["Options", "OutboundLimiter", "OutboundRequest", "WaitTimeout", "origin", "pause_s", "release"]

Request = TypeVar("Request")

GRAIN_NS: Final = 1_000_000
"""One permit of the pauses' bucket is so much of a pause."""
RATE: Final = "1000/second"
BURST: Final = 2
"""With a burst of 1, a full store would deny pauses by default."""
PAUSES: Final = "outbound pauses"
"""The name of the pauses' bucket in the store."""
ATTEMPTS: Final = 1000
"""An attempt fails if another process prolongs the pause meanwhile, or if the table is full."""
FOREVER_S: Final = 10**10

TOO_MANY_REQUESTS: Final = 429
SERVICE_UNAVAILABLE: Final = 503
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

# RFC 9110, section 5.6.7: the format to send, and the two obsolete ones to accept.
_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_TIME: Final = r"[0-9]{2}:[0-9]{2}:[0-9]{2}"
_DATE: Final = re.compile(
    rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), [0-9]{{2}} {_MONTH} [1-9][0-9]{{3}} {_TIME} GMT"
    rf"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, [0-9]{{2}}-{_MONTH}-[0-9]{{2}} {_TIME} GMT"
    rf"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} [ 0-9][0-9] {_TIME} [1-9][0-9]{{3}}"
)
_SECONDS: Final = re.compile(r"[0-9]+")


class WaitTimeout(ForebayError):
    """A request was not sent, because it would have had to wait for longer than its `timeout`.

    Attributes: ``limiter`` (its name), ``key``, ``timeout`` (seconds), ``paused`` (whether the request would have had
    to wait for the end of a pause, and not for a permit).
    """

    def __init__(self, limiter: str, key: _Keys, timeout: float, paused: bool) -> None:
        what = "the end of the pause that the server demanded" if paused else "a permit"
        when = "comes in no time" if math.isinf(timeout) else f"would have taken longer than {timeout:g} s"
        super().__init__(f"not sent: {what} of limiter {limiter!r} for {short_repr(key)} {when}")
        self.limiter, self.key, self.timeout, self.paused = limiter, key, timeout, paused

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[str, _Keys, float, bool]]:
        return type(self), (self.limiter, self.key, self.timeout, self.paused)


def origin(scheme: str, host: str | None, port: int | None) -> tuple[str, str, int]:
    """The key of requests to one server, the same for all clients."""
    return scheme, host or "", DEFAULT_PORTS.get(scheme, 0) if port is None else port


def pause_s(retry_after: str | None, date: str | None = None) -> int | None:
    """The seconds of a ``Retry-After`` field; None without one that RFC 9110 allows.

    A date counts from the server's clock, which its ``Date`` field gives, or else from ours.
    """
    if retry_after is None:
        return None
    text = retry_after.strip(" \t")
    if _SECONDS.fullmatch(text):
        return int(text) if len(text) <= 10 else FOREVER_S
    until_s = _date_s(text)
    if until_s is None:
        return None
    now_s = None if date is None else _date_s(date.strip(" \t"))
    return max(until_s - (math.floor(time.time()) if now_s is None else now_s), 0)


def _date_s(text: str) -> int | None:
    """Seconds since 1970."""
    parsed = parsedate(text) if _DATE.fullmatch(text) else None
    if parsed is None:
        return None
    year, month, day, hour, minute, second = parsed[:6]
    if second == 60:  # a leap second
        second = 59
    try:
        return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp())
    except ValueError:
        return None


class Options(TypedDict, Generic[Request], total=False):
    """The options of every limited client."""

    key: _Keys | Callable[[Request], _Keys] | None
    """One key for all requests, or a function that returns a request's key. Default: scheme, host and port."""
    cost: int | Callable[[Request], int]
    """Permits each time a request is sent; 1 by default."""
    timeout: Duration | None
    """``WaitTimeout`` is raised if a request can't be sent within so long: text like ``"500 ms"``, seconds, a
    ``timedelta``. Default: no bound."""
    retries: int
    """How often a request is sent again after a pause; 2 by default."""
    max_pause: Duration
    """No pause is longer; five minutes by default. A request whose server demanded a longer one isn't sent again."""
    store: Store | None
    """Where pauses are kept; the limiter's by default."""


class OutboundLimiter(Generic[Request]):
    """A client's limiter, the keys and costs of its requests, and the pauses of these keys."""

    def __init__(
        self,
        limiter: Limiter | AllOf,
        find_origin: Callable[[Request], Key],
        error: type[WaitTimeout],
        options: Options[Request],
    ) -> None:
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no option {min(unknown)!r}: those are {', '.join(Options.__annotations__)}")
        if not all(hasattr(limiter, name) for name in ("name", "store", "wait", "wait_async")):
            raise InvalidLimiter(
                f"a client waits for a limiter, like TokenBucket(store, 'api', '10/second'), not for "
                f"{short_repr(limiter)}"
            )
        for part in getattr(limiter, "limiters", (limiter,)):
            if kind_of(part) is Concurrency and not isinstance(part, Concurrency):
                raise InvalidLimiter(
                    f"a client gives back permits of a Store alone, so each request would hold those of {part!r} until "
                    "their lease ends: make the Concurrency in a Store"
                )
        timeout, retries = options.get("timeout"), options.get("retries", 2)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries is a whole number of at least 0, not {short_repr(retries)}")
        key, cost, store = options.get("key"), options.get("cost", 1), options.get("store")
        for what, function in (("key", key), ("cost", cost)):
            if callable(function):
                check_function(f"{what} is one for all requests, or a callable that takes a request", function)
                if has_to_be_awaited(function):
                    raise InvalidLimiter(f"{what} is a plain function, and {short_repr(function)} has to be awaited")
        if not callable(cost) and not is_cost(cost):
            raise InvalidCost(f"cost is a whole number of at least 0 or a callable, not {short_repr(cost)}")
        if not (key is None or callable(key) or all(map(is_key, key if isinstance(key, list) else [key]))):
            raise InvalidKey(f"key is str, bytes, int, a tuple of them or a callable, not {short_repr(key)}")
        self.timeout_ns = None if timeout is None else as_delay_ns(timeout, "timeout is None or")
        self.limiter, self.retries, self.error = limiter, retries, error
        self.key_of = key if callable(key) else find_origin if key is None else lambda _: key
        self.cost_of = cost if callable(cost) else lambda _: cost
        self.max_pause_ns = as_period_ns(options.get("max_pause", "5 minutes"))
        # It allows a cost of 0 as soon as its state is at most the burst ahead of now.
        self.pauses = TokenBucket(limiter.store if store is None else store, PAUSES, RATE, burst=BURST)

    def request(self, request: Request) -> OutboundRequest:
        return OutboundRequest(self, self.key_of(request), self.cost_of(request))

    def paused_ns(self, pause_key: Key) -> int:
        return max(self.pauses.peek(pause_key, 0).reset_after_ns - BURST * GRAIN_NS, 0)

    def pause(self, pause_key: Key, pause_ns: int) -> int:
        """Pause `pause_key` for `pause_ns` from now on, or longer if it is paused for longer. Returns for how long.

        The difference to the present pause is charged, with a burst that leaves exactly that room: if another process
        has prolonged the pause meanwhile, the charge is denied. So pauses don't add up, and none gets shorter. A pause
        may become longer than demanded, by the time between the two steps and two permits for rounding.
        """
        for _ in range(ATTEMPTS):
            ahead_ns = self.pauses.peek(pause_key, 0).reset_after_ns
            missing_ns = pause_ns + BURST * GRAIN_NS - ahead_ns
            if missing_ns <= 0:
                break
            missing = -(-missing_ns // GRAIN_NS)
            if self.pauses.hit(pause_key, missing, rate=RATE, burst=missing - (-ahead_ns // GRAIN_NS)):
                break
        return self.paused_ns(pause_key)


class OutboundRequest:
    """One request to be sent: its key, its cost and its deadline."""

    def __init__(self, outbound: OutboundLimiter[Any], key: _Keys, cost: int) -> None:
        self.outbound, self.key, self.cost = outbound, key, cost
        # A list for several limiters: a tuple with as many parts may be one key.
        limiters = getattr(outbound.limiter, "limiters", None)
        self.keys: Any = key if limiters is None or isinstance(key, list) else [key] * len(limiters)
        # With the limiter's name: limiters of one store may have equal keys. A list's text replaces the list, which is
        # no key.
        self.pause_key = (outbound.limiter.name, repr(key))
        self.store = outbound.pauses.store
        self.deadline_ns = None if outbound.timeout_ns is None else self.store.now_ns() + outbound.timeout_ns
        self.sent = 0

    def admit(self) -> list[Lease]:
        """Wait until the request may be sent. The caller has to `release` the leases. Raises ``WaitTimeout``."""
        steps = self.steps()
        try:
            wait = next(steps)
            while True:
                limiter, key, cost, timeout = wait
                wait = steps.send(limiter.wait(key, cost, timeout))
        except StopIteration as end:
            leases: list[Lease] = end.value
            return leases

    async def admit_async(self) -> list[Lease]:
        """As `admit`, for asyncio."""
        steps = self.steps()
        try:
            wait = next(steps)
            while True:
                limiter, key, cost, timeout = wait
                wait = steps.send(await limiter.wait_async(key, cost, timeout))
        except StopIteration as end:
            leases: list[Lease] = end.value
            return leases

    def steps(self) -> Generator[_Wait, bool, list[Lease]]:
        """Yields what to wait for, one after the other, and receives whether that came in time."""
        outbound = self.outbound
        while True:
            # Another process may prolong the pause meanwhile.
            while outbound.paused_ns(self.pause_key):
                if not (yield outbound.pauses, self.pause_key, 0, self._left_s()):
                    raise self._timed_out(paused=True)
            if not (yield outbound.limiter, self.keys, self.cost, self._left_s()):
                raise self._timed_out(paused=False)
            leases = self._leases()
            if not outbound.paused_ns(self.pause_key):
                return leases
            release(leases)

    def _left_s(self) -> float | None:
        return None if self.deadline_ns is None else max(self.deadline_ns - self.store.now_ns(), 0) / NS

    def _timed_out(self, *, paused: bool) -> WaitTimeout:
        # Without a timeout, only ``Credits`` end a wait.
        timeout_s = math.inf if self.outbound.timeout_ns is None else self.outbound.timeout_ns / NS
        return self.outbound.error(self.outbound.limiter.name, self.key, timeout_s, paused)

    def _leases(self) -> list[Lease]:
        """Leases for the permits just taken from a ``Concurrency``; permits of other limiters are spent."""
        limiter = self.outbound.limiter
        parts = limiter.limiters if isinstance(limiter, AllOf) else (limiter,)
        keys = self.keys if isinstance(limiter, AllOf) else [self.key]
        return [
            lease_taken(part, key, self.cost)
            for part, key in zip(parts, keys, strict=True)
            if isinstance(part, Concurrency)
        ]

    def is_resent(
        self, method: str, status: int, retry_after: str | None, date: str | None, *, replayable: bool
    ) -> bool:
        """Record the pause that a response demands. Returns whether the client should `admit` and send again.

        A server that answers 429 has refused the request, so any method is sent again. After a 503 the server may have
        handled the request in part, so only idempotent methods are.
        """
        if status not in (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE):
            return False
        demanded_s = pause_s(retry_after, date)
        if demanded_s is None:
            return False
        outbound = self.outbound
        demanded_ns = demanded_s * NS
        paused_ns = outbound.pause(self.pause_key, min(demanded_ns, outbound.max_pause_ns)) if demanded_s else 0
        self.sent += 1
        return (
            replayable
            and self.sent <= outbound.retries
            and (status == TOO_MANY_REQUESTS or method.upper() in IDEMPOTENT)
            # Otherwise it would be sent too early: the pause is cut short, or the store had no room for it.
            and demanded_ns <= outbound.max_pause_ns
            and (paused_ns > 0 or not demanded_s)
            and (self.deadline_ns is None or self.store.now_ns() + paused_ns <= self.deadline_ns)
        )


def release(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.release()
