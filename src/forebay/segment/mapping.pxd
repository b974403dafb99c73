from libc.stdint cimport uint8_t, uint64_t


cdef class HeldBytes:
    cdef Py_buffer buffer
    cdef const uint8_t* start
    cdef uint64_t size


cdef char* map_aligned(int fd, size_t size, bint is_writable) except NULL
