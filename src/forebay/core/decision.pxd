from libc.stdint cimport uint64_t

from forebay.core.table.native cimport multiply_divide_down, multiply_divide_up


# A duration in seconds, never less than in ns; infinity for the time to what never happens.
cdef double seconds_up(uint64_t duration_ns) noexcept


cdef inline uint64_t never_ns() noexcept nogil:
    """The time to what never happens by itself."""
    return ~<uint64_t>0 >> 1


cdef inline bint is_never(uint64_t duration_ns) noexcept nogil:
    """Whether it is `never_ns`, or that in whole microseconds. No time of a state is so far ahead."""
    return duration_ns >> 62 != 0


cdef enum Flag:
    DEGRADED = 1                         # a policy decided, as the limiter's store was unavailable
    NO_ROOM = 2                          # `on_full` decided, as the store had no room for the key


# The requests that a key may send after a decision, and when.
cdef struct Outlook:
    uint64_t available           # room left: as time at the rate below, or, at 1 per 1, in permits
    uint64_t rate_limit          # the rate that turns it into permits
    uint64_t rate_period_ns
    uint64_t retry_after_ns      # 0 when allowed
    uint64_t reset_after_ns      # 0 when the key is as good as fresh


cdef inline Outlook no_outlook() noexcept nogil:
    """To be filled in. For limiters that count permits, not time, its rate is right."""
    return Outlook(0, 1, 1, 0, 0)


# A class without C methods: a pointer to their table would make each decision a tenth slower.
cdef class Decision:
    cdef readonly bint allowed           # whether the request may proceed
    cdef unsigned int flags              # of `Flag`; in one word, as each further field makes every decision slower
    cdef readonly str limiter            # the name of the limit that bound it
    cdef readonly uint64_t limit         # permits that can be allowed at once
    cdef Outlook outlook


cdef inline uint64_t remaining_in(const Outlook* outlook, uint64_t limit) noexcept nogil:
    """The permits that would still be allowed, of a limit."""
    if outlook.rate_limit == outlook.rate_period_ns:
        return outlook.available
    return min(limit, multiply_divide_down(outlook.available, outlook.rate_limit, outlook.rate_period_ns))


cdef inline uint64_t remaining_of(Decision decision) noexcept:
    return remaining_in(&decision.outlook, decision.limit)


cdef inline uint64_t time_of(const Outlook* outlook, uint64_t permits) noexcept:
    return multiply_divide_up(permits, outlook.rate_period_ns, outlook.rate_limit)


cdef inline uint64_t next_after_ns_of(Decision decision) noexcept:
    cdef const Outlook* outlook = &decision.outlook
    cdef uint64_t remaining, others_ns
    if not decision.allowed:
        return outlook.retry_after_ns
    if outlook.rate_limit == outlook.rate_period_ns:
        return outlook.reset_after_ns
    remaining = remaining_of(decision)
    if remaining >= decision.limit:
        return 0
    if outlook.available != 0:
        return time_of(outlook, remaining + 1) - outlook.available
    # The overdraft is unknown. But after `reset_after_ns` all permits are back, and the others come back after the next
    # one.
    others_ns = time_of(outlook, decision.limit) - time_of(outlook, 1)
    return outlook.reset_after_ns - min(others_ns, outlook.reset_after_ns)
