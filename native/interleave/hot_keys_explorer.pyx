"""Programs on the record of hot keys for the interleaving explorer: processes note keys in one line of slots."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from forebay.core.explorer cimport (
    OTHER, Program, explore_begin, explore_clock, explore_end, explore_set_clock, explore_share,
)
from forebay.core.table.hot_keys cimport hot_count, note_key
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_HOT_COUNT_BITS, FOREBAY_HOT_LIMITER_BITS, FOREBAY_HOT_TIME_SHIFT, ForebayCell,
    monotonic_ns,
)


cdef ForebayCell[4] slots


cdef inline uint64_t name_of(uint64_t key) noexcept:
    return (key + 1) << FOREBAY_HOT_LIMITER_BITS


cdef class HotKeysProgram(Program):
    """Keys are numbers from 0. The line is empty until `put`."""

    cdef uint64_t keys

    def __init__(self, now_ns):
        super().__init__(now_ns)
        memset(slots, 0, sizeof(slots))
        explore_set_clock(now_ns)
        explore_share(slots, sizeof(slots), b"slots")

    def put(self, slot, key, count):
        """A key's slot before the program begins."""
        slots[<int>slot].tag = name_of(key)
        slots[<int>slot].state = self.now_ns >> FOREBAY_HOT_TIME_SHIFT << FOREBAY_HOT_COUNT_BITS | <uint64_t>count
        self.keys = max(self.keys, <uint64_t>key + 1)

    def note(self, process, key):
        """One note of a key; whether it was stored is its answer."""
        self.next_operation(process, OTHER).tag = name_of(key)
        self.keys = max(self.keys, <uint64_t>key + 1)

    cdef void run_other(self, int index) noexcept:
        cdef uint64_t now_ns
        explore_begin(index, 1)
        now_ns = monotonic_ns()
        explore_end(index, note_key(slots, 1, self.operations[index].tag, 0, now_ns), now_ns, 0)

    cdef int check_other(self) noexcept:
        """Each slot is free or has the name of a key."""
        cdef int i
        for i in range(FOREBAY_CELLS_PER_LINE):
            if slots[i].tag != 0 and slots[i].tag - name_of(0) >= self.keys << FOREBAY_HOT_LIMITER_BITS:
                return 1
        return 0

    def look_for_value(self, key):
        """The sum of the values of a key's slots: a number for `judge`."""
        self.look(lambda: self.value_of(key))

    def value_of(self, key):
        cdef uint64_t value = 0
        cdef int i
        for i in range(FOREBAY_CELLS_PER_LINE):
            if slots[i].tag == name_of(key):
                value += hot_count(slots[i].state, explore_clock() >> FOREBAY_HOT_TIME_SHIFT)
        return value
