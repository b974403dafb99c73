"""Several limiters as one."""

cimport cython

from libc.stdint cimport uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Attempt
from forebay.core.reservation cimport Reservable, Reservation


cdef enum:
    MOST = 16


@cython.final
cdef class AllOf(Reservable):
    cdef readonly object store
    cdef readonly str name
    cdef readonly tuple limiters
    cdef readonly bint may_free_early
    cdef void* parts[MOST]               # borrowed references to the limiters, which the tuple owns
    cdef int count

    cdef int begin_attempts(self, object key, object cost, Attempt* attempts) except -1
    cdef int ensure_attached(self) except -1
    cdef int check_key(self, object key) except -1
    cdef bint check_all(self, Attempt* attempts, bint at_each) except -1
    cdef int try_commit(self, Attempt* attempts, int first) except -1
    cdef bint commit_rest(self, Attempt* attempts, int charged) except -1
    cdef bint decide(self, object key, object cost, Attempt* attempts, bint at_each) except -1
    cdef bint decide_begun(self, Attempt* attempts, bint at_each) except -1
    cdef Decision hit_once(self, object key, object cost, object request_id, object request_ttl)
    cdef void count_allowed(self) noexcept
    cdef int begin_repeated(self, list keys, Attempt* attempts) except -1
    cdef CellLimiter marking(self)
    cdef uint64_t mark_of(self, object request_id, const Attempt* attempts) except 0
    cdef Decision binding(self, Attempt* attempts, bint allowed)
    cdef list decisions(self, Attempt* attempts)
    cdef Reservation reserve_all(self, object key, object cost, Attempt* attempts)
