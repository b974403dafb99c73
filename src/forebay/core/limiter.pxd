"""The fields of every limiter, and a request as the core sees it."""

from cpython.object cimport newfunc
from libc.stdint cimport uint32_t, uint64_t

from forebay.core.decision cimport Decision
from forebay.core.table.native cimport (
    ForebayCell, ForebayCounterLine, ForebayHashKey, fetch_add_relaxed, load_relaxed, store_relaxed,
)
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport Events, Table, Verdict


# Let stores other than shared memory make limiters of a class in their own way.
cdef int let_stores_make(type kind, newfunc make=*) except -1


# A limit in the units of its decision. Each algorithm uses the fields that it needs.
cdef struct LimitParams:
    uint64_t limit               # the most permits that can be allowed at once
    uint64_t rate_limit          # the rate: so many permits
    uint64_t period_ns           # per this time, which is the window of a window
    uint64_t tolerance_ns        # GCRA: how far ahead of now the theoretical arrival time may be
    uint64_t due_ns              # and so far ahead, every request that booked may have gone
    uint64_t phase_ns            # windows begin where time plus this is a multiple of the period
    bint staggered               # and plus a phase of each key's own
    uint64_t steps               # of windows that begin with a request: the moments of a period at which one may
    int low_bits                 # of a KIND_COUNT state: how many bits below its time
    int previous_bits            # of those, how many hold the previous window's count
    int previous_shift           # which is kept in units of 2 to the power of this
    bint rounds_up               # and whose part that still counts is rounded up
    int buckets                  # of a bucketed window
    int window_shift             # of a synced window: 2 to the power of this is at most its period
    const ForebayCell* cells    # of an extent: its table, and the words behind it
    uint64_t* records
    uint64_t words_per_cell
    uint64_t last_cell           # that has words
    uint64_t end_ns              # of some window: a cache
    const Table* table           # of the extent


# What one request charges a limit.
cdef struct Charge:
    uint64_t amount              # what it adds to the state: permits or ns
    uint64_t room                # what there may be before, in the same unit
    uint64_t max_wait_ns         # for limits that can be booked ahead: how far
    uint64_t charged_state       # to take a charge back: the state that it left; 0 for a refund of some earlier one
    const LimitParams* params


# Runs after a request was allowed: what has to be written outside of the cell.
ctypedef void (*AfterCharge)(const Charge* charge, const Verdict* verdict) noexcept nogil


# One limit's part of a request of several limits.
cdef struct Attempt:
    uint64_t tag
    const Charge* charge             # the limiter's for a cost of 1, or this one:
    Charge own_charge
    Verdict verdict
    ForebayCell seen
    ForebayCell wanted


cdef class Limiter:
    cdef Table table                         # the segment's, copied here so that a decision reads one object
    cdef ForebayHashKey hash_key            # derived from the segment's and the limiter's name
    cdef ForebayCounterLine* counters       # this process's line, or the limiter's shared one
    cdef bint counters_are_shared
    cdef uint64_t line_generation            # the generation in which `counters` was taken; 0: not yet
    cdef uint64_t attached_generation        # the same; but 0 if something has to be done before every decision
    cdef const uint64_t* generation
    cdef uint64_t claim_stripe               # the counter line's number, part of claim ids
    cdef Segment segment                     # keeps the mapping alive
    cdef readonly object store
    cdef readonly str name
    cdef bint checks_name                    # the next decision first checks the name of the segment's file
    cdef int number                          # position in the segment's list of limiters

    cdef int register(self, uint32_t algorithm, bytes encoding) except -1
    cdef int attach_process(self) except -1
    cdef int attach_shared_line(self) except -1
    cdef void count_events(self, const Events* events) noexcept

    # For AllOf: begin an attempt; check it without writing; charge it if nothing has changed since; charge it by a new
    # decision; give it back; its Decision.
    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1
    cdef int check(self, Attempt* attempt, uint64_t now_ns) except -1
    cdef int try_commit(self, Attempt* attempt) except -1
    cdef int commit(self, Attempt* attempt) except -1
    cdef int roll_back(self, Attempt* attempt) except -1
    cdef Decision decision_of(self, const Attempt* attempt, bint allowed)

    cdef inline int ensure_attached(self) except -1:
        """Before every decision: after a fork or a close, attach the limiter to this process again."""
        if self.attached_generation != self.generation[0]:
            return self.attach_process()
        return 0

    cdef inline void count(self, uint64_t* counter, uint64_t n) noexcept:
        """Called with the GIL held, which makes load and store one step among this process's threads."""
        if self.counters_are_shared:
            fetch_add_relaxed(counter, n)
        else:
            store_relaxed(counter, load_relaxed(counter) + n)
