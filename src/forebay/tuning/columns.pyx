"""Requests in the order of their times, in a file: 12 bytes for each, a time and the number of a key.

A log is nearly sorted, because servers write a line at a request's end and date it at its beginning. `Columns` holds
the newest requests back and sorts them, stably. A request that belongs before one that is already in the file gets the
time of that one, and is counted as late.
"""

cimport cython
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.math cimport floor
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memmove

from forebay.tuning.times cimport number_ns, text_time_ns

from forebay.tuning.problems import UnusableLog


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    int PyBUF_READ


cdef enum:
    RUN = 32                             # requests that are sorted by insertion

REQUEST_BYTES = sizeof(Request)


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
