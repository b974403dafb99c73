"""The slots of a key of a concurrency limit: the words of its cell.

A key has `limit` slots in the words of its cell. A slot is a pair {owner, end of the lease} that only changes as a
whole, by one 128-bit CAS; it is free when the lease has ended or the owner is gone. There are `limit` slots and no
more, so never are more permits held: that is all the proof there is.

Everything else is a hint, and may be wrong at any time. A bit for each slot says that it is probably taken, so that a
free one is found without looking at every slot. It is set after a slot was taken and cleared after it was given back.
A process that is killed in between leaves a bit that is wrong: where it says free, the next one finds the slot taken
and sets it; where it says taken, whoever finds no free bit looks at the slots themselves.

So the bits order nothing, and need no order: acquire and release are what atomic operations on bits come with here.

Only then, before a denial, are ended processes looked for. Their slots are taken away by a CAS from what was seen
there.
"""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.table.native cimport (
    ForebayCell, cas128_acq_rel, clear_bits_acq_rel, load128_acquire, load_acquire, lowest_bit, set_bits_acq_rel,
)
from forebay.core.table.table cimport TIME_BITS


# The slots of one key.
cdef struct Slots:
    uint64_t* bits
    ForebayCell* slots
    uint64_t count


cdef inline bint is_free(ForebayCell slot, uint64_t now_ns) noexcept nogil:
    # A lease that no clock comes to the end of is damage.
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
    if is_free(seen, now_ns) and cas128_acq_rel(&slots.slots[slot], seen, lease):
        mark_taken(slots, slot)
        return True
    return False


cdef inline bint free_slot(const Slots* slots, uint64_t slot, ForebayCell seen) noexcept nogil:
    """Give back a slot that holds what was seen there."""
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


# The same by looking at the slots themselves. If all are held, the end of the lease that ends first.
cdef int64_t take_lapsed_slot(
    const Slots* slots, ForebayCell lease, uint64_t now_ns, uint64_t* first_end_ns
) noexcept nogil
