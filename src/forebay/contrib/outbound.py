"""What the limited HTTP clients share: when a request may be sent, and whether it is sent again.

A *pause* is what a server asks for by ``Retry-After``. It is kept as the state of a token bucket in the store, a time
until which the key is paused, so all processes of the host see it. Requests look at it twice: before they wait for a
permit, so that none is charged for a time at which it can't be used, and after, because it may have come meanwhile. A
permit that a pause has overtaken is given up, not kept for the end of the pause: all that were kept would go at once
there, and the server would see more than the limit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterable
from datetime import UTC, datetime
from email.utils import parsedate
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypedDict, TypeVar

from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.all_of import AllOf
from forebay.errors import ForebayError, InvalidCost, InvalidKey, InvalidLimiter, shown
from forebay.rate import Duration, as_delay_ns, as_period_ns
from forebay.web.functions import check_function, has_to_be_awaited, is_cost, is_key

if TYPE_CHECKING:
    from forebay.core.limiter import Limiter
    from forebay.core.table.keys import Key
    from forebay.store import Store

    _Keys: TypeAlias = Key | list[Key]
    # A limiter and the arguments of its `wait`.
    _Wait: TypeAlias = tuple[Limiter | AllOf, Any, int, float | None]

__all__ = ["Options", "Sending", "WaitTimeout", "WayOut", "give_back", "origin", "pause_s"]

Request = TypeVar("Request")

NS: Final = 1_000_000_000
GRAIN_NS: Final = 1_000_000
"""What one permit of the pauses' bucket stands for."""
RATE: Final = "1000/second"
PAUSES: Final = "outbound pauses"
"""The name of the pauses' bucket in the store."""
ATTEMPTS: Final = 1000
"""Each but the last was overtaken by another process that made the pause longer; or the table is full."""
FOREVER_S: Final = 10**10

TOO_MANY_REQUESTS: Final = 429
SERVICE_UNAVAILABLE: Final = 503
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

# RFC 9110, section 5.6.7: the form that is sent, and the two that are still to be understood.
_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_TIME: Final = r"[0-9]{2}:[0-9]{2}:[0-9]{2}"
_DATE: Final = re.compile(
    rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), [0-9]{{2}} {_MONTH} [1-9][0-9]{{3}} {_TIME} GMT"
    rf"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, [0-9]{{2}}-{_MONTH}-[0-9]{{2}} {_TIME} GMT"
    rf"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} [ 0-9][0-9] {_TIME} [1-9][0-9]{{3}}"
)
_SECONDS: Final = re.compile(r"[0-9]+")


class WaitTimeout(ForebayError):
    """A request was not sent, because it would have had to wait for longer than it may.

    Attributes: ``limiter`` (its name), ``key``, ``timeout`` (seconds), ``paused`` (whether it was the end of a pause
    that did not come in time, and not a permit).
    """

    def __init__(self, limiter: str, key: _Keys, timeout: float, paused: bool) -> None:
        what = "the end of the pause that the server asked for" if paused else "a permit"
        super().__init__(
            f"not sent: {what} of limiter {limiter!r} for {shown(key)} would have taken longer than {timeout:g} s"
        )
        self.limiter, self.key, self.timeout, self.paused = limiter, key, timeout, paused

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[str, _Keys, float, bool]]:
        return type(self), (self.limiter, self.key, self.timeout, self.paused)


def origin(scheme: str, host: str | None, port: int | None) -> tuple[str, str, int]:
    """The key of requests to one server, the same for all clients."""
    return scheme, host or "", DEFAULT_PORTS.get(scheme, 0) if port is None else port


def pause_s(retry_after: str | None, date: str | None = None) -> int | None:
    """The seconds that ``Retry-After`` asks for, None if it isn't what RFC 9110 says it is.

    A date is meant by the server's clock, which stands in its ``Date``; without one, by ours.
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
    """What every limited client can be told."""

    key: _Keys | Callable[[Request], _Keys] | None
    """What is limited: a key for all requests, or a function of the request. Default: scheme, host and port."""
    cost: int | Callable[[Request], int]
    """Permits for each sending; 1 by default."""
    timeout: Duration | None
    """A request is sent within so long, or ``WaitTimeout`` is raised: text like ``"500 ms"``, seconds, a ``timedelta``.
    Default: as long as it takes."""
    retries: int
    """How often a request is sent again after a pause that the server asked for; 2 by default."""
    max_pause: Duration
    """No pause is longer; five minutes by default. A request that was told to wait for longer isn't sent again."""
    store: Store | None
    """Where pauses are kept; the limiter's by default."""


class WayOut(Generic[Request]):
    """The way out of a client: a limiter, how its keys are found, and the pauses of these keys."""

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
                f"a client waits for a limiter, like TokenBucket(store, 'api', '10/second'), not for {shown(limiter)}"
            )
        timeout, retries = options.get("timeout"), options.get("retries", 2)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries is a whole number of at least 0, not {shown(retries)}")
        key, cost, store = options.get("key"), options.get("cost", 1), options.get("store")
        for what, function in (("key", key), ("cost", cost)):
            if callable(function):
                check_function(f"{what} is one for all requests, or a callable that takes a request", function)
                if has_to_be_awaited(function):
                    raise InvalidLimiter(f"{what} is a plain function, and {shown(function)} has to be awaited")
        if not callable(cost) and not is_cost(cost):
            raise InvalidCost(f"cost is a whole number of at least 0 or a callable, not {shown(cost)}")
        if not (key is None or callable(key) or all(map(is_key, key if isinstance(key, list) else [key]))):
            raise InvalidKey(f"key is str, bytes, int, a tuple of them or a callable, not {shown(key)}")
        self.timeout_ns = None if timeout is None else as_delay_ns(timeout, "timeout is None or")
        self.limiter, self.retries, self.error = limiter, retries, error
        self.key_of = key if callable(key) else find_origin if key is None else lambda _: key
        self.cost_of = cost if callable(cost) else lambda _: cost
        self.max_pause_ns = as_period_ns(options.get("max_pause", "5 minutes"))
        # A request that costs nothing is allowed by it, and due, when its state is at most one permit ahead of now.
        self.pauses = TokenBucket(limiter.store if store is None else store, PAUSES, RATE, burst=1)

    def sending(self, request: Request) -> Sending:
        return Sending(self, self.key_of(request), self.cost_of(request))

    def paused_ns(self, pause_key: Key) -> int:
        return max(self.pauses.peek(pause_key, 0).reset_after_ns - GRAIN_NS, 0)

    def pause(self, pause_key: Key, pause_ns: int) -> int:
        """See to it that `pause_key` is paused for as long from now on, or longer; for how long it is, then.

        The difference to the pause that there is gets booked, with a burst that leaves just that much room: if another
        process has made the pause longer meanwhile, it is denied. So pauses don't add up, and none gets shorter. By
        the time between the two steps, and two permits for rounding, it may become longer than told.
        """
        for _ in range(ATTEMPTS):
            ahead_ns = self.pauses.peek(pause_key, 0).reset_after_ns
            missing_ns = pause_ns + GRAIN_NS - ahead_ns
            if missing_ns <= 0:
                break
            missing = -(-missing_ns // GRAIN_NS)
            if self.pauses.hit(pause_key, missing, rate=RATE, burst=missing - (-ahead_ns // GRAIN_NS)):
                break
        return self.paused_ns(pause_key)


class Sending:
    """One request's way out: its key, its cost, and when it is too late."""

    def __init__(self, way_out: WayOut[Any], key: _Keys, cost: int) -> None:
        self.way_out, self.key, self.cost = way_out, key, cost
        # Of several limiters: a tuple with as many parts would not say whether it is one key.
        limiters = getattr(way_out.limiter, "limiters", None)
        self.asked: Any = key if limiters is None or isinstance(key, list) else [key] * len(limiters)
        # Limiters of one store may have equal keys. A list's text is as good as its parts.
        self.pause_key = (way_out.limiter.name, repr(key))
        self.store = way_out.pauses.store
        self.deadline_ns = None if way_out.timeout_ns is None else self.store.now_ns() + way_out.timeout_ns
        self.sent = 0

    def admit(self) -> list[Lease]:
        """Wait until the request may be sent. Then `give_back` what this returns."""
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
        """As `admit`, in a task."""
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
        """What is to be waited for, one after the other; answered by whether it came in time."""
        way_out = self.way_out
        while True:
            # It may become longer while it is waited for.
            while way_out.paused_ns(self.pause_key):
                if not (yield way_out.pauses, self.pause_key, 0, self.left_s()):
                    raise self.timed_out(paused=True)
            if not (yield way_out.limiter, self.asked, self.cost, self.left_s()):
                raise self.timed_out(paused=False)
            leases = self.leases()
            if not way_out.paused_ns(self.pause_key):
                return leases
            give_back(leases)

    def left_s(self) -> float | None:
        return None if self.deadline_ns is None else max(self.deadline_ns - self.store.now_ns(), 0) / NS

    def timed_out(self, *, paused: bool) -> WaitTimeout:
        assert self.way_out.timeout_ns is not None
        return self.way_out.error(self.way_out.limiter.name, self.key, self.way_out.timeout_ns / NS, paused)

    def leases(self) -> list[Lease]:
        """The permits just taken that are to be held while the request is under way; others are spent."""
        limiter = self.way_out.limiter
        parts = limiter.limiters if isinstance(limiter, AllOf) else (limiter,)
        keys = self.asked if isinstance(limiter, AllOf) else [self.key]
        return [
            part._take_loose(key, self.cost)
            for part, key in zip(parts, keys, strict=True)
            if isinstance(part, Concurrency)
        ]

    def is_sent_again(
        self, method: str, status: int, retry_after: str | None, date: str | None, *, replayable: bool
    ) -> bool:
        """Note the pause that a response asks for. Whether the request is to be admitted and sent again, then.

        Who answers 429 has refused the request, so any method is sent again; at 503 it may have got anywhere, so only
        those are that do no more when they come twice.
        """
        if status not in (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE):
            return False
        asked_s = pause_s(retry_after, date)
        if asked_s is None:
            return False
        way_out = self.way_out
        asked_ns = asked_s * NS
        paused_ns = way_out.pause(self.pause_key, min(asked_ns, way_out.max_pause_ns)) if asked_s else 0
        self.sent += 1
        return (
            replayable
            and self.sent <= way_out.retries
            and (status == TOO_MANY_REQUESTS or method.upper() in IDEMPOTENT)
            # Otherwise it would be sent too early: the pause is cut short, or the store had no room for it.
            and asked_ns <= way_out.max_pause_ns
            and (paused_ns > 0 or not asked_s)
            and (self.deadline_ns is None or self.store.now_ns() + paused_ns <= self.deadline_ns)
        )


def give_back(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.release()
