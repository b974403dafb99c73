"""The record behind a cell of a limiter that is synced with other hosts. See synced/limiter.pyx."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport Attempt, Charge, AfterCharge, LimitParams
from forebay.core.synced.hot cimport Hot, HotCells
from forebay.core.table.native cimport (
    FOREBAY_SYNCED_CHARGED_BEFORE_WORD, FOREBAY_SYNCED_CHARGED_REPORTED_WORD,
    FOREBAY_SYNCED_CHARGED_WORD, FOREBAY_SYNCED_CHECKSUM_WORD, FOREBAY_SYNCED_COUNT_BITS,
    FOREBAY_SYNCED_INCARNATION_WORD, FOREBAY_SYNCED_NAME_WORD, FOREBAY_SYNCED_OTHERS_WORD,
    FOREBAY_SYNCED_REPORTED_UNTIL_WORD, FOREBAY_SYNCED_REPORTED_WORD, FOREBAY_SYNCED_WORDS_PER_CELL, ForebayCell,
    ForebayHashKey, ForebayLine, load128_acquire, prefetch,
)
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, UNDECIDED, Clear, Decide, Events, Outcome, Table, Verdict, home_line, no_events,
    table_decide, table_now, table_try,
)


cdef enum:
    # Two words: the key's name at Redis, 128 bits.
    NAME = FOREBAY_SYNCED_NAME_WORD
    # The id of the claim by which the key came to the cell.
    INCARNATION = FOREBAY_SYNCED_INCARNATION_WORD
    # The checksum of the words before and of the cell's tag: shows that they belong together.
    CHECKSUM = FOREBAY_SYNCED_CHECKSUM_WORD
    # A synced window has two pairs of words: a window's id and a sequence, and the counts of that window and the one
    # before. The counts of other hosts, from the reply to the report with this sequence:
    OTHERS = FOREBAY_SYNCED_OTHERS_WORD
    # The counts of this host that Redis knows; the sequence of the last report:
    REPORTED = FOREBAY_SYNCED_REPORTED_WORD
    # A synced bucket has two pairs of words. The ns that the cell's keys have been charged, less what was given back;
    # it runs on from key to key:
    CHARGED = FOREBAY_SYNCED_CHARGED_WORD
    # CHARGED when the incarnation began.
    CHARGED_BEFORE = FOREBAY_SYNCED_CHARGED_BEFORE_WORD
    # us of the incarnation that Redis knows of, and the sequence of the last report.
    CHARGED_REPORTED = FOREBAY_SYNCED_CHARGED_REPORTED_WORD
    # When that was read.
    REPORTED_UNTIL = FOREBAY_SYNCED_REPORTED_UNTIL_WORD
    WORDS_PER_CELL = FOREBAY_SYNCED_WORDS_PER_CELL


cdef enum:
    COUNT_BITS = FOREBAY_SYNCED_COUNT_BITS  # of a word of a window
    # An exchange reports one in so many of the keys of which Redis knows everything.
    HOT_ROUNDS = 8
    COLD_ROUNDS = 64
    # The part of its limit from which on a key is hot: one in so many, as in forebay.redis.synced.exchange.
    SHARE = 4
    # In place of a round number: read only, nothing is marked as about to be reported; and only keys of which this host
    # knows less than is published.
    LOOK_ONLY = -3
    BEHIND_ONLY = -4


# A charge, with the name of its key at Redis, and what is published of it.
cdef struct NamedCharge:
    Charge charge                # first: a pointer to it is a pointer to this
    uint64_t[2] name
    bint is_named
    ForebayHashKey checksum_key
    Hot hot


cdef inline bint is_due(uint64_t index, int64_t round_number, bint is_known_hot) noexcept nogil:
    """Whether to report a key although Redis knows all of it. In round -1 every key is due, in others below 0 none."""
    cdef uint64_t rounds = HOT_ROUNDS if is_known_hot else COLD_ROUNDS
    return round_number == -1 or (round_number >= 0 and (index + <uint64_t>round_number) % rounds == 0)


cdef inline ForebayCell* pair_at(uint64_t* record, int place) noexcept nogil:
    """Two words that are only changed together. They have the size of a cell."""
    return <ForebayCell*>(record + place)


cdef inline bint stands(ForebayCell* cell, ForebayCell claim) noexcept nogil:
    """Whether a claim hasn't been promoted or given up yet."""
    cdef ForebayCell again = load128_acquire(cell)
    return again.tag == claim.tag and again.state == claim.state


# A limiter whose cells have records.
cdef class SyncedLimiter(CellLimiter):
    cdef readonly object synced_store
    cdef Extent extent
    cdef ForebayHashKey checksum_key
    cdef object name_of          # from a key to 16 bytes
    cdef object names            # `Names`: the latest of each thread
    cdef HotCells hot_cells
    cdef Decide begin_hot       # the state of a hot key that is inserted without a charge

    cdef int begin(self, object purpose, object keys, object synced_store, object name_of, bytes encoding, Clear clear
                   ) except -1
    cdef bint note(self, object key, uint64_t tag) except -1
    cdef int name_charge(self, uint64_t tag, const Charge* charge, uint64_t now_ns, NamedCharge* named) except -1
    cdef int adopt(self, uint64_t tag, const NamedCharge* named) except -1
    cdef Hot hot_of(self, const uint64_t* name, uint64_t now_ns) noexcept
    cdef uint64_t state_as_hot(self, const Hot* hot, uint64_t now_ns) noexcept
    cdef int keep(self, bytes name, uint64_t end_ns, uint64_t state, uint64_t until_ns) except -1
    cdef int forget_hot_of(self, const uint64_t* name, Events* events) noexcept
    cdef bint is_intact(self, const uint64_t* record, uint64_t tag, uint64_t* seen) noexcept
    cdef tuple report_of(
        self, uint64_t index, uint64_t now_ns, int64_t round_number, const unsigned char* learned, uint64_t* unnamed)


# Write the first value of a pair of words of a claim's key, while the claim stands. A late process writes nothing.
cdef void begin_pair(
    ForebayCell* cell, ForebayCell claim, ForebayCell* pair, uint64_t first, uint64_t second) noexcept nogil

# The pairs that all begin with.
cdef void begin_record(ForebayCell* cell, ForebayCell claim, const NamedCharge* named) noexcept nogil


cdef inline Outcome decide_named(
    SyncedLimiter limiter, object key, uint64_t tag, const Charge* charge, Verdict* verdict, Decide take,
    AfterCharge after_charge,
) except UNDECIDED:
    """As `decide_by`; but a key that is new gets its name before it gets its cell. `key` may be None if that is noted.
    """
    cdef Events events
    cdef NamedCharge named
    cdef Outcome outcome
    cdef bint is_new
    cdef ForebayLine* line = limiter.ensure_attached()
    prefetch(home_line(&limiter.table, tag))
    verdict.now_ns = table_now(&limiter.table)
    verdict.full = False
    verdict.tag = tag
    outcome = table_try(&limiter.table, tag, verdict.now_ns, take, charge, verdict)
    if outcome > ALLOWED:
        is_new = limiter.note(key, tag)
        limiter.name_charge(tag, charge, verdict.now_ns, &named)
        if is_new:
            limiter.adopt(tag, &named)
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &limiter.table, tag, line.number, &line.counters.claims, take, &named.charge, verdict, &events)
        limiter.count_events(&events)
    if verdict.outcome == ALLOWED:
        if after_charge != NULL:
            after_charge(charge, verdict)
        limiter.count_decision_in(line, True, tag)
    else:
        limiter.count_decision_in(line, False, tag)
    return verdict.outcome
