"""Token bucket: with continuous refill (GCRA, see gcra.pxd), perhaps with fewer permits for new keys (see
initial_bucket.pxd), or with refill in intervals (see interval_bucket.pxd)."""

cimport cython
from cpython.object cimport Py_TPFLAGS_BASETYPE, PyObject, PyTypeObject, newfunc
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport uint64_t

from forebay.core.algorithms.conversion cimport KEEP_SHARE, KEEP_USED, Keep, scaled
from forebay.core.algorithms.counts cimport count_bits_for, window_end_ns
from forebay.core.algorithms.gcra cimport GcraLimiter, add_permits, gcra_add, gcra_take
from forebay.core.algorithms.initial_bucket cimport initial_give_back, initial_take, is_known, state_now
from forebay.core.algorithms.interval_bucket cimport (
    boundaries_for, deficit_of, delay_of, interval_give_back, interval_take,
)
from forebay.core.batch cimport Batch, decide_batch_by
from forebay.core.cell_limiter cimport allow_by, count_charge, whole_cost
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams, copy_of
from forebay.core.table.native cimport FOREBAY_KIND_COUNT, ForebayCell, multiply_divide_down, multiply_divide_up
from forebay.core.table.table cimport TIME_BITS, Events, Next, Verdict, no_events, table_amend

from forebay.core.arguments import kept, permits_of
from forebay.core.limiter_arguments import check_refill, interval_refill_ns, interval_start_ns
from forebay.errors import CostExceedsLimit, InvalidLimiter
from forebay.rate import as_rate
from forebay.segment import layout


cdef class TokenBucket(GcraLimiter):
    """Up to `burst` permits at once, refilled at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. `name` identifies the limiter in its store. With
    ``refill="continuous"`` permits come back one by one. With ``refill="interval"`` the permits of a whole period come
    back at once, at the start of each period; permits above the burst are lost. Periods start at multiples of their
    length by the wall clock; with ``start=datetime(2026, 1, 1, 6, tzinfo=UTC)``, whole periods before and after that.

    With ``initial=5`` a new key has 5 permits, and the others come at the rate from its first request on. A key is new
    if the store has never seen it, or has forgotten it: after a reset, an eviction, or when its bucket has been full
    for as long as a new key's takes to fill. No request may cost more than `initial`, so that each is allowed in time.
    ``reset_after`` is the time until the bucket is full. Such a bucket shares no state with one of another `initial`,
    and takes no `rate` for one call.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: in any span of time t, at most ``burst + t * rate`` permits, rounded up, over all processes. With
    intervals, at most ``burst``, and the rate's limit for each start of a period in the span. Algorithm: GCRA, ITU-T
    Recommendation I.371.
    """

    cdef readonly uint64_t burst
    cdef readonly str refill
    cdef readonly object initial
    cdef readonly object start

    def __cinit__(self, store, name, rate, burst=None, refill="continuous", *, initial=None, start=None):
        self.rate = as_rate(rate)
        self.gcra_params(self.rate, self.rate.limit if burst is None else burst, "burst", &self.params)
        self.burst = self.params.limit
        check_refill(refill, initial, start, self.burst, name)
        self.refill = refill
        self.initial = initial
        self.start = start
        if refill == "continuous" and initial is None:
            self.params.may_exceed = True
            self.params.table = &self.table
            self.charge_for(1, &self.params, &self.unit)
            self.register(layout.ALGORITHM_TOKEN_BUCKET, b"", self.burst)

    @cython.binding(False)
    def __init__(self, store, name, rate, burst=None, refill="continuous", *, initial=None, start=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        refill = "" if self.refill == "continuous" else ", refill='interval'"
        initial = "" if self.initial is None else f", initial={self.initial}"
        start = "" if self.start is None else f", start={self.start.isoformat()!r}"
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}{refill}{initial}{start}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, gcra_take, NULL)

    def convert(self, key, old_rate, old_burst=None, *, rate=None, burst=None, keep="permits"):
        """Carry what `key` has used over to another limit. Returns how many permits remain under it.

        A state is the time until the bucket is full, and says nothing of the limit. So a key with 40 of 100 permits
        left has none when the burst becomes 20, until enough of the 60 others have come back. Call this once for each
        key that moves. The new limit is the limiter's own, or that of `rate` and `burst`, as in ``hit``.
        `keep` is what stays the same: ``"permits"``, the number that remain, at most the new burst; ``"share"``, their
        share of the burst; ``"used"``, the number that are missing. Parts of a permit are rounded against the key, and
        bookings stay booked. Cancel a booking before: afterwards, ``cancel`` gives back the time that its permits took
        by the old rate. A key whose bucket is full is as a new one: it has the new burst, and permits above the old one
        are above the new one. To give a key a full bucket, ``reset`` it.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``. Threads and processes may charge
        the key meanwhile: each charge counts by the limit before or after. O(1), one CAS.
        """
        cdef Conversion conversion
        cdef LimitParams old
        cdef LimitParams new
        cdef Events events
        cdef uint64_t tag = self.tag_of(key)
        conversion.keep = <Keep><int>kept(keep)
        self.params_for_call(as_rate(old_rate), old_burst, &old)
        self.params_for_call(rate, burst, &new)
        conversion.old = &old
        conversion.new = &new
        conversion.most_ahead_ns = self.most_ahead_ns
        self.ensure_attached()
        events = no_events()
        table_amend(&self.table, tag, gcra_convert, &conversion, &events)
        self.count_events(&events)
        return self.peek(key, rate=rate, burst=burst).remaining

    def add(self, key, permits, *, rate=None, burst=None):
        """Give `key` so many permits more, also above the burst. Returns how many it then has.

        As long as a key has more permits than the burst, none are refilled, and the store never evicts the key: its
        cell is free again when the key has used them or is ``reset``. ``refund`` never fills a bucket above its burst.
        One request still costs at most the burst. `rate` and `burst` are those of ``hit``. Permits above the burst are
        a number of permits: at any rate, a request takes as many as it costs. Parts of a permit are rounded against the
        key, when it comes to be above the burst.

        Raises ``InvalidCost`` if `permits` is no whole number of at least 0, or if the key would have more than
        281,474,976,710,655 above the burst; ``StoreFull`` if there is no room for a new key; and what ``peek`` raises.
        Then nothing was added. Only over a ``Store`` or Redis, and with continuous refill that starts full. O(1), one
        CAS: a process that is killed has added all or nothing, and permits that several add at once are all there.
        """
        cdef LimitParams params
        cdef uint64_t number = permits_of(permits, self.name)
        self.params_for_call(rate, burst, &params)
        if not params.may_exceed:
            raise InvalidLimiter(
                f"{self!r} can't have permits above its burst: a token bucket without initial= and with "
                "refill='continuous' can")
        if number == 0:
            return self.peek(key, 0, rate=rate, burst=burst).remaining
        return add_permits(self, key, number, &params, gcra_add)

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is None and burst is None:
            params[0] = copy_of(&self.params)
            return 0
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        rate = as_rate(rate)
        self.gcra_params(rate, rate.limit if burst is None else burst, "burst", params)
        self.share_due(params)
        params.may_exceed = True
        params.table = &self.table
        return 0


cdef struct Conversion:
    const LimitParams* old
    const LimitParams* new
    Keep keep
    uint64_t most_ahead_ns


cdef uint64_t converted_ns(const Conversion* conversion, uint64_t ahead_ns) noexcept nogil:
    """How far ahead of now a state becomes that was so far ahead."""
    cdef const LimitParams* old = conversion.old
    cdef const LimitParams* new = conversion.new
    cdef uint64_t most_ns = conversion.most_ahead_ns
    cdef uint64_t permits
    if conversion.keep == KEEP_SHARE:
        return scaled(ahead_ns, new.tolerance_ns, old.tolerance_ns, most_ns)
    if conversion.keep == KEEP_USED:
        permits = scaled(ahead_ns, old.rate_limit, old.period_ns, most_ns)
        return scaled(permits, new.period_ns, new.rate_limit, most_ns)
    if ahead_ns > old.tolerance_ns:
        # Booked ahead.
        permits = scaled(ahead_ns - old.tolerance_ns, old.rate_limit, old.period_ns, most_ns)
        return new.tolerance_ns + scaled(permits, new.period_ns, new.rate_limit, most_ns - new.tolerance_ns)
    permits = min(multiply_divide_down(old.tolerance_ns - ahead_ns, old.rate_limit, old.period_ns), new.limit)
    return new.tolerance_ns - min(multiply_divide_up(permits, new.period_ns, new.rate_limit), new.tolerance_ns)


cdef bint gcra_convert(
    ForebayCell* cell, uint64_t tag, uint64_t tat_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    # Permits above a burst stay as they are, above the new one.
    if tat_ns <= now_ns or tat_ns >> TIME_BITS != 0:
        return False
    next.state = now_ns + converted_ns(<const Conversion*>parameters, tat_ns - now_ns)
    return True


cdef void describe_initial(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef uint64_t ahead_ns = state_now(params, verdict.state, verdict.now_ns) - verdict.now_ns
    outlook.rate_limit = params.rate_limit
    outlook.rate_period_ns = params.period_ns
    outlook.available = params.tolerance_ns - ahead_ns if ahead_ns < params.tolerance_ns else 0
    outlook.retry_after_ns = 0 if allowed or ahead_ns <= charge.room else ahead_ns - charge.room
    outlook.reset_after_ns = ahead_ns - params.missing_ns if is_known(verdict.state, verdict.now_ns) else 0


@cython.final
cdef class InitialTokenBucket(TokenBucket):
    """A ``TokenBucket`` with `initial`, which makes it."""

    cdef uint64_t largest_cost

    def __cinit__(self, store, name, rate, burst=None, refill="continuous", *, initial=None, start=None):
        cdef LimitParams new_key
        self.take = initial_take
        self.give_back = initial_give_back
        self.describe = describe_initial
        self.largest_cost = initial
        # A new key allows as much as a bucket with this burst.
        self.gcra_params(self.rate, initial, "initial", &new_key)
        self.params.missing_ns = self.params.tolerance_ns - new_key.tolerance_ns
        if self.params.missing_ns > self.most_ahead_ns - self.params.tolerance_ns:
            raise InvalidLimiter(
                f"limiter {self.name!r} would remember a full bucket of {self.burst} at {self.rate} for too long: "
                "lower the burst, or raise the rate or the initial permits")
        self.params.tolerance_ns += self.params.missing_ns
        self.params.due_ns = self.params.tolerance_ns
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_TOKEN_BUCKET, b"initial %d" % self.params.missing_ns, self.largest_cost)

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, initial_take, NULL)

    cdef int charge_for(self, object cost, const LimitParams* params, Charge* charge) except -1:
        cdef uint64_t permits = <uint64_t>whole_cost(cost)
        if permits > self.largest_cost:
            # A new key never has as much, and nothing comes to a key before its first request is charged.
            raise CostExceedsLimit(cost, self.largest_cost, self.name)
        self.set_charge(permits, params, charge)
        return 0

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is not None or burst is not None:
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: without initial= a token bucket takes another rate for each")
        params[0] = copy_of(&self.params)
        return 0

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        return decide_batch_by(batch, events, initial_take, NULL)


cdef void describe_intervals(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef uint64_t end_ns = window_end_ns(params, 0, verdict.now_ns)
    cdef uint64_t deficit = deficit_of(params, verdict.state, end_ns)
    outlook.available = params.limit - deficit if deficit < params.limit else 0
    outlook.retry_after_ns = 0 if allowed else delay_of(params, deficit + charge.amount, verdict.now_ns, end_ns)
    if deficit != 0:
        outlook.reset_after_ns = end_ns - verdict.now_ns + (boundaries_for(params, deficit) - 1) * params.period_ns


@cython.final
cdef class IntervalTokenBucket(TokenBucket):
    """A ``TokenBucket`` with ``refill="interval"``, which makes it."""

    cdef uint64_t longest_wait_ns

    def __cinit__(self, store, name, rate, burst=None, refill="continuous", *, initial=None, start=None):
        self.kind = FOREBAY_KIND_COUNT
        self.take = interval_take
        self.give_back = interval_give_back
        self.set_charge = count_charge
        self.describe = describe_intervals
        start_ns = interval_start_ns(start)
        self.params.phase_ns = (int(self.segment.wall_epoch_ns) - start_ns) % int(self.params.period_ns)
        self.params.low_bits = count_bits_for(self.params.rate_limit - 1)
        self.longest_wait_ns = self.most_ahead_ns - <uint64_t>interval_refill_ns(
            self.rate, self.burst, self.most_ahead_ns, self.name)
        self.charge_for(1, &self.params, &self.unit)
        encoding = b"intervals %d %d %d" % (self.params.rate_limit, self.params.period_ns, self.params.low_bits)
        if start_ns % int(self.params.period_ns):
            encoding += b" %d" % (start_ns % int(self.params.period_ns))
        self.register(layout.ALGORITHM_TOKEN_BUCKET, encoding, self.burst)

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, interval_take, NULL)

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is not None or burst is not None:
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: refill='continuous' takes another rate for each")
        params[0] = copy_of(&self.params)
        return 0

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        return decide_batch_by(batch, events, interval_take, NULL)

    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil:
        charge.max_wait_ns = min(max_wait_ns, self.longest_wait_ns)

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        cdef uint64_t end_ns = window_end_ns(charge.params, 0, verdict.now_ns)
        return delay_of(charge.params, deficit_of(charge.params, verdict.state, end_ns), verdict.now_ns, end_ns)

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        cdef uint64_t end_ns = window_end_ns(charge.params, 0, verdict.now_ns)
        return delay_of(
            charge.params, deficit_of(charge.params, verdict.state, end_ns) + charge.amount, verdict.now_ns, end_ns)


cdef newfunc make_continuous = (<PyTypeObject*>TokenBucket).tp_new
cdef newfunc make_initial = (<PyTypeObject*>InitialTokenBucket).tp_new
cdef newfunc make_interval = (<PyTypeObject*>IntervalTokenBucket).tp_new


cdef object make_bucket(type kind, PyObject* args, PyObject* kwargs):
    """Make a ``TokenBucket``, of the class for its `refill` and `initial`."""
    refill = None
    if args != NULL and PyTuple_GET_SIZE(<object>args) > 4:
        refill = <object>PyTuple_GET_ITEM(<object>args, 4)
    elif kwargs != NULL:
        refill = (<dict>kwargs).get("refill")
    if refill == "interval":
        return make_interval(IntervalTokenBucket, args, kwargs)
    if kwargs != NULL and (<dict>kwargs).get("initial") is not None:
        return make_initial(InitialTokenBucket, args, kwargs)
    return make_continuous(kind, args, kwargs)


(<PyTypeObject*>TokenBucket).tp_new = <newfunc>make_bucket
# Python code sees one final class.
(<PyTypeObject*>TokenBucket).tp_flags &= ~<unsigned long>Py_TPFLAGS_BASETYPE
(<PyTypeObject*>InitialTokenBucket).tp_name = (<PyTypeObject*>TokenBucket).tp_name
(<PyTypeObject*>IntervalTokenBucket).tp_name = (<PyTypeObject*>TokenBucket).tp_name
