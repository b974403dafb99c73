"""From a key to its hash: the same in every process, and secret to whoever doesn't have the segment."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_DATA, PyUnicode_GET_LENGTH
from libc.stdint cimport uint8_t, uint64_t

from penstock.core.native cimport PenstockHashKey, PyUnicode_IS_COMPACT_ASCII, likely, siphash13


# Keys of different types never share a hash input: each type hashes under a key of its own.
cdef enum KeyDomain:
    TEXT = 0
    BYTES = 1
    INTEGER = 2
    LARGE_INTEGER = 3
    PARTS = 4


cdef inline PenstockHashKey in_domain(PenstockHashKey key, KeyDomain domain) noexcept nogil:
    key.k1 ^= <uint64_t>domain
    return key


# A limiter's own hash key, so that one user has unrelated fingerprints in two limiters.
cdef PenstockHashKey derive_key(PenstockHashKey segment_key, bytes name)

cdef uint64_t hash_other_key(object key, PenstockHashKey hash_key) except? 0


cdef inline uint64_t hash_key_of(object key, PenstockHashKey hash_key) except? 0:
    """The 64-bit hash of a key. TypeError if it is not a key."""
    if likely(PyUnicode_CheckExact(key)) and likely(PyUnicode_IS_COMPACT_ASCII(key)):
        return siphash13(hash_key, <const uint8_t*>PyUnicode_DATA(key), <size_t>PyUnicode_GET_LENGTH(key))
    return hash_other_key(key, hash_key)
