"""Reading times: nanoseconds since 1970, or -1 for what is no time from 1970 to 2043."""

from libc.stdint cimport int64_t

cdef enum:
    COMBINED_TIME_SIZE = 26      # 10/Oct/2000:13:55:36 -0700


# A time of the combined format; `text` has COMBINED_TIME_SIZE characters.
cdef int64_t combined_time_ns(const char* text) noexcept nogil

# A time of the combined format, of ISO 8601 (without a zone: UTC), or a number (see number_ns).
cdef int64_t text_time_ns(const char* text, Py_ssize_t size) noexcept nogil

# A number of seconds since 1970; from 10**10 on of milliseconds, from 10**13 of microseconds, from 10**16 of
# nanoseconds. No time from 1970 to 2043 can be two of these, except in the first four months of 1970.
cdef int64_t number_ns(int64_t whole, double fraction) noexcept nogil
