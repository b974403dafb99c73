"""The methods of limiters whose decision is one CAS: every way to request a permit.

An algorithm provides a decision function (a pure function of state, time and request, see `Decide`), a function that
undoes it, and the conversion of a state to a `Decision`. Everything else is here.
"""

cimport cython
from cpython.list cimport PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_time
from forebay.core.attempt cimport charge_to_return, check_attempt, commit_attempt, try_attempt
from forebay.core.batch cimport Batch, all_ascii_text, decide_batch_by, hash_batch, own_results
from forebay.core.decision cimport NO_ROOM, Decision, Outlook, no_outlook, remaining_of
from forebay.core.limiter cimport Attempt, Charge, Limiter, LimitParams, copy_of
from forebay.core.reservation cimport Reservation, delay_ns_of, new_reservation
from forebay.core.table.keys cimport MARK, hash_key_of, hash_pair
from forebay.core.table.native cimport (
    COUNTER_ALLOWED, COUNTER_CAS_RETRIES, COUNTER_DENIED, FREE_THREADED, ForebayCell, ForebayLine,
    count_in, hide_from_collector, list_items, load_relaxed, prefetch,
)
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, UNDECIDED, USED_BITS, Events, Next, Outcome, Table, Verdict, home_line, no_events,
    table_amend, table_decide, table_find, table_now, table_peek, table_remove,
)

from forebay import holding, waiting
from forebay.awaited import Awaited
from forebay.core.arguments import DEFAULT_REQUEST_TTL, cost_of, costs_of, keys_of, ttl_without_id
from forebay.errors import CostExceedsLimit, InvalidKey, InvalidLimiter, LimitExceeded, StoreFull, short_repr
from forebay.rate import as_period_ns


# Python's one object for the integer 1: most costs are this object.
cdef object ONE = 1


cdef enum:
    KEYS_WITH_GIL = 1024             # a larger batch lets other threads run while it decides


cdef int64_t whole_cost(object cost) except -1:
    cdef int overflow = 0
    cdef int64_t value
    if not PyLong_CheckExact(cost):
        cost = cost_of(cost)
    value = PyLong_AsLongLongAndOverflow(cost, &overflow)
    if overflow > 0:
        return 0x7FFFFFFFFFFFFFFF
    if value < 0:
        cost_of(cost)  # which raises
    return value


cdef object read_once(object cost):
    """Convert a cost to an int once. An object's own code may return another value later; a cancel must return the
    cost that was charged."""
    return cost if type(cost) is int else whole_cost(cost)


# The mark of a request that was charged. Its state is the time until which the request is remembered, in quarters of a
# ns and rounded up to 2 ns: a state of KIND_USED that has used nothing. So a mark is evicted before any key, whichever
# expires first, and marks never reset a key.
cdef struct Marking:
    uint64_t until_ns
    uint64_t before              # the state that the mark may have: 0 for none


cdef inline bint is_remembered(uint64_t state, uint64_t now_ns) noexcept nogil:
    return state >> FRACTION_BITS > now_ns


cdef bint mark(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Marking* marking = <const Marking*>parameters
    next.state = count_time(marking.until_ns, USED_BITS)
    return state == marking.before or not is_remembered(state, now_ns)


cdef bint unmark(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = 0
    return is_remembered(state, now_ns)


cdef uint64_t hash_of_id(Limiter limiter, object request_id) except? 0:
    try:
        return hash_key_of(request_id, limiter.hash_key)
    except InvalidKey:
        raise InvalidKey(
            f"a request_id is str, bytes, int or a tuple of them, not {short_repr(request_id)}") from None


cdef uint64_t hash_with_part(Limiter limiter, uint64_t hashed, const Attempt* attempt) noexcept:
    hashed = hash_pair(hashed, attempt.tag, limiter.hash_key, MARK)
    return hash_pair(hashed, attempt.charge.amount, limiter.hash_key, MARK)


cdef uint64_t mark_tag_of(Limiter limiter, object key, object request_id, uint64_t amount) except 0:
    cdef uint64_t id_hash = hash_pair(hash_of_id(limiter, request_id), amount, limiter.hash_key, MARK)
    return tag_of_mark(hash_pair(hash_key_of(key, limiter.hash_key), id_hash, limiter.hash_key, MARK))


cdef uint64_t mark_state(Limiter limiter, uint64_t mark_tag) noexcept:
    cdef uint64_t state
    table_find(&limiter.segment.table, mark_tag, &state)
    return state if is_remembered(state, table_now(&limiter.segment.table)) else 0


cdef bint insert_mark(Limiter limiter, uint64_t mark_tag, uint64_t until_ns, uint64_t before) except -1:
    cdef Marking marking
    cdef Verdict marked
    cdef Events events = no_events()
    cdef ForebayLine* line = limiter.line_here()
    marking.until_ns = until_ns
    marking.before = before
    marked.now_ns = table_now(&limiter.segment.table)
    table_decide(
        &limiter.segment.table, mark_tag, line.number, &line.counters.claims, mark, &marking, &marked, &events)
    limiter.count_events(&events)
    return marked.outcome == ALLOWED or marked.full


cdef bint remove_mark(Limiter limiter, uint64_t mark_tag) except -1:
    cdef Events events = no_events()
    cdef bint remembered
    limiter.ensure_attached()
    remembered = table_amend(&limiter.segment.table, mark_tag, unmark, NULL, &events)
    limiter.count_events(&events)
    return remembered


cdef void count_charge(uint64_t permits, const LimitParams* params, Charge* charge) noexcept nogil:
    charge.amount = permits
    charge.room = params.limit - permits
    charge.max_wait_ns = 0
    charge.charged_state = 0
    charge.params = params


@cython.boundscheck(True)  # only then each item is read with its reference at once
cdef list copied(list items):
    cdef Py_ssize_t i, size = PyList_GET_SIZE(items)
    cdef list copy = PyList_New(size)
    try:
        for i in range(size):
            item = items[i]
            Py_INCREF(item)
            PyList_SET_ITEM(copy, i, item)
    except IndexError:
        raise RuntimeError("a list was shortened while it was read") from None
    return copy


cdef class CellLimiter(Limiter):
    """Base class of the limiters that decide by one CAS; not used by itself."""

    def __cinit__(self, *args, **kwargs):
        self.set_charge = count_charge

    cdef int charge_for(self, object cost, const LimitParams* params, Charge* charge) except -1:
        """Fill in the charge of a request of `cost` under a limit with these params."""
        cdef uint64_t permits = <uint64_t>whole_cost(cost)
        if permits > params.limit:
            raise CostExceedsLimit(cost, params.limit, self.name)
        self.set_charge(permits, params, charge)
        return 0

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        """Fill in the limiter's own params, or those of a call with a rate."""
        if rate is not None or burst is not None:
            raise InvalidLimiter(f"{self!r} has one limit for all calls: make a second limiter for another one")
        params[0] = copy_of(&self.params)
        return 0

    cdef int charge_by(self, object cost, tuple tier, LimitParams* params, Charge* charge) except -1:
        """Fill in the charge of a request by the limiter's own limit, or by a tier: a rate and a burst. A tier's limit
        is put in `params`."""
        if tier is None:
            return self.charge_for(cost, &self.params, charge)
        self.params_for_call(tier[0], tier[1], params)
        return self.charge_for(cost, params, charge)

    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil:
        """Let the request book ahead by up to `max_wait_ns`, if this limiter can."""

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        """The time from now until a booked request may proceed."""
        return 0

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        """The time from now until a refused request could have proceeded."""
        cdef Outlook outlook = no_outlook()
        set_outlook(charge, verdict, False, self.describe, &outlook)
        return outlook.retry_after_ns

    cdef Decision new_decision(self, const Charge* charge, const Verdict* verdict, bint allowed):
        cdef Decision decision = Decision.__new__(Decision)
        decision.allowed = allowed
        decision.limit = charge.params.limit
        decision.limiter = self.name
        if verdict.full:
            decision.flags = NO_ROOM
        set_outlook(charge, verdict, allowed, self.describe, &decision.outlook)
        return decision

    cdef Outcome decide(self, uint64_t tag, const Charge* charge, Verdict* verdict) except UNDECIDED:
        """Decide one request and count it."""
        return decide_by(self, tag, charge, verdict, self.take, self.after_charge)

    cdef bint peek_verdict(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1:
        """Whether the request would be allowed now. Puts the current state in `verdict`."""
        # A process that may only read the segment has no counter line, so it can't attach.
        if self.segment.is_writable:
            self.ensure_attached()
        else:
            self.store.attachment.check_open()
        verdict.full = False
        verdict.tag = tag
        verdict.now_ns = table_now(&self.table)
        return table_peek(&self.table, tag, verdict.now_ns, self.take, charge, verdict)

    cdef Decision decide_once(self, object key, const Charge* charge):
        cdef Verdict verdict
        cdef bint allowed = self.decide_or_peek(self.tag_of(key), charge, &verdict)
        return self.new_decision(charge, &verdict, allowed)

    cdef bint decide_or_peek(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1:
        """Decide a request. One of cost 0 changes no state, but is counted."""
        cdef bint allowed
        if charge.amount != 0:
            return self.decide(tag, charge, verdict) == ALLOWED
        self.ensure_attached()
        allowed = self.peek_verdict(tag, charge, verdict)
        self.count_decision(allowed, tag)
        return allowed

    @cython.binding(False)
    def hit(self, key, cost=1, *, rate=None, burst=None, request_id=None, request_ttl=None):
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        `cost` is a whole number; with 0 the call checks whether the key is within its limit, and charges nothing. A
        denial is a value. Only a request that can never be allowed raises an exception.

        With `rate` this one request is judged by that limit instead of the limiter's own, on the same state: the tiers
        of one limit. A token bucket takes any rate, and optionally a `burst`; a fixed or sliding window takes rates of
        its own period; a leaky bucket and a minimum interval take any rate; other limiters have one limit.

        With a `request_id` (str, bytes, int or a tuple of them), a request that is repeated with the same id within
        `request_ttl` (5 minutes by default) is allowed again without a second charge, in any worker. An id takes a cell
        of the store for that time. If a process is killed after it charged and before it remembered the id, the
        repeated request is charged again. A kill never leaves an id remembered without its charge. A request that is
        repeated while it is being charged is also charged again, if others already stand behind its place in a leaky
        bucket.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidLimiter``, ``InvalidKey``,
        ``StoreClosed``.
        """
        cdef LimitParams params
        cdef Charge charge
        if rate is None and burst is None:
            if cost is ONE:
                charge = self.unit
            else:
                self.charge_for(cost, &self.params, &charge)
        else:
            self.params_for_call(rate, burst, &params)
            self.charge_for(cost, &params, &charge)
        if request_id is not None:
            if charge.amount != 0:
                return self.hit_once(
                    key, &charge, request_id, DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
        elif request_ttl is not None:
            raise ttl_without_id(request_ttl)
        return self.decide_once(key, &charge)

    def take_up_to(self, key, most, *, rate=None, burst=None):
        """Charge as many permits of `key` as there are, at most `most`, and return how many: 0 is a denial.

        One decision, by one CAS. `most` may be above the limit; no more than the limit is charged at once. `rate` and
        `burst` are those of ``hit``. With ``on_full="allow"``, a new key without a cell gets all that a fresh key has.
        Raises what ``hit`` raises, except ``CostExceedsLimit``.
        """
        cdef Attempt attempt
        cdef LimitParams params
        cdef uint64_t wanted, count, state, now_ns
        cdef bint allowed
        self.params_for_call(rate, burst, &params)
        wanted = min(<uint64_t>whole_cost(most), params.limit)
        self.attempt_for(key, 0, &attempt)
        attempt.charge = &attempt.own_charge
        while wanted != 0:
            self.charge_for(0, &params, &attempt.own_charge)
            self.ensure_attached()
            now_ns = table_now(&self.table)
            self.check(&attempt, now_ns)
            state = attempt.verdict.state
            count = min(wanted, remaining_of(self.decision_of(&attempt, True)))
            if count == 0:
                break
            self.set_charge(count, &params, &attempt.own_charge)
            # Python code may have run since. From here on to the count of the decision, none does.
            self.ensure_attached()
            if not self.check(&attempt, now_ns) or attempt.verdict.state != state:
                continue
            # Linearizes here: the CAS is from the state in which `count` permits were there.
            allowed = self.try_commit(&attempt)
            if not allowed and attempt.verdict.cell == NULL:
                # A fresh key has as many as are wanted, so another request's charge can only deny them.
                allowed = self.commit(&attempt)
                if attempt.verdict.full and not allowed:
                    break
            if allowed:
                self.count_decision(True, attempt.tag)
                return count
        if wanted != 0:
            self.count_decision(False, attempt.tag)
        return 0

    cdef Decision hit_once(self, object key, const Charge* charge, object request_id, object request_ttl):
        """Charge, then insert a mark. If another process has inserted the mark by then, give the charge back.

        A crash between the two steps leaves a charge without a mark, so the retried request is charged twice. That is
        the safe side.
        """
        cdef Verdict verdict
        cdef Charge own_charge = charge[0]
        cdef bint allowed
        cdef uint64_t tag = self.tag_of(key)
        cdef uint64_t mark_tag = mark_tag_of(self, key, request_id, charge.amount)
        cdef uint64_t ttl_ns = as_period_ns(request_ttl)
        cdef ForebayLine* line = self.ensure_attached()
        if mark_state(self, mark_tag) == 0:
            allowed = self.decide(tag, charge, &verdict) == ALLOWED
            if allowed:
                if insert_mark(self, mark_tag, table_now(&self.table) + ttl_ns, 0):
                    return self.new_decision(charge, &verdict, True)
                own_charge.charged_state = verdict.state
                if not verdict.full:
                    self.return_charge(tag, &own_charge)
            elif mark_state(self, mark_tag) == 0:
                return self.new_decision(charge, &verdict, False)
        else:
            count_in(line, COUNTER_ALLOWED, 1)
        # Charged before: return the decision of a request of cost 0, but always allowed.
        own_charge.amount = 0
        own_charge.room = charge.room + charge.amount
        self.peek_verdict(tag, &own_charge, &verdict)
        return self.new_decision(&own_charge, &verdict, True)

    def peek(self, key, cost=1, *, rate=None, burst=None):
        """The decision that `hit` with the same arguments would return now. Charges and counts nothing.

        ``allowed`` and ``retry_after`` describe the request, ``remaining`` and ``reset_after`` the key's current state.
        Only ``hit`` finds that a new key has no room, so ``on_full`` doesn't apply here.
        """
        cdef Charge charge
        cdef LimitParams params
        cdef Verdict verdict
        cdef bint allowed
        self.params_for_call(rate, burst, &params)
        self.charge_for(cost, &params, &charge)
        allowed = self.peek_verdict(self.tag_of(key), &charge, &verdict)
        return self.new_decision(&charge, &verdict, allowed)

    def reserve(self, key, cost=1, max_delay=None, *, rate=None, burst=None):
        """Book `cost` permits of `key`: a ``Reservation``, with the ``delay`` in seconds until they may be used.

        A token bucket, a leaky bucket and a minimum interval book ahead, by at most `max_delay`: text like
        ``"500 ms"``, seconds or a ``timedelta``. Every other limiter charges only a request that is allowed now, with a
        delay of 0. If nothing is booked, ``delay`` is the time until another attempt may succeed. `rate` and `burst`
        are those of ``hit``.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid `max_delay`.
        """
        cdef Charge charge
        cdef LimitParams params
        cdef Verdict verdict
        cdef Reservation reservation
        cdef bint allowed
        cdef uint64_t delay_ns
        cdef uint64_t tag = self.tag_of(key)
        cdef tuple tier = None if rate is None and burst is None else (rate, burst)
        cost = read_once(cost)
        self.charge_by(cost, tier, &params, &charge)
        self.allow_wait(&charge, delay_ns_of(max_delay))
        allowed = self.decide_or_peek(tag, &charge, &verdict)
        if allowed:
            delay_ns = self.booked_delay_ns(&charge, &verdict)
        else:
            delay_ns = verdict.state - verdict.now_ns if verdict.full else self.refused_delay_ns(&charge, &verdict)
        # A request that was allowed because the table was full was not charged, so there is nothing to cancel.
        reservation = new_reservation(
            self, self.segment, key, cost, allowed, allowed and not verdict.full, verdict.now_ns, delay_ns,
            verdict.state, verdict.full)
        reservation.tier = tier
        return reservation

    def wait(self, key, cost=1, timeout=None, *, jitter=0.0, rate=None, burst=None):
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Sleeps, and never polls another process. Waiters in one process get their permits in the order of their calls,
        those with one `rate` and `burst` among themselves, which are those of ``hit``. A wait charges nothing if it
        ends early (``KeyboardInterrupt``, any exception) or would take too long. With `jitter` 0.1 each sleep is longer
        by a random share of up to a tenth, within the timeout. With a ``ManualClock`` the thread doesn't sleep: the
        wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
        return waiting.wait(self, key, cost, timeout, jitter, rate, burst)

    def wait_async(self, key, cost=1, timeout=None, *, jitter=0.0, rate=None, burst=None):
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter, rate, burst))

    def limited(self, key, cost=1, timeout=None, *, jitter=0.0):
        """A decorator: each call of the function, or each run of the coroutine, first waits for `cost` permits.

        Also a ``with`` or ``async with`` block, which waits at its beginning. Both raise ``LimitExceeded`` if the
        permits don't come within `timeout`. The permits are spent, however the call or the block ends.

        `key` is a key, or for a decorator a callable that makes a key from the call's arguments. `cost`, `timeout` and
        `jitter` are those of ``wait``.
        """
        return holding.Limited(self, key, cost, timeout, jitter)

    def exceeded(self, key, cost=1):
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
        decision = self.peek(key, cost)
        return LimitExceeded(self.name, decision.limit, decision.retry_after)

    cdef int return_charge(self, uint64_t tag, const Charge* charge) except -1:
        cdef Events events
        self.ensure_attached_to_return()
        events = no_events()
        table_amend(&self.table, tag, self.give_back, charge, &events)
        self.count_events(&events)
        return 0

    cdef int cancel_reserved(self, object key, object cost, tuple tier, uint64_t charged_state) except -1:
        cdef Charge charge
        cdef LimitParams params
        self.charge_by(cost, tier, &params, &charge)
        charge.charged_state = charged_state
        return self.return_charge(self.tag_of(key), &charge)

    def refund(self, key, cost=1, *, rate=None, burst=None, request_id=None):
        """Give back the charge of an allowed ``hit`` with the same arguments; never more than a fresh key has.

        Several requests may have charged a cost above the limit together: such a refund gives back as much as the
        limit. With the `request_id` of a ``hit``, gives back once, and only while the id is remembered.
        """
        cdef Charge charge
        cdef LimitParams params
        cdef uint64_t mark_tag, marked_state
        cdef uint64_t tag = self.tag_of(key)
        cdef uint64_t permits = whole_cost(cost)
        self.params_for_call(rate, burst, &params)
        self.set_charge(min(permits, params.limit), &params, &charge)
        if request_id is None:
            self.return_charge(tag, &charge)
            return
        if permits > params.limit:
            # No single request can have charged that much.
            return
        mark_tag = mark_tag_of(self, key, request_id, charge.amount)
        self.ensure_attached()
        marked_state = mark_state(self, mark_tag)
        if not remove_mark(self, mark_tag):
            return
        try:
            self.return_charge(tag, &charge)
        except StoreFull:
            # A later refund may find room.
            insert_mark(self, mark_tag, marked_state >> FRACTION_BITS, 0)
            raise

    def reset(self, key):
        """Forget `key`: its next request finds a fresh key.

        O(1); in a sliding log O(limit), in a bucketed window O(buckets).
        """
        cdef Events events
        cdef uint64_t tag = self.tag_of(key)
        self.ensure_attached()
        events = no_events()
        self.forget(tag, &events)
        self.count_events(&events)

    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil:
        table_remove(&self.table, tag, events)

    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1:
        attempt.tag = self.tag_of(key)
        if cost is ONE:
            attempt.charge = &self.unit
        else:
            self.charge_for(cost, &self.params, &attempt.own_charge)
            attempt.charge = &attempt.own_charge
        prefetch(home_line(&self.table, attempt.tag))
        return 0

    cdef int check(self, Attempt* attempt, uint64_t now_ns) except -1:
        return check_attempt(&self.table, attempt, now_ns, self.take)

    cdef int try_commit(self, Attempt* attempt) except -1:
        cdef Outcome outcome = try_attempt(&self.table, attempt, self.after_charge)
        if outcome == CAS_FAILED:
            self.count(COUNTER_CAS_RETRIES, 1)
        return outcome == ALLOWED

    cdef int commit(self, Attempt* attempt) except -1:
        cdef Events events = no_events()
        cdef ForebayLine* line = self.line_here()
        cdef bint allowed = commit_attempt(
            &self.table, line.number, &line.counters.claims, attempt, self.take, self.after_charge, &events)
        self.count_events(&events)
        return allowed

    cdef int roll_back(self, Attempt* attempt) except -1:
        cdef Charge charge
        if charge_to_return(attempt, &charge):
            self.return_charge(attempt.tag, &charge)
        return 0

    cdef Decision decision_of(self, const Attempt* attempt, bint allowed):
        return self.new_decision(attempt.charge, &attempt.verdict, allowed)

    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged. Not atomic: requests of other processes may be decided
        in between. Faster than a loop of ``allow``, because it prefetches cells. Large batches release the GIL.
        """
        cdef list key_list = keys_of(keys) if type(keys) is not list else copied(keys) if FREE_THREADED else keys
        cdef bint with_gil = PyList_GET_SIZE(key_list) <= KEYS_WITH_GIL
        cdef Batch batch
        cdef Table own
        cdef Events events
        cdef uint64_t allowed
        cdef uint64_t generation
        cdef ForebayLine* line
        cdef list results
        cdef bint decided = False
        batch.size = PyList_GET_SIZE(key_list)
        batch.keys = NULL
        batch.charges = NULL
        batch.unit = &self.unit
        # A view of its own: another thread may follow a resize meanwhile.
        own = self.table
        batch.table = &own
        batch.hash_key = self.hash_key
        batch.kind = self.kind
        if costs is not None:
            costs = costs_of(costs, batch.size)
        # Until a key is decided, its place in the list of results holds its tag. A second array would cost a large
        # batch a page fault for every new page. Only this call can reach the list until it returns.
        results = PyList_New(batch.size)
        hide_from_collector(results)
        batch.tags = <uint64_t*>list_items(results)
        try:
            if costs:
                batch.charges = <Charge*>PyMem_Malloc(batch.size * sizeof(Charge))
                if batch.charges == NULL:
                    raise MemoryError
            if batch.charges != NULL:
                for i, cost in enumerate(costs):
                    self.charge_for(cost, &self.params, &batch.charges[i])
            # ensure_attached may run Python code, which may change the list. No Python code may run between the check
            # of keys that are hashed later and their hashing.
            line = self.ensure_attached()
            if with_gil and all_ascii_text(key_list, batch.size):
                batch.keys = list_items(key_list)
            else:
                hash_batch(key_list, &batch)
                line = self.ensure_attached()
            generation = load_relaxed(line.generation)
            batch.counter_line = line.number
            batch.claim_sequence = &line.counters.claims
            batch.yes = <PyObject*><object>True
            batch.no = <PyObject*><object>False
            if with_gil:
                allowed = self.decide_batch(&batch, &events)
            else:
                with nogil:
                    allowed = self.decide_batch(&batch, &events)
            own_results(results, allowed)
            decided = True
            if generation != load_relaxed(line.generation):
                # Another thread closed a store during the batch. If that was this limiter's store, another process may
                # own the line now.
                self.attach_shared_line(line)
            count_in(line, COUNTER_ALLOWED, allowed)
            count_in(line, COUNTER_DENIED, batch.size - allowed)
            self.count_events(&events)
            if not line.is_plain:
                self.note_batch(line, key_list, results)
            return results
        finally:
            if not decided and batch.size != 0:
                # Tags are no objects: the list must not release them as references.
                memset(batch.tags, 0, batch.size * sizeof(uint64_t))
            PyMem_Free(batch.charges)

    cdef void note_batch(self, ForebayLine* line, list keys, list results) noexcept:
        """Note the keys of a batch. They are hashed once more, as the results have taken the place of their tags."""
        if self.segment.hot_keys.denied == NULL:
            return
        for key, allowed in zip(keys, results):
            try:
                self.note_decision(line, allowed, self.tag_of(key))
            except InvalidKey:
                # Another thread has changed the list since.
                return

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        return decide_batch_by(batch, events, self.take, self.after_charge)
