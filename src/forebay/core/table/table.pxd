"""The table: which cells may hold a key, the search for its cell, and the only place that changes one.

A limiter passes a *decision function*, which knows states and times but no memory. The table finds the key's state,
calls the function, and swaps its result in by one 128-bit CAS. The usual case is inlined here; table.pyx has the rest.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_KIND_BITS, FOREBAY_LINES_PER_GROUP, ForebayCell,
    cas128_acq_rel, likely, load128_acquire, load_acquire, monotonic_ns, multiply_high,
)


# The policy for a new key when every cell of its probe set holds a live key.
cdef enum OnFull:
    EVICT
    DENY
    ALLOW


# The state that an allowed request leaves.
cdef struct Next:
    uint64_t state
    uint64_t decided_ns          # for limiters with a record: the time that the decision was made for


# Whether a request passes the `state` of the key with this `tag` at `now_ns`; if so, it leaves `next`. A fresh key has
# state 0, except for the bits that belong to the cell. Pure, for limiters whose state is the cell: it reads nothing but
# its arguments. For the others `cell` locates the key's record; NULL if the key has no cell.
ctypedef bint (*Decide)(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil

# Write what must stand in the record of a cell before a CAS changes its state to `next`. The CAS may fail.
ctypedef void (*Prepare)(
    ForebayCell* cell, uint64_t state, const Next* next, const void* parameters
) noexcept nogil

# Clear the record of a cell that is claimed for a key of what the earlier key left. Other processes may do the same at
# the same time, or may have promoted the claim meanwhile; then it must do no harm.
ctypedef void (*Clear)(
    ForebayCell* cell, ForebayCell claim, uint64_t now_ns, const void* parameters
) noexcept nogil


# How much the key of a cell has used: 0 for the least that a live key can have. Eviction chooses by it. It reads the
# record while others may change it, so it may be wrong then. `context` is `Table.used_context`.
ctypedef uint64_t (*Used)(ForebayCell* cell, uint64_t state, uint64_t now_ns, const void* context) noexcept nogil


cdef enum:
    # The lowest bits of a state of KIND_USED: the more permits the key has used, the larger.
    USED_BITS = 3
    MOST_USED = (1 << USED_BITS) - 1


# Where the segment's header says whether and where a resize has moved the table: see moving.pxd.
cdef struct Home:
    const uint64_t* progress     # the header's `resize_progress`: odd while a resize is under way
    bint (*follow)(void* table) noexcept nogil


# A process's view of one table. It is copied out of the validated header once, so no later write to the segment can
# move a pointer. Only `Home.follow` changes it: `cells`, `group_count`, `place` and `epoch`.
cdef struct Table:
    ForebayCell* cells
    uint64_t group_count
    uint64_t line_mask           # which of a group's lines are home lines
    uint64_t epoch_ns
    uint64_t* manual_ns          # NULL: the clock is CLOCK_MONOTONIC
    OnFull on_full
    bint has_record               # a key has more than its cell
    ForebayCell* end            # NULL, or the first cell that is not to be used
    Prepare prepare              # NULL: nothing
    Clear clear                  # NULL: nothing
    Used used                    # NULL: states order their keys
    const void* used_context
    int kept_bits                # low bits of a state that belong to the cell, not to the key that is in it
    bint new_may_be_denied       # whether a fresh key's request may be denied: then it inserts nothing
    Home* home                  # NULL: no resize moves this table, as it is an extent's
    uint64_t place               # the header's `moved_table` that `cells` and `group_count` are of
    uint64_t epoch               # the header's `resize_progress` by which that was the table, and no resize under way


cdef enum Outcome:
    DENIED = 0
    ALLOWED = 1
    UNDECIDED = 2                # only from table_try: the key isn't there, or its cell changed meanwhile
    CAS_FAILED = 3               # only from table_try: the cell changed before the CAS


# A decision and what it was made from. `state` is the state that it left when it allowed, that it met when it
# denied; with `full` and a denial, the time at which the first cell of the probe set expires.
cdef struct Verdict:
    Outcome outcome
    bint full
    uint64_t state
    uint64_t now_ns
    uint64_t decided_ns          # as in Next
    ForebayCell* cell           # the key's; NULL if there is none
    uint64_t tag                 # the key's; for limiters, the table doesn't use it


# Rare events of a decision, gathered on the stack and added to the counters once it is made.
cdef struct Events:
    uint64_t inserted
    uint64_t evicted
    uint64_t full
    uint64_t cas_retries


cdef inline Events no_events() noexcept nogil:
    return Events(0, 0, 0, 0)


# No time in a state is later than this: 73 years of segment time and as much ahead. One that is, is damage, except a
# state of KIND_TAT in which all bits from PERMIT_BITS to TIME_BITS are set, and one below. That is a number of permits,
# and no time: it never expires, and is never evicted. See algorithms/gcra.pxd. A time has these bits only after 146
# years, except the highest: so no damage of a few bits makes permits of a time.
cdef enum:
    TIME_BITS = 62
    PERMIT_BITS = 48


cdef inline uint64_t most_permits() noexcept nogil:
    return (<uint64_t>1 << PERMIT_BITS) - 1


cdef inline uint64_t state_of_permits(uint64_t permits) noexcept nogil:
    return (<uint64_t>2 << TIME_BITS) - (<uint64_t>1 << PERMIT_BITS) | permits


cdef inline bint holds_permits(uint64_t state) noexcept nogil:
    """Whether a state of KIND_TAT is a number of permits."""
    return state - state_of_permits(0) - 1 < most_permits()


cdef inline uint64_t permits_in(uint64_t state) noexcept nogil:
    """The number of permits that a state is; 0 if it is a time or damage."""
    return state & most_permits() if holds_permits(state) else 0


cdef inline uint64_t cells_in(const Table* table) noexcept nogil:
    return table.group_count * <uint64_t>(FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE)


cdef inline bint is_moving(const Table* table) noexcept nogil:
    """Whether a resize may have frozen cells of this table, or moved it, since `epoch`."""
    return table.home != NULL and load_acquire(table.home.progress) != table.epoch


cdef inline uint64_t table_now(const Table* table) noexcept nogil:
    if likely(table.manual_ns == NULL):
        return monotonic_ns() - table.epoch_ns
    return load_acquire(table.manual_ns)


cdef inline uint64_t fingerprint_of(uint64_t tag) noexcept nogil:
    return tag >> FOREBAY_KIND_BITS << FOREBAY_KIND_BITS


cdef inline ForebayCell* home_line(const Table* table, uint64_t tag) noexcept nogil:
    """The first line of a key's probe set."""
    cdef uint64_t fingerprint = fingerprint_of(tag)
    cdef uint64_t group = multiply_high(fingerprint, table.group_count)
    # The group uses the high bits, the line within it the lowest ones of the fingerprint.
    cdef uint64_t line = (fingerprint >> FOREBAY_KIND_BITS) & table.line_mask
    return table.cells + (group * FOREBAY_LINES_PER_GROUP + line) * FOREBAY_CELLS_PER_LINE


cdef inline ForebayCell* find_in_line(ForebayCell* line, uint64_t tag) noexcept nogil:
    """The first cell of a line that has this tag, or NULL.

    Written for conditional moves and one branch: over many keys, which cell it is can't be predicted.
    """
    cdef int found = 4
    found = 3 if load_acquire(&line[3].tag) == tag else found
    found = 2 if load_acquire(&line[2].tag) == tag else found
    found = 1 if load_acquire(&line[1].tag) == tag else found
    found = 0 if load_acquire(&line[0].tag) == tag else found
    return line + found if found < 4 else NULL


cdef inline Outcome table_try_cell(
    const Table* table, ForebayCell* cell, uint64_t tag, uint64_t now_ns, Decide decide, const void* parameters,
    Verdict* verdict,
) noexcept nogil:
    """The usual case: the key is in `cell`, where its tag was seen, and no other process is changing it.

    Tag and state are two loads, so they may belong to different keys. That is safe: if the request is allowed, the CAS
    fails unless both are still what was read; if it is denied, one 16-byte load must find the same pair. A decision
    function that may complete another process's write needs a pair that belongs together. So for tables with records
    one 16-byte load comes first.

    A denial writes nothing (I-3). Either way the decision touches one line of the table (I-4).
    """
    cdef ForebayCell seen
    cdef ForebayCell wanted
    cdef Next next
    if table.has_record:
        # SYNC claim -> help, in algorithms/sliding_log.pyx.
        seen = load128_acquire(cell)
        if seen.tag != tag:
            return UNDECIDED
    else:
        seen.tag = tag
        seen.state = load_acquire(&cell.state)
    verdict.cell = cell
    next.decided_ns = now_ns
    if decide(cell, tag, seen.state, now_ns, parameters, &next):
        wanted.tag = tag
        wanted.state = next.state
        if table.prepare != NULL:
            table.prepare(cell, seen.state, &next, parameters)
        # Linearizes here.
        if not likely(cas128_acq_rel(cell, seen, wanted)):
            return CAS_FAILED
        verdict.state = next.state
        verdict.decided_ns = next.decided_ns
        verdict.outcome = ALLOWED
        return ALLOWED
    # Linearizes here.
    wanted = load128_acquire(cell)
    if wanted.tag != tag or wanted.state != seen.state:
        return UNDECIDED
    verdict.state = seen.state
    verdict.outcome = DENIED
    return DENIED


cdef inline Outcome table_try_line(
    const Table* table, ForebayCell* line, uint64_t tag, uint64_t now_ns, Decide decide, const void* parameters,
    Verdict* verdict,
) noexcept nogil:
    """`table_try_cell` for a key in this line, its home line; UNDECIDED if it isn't there."""
    cdef ForebayCell* cell = line
    cdef ForebayCell* end = cell + FOREBAY_CELLS_PER_LINE
    # A branch for each cell: a key with many requests is found where it was before.
    while load_acquire(&cell.tag) != tag:
        cell += 1
        if cell == end:
            return UNDECIDED
    return table_try_cell(table, cell, tag, now_ns, decide, parameters, verdict)


cdef inline Outcome table_try(
    const Table* table, uint64_t tag, uint64_t now_ns, Decide decide, const void* parameters, Verdict* verdict,
) noexcept nogil:
    """`table_try_line` with the home line."""
    return table_try_line(table, home_line(table, tag), tag, now_ns, decide, parameters, verdict)


# Those that follow wait while a resize has the key's cell frozen, and then use the table that it has made. If the
# resize was stopped, a key is found nowhere until it goes on, and a decision has no room.

# The cell of a key and the state in it; NULL and 0 if there is none.
cdef ForebayCell* table_find(Table* table, uint64_t tag, uint64_t* state) noexcept nogil

# Whether a request would be allowed; `verdict` is left with the key's cell and its state as it is.
cdef bint table_peek(
    Table* table, uint64_t tag, uint64_t now_ns, Decide decide, const void* parameters, Verdict* verdict
) noexcept nogil

# When a cell of this table may be reused: 0 for an empty one, the largest number for one that no key may take.
cdef uint64_t expiry_of(const Table* table, ForebayCell cell, uint64_t now_ns) noexcept nogil

# Start fetching the lines of a key's probe set other than its home line.
cdef void prefetch_away(const Table* table, uint64_t tag) noexcept nogil

# Every other case. Decides what table_try could not, ALLOWED or DENIED, by the clock reading in `verdict`. An insertion
# reads the clock again and leaves that reading in `verdict`.
cdef void table_decide(
    Table* table, uint64_t tag, uint64_t counter_line, uint64_t* claim_sequence, Decide decide,
    const void* parameters, Verdict* verdict, Events* events,
) noexcept nogil

# Replace the state of a key's member by the next state of `decide`, if there is a member and `decide` allows it.
# Returns whether it did.
cdef bint table_amend(
    Table* table, uint64_t tag, Decide decide, const void* parameters, Events* events,
) noexcept nogil

# Forget a key.
cdef void table_remove(Table* table, uint64_t tag, Events* events) noexcept nogil

# How many cells hold a key whose state still matters at `now_ns`.
cdef uint64_t table_count_live(Table* table, uint64_t now_ns) noexcept nogil
