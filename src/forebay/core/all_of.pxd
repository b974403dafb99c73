"""Several limiters as one."""

cimport cython

from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Ask
from forebay.core.reservation cimport Reservation


cdef enum:
    MOST = 16


@cython.final
cdef class AllOf:
    cdef readonly object store
    cdef readonly str name
    cdef readonly tuple limiters
    cdef readonly bint may_free_early
    cdef void* parts[MOST]               # the limiters once more, held by the tuple
    cdef int count

    cdef int ask_all(self, object key, object cost, Ask* asks) except -1
    cdef int check_key(self, object key) except -1
    cdef bint look_at_all(self, Ask* asks, bint at_each) except -1
    cdef int commit_seen(self, Ask* asks, int first) except -1
    cdef bint commit_rest(self, Ask* asks, int charged) except -1
    cdef bint decide(self, object key, object cost, Ask* asks, bint at_each) except -1
    cdef Decision binding(self, Ask* asks, bint allowed)
    cdef list decisions(self, Ask* asks)
    cdef Reservation reserve_all(self, object key, object cost, Ask* asks)
