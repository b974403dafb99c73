"""Limiters whose decision is one CAS of the key's cell."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.batch cimport Batch
from forebay.core.decision cimport Decision, Outlook
from forebay.core.limiter cimport AfterCharge, Attempt, Charge, Describe, Limiter, LimitParams, SetCharge
from forebay.core.table.keys cimport hash_key_of
from forebay.core.table.native cimport (
    FOREBAY_KIND_USED, ForebayCell, ForebayLine, prefetch,
)
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, UNDECIDED, Decide, Events, Outcome, Table, Verdict, fingerprint_of, home_line, no_events,
    table_decide, table_now, table_try, table_try_line,
)


# The cost as an integer. A cost above the largest int64_t becomes that, which no limit allows.
cdef int64_t whole_cost(object cost) except -1
cdef object read_once(object cost)

# A copy of a list that other threads may change meanwhile, which is possible without the GIL. By single items, as that
# takes no lock. In the child of a fork beside threads, a lock of the list may stay taken.
cdef list copied(list items)


cdef inline uint64_t tag_of_mark(uint64_t hashed) noexcept nogil:
    """The tag of a request's mark."""
    return fingerprint_of(hashed) | FOREBAY_KIND_USED


# The hash of a request id; and of that hash with one limit's key and amount, for a request to several limits.
cdef uint64_t hash_of_id(Limiter limiter, object request_id) except? 0
cdef uint64_t hash_with_part(Limiter limiter, uint64_t hashed, const Attempt* attempt) noexcept

# The tag of a request's mark, and the state of the mark: 0 if there is none, or none that still counts. Marks are in
# the store's table, even if the limiter has a table of its own. The tag includes the amount: with another cost it is
# another request.
cdef uint64_t mark_tag_of(Limiter limiter, object key, object request_id, uint64_t amount) except 0
cdef uint64_t mark_state(Limiter limiter, uint64_t mark_tag) noexcept

# Remember a request that was charged, until a time. False if it is remembered already, with another state than
# `before`. True also if the store has no room for the mark.
cdef bint insert_mark(Limiter limiter, uint64_t mark_tag, uint64_t until_ns, uint64_t before) except -1

# Forget a request. False if it was not remembered any more.
cdef bint remove_mark(Limiter limiter, uint64_t mark_tag) except -1

# A request's charge in permits.
cdef void count_charge(uint64_t permits, const LimitParams* params, Charge* charge) noexcept nogil


cdef inline void set_outlook(
    const Charge* charge, const Verdict* verdict, bint allowed, Describe describe, Outlook* outlook
) noexcept nogil:
    if verdict.full and not allowed:
        # The key has no state. The verdict's state is the time at which a cell of its probe set becomes free.
        outlook.retry_after_ns = outlook.reset_after_ns = verdict.state - verdict.now_ns
    else:
        describe(charge, verdict, allowed, outlook)


cdef class CellLimiter(Limiter):
    cdef LimitParams params
    cdef Charge unit                         # a cost of 1
    cdef Decide take                         # the algorithm's decision function
    cdef Decide give_back                    # the function that undoes it
    cdef AfterCharge after_charge            # NULL: all state is in the cell
    cdef SetCharge set_charge
    cdef Describe describe
    cdef uint64_t kind                       # the kind of its cells

    cdef int charge_for(self, object cost, const LimitParams* params, Charge* charge) except -1
    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1
    cdef int charge_by(self, object cost, tuple tier, LimitParams* params, Charge* charge) except -1
    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil
    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil
    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil
    cdef Decision new_decision(self, const Charge* charge, const Verdict* verdict, bint allowed)
    cdef Outcome decide(self, uint64_t tag, const Charge* charge, Verdict* verdict) except UNDECIDED
    cdef bint peek_verdict(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1
    cdef bint decide_or_peek(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1
    cdef Decision decide_once(self, object key, const Charge* charge)
    cdef Decision hit_once(self, object key, const Charge* charge, object request_id, object request_ttl)
    cdef int return_charge(self, uint64_t tag, const Charge* charge) except -1
    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil
    cdef void note_batch(self, ForebayLine* line, list keys, list results) noexcept
    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil

    cdef inline uint64_t tag_of(self, object key) except 0:
        return fingerprint_of(hash_key_of(key, self.hash_key)) | self.kind


cdef inline Outcome begin_decision(
    const Table* table, uint64_t tag, const Charge* charge, Verdict* verdict, Decide take
) noexcept nogil:
    """Decide the usual case. An outcome above ALLOWED is for `table_decide`."""
    cdef ForebayCell* line = home_line(table, tag)
    # The prefetch runs while the clock is read, which takes as long as half a cache miss.
    prefetch(line)
    verdict.now_ns = table_now(table)
    verdict.full = False
    verdict.tag = tag
    return table_try_line(table, line, tag, verdict.now_ns, take, charge, verdict)


cdef inline Outcome begin_decision_at(
    const Table* table, uint64_t tag, uint64_t now_ns, const Charge* charge, Verdict* verdict, Decide take
) noexcept nogil:
    """The same by an earlier reading of the clock."""
    verdict.now_ns = now_ns
    verdict.full = False
    verdict.tag = tag
    return table_try(table, tag, now_ns, take, charge, verdict)


cdef inline Outcome decide_by(
    CellLimiter limiter, uint64_t tag, const Charge* charge, Verdict* verdict, Decide take, AfterCharge after_charge
) except UNDECIDED:
    """Decide one request and count it. Inlined, with a constant decision function."""
    cdef Events events
    cdef Outcome outcome
    cdef ForebayLine* line = limiter.ensure_attached()
    outcome = begin_decision(&limiter.table, tag, charge, verdict, take)
    if outcome > ALLOWED:
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &limiter.table, tag, line.number, &line.counters.claims, take, charge, verdict, &events)
        limiter.count_events(&events)
    if verdict.outcome == ALLOWED:
        if after_charge != NULL:
            after_charge(charge, verdict)
        limiter.count_decision_in(line, True, tag)
    else:
        limiter.count_decision_in(line, False, tag)
    return verdict.outcome


cdef inline bint allow_by(CellLimiter limiter, object key, Decide take, AfterCharge after_charge) except -1:
    """The fast path, for each limiter's `allow`."""
    cdef Verdict verdict
    return decide_by(limiter, limiter.tag_of(key), &limiter.unit, &verdict, take, after_charge) == ALLOWED
