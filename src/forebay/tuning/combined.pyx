"""Lines of the common and the combined log format: ``address ident user [10/Oct/2000:13:55:36 -0700] "GET / ..."``."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

from forebay.tuning.columns cimport Columns
from forebay.tuning.times cimport COMBINED_TIME_SIZE, combined_time_ns


cdef enum:
    SHOWN = 100                          # bytes of an unreadable line that are kept


@cython.final
cdef class CombinedLines:
    """Adds the requests of lines to `columns`; a key is the first word of its line."""
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
