"""Limiters whose decision is one CAS of the key's cell."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.batch cimport Batch
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Draw, Limiter, Record, Shape
from forebay.core.table.keys cimport hash_key_of
from forebay.core.table.native cimport prefetch
from forebay.core.table.table cimport (
    ALLOWED, LOST, UNDECIDED, Decide, Events, Outcome, Verdict, fingerprint_of, home_line, table_decide, table_now,
    table_try,
)


# The cost as an integer; larger ones than an int64_t come back as the largest, which no limit allows.
cdef int64_t whole_cost(object cost) except -1
cdef object read_once(object cost)


cdef class CellLimiter(Limiter):
    cdef Shape shape
    cdef Draw unit                           # a cost of 1
    cdef Decide take                         # the algorithm's decision function
    cdef Decide give_back                    # and what undoes it
    cdef Record record                       # NULL: the cell is all there is
    cdef uint64_t kind                       # of its cells

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1
    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1
    cdef int be_patient(self, Draw* draw, uint64_t patience_ns) except -1
    cdef uint64_t booked_delay_ns(self, const Draw* draw, const Verdict* verdict) noexcept
    cdef uint64_t refused_delay_ns(self, const Draw* draw, const Verdict* verdict) except? 0
    cdef int describe(self, const Draw* draw, const Verdict* verdict, Decision decision) except -1
    cdef Decision new_decision(self, const Draw* draw, const Verdict* verdict, bint allowed)
    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED
    cdef bint peek_verdict(self, uint64_t tag, const Draw* draw, Verdict* verdict) except -1
    cdef bint decide_or_peek(self, uint64_t tag, const Draw* draw, Verdict* verdict) except -1
    cdef Decision decide_once(self, object key, const Draw* draw)
    cdef Decision hit_once(self, object key, const Draw* draw, object request_id, object request_ttl)
    cdef uint64_t mark_of(self, object key, object request_id, const Draw* draw) except 0
    cdef bint remembers(self, uint64_t mark_tag) except -1
    cdef int return_draw(self, uint64_t tag, const Draw* draw) except -1
    cdef int forget(self, uint64_t tag) except -1
    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil

    cdef inline uint64_t tag_of(self, object key) except 0:
        return fingerprint_of(hash_key_of(key, self.hash_key)) | self.kind


cdef inline Outcome decide_by(
    CellLimiter limiter, uint64_t tag, const Draw* draw, Verdict* verdict, Decide take, Record record
) except UNDECIDED:
    """One decision and its counting. Inlined with the decision function that is given as a constant."""
    cdef Events events
    cdef Outcome outcome
    limiter.check_bound()
    # The cell is on its way while the clock is read: that takes as long as half a cache miss.
    prefetch(home_line(&limiter.table, tag))
    verdict.now_ns = table_now(&limiter.table)
    verdict.full = False
    verdict.tag = tag
    outcome = table_try(&limiter.table, tag, verdict.now_ns, take, draw, verdict)
    if outcome > ALLOWED:
        events.inserted = events.evicted = events.full = 0
        events.cas_retries = outcome == LOST
        table_decide(
            &limiter.table, tag, limiter.claim_stripe, &limiter.counters.claims, take, draw, verdict, &events)
        limiter.count_events(&events)
    if verdict.outcome == ALLOWED:
        if record != NULL:
            record(draw, verdict)
        limiter.count(&limiter.counters.allowed, 1)
    else:
        limiter.count(&limiter.counters.denied, 1)
    return verdict.outcome


cdef inline bint allow_by(CellLimiter limiter, object key, Decide take, Record record) except -1:
    """The fast path, for each limiter's `allow`."""
    cdef Verdict verdict
    return decide_by(limiter, limiter.tag_of(key), &limiter.unit, &verdict, take, record) == ALLOWED
