from libc.stdint cimport uint64_t

from forebay.core.table.native cimport multiply_divide_down, multiply_divide_up


# A duration in seconds, never less than in ns.
cdef double seconds_up(uint64_t duration_ns) noexcept


cdef enum Flag:
    DEGRADED = 1                         # a policy decided, as the limiter's store was unavailable
    NO_ROOM = 2                          # `on_full` decided, as the store had no room for the key


# A class without C methods: a pointer to their table would make each decision a tenth slower.
cdef class Decision:
    cdef readonly bint allowed           # whether the request may proceed
    cdef unsigned int flags              # of `Flag`; in one word, as each further field makes every decision slower
    cdef readonly str limiter            # the name of the limit that bound it
    cdef readonly uint64_t limit         # permits that can be allowed at once
    cdef uint64_t available              # room left: as time at the rate below, or, at 1 per 1, in permits
    cdef uint64_t rate_limit             # the rate that turns it into permits
    cdef uint64_t rate_period_ns
    cdef readonly uint64_t retry_after_ns    # 0 when allowed
    cdef readonly uint64_t reset_after_ns    # 0 when the key is as good as fresh


cdef inline uint64_t remaining_of(Decision decision) noexcept:
    if decision.rate_limit == decision.rate_period_ns:
        return min(decision.limit, decision.available)
    return min(
        decision.limit, multiply_divide_down(decision.available, decision.rate_limit, decision.rate_period_ns))


cdef inline uint64_t time_of(Decision decision, uint64_t permits) noexcept:
    return multiply_divide_up(permits, decision.rate_period_ns, decision.rate_limit)


cdef inline uint64_t next_after_ns_of(Decision decision) noexcept:
    cdef uint64_t remaining, others_ns
    if not decision.allowed:
        return decision.retry_after_ns
    if decision.rate_limit == decision.rate_period_ns:
        return decision.reset_after_ns
    remaining = remaining_of(decision)
    if remaining >= decision.limit:
        return 0
    if decision.available != 0:
        return time_of(decision, remaining + 1) - decision.available
    # The overdraft is unknown. But after `reset_after_ns` all permits are back, and the others come back after the next
    # one.
    others_ns = time_of(decision, decision.limit) - time_of(decision, 1)
    return decision.reset_after_ns - min(others_ns, decision.reset_after_ns)
