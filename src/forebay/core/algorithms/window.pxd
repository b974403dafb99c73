"""Decoding the states of windows: the counts, and the window that they belong to. See window.pyx."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.counts cimport (
    CALENDAR_WINDOWS, count_time, last_edge, low_mask, low_of, time_of, window_end_ns,
)
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport ForebayCell, multiply_divide_down, multiply_divide_up, product_below
from forebay.core.table.table cimport Next


# A state, decoded at a given time.
cdef struct Counted:
    uint64_t count
    uint64_t previous
    uint64_t time                # the upper part of a state of that window
    uint64_t end_ns              # of the window
    uint64_t left_ns             # of the window, from now on


cdef inline uint64_t later_end_ns(const LimitParams* params, uint64_t end_ns, uint64_t time_ns) noexcept nogil:
    """The end of a window that is later than the one that ends at `end_ns`. Its state's time is `time_ns`, which is
    less than a quantum later than that end."""
    if params.edges == NULL:
        # It begins a whole number of periods after our own ends.
        return end_ns + (time_ns - end_ns) // params.period_ns * params.period_ns
    if <int64_t>time_ns >= params.edges[CALENDAR_WINDOWS]:
        # The clock was set back by more windows than are known. This is late by less than a quantum.
        return time_ns
    return <uint64_t>last_edge(params.edges, time_ns)[0]


cdef inline Counted fixed_counted(
    const LimitParams* params, uint64_t tag, uint64_t state, uint64_t now_ns
) noexcept nogil:
    cdef Counted counted
    cdef uint64_t time = state & ~low_mask(params.low_bits)
    counted.end_ns = window_end_ns(params, tag, now_ns)
    counted.time = count_time(counted.end_ns, params.low_bits)
    counted.previous = 0
    counted.count = 0
    if time >= counted.time:
        counted.count = low_of(state, params.low_bits)
        if time > counted.time:
            # A later window than ours.
            counted.time = time
            counted.end_ns = later_end_ns(params, counted.end_ns, time_of(state, params.low_bits))
    counted.left_ns = counted.end_ns - now_ns
    return counted


cdef inline bint was_charged_before(const Charge* charge, uint64_t state) noexcept nogil:
    """Whether the charge to be given back belongs to another window than the state."""
    return charge.charged_state != 0 and (charge.charged_state ^ state) & ~low_mask(charge.params.low_bits) != 0


cdef inline Counted sliding_counted(const LimitParams* params, uint64_t state, uint64_t now_ns) noexcept nogil:
    cdef Counted counted
    cdef uint64_t time = state & ~low_mask(params.low_bits)
    cdef int count_bits = params.low_bits - params.previous_bits
    cdef uint64_t count = low_of(state, count_bits)
    cdef uint64_t previous = low_of(state, params.low_bits) >> count_bits
    counted.end_ns = window_end_ns(params, 0, now_ns)
    counted.left_ns = counted.end_ns - now_ns
    counted.time = count_time(counted.end_ns + params.period_ns, params.low_bits)
    counted.count = 0
    counted.previous = 0
    if time < counted.time:
        if time == count_time(counted.end_ns, params.low_bits):
            # The state belongs to the window before ours.
            counted.previous = (count + low_mask(params.previous_shift)) >> params.previous_shift
    else:
        counted.count = count
        counted.previous = previous
        if time > counted.time:
            # The state's window is later than ours. None of it has passed: now counts as its beginning.
            counted.time = time
            counted.end_ns += (
                (time_of(state, params.low_bits) - counted.end_ns) // params.period_ns - 1) * params.period_ns
            counted.left_ns = params.period_ns
    return counted


cdef inline uint64_t weighted(const LimitParams* params, uint64_t previous, uint64_t left_ns) noexcept nogil:
    """The previous window's share of the estimate."""
    if params.rounds_up:
        return multiply_divide_up(previous << params.previous_shift, left_ns, params.period_ns)
    return multiply_divide_down(previous << params.previous_shift, left_ns, params.period_ns)


cdef inline bint has_room(const LimitParams* params, const Counted* counted, uint64_t room) noexcept nogil:
    """Whether the estimate is at most `room`, without the division."""
    cdef uint64_t whole = counted.previous << params.previous_shift
    if counted.count > room:
        return False
    if params.rounds_up:
        return not product_below(room - counted.count, params.period_ns, whole, counted.left_ns)
    return product_below(whole, counted.left_ns, room - counted.count + 1, params.period_ns)


cdef inline uint64_t sliding_state(const LimitParams* params, const Counted* counted) noexcept nogil:
    return counted.time | counted.previous << (params.low_bits - params.previous_bits) | counted.count


# Subtract a charge from the current count first, then from the previous one.
cdef bint sliding_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil

# Fill in what a key of a sliding window may expect, by its counts.
cdef void describe_counts(
    const Charge* charge, const Counted* counted, uint64_t now_ns, bint allowed, Outlook* outlook) noexcept nogil
