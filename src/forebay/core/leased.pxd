from libc.stdint cimport uint64_t

from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Limiter
from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport UNDECIDED, Decide, Next, Outcome, Verdict


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


# The answer that a request would get, by the host's memory alone.
cdef struct Look:
    Outcome outcome              # ALLOWED, DENIED or UNDECIDED
    uint64_t left                # permits of the lease
    uint64_t retry_ns
    uint64_t rest_ns             # of the lease, or of the denial


cdef bint spend(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil


cdef class Permits(Limiter):
    cdef readonly object terms               # a forebay.redis.leased.terms.Terms
    cdef LeaseCharge unit                    # a cost of 1
    cdef int clock_shift
    cdef uint64_t keep_ns                    # how long a fetch closes the fetch slot
    cdef uint64_t cell_keep_ns               # of a lease without permits
    cdef uint64_t longest_closed_ns          # no fetch slot is closed for longer
    cdef uint64_t same_ns
    cdef uint64_t limit_permits
    cdef uint64_t reset_ns                   # after the lease's end, the key is as good as fresh

    cdef Outcome spend_now(self, uint64_t tag, const LeaseCharge* charge, Verdict* verdict) except UNDECIDED
    cdef uint64_t denied_ns(self, uint64_t tag, uint64_t cost, uint64_t now_ns) noexcept
    cdef object allowed_now(self, object key)
    cdef int look_at(self, uint64_t tag, uint64_t permits, Look* look) except -1
    cdef Decision decision_seen(self, const Look* look)
    cdef object decided_now(self, object key, uint64_t cost)
    cdef uint64_t checked_cost(self, object cost) except? 0
    cdef Decision new_decision(self, bint allowed, uint64_t left, uint64_t retry_ns, uint64_t rest_ns)
    cdef bint amend(self, uint64_t tag, Decide decide, const void* parameters) except -1
    cdef uint64_t fetch_slot_of(self, uint64_t tag) noexcept
