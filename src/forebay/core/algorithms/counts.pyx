"""How many bits a count takes."""

from libc.stdint cimport uint64_t


cdef int count_bits_for(uint64_t most) noexcept:
    cdef int bits = 0
    while most >> bits:
        bits += 1
    return bits


cdef uint64_t steps_for(uint64_t period_ns, int low_bits) noexcept:
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
