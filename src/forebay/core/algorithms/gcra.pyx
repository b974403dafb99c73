"""The base of limiters by GCRA: their params, and decisions in permits and seconds."""

from libc.stdint cimport uint64_t

from forebay.core.batch cimport Batch, decide_batch_by
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Outlook, no_outlook, remaining_in
from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport (
    FOREBAY_KIND_TAT, ForebayCell, ForebayLine, multiply_divide_down, multiply_divide_up, product_below,
)
from forebay.core.table.table cimport (
    ALLOWED, TIME_BITS, Decide, Events, Next, Verdict, holds_permits, most_permits, no_events, permits_in,
    state_of_permits, table_decide, table_now,
)

from forebay.core.arguments import too_many_permits
from forebay.errors import InvalidLimiter, StoreFull, short_repr
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
    params.may_exceed = False
    return 0


cdef inline uint64_t permits_of(const Charge* charge) noexcept nogil:
    """The permits of a charge, from its time."""
    return multiply_divide_down(charge.amount, charge.params.rate_limit, charge.params.period_ns)


cdef inline uint64_t above_of(const LimitParams* params, uint64_t state) noexcept nogil:
    """The permits above the burst. A limiter that adds none forgets those of a token bucket with its name."""
    return permits_in(state) if params.may_exceed else 0


cdef bint take_above(uint64_t state, uint64_t now_ns, const Charge* charge, Next* next) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef uint64_t above = above_of(params, state)
    cdef uint64_t permits
    next.state = now_ns + charge.amount
    if above != 0:
        permits = permits_of(charge)
        if permits < above:
            next.state = state_of_permits(above - permits)
        else:
            next.state = max(now_ns, table_now(params.table)) + multiply_divide_up(
                permits - above, params.period_ns, params.rate_limit)
    return True


gcra_take_above = take_above


cdef bint gcra_give_back_above(uint64_t state, const Charge* charge, Next* next) noexcept nogil:
    cdef uint64_t above = above_of(charge.params, state)
    if above == 0 or not holds_permits(charge.charged_state):
        return False
    next.state = state_of_permits(min(above + permits_of(charge), most_permits()))
    return True


cdef bint gcra_add(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef uint64_t permits = charge.amount + above_of(params, state)
    cdef uint64_t ahead_ns, missing
    if now_ns < state and state >> TIME_BITS == 0:
        ahead_ns = state - now_ns
        # As many permits fill the bucket; the last one perhaps in part.
        missing = ~<uint64_t>0
        if product_below(ahead_ns, params.rate_limit, missing, params.period_ns):
            missing = multiply_divide_up(ahead_ns, params.rate_limit, params.period_ns)
        if permits < missing:
            next.state = state - multiply_divide_down(permits, params.period_ns, params.rate_limit)
            return True
        permits -= missing
    next.state = state_of_permits(permits) if permits != 0 else now_ns
    return permits <= most_permits()


cdef uint64_t add_permits(
    CellLimiter limiter, object key, uint64_t permits, const LimitParams* params, Decide add
) except? 0:
    cdef Charge charge
    cdef Verdict verdict
    cdef Events events = no_events()
    cdef Outlook outlook = no_outlook()
    cdef uint64_t tag = limiter.tag_of(key)
    cdef ForebayLine* line = limiter.ensure_attached()
    limiter.set_charge(0, params, &charge)
    charge.amount = permits
    verdict.tag = tag
    verdict.now_ns = table_now(&limiter.table)
    table_decide(&limiter.table, tag, line.number, &line.counters.claims, add, &charge, &verdict, &events)
    limiter.count_events(&events)
    if verdict.full:
        raise StoreFull(limiter.name)
    if verdict.outcome != ALLOWED:
        raise too_many_permits(permits, limiter.name)
    limiter.describe(&charge, &verdict, True, &outlook)
    return remaining_in(&outlook, params.limit)


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
    if verdict.state >> TIME_BITS != 0:
        # In permits, which may be more than the burst.
        outlook.available = params.limit + above_of(params, verdict.state)
        return
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
