"""Numbers for keys, and requests as they lie in the temporary file."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from forebay.core.table.native cimport ForebayHashKey


cdef class Keys:
    cdef ForebayHashKey secret           # a client can't choose keys that collide
    cdef uint32_t* slots                 # open addressing, at most half full: a key's number plus 1, or 0
    cdef uint64_t slot_mask
    cdef uint64_t* hashes                # by number
    cdef uint64_t* starts                # of the texts, by number; and the end of the last
    cdef char* texts
    cdef uint64_t room                   # keys that hashes and starts have room for
    cdef uint64_t texts_room
    cdef readonly uint32_t count

    # The number of the key, a new one if it is new.
    cdef int64_t number_of(self, const char* text, Py_ssize_t size) except -1
    cdef int grow(self) except -1
    cdef int append(self, const char* text, Py_ssize_t size, uint64_t hashed) except -1


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
