"""Leases of native threads: the C API's functions for a ``Concurrency``.

The steps are those of concurrency.pyx, the slots and their proof those of slots.pxd: take, free, reclaim, each by one
CAS. The owner is the process, as for Python's leases.

A lease without memory
----------------------
A lease is a plain struct of the caller's, of one size for any cost. It has the number of its first slot, and how many
slots it has. A search from the first one on finds them: a slot belongs to the lease if it has the lease's owner and
end.

Leases of one process may have the same end: two threads read the clock in the same nanosecond, or a test's clock stands
still. Their slots are alike, so it doesn't matter which of them each lease gives back. For there are at least as many
such slots as these leases have permits, and a search passes every slot: so each finds as many as it needs. After a
`reset` there are fewer, and a copy of a lease that was given back wants more: then one of these leases may lose permits
to another. Those of other processes and with other ends are never touched.

Without Python
--------------
Python watches owners by pidfds. A native thread that finds no free slot asks the kernel whether any process has the
owner's pid; if none has, the owner has ended (case 1 of segment/process_identity.py). It doesn't find an owner whose
parent hasn't waited for it yet, nor one whose pid another process has now. `maintain` finds those, by
`Concurrency.free_all_ended`.
"""

from libc.errno cimport ESRCH, errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset
from posix.signal cimport kill

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_CLOSED, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_DENIED, FOREBAY_HELD,
    FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE, FOREBAY_NOT_HELD, FOREBAY_OK, FOREBAY_WRONG_LIMITER, forebay_lease,
    forebay_request,
)
from forebay.core.algorithms.concurrency cimport time_to_watch, touch, touch_key
from forebay.core.algorithms.slots cimport (
    Slots, free_slot, lease_of, remember_free, remember_scan, slots_at, take_hinted_slot, take_lapsed_slot,
    was_scanned,
)
from forebay.core.c_api.handles cimport HOLDS, HoldingThread, begin, count_decision, count_events, ensure_usable
from forebay.core.table.native cimport ForebayCell, cas128_acq_rel, load128_acquire, monotonic_ns
from forebay.core.table.table cimport ALLOWED, CAS_FAILED, Events, Outcome, Verdict, no_events, table_decide

from forebay.segment.process_identity import INCARNATION_BITS, PID_BITS


cdef uint64_t PIDS = (1 << PID_BITS) - 1
cdef int NAMESPACE_SHIFT = PID_BITS + INCARNATION_BITS


cdef bint has_gone(uint64_t owner, uint64_t me) noexcept nogil:
    """Whether no process has the owner's pid. Only in this process's pid namespace do we know."""
    if owner >> NAMESPACE_SHIFT == 0 or owner >> NAMESPACE_SHIFT != me >> NAMESPACE_SHIFT:
        return False
    return kill(<int>(owner & PIDS), 0) != 0 and errno == ESRCH


cdef bint free_gone(const Slots* slots, uint64_t me) noexcept nogil:
    """Free the slots of owners that have gone. Whether there were any."""
    cdef uint64_t alive = me, gone = 0
    cdef uint64_t slot
    cdef ForebayCell seen
    cdef bint any_freed = False
    for slot in range(slots.count):
        seen = load128_acquire(&slots.slots[slot])
        if seen.tag == 0 or seen.tag == me or seen.tag == alive:
            continue
        if seen.tag != gone:
            if not has_gone(seen.tag, me):
                alive = seen.tag
                continue
            gone = seen.tag
        any_freed |= free_slot(slots, slot, seen)
    return any_freed


cdef int64_t take_one(
    HoldingThread thread, const Slots* slots, const Verdict* verdict, ForebayCell held
) noexcept nogil:
    """Take one slot; -1 if all are held."""
    cdef uint64_t cell = <uint64_t>(verdict.cell - thread.table.cells)
    cdef int64_t slot = take_hinted_slot(&thread.search, slots, cell, held, verdict.now_ns)
    cdef uint64_t now_ns, first_end_ns
    if slot < 0:
        # A scan of the slots themselves is O(limit): too slow for every denial in a flood of requests.
        now_ns = monotonic_ns()
        if was_scanned(&thread.search, verdict.cell, verdict.now_ns, now_ns, 0):
            return -1
        slot = take_lapsed_slot(slots, held, verdict.now_ns, &first_end_ns)
        if slot < 0 and free_gone(slots, thread.me):
            slot = take_lapsed_slot(slots, held, verdict.now_ns, &first_end_ns)
        remember_scan(
            &thread.search, verdict.cell, 0 if slot >= 0 else first_end_ns, time_to_watch(now_ns, monotonic_ns()))
    if slot >= 0:
        remember_free(&thread.search, cell, slot)
    return slot


cdef uint64_t free_slots(const Slots* slots, uint64_t first, ForebayCell held, uint64_t permits) noexcept nogil:
    """Free a lease's slots; how many were still held."""
    cdef uint64_t slot = first
    cdef uint64_t freed = 0, _
    cdef ForebayCell seen
    for _ in range(slots.count):
        if freed == permits:
            break
        seen = load128_acquire(&slots.slots[slot])
        if seen.tag == held.tag and seen.state == held.state:
            freed += free_slot(slots, slot, held)
        slot = slot + 1 if slot + 1 < slots.count else 0
    return freed


cdef uint64_t renew_slots(
    const Slots* slots, uint64_t* first, ForebayCell held, ForebayCell renewed, uint64_t permits
) noexcept nogil:
    """Renew a lease's slots; how many were still held. `first` becomes the first of those."""
    cdef uint64_t slot = first[0]
    cdef uint64_t count = 0, _
    cdef ForebayCell seen
    for _ in range(slots.count):
        if count == permits:
            break
        seen = load128_acquire(&slots.slots[slot])
        # Linearizes here, for each permit by itself.
        if seen.tag == held.tag and seen.state == held.state and cas128_acq_rel(&slots.slots[slot], seen, renewed):
            if count == 0:
                first[0] = slot
            count += 1
        slot = slot + 1 if slot + 1 < slots.count else 0
    return count


cdef uint64_t begin_lease(HoldingThread thread, uint64_t tag, Verdict* verdict) noexcept nogil:
    """Keep a cell for the key until the end of a lease that begins now. Returns that end."""
    cdef Events events
    cdef Outcome outcome = touch_key(&thread.table, tag, &thread.lease_ns, verdict)
    if outcome > ALLOWED:
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &thread.table, tag, thread.counter_line, &thread.counters.claims, touch, &thread.lease_ns, verdict, &events)
        count_events(thread, &events)
    return verdict.now_ns + thread.lease_ns


cdef bint take(HoldingThread thread, uint64_t tag, uint64_t permits, forebay_lease* lease) noexcept nogil:
    """Take `permits` slots, all or none, and fill in the lease. If it denies, `lease.available` is set."""
    cdef Verdict verdict
    cdef ForebayCell held
    cdef Slots slots
    cdef uint64_t taken = 0
    cdef int64_t slot
    held = lease_of(thread.me, begin_lease(thread, tag, &verdict))
    lease.full = verdict.full
    if verdict.cell == NULL:
        return verdict.outcome == ALLOWED
    lease.cell = <uint64_t>(verdict.cell - thread.table.cells)
    slots = slots_at(&thread.records, lease.cell)
    while taken < permits:
        slot = take_one(thread, &slots, &verdict, held)
        if slot < 0:
            free_slots(&slots, lease.slot, held, taken)
            lease.available = <uint32_t>taken
            return False
        if taken == 0:
            lease.slot = <uint64_t>slot
        taken += 1
    if permits != 0:
        lease.maker = thread.maker
        lease.key = tag
        lease.owner = held.tag
        lease.end_ns = held.state
        lease.permits = permits
    return True


cdef int32_t acquire(HoldingThread thread, const forebay_request* request, forebay_lease* lease) noexcept nogil:
    cdef forebay_lease taken
    cdef uint64_t tag
    cdef int32_t status
    cdef bint allowed
    if lease == NULL:
        return FOREBAY_INVALID_ARGUMENT
    memset(lease, 0, sizeof(lease[0]))
    status = begin(thread, HOLDS, request, &tag)
    if status < 0:
        return status
    if request.flags:
        return FOREBAY_INVALID_ARGUMENT
    if request.rate != NULL:
        return FOREBAY_INVALID_RATE
    if request.cost > thread.records.limit:
        return FOREBAY_COST_EXCEEDS_LIMIT
    memset(&taken, 0, sizeof(taken))
    allowed = take(thread, tag, request.cost, &taken)
    count_decision(thread, allowed, tag)
    if allowed and taken.maker:
        lease[0] = taken
    lease.full = taken.full
    lease.available = taken.available
    return FOREBAY_ALLOWED if allowed else FOREBAY_DENIED


cdef int32_t begin_with_lease(HoldingThread thread, const forebay_lease* lease) noexcept nogil:
    """FOREBAY_HELD if this process may hold the lease."""
    cdef int32_t status
    if <void*>thread == NULL or lease == NULL:
        return FOREBAY_INVALID_ARGUMENT
    status = ensure_usable(thread, HOLDS)
    # After a close, permits still come back: `release` doesn't mind it.
    if status < 0 and status != FOREBAY_CLOSED:
        return status
    if lease.maker != thread.maker and lease.maker != 0:
        return FOREBAY_WRONG_LIMITER
    # A parent's lease is not its child's. A damaged lease holds nothing.
    if (
        lease.maker == 0 or lease.owner != thread.me or lease.cell > thread.records.last_cell
        or lease.slot >= thread.records.limit
    ):
        return FOREBAY_NOT_HELD
    return FOREBAY_HELD if status == FOREBAY_OK else status


cdef int32_t renew(HoldingThread thread, forebay_lease* lease) noexcept nogil:
    cdef Verdict verdict
    cdef ForebayCell renewed
    cdef Slots slots
    cdef uint64_t still_held
    cdef int32_t status = begin_with_lease(thread, lease)
    if status != FOREBAY_HELD:
        return status
    renewed = lease_of(thread.me, begin_lease(thread, lease.key, &verdict))
    if verdict.cell == NULL or <uint64_t>(verdict.cell - thread.table.cells) != lease.cell:
        return FOREBAY_NOT_HELD
    slots = slots_at(&thread.records, lease.cell)
    still_held = renew_slots(&slots, &lease.slot, lease_of(lease.owner, lease.end_ns), renewed, lease.permits)
    if still_held == 0:
        return FOREBAY_NOT_HELD
    lease.end_ns = renewed.state
    status = FOREBAY_HELD if still_held == lease.permits else FOREBAY_NOT_HELD
    lease.permits = still_held
    return status


cdef int32_t release(HoldingThread thread, forebay_lease* lease) noexcept nogil:
    cdef forebay_lease given
    cdef Slots slots
    cdef int32_t status = begin_with_lease(thread, lease)
    if status != FOREBAY_HELD and status != FOREBAY_CLOSED:
        return status
    given = lease[0]
    # Once: a repeated call finds that it holds nothing.
    memset(lease, 0, sizeof(lease[0]))
    slots = slots_at(&thread.records, given.cell)
    remember_free(&thread.search, given.cell, given.slot)
    return FOREBAY_HELD if free_slots(
        &slots, given.slot, lease_of(given.owner, given.end_ns), given.permits) else FOREBAY_NOT_HELD
