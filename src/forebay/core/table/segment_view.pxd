"""A segment's bytes in this process's address space."""

from libc.stdint cimport uint64_t

from forebay.core.table.hot_keys cimport HotKeys
from forebay.core.table.native cimport (
    ForebayCell, ForebayCounterLine, ForebayHashKey, ForebayHeader, coarse_ns, take_due,
)
from forebay.core.table.table cimport Home, Table

cdef enum:
    NAME_CHECK_NS = 10_000_000_000


# Memory behind the table, mapped by itself.
cdef class Extent:
    cdef char* base                      # NULL only before __cinit__ is through
    cdef readonly size_t size
    cdef readonly uint64_t keys          # live keys that it was made for
    cdef readonly uint64_t used_cells    # that they may live in, and that have words
    cdef Table table                     # its own, of the segment's time and policy
    cdef uint64_t* records                # behind the table: so many for each of its cells

    cdef uint64_t* word_at(self, uint64_t number) except NULL


# The mapping of a table that a resize has made. None ends before its segment's: another thread may decide by it.
cdef struct View:
    uint64_t place               # as in `Table`
    ForebayCell* cells
    uint64_t group_count
    char* base
    size_t size
    View* before


# What it takes to follow a resize. Each `Table.home` of this process leads here.
cdef struct Moves:
    Home home                    # the first field: `follow` gets its address
    char* base                   # the segment's
    uint64_t made_bytes          # of the segment as it was made: each table that a resize makes lies behind
    ForebayHashKey hash_key
    View* views                  # the newest; changed by CAS, as threads without the GIL may follow, too
    const char* path             # NULL: this process can't end a resize whose mover died
    uint64_t device              # which file has to be there
    uint64_t inode
    uint64_t given_up            # the `resize_progress` of a mover that was stopped


# All that a mover does: see moving.pxd. The words for the header are those of `target`. Returns for how many live keys
# that has no room; then the table stays where it is.
cdef uint64_t move_cells(
    const Table* table, const Table* target, ForebayHeader* header, uint64_t place, uint64_t keys, uint64_t check,
    uint64_t* live,
) noexcept nogil


cdef class Segment:
    cdef Table table                     # what the decision path needs, validated and constant
    cdef ForebayHashKey hash_key        # of the segment; every limiter derives its own from it
    cdef char* base                      # first byte of the mapping; NULL only before __cinit__ is through
    cdef Moves moves
    cdef bytes path                      # of `moves`
    cdef HotKeys hot_keys                # where this process notes keys
    cdef Extent hot_extent               # which keeps their memory mapped
    cdef readonly size_t size            # bytes mapped
    cdef const uint64_t* forks           # how many lie between the import of forebay and this process
    cdef uint64_t closed                 # whether its store was closed, for threads without the GIL
    cdef readonly uint64_t wall_epoch_ns  # the wall clock at segment time 0
    cdef readonly bint is_writable       # else the memory is mapped read-only: a write would end the process
    cdef readonly bint follows_python    # the clock is Python's time.time
    cdef public uint64_t name_check_due_ns  # by the host's coarse clock: when a limiter next checks the file's name
    cdef uint64_t decision_turn          # web decisions of this process, of which some are timed

    cdef int follow_python(self) except -1
    cdef ForebayCounterLine* counter_line(self, size_t number) except NULL
    cdef ForebayCounterLine* shared_counter_line(self, size_t limiter) except NULL
    cdef uint64_t* rules_word(self) noexcept
    cdef void note_latency(self, uint64_t* histogram, uint64_t took_ns) noexcept

    cdef inline bint take_name_check(self) noexcept:
        """Whether the calling thread has to check the file's name. The next check is then due later."""
        return take_due(&self.name_check_due_ns, coarse_ns(), NAME_CHECK_NS)
