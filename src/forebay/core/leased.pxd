from libc.stdint cimport uint64_t

from forebay.core.decision cimport Decision
from forebay.core.lease_steps cimport LeaseCharge
from forebay.core.limiter cimport Limiter
from forebay.core.table.table cimport UNDECIDED, Decide, Outcome, Verdict


# The answer that a request would get, by the host's memory alone.
cdef struct Look:
    Outcome outcome              # ALLOWED, DENIED or UNDECIDED
    uint64_t left                # permits of the lease
    uint64_t retry_ns
    uint64_t rest_ns             # of the lease, or of the denial


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
