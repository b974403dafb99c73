"""The thread slots of this process, the generation of its counter lines, and its forks."""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport ForebayThread


# How many forks lie between the import of forebay and this process.
cdef const uint64_t* forks_counter() noexcept

cdef uint64_t forks_of_process() noexcept nogil

# The generation of this process. Without the GIL each thread has its own, too.
cdef const uint64_t* generation_counter() noexcept

# The slot of the calling thread; NULL if it has not joined, or with the GIL.
cdef ForebayThread* thread_here() noexcept nogil

# The same, after taking a slot if need be: slot 0 if none is free. NULL with the GIL.
cdef ForebayThread* join_threads(object attachment) except? NULL
