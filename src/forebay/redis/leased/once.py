"""Requests to leased limits that have an id: however often one is repeated on a host, it is charged once there.

State
-----
A *mark* in the host's table, for a limiter and its key, an id and a cost; for an ``AllOf``, for all its limiters, keys
and costs. It is a mark of ``CellLimiter.hit_once`` (core/cell_limiter.pyx), in a cell of its own: neither the lease nor
the fetch slot knows of it.

Transitions
-----------
* *look*: reads the mark, by loads only. If it is there, the request is allowed.
* *charge*: as a request without an id, which may wait for a fetch. Nothing is known of the id meanwhile.
* *look again*: after a denial. If the mark is there by now, another attempt was charged, and the request is allowed.
* *mark*: after a charge, by one CAS from no mark.
* *give back*: if another attempt has marked first. Its own charge goes back to Redis, as one that an ``AllOf`` rolls
  back does (`cancelled` in fetch.py). The request is allowed, even if Redis can't be reached.
* *refund*: one CAS removes the mark. Only the caller that removes it gives the permits back.

Invariant
---------
An allowed request with an id was charged at least once on its host. All attempts on one host are charged once together,
as long as the mark is there, with the exceptions below.

Proof
-----
An attempt is allowed if it was charged or has seen a mark. A mark is inserted only after a charge that is counted, and
that charge is not given back: an attempt gives its own back only if its CAS has failed, and so is not the one that the
mark stands for. Of all attempts that have found no mark, one inserts it; each other one finds it and gives back.

Crash and stall
---------------
* Before the charge: nothing. During a fetch: as without an id, the charge may be lost.
* Between the charge and the mark: the charge stays, without a mark. The next attempt is charged, too.
* Between the mark of another attempt and the end of giving back: both charges stay.
* Between the removal of a mark and the refund: the permits are not given back. Nor are they if Redis doesn't answer.

A task that is cancelled while it charges leaves what a request without an id would leave. One that is cancelled while
it gives back goes on with that (`run_to_end`).

Not handled
-----------
* *Another host* has a table of its own: an attempt there is charged. A mark in Redis would cost each request with an
  id a round trip, which leasing exists to save. A limiter over the ``RedisStore`` has such marks.
* While Redis is away, the Redis store's fallback has charged the request, or nothing has. A mark would let a refund by
  id give back permits in Redis that were never taken there. So there is no mark in the host's table. The fallback of a
  single limiter gets the id, and remembers it by itself.
* A host's store that is full may admit a request uncharged (``on_full="allow"``), and leaves no mark then. If there is
  room for the charge and none for the mark, the next attempt is charged again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from forebay.core.arguments import DEFAULT_REQUEST_TTL, cost_of
from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError
from forebay.flows import Flow
from forebay.rate import Duration, as_period_ns
from forebay.redis.leased.charge import LeasedPart

__all__ = ["charged_once", "hit_once", "refund_once", "ttl_ns_of"]


class Charge(Protocol):
    """A charge of one limit, or of several."""

    @property
    def allowed(self) -> bool: ...
    @property
    def is_counted(self) -> bool: ...
    def cancel(self) -> Any: ...


C = TypeVar("C", bound=Charge)


def ttl_ns_of(request_ttl: Duration | None) -> int:
    return as_period_ns(DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)


def charged_once(permits: Permits, mark: int, ttl_ns: int, charge: Callable[[], Flow[C]]) -> Flow[C | None]:
    """Charge a request that has no mark, and mark it in the store of `permits`. None if another attempt was faster."""
    charged = yield from charge()
    if not charged.allowed:
        return None if permits.is_marked(mark) else charged
    if not charged.is_counted or permits.insert_mark(mark, ttl_ns):
        return charged
    with suppress(ForebayError):
        back = charged.cancel()
        if back is not None:
            yield back
    return None


def hit_once(part: LeasedPart, key: Key, cost: int, request_id: Key, request_ttl: Duration | None) -> Flow[Decision]:
    permits = part.permits
    cost, ttl_ns = permits.checked(cost), ttl_ns_of(request_ttl)
    mark = permits.mark_of(key, cost, request_id)
    if cost and permits.is_marked(mark):
        permits.count_allowed()
        return permits.repeated(key)

    def charge() -> Flow[Any]:
        charged = part.charge_now(key, cost)
        if charged is None:
            charged = yield part.charge(key, cost, request_id=request_id, request_ttl=request_ttl)
        return charged

    # A request that costs nothing leaves no mark.
    charged = (yield from charged_once(permits, mark, ttl_ns, charge)) if cost else (yield from charge())
    return permits.repeated(key) if charged is None else charged.decision


def refund_once(part: LeasedPart, key: Key, cost: int, request_id: Key) -> Flow[None]:
    permits = part.permits
    cost = cost_of(cost)
    # No single request can have charged more than the limit.
    mark = permits.mark_of(key, min(cost, permits.terms.limit), request_id)
    if cost > permits.terms.limit:
        return
    if permits.remove_mark(mark):
        yield part.give_back(key, cost)
    elif permits.terms.fallback is not None:
        permits.terms.fallback.refund(key, cost, request_id=request_id)
