"""The steps of leases and fetch slots: the decision function of each, which is one CAS.

leased.pyx has the argument: the states, the transitions by these functions, and the proof.
"""

from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_state, count_time, low_mask, low_of, time_of
from forebay.core.table.native cimport FOREBAY_LEASE_GENERATION_BITS, ForebayCell, monotonic_ns
from forebay.core.table.table cimport Next


cdef enum:
    GENERATION_BITS = FOREBAY_LEASE_GENERATION_BITS
    FETCH_SLOT_COST_BITS = 16
    FETCH_SLOT_SIZE_SHIFT = 17
    FETCH_SLOT_LOW_BITS = 22
    FETCHING = 1 << 16
    # While a fetch is under way: another process has waited for long. Below it is the fetch's mark, which isn't 0.
    WAITED = 1 << 15
    # Longer than a thread holds the interpreter, and than a waiter sleeps.
    RESERVED_NS = 1 << 24
    # In place of a size, as UNKNOWN_SIZE in leased.pyx.
    UNKNOWN = 31
    # A generation begins ahead of the clock by less.
    MOST_AHEAD = 63


# How to read the state of a cell of permits.
cdef struct LeaseCharge:
    uint64_t amount              # of the request
    int permit_bits              # the lowest bits of a state
    int low_bits                 # all below its time
    uint64_t longest_ns          # the longest time from now to the end of a lease


# A step of a fetch, and what it met. The outcome is written by the decision function, whose last call is the one that
# was swapped in.
cdef struct Step:
    const LeaseCharge* charge
    uint64_t epoch_ns            # of the segment
    uint64_t amount              # of the request that fetches
    uint64_t clock               # the segment time, in the units of generations
    uint64_t keep_ns             # how long a cell without permits is kept
    uint64_t generation          # the generation that must still be there
    uint64_t granted
    uint64_t dropped             # the number of reported permits that don't count any more
    uint64_t end_ns              # of the lease
    uint64_t same_ns             # permits of a lease that ends so much earlier are not of the same one
    bint was_known
    bint was_served
    uint64_t left
    uint64_t unspent
    uint64_t was_end_ns
    uint64_t now_ns
    uint64_t stamp_us            # when the step was taken, by the monotonic clock: in the order of steps


# A step at a fetch slot.
cdef struct SlotRequest:
    uint64_t cost
    uint64_t until_ns            # from now on when entering
    uint64_t mark                # of the fetch that enters
    uint64_t size
    uint64_t seen                # when leaving: the state that entering left
    uint64_t longest_ns
    bint has_waited              # for long
    uint64_t was_until_ns        # the slot's time before entering


cdef inline bint runs(const LeaseCharge* charge, uint64_t state, uint64_t now_ns) noexcept nogil:
    # An end that no limiter can have written is none.
    return time_of(state, charge.low_bits) - now_ns - 1 < charge.longest_ns


cdef inline bint spend(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const LeaseCharge* charge = <const LeaseCharge*>parameters
    next.state = state - charge.amount
    return low_of(state, charge.permit_bits) >= charge.amount and runs(charge, state, now_ns)


cdef inline uint64_t generation_of(const LeaseCharge* charge, uint64_t state) noexcept nogil:
    return low_of(state, charge.low_bits) >> (charge.permit_bits + 1)


cdef inline bint is_pending(const LeaseCharge* charge, uint64_t state) noexcept nogil:
    return state >> charge.permit_bits & 1


cdef inline uint64_t stamp_us(const Step* step) noexcept nogil:
    """Read after the state and before the CAS, so that of two steps the later one has the later stamp, or the same."""
    return (monotonic_ns() - step.epoch_ns) // 1000


cdef inline bint is_own(const Step* step, uint64_t state) noexcept nogil:
    """Whether the fetch that has this generation is the last one that began."""
    return is_pending(step.charge, state) and generation_of(step.charge, state) == step.generation


cdef inline uint64_t next_generation(const Step* step, uint64_t state) noexcept nogil:
    cdef uint64_t mask = low_mask(GENERATION_BITS)
    cdef uint64_t clock = step.clock & mask
    cdef uint64_t generation = generation_of(step.charge, state)
    if state == 0:
        # Not the one of a fetch that began in a cell which is lost.
        return (clock + (step.stamp_us & MOST_AHEAD)) & mask
    if (generation - clock) & mask > mask // 2:
        return clock
    return (generation + is_pending(step.charge, state)) & mask


cdef inline uint64_t pending_state(
    Step* step, uint64_t state, uint64_t time, uint64_t permits
) noexcept nogil:
    step.generation = next_generation(step, state)
    return time | (step.generation << 1 | 1) << step.charge.permit_bits | permits


cdef inline bint begin_fetch(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef Step* step = <Step*>parameters
    cdef const LeaseCharge* charge = step.charge
    cdef uint64_t end_ns = time_of(state, charge.low_bits)
    cdef uint64_t time = state & ~low_mask(charge.low_bits)
    cdef uint64_t permits = low_of(state, charge.permit_bits)
    step.now_ns = now_ns
    step.stamp_us = stamp_us(step)
    step.was_end_ns = end_ns
    step.left = step.unspent = 0
    step.was_known = state != 0 and (end_ns <= now_ns or runs(charge, state, now_ns))
    if step.was_known and end_ns > now_ns:
        step.left = permits
    elif step.was_known:
        step.unspent = permits
    if step.left == 0:
        # The time means nothing but how long the cell is kept.
        time = max(time if runs(charge, state, now_ns) else 0, count_time(now_ns + step.keep_ns, charge.low_bits))
    next.state = pending_state(step, state, time, step.left)
    return True


cdef inline bint deposit_permits(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef Step* step = <Step*>parameters
    cdef const LeaseCharge* charge = step.charge
    cdef uint64_t permits = low_of(state, charge.permit_bits)
    cdef uint64_t end_ns = time_of(state, charge.low_bits)
    cdef uint64_t time = step.end_ns << FRACTION_BITS & ~low_mask(charge.low_bits)
    step.was_served = False
    if not is_own(step, state) or step.end_ns <= now_ns:
        return False
    if permits != 0 and step.same_ns != 0:
        # Each reply shows the end of the window a little earlier, by the time that the reply took.
        if end_ns + step.same_ns <= step.end_ns or not runs(charge, state, now_ns):
            permits = 0
        else:
            time = max(time, state & ~low_mask(charge.low_bits))
    permits = permits - min(permits, step.dropped) + step.granted
    if permits >= step.amount:
        step.was_served = True
        permits -= step.amount
    next.state = time | generation_of(charge, state) << (charge.permit_bits + 1) | min(
        permits, low_mask(charge.permit_bits))
    return True


cdef inline bint abort_fetch(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef Step* step = <Step*>parameters
    cdef uint64_t permits = low_of(state, step.charge.permit_bits)
    next.state = (state & ~low_mask(step.charge.permit_bits + 1)) | (permits - min(permits, step.dropped))
    return is_own(step, state)


cdef inline bint withdraw_permits(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef Step* step = <Step*>parameters
    step.stamp_us = stamp_us(step)
    step.unspent = low_of(state, step.charge.permit_bits)
    if is_pending(step.charge, state) or step.unspent == 0 or not runs(step.charge, state, now_ns):
        return False
    # It ends now, so that the next fetch doesn't take it for one that was used up early.
    next.state = now_ns << FRACTION_BITS & ~low_mask(step.charge.low_bits) | (
        generation_of(step.charge, state) << (step.charge.permit_bits + 1))
    return True


cdef inline bint is_closed(uint64_t state, uint64_t now_ns, uint64_t longest_ns) noexcept nogil:
    return time_of(state, FETCH_SLOT_LOW_BITS) - now_ns - 1 < longest_ns


cdef inline uint64_t fetch_slot_state(uint64_t until_ns, uint64_t size, uint64_t low) noexcept nogil:
    return count_state(until_ns, FETCH_SLOT_LOW_BITS, size << FETCH_SLOT_SIZE_SHIFT | low)


cdef inline uint64_t size_of(uint64_t slot) noexcept nogil:
    return low_of(slot, FETCH_SLOT_LOW_BITS) >> FETCH_SLOT_SIZE_SHIFT


cdef inline bint is_reserved(uint64_t slot) noexcept nogil:
    return low_of(slot, FETCH_SLOT_SIZE_SHIFT) == FETCHING


cdef inline bint enter_fetch_slot(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef SlotRequest* request = <SlotRequest*>parameters
    request.was_until_ns = time_of(state, FETCH_SLOT_LOW_BITS)
    # A fetch that was there before and hasn't left the slot will hardly bring a reply.
    cdef uint64_t size = UNKNOWN if state & FETCHING and not is_reserved(state) else size_of(state)
    next.state = fetch_slot_state(now_ns + request.until_ns, size, FETCHING | request.mark)
    if not is_closed(state, now_ns, request.longest_ns):
        return True
    if state & FETCHING:
        return request.has_waited and is_reserved(state)
    return request.cost < low_of(state, FETCH_SLOT_COST_BITS)


cdef inline bint mark_waited(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = state | WAITED
    return state & FETCHING and not is_reserved(state) and state & WAITED == 0


cdef inline bint leave_fetch_slot(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const SlotRequest* request = <const SlotRequest*>parameters
    if request.until_ns == 0 and state & WAITED:
        next.state = fetch_slot_state(
            min(now_ns + RESERVED_NS, time_of(state, FETCH_SLOT_LOW_BITS)), request.size, FETCHING)
    elif request.until_ns == 0:
        # Rounded down, and so open.
        next.state = now_ns << FRACTION_BITS & ~low_mask(FETCH_SLOT_LOW_BITS) | request.size << FETCH_SLOT_SIZE_SHIFT
    else:
        next.state = fetch_slot_state(request.until_ns, request.size, request.cost)
    return state & ~WAITED == request.seen


cdef inline bint lower_size(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = state - (<uint64_t>1 << FETCH_SLOT_SIZE_SHIFT)
    return state & FETCHING == 0 and 0 < size_of(state) < <uint64_t>UNKNOWN
