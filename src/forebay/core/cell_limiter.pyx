"""What the limiters whose decision is one CAS have in common: every way to ask for a permit.

An algorithm brings a decision function (a pure function of state, time and request, see `Decide`), one that undoes it,
and the arithmetic that turns a state into a `Decision`. Everything else is here.
"""

cimport cython
from cpython.list cimport PyList_GET_SIZE, PyList_New
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from forebay.core.batch cimport Batch, all_ascii_text, decide_batch_by, hash_batch, own_results
from forebay.core.decision cimport NO_ROOM, Decision
from forebay.core.limiter cimport Ask, Draw, Limiter, Shape
from forebay.core.reservation cimport delay_ns_of, new_reservation
from forebay.core.table.keys cimport MARK, hash_key_of, hash_pair
from forebay.core.table.native cimport (
    FOREBAY_KIND_TAT, ForebayCell, cas128_acq_rel, hide_from_collector, list_items, load128_acquire, prefetch,
)
from forebay.core.table.table cimport (
    ALLOWED, DENIED, TIME_BITS, UNDECIDED, Events, Next, Outcome, Verdict, find_in_line, fingerprint_of,
    home_line, table_amend, table_decide, table_find, table_now, table_peek, table_remove,
)

import operator

from forebay.errors import CostExceedsLimit, InvalidCost, InvalidKey, InvalidLimiter, shown
from forebay.rate import as_period_ns


# The integer as Python has it, once: most costs are this very object.
cdef object ONE = 1


cdef enum:
    KEYS_WITH_GIL = 1024             # a larger batch lets other threads run while it decides


cdef int64_t whole_cost(object cost) except -1:
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


cdef object read_once(object cost):
    """A cost that may have code of its own, as what it says now: so what is given back is what was charged."""
    return cost if type(cost) is int else whole_cost(cost)


# Marks of requests that have been charged: a state is the time until which one is remembered.
cdef struct Marking:
    uint64_t ttl_ns


cdef bint mark(
    ForebayCell* cell, uint64_t tag, uint64_t until_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = now_ns + (<const Marking*>parameters).ttl_ns
    return until_ns <= now_ns or until_ns >> TIME_BITS != 0


cdef bint unmark(
    ForebayCell* cell, uint64_t tag, uint64_t until_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = 0
    return until_ns > now_ns


cdef class CellLimiter(Limiter):
    """Base class of the limiters that decide by one CAS; not used by itself."""

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1:
        """What a request of `cost` asks of a limit of this shape."""
        draw.amount = <uint64_t>whole_cost(cost)
        if draw.amount > shape.limit:
            raise CostExceedsLimit(cost, shape.limit, self.name)
        draw.room = shape.limit - draw.amount
        draw.patience_ns = 0
        draw.charged_state = 0
        draw.shape = shape
        return 0

    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1:
        """The limiter's own shape, or the one that a call brings along."""
        if rate is not None or burst is not None:
            raise InvalidLimiter(f"{self!r} has one limit for all calls: make a second limiter for another one")
        shape[0] = self.shape
        return 0

    cdef int be_patient(self, Draw* draw, uint64_t patience_ns) except -1:
        """Let the request book ahead by so much, if this limiter can."""
        return 0

    cdef uint64_t booked_delay_ns(self, const Draw* draw, const Verdict* verdict) noexcept:
        """How long after now a booked request may go."""
        return 0

    cdef uint64_t refused_delay_ns(self, const Draw* draw, const Verdict* verdict) except? 0:
        """How long after now a request might have gone that wasn't booked."""
        return self.new_decision(draw, verdict, False).retry_after_ns

    cdef int describe(self, const Draw* draw, const Verdict* verdict, Decision decision) except -1:
        """Fill in everything of a decision but `allowed` and `limit`."""
        return 0

    cdef Decision new_decision(self, const Draw* draw, const Verdict* verdict, bint allowed):
        cdef Decision decision = Decision.__new__(Decision)
        decision.allowed = allowed
        decision.limit = draw.shape.limit
        decision.limiter = self.name
        if verdict.full:
            decision.flags = NO_ROOM
        if verdict.full and not allowed:
            # Nothing is known of the key; the state is the time at which a cell of its neighbourhood is free.
            decision.retry_after_ns = decision.reset_after_ns = verdict.state - verdict.now_ns
        else:
            self.describe(draw, verdict, decision)
        return decision

    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED:
        """One decision and its counting."""
        return decide_by(self, tag, draw, verdict, self.take, self.record)

    cdef bint peek_verdict(self, uint64_t tag, const Draw* draw, Verdict* verdict) except -1:
        """Whether the request would be allowed now; `verdict` is left with the state as it is."""
        self.check_bound()
        verdict.full = False
        verdict.tag = tag
        verdict.now_ns = table_now(&self.table)
        return table_peek(&self.table, tag, verdict.now_ns, self.take, draw, verdict)

    cdef Decision decide_once(self, object key, const Draw* draw):
        cdef Verdict verdict
        cdef bint allowed = self.decide_or_peek(self.tag_of(key), draw, &verdict)
        return self.new_decision(draw, &verdict, allowed)

    cdef bint decide_or_peek(self, uint64_t tag, const Draw* draw, Verdict* verdict) except -1:
        """A request that costs nothing changes nothing, but it is counted."""
        cdef bint allowed
        if draw.amount != 0:
            return self.decide(tag, draw, verdict) == ALLOWED
        allowed = self.peek_verdict(tag, draw, verdict)
        self.count(&self.counters.allowed if allowed else &self.counters.denied, 1)
        return allowed

    @cython.binding(False)
    def hit(self, key, cost=1, *, rate=None, burst=None, request_id=None, request_ttl=None):
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        `cost` is a whole number; 0 asks whether the key is within its limit, and charges nothing. A denial is a value:
        only what can never be allowed is an exception.

        With `rate` this one request is judged by that limit instead of the limiter's own, on the same state: the tiers
        of one limit. A token bucket takes any rate, and a `burst` beside it; a fixed or sliding window takes rates of
        its own period; a leaky bucket and a minimum interval take any rate; other limiters have one limit.

        With a `request_id` (str, bytes, int or a tuple of them) a request that is repeated under the same id within
        `request_ttl` (5 minutes by default) is allowed again without being charged again, whichever worker it comes to.
        An id takes a cell of the store for that time. Should a process be killed between charging and remembering, the
        repeated request is charged again: never the other way round. So is one that is repeated while it is being
        charged, and whose place in a leaky bucket others already stand behind.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidLimiter``, ``InvalidKey``,
        ``StoreClosed``.
        """
        cdef Shape shape
        cdef Draw draw
        if rate is None and burst is None:
            if cost is ONE:
                draw = self.unit
            else:
                self.draw(cost, &self.shape, &draw)
        else:
            self.shape_for_call(rate, burst, &shape)
            self.draw(cost, &shape, &draw)
        if request_id is not None:
            if draw.amount != 0:
                return self.hit_once(key, &draw, request_id, "5 minutes" if request_ttl is None else request_ttl)
        elif request_ttl is not None:
            raise InvalidKey(
                f"a request_ttl of {shown(request_ttl)} says how long a request_id is remembered, and none is given")
        return self.decide_once(key, &draw)

    cdef uint64_t mark_of(self, object key, object request_id, const Draw* draw) except 0:
        """The tag of the mark that a request leaves. Marks stand in the store's table, whatever table the limiter has.

        The amount is part of it: a request of another cost is another request.
        """
        cdef uint64_t id_hash
        try:
            id_hash = hash_key_of(request_id, self.hash_key)
        except InvalidKey:
            raise InvalidKey(
                f"a request_id is str, bytes, int or a tuple of them, not {shown(request_id)}") from None
        id_hash = hash_pair(id_hash, draw.amount, self.hash_key, MARK)
        return fingerprint_of(
            hash_pair(hash_key_of(key, self.hash_key), id_hash, self.hash_key, MARK)) | FOREBAY_KIND_TAT

    cdef Decision hit_once(self, object key, const Draw* draw, object request_id, object request_ttl):
        """Charge, then leave a mark. Whoever finds that another has left it meanwhile gives its own charge back.

        A crash between the two steps leaves a charge without a mark, so the retried request is charged twice: the safe
        side.
        """
        cdef Marking marking
        cdef Verdict verdict, marked
        cdef Events events
        cdef Draw charge = draw[0]
        cdef bint allowed
        cdef uint64_t tag = self.tag_of(key)
        cdef uint64_t mark_tag = self.mark_of(key, request_id, draw)
        marking.ttl_ns = as_period_ns(request_ttl)
        self.check_bound()
        if not self.remembers(mark_tag):
            allowed = self.decide(tag, draw, &verdict) == ALLOWED
            if allowed:
                events.inserted = events.evicted = events.full = events.cas_retries = 0
                marked.now_ns = table_now(&self.segment.table)
                table_decide(
                    &self.segment.table, mark_tag, self.claim_stripe, &self.counters.claims, mark, &marking, &marked,
                    &events)
                self.count_events(&events)
                if marked.outcome == ALLOWED or marked.full:
                    return self.new_decision(draw, &verdict, True)
                charge.charged_state = verdict.state
                if not verdict.full:
                    self.return_draw(tag, &charge)
            elif not self.remembers(mark_tag):
                return self.new_decision(draw, &verdict, False)
        else:
            self.count(&self.counters.allowed, 1)
        # Charged before: the answer is what a request that costs nothing would be told, but it is allowed.
        charge.amount = 0
        charge.room = draw.room + draw.amount
        self.peek_verdict(tag, &charge, &verdict)
        return self.new_decision(&charge, &verdict, True)

    cdef bint remembers(self, uint64_t mark_tag) except -1:
        cdef uint64_t until_ns
        table_find(&self.segment.table, mark_tag, &until_ns)
        return until_ns > table_now(&self.segment.table) and until_ns >> TIME_BITS == 0

    def peek(self, key, cost=1, *, rate=None, burst=None):
        """What `hit` with the same arguments would decide now, without charging or counting anything.

        ``allowed`` and ``retry_after`` speak of that request, ``remaining`` and ``reset_after`` of the key as it is.
        Only ``hit`` finds out that a new key has no room, so here ``on_full`` doesn't come in.
        """
        cdef Draw draw
        cdef Shape shape
        cdef Verdict verdict
        cdef bint allowed
        self.shape_for_call(rate, burst, &shape)
        self.draw(cost, &shape, &draw)
        allowed = self.peek_verdict(self.tag_of(key), &draw, &verdict)
        return self.new_decision(&draw, &verdict, allowed)

    def reserve(self, key, cost=1, max_delay=None):
        """Book `cost` permits of `key` and say after how many seconds they may be used: a ``Reservation``.

        A token bucket, a leaky bucket and a minimum interval book ahead, by at most `max_delay`: text like
        ``"500 ms"``, seconds or a ``timedelta``. Every other limiter can only charge what is allowed now, with a delay
        of 0; otherwise nothing is booked and ``delay`` says after how long asking again may succeed.

        Raises what ``hit`` raises, and ``ValueError`` for a `max_delay` that is none.
        """
        cdef Draw draw
        cdef Verdict verdict
        cdef bint allowed
        cdef uint64_t delay_ns
        cdef uint64_t tag = self.tag_of(key)
        cost = read_once(cost)
        self.draw(cost, &self.shape, &draw)
        self.be_patient(&draw, delay_ns_of(max_delay))
        allowed = self.decide_or_peek(tag, &draw, &verdict)
        if allowed:
            delay_ns = self.booked_delay_ns(&draw, &verdict)
        else:
            delay_ns = verdict.state - verdict.now_ns if verdict.full else self.refused_delay_ns(&draw, &verdict)
        # What a full table has let in was not charged, so there is nothing to cancel.
        return new_reservation(
            self, self.segment, key, cost, allowed, allowed and not verdict.full, verdict.now_ns, delay_ns,
            verdict.state, verdict.full)

    cdef int return_draw(self, uint64_t tag, const Draw* draw) except -1:
        cdef Events events
        self.check_bound()
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        table_amend(&self.table, tag, self.give_back, draw, &events)
        self.count_events(&events)
        return 0

    def _cancel(self, key, cost, uint64_t charged_state):
        """For ``Reservation``: give back a charge of which it is known what state it left, if it still counts."""
        cdef Draw draw
        self.draw(cost, &self.shape, &draw)
        draw.charged_state = charged_state
        self.return_draw(self.tag_of(key), &draw)

    def refund(self, key, cost=1, *, rate=None, burst=None, request_id=None):
        """Give back what an allowed ``hit`` with the same arguments charged; never more than a fresh key has.

        A cost above the limit, which several requests may have charged, gives back as much as the limit. With the
        `request_id` of a ``hit``, once, and only as long as it is remembered.
        """
        cdef Draw draw
        cdef Shape shape
        cdef Events events
        cdef bint remembered
        cdef uint64_t tag = self.tag_of(key)
        cdef uint64_t permits = whole_cost(cost)
        self.shape_for_call(rate, burst, &shape)
        self.draw(min(permits, shape.limit), &shape, &draw)
        if request_id is not None:
            if permits > shape.limit:
                # Nothing that was charged once.
                return
            events.inserted = events.evicted = events.full = events.cas_retries = 0
            self.check_bound()
            remembered = table_amend(
                &self.segment.table, self.mark_of(key, request_id, &draw), unmark, NULL, &events)
            self.count_events(&events)
            if not remembered:
                return
        self.return_draw(tag, &draw)

    def reset(self, key):
        """Forget `key`: its next request meets a fresh one.

        O(1); of a sliding log O(limit), of a bucketed window O(buckets).
        """
        cdef uint64_t tag = self.tag_of(key)
        self.check_bound()
        self.forget(tag)

    cdef int forget(self, uint64_t tag) except -1:
        cdef Events events
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        table_remove(&self.table, tag, &events)
        self.count_events(&events)
        return 0

    cdef int ask(self, object key, object cost, Ask* ask) except -1:
        ask.tag = self.tag_of(key)
        if cost is ONE:
            ask.draw = &self.unit
        else:
            self.draw(cost, &self.shape, &ask.own_draw)
            ask.draw = &ask.own_draw
        prefetch(home_line(&self.table, ask.tag))
        return 0

    cdef int look(self, Ask* ask, uint64_t now_ns) except -1:
        cdef ForebayCell* cell = find_in_line(home_line(&self.table, ask.tag), ask.tag)
        cdef Next next
        cdef bint allowed
        if cell != NULL:
            ask.seen = load128_acquire(cell)
            if ask.seen.tag != ask.tag:
                cell = NULL
        if cell == NULL:
            cell = table_find(&self.table, ask.tag, &ask.seen.state)
            ask.seen.tag = ask.tag
        ask.verdict.cell = cell
        ask.verdict.full = False
        ask.verdict.tag = ask.tag
        ask.verdict.now_ns = now_ns
        ask.verdict.state = ask.seen.state
        ask.wanted.tag = ask.tag
        allowed = self.take(cell, ask.tag, ask.seen.state, now_ns, ask.draw, &next)
        ask.wanted.state = next.state
        ask.verdict.decided_ns = next.decided_ns
        ask.verdict.outcome = ALLOWED if allowed else DENIED
        return allowed

    cdef int commit_seen(self, Ask* ask) except -1:
        cdef Next next
        if ask.draw.amount == 0:
            return True
        if ask.verdict.cell == NULL:
            return False
        if self.table.prepare != NULL:
            next.state = ask.wanted.state
            next.decided_ns = ask.verdict.decided_ns
            self.table.prepare(ask.verdict.cell, ask.seen.state, &next, ask.draw)
        if not cas128_acq_rel(ask.verdict.cell, ask.seen, ask.wanted):
            self.count(&self.counters.cas_retries, 1)
            return False
        ask.verdict.state = ask.wanted.state
        if self.record != NULL:
            self.record(ask.draw, &ask.verdict)
        return True

    cdef int commit(self, Ask* ask) except -1:
        cdef Events events
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        ask.verdict.full = False
        ask.verdict.now_ns = table_now(&self.table)
        table_decide(
            &self.table, ask.tag, self.claim_stripe, &self.counters.claims, self.take, ask.draw, &ask.verdict,
            &events)
        self.count_events(&events)
        if ask.verdict.outcome == ALLOWED and self.record != NULL:
            self.record(ask.draw, &ask.verdict)
        return ask.verdict.outcome == ALLOWED

    cdef int give_up(self, Ask* ask) except -1:
        cdef Draw charge = ask.draw[0]
        # What was allowed because the table was full has left nothing in it.
        if charge.amount != 0 and not ask.verdict.full:
            charge.charged_state = ask.verdict.state
            self.return_draw(ask.tag, &charge)
        return 0

    cdef Decision decision_of(self, const Ask* ask, bint allowed):
        return self.new_decision(ask.draw, &ask.verdict, allowed)

    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged. Not atomic: other processes' requests may come
        between. Faster than a loop of ``allow``, because cells are fetched ahead; large batches release the GIL.
        """
        if isinstance(keys, (str, bytes)):
            raise InvalidKey(f"allow_many takes a list of keys, not the one key {shown(keys)}")
        cdef list key_list = keys if type(keys) is list else list(keys)
        cdef bint with_gil = PyList_GET_SIZE(key_list) <= KEYS_WITH_GIL
        cdef Batch batch
        cdef Events events
        cdef uint64_t allowed
        cdef uint64_t generation
        cdef list results
        cdef bint decided = False
        batch.size = PyList_GET_SIZE(key_list)
        batch.keys = NULL
        batch.draws = NULL
        batch.unit = &self.unit
        batch.table = &self.table
        batch.hash_key = self.hash_key
        batch.kind = self.kind
        if isinstance(costs, int):
            raise InvalidCost(f"costs is a list with one cost for each key, not {shown(costs)}")
        if costs is not None:
            costs = list(costs)
            if len(costs) != batch.size:
                raise InvalidCost(f"{batch.size} keys need {batch.size} costs, not {len(costs)}")
        # Until a key is decided, its place in the list of results holds its tag: every page of new memory costs a
        # large batch a fault. Nothing but this call can find the list meanwhile.
        results = PyList_New(batch.size)
        hide_from_collector(results)
        batch.tags = <uint64_t*>list_items(results)
        try:
            if costs:
                batch.draws = <Draw*>PyMem_Malloc(batch.size * sizeof(Draw))
                if batch.draws == NULL:
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
                hash_batch(key_list, &batch)
                self.check_bound()
            generation = self.generation[0]
            batch.claim_stripe = self.claim_stripe
            batch.claim_sequence = &self.counters.claims
            batch.yes = <PyObject*><object>True
            batch.no = <PyObject*><object>False
            if with_gil:
                allowed = self.decide_batch(&batch, &events)
            else:
                with nogil:
                    allowed = self.decide_batch(&batch, &events)
            own_results(results, allowed)
            decided = True
            if generation != self.generation[0]:
                # Another thread closed a store meanwhile. If it was this one, its line may be another process's now.
                self.bind_shared()
            self.count(&self.counters.allowed, allowed)
            self.count(&self.counters.denied, batch.size - allowed)
            self.count_events(&events)
            return results
        finally:
            if not decided and batch.size != 0:
                # Tags are no objects: the list must not give them up as such.
                memset(batch.tags, 0, batch.size * sizeof(uint64_t))
            PyMem_Free(batch.draws)

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        return decide_batch_by(batch, events, self.take, self.record)
