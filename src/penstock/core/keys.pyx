"""Hashing the keys that are not plain ASCII text."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.stdint cimport int64_t, uint8_t, uint64_t

from penstock.core.native cimport PenstockHashKey, siphash13

from penstock.errors import InvalidKey

Key = str | bytes | int | tuple[str | bytes | int, ...]


cdef uint64_t hash_bytes(object data, PenstockHashKey key, KeyDomain domain) noexcept:
    """Of a bytes object or an instance of a subclass."""
    return siphash13(
        in_domain(key, domain), <const uint8_t*>PyBytes_AS_STRING(data), <size_t>PyBytes_GET_SIZE(data))


cdef PenstockHashKey derive_key(PenstockHashKey segment_key, bytes name):
    cdef PenstockHashKey key
    key.k0 = hash_bytes(b"0" + name, segment_key, TEXT)
    key.k1 = hash_bytes(b"1" + name, segment_key, TEXT)
    return key


cdef bytes encode_part(object part):
    """One part of a tuple: its type and its length, so that no two tuples have one encoding."""
    if isinstance(part, str):
        kind, data = b"s", (<str>part).encode("utf-8", "surrogatepass")
    elif isinstance(part, bytes):
        kind, data = b"b", part
    elif isinstance(part, int):
        kind, data = b"i", int.to_bytes(part, int.bit_length(part) // 8 + 1, "little", signed=True)
    else:
        raise InvalidKey(
            f"a tuple that is a key holds str, bytes and int, not {type(part).__name__}: {part!r:.100}")
    return kind + len(data).to_bytes(8, "little") + data


cdef uint64_t hash_other_key(object key, PenstockHashKey hash_key) except? 0:
    cdef int overflow = 0
    cdef int64_t number
    if isinstance(key, str):
        # UTF-8 of ASCII text is the text itself, so a str subclass equals the str; lone surrogates, as in undecodable
        # file names, have a form of their own.
        return hash_bytes((<str>key).encode("utf-8", "surrogatepass"), hash_key, TEXT)
    if isinstance(key, int):
        number = PyLong_AsLongLongAndOverflow(key, &overflow)
        if overflow == 0:
            return siphash13(in_domain(hash_key, INTEGER), <const uint8_t*>&number, sizeof(number))
        return hash_bytes(
            int.to_bytes(key, int.bit_length(key) // 8 + 1, "little", signed=True), hash_key, LARGE_INTEGER)
    if isinstance(key, bytes):
        return hash_bytes(key, hash_key, BYTES)
    if isinstance(key, tuple):
        return hash_bytes(b"".join([encode_part(part) for part in key]), hash_key, PARTS)
    raise InvalidKey(f"a key is str, bytes, int or a tuple of them, not {type(key).__name__}: {key!r:.100}")
