"""Numbers for keys: the first distinct key is 0, the next one 1.

A client's address is the key that ``forebay.web.ClientAddress`` makes of it: without a port, an IPv6 address as its
/64, and IPv4 in IPv6 as IPv4.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from forebay.core.table.native cimport siphash13

import os


cdef extern from "<arpa/inet.h>" nogil:
    int AF_INET, AF_INET6
    int inet_pton(int family, const char* text, void* address)
    const char* inet_ntop(int family, const void* address, char* text, unsigned int size)


cdef enum:
    ADDRESS_ROOM = 64                    # bytes for the longest text of an address or network
    FIRST_ROOM = 1024
    MOST_KEYS = 0xFFFF_FFFE


cdef Py_ssize_t reduce_address(const char* text, Py_ssize_t size, char* reduced) noexcept nogil:
    """Write the key for a client's address that has a colon in it. The key's size; 0 if the text is no address."""
    cdef char[ADDRESS_ROOM] address
    cdef uint8_t[16] raw
    cdef uint8_t[12] mapped
    cdef const char* colon = <const char*>memchr(text, c":", size)
    cdef const char* bracket = NULL
    cdef const char* scope
    if text[0] == c"[":
        bracket = <const char*>memchr(text, c"]", size)
        if bracket == NULL:
            return 0
        text += 1
        size = bracket - text
    elif memchr(colon + 1, c":", size - (colon + 1 - text)) == NULL:
        # One colon is that of a port.
        size = colon - text
        if size >= ADDRESS_ROOM:
            return 0
        memcpy(reduced, text, size)
        reduced[size] = 0
        return size if inet_pton(AF_INET, reduced, raw) == 1 else 0
    scope = <const char*>memchr(text, c"%", size)
    if scope != NULL:
        size = scope - text
    if size >= ADDRESS_ROOM:
        return 0
    memcpy(address, text, size)
    address[size] = 0
    if inet_pton(AF_INET6, address, raw) != 1:
        return 0
    memset(mapped, 0, 10)
    mapped[10] = mapped[11] = 0xFF
    if memcmp(raw, mapped, 12) == 0:
        inet_ntop(AF_INET, raw + 12, reduced, ADDRESS_ROOM)
        size = 0
        while reduced[size]:
            size += 1
        return size
    memset(raw + 8, 0, 8)
    inet_ntop(AF_INET6, raw, reduced, ADDRESS_ROOM)
    size = 0
    while reduced[size]:
        size += 1
    memcpy(reduced + size, b"/64", 3)
    return size + 3


@cython.final
cdef class Keys:
    """Distinct keys and their numbers. About 45 bytes per key. For one thread at a time."""

    def __cinit__(self):
        secret = os.urandom(16)
        self.secret.k0 = int.from_bytes(secret[:8])
        self.secret.k1 = int.from_bytes(secret[8:])
        self.slots = <uint32_t*>calloc(2 * FIRST_ROOM, sizeof(uint32_t))
        self.slot_mask = 2 * FIRST_ROOM - 1
        self.hashes = <uint64_t*>calloc(FIRST_ROOM, sizeof(uint64_t))
        self.starts = <uint64_t*>calloc(FIRST_ROOM + 1, sizeof(uint64_t))
        self.texts = <char*>calloc(16 * FIRST_ROOM, 1)
        self.room, self.texts_room = FIRST_ROOM, 16 * FIRST_ROOM
        if self.slots == NULL or self.hashes == NULL or self.starts == NULL or self.texts == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.slots)
        free(self.hashes)
        free(self.starts)
        free(self.texts)

    cdef int64_t number_of(self, const char* text, Py_ssize_t size) except -1:
        cdef char[ADDRESS_ROOM] reduced
        cdef Py_ssize_t reduced_size
        cdef uint64_t hashed, at
        cdef uint32_t number
        if size and memchr(text, c":", size) != NULL:
            reduced_size = reduce_address(text, size, reduced)
            if reduced_size:
                text, size = reduced, reduced_size
        hashed = siphash13(self.secret, <const uint8_t*>text, <size_t>size)
        at = hashed & self.slot_mask
        while self.slots[at]:
            number = self.slots[at] - 1
            if self.hashes[number] == hashed and self.starts[number + 1] - self.starts[number] == <uint64_t>size and (
                    memcmp(self.texts + self.starts[number], text, size) == 0):
                return number
            at = (at + 1) & self.slot_mask
        self.append(text, size, hashed)
        # Appending may have moved all slots.
        at = hashed & self.slot_mask
        while self.slots[at]:
            at = (at + 1) & self.slot_mask
        self.slots[at] = self.count
        return self.count - 1

    cdef int append(self, const char* text, Py_ssize_t size, uint64_t hashed) except -1:
        cdef uint64_t end = self.starts[self.count]
        cdef char* texts
        if self.count == self.room:
            self.grow()
        if end + <uint64_t>size > self.texts_room:
            texts = <char*>realloc(self.texts, 2 * self.texts_room + <uint64_t>size)
            if texts == NULL:
                raise MemoryError
            self.texts = texts
            self.texts_room = 2 * self.texts_room + <uint64_t>size
        memcpy(self.texts + end, text, size)
        self.hashes[self.count] = hashed
        self.count += 1
        self.starts[self.count] = end + <uint64_t>size
        return 0

    cdef int grow(self) except -1:
        """Double the room, and the slots."""
        cdef uint64_t room = 2 * self.room
        cdef uint64_t mask = 2 * room - 1
        cdef uint64_t at
        cdef uint32_t number
        cdef uint64_t* hashes
        cdef uint64_t* starts
        cdef uint32_t* slots
        if self.count >= MOST_KEYS // 2:
            raise MemoryError
        hashes = <uint64_t*>realloc(self.hashes, room * sizeof(uint64_t))
        if hashes == NULL:
            raise MemoryError
        self.hashes = hashes
        starts = <uint64_t*>realloc(self.starts, (room + 1) * sizeof(uint64_t))
        if starts == NULL:
            raise MemoryError
        self.starts = starts
        slots = <uint32_t*>calloc(mask + 1, sizeof(uint32_t))
        if slots == NULL:
            raise MemoryError
        for number in range(self.count):
            at = hashes[number] & mask
            while slots[at]:
                at = (at + 1) & mask
            slots[at] = number + 1
        free(self.slots)
        self.slots, self.slot_mask, self.room = slots, mask, room
        return 0

    def number(self, bytes text not None):
        """The number of a key."""
        return self.number_of(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    def text(self, uint32_t number):
        """The key with this number, with backslashes for bytes that are no UTF-8."""
        if number >= self.count:
            raise IndexError(f"there are {self.count} keys, and no number {number}")
        cdef uint64_t start = self.starts[number]
        raw = PyBytes_FromStringAndSize(self.texts + start, <Py_ssize_t>(self.starts[number + 1] - start))
        return raw.decode(errors="backslashreplace")

    def size_bytes(self):
        """The memory that the keys take."""
        return self.room * 2 * sizeof(uint64_t) + (self.slot_mask + 1) * sizeof(uint32_t) + self.texts_room
