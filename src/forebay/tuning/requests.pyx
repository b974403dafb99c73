"""The requests of a log: the numbers of their keys, and a file in which they lie in the order of their times.

A request takes 12 bytes of the file: a time and the number of a key. A log is nearly sorted, because servers write a
line at a request's end and date it at its beginning. `Columns` holds the newest requests back and sorts them, stably.
A request that belongs before one that is already in the file gets the time of that one, and is counted as late.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.math cimport floor
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove, memset

from forebay.core.table.native cimport siphash13
from forebay.tuning.times cimport COMBINED_TIME_SIZE, combined_time_ns, number_ns, text_time_ns

import os

from forebay.tuning.problems import UnusableLog


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    int PyBUF_READ


cdef extern from "<arpa/inet.h>" nogil:
    int AF_INET, AF_INET6
    int inet_pton(int family, const char* text, void* address)
    const char* inet_ntop(int family, const void* address, char* text, unsigned int size)


cdef enum:
    ADDRESS_ROOM = 64                    # bytes for the longest text of an address or network
    FIRST_ROOM = 1024
    MOST_KEYS = 0xFFFF_FFFE
    RUN = 32                             # requests that are sorted by insertion
    SHOWN = 100                          # bytes of an unreadable line that are kept

REQUEST_BYTES = sizeof(Request)


cdef Py_ssize_t reduce_address(const char* text, Py_ssize_t size, char* reduced) noexcept nogil:
    """Write the key for a client's address that has a colon in it. The key's size; 0 if the text is no address.

    It is the key that ``forebay.web.ClientAddress`` makes of the address: without a port, an IPv6 address as its /64,
    and IPv4 in IPv6 as IPv4.
    """
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
    """Numbers for keys: the first distinct key is 0, the next one 1.

    About 45 bytes per key. For one thread at a time.
    """

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


cdef void sort_by_time(Request* items, Request* scratch, Py_ssize_t size) noexcept nogil:
    """A stable merge sort. Halves that are in order already are joined by one comparison."""
    cdef Py_ssize_t start, middle, end, i, j, into
    cdef Py_ssize_t width = RUN
    cdef Request moving
    for i in range(1, size):
        moving = items[i]
        j = i
        while j % RUN != 0 and items[j - 1].time_ns > moving.time_ns:
            items[j] = items[j - 1]
            j -= 1
        items[j] = moving
    while width < size:
        end = 0
        while end + width < size:
            start, middle, end = end, end + width, min(end + 2 * width, size)
            if items[middle - 1].time_ns <= items[middle].time_ns:
                continue
            memcpy(scratch, items + start, width * sizeof(Request))
            i, j, into = 0, middle, start
            while i < width:
                if j < end and items[j].time_ns < scratch[i].time_ns:
                    items[into] = items[j]
                    j += 1
                else:
                    items[into] = scratch[i]
                    i += 1
                into += 1
        width *= 2


cdef int64_t time_of(object time) except -2:
    """The time in ns; -1 if it is none."""
    cdef Py_ssize_t size
    cdef const char* text
    cdef int overflow = 0
    cdef int64_t whole
    cdef double number
    if type(time) is str:
        text = PyUnicode_AsUTF8AndSize(time, &size)
        return text_time_ns(text, size)
    if PyLong_CheckExact(time):
        whole = PyLong_AsLongLongAndOverflow(time, &overflow)
        return -1 if overflow else number_ns(whole, 0)
    if type(time) is float:
        number = PyFloat_AS_DOUBLE(time)
        if not 0 <= number < 1e19:
            return -1
        if number >= 1e18:
            return number_ns(<int64_t>number, 0) if number < 9e18 else -1
        return number_ns(<int64_t>floor(number), number - floor(number))
    return -1


@cython.final
cdef class Columns:
    """Writes requests to the binary `file`, sorted.

    `window` is how many of the newest requests it holds back to sort them. Raises ``UnusableLog`` if the disk is full.

    *Complexity*: O(1) per request, O(log window) for one out of order. For one thread at a time.
    """

    def __cinit__(self, file, Py_ssize_t window=131_072):
        if window < 1:
            raise ValueError(f"a window to sort in holds at least 1 request, not {window}")
        self.file, self.window, self.keys = file, window, Keys()
        self.pending = <Request*>PyMem_Malloc(2 * window * sizeof(Request))
        self.scratch = <Request*>PyMem_Malloc(2 * window * sizeof(Request))
        if self.pending == NULL or self.scratch == NULL:
            raise MemoryError
        self.in_order = True

    def __dealloc__(self):
        PyMem_Free(self.pending)
        PyMem_Free(self.scratch)

    cdef int add(self, uint64_t time_ns, const char* key, Py_ssize_t size) except -1:
        cdef int64_t number = self.keys.number_of(key, size)
        self.reordered += time_ns < self.previous_ns
        self.previous_ns = time_ns
        if time_ns < self.written_ns:
            self.late += 1
            time_ns = self.written_ns
        if self.size and time_ns < self.pending[self.size - 1].time_ns:
            self.in_order = False
        self.pending[self.size] = Request(time_ns, <uint32_t>number)
        self.size += 1
        self.count += 1
        if self.size == 2 * self.window:
            self.write(self.window)
        return 0

    cdef int write(self, Py_ssize_t count) except -1:
        """Write the first `count` requests."""
        if count == 0:
            return 0
        if not self.in_order:
            sort_by_time(self.pending, self.scratch, self.size)
            self.in_order = True
        left = PyMemoryView_FromMemory(<char*>self.pending, count * sizeof(Request), PyBUF_READ)
        try:
            while left:
                left = left[self.file.write(left):]
        except OSError as error:
            raise UnusableLog(
                f"requests can't be kept in a temporary file, 12 bytes each: {error}: set TMPDIR to a folder with room"
            ) from None
        self.written_ns = self.pending[count - 1].time_ns
        self.size -= count
        memmove(self.pending, self.pending + count, self.size * sizeof(Request))
        return 0

    def extend(self, times, keys):
        """Add requests. A time is text (ISO 8601, or as in the combined format) or a number: see times.pxd; a key is
        text or an integer. Returns the indexes of requests without a time or a key, which it leaves out.
        """
        cdef Py_ssize_t size
        cdef const char* text = NULL
        cdef int64_t time_ns
        cdef list bad = []
        for index, (time, key) in enumerate(zip(times, keys, strict=True)):
            try:
                time_ns = time_of(time)
                if PyLong_CheckExact(key):
                    key = str(key)
                size = 0
                if type(key) is str:
                    text = PyUnicode_AsUTF8AndSize(key, &size)
            except UnicodeEncodeError:
                # A lone surrogate.
                time_ns = -1
            if time_ns >= 0 and size != 0:
                self.add(<uint64_t>time_ns, text, size)
            else:
                bad.append(index)
        return bad

    def finish(self):
        """Write what is held back. More may be added later, but not before it."""
        self.write(self.size)


@cython.final
cdef class CombinedLines:
    """Adds the requests of lines to `columns`; a key is the first word of its line.

    The lines are of the common or the combined log format:
    ``address ident user [10/Oct/2000:13:55:36 -0700] "GET / ..."``.
    """
    cdef Columns columns
    cdef readonly uint64_t lines         # added, also those that were unreadable or blank
    cdef char[COMBINED_TIME_SIZE] last_time
    cdef int64_t last_ns

    def __cinit__(self, Columns columns not None):
        self.columns = columns
        self.last_ns = -1

    cdef inline int64_t time_ns(self, const char* text) noexcept nogil:
        """As combined_time_ns; most lines have the time of the line before."""
        if self.last_ns < 0 or memcmp(text, self.last_time, COMBINED_TIME_SIZE) != 0:
            self.last_ns = combined_time_ns(text)
            memcpy(self.last_time, text, COMBINED_TIME_SIZE)
        return self.last_ns

    cdef bint add_line(self, const char* line, Py_ssize_t size) except -1:
        """Add a line's request. False if the line is none of the format."""
        cdef const char* end = line + size
        cdef const char* space = <const char*>memchr(line, c" ", size)
        cdef const char* bracket
        cdef int64_t time_ns
        if space == NULL or space == line:
            return False
        bracket = space
        while True:
            # A user's name may have brackets in it.
            bracket = <const char*>memchr(bracket, c"[", end - bracket)
            if bracket == NULL or end - bracket < COMBINED_TIME_SIZE + 2:
                return False
            bracket += 1
            if bracket[COMBINED_TIME_SIZE] == c"]":
                time_ns = self.time_ns(bracket)
                if time_ns >= 0:
                    self.columns.add(<uint64_t>time_ns, line, space - line)
                    return True

    def add(self, bytes block not None):
        """Add the lines of a block, which ends where a line ends. Returns for each unreadable line its number, from 1
        on, and its beginning. Blank lines are left out.
        """
        cdef const char* line = PyBytes_AS_STRING(block)
        cdef const char* end = line + PyBytes_GET_SIZE(block)
        cdef const char* line_end
        cdef Py_ssize_t size
        cdef list bad = []
        while line < end:
            line_end = <const char*>memchr(line, c"\n", end - line)
            if line_end == NULL:
                line_end = end
            size = line_end - line
            if size and line[size - 1] == c"\r":
                size -= 1
            self.lines += 1
            if size and not self.add_line(line, size):
                bad.append((self.lines, PyBytes_FromStringAndSize(line, min(size, SHOWN))))
            line = line_end + 1
        return bad
