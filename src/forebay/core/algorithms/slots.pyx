"""Looking for a slot when no bit says that one is free."""

from libc.stdint cimport int64_t, uint64_t

from forebay.core.table.native cimport ForebayCell, load_acquire


cdef int64_t take_lapsed_slot(
    const Slots* slots, ForebayCell lease, uint64_t now_ns, uint64_t* first_end_ns
) noexcept nogil:
    cdef uint64_t slot
    first_end_ns[0] = ~<uint64_t>0
    for slot in range(slots.count):
        if take_slot(slots, slot, lease, now_ns):
            return slot
        first_end_ns[0] = min(first_end_ns[0], load_acquire(&slots.slots[slot].state))
    return -1
