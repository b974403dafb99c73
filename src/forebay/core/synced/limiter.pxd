"""The words behind a cell of a limiter that is synced with other hosts. See synced/limiter.pyx."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport Ask, Draw, Record, Shape
from forebay.core.table.native cimport ForebayCell, ForebayHashKey, load128_acquire, prefetch
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport (
    ALLOWED, LOST, UNDECIDED, Clear, Decide, Events, Outcome, Table, Verdict, home_line, table_decide, table_now,
    table_try,
)


cdef enum:
    NAME = 0                     # two words: what the key is called at Redis, 128 bits
    BIRTH = 2                    # the id of the claim by which the key has come to the cell
    SEAL = 3                     # a hash of the words before and of the cell's tag: they belong together
    # Of a window, two pairs of words: a window's id and a ticket, and what was counted in it and in the one before.
    OTHERS = 4                   # by other hosts, as was answered to the question with this ticket
    TOLD = 6                     # by this host, as far as Redis knows; the ticket of the last question
    # Of a bucket, two pairs of words:
    CHARGED = 4                  # ns that the cell's keys have been charged, less what was given back; it never stops
    CHARGED_BEFORE = 5           # what that was at the key's birth
    CHARGED_TOLD = 6             # us since its birth that Redis knows of, and the ticket of the last question
    TOLD_UNTIL = 7               # when that was read
    WORDS_PER_CELL = 8


cdef enum:
    COUNT_BITS = 32              # of a word of a window
    # Of keys of which Redis knows all, every so manieth is asked for in one exchange.
    IDLE_TURNS = 8
    # In place of a turn: nothing is asked for, and nothing is about to be told.
    LOOK_ONLY = -3


# A request, with what its key is called at Redis.
cdef struct NamedDraw:
    Draw draw                    # first: a pointer to it is a pointer to this
    uint64_t[2] name
    bint is_named
    ForebayHashKey seal_key


cdef inline uint64_t* words_of(const Shape* shape, const ForebayCell* cell) noexcept nogil:
    # Damage must not lead out of the extent: only a blocked cell that isn't one any more is beyond the last.
    return shape.words + min(<uint64_t>(cell - shape.cells), shape.last_cell) * WORDS_PER_CELL


cdef inline bint is_turn(uint64_t index, int64_t turn) noexcept nogil:
    """Whether a cell's key is asked for although Redis knows all of it. At turn -1 each is, at others below 0 none."""
    return turn == -1 or (turn >= 0 and (index + <uint64_t>turn) % IDLE_TURNS == 0)


cdef inline ForebayCell* pair_at(uint64_t* words, int place) noexcept nogil:
    """Two words that are only changed together. They have the size of a cell."""
    return <ForebayCell*>(words + place)


cdef inline bint stands(ForebayCell* cell, ForebayCell claim) noexcept nogil:
    """Whether a claim hasn't been promoted or given up yet."""
    cdef ForebayCell again = load128_acquire(cell)
    return again.tag == claim.tag and again.state == claim.state


# A limiter whose cells have words behind them.
cdef class SyncedLimiter(CellLimiter):
    cdef readonly object synced_store
    cdef Extent extent
    cdef ForebayHashKey seal_key
    cdef object name_of          # from a key to 16 bytes
    cdef dict names              # the latest, by tag

    cdef int begin(self, object purpose, object keys, object synced_store, object name_of, bytes encoding, Clear clear
                   ) except -1
    cdef int note(self, object key, uint64_t tag) except -1
    cdef int name_draw(self, uint64_t tag, const Draw* draw, NamedDraw* named) except -1
    cdef bint is_sealed(self, const uint64_t* words, uint64_t tag, uint64_t* seen) noexcept
    cdef tuple report_of(self, uint64_t index, uint64_t now_ns, int64_t turn, uint64_t* unnamed)


# What a pair of words of a claim's key begins with: written while the claim stands, and by nobody who is late.
cdef void begin_pair(
    ForebayCell* cell, ForebayCell claim, ForebayCell* pair, uint64_t first, uint64_t second) noexcept nogil

# The pairs that all begin with.
cdef void begin_words(ForebayCell* cell, ForebayCell claim, const NamedDraw* named) noexcept nogil


cdef inline Outcome decide_named(
    SyncedLimiter limiter, object key, uint64_t tag, const Draw* draw, Verdict* verdict, Decide take, Record record,
) except UNDECIDED:
    """As `decide_by`; but a key that is new gets its name before it gets its cell. `key` may be None if that is noted.
    """
    cdef Events events
    cdef NamedDraw named
    cdef Outcome outcome
    limiter.check_bound()
    prefetch(home_line(&limiter.table, tag))
    verdict.now_ns = table_now(&limiter.table)
    verdict.full = False
    verdict.tag = tag
    outcome = table_try(&limiter.table, tag, verdict.now_ns, take, draw, verdict)
    if outcome > ALLOWED:
        if key is not None:
            limiter.note(key, tag)
        limiter.name_draw(tag, draw, &named)
        events.inserted = events.evicted = events.full = 0
        events.cas_retries = outcome == LOST
        table_decide(
            &limiter.table, tag, limiter.claim_stripe, &limiter.counters.claims, take, &named.draw, verdict, &events)
        limiter.count_events(&events)
    if verdict.outcome == ALLOWED:
        if record != NULL:
            record(draw, verdict)
        limiter.count(&limiter.counters.allowed, 1)
    else:
        limiter.count(&limiter.counters.denied, 1)
    return verdict.outcome
