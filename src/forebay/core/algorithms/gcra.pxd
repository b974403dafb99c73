"""The generic cell rate algorithm: its decision functions.

The state of a key is its *theoretical arrival time* (TAT): the time at which the bucket is full again, or the queue
is empty. A request advances the TAT by the time in which the rate brings its cost. The request is allowed if the TAT
was ahead of now by at most the tolerance less that increment. The state is one number, and there is no refill job
(ITU-T I.371, 1993, virtual scheduling).

Rounding: a request's increment is rounded up to the nanosecond, so n requests of cost 1 may advance the TAT by up to
n ns more than one request of cost n. The tolerance is wider by that much, but by less than one permit's time. So a
whole burst of requests of cost 1 passes, and no more than `burst` permits ever pass at one instant.
"""

from libc.stdint cimport uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport TIME_BITS, Next, Verdict


cdef inline bint gcra_take(
    ForebayCell* cell, uint64_t tag, uint64_t tat_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """The decision function: GCRA's virtual scheduling."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t start_ns = tat_ns if tat_ns > now_ns else now_ns
    next.state = start_ns + charge.amount
    if start_ns - now_ns <= charge.room:
        return True
    if tat_ns >> TIME_BITS == 0:
        return False
    # No limiter can have written this state: the key starts afresh.
    next.state = now_ns + charge.amount
    return True


cdef inline bint gcra_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t tat_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Undo `gcra_take`, but never beyond a full bucket."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t amount = charge.amount
    if tat_ns <= now_ns or tat_ns >> TIME_BITS != 0:
        return False
    if charge.charged_state != 0:
        if charge.charged_state <= now_ns or (
            # Later bookings keep their times, so no other request can take the time of this one.
            charge.charged_state != tat_ns and tat_ns - now_ns > charge.params.due_ns
        ):
            return False
        # The rest has been refilled.
        amount = min(amount, charge.charged_state - now_ns)
    next.state = tat_ns - amount if tat_ns - now_ns > amount else now_ns
    return True


cdef inline uint64_t ahead_of(const Verdict* verdict) noexcept nogil:
    """How far a state is ahead of now, in ns."""
    # A state that no limiter can have written counts as a fresh key's.
    return verdict.state - verdict.now_ns if verdict.state > verdict.now_ns and verdict.state >> TIME_BITS == 0 else 0


# The methods of GcraLimiter as functions, for limiters that derive from another class. In order: the furthest that a
# state is ahead of now; the params of a rate and a burst; the charge of a request; the delay of a booking and of a
# refusal; what a key may expect.
cdef uint64_t most_ahead_of(CellLimiter limiter) noexcept
cdef int gcra_params_of(
    CellLimiter limiter, object rate, object burst, str burst_name, uint64_t most_ahead_ns, LimitParams* params
) except -1
cdef void gcra_charge(uint64_t permits, const LimitParams* params, Charge* charge) noexcept nogil
cdef uint64_t gcra_booked_delay_ns(const Charge* charge, const Verdict* verdict) noexcept nogil
cdef uint64_t gcra_refused_delay_ns(const Charge* charge, const Verdict* verdict) noexcept nogil
cdef void gcra_describe(const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook) noexcept nogil


cdef class GcraLimiter(CellLimiter):
    cdef readonly object rate
    cdef uint64_t most_ahead_ns              # of now: no state is further ahead, so none reaches TIME_BITS

    cdef int gcra_params(self, object rate, object burst, str burst_name, LimitParams* params) except -1
    cdef void share_due(self, LimitParams* params) noexcept
