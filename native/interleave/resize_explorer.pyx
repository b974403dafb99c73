"""Programs of requests during a resize for the interleaving explorer: each process has a view of the table.

The wait is left out: a request that would wait is denied for want of room, as if the mover was stopped. The lock is the
rule that a process thaws if the mover was killed.
"""

from libc.stdint cimport uint64_t

from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.explorer cimport (
    OTHER, Program, explore_begin, explore_end, explore_is_killed, explore_put_back, explore_share,
)
from forebay.core.table.moving cimport thaw_cells
from forebay.core.table.native cimport ForebayCell, ForebayHeader, load_acquire, store_release
from forebay.core.table.segment_view cimport move_cells
from forebay.core.table.table cimport Table, cells_in


cdef enum:
    NEW_PLACE = 1

cdef ForebayHeader* header
cdef Table new_table


cdef bint follow_without_wait(void* followed) noexcept nogil:
    cdef Table* table = <Table*>followed
    cdef uint64_t progress = load_acquire(&header.resize_progress)
    if progress & 1:
        return False
    if load_acquire(&header.moved_table) == NEW_PLACE:
        table.cells = new_table.cells
        table.place = NEW_PLACE
    table.epoch = progress
    return load_acquire(&header.resize_progress) == progress


cdef class ResizeProgram(Program):
    """Requests by limiters of one store, one for each process, and a mover."""

    cdef CellLimiter first
    cdef int mover

    def adopt_views(self, list limiters, CellLimiter target, usable):
        """Watch the table of the limiters of one name, each of which is a process's, and that of another store, which
        is to be the new one. `usable` cells of the first are for the program's keys."""
        global header, new_table
        cdef CellLimiter limiter
        cdef bint watched = True
        for limiter in limiters:
            self.adopt(limiter, usable)
            watched = watched and explore_put_back(&limiter.table, sizeof(Table))
        self.first = limiters[0]
        self.first.segment.moves.home.follow = follow_without_wait
        header = <ForebayHeader*>self.first.segment.base
        target.table.group_count = 1
        new_table = target.table
        new_table.home = NULL
        watched = watched and explore_share(new_table.cells, cells_in(&new_table) * sizeof(ForebayCell), b"new cells")
        watched = watched and explore_share(&header.moved_table, 4 * sizeof(uint64_t), b"header")
        if not watched:
            raise ValueError("more memory than the explorer can watch")
        self.held.append(target)

    def resize(self, process):
        self.mover = process
        self.next_operation(process, OTHER).word = 0

    def thaw(self, process):
        """End the resize, if the mover was killed."""
        self.next_operation(process, OTHER).word = 1

    cdef void run_other(self, int index) noexcept:
        cdef uint64_t live = 0
        cdef bint done = True
        explore_begin(index, 1)
        if self.operations[index].word == 0:
            done = move_cells(&self.first.table, &new_table, header, NEW_PLACE, 1, 0, &live) == 0
        elif explore_is_killed(self.mover):
            self.end_resize()
        explore_end(index, done, 0, live)

    cdef void end_resize(self) noexcept:
        cdef Table table = self.first.table
        if load_acquire(&header.resize_progress) & 1:
            if load_acquire(&header.moved_table) == NEW_PLACE:
                table.cells = new_table.cells
            thaw_cells(table.cells, cells_in(&table), &header.resize_progress)
            store_release(&header.resize_progress, header.resize_progress + 1)

    def look_at(self, limiter, key):
        """The key's remaining permits in the end, after the resize of a killed mover has been ended."""
        self.look(lambda: self.remaining_of(limiter, key))

    def remaining_of(self, CellLimiter limiter, key):
        self.end_resize()
        # By the table that a process would use that starts now.
        follow_without_wait(&limiter.table)
        return limiter.peek(key).remaining
