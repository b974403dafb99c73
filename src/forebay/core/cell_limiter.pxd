"""Limiters whose decision is one CAS of the key's cell."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.batch cimport Batch
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Charge, Limiter, AfterCharge, LimitParams
from forebay.core.table.keys cimport hash_key_of
from forebay.core.table.native cimport prefetch
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, UNDECIDED, Decide, Events, Outcome, Verdict, fingerprint_of, home_line, no_events,
    table_decide, table_now, table_try,
)


# The cost as an integer. A cost above the largest int64_t becomes that, which no limit allows.
cdef int64_t whole_cost(object cost) except -1
cdef object read_once(object cost)


cdef class CellLimiter(Limiter):
    cdef LimitParams params
    cdef Charge unit                         # a cost of 1
    cdef Decide take                         # the algorithm's decision function
    cdef Decide give_back                    # the function that undoes it
    cdef AfterCharge after_charge            # NULL: all state is in the cell
    cdef uint64_t kind                       # the kind of its cells

    cdef int charge_for(self, object cost, const LimitParams* params, Charge* charge) except -1
    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1
    cdef int charge_by(self, object cost, tuple tier, LimitParams* params, Charge* charge) except -1
    cdef int allow_wait(self, Charge* charge, uint64_t max_wait_ns) except -1
    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept
    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) except? 0
    cdef int describe(self, const Charge* charge, const Verdict* verdict, Decision decision) except -1
    cdef Decision new_decision(self, const Charge* charge, const Verdict* verdict, bint allowed)
    cdef Outcome decide(self, uint64_t tag, const Charge* charge, Verdict* verdict) except UNDECIDED
    cdef bint peek_verdict(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1
    cdef bint decide_or_peek(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1
    cdef Decision decide_once(self, object key, const Charge* charge)
    cdef Decision hit_once(self, object key, const Charge* charge, object request_id, object request_ttl)
    cdef uint64_t mark_of(self, object key, object request_id, const Charge* charge) except 0
    cdef bint remembers(self, uint64_t mark_tag) except -1
    cdef int return_charge(self, uint64_t tag, const Charge* charge) except -1
    cdef int forget(self, uint64_t tag) except -1
    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil

    cdef inline uint64_t tag_of(self, object key) except 0:
        return fingerprint_of(hash_key_of(key, self.hash_key)) | self.kind


cdef inline Outcome decide_by(
    CellLimiter limiter, uint64_t tag, const Charge* charge, Verdict* verdict, Decide take, AfterCharge after_charge
) except UNDECIDED:
    """Decide one request and count it. Inlined, with a constant decision function."""
    cdef Events events
    cdef Outcome outcome
    limiter.ensure_attached()
    # The prefetch runs while the clock is read, which takes as long as half a cache miss.
    prefetch(home_line(&limiter.table, tag))
    verdict.now_ns = table_now(&limiter.table)
    verdict.full = False
    verdict.tag = tag
    outcome = table_try(&limiter.table, tag, verdict.now_ns, take, charge, verdict)
    if outcome > ALLOWED:
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &limiter.table, tag, limiter.counter_line, &limiter.counters.claims, take, charge, verdict, &events)
        limiter.count_events(&events)
    if verdict.outcome == ALLOWED:
        if after_charge != NULL:
            after_charge(charge, verdict)
        limiter.count(&limiter.counters.allowed, 1)
    else:
        limiter.count(&limiter.counters.denied, 1)
    return verdict.outcome


cdef inline bint allow_by(CellLimiter limiter, object key, Decide take, AfterCharge after_charge) except -1:
    """The fast path, for each limiter's `allow`."""
    cdef Verdict verdict
    return decide_by(limiter, limiter.tag_of(key), &limiter.unit, &verdict, take, after_charge) == ALLOWED
