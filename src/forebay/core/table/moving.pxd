"""A resize moves the table while processes decide by it: the protocol, and what it does to cells.

State
-----
The header has `moved_table`, where the table is now, and `resize_progress`, which only grows. It is odd while a resize
is under way. One process at a time, the *mover*, has an exclusive file lock for that (`RESIZE_BYTE`). Each
process has views of the table (`Table`), of which each knows the two words that it was made by: `place` and `epoch`.

A *frozen* cell of the table has a kind above `FOREBAY_KIND_USED`: that of the member that it was, and FROZEN more. An
empty one is frozen as a member without fingerprint and time. No decision changes a frozen cell, or finds a key in it:
the tag is another one.

Transitions
-----------
Quoted names are programs of tests/interleaving.

* *begin*: the mover. `resize_progress` becomes odd. Before that it has the lock and room for the new table.
* *freeze*: the mover, each cell. Member -> frozen member; claim or empty -> frozen empty cell. acq_rel CAS. "resize"
* *carry*: the mover, once all cells are frozen. It puts each live key into the new table, which no other process knows.
* *publish*: the mover. `moved_table` names the new table, then `resize_progress` becomes even. Release stores.
* *thaw*: the mover, if it gives up; or, if its lock has gone with it, a process that takes the lock. Frozen -> what it
  was, each cell of the table that `moved_table` names; then `resize_progress` becomes even. acq_rel CAS. "resize that
  is given up"
* *follow*: each process that doesn't find a key, if `resize_progress` isn't the `epoch` of its view. It waits while
  the word is odd, takes `moved_table` for its view, and begins again.

Invariant
---------
A key's state is in one table at a time, and every admission is in the state from which the next one is decided.

Proof
-----
*Nothing is lost.* A decision is one CAS of a cell that isn't frozen. The mover reads a cell for the new table after it
has frozen it, and nothing changes a frozen cell but a thaw, which the lock excludes. So the new table has every
admission by the old one, and the old one admits nothing more: all its cells are frozen, and stay so.

*Nothing is admitted twice.* No process uses the new table before it is published, and then it is complete.

SYNC freeze -> search: a process that would take a key for absent must know that no frozen cell holds it, and that its
view is of the present table. So each search that finds nothing is followed by a look at `resize_progress`. If the
search missed the key because its cell was frozen, it has read the frozen tag. The mover raised the word before, so the
look finds another value than `epoch`. The word never returns to an earlier value, so that holds if the cell has been
thawed since. An insertion that finds no vacancy looks again before it evicts a key or is denied: a frozen vacancy must
not be missed. It looks once more after its scan: if it finds `epoch` then, no cell that the scan has read was
frozen. If the mover begins afterwards, it either freezes the claim, and the promotion fails; or it freezes the member
that the claim has become. An old view finds all cells frozen, so it holds no vacancy, and the look finds that the word
has changed. A process that reads a frozen cell and then finds `epoch` has met damage. It may put a claim there: it
looks again after its scan.

*Claims.* Removing a claim is always safe: see table.pyx.

Crash and stall
---------------
A mover that is killed before it publishes leaves some cells frozen, and a file lock that has gone. The next process
that waits takes the lock and thaws. If that process is killed, too, the next one goes on: a thaw changes frozen cells
only, each by one CAS. A mover that is killed after `moved_table` and before `resize_progress` leaves a table without a
frozen cell: the thaw finds nothing and ends the resize. One that is killed before `moved_table`, but has stored the two
words that go with it, leaves them for a table that isn't there: the process that thaws, or the next mover, writes these
two anew before `resize_progress` is even. The bytes of a table that was not published stay unused.

A mover that is stopped keeps its lock, so none may thaw: a mover that goes on would carry over what was frozen before,
without what was admitted since. Processes wait for 5 s since `resize_progress` was raised last, which a mover does
every some ms. After that they decide at once, as if the table had no room for any key (`on_full`), until the word
changes or the lock is free.

Not handled
-----------
Without the GIL, threads share a view, and a thread that follows would change it under the others. Such a process holds
a shared lock on the mover's byte, and so prevents a resize.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport (
    FOREBAY_KIND_BITS, FOREBAY_KIND_EMPTY, FOREBAY_KIND_FROZEN, FOREBAY_KIND_TAT, FOREBAY_KIND_USED, ForebayCell,
    cas128_acq_rel, load128_acquire, store_release,
)


cdef enum:
    CELLS_PER_SIGN = 1 << 16


cdef inline uint64_t kind_in(uint64_t tag) noexcept nogil:
    return tag & ((<uint64_t>1 << FOREBAY_KIND_BITS) - 1)


cdef inline ForebayCell frozen(ForebayCell seen) noexcept nogil:
    cdef ForebayCell wanted = seen
    if not FOREBAY_KIND_TAT <= kind_in(seen.tag) <= FOREBAY_KIND_USED:
        wanted.tag = FOREBAY_KIND_TAT
        wanted.state = 0
    wanted.tag += FOREBAY_KIND_FROZEN
    return wanted


cdef inline ForebayCell thawed(ForebayCell seen) noexcept nogil:
    """What a cell was before it was frozen; the cell as it is, if it wasn't."""
    cdef ForebayCell wanted = seen
    if kind_in(seen.tag) > FOREBAY_KIND_USED:
        wanted.tag -= FOREBAY_KIND_FROZEN
        if wanted.tag == FOREBAY_KIND_TAT and wanted.state == 0:
            wanted.tag = FOREBAY_KIND_EMPTY
    return wanted


cdef inline void show_progress(uint64_t cell, uint64_t* progress) noexcept nogil:
    """Now and then, that this process isn't stopped. The caller has the mover's lock, so no other one writes here."""
    if (cell + 1) % CELLS_PER_SIGN == 0:
        store_release(progress, progress[0] + 2)


cdef inline void freeze_cells(ForebayCell* cells, uint64_t count, uint64_t* progress) noexcept nogil:
    cdef ForebayCell seen
    cdef uint64_t i
    for i in range(count):
        seen = load128_acquire(&cells[i])
        while kind_in(seen.tag) <= FOREBAY_KIND_USED and not cas128_acq_rel(&cells[i], seen, frozen(seen)):
            seen = load128_acquire(&cells[i])
        show_progress(i, progress)


cdef inline void thaw_cells(ForebayCell* cells, uint64_t count, uint64_t* progress) noexcept nogil:
    cdef ForebayCell seen
    cdef uint64_t i
    for i in range(count):
        seen = load128_acquire(&cells[i])
        if kind_in(seen.tag) > FOREBAY_KIND_USED:
            # Nothing but a thaw changes it, and the lock excludes another one.
            cas128_acq_rel(&cells[i], seen, thawed(seen))
        show_progress(i, progress)
