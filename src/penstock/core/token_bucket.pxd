from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t

from penstock.core.decision cimport Decision
from penstock.core.limiter cimport Limiter
from penstock.core.table cimport UNDECIDED, Events, Outcome, Verdict


# What one request asks of a bucket.
cdef struct Draw:
    uint64_t increment_ns        # how far it moves the theoretical arrival time
    uint64_t room_ns             # how far ahead of now that time may be before it


# A rate and a burst, in the units of the decision.
cdef struct Shape:
    uint64_t rate_limit
    uint64_t rate_period_ns
    uint64_t burst
    uint64_t tolerance_ns        # how far ahead of now the theoretical arrival time may be


# A batch under way: arrays of `size` each.
cdef struct Batch:
    Py_ssize_t size
    PyObject** keys              # held by the caller; NULL if every tag is there already
    uint64_t* tags
    Draw* draws                  # NULL: every cost is 1
    uint8_t* results
    uint64_t claim_stripe        # of one counter line, with its sequence, whatever becomes of the limiter's meanwhile
    uint64_t* claim_sequence


cdef class TokenBucket(Limiter):
    cdef readonly object rate
    cdef readonly uint64_t burst
    cdef Shape shape
    cdef Draw unit               # a cost of 1

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1
    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1
    cdef int shape_of(self, object rate, object burst, Shape* shape) except -1
    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED
    cdef Decision peek_shape(self, object key, const Shape* shape, const Draw* draw)
    cdef int hash_batch(self, list keys, const Batch* batch) except -1
    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil
