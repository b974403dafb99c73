"""Reading times, without Python objects: nanoseconds since 1970, or -1 for what is no time from 1970 to 2043."""

from libc.stdint cimport int64_t
from libc.string cimport memcmp


cdef enum:
    COMBINED_TIME_SIZE = 26              # 10/Oct/2000:13:55:36 -0700
    NS = 1_000_000_000
    DAY_S = 86_400
    END_NS = 0x2000_0000_0000_0000       # of a store's clock, as forebay.clock.MAX_NS
    # From these numbers on, a time is in a smaller unit: those of the year 2286 in each.
    MILLISECONDS_FROM = 10_000_000_000
    MICROSECONDS_FROM = 10_000_000_000_000
    NANOSECONDS_FROM = 10_000_000_000_000_000


cdef inline int digits(const char* text, int count) noexcept nogil:
    """The number in `count` characters; -1 if one is no digit."""
    cdef int value = 0
    cdef int i
    for i in range(count):
        if not c"0" <= text[i] <= c"9":
            return -1
        value = 10 * value + text[i] - c"0"
    return value


cdef inline int month_of(const char* name) noexcept nogil:
    cdef const char* names = "JanFebMarAprMayJunJulAugSepOctNovDec"
    cdef int i
    for i in range(12):
        if memcmp(names + 3 * i, name, 3) == 0:
            return i + 1
    return -1


cdef inline int64_t seconds_of(
    int year, int month, int day, int hour, int minute, int second, int zone_s
) noexcept nogil:
    """Seconds since 1970; -1 if there is no such time. A leap second is the first second of the next minute."""
    cdef int month_days, months, era_year
    if not (1970 <= year <= 2100 and 1 <= month <= 12 and 0 <= hour < 24 and 0 <= minute < 60 and 0 <= second <= 60):
        return -1
    month_days = 30 + (month + month // 8) % 2
    if month == 2:
        month_days = 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    if not 1 <= day <= month_days:
        return -1
    # Years begin in March here, so that a leap day is the last of its year. 719,468 days lie between March of the year
    # 0 and 1970; 153 days are five months from March or August on.
    era_year = year - (month <= 2)
    months = (month + 9) % 12
    return DAY_S * (
        365 * <int64_t>era_year + era_year // 4 - era_year // 100 + era_year // 400 + (153 * months + 2) // 5 + day - 1
        - 719_468) + 3600 * hour + 60 * minute + second - zone_s


cdef inline int64_t in_range(int64_t seconds, int64_t rest_ns) noexcept nogil:
    return seconds * NS + rest_ns if 0 <= seconds < <int64_t>END_NS // NS else -1


cdef inline int zone_of(const char* text, Py_ssize_t size) noexcept nogil:
    """Seconds east of UTC, of ``+hh``, ``+hhmm`` or ``+hh:mm``; DAY_S if it is none."""
    cdef int hours, minutes = 0
    if size < 3 or (text[0] != c"+" and text[0] != c"-"):
        return DAY_S
    hours = digits(text + 1, 2)
    if size == 5:
        minutes = digits(text + 3, 2)
    elif size == 6 and text[3] == c":":
        minutes = digits(text + 4, 2)
    elif size != 3:
        return DAY_S
    if not (0 <= hours <= 15 and 0 <= minutes < 60):
        return DAY_S
    return (3600 * hours + 60 * minutes) * (-1 if text[0] == c"-" else 1)


cdef inline int64_t combined_time_ns(const char* text) noexcept nogil:
    """A time of the combined format; `text` has COMBINED_TIME_SIZE characters."""
    cdef int zone_s
    if not (text[2] == c"/" and text[6] == c"/" and text[11] == c":" and text[14] == c":" and text[17] == c":"
            and text[20] == c" "):
        return -1
    zone_s = zone_of(text + 21, 5)
    if zone_s == DAY_S:
        return -1
    return in_range(seconds_of(
        digits(text + 7, 4), month_of(text + 3), digits(text, 2), digits(text + 12, 2), digits(text + 15, 2),
        digits(text + 18, 2), zone_s), 0)


cdef inline int64_t fraction_ns(const char* text, Py_ssize_t size) noexcept nogil:
    """The nanoseconds in the digits behind the point, of which the first nine count. -1 if one is no digit."""
    cdef int64_t value = 0
    cdef Py_ssize_t i
    for i in range(max(size, 9)):
        if i < size and not c"0" <= text[i] <= c"9":
            return -1
        if i < 9:
            value = 10 * value + (text[i] - c"0" if i < size else 0)
    return value


cdef inline int64_t iso_time_ns(const char* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t end = 19
    cdef int64_t rest_ns = 0
    cdef int zone_s = 0
    if size < 19 or not (text[4] == c"-" and text[7] == c"-" and (text[10] == c"T" or text[10] == c" ")
                         and text[13] == c":" and text[16] == c":"):
        return -1
    if size > 20 and (text[19] == c"." or text[19] == c","):
        end = 20
        while end < size and c"0" <= text[end] <= c"9":
            end += 1
        rest_ns = fraction_ns(text + 20, end - 20)
    if end < size and text[end] == c" ":
        end += 1
    if end == size - 1 and text[end] == c"Z":
        end = size
    elif end < size:
        zone_s = zone_of(text + end, size - end)
        if zone_s == DAY_S:
            return -1
    return in_range(seconds_of(
        digits(text, 4), digits(text + 5, 2), digits(text + 8, 2), digits(text + 11, 2), digits(text + 14, 2),
        digits(text + 17, 2), zone_s), rest_ns)


cdef inline int64_t number_ns(int64_t whole, double fraction) noexcept nogil:
    """A number of seconds since 1970; from 10**10 on of milliseconds, from 10**13 of microseconds, from 10**16 of
    nanoseconds. No time from 1970 to 2043 can be two of these, except in the first four months of 1970.
    """
    cdef int64_t unit_ns = NS
    if whole >= NANOSECONDS_FROM:
        unit_ns = 1
    elif whole >= MICROSECONDS_FROM:
        unit_ns = 1000
    elif whole >= MILLISECONDS_FROM:
        unit_ns = 1_000_000
    if not 0 <= whole < <int64_t>END_NS // unit_ns:
        return -1
    # A double has no whole nanoseconds.
    return whole * unit_ns + (<int64_t>(fraction * (unit_ns // 1000) + 0.5) * 1000 if unit_ns >= 1000 else 0)


cdef inline int64_t number_time_ns(const char* text, Py_ssize_t size) noexcept nogil:
    cdef int64_t whole = 0, rest_ns
    cdef Py_ssize_t i = 0
    while i < size and i < 19 and c"0" <= text[i] <= c"9":
        whole = 10 * whole + text[i] - c"0"
        i += 1
    if i == 0 or (i < size and text[i] != c"."):
        return -1
    rest_ns = fraction_ns(text + i + 1, size - i - 1) if i + 1 < size else 0
    return -1 if rest_ns < 0 else number_ns(whole, rest_ns / 1e9)


cdef inline int64_t text_time_ns(const char* text, Py_ssize_t size) noexcept nogil:
    """A time of the combined format, of ISO 8601 (without a zone: UTC), or a number (see number_ns)."""
    cdef int64_t time_ns
    while size > 0 and text[0] == c" ":
        text += 1
        size -= 1
    while size > 0 and text[size - 1] == c" ":
        size -= 1
    time_ns = iso_time_ns(text, size)
    if time_ns < 0 and size == COMBINED_TIME_SIZE:
        time_ns = combined_time_ns(text)
    return number_time_ns(text, size) if time_ns < 0 else time_ns
