"""The fields of every limiter, and a request as the core sees it."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from forebay.core.decision cimport Decision, Outlook
from forebay.core.reservation cimport Reservable
from forebay.core.table.native cimport (
    COUNTER_ALLOWED, COUNTER_DENIED, ForebayCell, ForebayCounter, ForebayHashKey, ForebayLine, ForebayLines, count_in,
    count_plain, fetch_add_relaxed, likely, load_relaxed, native_line_here, store_relaxed,
)
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport Events, Table, Verdict
from forebay.core.table.threads cimport thread_here


# A limit in the units of its decision. Each algorithm uses the fields that it needs.
cdef struct LimitParams:
    uint64_t limit               # the most permits that can be allowed at once
    uint64_t rate_limit          # the rate: so many permits
    uint64_t period_ns           # per this time, which is the window of a window
    uint64_t tolerance_ns        # GCRA: how far ahead of now the theoretical arrival time may be
    uint64_t due_ns              # GCRA: if it is at most this far ahead, the time of every booking has come
    bint may_exceed              # GCRA: whether a key may have more permits than the limit
    uint64_t phase_ns            # a window begins when time plus this is a multiple of the period
    bint staggered               # whether each key's phase has an offset of its own
    uint64_t steps               # windows that begin with a request: how many moments of a period may begin one
    int low_bits                 # KIND_COUNT and KIND_USED states: bits below the time
    int used_bits                # window of KIND_USED: bits below the count, see `level_of`
    int previous_bits            # sliding window: bits that hold the previous window's count
    int previous_shift           # sliding window: that count is in units of 2 to the power of this
    bint rounds_up               # sliding window: whether the previous window's part is rounded up
    int buckets                  # bucketed window
    int window_shift             # synced window: 2 to the power of this is at most its period
    const ForebayCell* cells    # an extent's table; the words of its cells follow
    uint64_t* records
    uint64_t words_per_cell
    uint64_t last_cell           # the last cell that has words
    uint64_t end_ns              # the end of some window: a cache
    const Table* table           # the extent's; the store's, if `may_exceed`
    uint64_t missing_ns          # bucket with initial permits: the time in which those come that a new key lacks
    const int64_t* edges         # windows by the calendar: where they begin and end, ascending; else NULL


cdef inline LimitParams copy_of(const LimitParams* params) noexcept nogil:
    """A copy for one call, while other threads store the end of a window in the original."""
    cdef LimitParams copy
    cdef size_t before = <size_t>(<const char*>&params.end_ns - <const char*>params)
    cdef size_t after = before + sizeof(params.end_ns)
    memcpy(&copy, params, before)
    copy.end_ns = load_relaxed(&params.end_ns)
    memcpy(<char*>&copy + after, <const char*>params + after, sizeof(LimitParams) - after)
    return copy


cdef inline uint64_t* record_of(const LimitParams* params, const ForebayCell* cell) noexcept nogil:
    """The words behind a cell of an extent."""
    # Damage must not lead out of the extent: only a blocked cell that isn't one any more is beyond the last.
    return params.records + min(<uint64_t>(cell - params.cells), params.last_cell) * params.words_per_cell


# The charge of one request to one limit.
cdef struct Charge:
    uint64_t amount              # added to the state: permits or ns
    uint64_t room                # the most that the state may hold before, in the same unit
    uint64_t max_wait_ns         # the longest delay of a booking, for limits that can be booked ahead
    uint64_t charged_state       # to give a charge back: the state that it left; 0 for a refund of some earlier charge
    const LimitParams* params


# Writes the words outside of the cell, after a request was allowed.
ctypedef void (*AfterCharge)(const Charge* charge, const Verdict* verdict) noexcept nogil

# Fills in the charge of a request for so many permits, at most the limit.
ctypedef void (*SetCharge)(uint64_t permits, const LimitParams* params, Charge* charge) noexcept nogil

# Fills in what a key may expect after a verdict, in an `Outlook` that `no_outlook` has made.
ctypedef void (*Describe)(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook) noexcept nogil


# One limit's part of a request to several limits.
cdef struct Attempt:
    uint64_t tag
    const Charge* charge             # the limiter's for a cost of 1, or the next field
    Charge own_charge
    Verdict verdict
    ForebayCell seen
    ForebayCell wanted


cdef inline void add_to_counter(uint64_t* counter, uint64_t n, bint is_shared) noexcept nogil:
    """Add to a counter of a line that is shared, or that only the calling thread writes."""
    if is_shared:
        fetch_add_relaxed(counter, n)
    else:
        store_relaxed(counter, load_relaxed(counter) + n)


# Warn if the segment's file was removed.
cdef int check_name(object store) except -1

cdef void report_unraisable(object error) noexcept


cdef class Limiter(Reservable):
    cdef Table table                         # the segment's, copied here so that a decision reads one object
    cdef ForebayHashKey hash_key            # derived from the segment's and the limiter's name
    cdef ForebayLines lines                  # the counter lines in use: with the GIL one, else one for each thread
    cdef Segment segment                     # keeps the mapping alive
    cdef readonly object store
    cdef readonly str name
    cdef int number                          # position in the segment's list of limiters
    cdef object __weakref__

    cdef int register(self, uint32_t algorithm, bytes encoding, uint64_t most) except -1
    cdef int note_name(self, uint32_t algorithm, bytes encoding) except -1
    cdef ForebayLine* attach_process(self) except NULL
    cdef int attach_shared_line(self, ForebayLine* line) except -1
    cdef void count_events(self, const Events* events) noexcept
    cdef void count_and_note(self, ForebayLine* line, bint allowed, uint64_t tag) noexcept
    cdef void note_decision(self, ForebayLine* line, bint allowed, uint64_t tag) noexcept

    # For AllOf, in order: begin an attempt; check it without a write; charge it if the state hasn't changed since;
    # charge it by a new decision; give it back; make its Decision.
    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1
    cdef int check(self, Attempt* attempt, uint64_t now_ns) except -1
    cdef int try_commit(self, Attempt* attempt) except -1
    cdef int commit(self, Attempt* attempt) except -1
    cdef int roll_back(self, Attempt* attempt) except -1
    cdef Decision decision_of(self, const Attempt* attempt, bint allowed)

    cdef inline ForebayLine* line_here(self) noexcept:
        """The counter line of the calling thread."""
        return native_line_here(&self.lines, thread_here)

    cdef inline ForebayLine* ensure_attached(self) except NULL:
        """Before every decision: after a fork or a close, attach the limiter to this process again.

        Returns the counter line of the calling thread.
        """
        cdef ForebayLine* line = self.line_here()
        if line.attached_generation != load_relaxed(line.generation):
            return self.attach_process()
        return line

    cdef inline ForebayLine* ensure_attached_to_return(self) except NULL:
        """``ensure_attached`` before a charge is given back. A check of the name waits for the next decision.

        The check may raise what a signal handler raises, and a decision over several limits may be half done.
        """
        cdef ForebayLine* line = self.line_here()
        if line.checks_name and line.line_generation == load_relaxed(line.generation):
            return line
        return self.ensure_attached()

    cdef inline void count(self, ForebayCounter counter, uint64_t n) noexcept:
        """Add to a counter of the calling thread's line."""
        count_in(self.line_here(), counter, n)

    cdef inline void count_decision_in(self, ForebayLine* line, bint allowed, uint64_t tag) noexcept:
        """Count a decision about a key in the calling thread's line."""
        if likely(line.is_plain):
            count_plain(line, COUNTER_ALLOWED if allowed else COUNTER_DENIED)
        else:
            self.count_and_note(line, allowed, tag)

    cdef inline void count_decision(self, bint allowed, uint64_t tag) noexcept:
        self.count_decision_in(self.line_here(), allowed, tag)
