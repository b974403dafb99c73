"""A segment's bytes in this process's address space."""

from libc.stdint cimport uint64_t

from penstock.core.native cimport PenstockCounterLine, PenstockHashKey
from penstock.core.table cimport Table


cdef class Segment:
    cdef Table table                     # what the decision path needs, validated and constant
    cdef PenstockHashKey hash_key        # of the segment; every limiter derives its own from it
    cdef char* base                      # first byte of the mapping; NULL only before __cinit__ is through
    cdef readonly size_t size            # bytes mapped
    cdef const uint64_t* generation      # see penstock/generation.h

    cdef PenstockCounterLine* counter_line(self, size_t number) except NULL
    cdef PenstockCounterLine* shared_counter_line(self, size_t limiter) except NULL
