"""The base of limiters by GCRA: their params, and decisions in permits and seconds."""

from libc.stdint cimport uint64_t

from forebay.core.batch cimport Batch, decide_batch_by
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport FOREBAY_KIND_TAT, multiply_divide_up
from forebay.core.table.table cimport Events, Verdict

from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import MAX_PERIOD_NS, as_rate


cdef object YEAR_NS = 365 * 86_400 * 10**9
# 73 years: no state reaches TIME_BITS, as long as the segment's time is at most 73 years, too.
cdef uint64_t MAX_AHEAD_NS = (<uint64_t>1 << 61) - 1


cdef uint64_t most_ahead_of(CellLimiter limiter) noexcept:
    # A test may set Python's clock to any time up to `LAST_PYTHON_S`: states may then be ahead by this much only.
    return 2 * <uint64_t>MAX_PERIOD_NS if limiter.segment.follows_python else MAX_AHEAD_NS


cdef int gcra_params_of(
    CellLimiter limiter, object rate, object burst, str burst_name, uint64_t most_ahead_ns, LimitParams* params
) except -1:
    if isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
        raise InvalidLimiter(
            f"the {burst_name} of limiter {limiter.name!r} is a whole number of at least 1, not {short_repr(burst)}")
    limit, period_ns = rate.limit, rate.period_ns
    unit_ns = -(-period_ns // limit)
    tolerance_ns = min(burst * unit_ns, burst * period_ns // limit + unit_ns - 1)
    if tolerance_ns > most_ahead_ns:
        raise InvalidLimiter(
            f"limiter {limiter.name!r} would take more than {most_ahead_ns // YEAR_NS} years to refill a "
            f"{burst_name} of {short_repr(burst)} at {rate}: lower the {burst_name} or raise the rate")
    params.rate_limit = limit
    params.period_ns = period_ns
    params.limit = burst
    params.tolerance_ns = params.due_ns = tolerance_ns
    return 0


cdef void gcra_charge(uint64_t permits, const LimitParams* params, Charge* charge) noexcept nogil:
    charge.amount = multiply_divide_up(permits, params.period_ns, params.rate_limit)
    charge.room = params.tolerance_ns - charge.amount
    charge.max_wait_ns = 0
    charge.charged_state = 0
    charge.params = params


cdef uint64_t gcra_booked_delay_ns(const Charge* charge, const Verdict* verdict) noexcept nogil:
    """The time until the state that the request left is within the tolerance."""
    cdef uint64_t ahead_ns = ahead_of(verdict)
    return ahead_ns - charge.params.tolerance_ns if ahead_ns > charge.params.tolerance_ns else 0


cdef uint64_t gcra_refused_delay_ns(const Charge* charge, const Verdict* verdict) noexcept nogil:
    """The delay that the request would have if it had been booked."""
    return verdict.state + charge.amount - verdict.now_ns - charge.params.tolerance_ns


cdef void gcra_describe(const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef uint64_t ahead_ns = ahead_of(verdict)
    outlook.rate_limit = params.rate_limit
    outlook.rate_period_ns = params.period_ns
    outlook.available = params.tolerance_ns - ahead_ns if ahead_ns < params.tolerance_ns else 0
    outlook.retry_after_ns = 0 if allowed or ahead_ns <= charge.room else ahead_ns - charge.room
    outlook.reset_after_ns = ahead_ns


cdef class GcraLimiter(CellLimiter):
    """Base class of the limiters by GCRA; not used by itself."""

    def __cinit__(self, *args, **kwargs):
        self.kind = FOREBAY_KIND_TAT
        self.most_ahead_ns = most_ahead_of(self)
        self.take = gcra_take
        self.give_back = gcra_give_back
        self.set_charge = gcra_charge
        self.describe = gcra_describe

    cdef int gcra_params(self, object rate, object burst, str burst_name, LimitParams* params) except -1:
        return gcra_params_of(self, rate, burst, burst_name, self.most_ahead_ns, params)

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        if burst is not None:
            raise InvalidLimiter(f"{self!r} has no burst")
        if rate is None:
            params[0] = self.params
            return 0
        self.gcra_params(as_rate(rate), self.params.limit, "capacity", params)
        self.share_due(params)
        return 0

    cdef void share_due(self, LimitParams* params) noexcept:
        """Bookings of this limiter and of a call wait on one state: neither takes the other's time."""
        params.due_ns = min(params.due_ns, self.params.due_ns)

    cdef uint64_t decide_batch(self, const Batch* batch, Events* events) noexcept nogil:
        return decide_batch_by(batch, events, gcra_take, NULL)

    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil:
        """Widen the tolerance by the time that the request may wait. States stay below 2**62 nevertheless."""
        charge.room += min(max_wait_ns, self.most_ahead_ns - charge.params.tolerance_ns)

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        return gcra_booked_delay_ns(charge, verdict)

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        return gcra_refused_delay_ns(charge, verdict)
