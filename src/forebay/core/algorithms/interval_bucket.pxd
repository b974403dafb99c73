"""A token bucket with refill in intervals: its decision functions.

Each boundary of clock-aligned periods puts back `rate_limit` permits. The state holds the boundary F at which the
bucket is full again, and the *rest*: the number of permits of that last refill that fit, less one. So the deficit, the
number of missing permits, is ``(boundaries from now until F, less one) * rate_limit + rest + 1``. It shrinks at every
boundary without a write, as with GCRA: there is no refill job. F is rounded up to a quantum (`count_time` in
counts.pxd). Boundaries are at least two quanta apart, so a rounded F still identifies its boundary. The larger of two
states has the larger deficit, so eviction removes the key that has used less first.
"""

from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport count_state, low_of, time_of, window_end_ns
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport Next


cdef inline uint64_t deficit_of(const LimitParams* params, uint64_t state, uint64_t end_ns) noexcept nogil:
    """The number of missing permits in the period that ends at `end_ns`."""
    cdef uint64_t full_ns = time_of(state, params.low_bits)
    cdef uint64_t boundaries
    if full_ns < end_ns:
        return 0
    # The boundary was rounded up by less than half a period, so this division rounds down to it.
    boundaries = (full_ns - end_ns) // params.period_ns + 1
    return (boundaries - 1) * params.rate_limit + low_of(state, params.low_bits) + 1


cdef inline uint64_t boundaries_for(const LimitParams* params, uint64_t permits) noexcept nogil:
    """The number of refills that bring `permits` permits."""
    return (permits + params.rate_limit - 1) // params.rate_limit


cdef inline uint64_t state_of_deficit(const LimitParams* params, uint64_t deficit, uint64_t end_ns) noexcept nogil:
    cdef uint64_t boundaries = boundaries_for(params, deficit)
    if deficit == 0:
        return 0
    return count_state(
        end_ns + (boundaries - 1) * params.period_ns, params.low_bits,
        deficit - (boundaries - 1) * params.rate_limit - 1)


cdef inline uint64_t delay_of(
    const LimitParams* params, uint64_t deficit, uint64_t now_ns, uint64_t end_ns
) noexcept nogil:
    """The time until a bucket that lacks `deficit` permits, perhaps more than its limit, lacks at most its limit."""
    if deficit <= params.limit:
        return 0
    return end_ns - now_ns + (boundaries_for(params, deficit - params.limit) - 1) * params.period_ns


cdef inline bint interval_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t end_ns = window_end_ns(charge.params, tag, now_ns)
    cdef uint64_t deficit = deficit_of(charge.params, state, end_ns) + charge.amount
    if deficit > charge.params.limit and delay_of(charge.params, deficit, now_ns, end_ns) > charge.max_wait_ns:
        return False
    next.state = state_of_deficit(charge.params, deficit, end_ns)
    return True


cdef inline bint interval_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t end_ns = window_end_ns(charge.params, tag, now_ns)
    cdef uint64_t deficit = deficit_of(charge.params, state, end_ns)
    cdef uint64_t amount = charge.amount
    if charge.charged_state != 0:
        if charge.charged_state != state and deficit > charge.params.limit:
            # Later bookings keep their times, so no other request can take the permits of this one.
            return False
        # The rest has been refilled.
        amount = min(amount, deficit_of(charge.params, charge.charged_state, end_ns))
    amount = min(amount, deficit)
    next.state = state_of_deficit(charge.params, deficit - amount, end_ns)
    return amount != 0
