"""The generic cell rate algorithm: its decision functions.

The state of a key is its *theoretical arrival time* (TAT): the time at which the bucket is full again, or the queue
is empty. A request advances the TAT by the time in which the rate brings its cost. The request is allowed if the TAT
was ahead of now by at most the tolerance less that increment. The state is one number, and there is no refill job
(ITU-T I.371, 1993, virtual scheduling).

Rounding: a request's increment is rounded up to the nanosecond, so n requests of cost 1 may advance the TAT by up to
n ns more than one request of cost n. The tolerance is wider by that much, but by less than one permit's time. So a
whole burst of requests of cost 1 passes, and no more than `burst` permits ever pass at one instant.

Permits above the burst: a token bucket's key may get more permits than its burst (``add``). While it has more, nothing
is refilled, so its state needs no time. The state is then the number of permits above the burst (`holds_permits` in
table.pxd): the key never expires and is never evicted, as that would lose permits. It is a number of permits, not
their time, so a request at another rate takes as many as it costs.

* *add*: any state -> permits, or a theoretical arrival time that is closer to now; one CAS ("token bucket: permits are
  added"). A key whose bucket isn't full is filled first. No part of a permit stays above a burst.
* *take*: permits -> fewer, or, by a request that needs more than those above the burst, a theoretical arrival time that
  is ahead by the rest; one CAS. Such a state allows every request, as none costs more than the burst.
* *cancel*: a charge that left permits gives back to permits. It gives nothing back to a key that has fewer permits than
  its burst by now: what was refilled since isn't known. A *refund* never makes permits.

A state of permits is neither near nor before any time: `take` meets it only where it would deny. So the usual case
doesn't look for it.

*Time.* A theoretical arrival time is never before the requests that led to it, so a process with an old clock reading
can't date a request before them. Permits have no time. So a request that ends them reads the clock again, after it has
read the state. Not handled (ABA): between that reading and its CAS the process is stopped, and meanwhile the key spends
these permits and gets as many again. Then it keeps what would have been refilled since that reading.
"""

from libc.stdint cimport uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport TIME_BITS, Decide, Next, Verdict


# Decide by a state that is no time: permits above the burst, or what no limiter can have written. Allows. A variable:
# the compiler would put the function in the place of its rare call, which cost each decision fourteen instructions.
ctypedef bint (*TakeAbove)(uint64_t state, uint64_t now_ns, const Charge* charge, Next* next) noexcept nogil
cdef TakeAbove gcra_take_above

# Give a cancelled charge back to such a state. Whether anything changes.
cdef bint gcra_give_back_above(uint64_t state, const Charge* charge, Next* next) noexcept nogil

# Add so many permits by one decision of `add`, such as `gcra_add`. Returns how many the key then has.
cdef uint64_t add_permits(
    CellLimiter limiter, object key, uint64_t permits, const LimitParams* params, Decide add
) except? 0

# The decision function that adds permits. Their number is the amount of a charge. Denies if they would be too many.
cdef bint gcra_add(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil


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
    return gcra_take_above(tat_ns, now_ns, charge, next)


cdef inline bint gcra_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t tat_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Undo `gcra_take`, but never beyond a full bucket."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t amount = charge.amount
    if tat_ns >> TIME_BITS != 0:
        return gcra_give_back_above(tat_ns, charge, next)
    if tat_ns <= now_ns or charge.charged_state >> TIME_BITS != 0:
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
    # A state that is no time counts as a fresh key's.
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
