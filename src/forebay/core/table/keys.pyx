"""Hashes of keys that are not plain ASCII text."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_AsEncodedString
from libc.stdint cimport int64_t, uint8_t, uint64_t

from forebay.core.table.native cimport ForebayHashKey, siphash13

from forebay.errors import InvalidKey, short_repr

Key = str | bytes | int | tuple[str | bytes | int, ...]


cdef uint64_t hash_bytes(object data, ForebayHashKey key, KeyDomain domain) noexcept:
    """The hash of a bytes object, or of an instance of a subclass."""
    return siphash13(
        in_domain(key, domain), <const uint8_t*>PyBytes_AS_STRING(data), <size_t>PyBytes_GET_SIZE(data))


cdef ForebayHashKey derive_key(ForebayHashKey segment_key, bytes name):
    cdef ForebayHashKey key
    key.k0 = hash_bytes(b"0" + name, segment_key, TEXT)
    key.k1 = hash_bytes(b"1" + name, segment_key, TEXT)
    return key


cdef uint64_t hash_pair(uint64_t first, uint64_t second, ForebayHashKey hash_key, KeyDomain domain) noexcept:
    cdef uint64_t[2] both = [first, second]
    return siphash13(in_domain(hash_key, domain), <const uint8_t*>both, sizeof(both))


cdef bytes utf8(object text):
    """UTF-8. Lone surrogates, as in undecodable file names, are encoded as if they were characters."""
    return PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass")


cdef bytes two_complement(object number):
    return int.to_bytes(number, int.bit_length(number) // 8 + 1, "little", signed=True)


cdef bytes encode_part(object part):
    """The encoding of one part of a tuple, with its type and length: different tuples have different encodings."""
    cdef bytes data
    if isinstance(part, str):
        kind, data = b"s", utf8(part)
    elif isinstance(part, bytes):
        kind, data = b"b", PyBytes_FromStringAndSize(PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part))
    elif isinstance(part, int) and not isinstance(part, bool):
        kind, data = b"i", two_complement(part)
    else:
        raise InvalidKey(
            f"a tuple that is a key holds str, bytes and int, not {type(part).__name__}: {short_repr(part)}")
    return kind + len(data).to_bytes(8, "little") + data


cdef uint64_t hash_other_key(object key, ForebayHashKey hash_key) except? 0:
    """The hash of any key. An instance of a subclass hashes as its base type does; no method of it is called."""
    cdef int overflow = 0
    cdef int64_t number
    if isinstance(key, str):
        return hash_bytes(utf8(key), hash_key, TEXT)
    # True would be the same client as 1. A bool as a key is most likely the result of a test, passed by mistake.
    if isinstance(key, int) and not isinstance(key, bool):
        number = PyLong_AsLongLongAndOverflow(key, &overflow)
        if overflow == 0:
            return siphash13(in_domain(hash_key, INTEGER), <const uint8_t*>&number, sizeof(number))
        return hash_bytes(two_complement(key), hash_key, LARGE_INTEGER)
    if isinstance(key, bytes):
        return hash_bytes(key, hash_key, BYTES)
    if isinstance(key, tuple):
        parts = [encode_part(<object>PyTuple_GET_ITEM(key, i)) for i in range(PyTuple_GET_SIZE(key))]
        return hash_bytes(b"".join(parts), hash_key, PARTS)
    raise InvalidKey(f"a key is str, bytes, int or a tuple of them, not {type(key).__name__}: {short_repr(key)}")
