"""The floors of every figure: a call that does nothing, and one atomic operation that misses the cache."""

cimport cython
from libc.stdint cimport uint64_t


cdef extern from "forebay/layout.h" nogil:
    ctypedef struct ForebayCell:
        uint64_t tag
        uint64_t state


cdef extern from "forebay/atomics.h" nogil:
    bint cas128_acq_rel "forebay_cas128_acq_rel"(
        ForebayCell* cell, ForebayCell expected, ForebayCell desired) noexcept


cdef extern from "forebay/arithmetic.h" nogil:
    uint64_t multiply_high "forebay_multiply_high"(uint64_t a, uint64_t b) noexcept


cdef extern from "<sys/mman.h>" nogil:
    int PROT_NONE, PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED
    void* MAP_FAILED
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t size)


cdef extern from *:
    void prefetch "__builtin_prefetch"(const void* p) noexcept nogil


@cython.final
cdef class Empty:
    """A class and a method of the same kind as a limiter's `allow`."""

    @cython.binding(False)
    def method(self, key, /):
        return True


cdef inline uint64_t scramble(uint64_t value) noexcept nogil:
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    value = (value ^ value >> 30) * <uint64_t>0xBF58476D1CE4E5B9
    value = (value ^ value >> 27) * <uint64_t>0x94D049BB133111EB
    return value ^ value >> 31


cdef inline ForebayCell* cell_at(ForebayCell* cells, uint64_t cell_count, uint64_t position) noexcept nogil:
    return cells + multiply_high(scramble(position * <uint64_t>0x9E3779B97F4A7C15), cell_count)


cdef enum:
    CELLS_AHEAD = 16
    HUGE_PAGE = 1 << 21


cdef class Region:
    """A file's bytes, mapped so that its huge pages, if it has any, are used as such."""

    cdef void* reserved
    cdef ForebayCell* cells
    cdef size_t size

    def __cinit__(self, int fd, size_t size):
        self.size = size
        self.reserved = mmap(
            NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.reserved == MAP_FAILED:
            raise MemoryError(f"no room to map {size} bytes")
        aligned = (<size_t>self.reserved + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
        self.cells = <ForebayCell*>mmap(
            <void*><size_t>aligned, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
        if <void*>self.cells == MAP_FAILED:
            raise MemoryError(f"can't map {size} bytes")

    def __dealloc__(self):
        if self.reserved != MAP_FAILED:
            munmap(self.reserved, self.size + HUGE_PAGE)

    def cas_at_random(self, uint64_t seed, Py_ssize_t count, str order):
        """Read and CAS `count` random 16-byte cells; return how many CASes succeeded.

        `order` is "dependent" (the next cell's place depends on the value that the previous CAS found), "independent"
        (it doesn't, so the processor may overlap them), or "prefetched" (independent, and prefetched).
        """
        cdef ForebayCell* cells = self.cells
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
        cdef uint64_t cell_count = <uint64_t>self.size // sizeof(ForebayCell)
        cdef uint64_t position = seed
        cdef uint64_t successes = 0
        cdef bint swapped = True
        cdef bint dependent = order == "dependent"
        cdef bint prefetched = order == "prefetched"
        cdef Py_ssize_t _turn
        with nogil:
            for _turn in range(count):
                if prefetched:
                    prefetch(cell_at(cells, cell_count, position + CELLS_AHEAD))
                cell = cell_at(cells, cell_count, position)
                seen = cell[0]
                wanted.tag = seen.tag
                wanted.state = seen.state + 1
                swapped = cas128_acq_rel(cell, seen, wanted)
                successes += <uint64_t>swapped
                # One process alone: `swapped` is always 1, which the processor can't know before the CAS has completed.
                position += <uint64_t>swapped if dependent else 1
        return successes
