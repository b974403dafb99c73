"""Throttles for Django REST framework that all workers of the host share. See docs/frameworks.md.

The names, the settings and the scopes are those of ``rest_framework.throttling``. If forebay's middleware is in
``MIDDLEWARE``, responses have header fields for the throttles, too. Needs ``forebay[rest-framework]``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

from forebay.extras import Needs

with Needs("rest-framework", __name__):
    from django.core.exceptions import ImproperlyConfigured
    from django.core.signals import setting_changed
    from rest_framework import throttling
    from rest_framework.exceptions import APIException
    from rest_framework.settings import api_settings

from forebay.contrib.django import VISIT, DjangoRequest, setting
from forebay.contrib.views import Visit
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.window import SlidingWindow
from forebay.errors import InvalidKey, InvalidRate, SegmentSpaceError, StoreUnavailable, short_repr
from forebay.rate import NS, Rate, as_rate
from forebay.store import Store
from forebay.web import ClientAddress, Passage
from forebay.web.answers import FULL, UNAVAILABLE, again
from forebay.web.denials import STORE_WAIT_S, log_for_operator, wait_s_of, whole_seconds_up
from forebay.web.functions import described, is_key
from forebay.web.header_fields import Policy, Writer, checked_styles, header_writer
from forebay.web.options import is_enabled
from forebay.web.rules import is_redis
from forebay.web.store_errors import STORE_ERRORS
from forebay.web.workers import warn_if_each_counts_alone

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from forebay.core.decision import Decision

__all__ = [
    "AnonRateThrottle",
    "LimitsUnavailable",
    "ScopedRateThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
    "log_or_window",
]

MOST_LOG_BYTES: Final = 16 * 2**20
MOST_LOGGED: Final = 100

_WITHOUT_EFFECT: Final = {
    "timer": "the store has the clock, and in tests may have a ManualClock of forebay.testing",
    "cache": 'throttles count in the store of FOREBAY["STORE"]',
}


class LimitsUnavailable(APIException):
    """The request's limit could not be checked: 503, with ``Retry-After``.

    Redis is unavailable, the store has no room for another key and denies new ones (``Decision.reason`` is
    ``"no room"``), or there is no memory for a throttle's log.
    """

    status_code = 503
    default_code = "service_unavailable"

    def __init__(self, cause: str = UNAVAILABLE, wait: int = STORE_WAIT_S) -> None:
        super().__init__(cause.format(again=again(wait)))
        self.wait = wait
        """REST framework sends it as ``Retry-After``."""


def log_or_window(store: Any, name: str, rate: Rate) -> Any:
    """The limiter of a throttle that has no ``limiter_class`` of its own.

    A ``SlidingLog`` records the time of each request, as REST framework does, and so is exact. It has room for as many
    keys as the store, and is chosen if it needs no more than `MOST_LOG_BYTES` for them; over a ``RedisStore``, up to a
    limit of `MOST_LOGGED`. Otherwise, and over leased and synced stores, which have no log, a ``SlidingWindow``
    estimates the same from two counts for each key.
    """
    if not isinstance(store, Store):
        from forebay.redis import RedisStore

        is_logged = isinstance(store, RedisStore) and rate.limit <= MOST_LOGGED
        return (SlidingLog if is_logged else SlidingWindow)(store, name, rate)
    if rate.limit * 8 <= MOST_LOG_BYTES and SlidingLog.bytes_needed(rate, keys=store.keys) <= MOST_LOG_BYTES:
        return SlidingLog(store, name, rate, keys=store.keys)
    return SlidingWindow(store, name, rate)


class SimpleRateThrottle(throttling.SimpleRateThrottle):
    """The base: a subclass has a ``scope`` or a ``rate``, and ``get_cache_key``.

    As in REST framework, a subclass may set ``num_requests`` and ``duration`` (seconds) until ``get_cache_key`` has
    returned, and override ``parse_rate``, ``throttle_success`` and ``throttle_failure``. A class that sets ``timer`` or
    ``cache``, which have no effect here, raises ``ImproperlyConfigured`` when it is made.

    ``limiter_class`` is called with the store, a name and the rate; see ``log_or_window``. ``decision`` is the latest.
    """

    limiter_class: ClassVar[Any] = staticmethod(log_or_window)
    decision: Decision | None = None
    key: Any = None
    num_requests: Any = None
    duration: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, instead in _WITHOUT_EFFECT.items():
            if getattr(cls, name, None) is not getattr(throttling.SimpleRateThrottle, name, None):
                raise ImproperlyConfigured(
                    f"{cls.__module__}.{cls.__qualname__} sets {name}, which has no effect on a throttle of forebay: "
                    f"remove it; {instead}"
                )

    def allow_request(self, request: Request, view: APIView) -> bool:
        if self.rate is None or not is_enabled(setting("ENABLED")):
            return True
        self.key = self.get_cache_key(request, view)
        if self.key is None:
            return True
        if self.num_requests < 1:
            return self.throttle_failure()
        scope = self.scope or type(self).__name__
        try:
            limiter, fields_of = _limiter(type(self).limiter_class, scope, self.num_requests, self.duration)
            self.decision = decision = limiter.hit(self.key)
        except STORE_ERRORS as error:
            if not isinstance(error, StoreUnavailable):
                log_for_operator(f"answered by {LimitsUnavailable.status_code}", error)
            # No space for the limiter, which the first request of a scope and rate makes.
            raise LimitsUnavailable(FULL if isinstance(error, SegmentSpaceError) else UNAVAILABLE) from error
        if decision.reason == "no room":
            raise LimitsUnavailable(FULL, whole_seconds_up(decision.retry_after_ns))
        visit: Visit | None = getattr(request._request, VISIT, None)
        if visit is not None:
            visit.add(Passage(fields_of([decision], ())))
        return self.throttle_success() if decision.allowed else self.throttle_failure()

    def throttle_success(self) -> bool:
        """The result of ``allow_request`` for a request that is within the limit, and has been charged."""
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("history", "now"):
                raise ImproperlyConfigured(
                    f"{type(self).__module__}.{type(self).__qualname__} reads {name}, which a throttle of forebay "
                    "doesn't keep: self.decision has limit, remaining, retry_after and reset_after, in seconds"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def parse_rate(self, rate: str | None) -> tuple[int | None, float | None]:  # type: ignore[override]  # REST framework knows whole seconds
        """A limit and seconds. REST framework reads only the first letter of a rate's period, forebay all of it."""
        if rate is None:
            return None, None
        try:
            read = as_rate(rate)
        except InvalidRate as error:
            # A month must not be read as a minute. REST framework has a limit of 0, which denies everything.
            if not _SHORT_RATE.fullmatch(str(rate)):
                raise ImproperlyConfigured(f"the throttle of scope {short_repr(self.scope)}: {error}") from None
            return super().parse_rate(rate)
        period_s, rest_ns = divmod(read.period_ns, NS)
        return read.limit, read.period_ns / NS if rest_ns else period_s

    def wait(self) -> float | None:
        """Whole seconds, rounded up: REST framework sends them as ``Retry-After``."""
        if self.decision is not None:
            return wait_s_of(self.decision)
        # Without a decision, as for a limit of 0: REST framework's answer without a history.
        return None if self.duration is None else float(self.duration / (self.num_requests + 1))

    def get_ident(self, request: Request) -> str:
        """The client's address by ``FOREBAY["CLIENT"]``, or by ``NUM_PROXIES``.

        Without either it is the peer's: ``X-Forwarded-For`` is ignored, since every client can send it.
        """
        client = setting("CLIENT")
        if client is None and api_settings.NUM_PROXIES is not None:
            ident = super().get_ident(request)
        else:
            ident = (client or _PEER)(DjangoRequest(request._request))
            if not is_key(ident):
                # Its text might differ at each request.
                raise InvalidKey(f'FOREBAY["CLIENT"] returned {described(ident)}, which is no key')
        return str(ident)


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits requests without a user, by the client's address; scope ``anon``."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits requests by user, and those without one by the client's address; scope ``user``."""


class ScopedRateThrottle(throttling.ScopedRateThrottle, SimpleRateThrottle):
    """Limits views with a ``throttle_scope``, by user or the client's address."""


_PEER = ClientAddress()
_SHORT_RATE = re.compile(r"(?:0|[1-9]\d{0,11})/(?:s|m(?!o)|h|d)[a-z]*", re.ASCII)


def make_limiter(limiter_class: Any, scope: str, limit: int, duration_s: float) -> Any:
    """The limiter that all throttles of a scope and a rate share. Errors of its class and the settings propagate."""
    store = setting("STORE")
    if not isinstance(store, Store) and not is_redis(store):
        raise ImproperlyConfigured(
            "the throttles count in a store: name it, "
            f'FOREBAY = {{"STORE": Store("shop", keys=100_000)}} or its dotted path, not {short_repr(store)}'
        )
    return limiter_class(store, f"throttle {scope} {limit}/{duration_s}s", Rate(limit, duration_s))


@cache
def _limiter(limiter_class: Any, scope: str, limit: int, duration_s: float) -> tuple[Any, Writer]:
    """The limiter, and the writer of its header fields. A changed rate is another limiter, so counts start at 0."""
    limiter = make_limiter(limiter_class, scope, limit, duration_s)
    if isinstance(limiter.store, Store):
        warn_if_each_counts_alone([limiter])
    policies = [Policy(limiter)]
    return limiter, header_writer(checked_styles(setting("HEADERS")), policies, policies, False)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "FOREBAY":
        _limiter.cache_clear()


setting_changed.connect(_forget)
