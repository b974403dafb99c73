"""Limits for the size of a server's replies, checked before redis-py's parsers read them.

The parsers trust the lengths that a reply declares. hiredis allocates a list of the declared length before the first
element arrives: eleven bytes can take all memory, and minutes in which no deadline is checked. The parser in Python
follows nested lists by recursion. This module reads the declared lengths of RESP2 and RESP3 and refuses larger ones.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memchr

from redis.exceptions import ConnectionError as RedisConnectionError

cdef enum:
    DEEPEST = 16                 # nested lists; the reply to COMMAND, which cluster clients send, has 8 levels
    # Of one reply, in all its lists. The longest reply of a script is that of an AllOf of 16 limiters, 82 elements. The
    # handshake's has some 10 for each of the server's modules.
    MOST_ELEMENTS = 1 << 10
    MOST_BYTES = 1 << 16
    # A cluster client also reads the slots: all 16,384 apart, at 2 nodes with host names each, are 278,528.
    MOST_CLUSTER_ELEMENTS = 1 << 19
    MOST_CLUSTER_BYTES = 1 << 24
    MOST_DIGITS = 18
    MOST_PUSHES = 100            # messages that are no reply, before one: redis-py reads each by a recursion

cdef enum Reading:
    KIND                         # the first byte of an element
    LENGTH                       # digits, and what ends them
    LINE                         # anything up to a carriage return and a line feed
    TEXT                         # as many bytes as were declared


@cython.final
cdef class ReplySizes:
    """The sizes of one connection's replies. Pass all received bytes to ``take`` before a parser reads them.

    With `of_cluster`, replies may be as large as those to a cluster's client, which reads the table of slots.

    ``take`` raises redis-py's ``ConnectionError`` if a reply is larger than any reply to a limiter, or isn't RESP.
    O(bytes). *Threads*: one at a time.
    """

    cdef Reading reading
    cdef Py_ssize_t[DEEPEST] open_lists      # for each open list, its elements that are still to come
    cdef Py_ssize_t depth, element_count, byte_count, text_left, length, most_elements, most_bytes
    cdef int digit_count, push_count
    cdef bint is_negative, was_return
    cdef unsigned char kind

    def __cinit__(self, *, bint of_cluster=False):
        self.reading = KIND
        self.most_elements = MOST_CLUSTER_ELEMENTS if of_cluster else MOST_ELEMENTS
        self.most_bytes = MOST_CLUSTER_BYTES if of_cluster else MOST_BYTES

    def take(self, received, Py_ssize_t size):
        """Check the first `size` bytes of `received`."""
        cdef Py_buffer view
        PyObject_GetBuffer(received, &view, PyBUF_SIMPLE)
        try:
            self.follow(<const unsigned char*>view.buf, min(size, view.len))
        finally:
            PyBuffer_Release(&view)

    cdef int follow(self, const unsigned char* at, Py_ssize_t size) except -1:
        cdef const unsigned char* end = at + size
        cdef const unsigned char* found
        cdef Py_ssize_t step
        while at < end:
            if self.reading == TEXT:
                step = min(self.text_left, end - at)
                self.text_left -= step
                self.count_bytes(step)
                at += step
                if self.text_left == 0:
                    self.end_element()
            elif self.reading == LINE:
                if self.was_return and at[0] == 10:
                    self.count_bytes(1)
                    at += 1
                    self.end_element()
                    continue
                found = <const unsigned char*>memchr(at, 13, end - at)
                step = (end if found == NULL else found + 1) - at
                self.was_return = found != NULL
                self.count_bytes(step)
                at += step
            else:
                self.count_bytes(1)
                if self.reading == KIND:
                    self.begin_element(at[0])
                else:
                    self.read_length(at[0])
                at += 1
        return 0

    cdef int count_bytes(self, Py_ssize_t count) except -1:
        self.byte_count += count
        if self.byte_count > self.most_bytes:
            raise refused(f"more than {self.most_bytes} bytes")
        return 0

    cdef int begin_element(self, unsigned char kind) except -1:
        self.kind = kind
        if self.depth == 0:
            self.push_count = self.push_count + 1 if kind == c">" else 0
            if self.push_count > MOST_PUSHES:
                raise refused(f"more than {MOST_PUSHES} push messages before it")
        if kind in (c"*", c"$", c"%", c"~", c">", c"=", c"!"):
            self.reading = LENGTH
            self.length = self.digit_count = 0
            self.is_negative = self.was_return = False
        elif kind in (c":", c"+", c"-", c"_", c"#", c",", c"("):
            self.reading = LINE
            self.was_return = False
        else:
            raise refused(f"an element that begins with byte {kind}")
        return 0

    cdef int read_length(self, unsigned char byte) except -1:
        if self.was_return:
            if byte != 10 or self.digit_count == 0:
                raise refused("a length that isn't one")
            return self.end_length()
        if 48 <= byte <= 57 and self.digit_count < MOST_DIGITS:
            self.length = 10 * self.length + byte - 48
            self.digit_count += 1
        elif byte == 45 and self.digit_count == 0 and not self.is_negative:
            self.is_negative = True
        elif byte == 13:
            self.was_return = True
        else:
            raise refused("a length that isn't one")
        return 0

    cdef int end_length(self) except -1:
        if self.is_negative:
            # A null in the place of a text or a list.
            if self.length != 1:
                raise refused(f"a length of -{self.length}")
            return self.end_element()
        if self.kind in (c"$", c"=", c"!"):
            if self.length > self.most_bytes:
                raise refused(f"a text of {self.length} bytes")
            self.reading = TEXT
            self.text_left = self.length + 2
            return 0
        if self.kind == c"%":  # keys and values
            self.length *= 2
        self.element_count += self.length
        if self.element_count > self.most_elements:
            raise refused(f"{self.element_count} elements")
        if self.length == 0:
            return self.end_element()
        if self.depth == DEEPEST:
            raise refused(f"lists in lists, {DEEPEST} deep and deeper")
        self.open_lists[self.depth] = self.length
        self.depth += 1
        self.reading = KIND
        return 0

    cdef int end_element(self) except -1:
        self.reading = KIND
        while self.depth:
            self.open_lists[self.depth - 1] -= 1
            if self.open_lists[self.depth - 1]:
                return 0
            # The element was the last of its list. The list is an element of the list around it.
            self.depth -= 1
        self.element_count = self.byte_count = 0
        return 0


cdef object refused(str what):
    return RedisConnectionError(f"the server's answer has {what}, which no answer to a limiter has")
