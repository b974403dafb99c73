"""A token bucket whose new keys have fewer permits than the burst: its decision functions.

A new key lacks some permits, which come at the rate once its first request is charged. The time in which they come is
`missing_ns`. The state is GCRA's theoretical arrival time plus `missing_ns`, and the tolerance is longer by as much.

A state counts until its time has come, as every state does. So a key is known until its bucket has been full for
`missing_ns`. After that it is new again: it has the initial permits, and not the burst. A key without a cell (never
seen, expired, evicted, reset) is new, too. A new key whose first charge is refunded in full is as it was before the
charge. From then on its permits come, until it is forgotten.

* No key ever has more than the burst: the state of a known key is never before ``now + missing_ns``.
* No key has more permits than with a bucket that starts full: a new key starts with fewer, and each other step is
  GCRA's.
* A cost is at most the initial permits, so a new key always allows it. A key that has denied a request is known for at
  least `missing_ns` longer than until its permits are back. So the request is allowed after `retry_after`, at any time.
"""

from libc.stdint cimport uint64_t

from forebay.core.limiter cimport Charge, LimitParams
from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport TIME_BITS, Next


cdef inline bint is_known(uint64_t state, uint64_t now_ns) noexcept nogil:
    # A state that no limiter can have written counts as a new key's.
    return state > now_ns and state >> TIME_BITS == 0


cdef inline uint64_t state_now(const LimitParams* params, uint64_t state, uint64_t now_ns) noexcept nogil:
    """The state that a key with this state has now."""
    if is_known(state, now_ns):
        return max(state, now_ns + params.missing_ns)
    return now_ns + 2 * params.missing_ns


cdef inline bint initial_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t start = state_now(charge.params, state, now_ns)
    next.state = start + charge.amount
    return start - now_ns <= charge.room


cdef inline bint initial_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Undo `initial_take`, but never beyond a full bucket."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef uint64_t full = now_ns + charge.params.missing_ns
    cdef uint64_t amount = charge.amount
    if not is_known(state, now_ns) or state <= full:
        return False
    if charge.charged_state != 0:
        if charge.charged_state <= full or (
            # Later bookings keep their times, so no other request can take the time of this one.
            charge.charged_state != state and state - now_ns > charge.params.due_ns
        ):
            return False
        # The rest has been refilled.
        amount = min(amount, charge.charged_state - full)
    next.state = state - amount if state - full > amount else full
    return True
