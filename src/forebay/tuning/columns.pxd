"""Requests as they lie in the temporary file."""

from libc.stdint cimport uint32_t, uint64_t

from forebay.tuning.keys cimport Keys


cdef packed struct Request:
    uint64_t time_ns
    uint32_t key                         # its number in Keys


cdef class Columns:
    cdef readonly Keys keys
    cdef object file
    cdef Request* pending                # twice the window
    cdef Request* scratch
    cdef Py_ssize_t window
    cdef Py_ssize_t size                 # requests in `pending`
    cdef bint in_order                   # `pending` is sorted
    cdef uint64_t previous_ns            # of the request before
    cdef uint64_t written_ns             # of the last request in the file
    cdef readonly uint64_t count
    cdef readonly uint64_t reordered     # are dated before the request that came before them
    cdef readonly uint64_t late          # came too late to be sorted

    cdef int add(self, uint64_t time_ns, const char* key, Py_ssize_t size) except -1
    cdef int write(self, Py_ssize_t count) except -1
