"""What limiters by GCRA have in common: shapes, and decisions told in permits and seconds."""

from libc.stdint cimport uint64_t

from forebay.core.batch cimport Batch, decide_batch_by
from forebay.core.cell_limiter cimport CellLimiter, whole_cost
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Draw, Shape
from forebay.core.table.native cimport FOREBAY_KIND_TAT, multiply_divide_up
from forebay.core.table.table cimport Events, Verdict

from forebay.errors import CostExceedsLimit, InvalidLimiter, shown
from forebay.rate import MAX_PERIOD_NS, as_rate


cdef object YEAR_NS = 365 * 86_400 * 10**9
# 73 years: with a segment time of as much, no state reaches TIME_BITS.
cdef uint64_t MAX_AHEAD_NS = (<uint64_t>1 << 61) - 1


cdef uint64_t most_ahead_of(CellLimiter limiter) noexcept:
    # Python's clock may be told any time, also one that is nearer to the last that there is.
    return 2 * <uint64_t>MAX_PERIOD_NS if limiter.segment.follows_python else MAX_AHEAD_NS


cdef int gcra_shape_of(
    CellLimiter limiter, object rate, object burst, str burst_name, uint64_t most_ahead_ns, Shape* shape
) except -1:
    if isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
        raise InvalidLimiter(
            f"the {burst_name} of limiter {limiter.name!r} is a whole number of at least 1, not {shown(burst)}")
    limit, period_ns = rate.limit, rate.period_ns
    unit_ns = -(-period_ns // limit)
    tolerance_ns = min(burst * unit_ns, burst * period_ns // limit + unit_ns - 1)
    if tolerance_ns > most_ahead_ns:
        raise InvalidLimiter(
            f"limiter {limiter.name!r} would take more than {most_ahead_ns // YEAR_NS} years to refill a "
            f"{burst_name} of {shown(burst)} at {rate}: lower the {burst_name} or raise the rate")
    shape.rate_limit = limit
    shape.period_ns = period_ns
    shape.limit = burst
    shape.tolerance_ns = shape.due_ns = tolerance_ns
    return 0


cdef int gcra_draw(CellLimiter limiter, object cost, const Shape* shape, Draw* draw) except -1:
    cdef uint64_t permits = <uint64_t>whole_cost(cost)
    if permits > shape.limit:
        raise CostExceedsLimit(cost, shape.limit, limiter.name)
    draw.amount = multiply_divide_up(permits, shape.period_ns, shape.rate_limit)
    draw.room = shape.tolerance_ns - draw.amount
    draw.patience_ns = 0
    draw.charged_state = 0
    draw.shape = shape
    return 0


cdef uint64_t gcra_booked_delay_ns(const Draw* draw, const Verdict* verdict) noexcept:
    """Until the state that the request left is within the burst."""
    cdef uint64_t ahead_ns = ahead_of(verdict)
    return ahead_ns - draw.shape.tolerance_ns if ahead_ns > draw.shape.tolerance_ns else 0


cdef uint64_t gcra_refused_delay_ns(const Draw* draw, const Verdict* verdict) noexcept:
    """As if it had been booked."""
    return verdict.state + draw.amount - verdict.now_ns - draw.shape.tolerance_ns


cdef int gcra_describe(const Draw* draw, const Verdict* verdict, Decision decision) except -1:
    cdef const Shape* shape = draw.shape
    cdef uint64_t ahead_ns = ahead_of(verdict)
    decision.rate_limit = shape.rate_limit
    decision.rate_period_ns = shape.period_ns
    decision.available = shape.tolerance_ns - ahead_ns if ahead_ns < shape.tolerance_ns else 0
    decision.retry_after_ns = 0 if decision.allowed or ahead_ns <= draw.room else ahead_ns - draw.room
    decision.reset_after_ns = ahead_ns
    return 0


cdef class GcraLimiter(CellLimiter):
    """Base class of the limiters by GCRA; not used by itself."""

    def __cinit__(self, *args, **kwargs):
        self.kind = FOREBAY_KIND_TAT
        self.most_ahead_ns = most_ahead_of(self)
        self.take = gcra_take
        self.give_back = gcra_give_back

    cdef int gcra_shape(self, object rate, object burst, str burst_name, Shape* shape) except -1:
        return gcra_shape_of(self, rate, burst, burst_name, self.most_ahead_ns, shape)

    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1:
        if burst is not None:
            raise InvalidLimiter(f"{self!r} has no burst")
        if rate is None:
            shape[0] = self.shape
            return 0
        return self.gcra_shape(as_rate(rate), self.shape.limit, "capacity", shape)

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1:
        return gcra_draw(self, cost, shape, draw)

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        if self.take == gcra_take:
            return decide_batch_by(batch, events, gcra_take, NULL)
        return CellLimiter.decide_batch(self, batch, events)

    cdef int be_patient(self, Draw* draw, uint64_t patience_ns) except -1:
        """A request that may wait meets a tolerance that is wider by so much; states stay below 2**62 all the same."""
        draw.room += min(patience_ns, self.most_ahead_ns - draw.shape.tolerance_ns)
        return 0

    cdef uint64_t booked_delay_ns(self, const Draw* draw, const Verdict* verdict) noexcept:
        return gcra_booked_delay_ns(draw, verdict)

    cdef uint64_t refused_delay_ns(self, const Draw* draw, const Verdict* verdict) except? 0:
        return gcra_refused_delay_ns(draw, verdict)

    cdef int describe(self, const Draw* draw, const Verdict* verdict, Decision decision) except -1:
        return gcra_describe(draw, verdict, decision)
