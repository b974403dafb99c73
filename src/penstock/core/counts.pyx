"""How many bits a count takes."""

from libc.stdint cimport uint64_t


cdef int count_bits_for(uint64_t most) noexcept:
    cdef int bits = 0
    while most >> bits:
        bits += 1
    return bits
