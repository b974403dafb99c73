"""Token bucket with continuous refill, as the generic cell rate algorithm.

The state of a key is its *theoretical arrival time* (TAT): the time at which the bucket is full again. A request moves
it on by its cost at the rate and is allowed when it is then no further ahead of now than a whole burst. One number, no
refill job (ITU-T I.371, 1993, virtual scheduling).

Rounding: a request's increment is rounded up to the nanosecond, so a burst of n single requests may take up to n ns
more than one request of cost n. The tolerance is widened by that much, but by less than one permit's time: a burst of
single requests passes whole, and never can more than `burst` permits pass at one instant.
"""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint64_t

from penstock.core.decision cimport Decision
from penstock.core.keys cimport hash_ascii_text, hash_key_of, is_ascii_text
from penstock.core.limiter cimport Limiter
from penstock.core.native cimport (
    PENSTOCK_KIND_TAT, PenstockCell, PenstockHashKey, list_items, multiply_divide_up, prefetch,
)
from penstock.core.table cimport (
    ALLOWED, DENIED, LOST, UNDECIDED, Events, Outcome, Table, Verdict, find_in_line, fingerprint_of, home_line,
    prefetch_away, table_amend, table_decide, table_now, table_peek, table_remove, table_try,
    table_try_cell,
)

import operator

from penstock.errors import CostExceedsLimit, InvalidCost, InvalidKey, InvalidLimiter, shown
from penstock.rate import as_rate


# 73 years: with a segment time of as much, no state reaches TIME_BITS.
cdef object MAX_TOLERANCE_NS = 2**61 - 1

cdef enum:
    BATCH_ON_STACK = 256                 # keys of a batch that need no allocation
    KEYS_AHEAD = 16                      # how far the next keys' objects are fetched ahead of hashing
    CELLS_AHEAD = 32                     # how far the next cells are fetched ahead of deciding
    KEYS_PER_READING = 256               # a batch reads the clock once for so many keys: every 10 microseconds or so
    KEYS_WITH_GIL = 1024                 # a larger batch lets other threads run while it decides


cdef inline bint take(uint64_t tat_ns, uint64_t now_ns, const void* parameters, uint64_t* next_tat_ns) noexcept nogil:
    """The decision function: GCRA's virtual scheduling."""
    cdef const Draw* draw = <const Draw*>parameters
    cdef uint64_t start_ns = tat_ns if tat_ns > now_ns else now_ns
    next_tat_ns[0] = start_ns + draw.increment_ns
    return start_ns - now_ns <= draw.room_ns


cdef bint give_back(
    uint64_t tat_ns, uint64_t now_ns, const void* parameters, uint64_t* next_tat_ns
) noexcept nogil:
    """Undo `take`, but never beyond a full bucket."""
    cdef const Draw* draw = <const Draw*>parameters
    if tat_ns <= now_ns:
        return False
    next_tat_ns[0] = tat_ns - draw.increment_ns if tat_ns - now_ns > draw.increment_ns else now_ns
    return True


cdef inline uint64_t tag_of_hash(uint64_t key_hash) noexcept nogil:
    return fingerprint_of(key_hash) | PENSTOCK_KIND_TAT


cdef inline uint64_t tag_of(object key, PenstockHashKey hash_key) except 0:
    return tag_of_hash(hash_key_of(key, hash_key))


cdef int64_t whole_cost(object cost) except -1:
    """The cost as an integer; larger ones than an int64_t come back as the largest, which no limit allows."""
    cdef int overflow = 0
    cdef int64_t value
    if not PyLong_CheckExact(cost):
        try:
            if isinstance(cost, bool):
                raise TypeError
            cost = operator.index(cost)
        except TypeError:
            raise InvalidCost(f"a cost is a whole number of at least 0, not {shown(cost)}") from None
    value = PyLong_AsLongLongAndOverflow(cost, &overflow)
    if overflow > 0:
        return 0x7FFFFFFFFFFFFFFF
    if value < 0:
        raise InvalidCost(f"a cost is a whole number of at least 0, not {shown(cost)}")
    return value


cdef Decision allowed_decision(const Shape* shape, const Verdict* verdict):
    cdef Decision decision = Decision.__new__(Decision)
    cdef uint64_t ahead_ns = verdict.state - verdict.now_ns
    decision.allowed = True
    decision.limit = shape.burst
    decision.rate_limit = shape.rate_limit
    decision.rate_period_ns = shape.rate_period_ns
    decision.available_ns = shape.tolerance_ns - ahead_ns
    decision.retry_after_ns = 0
    decision.reset_after_ns = ahead_ns
    return decision


cdef Decision denied_decision(const Shape* shape, const Draw* draw, const Verdict* verdict):
    cdef Decision decision = Decision.__new__(Decision)
    # A denial says that the state is ahead of now; with a full table it is the time at which a cell is free.
    cdef uint64_t ahead_ns = verdict.state - verdict.now_ns
    decision.allowed = False
    decision.limit = shape.burst
    decision.rate_limit = shape.rate_limit
    decision.rate_period_ns = shape.rate_period_ns
    decision.available_ns = 0 if verdict.full or ahead_ns > shape.tolerance_ns else shape.tolerance_ns - ahead_ns
    decision.retry_after_ns = ahead_ns if verdict.full else ahead_ns - draw.room_ns
    decision.reset_after_ns = ahead_ns
    return decision


@cython.final
cdef class TokenBucket(Limiter):
    """Up to `burst` permits at once, refilled continuously at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. `name` identifies the limiter in its store.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), one CAS on one cache line in the usual case; a denied one writes nothing shared. Sixteen
    bytes per key. Guarantee: in any span of time t, at most ``burst + t * rate`` permits, rounded up, over all
    processes. Algorithm: GCRA, ITU-T Recommendation I.371.
    """

    def __cinit__(self, store, name, rate, burst=None):
        self.rate = as_rate(rate)
        self.shape_of(self.rate, burst, &self.shape)
        self.burst = self.shape.burst
        self.draw(1, &self.shape, &self.unit)
        self.enroll()

    def __init__(self, store, name, rate, burst=None):
        # For its signature. __cinit__ has done the work: it can't be skipped or run twice.
        pass

    def __repr__(self):
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}>"

    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1:
        """The limiter's own shape, or the one that a call brings along."""
        if rate is not None:
            return self.shape_of(as_rate(rate), burst, shape)
        if burst is not None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        shape[0] = self.shape
        return 0

    cdef int shape_of(self, object rate, object burst, Shape* shape) except -1:
        if burst is None:
            burst = rate.limit
        elif isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
            raise InvalidLimiter(
                f"the burst of limiter {self.name!r} is a whole number of at least 1, not {shown(burst)}")
        limit, period_ns = rate.limit, rate.period_ns
        unit_ns = -(-period_ns // limit)
        tolerance_ns = min(burst * unit_ns, burst * period_ns // limit + unit_ns - 1)
        if tolerance_ns > MAX_TOLERANCE_NS:
            raise InvalidLimiter(
                f"limiter {self.name!r} would take more than 73 years to refill a burst of {shown(burst)} at {rate}: "
                f"lower the burst or raise the rate")
        shape.rate_limit = limit
        shape.rate_period_ns = period_ns
        shape.burst = burst
        shape.tolerance_ns = tolerance_ns
        return 0

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1:
        """What a request of `cost` asks of a bucket of this shape."""
        cdef uint64_t permits = <uint64_t>whole_cost(cost)
        if permits > shape.burst:
            raise CostExceedsLimit(cost, shape.burst, self.name)
        draw.increment_ns = multiply_divide_up(permits, shape.rate_period_ns, shape.rate_limit)
        draw.room_ns = shape.tolerance_ns - draw.increment_ns
        return 0

    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED:
        """One decision and its counting."""
        cdef Events events
        cdef Outcome outcome
        self.check_bound()
        # The cell is on its way while the clock is read: that takes as long as half a cache miss.
        prefetch(home_line(&self.table, tag))
        verdict.now_ns = table_now(&self.table)
        verdict.full = False
        outcome = table_try(&self.table, tag, verdict.now_ns, take, draw, verdict)
        if outcome > ALLOWED:
            events.inserted = events.evicted = events.full = 0
            events.cas_retries = outcome == LOST
            table_decide(
                &self.table, tag, self.claim_stripe, &self.counters.claims, take, draw, verdict, &events)
            self.count_events(&events)
        self.count(&self.counters.allowed if verdict.outcome == ALLOWED else &self.counters.denied, 1)
        return verdict.outcome

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and say whether it was allowed: the fast path of `hit`.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        return self.decide(tag_of(key, self.hash_key), &self.unit, &verdict) == ALLOWED

    @cython.binding(False)
    def hit(self, key, cost=1, *, rate=None, burst=None):
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        `cost` is a whole number; 0 is allowed whenever the key has no debt beyond its burst, and charges nothing.
        With `rate` (and `burst`) this one request is judged by that limit instead of the limiter's own, on the same
        state: the tiers of one limit. A denial is a value: only what can never be allowed is an exception.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidKey``, ``StoreClosed``.
        """
        cdef Verdict verdict
        cdef Draw draw
        cdef Shape shape
        self.shape_for_call(rate, burst, &shape)
        self.draw(cost, &shape, &draw)
        if draw.increment_ns == 0:
            decision = self.peek_shape(key, &shape, &draw)
            self.count(&self.counters.allowed if decision else &self.counters.denied, 1)
            return decision
        if self.decide(tag_of(key, self.hash_key), &draw, &verdict) == ALLOWED:
            return allowed_decision(&shape, &verdict)
        return denied_decision(&shape, &draw, &verdict)

    cdef Decision peek_shape(self, object key, const Shape* shape, const Draw* draw):
        cdef Verdict verdict
        cdef uint64_t next_tat_ns
        cdef bint allowed
        cdef uint64_t tag = tag_of(key, self.hash_key)
        self.check_bound()
        verdict.full = False
        verdict.now_ns = table_now(&self.table)
        verdict.state = table_peek(&self.table, tag)
        allowed = take(verdict.state, verdict.now_ns, draw, &next_tat_ns)
        verdict.state = max(verdict.state, verdict.now_ns)
        return allowed_decision(shape, &verdict) if allowed else denied_decision(shape, draw, &verdict)

    def peek(self, key, cost=1, *, rate=None, burst=None):
        """What `hit` with the same arguments would decide now, without charging or counting anything.

        ``allowed`` and ``retry_after`` speak of that request, ``remaining`` and ``reset_after`` of the key as it is.
        Only ``hit`` finds out that a new key has no room, so here ``on_full`` doesn't come in.
        """
        cdef Draw draw
        cdef Shape shape
        self.shape_for_call(rate, burst, &shape)
        self.draw(cost, &shape, &draw)
        return self.peek_shape(key, &shape, &draw)

    def refund(self, key, cost=1, *, rate=None, burst=None):
        """Give back what an allowed ``hit`` with the same arguments charged; never more than a full bucket."""
        cdef Draw draw
        cdef Shape shape
        cdef Events events
        cdef uint64_t tag = tag_of(key, self.hash_key)
        self.shape_for_call(rate, burst, &shape)
        self.draw(cost, &shape, &draw)
        self.check_bound()
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        table_amend(&self.table, tag, table_now(&self.table), give_back, &draw, &events)
        self.count_events(&events)

    def reset(self, key):
        """Forget `key`: its next request meets a full bucket."""
        cdef Events events
        cdef uint64_t tag = tag_of(key, self.hash_key)
        self.check_bound()
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        table_remove(&self.table, tag, &events)
        self.count_events(&events)

    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged. Not atomic: other processes' requests may come
        between. Faster than a loop of ``allow``, because cells are fetched ahead; large batches release the GIL.
        """
        if isinstance(keys, (str, bytes)):
            raise InvalidKey(f"allow_many takes a list of keys, not the one key {shown(keys)}")
        cdef list key_list = keys if type(keys) is list else list(keys)
        cdef uint64_t[BATCH_ON_STACK] tags_on_stack
        cdef uint8_t[BATCH_ON_STACK] results_on_stack
        cdef bint with_gil = PyList_GET_SIZE(key_list) <= KEYS_WITH_GIL
        cdef Batch batch
        cdef Events events
        cdef uint64_t allowed
        cdef uint64_t generation
        batch.size = PyList_GET_SIZE(key_list)
        batch.keys = NULL
        batch.tags = tags_on_stack
        batch.draws = NULL
        batch.results = results_on_stack
        if isinstance(costs, int):
            raise InvalidCost(f"costs is a list with one cost for each key, not {shown(costs)}")
        if costs is not None:
            costs = list(costs)
            if len(costs) != batch.size:
                raise InvalidCost(f"{batch.size} keys need {batch.size} costs, not {len(costs)}")
        try:
            if batch.size > BATCH_ON_STACK:
                batch.tags = <uint64_t*>PyMem_Malloc(batch.size * sizeof(uint64_t))
                batch.results = <uint8_t*>PyMem_Malloc(batch.size)
            if costs:
                batch.draws = <Draw*>PyMem_Malloc(batch.size * sizeof(Draw))
            if batch.tags == NULL or batch.results == NULL or (costs and batch.draws == NULL):
                raise MemoryError
            if batch.draws != NULL:
                for i, cost in enumerate(costs):
                    self.draw(cost, &self.shape, &batch.draws[i])
            # check_bound may run Python code, which may change the list: none may run between looking at keys that
            # are to be hashed later, and that.
            self.check_bound()
            if with_gil and all_ascii_text(key_list, batch.size):
                batch.keys = list_items(key_list)
            else:
                self.hash_batch(key_list, &batch)
                self.check_bound()
            generation = self.bound_generation
            batch.claim_stripe = self.claim_stripe
            batch.claim_sequence = &self.counters.claims
            if with_gil:
                allowed = self.decide_batch(&batch, &events)
            else:
                with nogil:
                    allowed = self.decide_batch(&batch, &events)
            if generation != self.generation[0]:
                # Another thread closed a store meanwhile. If it was this one, its line may be another process's now.
                self.bind_shared()
            self.count(&self.counters.allowed, allowed)
            self.count(&self.counters.denied, batch.size - allowed)
            self.count_events(&events)
            return list_of_bools(batch.results, batch.size)
        finally:
            if batch.tags != tags_on_stack:
                PyMem_Free(batch.tags)
            if batch.results != results_on_stack:
                PyMem_Free(batch.results)
            PyMem_Free(batch.draws)

    cdef int hash_batch(self, list keys, const Batch* batch) except -1:
        """The tag of every key."""
        cdef Py_ssize_t i
        for i in range(batch.size):
            # Reading the costs may have run Python code, and hashing an odd key may: it may have shortened the list.
            if i + KEYS_AHEAD < PyList_GET_SIZE(keys):
                prefetch(<const char*>PyList_GET_ITEM(keys, i + KEYS_AHEAD))
                prefetch(<const char*>PyList_GET_ITEM(keys, i + KEYS_AHEAD) + 63)
            elif i >= PyList_GET_SIZE(keys):
                raise RuntimeError("the list of keys was shortened while it was read")
            # Without taking a reference, which would write to every key's memory: no Python code runs in between.
            if is_ascii_text(PyList_GET_ITEM(keys, i)):
                batch.tags[i] = tag_of_hash(hash_ascii_text(PyList_GET_ITEM(keys, i), self.hash_key))
            else:
                batch.tags[i] = tag_of(<object>PyList_GET_ITEM(keys, i), self.hash_key)
        return 0

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        """Decide the batch without counting; how many were allowed.

        Three stages: hash a key and fetch its home line; half way to the decision, find its cell there, or fetch the
        other lines of its probe set; decide.
        """
        cdef Table table = self.table
        cdef PenstockHashKey hash_key = self.hash_key
        cdef PenstockCell* cells[CELLS_AHEAD]        # of the keys between the second stage and the third, in a ring
        cdef uint64_t* tags = batch.tags
        cdef const Draw* draw = &self.unit
        cdef uint64_t now_ns = 0
        cdef uint64_t allowed = 0
        cdef Verdict verdict
        cdef PenstockCell* cell
        cdef Outcome outcome
        cdef Py_ssize_t i
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        for i in range(min(batch.size, CELLS_AHEAD)):
            fetch_home(&table, batch, i, hash_key)
        for i in range(min(batch.size, CELLS_AHEAD // 2)):
            cells[i] = find_home_or_fetch(&table, tags[i])
        for i in range(batch.size):
            if i + CELLS_AHEAD < batch.size:
                fetch_home(&table, batch, i + CELLS_AHEAD, hash_key)
            if i + CELLS_AHEAD // 2 < batch.size:
                cells[(i + CELLS_AHEAD // 2) % CELLS_AHEAD] = find_home_or_fetch(&table, tags[i + CELLS_AHEAD // 2])
            if i % KEYS_PER_READING == 0:
                now_ns = table_now(&table)
            if batch.draws != NULL:
                draw = &batch.draws[i]
            if draw.increment_ns == 0:
                outcome = ALLOWED if take(table_peek(&table, tags[i]), now_ns, draw, &verdict.state) else DENIED
            else:
                cell = cells[i % CELLS_AHEAD]
                outcome = UNDECIDED
                if cell != NULL:
                    outcome = table_try_cell(cell, tags[i], now_ns, take, draw, &verdict)
                if outcome > ALLOWED:
                    events.cas_retries += outcome == LOST
                    verdict.now_ns = now_ns
                    table_decide(
                        &table, tags[i], batch.claim_stripe, batch.claim_sequence, take, draw, &verdict, events)
                    # An insertion has read the clock again; the key's next request must not be judged by an older one.
                    now_ns = max(now_ns, verdict.now_ns)
                    outcome = verdict.outcome
            batch.results[i] = outcome == ALLOWED
            allowed += outcome == ALLOWED
        return allowed


cdef bint all_ascii_text(list keys, Py_ssize_t size) noexcept:
    """Whether `decide_batch` may hash these keys itself, while it waits for CASes: that runs no Python code."""
    cdef PyObject** items = list_items(keys)
    cdef Py_ssize_t i
    if PyList_GET_SIZE(keys) < size:
        return False
    for i in range(size):
        if not is_ascii_text(items[i]):
            return False
    return True


cdef inline void fetch_home(
    const Table* table, const Batch* batch, Py_ssize_t i, PenstockHashKey hash_key
) noexcept nogil:
    """Hash key i, if that was left to do, and start fetching its home line."""
    if batch.keys != NULL:
        batch.tags[i] = tag_of_hash(hash_ascii_text(batch.keys[i], hash_key))
    prefetch(home_line(table, batch.tags[i]))


cdef inline PenstockCell* find_home_or_fetch(const Table* table, uint64_t tag) noexcept nogil:
    """The key's cell in its home line; or NULL, with the other lines of its probe set on their way."""
    cdef PenstockCell* cell = find_in_line(home_line(table, tag), tag)
    if cell == NULL:
        prefetch_away(table, tag)
    return cell


cdef list list_of_bools(const uint8_t* values, Py_ssize_t n):
    cdef list result = PyList_New(n)
    cdef Py_ssize_t i
    for i in range(n):
        value = True if values[i] else False
        Py_INCREF(value)
        PyList_SET_ITEM(result, i, value)
    return result
