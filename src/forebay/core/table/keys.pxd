"""The hash of a key: equal in every process of the segment, and unknown to a process without the segment."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from forebay.core.table.native cimport (
    ForebayHashKey, is_compact_ascii, is_text, likely, siphash13, text_data, text_length,
)


# Keys of different types never share a hash input: each type hashes under a key of its own.
cdef enum KeyDomain:
    TEXT = 0
    BYTES = 1
    INTEGER = 2
    LARGE_INTEGER = 3
    PARTS = 4
    MARK = 5
    LEASES = 6                           # no key: names a limiter in the leases of native threads


cdef inline ForebayHashKey in_domain(ForebayHashKey key, KeyDomain domain) noexcept nogil:
    key.k1 ^= <uint64_t>domain
    return key


# The limiter's own hash key, so that one key has unrelated fingerprints in two limiters.
cdef ForebayHashKey derive_key(ForebayHashKey segment_key, bytes name)

cdef uint64_t hash_other_key(object key, ForebayHashKey hash_key) except? 0

# The hash of two hashes.
cdef uint64_t hash_pair(uint64_t first, uint64_t second, ForebayHashKey hash_key, KeyDomain domain) noexcept


cdef inline bint is_ascii_text(PyObject* key) noexcept nogil:
    return is_text(key) and is_compact_ascii(key)


cdef inline uint64_t hash_ascii_text(PyObject* key, ForebayHashKey hash_key) noexcept nogil:
    """The hash of a key for which `is_ascii_text` holds. The caller keeps the key alive."""
    return siphash13(hash_key, text_data(key), text_length(key))


cdef inline uint64_t hash_key_of(object key, ForebayHashKey hash_key) except? 0:
    """The 64-bit hash of a key. InvalidKey if it is not a key."""
    if likely(is_ascii_text(<PyObject*>key)):
        return hash_ascii_text(<PyObject*>key, hash_key)
    return hash_other_key(key, hash_key)
