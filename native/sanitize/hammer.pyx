"""The hot path in threads that run without the GIL: for the thread sanitizer.

The calls of a limiter of forebay.core to the table, and of a concurrency limit to its slots and to what its threads
remember of them, in loops.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from forebay.core.algorithms.slots cimport (
    HINTS, Slots, SlotSearch, free_slot, lease_of, remember_free, remember_scan, take_any_slot, take_lapsed_slot,
    was_scanned,
)
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport Charge
from forebay.core.table.native cimport ForebayCell, ForebayLine, fetch_add_relaxed, load128_acquire, load_relaxed
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, Events, Outcome, Verdict, no_events, table_amend, table_count_live, table_decide, table_find,
    table_now, table_peek, table_remove, table_try,
)


cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t size)


cdef enum:
    MOST_TAGS = 4096
    MOST_HELD = 8


cdef inline uint64_t next_random(uint64_t* seed) noexcept nogil:
    """Marsaglia's xorshift."""
    seed[0] ^= seed[0] << 13
    seed[0] ^= seed[0] >> 7
    seed[0] ^= seed[0] << 17
    return seed[0]


cdef void decide(
    CellLimiter limiter, uint64_t tag, const Charge* charge, uint64_t counter_line, uint64_t* sequence, Events* events
) noexcept nogil:
    """As in `decide_by`, without the counting, for which a process has its GIL."""
    cdef Verdict verdict
    cdef Outcome outcome
    verdict.now_ns = table_now(&limiter.table)
    verdict.full = False
    verdict.tag = tag
    outcome = table_try(&limiter.table, tag, verdict.now_ns, limiter.take, charge, &verdict)
    if outcome > ALLOWED:
        events.cas_retries += outcome == CAS_FAILED
        table_decide(&limiter.table, tag, counter_line, sequence, limiter.take, charge, &verdict, events)
    if verdict.outcome == ALLOWED and limiter.after_charge != NULL:
        limiter.after_charge(charge, &verdict)


def hammer(CellLimiter limiter, list keys, uint64_t seed, uint64_t turns):
    """So many operations on these keys, at random; what was rare in them: inserted, evicted, full, CASes lost."""
    cdef uint64_t[MOST_TAGS] tags
    cdef uint64_t count = <uint64_t>len(keys)
    cdef uint64_t i, chance, tag, state, counter_line
    cdef uint64_t* sequence
    cdef ForebayLine* line
    cdef bint removes = not limiter.table.has_record      # with words, a reset is a refund of all
    cdef Charge charge = limiter.unit
    cdef Verdict verdict
    cdef Events events
    if not 1 <= count <= MOST_TAGS:
        raise ValueError(f"1 to {MOST_TAGS} keys")
    for i in range(count):
        tags[i] = limiter.tag_of(keys[i])
    line = limiter.ensure_attached()
    counter_line = line.number
    sequence = &line.counters.claims
    events = no_events()
    with nogil:
        for i in range(turns):
            chance = next_random(&seed)
            tag = tags[(chance >> 8) % count]
            chance %= 64
            if chance < 48:
                decide(limiter, tag, &charge, counter_line, sequence, &events)
            elif chance < 54:
                table_amend(&limiter.table, tag, limiter.give_back, &charge, &events)
            elif chance < 58:
                table_peek(&limiter.table, tag, table_now(&limiter.table), limiter.take, &charge, &verdict)
            elif chance < 60:
                table_find(&limiter.table, tag, &state)
            elif chance < 63:
                if removes:
                    table_remove(&limiter.table, tag, &events)
            elif i % 64 == 0:
                table_count_live(&limiter.table, table_now(&limiter.table))
    return events.inserted, events.evicted, events.full, events.cas_retries


cdef class SharedSearch:
    """Memories of threads of their searches for free slots."""

    cdef SlotSearch search

    def hammer(self, uint64_t seed, uint64_t turns):
        """Remember scans of all cells, and look for them. How many were found by the words of different scans."""
        cdef ForebayCell* cell
        cdef uint64_t _, chance, number, end_ns, mixed = 0
        with nogil:
            for _ in range(turns):
                chance = next_random(&seed)
                number = (chance >> 8) % HINTS
                cell = <ForebayCell*>((number + 1) << 4)
                # When the leases that each scan of this cell has found end. At that time no scan of it is found.
                end_ns = (number + 1) << 32
                if chance % 4 == 0:
                    remember_scan(&self.search, cell, end_ns, <uint64_t>1 << 62 | chance >> 8)
                    remember_free(&self.search, number, chance % HINTS)
                else:
                    mixed += was_scanned(&self.search, cell, end_ns, 0, 0)
        return mixed


cdef class SharedSlots:
    """Slots of one key, in memory of their own."""

    cdef Slots slots
    cdef void* memory
    cdef uint64_t held                   # by all threads
    cdef readonly uint64_t count

    def __cinit__(self, uint64_t count):
        cdef uint64_t bit_words = (count + 127) // 128 * 2
        cdef size_t size = (bit_words + 2 * count) * sizeof(uint64_t)
        self.memory = aligned_alloc(16, size)
        if self.memory == NULL:
            raise MemoryError
        memset(self.memory, 0, size)
        self.count = self.slots.count = count
        self.slots.bits = <uint64_t*>self.memory
        self.slots.slots = <ForebayCell*>(self.slots.bits + bit_words)

    def __dealloc__(self):
        free(self.memory)

    def hammer(self, uint64_t me, uint64_t seed, uint64_t turns):
        """Take slots and give them back; how many were held at the most, by all, and how often none was free."""
        cdef ForebayCell lease = lease_of(me, <uint64_t>1 << 61)
        cdef uint64_t[MOST_HELD] mine
        cdef uint64_t _, chance, first_end_ns, most = 0, denied = 0
        cdef int held = 0
        cdef int64_t slot
        with nogil:
            for _ in range(turns):
                chance = next_random(&seed)
                if held < MOST_HELD and chance % 16 < 9:
                    slot = take_any_slot(&self.slots, (chance >> 8) % self.slots.count, lease, 1)
                    if slot < 0:
                        slot = take_lapsed_slot(&self.slots, lease, 1, &first_end_ns)
                    if slot < 0:
                        denied += 1
                    else:
                        mine[held] = <uint64_t>slot
                        held += 1
                        most = max(most, fetch_add_relaxed(&self.held, 1) + 1)
                elif held > 0:
                    held -= 1
                    # Before: another thread may have the slot at once.
                    fetch_add_relaxed(&self.held, <uint64_t>-1)
                    free_slot(&self.slots, mine[held], lease)
            while held > 0:
                held -= 1
                fetch_add_relaxed(&self.held, <uint64_t>-1)
                free_slot(&self.slots, mine[held], lease)
        return most, denied

    def left(self):
        """How many are held."""
        cdef uint64_t i, taken = 0
        for i in range(self.slots.count):
            taken += load128_acquire(&self.slots.slots[i]).tag != 0
        return taken + load_relaxed(&self.held)
