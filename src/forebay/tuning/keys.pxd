"""Numbers for keys."""

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
