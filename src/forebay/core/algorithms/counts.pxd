"""States of KIND_COUNT: a time above, counts below.

    63                     low_bits                     0
     +------------------------+-------------------------+
     | time, in quarter ns    | counts                  |
     +------------------------+-------------------------+

The state as a whole, read as a number of quarter nanoseconds, is never earlier than the time in it: the time was
rounded up to a multiple of its lowest bit, the *quantum*, which is ``2**(low_bits - 2)`` ns. So a process that needs a
cell can see in any such state whether it has expired, without knowing how many of its bits are counts. A quantum is at
most half a window, so the time distinguishes windows.
"""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.limiter cimport LimitParams
from forebay.core.table.native cimport (
    load_relaxed, multiply_divide_down, multiply_divide_up, multiply_high, store_relaxed,
)


cdef enum:
    # The unit of the time is a nanosecond shifted right by this.
    FRACTION_BITS = 2
    # How many windows by the calendar a limiter knows; their edges are one more.
    CALENDAR_WINDOWS = 64


cdef inline uint64_t low_mask(int low_bits) noexcept nogil:
    return (<uint64_t>1 << low_bits) - 1


cdef inline uint64_t count_time(uint64_t time_ns, int low_bits) noexcept nogil:
    """The upper part of a state: the time, rounded up."""
    return ((time_ns << FRACTION_BITS) + low_mask(low_bits)) & ~low_mask(low_bits)


cdef inline uint64_t count_state(uint64_t time_ns, int low_bits, uint64_t low) noexcept nogil:
    return count_time(time_ns, low_bits) | low


cdef inline uint64_t low_of(uint64_t state, int low_bits) noexcept nogil:
    return state & low_mask(low_bits)


cdef inline uint64_t time_of(uint64_t state, int low_bits) noexcept nogil:
    """The time in ns, less than a quantum later than the time that `count_time` got."""
    return (state & ~low_mask(low_bits)) >> FRACTION_BITS


cdef inline uint64_t most_rounded_ns(int low_bits) noexcept nogil:
    """The most by which `time_of` is later than the time that `count_time` got."""
    return low_mask(low_bits) >> FRACTION_BITS


cdef inline uint64_t phase_of(const LimitParams* params, uint64_t tag) noexcept nogil:
    """How much earlier than a multiple of the period the windows of a key begin."""
    # The home line is chosen by the same bits, so they are mixed again (the golden ratio's multiplier).
    return params.phase_ns + (
        multiply_high(tag * <uint64_t>0x9E3779B97F4A7C15, params.period_ns) if params.staggered else 0)


cdef inline const int64_t* last_edge(const int64_t* edges, uint64_t time_ns) noexcept nogil:
    """The begin of the window that contains a time; of the first or last window for a time outside of all."""
    cdef int low = 0, high = CALENDAR_WINDOWS - 1, middle
    while low < high:
        middle = (low + high + 1) // 2
        if edges[middle] <= <int64_t>time_ns:
            low = middle
        else:
            high = middle - 1
    return edges + low


cdef inline uint64_t window_end_ns(const LimitParams* params, uint64_t tag, uint64_t now_ns) noexcept nogil:
    """The end of the aligned window that contains now.

    A division takes as long as the rest of a decision, so the last result is tried first: most often it still holds.
    Staggered windows of two keys end at different times. For them nothing is stored, as threads share this memory. For
    windows by the calendar the period is shorter than each of them, so the stored end is never of a later window.
    """
    cdef uint64_t end_ns = load_relaxed(&params.end_ns)
    if end_ns - now_ns - 1 < params.period_ns:
        return end_ns
    if not params.staggered and params.edges != NULL:
        end_ns = <uint64_t>last_edge(params.edges, now_ns)[1]
    else:
        end_ns = now_ns + params.period_ns - (now_ns + phase_of(params, tag)) % params.period_ns
    if not params.staggered:
        store_relaxed(<uint64_t*>&params.end_ns, end_ns)
    return end_ns


cdef inline uint64_t last_step_ns(const LimitParams* params, uint64_t time_ns) noexcept nogil:
    """The last step up to `time_ns`: a moment at which a window that begins with a request may begin or end.

    Each period has `steps` of them, spaced as evenly as whole nanoseconds allow; the first is a multiple of the period.
    """
    cdef uint64_t into_ns = time_ns % params.period_ns
    cdef uint64_t step = multiply_divide_down(into_ns, params.steps, params.period_ns)
    return time_ns - into_ns + multiply_divide_up(step, params.period_ns, params.steps)


cdef inline int count_bits_for(uint64_t most) noexcept:
    """How many bits hold numbers up to this one."""
    cdef int bits = 0
    while most >> bits:
        bits += 1
    return bits


cdef inline uint64_t steps_for(uint64_t period_ns, int low_bits) noexcept:
    """The number of steps in a period. No step is shorter than a quantum, so a rounded time still identifies its step.

    A step is the shortest of 1, 2, 5, 10, 20, 50 ... ns that is long enough, if that divides the period: so times that
    are round in decimal are steps. Otherwise a period has the largest possible number of steps.
    """
    cdef uint64_t quantum_ns = most_rounded_ns(low_bits) + 1
    cdef uint64_t power = 1
    cdef uint64_t step_ns = 1
    while step_ns < quantum_ns:
        if step_ns == power:
            step_ns = 2 * power
        elif step_ns == 2 * power:
            step_ns = 5 * power
        else:
            step_ns = power = 10 * power
    if period_ns % step_ns == 0 and step_ns < period_ns:
        return period_ns // step_ns
    return period_ns // quantum_ns
