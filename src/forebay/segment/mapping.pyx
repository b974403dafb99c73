"""Mapping a segment's file, asking the kernel for huge pages, and reading memory that Python has mapped."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "<sys/mman.h>" nogil:
    int PROT_NONE, PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED
    void* MAP_FAILED
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t size)
    int madvise(void* address, size_t size, int advice)


cdef extern from "<fcntl.h>" nogil:
    int posix_fallocate(int fd, long offset, long size)


cdef extern from "<sys/vfs.h>" nogil:
    struct FileSystem "statfs":
        long f_type
    int fstatfs(int fd, FileSystem* system)


cdef enum:
    PAGE = 4096                  # the smallest there is; larger ones are multiples
    HUGE_PAGE = 1 << 21
    MADV_COLLAPSE = 25           # Linux 6.1; not in every C library's headers yet
    TMPFS_MAGIC = 0x01021994     # of Linux's headers, not of the C library's
    RAMFS_MAGIC = 0x858458F6


@cython.final
cdef class HeldBytes:
    """The bytes of an object with the buffer protocol, as a mapping has: they stay where they are while this exists.

    Typed memoryviews would do the same, and add 40 kB of Cython's code to the wheel.
    """

    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self.buffer, PyBUF_SIMPLE)
        self.start, self.size = <const uint8_t*>self.buffer.buf, <uint64_t>self.buffer.len

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


cdef char* map_aligned(int fd, size_t size, bint is_writable) except NULL:
    """Map a file at a multiple of the huge page size, so that the kernel can map its huge pages."""
    cdef void* reserved = mmap(
        NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    cdef size_t before, end
    cdef int protection = PROT_READ | (PROT_WRITE if is_writable else 0)
    cdef void* address
    if reserved == MAP_FAILED:
        raise OSError(errno, f"cannot map a segment of {size} bytes")
    before = (HUGE_PAGE - <size_t>reserved % HUGE_PAGE) % HUGE_PAGE
    address = mmap(<char*>reserved + before, size, protection, MAP_SHARED | MAP_FIXED, fd, 0)
    if address == MAP_FAILED:
        munmap(reserved, size + HUGE_PAGE)
        raise OSError(errno, f"cannot map a segment of {size} bytes")
    if before:
        munmap(reserved, before)
    # munmap takes whole pages: the rest of the reservation begins at the page after the mapping.
    end = (before + size + PAGE - 1) // PAGE * PAGE
    if end < size + HUGE_PAGE:
        munmap(<char*>reserved + end, size + HUGE_PAGE - end)
    return <char*>address


def use_huge_pages(int fd, size_t size):
    """Ask for huge pages for a file of `size` bytes that has no pages yet. Raises OSError if there is no space.

    The kernel collapses a range into one huge page only if the range has at least one small page; it is fastest if
    the range has exactly one.
    """
    cdef size_t start
    cdef int refusal
    cdef char* address
    for start in range(0, size, HUGE_PAGE):
        refusal = posix_fallocate(fd, start, 1)
        if refusal != 0:
            raise OSError(refusal, "no space for a page")
    address = map_aligned(fd, size, True)
    with nogil:
        madvise(address, size // HUGE_PAGE * HUGE_PAGE, MADV_COLLAPSE)
        munmap(address, size)


def is_in_memory(int fd):
    """Whether a file takes memory: it is on a tmpfs or a ramfs, wherever mounted, or is a memfd."""
    cdef FileSystem system
    if fstatfs(fd, &system) != 0:
        raise OSError(errno, "cannot find out which file system a file is on")
    return <uint32_t>system.f_type in (TMPFS_MAGIC, RAMFS_MAGIC)
