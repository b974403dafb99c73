# cython: freethreading_compatible = True
"""forebay in Cython: a loop over many requests without the GIL and without a Python object for any of them."""

from libc.stdint cimport int32_t
from libc.string cimport memchr

from forebay.c_api cimport FOREBAY_ALLOWED, forebay_api, forebay_import, forebay_limiter, forebay_thread

cdef const forebay_api* forebay = forebay_import()


cdef int32_t count_admitted(
    forebay_thread* thread, const char* text, size_t size, Py_ssize_t* admitted
) noexcept nogil:
    cdef const char* end = text + size
    cdef const char* line_end
    cdef const char* word_end
    cdef int32_t status
    while text < end:
        line_end = <const char*>memchr(text, b"\n", end - text)
        if line_end == NULL:
            line_end = end
        word_end = <const char*>memchr(text, b" ", line_end - text)
        if word_end == NULL:
            word_end = line_end
        status = forebay.allow(thread, text, word_end - text)
        if status < 0:
            return status
        admitted[0] += status == FOREBAY_ALLOWED
        text = line_end + 1
    return 0


def admitted(limiter, bytes log not None):
    """How many lines of `log` the limiter admits. The first word of a line is its key."""
    cdef forebay_limiter* opened
    cdef forebay_thread* thread
    cdef const char* text = log
    cdef size_t size = len(log)
    cdef Py_ssize_t lines = 0
    cdef int32_t status = forebay.limiter_open(<void*>limiter, &opened)
    if status == 0:
        with nogil:
            status = forebay.attach(opened, &thread)
            if status == 0:
                status = count_admitted(thread, text, size, &lines)
                forebay.detach(thread)
            forebay.limiter_close(opened)
    if status < 0:
        raise ValueError(forebay.message(status).decode())
    return lines
