from libc.stdint cimport uint64_t


cdef class Decision:
    cdef readonly bint allowed           # whether the request may go ahead
    cdef readonly uint64_t limit         # permits that can be allowed at once
    cdef uint64_t available_ns           # room left, as time at the rate below
    cdef uint64_t rate_limit             # the rate that turns it into permits
    cdef uint64_t rate_period_ns
    cdef readonly uint64_t retry_after_ns    # 0 when allowed
    cdef readonly uint64_t reset_after_ns    # 0 when the key is as good as fresh
