"""Token bucket, with continuous refill (GCRA, see gcra.pxd) or refill in intervals.

Refill in intervals
-------------------
Permits are put back at the boundaries of clock-aligned periods, `rate_limit` of them each time. The state is the
boundary F at which the bucket is full again, and the *rest*: how many permits of that last refill find a place, less
one. So the deficit, the permits missing, is ``(boundaries from now until F, less one) * rate_limit + rest + 1``, and it
shrinks at every boundary by itself, as with GCRA: nothing is ever refilled. F is rounded up to a quantum, as
`count_time` in counts.pxd says; a boundary is at least two quanta from the next one, so it can be told from its
neighbours. Of two states the larger one lacks more, so who has used more is evicted later.
"""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport count_bits_for, count_state, low_of, time_of, window_end_ns
from forebay.core.algorithms.gcra cimport GcraLimiter, gcra_take
from forebay.core.cell_limiter cimport CellLimiter, allow_by
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Charge, LimitParams, let_stores_make
from forebay.core.table.native cimport FOREBAY_KIND_COUNT, ForebayCell
from forebay.core.table.table cimport Next, Verdict

from forebay.errors import InvalidLimiter, shown
from forebay.rate import as_rate
from forebay.segment import layout


cdef inline uint64_t deficit_of(const LimitParams* params, uint64_t state, uint64_t end_ns) noexcept nogil:
    """The permits missing in the period that ends at `end_ns`."""
    cdef uint64_t full_ns = time_of(state, params.low_bits)
    cdef uint64_t boundaries
    if full_ns < end_ns:
        return 0
    # Rounded up by less than half a period, so rounding down finds it.
    boundaries = (full_ns - end_ns) // params.period_ns + 1
    return (boundaries - 1) * params.rate_limit + low_of(state, params.low_bits) + 1


cdef inline uint64_t boundaries_for(const LimitParams* params, uint64_t permits) noexcept nogil:
    """How many refills bring so many permits."""
    return (permits + params.rate_limit - 1) // params.rate_limit


cdef inline uint64_t state_of_deficit(const LimitParams* params, uint64_t deficit, uint64_t end_ns) noexcept nogil:
    cdef uint64_t boundaries = boundaries_for(params, deficit)
    if deficit == 0:
        return 0
    return count_state(
        end_ns + (boundaries - 1) * params.period_ns, params.low_bits,
        deficit - (boundaries - 1) * params.rate_limit - 1)


cdef inline uint64_t delay_of(
    const LimitParams* params, uint64_t deficit, uint64_t now_ns, uint64_t end_ns
) noexcept nogil:
    """Until a bucket that lacks `deficit` permits, perhaps more than it can hold, holds at least none too few."""
    if deficit <= params.limit:
        return 0
    return end_ns - now_ns + (boundaries_for(params, deficit - params.limit) - 1) * params.period_ns


cdef bint interval_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t end_ns = window_end_ns(charge.params, tag, now_ns)
    cdef uint64_t deficit = deficit_of(charge.params, state, end_ns) + charge.amount
    if deficit > charge.params.limit and delay_of(charge.params, deficit, now_ns, end_ns) > charge.max_wait_ns:
        return False
    next.state = state_of_deficit(charge.params, deficit, end_ns)
    return True


cdef bint interval_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t end_ns = window_end_ns(charge.params, tag, now_ns)
    cdef uint64_t deficit = deficit_of(charge.params, state, end_ns)
    cdef uint64_t amount = charge.amount
    if charge.charged_state != 0:
        if charge.charged_state != state and deficit > charge.params.limit:
            # Others have booked behind it, and keep their times: its own can't be given to anybody.
            return False
        # The rest has been refilled.
        amount = min(amount, deficit_of(charge.params, charge.charged_state, end_ns))
    amount = min(amount, deficit)
    next.state = state_of_deficit(charge.params, deficit - amount, end_ns)
    return amount != 0


@cython.final
cdef class TokenBucket(GcraLimiter):
    """Up to `burst` permits at once, refilled at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. `name` identifies the limiter in its store. With
    ``refill="continuous"`` permits trickle back one by one; with ``refill="interval"`` a whole rate's limit is put back
    at the top of each period by the wall clock, and what is above the burst is lost.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), one CAS on one cache line in the usual case; a denied one writes nothing shared. 21 bytes of
    the store per key. Guarantee: in any span of time t, at most ``burst + t * rate`` permits, rounded up, over all
    processes; with intervals, at most ``burst`` and a rate's limit for each top of a period in the span. Algorithm:
    GCRA, ITU-T Recommendation I.371.
    """

    cdef readonly uint64_t burst
    cdef readonly str refill

    def __cinit__(self, store, name, rate, burst=None, refill="continuous"):
        self.rate = as_rate(rate)
        self.gcra_params(self.rate, self.rate.limit if burst is None else burst, "burst", &self.params)
        self.burst = self.params.limit
        if refill == "interval":
            self.kind = FOREBAY_KIND_COUNT
            self.take = interval_take
            self.give_back = interval_give_back
            self.params.phase_ns = self.segment.wall_epoch_ns % self.params.period_ns
            self.params.low_bits = count_bits_for(self.params.rate_limit - 1)
            if self.full_ns() > self.most_ahead_ns:
                raise InvalidLimiter(
                    f"limiter {self.name!r} would take too long to refill a burst of {shown(burst)} at {self.rate}: "
                    "lower the burst or raise the rate")
            encoding = b"intervals %d %d %d" % (self.params.rate_limit, self.params.period_ns, self.params.low_bits)
        elif refill == "continuous":
            encoding = b""
        else:
            raise InvalidLimiter(f"refill is 'continuous' or 'interval', not {shown(refill)}")
        self.refill = refill
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_TOKEN_BUCKET, encoding)

    @cython.binding(False)
    def __init__(self, store, name, rate, burst=None, refill="continuous"):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        refill = "" if self.refill == "continuous" else ", refill='interval'"
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}{refill}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        if self.take == interval_take:
            return allow_by(self, key, interval_take, NULL)
        return allow_by(self, key, gcra_take, NULL)

    cdef object full_ns(self):
        """After so long at the latest, an empty bucket refilled in intervals is full, with a quantum to spare."""
        return (int(boundaries_for(&self.params, self.params.limit)) + 1) * self.params.period_ns

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if rate is None and burst is None:
            params[0] = self.params
            return 0
        if self.take == interval_take:
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: refill='continuous' takes another rate for each")
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        rate = as_rate(rate)
        return self.gcra_params(rate, rate.limit if burst is None else burst, "burst", params)

    cdef int charge_for(self, object cost, const LimitParams* params, Charge* charge) except -1:
        if self.take == interval_take:
            return CellLimiter.charge_for(self, cost, params, charge)
        return GcraLimiter.charge_for(self, cost, params, charge)

    cdef int allow_wait(self, Charge* charge, uint64_t max_wait_ns) except -1:
        if self.take != interval_take:
            return GcraLimiter.allow_wait(self, charge, max_wait_ns)
        charge.max_wait_ns = min(max_wait_ns, self.most_ahead_ns - <uint64_t>self.full_ns())
        return 0

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept:
        cdef uint64_t end_ns
        if self.take != interval_take:
            return GcraLimiter.booked_delay_ns(self, charge, verdict)
        end_ns = window_end_ns(charge.params, 0, verdict.now_ns)
        return delay_of(charge.params, deficit_of(charge.params, verdict.state, end_ns), verdict.now_ns, end_ns)

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) except? 0:
        cdef uint64_t end_ns
        if self.take != interval_take:
            return GcraLimiter.refused_delay_ns(self, charge, verdict)
        end_ns = window_end_ns(charge.params, 0, verdict.now_ns)
        return delay_of(
            charge.params, deficit_of(charge.params, verdict.state, end_ns) + charge.amount, verdict.now_ns, end_ns)

    cdef int describe(self, const Charge* charge, const Verdict* verdict, Decision decision) except -1:
        cdef const LimitParams* params = charge.params
        cdef uint64_t end_ns, deficit
        if self.take != interval_take:
            return GcraLimiter.describe(self, charge, verdict, decision)
        end_ns = window_end_ns(params, 0, verdict.now_ns)
        deficit = deficit_of(params, verdict.state, end_ns)
        decision.available = params.limit - deficit if deficit < params.limit else 0
        decision.retry_after_ns = 0 if decision.allowed else delay_of(
            params, deficit + charge.amount, verdict.now_ns, end_ns)
        if deficit != 0:
            decision.reset_after_ns = (
                end_ns - verdict.now_ns + (boundaries_for(params, deficit) - 1) * params.period_ns)
        return 0


let_stores_make(TokenBucket)
