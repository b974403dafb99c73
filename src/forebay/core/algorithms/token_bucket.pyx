"""Token bucket, with continuous refill (GCRA, see gcra.pxd) or refill in intervals (see interval_bucket.pxd)."""

cimport cython
from cpython.object cimport Py_TPFLAGS_BASETYPE, PyObject, PyTypeObject, newfunc
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport count_bits_for, window_end_ns
from forebay.core.algorithms.gcra cimport GcraLimiter, gcra_take
from forebay.core.algorithms.interval_bucket cimport (
    boundaries_for, deficit_of, delay_of, interval_give_back, interval_take,
)
from forebay.core.batch cimport Batch, decide_batch_by
from forebay.core.cell_limiter cimport allow_by, count_charge
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport FOREBAY_KIND_COUNT
from forebay.core.table.table cimport Events, Verdict

from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import as_rate
from forebay.segment import layout


cdef class TokenBucket(GcraLimiter):
    """Up to `burst` permits at once, refilled at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. `name` identifies the limiter in its store. With
    ``refill="continuous"`` permits come back one by one. With ``refill="interval"`` the permits of a whole period come
    back at once, at the start of each period by the wall clock; permits above the burst are lost.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: in any span of time t, at most ``burst + t * rate`` permits, rounded up, over all processes. With
    intervals, at most ``burst``, and the rate's limit for each start of a period in the span. Algorithm: GCRA, ITU-T
    Recommendation I.371.
    """

    cdef readonly uint64_t burst
    cdef readonly str refill

    def __cinit__(self, store, name, rate, burst=None, refill="continuous"):
        self.rate = as_rate(rate)
        self.gcra_params(self.rate, self.rate.limit if burst is None else burst, "burst", &self.params)
        self.burst = self.params.limit
        if refill == "continuous":
            self.charge_for(1, &self.params, &self.unit)
            self.register(layout.ALGORITHM_TOKEN_BUCKET, b"")
        elif refill != "interval":
            raise InvalidLimiter(f"refill is 'continuous' or 'interval', not {short_repr(refill)}")
        self.refill = refill

    @cython.binding(False)
    def __init__(self, store, name, rate, burst=None, refill="continuous"):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        refill = "" if self.refill == "continuous" else ", refill='interval'"
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}{refill}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, gcra_take, NULL)

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is None and burst is None:
            params[0] = self.params
            return 0
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        rate = as_rate(rate)
        self.gcra_params(rate, rate.limit if burst is None else burst, "burst", params)
        self.share_due(params)
        return 0


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

    def __cinit__(self, store, name, rate, burst=None, refill="continuous"):
        self.kind = FOREBAY_KIND_COUNT
        self.take = interval_take
        self.give_back = interval_give_back
        self.set_charge = count_charge
        self.describe = describe_intervals
        self.params.phase_ns = self.segment.wall_epoch_ns % self.params.period_ns
        self.params.low_bits = count_bits_for(self.params.rate_limit - 1)
        if self.full_ns() > self.most_ahead_ns:
            raise InvalidLimiter(
                f"limiter {self.name!r} would take too long to refill a burst of {short_repr(burst)} at {self.rate}: "
                "lower the burst or raise the rate")
        self.longest_wait_ns = self.most_ahead_ns - <uint64_t>self.full_ns()
        self.charge_for(1, &self.params, &self.unit)
        self.register(
            layout.ALGORITHM_TOKEN_BUCKET,
            b"intervals %d %d %d" % (self.params.rate_limit, self.params.period_ns, self.params.low_bits))

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, interval_take, NULL)

    cdef object full_ns(self):
        """The longest time in which an empty bucket fills, plus at least a quantum, in ns."""
        return (int(boundaries_for(&self.params, self.params.limit)) + 1) * self.params.period_ns

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is not None or burst is not None:
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: refill='continuous' takes another rate for each")
        params[0] = self.params
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
cdef newfunc make_interval = (<PyTypeObject*>IntervalTokenBucket).tp_new


cdef object make_bucket(type kind, PyObject* args, PyObject* kwargs):
    """Make a ``TokenBucket``, of the class for its `refill`."""
    refill = None
    if args != NULL and PyTuple_GET_SIZE(<object>args) > 4:
        refill = <object>PyTuple_GET_ITEM(<object>args, 4)
    elif kwargs != NULL:
        refill = (<dict>kwargs).get("refill")
    if refill == "interval":
        return make_interval(IntervalTokenBucket, args, kwargs)
    return make_continuous(kind, args, kwargs)


(<PyTypeObject*>TokenBucket).tp_new = <newfunc>make_bucket
# Python code sees one final class.
(<PyTypeObject*>TokenBucket).tp_flags &= ~<unsigned long>Py_TPFLAGS_BASETYPE
(<PyTypeObject*>IntervalTokenBucket).tp_name = (<PyTypeObject*>TokenBucket).tp_name
