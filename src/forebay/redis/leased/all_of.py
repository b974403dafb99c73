"""``AllOf`` of leased limiters, and of limiters over a ``Store`` beside them: all or none.

State
-----
None is kept between requests. A decision keeps a list of its charges, in their order, in its own process:
a ``Reservation`` for the limits of each ``Store``, which an ``AllOf`` of that store charges as one, and a
``LeasedCharge`` for each leased limit. Limits of different stores share no state, except that leased limits may share
one with each other; no way of giving back depends on what was charged later.

Transitions
-----------
* *look*: reads each lease and each remembered denial (`look`), by loads only. If one limit denies, so does the request.
* *charge the stores*: ``reserve_each`` for each ``Store``: one step of its own protocol, see core/all_of.pyx.
* *charge leases that do not suffice*: each in turn, by a call to Redis. It waits as a request to that limiter alone.
* *charge leases that suffice*: each by one CAS. If another request was faster, as before.
* *roll back*: after a denial or an error of one limit, gives back all charges, the last first. A reservation is
  cancelled in memory. A leased charge is given back at Redis (`cancelled` in fetch.py).

Limits are charged in this order because it is the order of what a denial costs. Giving back to a ``Store`` is exact and
needs no call. Then come the limits that Redis may deny. The last limits are denied only if another request was faster
after the look. So a leased charge is given back only in two cases: two limits lack permits and Redis denies the second,
or a race. After a denial, the host remembers it, and the look finds it.

Invariant
---------
A request is allowed only if every limit has charged it. No limit admits more than it does alone.

Proof
-----
* `_charge` returns an allowed request only at its end, after the last limit's charge. Each charge before has returned
  as allowed, and nothing gives it back but a roll back, after which the request is denied or raises.
* A roll back gives back only charges of this request. `charges` has only charges that returned as allowed, and each
  is given back once. A charge by a fallback goes back to the fallback. A charge that a full store admitted without a
  permit gives nothing back.
* A window takes a charge back only in the window in which it was made (`cancelled`). A token bucket's refund adds to
  the bucket at most what is missing in it besides the loans (src/forebay/redis/scripts/lease_bucket.lua), and at most
  what an empty bucket would lack that long after the charge. See *Not handled* for a bucket that was full in between.

Crash and stall
---------------
A process that is killed between two charges leaves the first limits charged, as with every ``AllOf``: permits in a
``Store`` come back as all charges do, leased permits as permits of a host that has died, or spent. A process that is
killed during a roll back leaves the limits charged that it had not yet given back to. A process that is stopped holds
the first limits' permits meanwhile; no other request waits for it, except at a fetch slot, as for every fetch.

With asyncio, a cancellation arrives where a task awaits. In a fetch, the request is rolled back. In a roll back, the
call that gives back goes on in a task of its own (`run_to_end`), and the others follow. If the event loop ends, the
reservations are cancelled, and leased charges stay.

Not handled
-----------
* A request that is denied by Redis holds the other limits' permits during that call. Other requests may be denied
  meanwhile that would have been allowed one after the other.
* A token bucket that has been full between a charge and its roll back has refilled that charge, but takes it back. So
  it may admit that much above its bound. This needs a roll back that takes as long as the refill of what was missing.
* If Redis can't be reached, a leased charge stays: less is admitted, as after a lost reply.
* A fetch that is cancelled, or whose reply is lost, may have charged its own limit. As with a single leased limiter,
  that charge is lost.
* An exception of a signal handler between a charge and its entry in the list leaves that charge.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

from forebay import holding
from forebay.core.all_of import AllOf, binding, reserve_each
from forebay.core.arguments import cost_of, costs_of, keys_of, no_id_beside_charges, ttl_without_id
from forebay.core.cell_limiter import CellLimiter
from forebay.core.decision import Decision
from forebay.core.leased import decide_now, repeated_each
from forebay.core.reservation import Reservation
from forebay.core.table.keys import Key
from forebay.errors import CostExceedsLimit, ForebayError, InvalidLimiter, LimitExceeded
from forebay.flows import Flow, run, run_async
from forebay.host_time import host_ns
from forebay.rate import Duration
from forebay.redis.all_of import Costs, Keys, checked_lists, each, exceeded_by
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.executor import Executor
from forebay.redis.leased.charge import LeasedCharge, LeasedPart
from forebay.redis.leased.once import charged_once, ttl_ns_of
from forebay.redis.limiter import would_block
from forebay.redis.operations import Operated, Pending, asyncio_operations, operation

__all__ = ["AsyncLeasedAllOf", "LeasedAllOf", "SeveralCharges"]

E = TypeVar("E")
T = TypeVar("T")


class BaseLeasedAllOf(Operated[E], Generic[E]):
    """`limiters` as the caller gave them; `parts` has a ``LeasedPart`` for each that is leased, and else None."""

    def __init__(self, limiters: Sequence[Any], parts: Sequence[LeasedPart | None]) -> None:
        self._limiters, self._parts = tuple(limiters), tuple(parts)
        self._leased = [(i, part) for i, part in enumerate(parts) if part is not None]
        by_store: dict[int, list[int]] = {}
        for i, part in enumerate(parts):
            if part is None:
                by_store.setdefault(id(limiters[i].store), []).append(i)
        self._local = [(AllOf(*[limiters[i] for i in at]), at, _picker(at)) for at in by_store.values()]
        # The arguments of ``decide_now``: the limits of one store, the leases, and the place of each limit among these.
        self._own = self._local[0][0] if self._local else None
        self._permits = tuple(part.permits for _, part in self._leased)
        self._leased_of = _picker([i for i, _ in self._leased])
        order = [i for _, at, _ in self._local for i in at] + [i for i, _ in self._leased]
        self._places = [] if order == sorted(order) else [order.index(i) for i in range(len(order))]
        self._is_simple = len(self._local) <= 1
        self.name = " + ".join(limiter.name for limiter in limiters)
        self.may_free_early = any(limiter.may_free_early for limiter in limiters)

    def _run(self, flow: Flow[Any]) -> Any:
        """The flow's result; with asyncio, a coroutine of it."""
        raise NotImplementedError

    def _done(self, result: Any) -> Any:
        """A result; with asyncio, a coroutine of it."""
        raise NotImplementedError

    @property
    def limiters(self) -> tuple[Any, ...]:
        return self._limiters

    @property
    def store(self) -> Any:
        """The store of the first leased limiter."""
        return self._leased[0][1].store

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(repr, self._limiters))})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same limiters")

    def _each(self, key: Keys, cost: Costs) -> tuple[list[Any], list[Any]]:
        """A key and a cost for each limiter, in lists that the caller can't change meanwhile."""
        keys, costs = checked_lists(key, cost, len(self._limiters))
        return keys[:], costs[:]

    def _decide_now(self, key: Keys, cost: Costs, at_each: bool) -> Any:
        """Whether a request is allowed, or the decisions of all limits, if memory decides. Else what ``decide_now``
        returns.
        """
        if type(key) is str and type(cost) is int and self._is_simple:
            decided = decide_now(self._own, key, cost, self._permits, key, cost, at_each)
        else:
            keys, costs = self._each(key, cost)
            if not self._is_simple:
                return None
            of = self._local[0][2] if self._local else list
            decided = decide_now(
                self._own, of(keys), of(costs), self._permits, self._leased_of(keys), self._leased_of(costs), at_each
            )
        if self._places and type(decided) is list:
            return [decided[place] for place in self._places]
        return decided

    def _go_on(self, decided: Any, key: Keys, cost: Costs) -> Flow[SeveralCharges]:
        """After ``decide_now`` has not decided."""
        keys, costs = self._each(key, cost)
        if decided:
            with suppress(ForebayError):
                yield from rolled_back(self._spent(keys, costs, decided))
        return (yield from self._charge(keys, costs))

    def _spent(self, keys: list[Any], costs: list[Any], times_ns: tuple[int, ...]) -> list[Reservation | LeasedCharge]:
        """The charges to the first leases, each made at one of these times, of a request that lost a race."""
        return [
            LeasedCharge(part, keys[i], costs[i], since_ns, part.permits.decision(True, 0, 0, 0))
            for (i, part), since_ns in zip(self._leased, times_ns, strict=False)
        ]

    def _charge(self, keys: list[Any], costs: list[Any]) -> Flow[SeveralCharges]:
        """Charge all limits or none: the transitions above."""
        seen: list[Decision | None] = []
        decisions: list[Any] = [None] * len(keys)
        denied = False
        for i, part in self._leased:
            look = part.permits.look(keys[i], costs[i])
            seen.append(look)
            if look is not None and not look.allowed:
                part.permits.count_denied(part.permits.tag(keys[i]))
                decisions[i] = look
                denied = True
        charges: list[Reservation | LeasedCharge] = []
        if denied:
            return SeveralCharges(self._run, self._after_denial(keys, costs, seen, decisions), None)
        try:
            for limits, at, of in self._local:
                reservation, its_decisions = reserve_each(limits, of(keys), of(costs))
                for i, decision in zip(at, its_decisions, strict=True):
                    decisions[i] = decision
                if not reservation.allowed:
                    denied = True
                    break
                charges.append(reservation)
            else:
                for (i, part), look in self._by_need(seen):
                    if look is not None and costs[i] == 0:
                        decisions[i] = look
                        continue
                    charge = None if look is None else part.charge_now(keys[i], costs[i])
                    if charge is None:
                        charge = yield part.charge(keys[i], costs[i])
                    decisions[i] = charge.decision
                    if not charge.decision.allowed:
                        denied = True
                        break
                    charges.append(charge)
        except GeneratorExit:
            # The event loop has ended: nothing can be awaited.
            for one in reversed(charges):
                if isinstance(one, Reservation):
                    one.cancel()
            raise
        except BaseException:
            with suppress(ForebayError):
                yield from rolled_back(charges)
            raise
        if not denied:
            return SeveralCharges(self._run, decisions, charges)
        with suppress(ForebayError):
            yield from rolled_back(charges)
        return SeveralCharges(self._run, self._after_denial(keys, costs, seen, decisions), None)

    def _by_need(self, seen: list[Decision | None]) -> Iterable[tuple[tuple[int, LeasedPart], Decision | None]]:
        """The leased limits with what was seen of them, and first those that need a call to Redis."""
        listed = zip(self._leased, seen, strict=True)
        return sorted(listed, key=lambda one: one[1] is not None) if None in seen else listed

    def _after_denial(
        self, keys: list[Any], costs: list[Any], seen: list[Decision | None], decisions: list[Any]
    ) -> list[Decision]:
        """The decisions of a denied request. Limits that have not denied show what they have without this request.

        A leased limit that was not asked, and whose lease does not suffice, counts as one that allows.
        """
        for _, at, _ in self._local:
            for i in at:
                if decisions[i] is None or decisions[i].allowed:
                    decisions[i] = self._limiters[i].peek(keys[i], costs[i])
        for (i, part), look in zip(self._leased, seen, strict=True):
            if decisions[i] is None or decisions[i].allowed:
                permits = part.permits
                decisions[i] = look or permits.decision(True, permits.left(permits.tag(keys[i]))[0], 0, 0)
        return decisions

    def check_request(self, key: Keys, cost: Costs) -> None:
        """Raise for a request that can never be allowed, without a call to Redis."""
        keys, costs = self._each(key, cost)
        for i, part in self._leased:
            part.check_request(keys[i], costs[i])
        for _, at, _ in self._local:
            for i in at:
                self._limiters[i].peek(keys[i], costs[i])

    @operation
    def charge(self, key: Keys, cost: Costs) -> Pending[SeveralCharges]:
        """For ``wait`` and the web: the decisions of ``hit_each``, with the charges, which can be given back."""
        return self._run(self._charge(*self._each(key, cost)))  # type: ignore[no-any-return]

    @operation
    def allow(self, key: Keys, /) -> Pending[bool]:
        decided = self._decide_now(key, 1, False)
        if type(decided) is bool:
            return self._done(decided)  # type: ignore[no-any-return]
        return self._run(self._allow(decided, key, 1))  # type: ignore[no-any-return]

    def _allow(self, decided: Any, key: Keys, cost: Costs) -> Flow[bool]:
        return (yield from self._go_on(decided, key, cost)).allowed

    @operation
    def hit(
        self,
        key: Keys,
        cost: Costs = 1,
        *,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Pending[Decision]:
        if request_id is not None:
            return self._run(self._hit_once(key, cost, request_id, request_ttl))  # type: ignore[no-any-return]
        if request_ttl is not None:
            raise ttl_without_id(request_ttl)
        decided = self._decide_now(key, cost, True)
        if type(decided) is list:
            return self._done(binding(decided))  # type: ignore[no-any-return]
        return self._run(self._hit(decided, key, cost))  # type: ignore[no-any-return]

    def _hit(self, decided: Any, key: Keys, cost: Costs) -> Flow[Decision]:
        return binding((yield from self._go_on(decided, key, cost)).decisions)

    def _hit_once(self, key: Keys, cost: Costs, request_id: Key, request_ttl: Duration | None) -> Flow[Decision]:
        return binding((yield from self._hit_each_once(key, cost, request_id, request_ttl)))

    @operation
    def hit_each_once(
        self, key: Keys, cost: Costs, request_id: Key, request_ttl: Duration | None
    ) -> Pending[list[Decision]]:
        """For the web: ``hit`` with an id, and the decision of each limit."""
        return self._run(self._hit_each_once(key, cost, request_id, request_ttl))  # type: ignore[no-any-return]

    def _hit_each_once(
        self, key: Keys, cost: Costs, request_id: Key, request_ttl: Duration | None
    ) -> Flow[list[Decision]]:
        keys, costs = self._each(key, cost)
        costs, ttl_ns = [cost_of(its_cost) for its_cost in costs], ttl_ns_of(request_ttl)
        mark = self._mark_of(keys, costs, request_id)
        if not any(costs):
            return (yield from self._charge(keys, costs)).decisions
        if self._permits[0].is_marked(mark):
            decisions = self._repeated(keys, is_new=True)
            # All have been read by now, so each counts in a line of this process.
            for permits in self._permits:
                permits.count_allowed()
            return decisions
        charged = yield from charged_once(self._permits[0], mark, ttl_ns, lambda: self._charge(keys, costs))
        return self._repeated(keys, is_new=False) if charged is None else charged.decisions

    def _mark_of(self, keys: list[Any], costs: list[int], request_id: Key) -> int:
        """The tag of a request's mark. Raises ``InvalidLimiter`` if the limits can't remember requests."""
        for limiter, part in zip(self._limiters, self._parts, strict=True):
            if part is None and not isinstance(limiter, CellLimiter):
                raise no_id_beside_charges(limiter, self)
        limiters = [
            limiter if part is None else part.permits for limiter, part in zip(self._limiters, self._parts, strict=True)
        ]
        return self._permits[0].mark_of_several(limiters, keys, costs, request_id)

    def _repeated(self, keys: list[Any], *, is_new: bool) -> list[Decision]:
        """The decisions of a request that was charged before: see `repeated_each`."""
        decisions: list[Any] = [None] * len(keys)
        for i, part in self._leased:
            decisions[i] = part.permits.repeated(keys[i])
        for limits, at, of in self._local:
            for i, decision in zip(at, repeated_each(limits, of(keys), is_new), strict=True):
                decisions[i] = decision
        return decisions

    @operation
    def hit_each(self, key: Keys, cost: Costs = 1) -> Pending[list[Decision]]:
        decided = self._decide_now(key, cost, True)
        if type(decided) is list:
            return self._done(decided)  # type: ignore[no-any-return]
        return self._run(self._hit_each(decided, key, cost))  # type: ignore[no-any-return]

    def _hit_each(self, decided: Any, key: Keys, cost: Costs) -> Flow[list[Decision]]:
        return (yield from self._go_on(decided, key, cost)).decisions

    @operation
    def peek(self, key: Keys, cost: Costs = 1) -> Pending[Decision]:
        return self._run(self._peek(*self._each(key, cost)))  # type: ignore[no-any-return]

    def _peek(self, keys: list[Any], costs: list[Any]) -> Flow[Decision]:
        decisions = []
        for i, part in self._leased:
            decisions.append(part.permits.look(keys[i], costs[i]) or (yield part.peek(keys[i], costs[i])))
        for _, at, _ in self._local:
            decisions += [self._limiters[i].peek(keys[i], costs[i]) for i in at]
        return binding(decisions)

    @operation
    def refund(self, key: Keys, cost: Costs = 1, *, request_id: Key | None = None) -> Pending[None]:
        return self._run(self._refund(*self._each(key, cost), request_id))  # type: ignore[no-any-return]

    def _refund(self, keys: list[Any], costs: list[Any], request_id: Key | None) -> Flow[None]:
        # All arguments are checked before anything is given back: those of the stores by their own refund, below.
        for i, part in self._leased:
            part.permits.tag(keys[i])
        costs = [cost_of(cost) for cost in costs]
        if request_id is not None:
            try:
                mark = self._mark_of(keys, costs, request_id)
            except CostExceedsLimit:
                # No single request can have charged that much.
                return
            if not self._permits[0].remove_mark(mark):
                return
        for limits, _, of in self._local:
            limits.refund(of(keys), of(costs))
        yield from each(
            [
                _called(part.refund if request_id is None else part.give_back, keys[i], costs[i])
                for i, part in self._leased
            ]
        )

    @operation
    def reset(self, key: Keys) -> Pending[None]:
        return self._run(self._reset(self._each(key, 1)[0]))  # type: ignore[no-any-return]

    def _reset(self, keys: list[Any]) -> Flow[None]:
        for i, part in self._leased:
            part.permits.tag(keys[i])
        for limits, _, of in self._local:
            limits.reset(of(keys))
        yield from each([_called(part.reset, keys[i]) for i, part in self._leased])

    @operation
    def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> Pending[list[bool]]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        lists = [self._each(key, cost) for key, cost in zip(keys, costs, strict=True)]
        return self._run(self._allow_many(lists))  # type: ignore[no-any-return]

    def _allow_many(self, lists: list[tuple[list[Any], list[Any]]]) -> Flow[list[bool]]:
        allowed = []
        for each_key, each_cost in lists:
            decided = self._decide_now(each_key, each_cost, False)
            if type(decided) is not bool:
                decided = (yield from self._go_on(decided, each_key, each_cost)).allowed
            allowed.append(decided)
        return allowed

    @operation
    def wait(
        self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Pending[bool]:
        return self.store.executor.wait(Waited(self), key, cost, timeout, jitter)  # type: ignore[no-any-return]

    @operation
    def exceeded(self, key: Keys, cost: Costs = 1) -> Pending[LimitExceeded]:
        """The exception for a wait in which the permits of `key` didn't come in time: it names the limit that bound."""
        return self._run(self._exceeded(*self._each(key, cost)))  # type: ignore[no-any-return]

    def _exceeded(self, keys: list[Any], costs: list[Any]) -> Flow[LimitExceeded]:
        return exceeded_by((yield from self._peek(keys, costs)))

    @operation
    def reserve(self, key: Keys, cost: Costs = 1, max_delay: Duration | None = None) -> Pending[NoReturn]:
        raise InvalidLimiter(
            f"{self!r} can't be reserved, because a leased limiter can't book ahead: wait for the permits, or hit and "
            "refund"
        )

    def _check_spent(self) -> None:
        if self.may_free_early:
            raise holding.never_back(self)


class SeveralCharges:
    """A request's decisions, and its charges. True if every limit has charged it. For ``wait``, a booking."""

    __slots__ = ("_charges", "_run", "decisions")

    def __init__(
        self,
        run: Callable[[Flow[None]], Any],
        decisions: list[Decision],
        charges: list[Reservation | LeasedCharge] | None,
    ) -> None:
        self._run, self.decisions, self._charges = run, decisions, charges

    @property
    def allowed(self) -> bool:
        return self._charges is not None

    @property
    def is_counted(self) -> bool:
        """Whether each limit has charged it. Else a fallback has charged one, or a full store let it in."""
        return self.allowed and not any(decision.degraded or decision.full for decision in self.decisions)

    @property
    def delay(self) -> float:
        return binding(self.decisions).retry_after

    @property
    def delay_ns(self) -> int:
        return 0 if self.allowed else binding(self.decisions).retry_after_ns

    @property
    def due_ns(self) -> int:
        """By the host's monotonic clock. A wait that begins now is never too short."""
        return host_ns() + self.delay_ns

    def cancel(self) -> Any:
        """Give all charges back. Call it once. With asyncio, a coroutine."""
        return self._run(rolled_back(self._charges or []))

    def __bool__(self) -> bool:
        return self.allowed


class Waited:
    """Several limits as ``wait`` uses them."""

    def __init__(self, limits: BaseLeasedAllOf[Any]) -> None:
        self.store, self.name, self.may_free_early = limits.store, limits.name, limits.may_free_early
        self._limits = limits

    def queue_key(self, key: Keys) -> object:
        return self.name, tuple(key) if isinstance(key, list) else key

    def check_request(self, key: Keys, cost: Costs) -> None:
        self._limits.check_request(key, cost)

    def reserve(self, key: Keys, cost: Costs, max_delay: Duration | None) -> Any:
        return self._limits.charge(key, cost)


def _picker(at: list[int]) -> Callable[[list[Any]], list[Any]]:
    """A function that picks the items at these positions."""
    return lambda items: [items[i] for i in at]


def rolled_back(charges: list[Reservation | LeasedCharge]) -> Flow[None]:
    """Give back each charge, the last first, even if giving back another one fails or is cancelled."""
    yield from each([_cancelled(charge) for charge in reversed(charges)])


def _cancelled(charge: Reservation | LeasedCharge) -> Flow[None]:
    back = charge.cancel()
    if back is not None:
        yield back


def _called(method: Callable[..., Any], *arguments: Any) -> Flow[None]:
    yield method(*arguments)


class LeasedAllOf(BaseLeasedAllOf[Executor]):
    """Several limits at once, one or more of which are over a ``LeasedStore``, as ``forebay.AllOf``: all or none.

    The others may be over any ``Store`` or ``SyncedStore`` of this host. A decision calls Redis for leases that lack
    permits, and if permits that a leased limit has charged are given back. It has no ``reserve``. A `request_id` is
    remembered on this host, in the store of its first leased limiter.

    *Threads*, *processes*, *fork*: as the limiters. O(number of limiters). Raises what the limiters raise. If one
    raises, nothing stays charged, except by a limit whose reply from Redis was lost.
    """

    def allow(self, key: Keys, /) -> bool:
        # The usual request, without the calls of the method that both kinds share.
        if type(key) is str and self._is_simple:
            decided = decide_now(self._own, key, 1, self._permits, key, 1, False)
            return decided if type(decided) is bool else run(self._allow(decided, key, 1))
        return super().allow(key)

    def _run(self, flow: Flow[T]) -> T:
        return run(flow)

    def _done(self, result: T) -> T:
        return result

    def wait_async(
        self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> NoReturn:
        raise would_block(self)

    def limited(
        self,
        key: Keys | Callable[..., Keys],
        cost: Costs = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> holding.Limited:
        self._check_spent()
        return holding.Limited(self, key, cost, timeout, jitter)


@asyncio_operations
class AsyncLeasedAllOf(BaseLeasedAllOf[AsyncExecutor]):
    """Several limits at once, one or more of which are over an ``AsyncLeasedStore``, as ``LeasedAllOf``, awaited.

    If the task is cancelled, the charges come back, except that of a limit whose reply from Redis was on its way.
    """

    wait_async = BaseLeasedAllOf.wait

    def _run(self, flow: Flow[T]) -> Coroutine[Any, Any, T]:
        return run_async(flow)

    async def _done(self, result: T) -> T:
        return result

    def limited(
        self,
        key: Keys | Callable[..., Keys],
        cost: Costs = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> holding.AsyncLimited:
        self._check_spent()
        return holding.AsyncLimited(self, key, cost, timeout, jitter)
