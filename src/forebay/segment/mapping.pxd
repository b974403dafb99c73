cdef char* map_aligned(int fd, size_t size) except NULL
