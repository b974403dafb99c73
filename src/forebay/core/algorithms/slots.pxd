"""The slots of a key of a concurrency limit: the record of its cell.

State
-----
A record is `limit` bits, in whole words, then `limit` slots. A slot is a pair that changes as a whole, by one 128-bit
CAS:

    +----------------------+----------------------+
    | owner; 0: free       | end of the lease, ns |
    +----------------------+----------------------+

A slot is free when it has no owner, when the lease has ended, or when the owner's process has gone. A bit is a hint
that its slot is probably taken, so that a request finds a free slot without reading every slot.

Transitions
-----------
* *take*: a request. Free slot -> {owner, end}, by an acq_rel CAS; then it sets the bit. "slots: one for two"
* *free*: the holder, or a `reset`. The pair that it has seen -> {0, 0}, by an acq_rel CAS; then it clears the bit.
  "slots: leases that end"
* *reclaim*: a request that finds no free slot. A pair of an owner that has gone -> {0, 0}, by an acq_rel CAS. "slots:
  one for two", with a crash

Tested by the planted bugs of slots that docs/correctness.md lists.

Invariant
---------
At most `limit` permits of a key are held.

Proof
-----
There are `limit` slots and no more, and a slot holds one permit. The bits order nothing and need no order: acquire and
release are what atomic operations on bits come with here.

Crash and stall
---------------
A process that is killed between a CAS and its bit leaves a wrong bit. If the bit shows a free slot, the next request
finds the slot taken and sets the bit. If it shows a taken one, a request that finds no free bit reads the slots
themselves. Before it denies, it looks for processes that have ended, and takes their slots by a CAS from what it saw
there.

Not handled
-----------
An evicted key's slots stay, see concurrency.pyx.
"""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.table.native cimport (
    ForebayCell, cas128_acq_rel, clear_bits_acq_rel, load128_acquire, load_acquire, load_relaxed, lowest_bit,
    multiply_high, set_bits_acq_rel, store_relaxed,
)
from forebay.core.table.table cimport TIME_BITS


# The slots of one key.
cdef struct Slots:
    uint64_t* bits
    ForebayCell* slots
    uint64_t count


# Where the slots of all keys are: a record behind each cell.
cdef struct SlotRecords:
    const ForebayCell* cells
    uint64_t* words
    uint64_t words_per_cell
    uint64_t bit_words
    uint64_t last_cell           # that has words
    uint64_t limit


cdef inline Slots slots_at(const SlotRecords* records, uint64_t cell) noexcept nogil:
    """The slots of the cell with this number."""
    cdef Slots slots
    # Damage must not lead out of the extent: only a blocked cell that isn't one any more is beyond the last.
    slots.bits = records.words + min(cell, records.last_cell) * records.words_per_cell
    slots.slots = <ForebayCell*>(slots.bits + records.bit_words)
    slots.count = records.limit
    return slots


cdef inline bint is_free(ForebayCell slot, uint64_t now_ns) noexcept nogil:
    # A lease with an end that no clock reaches is damage.
    return slot.tag == 0 or slot.state <= now_ns or slot.state >> TIME_BITS != 0


cdef inline ForebayCell lease_of(uint64_t owner, uint64_t end_ns) noexcept nogil:
    cdef ForebayCell lease
    lease.tag = owner
    lease.state = end_ns
    return lease


cdef inline void mark_taken(const Slots* slots, uint64_t slot) noexcept nogil:
    cdef uint64_t bit = <uint64_t>1 << (slot % 64)
    if not load_acquire(&slots.bits[slot // 64]) & bit:
        set_bits_acq_rel(&slots.bits[slot // 64], bit)


cdef inline bint take_slot(const Slots* slots, uint64_t slot, ForebayCell lease, uint64_t now_ns) noexcept nogil:
    cdef ForebayCell seen = load128_acquire(&slots.slots[slot])
    # Linearizes here.
    if is_free(seen, now_ns) and cas128_acq_rel(&slots.slots[slot], seen, lease):
        mark_taken(slots, slot)
        return True
    return False


cdef inline bint free_slot(const Slots* slots, uint64_t slot, ForebayCell seen) noexcept nogil:
    """Give back a slot that holds what was seen there."""
    # Linearizes here.
    if cas128_acq_rel(&slots.slots[slot], seen, lease_of(0, 0)):
        clear_bits_acq_rel(&slots.bits[slot // 64], <uint64_t>1 << (slot % 64))
        return True
    return False


cdef inline uint64_t free_bits(const Slots* slots, uint64_t word) noexcept nogil:
    cdef uint64_t bits = ~load_acquire(&slots.bits[word])
    cdef uint64_t used = slots.count - word * 64
    return bits if used >= 64 else bits & ((<uint64_t>1 << used) - 1)


cdef inline int64_t take_any_slot(
    const Slots* slots, uint64_t first, ForebayCell lease, uint64_t now_ns
) noexcept nogil:
    """A slot whose bit says that it is free, from `first` on; -1 if there is none."""
    cdef uint64_t words = (slots.count + 63) // 64
    cdef uint64_t word = first // 64
    cdef uint64_t bits, slot, _
    if take_slot(slots, first, lease, now_ns):
        return first
    for _ in range(words):
        bits = free_bits(slots, word)
        while bits:
            slot = word * 64 + lowest_bit(bits)
            if take_slot(slots, slot, lease, now_ns):
                return slot
            mark_taken(slots, slot)
            bits &= bits - 1
        word = word + 1 if word + 1 < words else 0
    return -1


cdef inline int64_t take_lapsed_slot(
    const Slots* slots, ForebayCell lease, uint64_t now_ns, uint64_t* first_end_ns
) noexcept nogil:
    """The same, from the slots themselves. If all are held, `first_end_ns` gets the earliest end of a lease."""
    cdef uint64_t slot
    first_end_ns[0] = ~<uint64_t>0
    for slot in range(slots.count):
        if take_slot(slots, slot, lease, now_ns):
            return slot
        first_end_ns[0] = min(first_end_ns[0], load_acquire(&slots.slots[slot].state))
    return -1


cdef enum:
    HINTS = 64                           # a power of two


# Where to search for a free slot: what the last requests have found. The threads that share a search need no lock:
# hints are relaxed loads and stores, and the CAS of the slot decides.
cdef struct SlotSearch:
    uint64_t[HINTS] hints                # by cell, a slot that was free a while ago
    uint64_t scanned                     # the cell whose slots were all found held, xor the next two words
    uint64_t again_ns                    # the earliest time of their next scan
    uint64_t first_end_ns                # the earliest end of their leases; 0: not all were held


cdef inline void begin_search(SlotSearch* search, uint64_t seed, uint64_t limit) noexcept nogil:
    """Each searcher starts at other slots, so that searchers don't contend for the same ones."""
    cdef int i
    for i in range(HINTS):
        store_relaxed(&search.hints[i], multiply_high((seed + <uint64_t>i) * <uint64_t>0x9E3779B97F4A7C15, limit))


cdef inline void remember_free(SlotSearch* search, uint64_t cell, uint64_t slot) noexcept nogil:
    """The hint for the next request of a cell's key: a slot that is probably free."""
    store_relaxed(&search.hints[cell % HINTS], slot)


cdef inline int64_t take_hinted_slot(
    const SlotSearch* search, const Slots* slots, uint64_t cell, ForebayCell lease, uint64_t now_ns
) noexcept nogil:
    """`take_any_slot` from the hint on."""
    return take_any_slot(slots, load_relaxed(&search.hints[cell % HINTS]), lease, now_ns)


cdef inline bint was_scanned(
    const SlotSearch* search, const ForebayCell* cell, uint64_t segment_ns, uint64_t now_ns, uint64_t watch_again_ns
) noexcept nogil:
    """Whether the last scan was of this cell, found all its slots held, and needs no repetition yet."""
    cdef uint64_t again_ns = load_relaxed(&search.again_ns)
    cdef uint64_t first_end_ns = load_relaxed(&search.first_end_ns)
    return (
        load_relaxed(&search.scanned) == (<uint64_t>cell ^ again_ns ^ first_end_ns)
        and now_ns < max(again_ns, watch_again_ns) and segment_ns < first_end_ns)


cdef inline void remember_scan(
    SlotSearch* search, const ForebayCell* cell, uint64_t first_end_ns, uint64_t again_ns
) noexcept nogil:
    """Other threads may read and write these words meanwhile. So the first one has all three: words of different scans
    fit no cell.
    """
    store_relaxed(&search.scanned, <uint64_t>cell ^ again_ns ^ first_end_ns)
    store_relaxed(&search.again_ns, again_ns)
    store_relaxed(&search.first_end_ns, first_end_ns)
