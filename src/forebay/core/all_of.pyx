"""Several limits at once, all or none.

Optimistic and in two phases. **Transitions:**

* *check*: reads the state of every limit, without a write. If one limit denies, the request is denied.
* *try to commit*: charges each limit in order, by a CAS from the state that was checked.
* *commit*: if that state has changed since, charges by a new decision of that limit.
* *roll back*: if such a decision denies, gives the charges of the earlier limits back.

**Invariant.** A request is allowed only if every limit has charged it. A request that the check denies writes nothing.

**Crash and stall.** A process that is killed between two charges leaves the first limits charged.

**Not handled.** A request that loses a race holds permits for a moment, during which other requests may be denied. A
leaky bucket can't take back a place behind which other requests already stand, nor a bucketed window a charge in a
bucket that is over: such a limiter belongs last.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from forebay.core.attempt cimport binds
from forebay.core.cell_limiter cimport (
    CellLimiter, copied, hash_of_id, hash_with_part, insert_mark, mark_state, read_once, remove_mark, tag_of_mark,
    whole_cost,
)
from forebay.core.decision cimport NO_ROOM, Decision, remaining_of
from forebay.core.limiter cimport Attempt, Limiter
from forebay.core.reservation cimport Reservable, Reservation, delay_ns_of, new_reservation
from forebay.core.table.native cimport COUNTER_ALLOWED, FREE_THREADED
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport ALLOWED, table_now

from forebay import holding, waiting
from forebay.awaited import Awaited
from forebay.core.arguments import (
    DEFAULT_REQUEST_TTL, ambiguous_key, costs_of, keys_of, no_id_beside_charges, ttl_without_id,
)
from forebay.core.limiter_arguments import bound_arguments, check_limiters
from forebay.errors import CostExceedsLimit, InvalidCost, InvalidKey, LimitExceeded
from forebay.rate import as_period_ns


@cython.final
cdef class AllOf(Reservable):
    """Several limiters of one store as one: a request is charged to all of them or to none.

    ``AllOf(per_second, per_hour, for_everybody)``. A key is for all limiters, or a list with one key for each:
    ``limits.hit(["user:42", "user:42", "everybody"])``. The same holds for a cost. A tuple with as many parts as there
    are limiters is refused, as it may mean either: for one key write ``[key] * 3``. One limiter may come several times.
    If its costs for one key are above its limit together, each request is denied, with a wrong ``retry_after``. The
    order matters for speed only: put the limiter first that denies most often.

    A ``Decision`` names the limit that bound the request, ``decision.limiter``. For a denial it is the limit with the
    longest ``retry_after`` among those that denied, for an allowed request the one with the fewest ``remaining``.
    ``limit`` is that limit's; ``remaining`` is the least and ``reset_after`` the longest of all. ``limiters`` are the
    limiters, ``store`` is theirs, ``name`` has all their names, and ``may_free_early`` is true if it is so for any.

    Raises ``InvalidLimiter`` unless given 1 to 16 limiters of one store. Threads, processes, fork: as the limiters.
    O(number of limiters), lock-free; a denied request writes nothing shared. In a race of several requests for the last
    permits, some may be denied that would have been allowed one after the other.
    """

    def __cinit__(self, *limiters, **kwargs):
        cdef int i
        bound_arguments(type(self), limiters, kwargs)
        check_limiters(limiters, Limiter, MOST)
        self.limiters = limiters
        self.count = len(limiters)
        for i in range(self.count):
            self.parts[i] = <void*>limiters[i]
        self.store = limiters[0].store
        self.name = " + ".join([limiter.name for limiter in limiters])
        self.may_free_early = any([limiter.may_free_early for limiter in limiters])

    @cython.binding(False)
    def __init__(self, *limiters):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"AllOf({', '.join([repr(limiter) for limiter in self.limiters])})"

    def __reduce__(self):
        raise TypeError(f"{self!r} can't be pickled: make it again from the same limiters")

    cdef int begin_attempts(self, object key, object cost, Attempt* attempts) except -1:
        cdef int i
        cdef list keys = key if type(key) is list else None
        cdef list costs = cost if type(cost) is list else None
        if FREE_THREADED:
            # Other threads may change the lists meanwhile.
            keys = None if keys is None else copied(keys)
            costs = None if costs is None else copied(costs)
        if keys is not None and len(keys) != self.count:
            raise InvalidKey(f"{self.count} limiters need one key for all or {self.count} keys, not {len(keys)}")
        self.check_key(key)
        if costs is not None and len(costs) != self.count:
            raise InvalidCost(f"{self.count} limiters need one cost for all or {self.count} costs, not {len(costs)}")
        for i in range(self.count):
            # A cost may run Python code, which may have shortened a list.
            if (keys is not None and i >= len(<list>key)) or (costs is not None and i >= len(<list>cost)):
                raise RuntimeError("a list of keys or costs was shortened while it was read")
            (<Limiter>self.parts[i]).attempt_for(
                key if keys is None else keys[i], cost if costs is None else costs[i], &attempts[i])
        # Last, because the keys and costs above may have run Python code.
        return self.ensure_attached()

    cdef int ensure_attached(self) except -1:
        cdef int i
        for i in range(self.count):
            (<Limiter>self.parts[i]).ensure_attached()
        return 0

    cdef int check_key(self, object key) except -1:
        """Raise InvalidKey for a tuple that may be one key or a key for each limiter. A wrong guess would apply a
        limit that is meant for all clients to each client alone."""
        if isinstance(key, tuple) and self.count > 1 and len(key) == self.count:
            raise ambiguous_key(key, self.count)
        return 0

    cdef bint check_all(self, Attempt* attempts, bint at_each) except -1:
        """Whether all limits would allow the request. With `at_each`, checks all even if one denies."""
        cdef int i
        cdef bint allowed = True
        cdef uint64_t now_ns = table_now(&(<Limiter>self.parts[0]).table)
        for i in range(self.count):
            if not (<Limiter>self.parts[i]).check(&attempts[i], now_ns):
                allowed = False
                if not at_each:
                    break
        return allowed

    cdef int try_commit(self, Attempt* attempts, int first) except -1:
        """Charge limits from `first` on, until one whose state has changed since the check; return its index."""
        cdef int i
        for i in range(first, self.count):
            if not (<Limiter>self.parts[i]).try_commit(&attempts[i]):
                return i
        return self.count

    cdef bint commit_rest(self, Attempt* attempts, int charged) except -1:
        """Charge the other limits, even if states have changed. Unless all are charged, give every charge back."""
        cdef int i
        cdef bint allowed = False
        try:
            while charged < self.count:
                if not (<Limiter>self.parts[charged]).commit(&attempts[charged]):
                    return False
                charged = self.try_commit(attempts, charged + 1)
            allowed = True
        finally:
            if not allowed:
                # In reverse order: several charges may be in one cell.
                for i in reversed(range(charged)):
                    (<Limiter>self.parts[i]).roll_back(&attempts[i])
        return True

    cdef bint decide(self, object key, object cost, Attempt* attempts, bint at_each) except -1:
        self.begin_attempts(key, cost, attempts)
        return self.decide_begun(attempts, at_each)

    cdef bint decide_begun(self, Attempt* attempts, bint at_each) except -1:
        cdef int i, charged
        cdef Limiter limiter
        cdef bint allowed = self.check_all(attempts, at_each)
        if allowed:
            charged = self.try_commit(attempts, 0)
            if charged < self.count:
                allowed = self.commit_rest(attempts, charged)
        for i in range(self.count):
            limiter = <Limiter>self.parts[i]
            if allowed:
                limiter.count_decision(True, attempts[i].tag)
            elif attempts[i].verdict.outcome == 0:
                limiter.count_decision(False, attempts[i].tag)
                if not at_each:
                    break
        return allowed

    cdef Decision binding(self, Attempt* attempts, bint allowed):
        """The decision of the limit that bound the request, with the ``remaining`` and ``reset_after`` of all."""
        cdef Decision decision, binding = None
        cdef uint64_t remaining, least = ~<uint64_t>0
        cdef uint64_t reset_after_ns = 0
        cdef int64_t longest_ns = -1
        cdef int i
        for i in range(self.count):
            decision = (<Limiter>self.parts[i]).decision_of(&attempts[i], attempts[i].verdict.outcome != 0)
            remaining = remaining_of(decision)
            if binds(allowed, decision.allowed, remaining, least, decision.outlook.retry_after_ns, longest_ns):
                binding = decision
                longest_ns = <int64_t>decision.outlook.retry_after_ns
            least = min(least, remaining)
            reset_after_ns = max(reset_after_ns, decision.outlook.reset_after_ns)
        binding.outlook.available = least
        binding.outlook.rate_limit = binding.outlook.rate_period_ns = 1
        binding.outlook.reset_after_ns = reset_after_ns
        return binding

    cdef list decisions(self, Attempt* attempts):
        cdef int i
        return [
            (<Limiter>self.parts[i]).decision_of(&attempts[i], attempts[i].verdict.outcome != 0)
            for i in range(self.count)
        ]

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit of `key` to every limiter if all allow it: the fast path of ``hit``."""
        cdef Attempt[MOST] attempts
        return self.decide(key, 1, attempts, False)

    @cython.binding(False)
    def hit(self, key, cost=1, *, request_id=None, request_ttl=None):
        """Charge `cost` permits of `key` to every limiter if all allow it, and return the ``Decision``.

        `request_id` and `request_ttl` are those of each limiter's ``hit``: a repeated request with the same id, keys
        and costs is charged once to all. None of the limiters may be a ``Concurrency`` then: its permits are held by
        the latest of the requests.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``InvalidLimiter``, ``StoreClosed``.
        """
        cdef Attempt[MOST] attempts
        cdef bint allowed
        if request_id is not None:
            return self.hit_once(key, cost, request_id, DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
        if request_ttl is not None:
            raise ttl_without_id(request_ttl)
        allowed = self.decide(key, cost, attempts, True)
        return self.binding(attempts, allowed)

    cdef CellLimiter marking(self):
        """The limiter that counts what happens to marks. Raises if the limits can't remember requests."""
        for limiter in self.limiters:
            if not isinstance(limiter, CellLimiter):
                raise no_id_beside_charges(limiter, self)
        return <CellLimiter>self.parts[0]

    cdef uint64_t mark_of(self, object request_id, const Attempt* attempts) except 0:
        """The tag of a request's mark: by its id, and by each limiter's key and amount."""
        cdef CellLimiter limiter = <CellLimiter>self.parts[0]
        cdef uint64_t hashed = hash_of_id(limiter, request_id)
        cdef int i
        for i in range(self.count):
            hashed = hash_with_part(limiter, hashed, &attempts[i])
        return tag_of_mark(hashed)

    cdef Decision hit_once(self, object key, object cost, object request_id, object request_ttl):
        """Charge, then insert a mark. If another process has inserted the mark by then, give the charges back.

        A crash between the two steps leaves charges without a mark, as with one limiter.
        """
        cdef Attempt[MOST] attempts
        cdef CellLimiter limiter = self.marking()
        cdef uint64_t ttl_ns = as_period_ns(request_ttl)
        cdef uint64_t mark_tag
        cdef int i
        self.check_key(key)
        keys = key[:] if type(key) is list else [key] * self.count
        costs = [read_once(its_cost) for its_cost in (cost if type(cost) is list else [cost] * self.count)]
        self.begin_attempts(keys, costs, attempts)
        if not any(costs):
            return self.binding(attempts, self.decide_begun(attempts, True))
        mark_tag = self.mark_of(request_id, attempts)
        self.ensure_attached()
        if mark_state(limiter, mark_tag) == 0:
            if self.decide_begun(attempts, True):
                if insert_mark(limiter, mark_tag, table_now(&limiter.table) + ttl_ns, 0):
                    return self.binding(attempts, True)
                # In reverse order: several charges may be in one cell.
                for i in reversed(range(self.count)):
                    (<Limiter>self.parts[i]).roll_back(&attempts[i])
            elif mark_state(limiter, mark_tag) == 0:
                return self.binding(attempts, False)
        else:
            self.count_allowed()
        self.begin_repeated(keys, attempts)
        return self.binding(attempts, True)

    cdef void count_allowed(self) noexcept:
        cdef int i
        for i in range(self.count):
            (<Limiter>self.parts[i]).count(COUNTER_ALLOWED, 1)

    cdef int begin_repeated(self, list keys, Attempt* attempts) except -1:
        """The attempts of a request that was charged before: of cost 0, but always allowed."""
        cdef int i
        self.begin_attempts(keys, [0] * self.count, attempts)
        self.check_all(attempts, True)
        for i in range(self.count):
            attempts[i].verdict.outcome = ALLOWED
        return 0

    def hit_each(self, key, cost=1):
        """``hit``, but returns the ``Decision`` of each limiter, in order, instead of the one that binds.

        The request is allowed if all decisions allow it. Otherwise nothing was charged, even in limits that allow it.
        """
        cdef Attempt[MOST] attempts
        self.decide(key, cost, attempts, True)
        return self.decisions(attempts)

    def peek(self, key, cost=1):
        """The decision that ``hit`` would return now. Charges and counts nothing."""
        cdef Attempt[MOST] attempts
        self.begin_attempts(key, cost, attempts)
        return self.binding(attempts, self.check_all(attempts, True))

    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key. Takes keys and costs as ``hit`` does.

        Not atomic: requests of other processes may be decided in between. An invalid key or cost raises an exception,
        after everything before it was charged.
        """
        cdef Attempt[MOST] attempts
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        return [self.decide(key, cost, attempts, False) for key, cost in zip(keys, costs, strict=True)]

    cdef Reservation reserve_all(self, object key, object cost, Attempt* attempts):
        cdef list charges = []
        cdef Segment segment = (<Limiter>self.parts[0]).segment
        cdef int i
        self.check_key(key)
        keys = key[:] if type(key) is list else [key] * self.count
        costs = cost[:] if type(cost) is list else [cost] * self.count
        costs = [read_once(its_cost) for its_cost in costs]
        cdef bint allowed = self.decide(keys, costs, attempts, True)
        for i in range(self.count if allowed else 0):
            # A request that was allowed because the table was full has left no charge.
            if attempts[i].charge.amount != 0 and not attempts[i].verdict.full:
                charges.append(new_reservation(
                    <Limiter>self.parts[i], segment, keys[i], costs[i], True, True, attempts[i].verdict.now_ns, 0,
                    attempts[i].verdict.state, False))
        # In reverse order: several charges may be in one cell.
        charges.reverse()
        cdef Decision binding = self.binding(attempts, allowed)
        return new_reservation(
            self, segment, None, charges, allowed, allowed, attempts[0].verdict.now_ns,
            binding.outlook.retry_after_ns, 0, binding.flags & NO_ROOM != 0)

    def reserve(self, key, cost=1, max_delay=None):
        """Charge the request if it is allowed now: a ``Reservation`` with a delay of 0.

        Otherwise nothing is charged, and ``delay`` is the time until another attempt may succeed.
        """
        cdef Attempt[MOST] attempts
        delay_ns_of(max_delay)
        return self.reserve_all(key, cost, attempts)

    def wait(self, key, cost=1, timeout=None, *, jitter=0.0):
        """Wait until all limiters allow the request, and charge it: see ``Limiter.wait``."""
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(self, key, cost=1, timeout=None, *, jitter=0.0):
        """``wait`` for asyncio."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter))

    def limited(self, key, cost=1, timeout=None, *, jitter=0.0):
        """A decorator, and a ``with`` block: see each limiter's ``limited``.

        Raises ``InvalidLimiter`` if one of the limiters is a ``Concurrency``, whose permits would not come back.
        """
        if self.may_free_early:
            raise holding.never_back(self)
        return holding.Limited(self, key, cost, timeout, jitter)

    def exceeded(self, key, cost=1):
        """The exception for a wait in which the permits of `key` didn't come in time: it names the limit that bound."""
        decision = self.peek(key, cost)
        return LimitExceeded(decision.limiter, decision.limit, decision.retry_after)

    def refund(self, key, cost=1, *, request_id=None):
        """Give back the charges of an allowed ``hit`` with the same arguments: see each limiter's ``refund``."""
        cdef Attempt[MOST] attempts
        cdef CellLimiter marking
        # Invalid arguments raise before anything is given back.
        costs = [whole_cost(each) for each in (cost if type(cost) is list else [cost] * self.count)]
        self.begin_attempts(key, [0] * len(costs), attempts)
        if request_id is not None:
            marking = self.marking()
            try:
                self.begin_attempts(key, costs, attempts)
            except CostExceedsLimit:
                # No single request can have charged that much.
                return
            if not remove_mark(marking, self.mark_of(request_id, attempts)):
                return
        keys = key if type(key) is list else [key] * self.count
        do_each([
            (limiter.refund, its_key, its_cost)
            for limiter, its_key, its_cost in zip(self.limiters, keys, costs, strict=True)])

    cdef int cancel_reserved(self, object key, object cost, tuple tier, uint64_t charged_state) except -1:
        """`cost` is a list of the limiters' reservations."""
        return do_each([(charge.cancel,) for charge in cost])

    def reset(self, key):
        """Forget `key` in every limiter."""
        cdef Attempt[MOST] attempts
        self.begin_attempts(key, 1, attempts)
        keys = key if type(key) is list else [key] * self.count
        do_each([(limiter.reset, its_key) for limiter, its_key in zip(self.limiters, keys, strict=True)])


def reserve_each(AllOf limits, key, cost):
    """The results of ``limits.reserve`` and ``limits.hit_each`` for one request, which is charged once."""
    cdef Attempt[MOST] attempts
    cdef Reservation reservation = limits.reserve_all(key, cost, attempts)
    return reservation, limits.decisions(attempts)


def binding(decisions):
    """The decision of the limit that bound a request, by those of all its limits: as ``AllOf.hit`` returns it."""
    cdef Decision decision, bound = None
    cdef Decision together = Decision.__new__(Decision)
    cdef uint64_t remaining, least = ~<uint64_t>0
    cdef uint64_t reset_after_ns = 0
    cdef int64_t longest_ns = -1
    cdef bint allowed = True
    for decision in decisions:
        allowed = allowed and decision.allowed
    for decision in decisions:
        remaining = remaining_of(decision)
        if binds(allowed, decision.allowed, remaining, least, decision.outlook.retry_after_ns, longest_ns):
            bound = decision
            longest_ns = <int64_t>decision.outlook.retry_after_ns
        least = min(least, remaining)
        reset_after_ns = max(reset_after_ns, decision.outlook.reset_after_ns)
    together.limiter, together.allowed, together.limit = bound.limiter, bound.allowed, bound.limit
    together.flags = bound.flags
    together.outlook.available = least
    together.outlook.retry_after_ns = bound.outlook.retry_after_ns
    together.outlook.reset_after_ns = reset_after_ns
    return together


cdef int do_each(list calls) except -1:
    """Make every call even if one raises, then raise. A signal handler may raise where a limiter wakes waiters."""
    cdef object raised = None
    for call, *arguments in calls:
        try:
            call(*arguments)
        except BaseException as error:
            # An interrupt takes precedence over an error such as StoreClosed.
            if raised is None or isinstance(raised, Exception):
                raised = error
    if raised is not None:
        raise raised
    return 0
