"""What every limiter holds."""

from libc.stdint cimport uint64_t

from penstock.core.native cimport PenstockCounterLine, PenstockHashKey, fetch_add_relaxed, load_relaxed, store_relaxed
from penstock.core.segment cimport Segment
from penstock.core.table cimport Events, Table


cdef class Limiter:
    cdef Table table                         # the segment's, copied here so that a decision reads one object
    cdef PenstockHashKey hash_key            # derived from the segment's and the limiter's name
    cdef PenstockCounterLine* counters       # this process's line, or the limiter's shared one
    cdef bint counters_are_shared
    cdef uint64_t bound_generation           # the generation in which `counters` was taken; 0: not yet
    cdef const uint64_t* generation
    cdef uint64_t claim_stripe               # the counter line's number, part of claim ids
    cdef Segment segment                     # keeps the mapping alive
    cdef readonly object store
    cdef readonly str name
    cdef int number                          # position in the segment's list of limiters

    cdef int enroll(self) except -1
    cdef int bind(self) except -1
    cdef int bind_shared(self) except -1
    cdef void count_events(self, const Events* events) noexcept

    cdef inline int check_bound(self) except -1:
        """Before every decision: after a fork or a close, see what still belongs to this process."""
        if self.bound_generation != self.generation[0]:
            return self.bind()
        return 0

    cdef inline void count(self, uint64_t* counter, uint64_t n) noexcept:
        """Called with the GIL held, which makes load and store one step among this process's threads."""
        if self.counters_are_shared:
            fetch_add_relaxed(counter, n)
        else:
            store_relaxed(counter, load_relaxed(counter) + n)
