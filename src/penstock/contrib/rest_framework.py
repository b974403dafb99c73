"""Throttles for Django REST framework, counted by all workers of the host together. See docs/frameworks.md.

The names, the settings and the scopes are those of ``rest_framework.throttling``. Where penstock's middleware stands in
``MIDDLEWARE``, responses tell of the throttles, too. Needs ``penstock[rest-framework]``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from rest_framework import throttling
from rest_framework.exceptions import APIException
from rest_framework.settings import api_settings

from penstock.contrib.django import VISIT, DjangoRequest, setting
from penstock.contrib.views import Visit
from penstock.core.window import SlidingWindow
from penstock.errors import InvalidRate, StoreUnavailable, shown
from penstock.rate import NS, Rate, as_rate
from penstock.store import Store
from penstock.web import ClientAddress, Passage
from penstock.web.answers import seconds_up
from penstock.web.gate import WAIT_FOR_A_STORE_S
from penstock.web.policies import Policy, Writer, checked_styles, header_writer
from penstock.web.rules import is_redis
from penstock.web.workers import warn_if_each_counts_alone

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from penstock.core.decision import Decision

__all__ = ["AnonRateThrottle", "LimitsUnavailable", "ScopedRateThrottle", "SimpleRateThrottle", "UserRateThrottle"]


class LimitsUnavailable(APIException):
    """Redis is away, and nobody knows whether the request is within its limit: 503, with ``Retry-After``."""

    status_code = 503
    default_code = "service_unavailable"
    default_detail = "The limits of this service can't be checked at the moment: ask again in a second."
    wait = WAIT_FOR_A_STORE_S
    """What REST framework sends as ``Retry-After``."""


class SimpleRateThrottle(throttling.SimpleRateThrottle):
    """The base: a subclass says ``scope`` or ``rate``, and ``get_cache_key``.

    ``limiter_class`` is called with the store, a name and the rate. A ``SlidingLog`` remembers the time of each
    request, as REST framework does, and takes memory for each; the default estimates the same from two numbers a key.
    """

    limiter_class: ClassVar[Any] = SlidingWindow
    decision: Decision | None = None

    def allow_request(self, request: Request, view: APIView) -> bool:
        if self.rate is None:
            return True
        key = self.get_cache_key(request, view)
        if key is None:
            return True
        limit, duration_s = self.parse_rate(self.rate)
        limiter, fields_of = _limiter(self.limiter_class, self.scope or type(self).__name__, limit, duration_s)
        try:
            self.decision = decision = limiter.hit(key)
        except StoreUnavailable as error:
            raise LimitsUnavailable from error
        visit: Visit | None = getattr(request._request, VISIT, None)
        if visit is not None:
            visit.add(Passage(fields_of([decision], ())))
        allowed: bool = decision.allowed
        return allowed

    def parse_rate(self, rate: str | None) -> tuple[int | None, float | None]:  # type: ignore[override]  # REST framework knows whole seconds
        """A limit and seconds, of a rate as penstock has it or as REST framework does, where only a letter counts."""
        if rate is None:
            return None, None
        try:
            read = as_rate(rate)
        except InvalidRate as error:
            # But a month isn't a minute.
            if not _SHORT_RATE.fullmatch(str(rate)):
                raise ImproperlyConfigured(f"the throttle of scope {shown(self.scope)}: {error}") from None
            return super().parse_rate(rate)
        period_s, rest_ns = divmod(read.period_ns, NS)
        return read.limit, read.period_ns / NS if rest_ns else period_s

    def wait(self) -> float | None:
        """Whole seconds, rounded up: REST framework sends them as ``Retry-After``."""
        return None if self.decision is None else max(1, seconds_up(self.decision.retry_after_ns))

    def get_ident(self, request: Request) -> str:
        """The client's address as ``PENSTOCK["CLIENT"]`` has it, or by ``NUM_PROXIES``.

        Without either it is the peer's: ``X-Forwarded-For`` is believed of nobody, since anybody may send it.
        """
        client = setting("CLIENT")
        if client is None and api_settings.NUM_PROXIES is not None:
            ident = super().get_ident(request)
        else:
            ident = (client or _PEER)(DjangoRequest(request._request))
        return str(ident)


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Of requests without a user, by the client's address; scope ``anon``."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Of requests by user, of others by the client's address; scope ``user``."""


class ScopedRateThrottle(throttling.ScopedRateThrottle, SimpleRateThrottle):
    """Of the views that name a ``throttle_scope``, by user or the client's address."""


_PEER = ClientAddress()
_SHORT_RATE = re.compile(r"[1-9]\d{0,11}/(?:s|m(?!o)|h|d)[a-z]*", re.ASCII)


@cache
def _limiter(limiter_class: Any, scope: str, limit: int, duration_s: float) -> tuple[Any, Writer]:
    """One for all throttles of a scope and a rate, and what tells of its decisions. A changed rate counts anew."""
    store = setting("STORE")
    if not isinstance(store, Store) and not is_redis(store):
        raise ImproperlyConfigured(
            "the throttles count in a store: say which, "
            f'PENSTOCK = {{"STORE": Store("shop", keys=100_000)}} or its dotted path, not {shown(store)}'
        )
    limiter = limiter_class(store, f"throttle {scope} {limit}/{duration_s}s", Rate(limit, duration_s))
    if isinstance(store, Store):
        warn_if_each_counts_alone([limiter])
    policies = [Policy(limiter)]
    return limiter, header_writer(checked_styles(setting("HEADERS")), policies, policies, False)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "PENSTOCK":
        _limiter.cache_clear()


setting_changed.connect(_forget)
