"""Fixed and sliding windows: the count, the window that it belongs to and its expiry in one cell.

One CAS decides, so no process adds to a window that another process has already left: the state would have changed,
and the CAS fails. A process whose clock reading lies in an earlier window than the state counts in the state's window:
time never goes back (I-7).

Fixed window
------------
The time in the state is the window's end, the low bits are the count.

The windows of two keys may end at different times: windows that begin with a key's first request, and staggered ones.
Their states are of KIND_USED: below the count they have its `level_of`, by which eviction compares keys.

A window that begins with a key's first request is also exactly a period long, although only the state holds its end,
rounded up. Such a window begins at a *step*. Steps are further apart than the rounding of times, and each period has
the same steps, so the window also ends at a step: the last one that isn't later than the time in the state. A window
begins at the last step before the first request, less than 2.5 quanta before it.

Windows by the calendar begin and end at *edges*, which Python computes. A limiter has the edges of the current window
and of those that follow in an array that never changes. `FixedWindow.attach_process` runs before each of its decisions.
It makes the next array when half of the windows are over, or when the clock was set back. So a decision finds the end
of its window, even if its process is stopped for as many windows as are left. A thread may read an array that another
thread has replaced, so all arrays stay with the limiter. They are not shared: every process computes the same ones.

Sliding window
--------------
The estimate for the last period is the current window's count, plus the previous window's count times the share of
that window that the last period still covers. The source is Cloudflare, "How we built rate limiting capable of scaling
to millions of domains", 2017. The previous window's part is rounded up or down; the state has the same format with
either. The state holds both counts; its time is the end of the window *after* the current one, when both counts expire.
If two whole counts don't fit, the previous one is kept in units of ``2**previous_shift``, rounded up.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.conversion cimport KEEP_SHARE, KEEP_USED, Keep, scaled
from forebay.core.algorithms.counts cimport (
    CALENDAR_WINDOWS, count_time, last_step_ns, low_mask, low_of, most_rounded_ns, steps_for, time_of,
)
from forebay.core.cell_limiter cimport CellLimiter, allow_by
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams, copy_of
from forebay.core.table.native cimport (
    FOREBAY_KIND_COUNT, FOREBAY_KIND_USED, ForebayCell, ForebayLine, highest_bit, multiply_divide_down,
    multiply_divide_up,
)
from forebay.core.table.table cimport MOST_USED, Decide, Events, Next, Verdict, no_events, table_amend, table_now

from array import array

from forebay.calendars import calendar_of
from forebay.core.arguments import kept
from forebay.core.limiter_arguments import check_align, fixed_bits, rounds_up, sliding_bits
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import as_rate
from forebay.segment import layout


cdef bint fixed_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = fixed_counted(charge.params, tag, state, now_ns)
    next.state = counted.time | (counted.count + charge.amount)
    return counted.count <= charge.room


cdef bint fixed_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = fixed_counted(charge.params, tag, state, now_ns)
    if was_charged_before(charge, state):
        return False
    next.state = counted.time | (counted.count - charge.amount) if counted.count > charge.amount else 0
    return counted.count != 0


cdef inline uint64_t level_of(uint64_t count) noexcept nogil:
    """How many bits the count has, up to 7. It says nothing of the limit, which the state doesn't know."""
    return min(<uint64_t>MOST_USED, <uint64_t>highest_bit(count) + 1 if count != 0 else 0)


cdef inline uint64_t used_state(const LimitParams* params, uint64_t time, uint64_t count) noexcept nogil:
    return time | count << params.used_bits | (level_of(count) & low_mask(params.used_bits))


cdef inline Counted staggered_counted(
    const LimitParams* params, uint64_t tag, uint64_t state, uint64_t now_ns
) noexcept nogil:
    cdef Counted counted = fixed_counted(params, tag, state, now_ns)
    counted.count >>= params.used_bits
    return counted


cdef bint staggered_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = staggered_counted(charge.params, tag, state, now_ns)
    next.state = used_state(charge.params, counted.time, counted.count + charge.amount)
    return counted.count <= charge.room


cdef bint staggered_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = staggered_counted(charge.params, tag, state, now_ns)
    if was_charged_before(charge, state):
        return False
    next.state = 0
    if counted.count > charge.amount:
        next.state = used_state(charge.params, counted.time, counted.count - charge.amount)
    return counted.count != 0


cdef inline Counted first_counted(const LimitParams* params, uint64_t state, uint64_t now_ns) noexcept nogil:
    """The count of a window that began with the key's first request."""
    cdef Counted counted
    cdef uint64_t rounded_ns = time_of(state, params.low_bits)
    counted.previous = 0
    # The time in the state is less than a quantum later than the window's end: until then no division is needed.
    if rounded_ns > now_ns and (
        rounded_ns - now_ns > most_rounded_ns(params.low_bits) or last_step_ns(params, rounded_ns) > now_ns
    ):
        counted.time = state & ~low_mask(params.low_bits)
        counted.end_ns = last_step_ns(params, rounded_ns)
        counted.count = low_of(state, params.low_bits) >> params.used_bits
    else:
        counted.end_ns = last_step_ns(params, now_ns) + params.period_ns
        counted.time = count_time(counted.end_ns, params.low_bits)
        counted.count = 0
    counted.left_ns = counted.end_ns - now_ns
    return counted


cdef bint first_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = first_counted(charge.params, state, now_ns)
    next.state = used_state(charge.params, counted.time, counted.count + charge.amount)
    return counted.count <= charge.room


cdef bint first_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = first_counted(charge.params, state, now_ns)
    if was_charged_before(charge, state):
        return False
    # The window stays, even with a count of 0: earlier decisions have reported its end.
    next.state = used_state(charge.params, counted.time, counted.count - min(counted.count, charge.amount))
    return counted.count != 0


cdef bint sliding_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef Counted counted = sliding_counted(params, state, now_ns)
    if not has_room(params, &counted, charge.room):
        return False
    counted.count += charge.amount
    next.state = sliding_state(params, &counted)
    return True


cdef bint sliding_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = sliding_counted(charge.params, state, now_ns)
    cdef uint64_t from_count = min(counted.count, charge.amount)
    cdef uint64_t from_previous = min(counted.previous, (charge.amount - from_count) >> charge.params.previous_shift)
    if was_charged_before(charge, state) or (from_count == 0 and from_previous == 0):
        return False
    counted.count -= from_count
    counted.previous -= from_previous
    next.state = sliding_state(charge.params, &counted)
    return True


cdef struct Conversion:
    const LimitParams* params
    uint64_t old_limit
    uint64_t new_limit
    uint64_t most                # that the state can count
    Keep keep


cdef inline uint64_t converted(const Conversion* conversion, uint64_t used) noexcept nogil:
    """How much of the new limit a key has used that has used so much of the old one, which is not 0."""
    if conversion.keep == KEEP_USED:
        return used
    if conversion.keep == KEEP_SHARE:
        return scaled(used, conversion.new_limit, conversion.old_limit, conversion.most)
    return conversion.new_limit - min(conversion.old_limit - min(used, conversion.old_limit), conversion.new_limit)


cdef bint fixed_convert(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Conversion* conversion = <const Conversion*>parameters
    cdef Counted counted = fixed_counted(conversion.params, tag, state, now_ns)
    next.state = counted.time | converted(conversion, counted.count)
    return counted.count != 0


cdef bint staggered_convert(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Conversion* conversion = <const Conversion*>parameters
    cdef Counted counted = staggered_counted(conversion.params, tag, state, now_ns)
    next.state = used_state(conversion.params, counted.time, converted(conversion, counted.count))
    return counted.count != 0


cdef bint first_convert(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Conversion* conversion = <const Conversion*>parameters
    cdef Counted counted = first_counted(conversion.params, state, now_ns)
    next.state = used_state(conversion.params, counted.time, converted(conversion, counted.count))
    return counted.count != 0


cdef bint sliding_convert(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Conversion* conversion = <const Conversion*>parameters
    cdef const LimitParams* params = conversion.params
    cdef Counted counted = sliding_counted(params, state, now_ns)
    cdef uint64_t part = weighted(params, counted.previous, counted.left_ns)
    cdef uint64_t used, whole
    if counted.count + part == 0:
        return False
    if conversion.keep == KEEP_SHARE:
        counted.count = converted(conversion, counted.count)
        counted.previous = scaled(
            counted.previous, conversion.new_limit, conversion.old_limit, low_mask(params.previous_bits))
    else:
        used = converted(conversion, counted.count + part)
        counted.count = used - min(part, used)
        if part > used:
            # The most of the previous window whose part now is `used`.
            if params.rounds_up:
                whole = multiply_divide_down(used, params.period_ns, counted.left_ns)
            else:
                whole = multiply_divide_up(used + 1, params.period_ns, counted.left_ns) - 1
            counted.previous = min(counted.previous, (whole + low_mask(params.previous_shift)) >> params.previous_shift)
    next.state = sliding_state(params, &counted)
    return True


cdef class WindowLimiter(CellLimiter):
    """Base class of the limiters that count in windows; not used by itself."""

    cdef readonly object rate
    cdef Decide convert_by

    cdef int count_by(self, object rate, object period_ns) except -1:
        self.rate = rate
        self.kind = FOREBAY_KIND_COUNT
        self.params.limit = self.params.rate_limit = rate.limit
        self.params.period_ns = period_ns
        self.params.phase_ns = self.segment.wall_epoch_ns % self.params.period_ns
        return 0

    cdef object rate_of_call(self, object rate):
        """The rate that was given for one call, checked."""
        rate = as_rate(rate)
        if rate.period_ns != self.params.period_ns:
            raise InvalidLimiter(
                f"{self!r} counts in windows of its own period, so the rate for one call must have the same, which "
                f"{rate} has not")
        return rate

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        params[0] = copy_of(&self.params)
        if burst is not None:
            raise InvalidLimiter(f"{self!r} has no burst")
        if rate is None:
            return 0
        rate = self.rate_of_call(rate)
        most = self.most()
        if rate.limit > most:
            raise InvalidLimiter(
                f"{self!r} can count up to {most}, not to {rate.limit}: make it with the largest of its rates")
        params.limit = params.rate_limit = rate.limit
        return 0

    cdef uint64_t most(self) noexcept:
        """The largest limit that fits into its states."""
        return 0

    def convert(self, key, old_rate, *, rate=None, keep="used"):
        """Carry what `key` has used of its window over to another limit. Returns how many permits remain under it.

        A state is what was used, and says nothing of the limit. So without this, a key keeps what it has ``"used"``.
        The other values of `keep` make something else stay the same: ``"permits"``, the number that remain, at most the
        new limit; ``"share"``, their share of the limit, rounded against the key. Call it once for each key that moves.
        The new limit is the limiter's own, or that of `rate`, as in ``hit``. Both rates have the limiter's period. A
        key that has used nothing is as a new one: it has the new limit. To give a key the whole limit, ``reset`` it. A
        ``refund`` or ``cancel`` of an earlier request gives back as many permits as it was charged.

        In a sliding window, ``"share"`` converts both counts. With ``"permits"``, the estimate of now leaves as many
        permits as before, by another count of the current window, or of the previous one if that alone is too much.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``. Threads and processes may charge
        the key meanwhile: each charge counts by the limit before or after. O(1), one CAS.
        """
        cdef Conversion conversion
        cdef LimitParams old
        cdef LimitParams new
        cdef Events events
        cdef uint64_t tag = self.tag_of(key)
        conversion.keep = <Keep><int>kept(keep)
        if old_rate is None:
            as_rate(old_rate)  # which raises
        self.params_for_call(old_rate, None, &old)
        self.params_for_call(rate, None, &new)
        conversion.params = &new
        conversion.old_limit = old.limit
        conversion.new_limit = new.limit
        conversion.most = self.most()
        self.ensure_attached()
        events = no_events()
        table_amend(&self.table, tag, self.convert_by, &conversion, &events)
        self.count_events(&events)
        return self.peek(key, rate=rate).remaining


@cython.final
cdef class FixedWindow(WindowLimiter):
    """At most as many permits in each window as the rate allows per period.

    ``FixedWindow(store, "login", "5/minute")``. Each window is exactly a period long. Windows begin at multiples of the
    period by the wall clock. With ``align="first"`` a key's window begins with its first request after the last window
    ended (up to 10 ns earlier for each permit of the limit, so that the state fits in one cell). With
    ``align="stagger"`` each key's windows begin at an offset of its own, so that not all keys start afresh at once.

    ``FixedWindow(store, "quota", "1000/month", align="calendar", timezone="Europe/Berlin")`` has the days, weeks (from
    Monday), months or years of the calendar in that time zone, by the rules of Python's ``zoneinfo``. Where clocks
    change, a day has 23 or 25 hours. ``rate`` is then per the longest usual window: 1, 7, 31 or 366 days. A decision
    takes some nanoseconds longer, as it first looks whether the edges of its windows are known. Other windows have no
    `timezone`.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: never more than the limit in a window; so up to twice the limit within one period that overlaps two
    windows.
    """

    cdef readonly str align
    cdef readonly object timezone
    cdef object calendar                     # of windows by the calendar
    cdef dict edge_arrays                    # by their first edge

    def __cinit__(self, store, name, rate, align="clock", *, timezone=None):
        cdef bytes windows
        check_align(align, timezone)
        if align == "calendar":
            self.calendar, limit = calendar_of(rate, timezone)
            self.timezone = timezone
            self.edge_arrays = {}
            self.count_by(self.calendar.rate(limit), self.calendar.shortest_ns)
            self.follow_calendar(self.segment.now_ns())
            windows = b"%s %s" % (self.calendar.unit.encode(), timezone.encode())
        else:
            rate = as_rate(rate)
            self.count_by(rate, rate.period_ns)
            windows = b"%d" % self.params.period_ns
        if align == "first":
            self.take, self.give_back, self.describe = first_take, first_give_back, describe_first
            self.convert_by = first_convert
        elif align == "stagger":
            self.take, self.give_back, self.describe = staggered_take, staggered_give_back, describe_staggered
            self.convert_by = staggered_convert
            self.params.staggered = True
        else:
            self.take, self.give_back, self.describe = fixed_take, fixed_give_back, describe_fixed
            self.convert_by = fixed_convert
        self.align = align
        self.params.low_bits, self.params.used_bits = fixed_bits(self.params.limit, self.params.period_ns, align)
        if self.params.used_bits:
            self.kind = FOREBAY_KIND_USED
        encoding = b"fixed %s %s %d" % (align.encode(), windows, self.params.low_bits)
        if align == "first":
            self.params.steps = steps_for(self.params.period_ns, self.params.low_bits)
            encoding += b" %d" % self.params.steps
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_FIXED_WINDOW, encoding, self.params.limit)

    @cython.binding(False)
    def __init__(self, store, name, rate, align="clock", *, timezone=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        align = "" if self.align == "clock" else f" align={self.align!r}"
        if self.calendar is None:
            return f"<FixedWindow {self.name!r} {self.rate}{align}>"
        return (
            f"<FixedWindow {self.name!r} {self.params.limit} per {self.calendar.unit}{align} "
            f"timezone={self.timezone!r}>")

    cdef ForebayLine* attach_process(self) except NULL:
        cdef ForebayLine* line = WindowLimiter.attach_process(self)
        if self.params.edges != NULL:
            # So that each decision comes here.
            line.attached_generation = 0
            self.renew_edges()
        return line

    cdef int renew_edges(self) except -1:
        """Take the edges of other windows once half of those that are known are over, or the clock was set back."""
        cdef uint64_t now_ns = table_now(&self.table)
        if <int64_t>now_ns < self.params.edges[0] or <int64_t>now_ns >= self.params.edges[CALENDAR_WINDOWS // 2]:
            self.follow_calendar(now_ns)
        return 0

    cdef int follow_calendar(self, uint64_t now_ns) except -1:
        """Take the edges of the windows from now on."""
        cdef bytes packed
        wall_ns = int(self.segment.wall_epoch_ns)
        edges_ns = self.calendar.edges_ns(now_ns + wall_ns, CALENDAR_WINDOWS)
        packed = array("q", [edge_ns - wall_ns for edge_ns in edges_ns]).tobytes()
        packed = self.edge_arrays.setdefault(edges_ns[0], packed)
        self.params.edges = <const int64_t*>PyBytes_AS_STRING(packed)
        return 0

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if self.calendar is not None:
            # A copy of old edges would charge the request in a window that is over.
            if self.segment.follows_python:
                self.segment.follow_python()
            self.renew_edges()
        return WindowLimiter.params_for_call(self, rate, burst, params)

    cdef object rate_of_call(self, object rate):
        if self.calendar is None:
            return WindowLimiter.rate_of_call(self, rate)
        calendar, limit = calendar_of(rate, self.timezone)
        if calendar.unit != self.calendar.unit:
            raise InvalidLimiter(
                f"{self!r} counts in windows of its own unit, so the rate for one call must have the same, which "
                f"{short_repr(rate)} has not")
        return calendar.rate(limit)

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        if self.take == fixed_take:
            return allow_by(self, key, fixed_take, NULL)
        if self.take == first_take:
            return allow_by(self, key, first_take, NULL)
        return allow_by(self, key, staggered_take, NULL)

    cdef uint64_t most(self) noexcept:
        return low_mask(self.params.low_bits - self.params.used_bits)


cdef inline void describe_count(
    const Charge* charge, const Counted* counted, bint allowed, Outlook* outlook
) noexcept nogil:
    outlook.available = charge.params.limit - counted.count if counted.count < charge.params.limit else 0
    outlook.retry_after_ns = 0 if allowed else counted.left_ns
    outlook.reset_after_ns = counted.left_ns if counted.count else 0


cdef void describe_fixed(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef Counted counted = fixed_counted(charge.params, verdict.tag, verdict.state, verdict.now_ns)
    describe_count(charge, &counted, allowed, outlook)


cdef void describe_first(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef Counted counted = first_counted(charge.params, verdict.state, verdict.now_ns)
    describe_count(charge, &counted, allowed, outlook)


cdef void describe_staggered(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef Counted counted = staggered_counted(charge.params, verdict.tag, verdict.state, verdict.now_ns)
    describe_count(charge, &counted, allowed, outlook)


@cython.final
cdef class SlidingWindow(WindowLimiter):
    """At most as many permits as the rate allows, in an estimate of the period up to now.

    ``SlidingWindow(store, "api", "1000/hour")``. A window begins at a multiple of the period by the wall clock. The
    estimate is the current window's count, plus the previous window's count times the share of that window that the
    last period still covers. So the previous window's requests count as if they had come evenly. `rounding` (``"up"``
    or ``"down"``) rounds their part; the default is up for limits to 5, down for larger ones. Limiters of one name and
    rate share their state, however they round. A rate for one call is rounded like the limiter's own.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: never more than the limit in a window by the clock, and never an estimate above it. So any period
    of which the time t lies behind a window's edge has at most ``limit * (1 + t / period)`` permits; rounded down, one
    more. Rounded up, a key that always requests more gets up to one permit less in each period. Both counts are exact
    as long as the limit squared is below about the period in ns (250,000 a minute, 30,000 a second). Above that the
    previous count is rounded up, by less than a seventh of the limit, so slightly fewer permits are allowed than by the
    formula. A limit up to a sixteenth of the period in ns is accepted (62 million a second), one above an eighth is
    refused.
    """

    def __cinit__(self, store, name, rate, *, rounding=None):
        cdef bytes encoding
        rate = as_rate(rate)
        self.count_by(rate, rate.period_ns)
        self.take = sliding_take
        self.give_back = sliding_give_back
        self.convert_by = sliding_convert
        self.describe = describe_sliding
        self.params.rounds_up = rounds_up(rounding, self.params.limit)
        self.params.low_bits, self.params.previous_bits, self.params.previous_shift = sliding_bits(rate)
        self.charge_for(1, &self.params, &self.unit)
        encoding = b"sliding %d %d %d" % (self.params.period_ns, self.params.low_bits, self.params.previous_bits)
        if self.params.previous_shift:
            encoding += b" %d" % self.params.previous_shift
        self.register(layout.ALGORITHM_SLIDING_WINDOW, encoding, self.params.limit)

    @cython.binding(False)
    def __init__(self, store, name, rate, *, rounding=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    @property
    def rounding(self):
        return "up" if self.params.rounds_up else "down"

    def __repr__(self):
        rounding = "" if self.params.rounds_up == rounds_up(None, self.params.limit) else f" rounding={self.rounding!r}"
        return f"<SlidingWindow {self.name!r} {self.rate}{rounding}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, sliding_take, NULL)

    cdef uint64_t most(self) noexcept:
        cdef int count_bits = self.params.low_bits - self.params.previous_bits
        # A previous count that is rounded up must not overflow its bits.
        return low_mask(count_bits) if self.params.previous_shift == 0 else self.params.limit


cdef void describe_sliding(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef Counted counted = sliding_counted(charge.params, verdict.state, verdict.now_ns)
    describe_counts(charge, &counted, verdict.now_ns, allowed, outlook)


cdef void describe_counts(
    const Charge* charge, const Counted* counted, uint64_t now_ns, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef const LimitParams* params = charge.params
    # If the state's window is later than ours, the time before that window adds to the wait.
    cdef uint64_t to_end_ns = counted.end_ns - now_ns
    cdef uint64_t estimate = counted.count + weighted(params, counted.previous, counted.left_ns)
    outlook.available = params.limit - estimate if estimate < params.limit else 0
    outlook.retry_after_ns = 0 if allowed else until_estimate(params, counted, to_end_ns, charge.room)
    outlook.reset_after_ns = 0 if estimate == 0 else until_estimate(params, counted, to_end_ns, 0)


cdef uint64_t until_estimate(
    const LimitParams* params, const Counted* counted, uint64_t to_end_ns, uint64_t most
) noexcept nogil:
    """The time until the estimate is at most `most`, if nothing else is counted. The window ends after `to_end_ns`."""
    cdef uint64_t left_ns, shifted
    if counted.count <= most:
        left_ns = left_for(params, counted.previous, most - counted.count)
        if left_ns != 0:
            return to_end_ns - min(left_ns, to_end_ns)
        # Only after the window's end. Then its count is the previous one, which may be rounded above `most`.
    shifted = (counted.count + low_mask(params.previous_shift)) >> params.previous_shift
    return to_end_ns + params.period_ns - left_for(params, shifted, most)


cdef uint64_t left_for(const LimitParams* params, uint64_t previous, uint64_t most) noexcept nogil:
    """The most time that may be left of a window for the previous count's part to be at most `most`."""
    cdef uint64_t whole = previous << params.previous_shift
    if whole <= most:
        return params.period_ns
    if params.rounds_up:
        return multiply_divide_down(most, params.period_ns, whole)
    return multiply_divide_up(most + 1, params.period_ns, whole) - 1
