"""Request ids: a client's retry of a request is charged once.

A client chooses its ids, and could send one of them with every request. So an id is worth a bounded number of retries
of one method and path, which are counted; further requests with it are charged as any other.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, as_period_ns
from forebay.store import Store
from forebay.web.patterns import TOKEN
from forebay.web.request import Request

__all__ = ["RequestId", "check_request_id"]

MOST_RETRIES: Final = 100


@dataclass(frozen=True)
class RequestId:
    """The field by which a request and its retries are one: ``RequestId("Idempotency-Key")``, for a ``Rule``.

    Requests with one value of `field` are retries of the first one that was charged, if their method, path, key and
    cost are the same, too. Of each charged request the rule lets `retries` retries pass without a charge, also when the
    limit is used up, within the time that `lasts` from the first attempt on. Later ones are charged. A denied request
    uses up nothing. So a client that sends one id with every request gets at most ``1 + retries`` times its limit.

    `retries` is from 1 to 100, `lasts` a length of time as text, seconds or a ``timedelta``. Raises ``InvalidLimiter``
    and ``InvalidRate``. A request with an id takes up to two cells of the store for this time; over Redis two keys, and
    a round trip more. A leased store has the ids of its host.
    """

    field: str = "Idempotency-Key"
    _: KW_ONLY
    retries: int = 3
    lasts: Duration = "5 minutes"

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not TOKEN.fullmatch(self.field):
            raise InvalidLimiter(f'a header field has a name such as "Idempotency-Key", not {short_repr(self.field)}')
        if type(self.retries) is not int or not 1 <= self.retries <= MOST_RETRIES:
            raise InvalidLimiter(f"retries is a whole number from 1 to {MOST_RETRIES}, not {short_repr(self.retries)}")
        as_period_ns(self.lasts)

    def of(self, request: Request) -> tuple[str, ...] | None:
        """The id of a request; None if the client has sent none."""
        sent = request.header(self.field)
        return (request.path, sent, *request.methods) if sent else None


def check_request_id(rule: Any) -> None:
    """Raises ``InvalidLimiter`` for a ``Rule`` that can't charge retries once."""
    limiter = rule.limiter
    if not isinstance(rule.request_id, RequestId):
        raise InvalidLimiter(
            f'request_id is a RequestId, not {short_repr(rule.request_id)}: write RequestId("Idempotency-Key")'
        )
    if rule.is_held:
        raise InvalidLimiter(
            f"the rule of {limiter!r} takes no request_id: its permits come back, so a retry takes others"
        )
    # That of a leased store's host has the marks.
    store = getattr(limiter.store, "host_store", limiter.store)
    if isinstance(store, Store) and store.on_full == "allow":
        raise InvalidLimiter(
            f"the rule of {limiter!r} takes no request_id: once its store is full, on_full='allow' would let any "
            "number of retries pass uncounted"
        )
    for what in ("charge_on", "delay"):
        if getattr(rule, what) is not None:
            raise InvalidLimiter(
                f"the rule of {limiter!r} has a request_id and {what}: a retry has taken no permits that could come "
                "back or wait; leave one out"
            )
