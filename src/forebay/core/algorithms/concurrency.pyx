"""Concurrency: a slot for each permit that is held.

slots.pxd has the slots, and the proof that no more than `limit` are held.

**State.** The cell's state is the time at which the key may be forgotten.

**Transitions.** A request moves that time on before it takes a slot, by a 128-bit acq_rel CAS.

**Invariant.** The time is never before the last of the key's leases ends.

**Crash and stall.** A process may stop between the two steps for so long that the key is forgotten. It then takes a
slot for a lease that has ended meanwhile: such a slot is free.

**Request ids.** Of the requests with one id, the latest holds the permits. Its mark, in the store's table as those of
other limiters, has the end of the lease as its time. Such an end is drawn: its low bits are the number of the first
slot and one that is drawn. So the mark leads to the slot, and the id counts exactly as long as the slot has that end. A
release, a reset or a reclaim of the slot needs no change of the mark. A request

* takes permits as any other. It writes a drawn end to the slots, by a CAS from what it took. Then it sets the mark, by
  a CAS from the state that it saw before it took anything;
* or, if the mark leads to held permits, takes them over: by a CAS of each slot from the pair that it saw to its own
  process and a new end, then of the mark. So the earlier request's release and renewal fail, as after the end of a
  lease.

A renewal writes a drawn end to the slots and then sets the mark, too. If a taker's CAS of the mark fails, another
request has the id: the taker gives back what it took, and begins again. Each repetition follows a step that another
request has completed.

A process that is killed between two of these steps leaves permits that no mark leads to. They become free as those of
any ended process. So a repeated request may be charged again after a kill, and if it comes between the two steps of a
renewal. It is never allowed without a permit. It may be denied if it comes between the first two steps of the other
attempt, and no permits are left. A lease may have the slot and the end of an earlier one only if both ends are in one
grain of time (a 16th of the lease, at most), with a chance of 1 in the numbers that can be drawn, mostly 65,536. Leases
of one process have different numbers.

**Threads.** Threads that run without the GIL share this object and its leases. A critical section guards a lease's
fields, the unleased permits and the change of process: with the GIL it compiles to nothing, and no fork of Python finds
one entered. No section calls Python code, in which another thread could enter it. Hints are relaxed loads and stores:
the CAS of the slot decides.

**Not handled.** An evicted key's slots stay for the key that comes to its cell. To empty them would be no safer, as a
process of the new key may have taken some.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_time
from forebay.core.algorithms.slots cimport (
    SlotRecords, Slots, begin_search, free_bits, free_slot, is_free, lease_of, remember_free, remember_scan, slots_at,
    take_hinted_slot, take_lapsed_slot, was_scanned,
)
from forebay.core.cell_limiter cimport insert_mark, mark_state, mark_tag_of, whole_cost
from forebay.core.decision cimport NO_ROOM, Decision
from forebay.core.limiter cimport Attempt, Limiter
from forebay.core.reservation cimport delay_ns_of, new_reservation
from forebay.core.table.native cimport (
    FOREBAY_KIND_EMPTY, ForebayCell, ForebayLine, cas128_acq_rel,
    count_ones, fetch_add_relaxed, load128_acquire, load_acquire, load_relaxed, monotonic_ns,
    store_relaxed, store_release,
)
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, DENIED, USED_BITS, Events, Outcome, Table, Verdict, no_events, table_decide, table_find,
    table_now,
)

from inspect import Signature

from forebay import holding, waiting
from forebay.core.arguments import costs_of, keys_of
from forebay.core.limiter_arguments import concurrency_shape
from forebay.errors import CostExceedsLimit, LimitExceeded
from forebay.rate import as_period_ns
from forebay.segment import layout
from forebay.segment.extents import Purpose, open_extent
from forebay.segment.process_identity import Owners


cdef enum:
    SWEEP_AT_LEAST = 1024
    # The most slots that an eviction looks at for each key.
    MOST_COUNTED = 4096
    # How many owners a search of all keys has on the stack at a time.
    SOME_OWNERS = 64
    # The end of a lease by a request id has so many bits that tell ends of one slot apart. They prolong the lease by at
    # most this part of it.
    LEAST_DRAWN_BITS = 8
    MOST_DRAWN_BITS = 16
    DRAWN_PART = 16


cdef int other_owners(
    const Table* table, const SlotRecords* records, uint64_t me, uint64_t* position, uint64_t* owners
) noexcept nogil:
    """Owners other than `me` from a slot on, counted through all keys. Moves on by as many slots as it has read."""
    cdef uint64_t cell = position[0] // records.limit
    cdef uint64_t slot = position[0] % records.limit
    cdef uint64_t owner, last = me
    cdef int count = 0, i
    cdef Slots slots
    while cell <= records.last_cell:
        # A cell that was never used has no slots that were.
        while slot < records.limit and load_acquire(&table.cells[cell].tag) != FOREBAY_KIND_EMPTY:
            slots = slots_at(records, cell)
            owner = load_acquire(&slots.slots[slot].tag)
            if owner != 0 and owner != me and owner != last:
                i = 0
                while i < count and owners[i] != owner:
                    i += 1
                if i == SOME_OWNERS:
                    position[0] = cell * records.limit + slot
                    return count
                owners[i] = owner
                count = max(count, i + 1)
                last = owner
            slot += 1
        slot = 0
        cell += 1
    position[0] = cell * records.limit
    return count


cdef void free_owner(const Table* table, const SlotRecords* records, uint64_t owner) noexcept nogil:
    """Free the slots of one owner, of all keys."""
    cdef uint64_t cell, slot
    cdef ForebayCell seen
    cdef Slots slots
    for cell in range(records.last_cell + 1):
        if load_acquire(&table.cells[cell].tag) == FOREBAY_KIND_EMPTY:
            continue
        slots = slots_at(records, cell)
        for slot in range(records.limit):
            if load_acquire(&slots.slots[slot].tag) == owner:
                seen = load128_acquire(&slots.slots[slot])
                if seen.tag == owner:
                    free_slot(&slots, slot, seen)


cdef uint64_t slots_used(ForebayCell* cell, uint64_t state, uint64_t now_ns, const void* context) noexcept nogil:
    """How many slots their bits show as taken, of up to `MOST_COUNTED`, evenly spread over all."""
    cdef const SlotRecords* records = <const SlotRecords*>context
    cdef uint64_t* bits = slots_at(records, <uint64_t>(cell - records.cells)).bits
    cdef uint64_t words = (records.limit + 63) // 64
    cdef uint64_t step = (words + MOST_COUNTED // 64 - 1) // (MOST_COUNTED // 64)
    cdef uint64_t word = 0, used = 0
    while word < words:
        used += count_ones(load_acquire(&bits[word]))
        word += step
    return used


cdef list other_slots(const Slots* slots, uint64_t first, ForebayCell seen, int64_t count):
    """Up to `count` slots that hold the same lease as the first one: a list of (slot, end)."""
    cdef uint64_t slot
    cdef ForebayCell other
    found = []
    for slot in range(slots.count):
        if len(found) == count:
            break
        other = load128_acquire(&slots.slots[slot])
        if slot != first and other.tag == seen.tag and other.state == seen.state:
            found.append((slot, other.state))
    return found


cdef int trim(list held, uint64_t now_ns) except -1:
    """Remove the leases that have ended from a list, oldest first."""
    cdef int ended = 0
    for _, end_ns in held:
        if <uint64_t>end_ns > now_ns:
            break
        ended += 1
    del held[:ended]
    return 0


@cython.final
@cython.freelist(64)
cdef class Lease:
    """Permits that this process holds. True if the request was allowed, as is ``allowed``.

    Give them back with ``release``, or use the lease as a context manager. Without that, the permits come back at the
    end of the lease, or with the end of the process, but not when this object is garbage. ``full``: the store had no
    room for the key, and its ``on_full`` decided.
    """

    __signature__ = Signature()  # inspect finds no signature of a compiled class by itself

    def __init__(self):
        raise TypeError("leases are made by limiters: use limiter.acquire(key)")

    def release(self):
        """Give the permits back. Whether they were still held. Does nothing if repeated or after the lease's end."""
        cdef bint held = False
        cdef Slots slots
        cdef ForebayCell* cell = NULL
        cdef ForebayCell seen
        cdef uint64_t slot
        with cython.critical_section(self):
            self.released = True
            # Another permit of this process may have the same owner and the same end. So one call takes what all free.
            if self.cell != NULL and self.forks == self.limiter.segment.forks[0]:
                cell, slot, seen, more = self.cell, self.slot, self.held, self.more
                self.cell = NULL
        if cell == NULL:
            return False
        slots = self.limiter.slots_of(cell)
        held = free_slot(&slots, slot, seen)
        remember_free(&self.limiter.search, self.limiter.number_of(cell), slot)
        if more is not None:
            for other_slot, end_ns in more:
                held |= free_slot(&slots, other_slot, lease_of(seen.tag, end_ns))
        waiting.released(self.limiter, self.key)
        return held

    def renew(self):
        """Restart the lease. False if it has ended; then another request may hold the permits."""
        cdef uint64_t end_ns, before
        cdef Verdict verdict
        cdef bint held
        if self.cell == NULL or self.forks != self.limiter.segment.forks[0]:
            return False
        if self.mark_tag != 0:
            before = count_time(self.held.state, USED_BITS)
            held = self.limiter.restart_marked(self)
            if held:
                insert_mark(self.limiter, self.mark_tag, self.held.state, before)
            return held
        end_ns = self.limiter.begin_lease_of(self.limiter.tag_of(self.key), self.limiter.lease, &verdict)
        with cython.critical_section(self):
            # Until here another thread may have released or renewed this lease.
            return self.cell != NULL and verdict.cell == self.cell and self.restart(self.held.tag, end_ns)

    cdef bint restart(self, uint64_t owner, uint64_t end_ns) except -1:
        """Restart a lease that isn't released. The caller is in its critical section."""
        cdef Slots slots = self.limiter.slots_of(self.cell)
        cdef ForebayCell renewed = lease_of(owner, end_ns)
        cdef bint held = True
        # Linearizes here, for one permit; each further permit by its own CAS below.
        if not cas128_acq_rel(&slots.slots[self.slot], self.held, renewed):
            return False
        if self.more is not None:
            for i, (slot, before_ns) in enumerate(self.more):
                if cas128_acq_rel(&slots.slots[<uint64_t>slot], lease_of(self.held.tag, before_ns), renewed):
                    self.more[i] = slot, renewed.state
                else:
                    held = False
        self.held = renewed
        return held

    def __bool__(self):
        return self.allowed

    @cython.nonecheck(True)
    def __enter__(self):
        if not self.allowed:
            raise self.limiter.exceeded(self.key)
        if self.released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    def __exit__(self, *error):
        self.release()

    def __aenter__(self):
        return holding.done(self.__enter__())

    def __aexit__(self, *error):
        self.release()
        return holding.done(None)

    @cython.nonecheck(True)
    def __repr__(self):
        return f"<Lease of {self.limiter.name!r}: {'held' if self.cell != NULL else 'not held'}>"


@cython.final
cdef class Concurrency(Limiter):
    """At most `limit` permits of a key held at one time.

    ``Concurrency(store, "reports", 20)``, then one of

    * ``with reports.hold("user:42", timeout=0.5):`` or ``async with``: waits for a permit, gives it back at the end of
      the block, and raises ``LimitExceeded`` if there was none in time; without a timeout it waits until there is one;
    * ``lease = reports.acquire("user:42")``: at once or not at all; then ``lease.release()``, or ``with lease:``;
    * ``@reports.limited("nightly")``: each call of the function holds a permit;
    * ``allow``, ``hit``, ``wait`` and the other methods of every limiter: they take permits that ``refund`` gives back.

    A permit becomes free when it is given back, when the process that holds it has ended in any way, or at the end of
    its `lease`: text, seconds or a ``timedelta``; ``lease_ns`` is the same in nanoseconds. Work that takes longer
    renews the lease: ``lease.renew()``.

    `keys` is the number of keys that can be live at once, that is, used within the last two leases; by default as many
    as half a megabyte holds, but at least 64. Each key takes 16 bytes and a bit for every permit (and from 49 keys on a
    third of that again, of some dozens up to two thirds); ``Concurrency.bytes_needed(limit, keys=...)`` is the sum. The
    first limiter of the name allocates the memory, behind the store's table; it stays until the store is unlinked.

    Raises ``InvalidLimiter``, ``InvalidRate`` for an invalid lease, ``TooManyLimiters``, and ``SegmentSpaceError`` with
    the bytes needed if there is no room. Threads, processes, fork: see ``Limiter``; a permit belongs to the process
    that took it, not to its children. Between pid namespaces (containers that share ``/dev/shm``) only the end of its
    leases shows that a process has ended; docs/operations/killed-processes.md has what else delays it.

    Taking and giving back is usually O(1), with two CASes each. Before ``allow`` and ``acquire`` deny, they read a bit
    for each slot, and every tenth of a millisecond the slots. ``hit`` and ``peek`` read all slots each time, for
    ``retry_after``. Guarantee: never more than `limit` permits held, over all processes.
    """

    may_free_early = True

    def __cinit__(self, store, name, limit, lease="30s", *, keys=None):
        extent_shape = concurrency_shape(limit, keys, name)
        self.limit = limit
        self.lease_ns = as_period_ns(lease)
        self.lease = self.lease_ns
        self.slot_bits = (limit - 1).bit_length()
        self.end_grain_ns = <uint64_t>1 << (1 + self.slot_bits + max(
            LEAST_DRAWN_BITS, min(MOST_DRAWN_BITS, (self.lease_ns // DRAWN_PART).bit_length() - 2 - self.slot_bits)))
        self.records.limit = self.limit
        self.records.bit_words = (self.limit + 127) // 128 * 2
        self.records.words_per_cell = extent_shape.words_per_key
        encoding = b"concurrency %d" % self.limit
        self.extent = open_extent(store.attachment, name, Purpose(
            algorithm=layout.ALGORITHM_CONCURRENCY, words_per_cell=self.records.words_per_cell, low_bits=0, limit=limit,
            period_ns=0), extent_shape.keys)
        self.table = self.extent.table
        self.table.used = slots_used
        self.table.used_context = &self.records
        self.records.cells = self.table.cells
        self.records.words = self.extent.records
        self.records.last_cell = self.extent.used_cells - 1
        self.unleased = {}
        self.my_forks = ~<uint64_t>0
        self.register(layout.ALGORITHM_CONCURRENCY, encoding, self.limit)

    @cython.binding(False)
    def __init__(self, store, name, limit, lease="30s", *, keys=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    @staticmethod
    def bytes_needed(limit, *, keys=None):
        """How many bytes a limiter of this limit and number of keys takes of its store's file system."""
        return concurrency_shape(limit, keys, "").bytes

    def __repr__(self):
        return f"<Concurrency {self.name!r} {self.limit}, lease={self.lease_ns / 1e9:g}s, keys={self.keys}>"

    @property
    def keys(self):
        return self.extent.keys

    cdef int check_process(self) except -1:
        """Called before a slot is taken. After a fork, this process is a new owner and holds nothing."""
        self.ensure_attached()
        return self.check_owner()

    cdef int check_owner(self) except -1:
        # SYNC process -> forks: a thread that reads the number reads the process's fields.
        if load_acquire(&self.my_forks) != self.segment.forks[0]:
            return self.begin_process()
        return 0

    cdef int begin_process(self) except -1:
        cdef uint64_t me
        owners = Owners()
        me = owners.me
        with cython.critical_section(self):
            # Owners() ran Python code: another thread may have made its own first, and taken permits since.
            if self.my_forks != self.segment.forks[0]:
                # The end of the parent's objects may run Python code, which is too early here.
                _parents = self.owners, self.unleased
                self.owners = owners
                self.me = me
                self.unleased = {}
                self.unleased_swept = SWEEP_AT_LEAST
                begin_search(&self.search, me, self.limit)
                # SYNC process -> forks: see check_process.
                store_release(&self.my_forks, self.segment.forks[0])
        return 0

    cdef uint64_t begin_lease_of(self, uint64_t tag, uint64_t kept_ns, Verdict* verdict) except 0:
        """Keep a cell for the key for `kept_ns`. Returns the end of a lease that begins now."""
        cdef Events events
        cdef Outcome outcome
        cdef ForebayLine* line
        self.check_process()
        outcome = touch_key(&self.table, tag, &kept_ns, verdict)
        if outcome > ALLOWED:
            events = no_events()
            events.cas_retries = outcome == CAS_FAILED
            line = self.line_here()
            table_decide(
                &self.table, tag, line.number, &line.counters.claims, touch, &kept_ns, verdict, &events)
            self.count_events(&events)
        return verdict.now_ns + self.lease

    cdef int64_t take_one(self, const Slots* slots, Verdict* verdict, ForebayCell lease) except -2:
        """Take one slot; -1 if all are held."""
        cdef uint64_t cell = self.number_of(verdict.cell)
        cdef int64_t slot = take_hinted_slot(&self.search, slots, cell, lease, verdict.now_ns)
        cdef uint64_t now_ns, first_end_ns
        if slot < 0:
            # A scan of the slots themselves is O(limit): too slow for every denial in a flood of requests.
            now_ns = monotonic_ns()
            if was_scanned(&self.search, verdict.cell, verdict.now_ns, now_ns, load_relaxed(&self.watch_again_ns)):
                return -1
            slot = take_lapsed_slot(slots, lease, verdict.now_ns, &first_end_ns)
            if slot < 0 and self.free_ended(slots):
                slot = take_lapsed_slot(slots, lease, verdict.now_ns, &first_end_ns)
            remember_scan(&self.search, verdict.cell, 0 if slot >= 0 else first_end_ns, now_ns + WATCH_INTERVAL_NS)
        if slot >= 0:
            remember_free(&self.search, cell, slot)
        return slot

    cdef bint free_ended(self, const Slots* slots) except -1:
        """Free the slots of processes that have ended. Whether there were any."""
        cdef uint64_t i
        cdef ForebayCell seen
        cdef bint any_freed = False
        cdef uint64_t now_ns = monotonic_ns()
        if now_ns < load_relaxed(&self.watch_again_ns):
            return False
        # Set first, as other threads may call this during the search.
        store_relaxed(&self.watch_again_ns, now_ns + WATCH_INTERVAL_NS)
        owners = set()
        for i in range(slots.count):
            seen = load128_acquire(&slots.slots[i])
            if seen.tag != 0 and seen.tag != self.me:
                owners.add(seen.tag)
        dead = self.owners.dead_among(owners)
        if dead:
            for i in range(slots.count):
                seen = load128_acquire(&slots.slots[i])
                if seen.tag != 0 and seen.tag in dead:
                    any_freed |= free_slot(slots, i, seen)
        store_relaxed(&self.watch_again_ns, max(
            load_relaxed(&self.watch_again_ns), time_to_watch(now_ns, monotonic_ns())))
        return any_freed

    cdef int free_all_ended(self) except -1:
        """Free the slots of processes that have ended, of all keys. For native threads, which can't watch processes.

        O(slots of the keys that there ever were). Releases the GIL while it reads them.
        """
        cdef uint64_t[SOME_OWNERS] some
        cdef uint64_t owner, position = 0
        cdef uint64_t end = (self.records.last_cell + 1) * self.limit
        cdef int count, i
        self.check_owner()
        owners = set()
        while position < end:
            with nogil:
                count = other_owners(&self.table, &self.records, self.me, &position, some)
            for i in range(count):
                owners.add(some[i])
        for dead in self.owners.dead_among(owners):
            owner = dead
            with nogil:
                free_owner(&self.table, &self.records, owner)
        return 0

    cdef object take(self, uint64_t tag, int64_t cost, Verdict* verdict, ForebayCell* lease):
        """Take `cost` slots, all or none. None if there are not enough, else what was taken: the one slot, or a list of
        (slot, end).
        """
        cdef Slots slots
        cdef int64_t slot
        cdef list taken
        lease.state = self.begin_lease_of(tag, self.lease, verdict)
        # Read now: after a fork, begin_lease_of has made this process a new owner.
        lease.tag = self.me
        if verdict.cell == NULL:
            return [] if verdict.outcome == ALLOWED else None
        slots = self.slots_of(verdict.cell)
        if cost == 1:
            slot = self.take_one(&slots, verdict, lease[0])
            return None if slot < 0 else slot
        taken = []
        try:
            while len(taken) < cost:
                slot = self.take_one(&slots, verdict, lease[0])
                if slot < 0:
                    break
                taken.append(slot)
        except BaseException:
            self.free_slots(&slots, taken, lease[0])
            raise
        if len(taken) < cost:
            self.free_slots(&slots, taken, lease[0])
            return None
        return [(slot, lease.state) for slot in taken]

    cdef int free_slots(self, const Slots* slots, list taken, ForebayCell lease) except -1:
        for slot in taken:
            free_slot(slots, slot, lease)
        return 0

    cdef int64_t checked_cost(self, object cost) except -1:
        cdef int64_t slots = whole_cost(cost)
        if <uint64_t>slots > self.limit:
            raise CostExceedsLimit(cost, self.limit, self.name)
        return slots

    cdef bint take_unleased(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1:
        """Take unleased permits, and count the decision."""
        cdef bint allowed = self.take_uncounted(tag, cost, verdict)
        self.count_decision(allowed, tag)
        return allowed

    cdef bint take_uncounted(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1:
        """If permits were taken, the verdict's state is the end of their lease."""
        cdef ForebayCell lease
        taken = self.take(tag, cost, verdict, &lease)
        if taken is None:
            return False
        self.add_unleased(tag, taken if isinstance(taken, list) else [(taken, lease.state)], verdict.now_ns)
        verdict.state = lease.state
        return True

    cdef int add_unleased(self, uint64_t tag, list taken, uint64_t now_ns) except -1:
        """Remember the permits that were taken, and forget those whose lease has ended."""
        cdef list held
        if taken:
            with cython.critical_section(self):
                held = self.unleased.setdefault(tag, [])
                # At once: a list that is empty may be forgotten by another thread.
                held.extend(taken)
                trim(held, now_ns)
                if len(self.unleased) > self.unleased_swept:
                    # A copy: `list(items())` makes objects, and so may run the garbage collector, and other threads.
                    for other, held in self.unleased.copy().items():
                        trim(held, now_ns)
                        if not held:
                            self.unleased.pop(other, None)
                    self.unleased_swept = max(SWEEP_AT_LEAST, 2 * len(self.unleased))
        return 0

    cdef list take_back(self, uint64_t tag, int64_t cost):
        """Up to `cost` of the unleased permits, the newest first, for a lease."""
        cdef list held
        with cython.critical_section(self):
            held = self.unleased.get(tag, [])
            taken = [held.pop() for _ in range(min(cost, <int64_t>len(held)))]
            if not held:
                self.unleased.pop(tag, None)
        return taken

    cdef Lease new_lease(self, object key, object taken, const Verdict* verdict, ForebayCell held):
        cdef Lease lease = Lease.__new__(Lease)
        lease.limiter = self
        lease.key = key
        lease.cell = NULL
        lease.allowed = taken is not None
        lease.full = verdict.full
        lease.forks = self.segment.forks[0]
        lease.held = held
        lease.mark_tag = 0
        if isinstance(taken, list):
            if taken:
                lease.cell = verdict.cell
                lease.slot, lease.held.state = taken[0]
                lease.more = taken[1:]
        elif taken is not None:
            lease.cell = verdict.cell
            lease.slot = taken
        return lease

    cdef uint64_t draw_end(self, uint64_t slot, uint64_t end_ns) noexcept:
        """An end that leads to its first slot, from `end_ns` on. It is even, as a mark rounds its time to 2 ns."""
        # Each process begins at another number (the golden ratio's multiplier).
        cdef uint64_t number = fetch_add_relaxed(&ends_drawn, 1) + (self.me * <uint64_t>0x9E3779B97F4A7C15 >> 32)
        cdef uint64_t low = ((number << self.slot_bits | slot) << 1) & (self.end_grain_ns - 1)
        cdef uint64_t drawn_ns = (end_ns & ~(self.end_grain_ns - 1)) | low
        return drawn_ns if drawn_ns >= end_ns else drawn_ns + self.end_grain_ns

    cdef bint restart_marked(self, Lease lease) except -1:
        """Restart a lease, for this process, until an end that its mark may have. False if it was not held as a whole.
        """
        cdef Verdict verdict
        cdef uint64_t end_ns = self.begin_lease_of(self.tag_of(lease.key), self.lease + self.end_grain_ns, &verdict)
        with cython.critical_section(lease):
            # Until here another thread may have released or renewed this lease.
            return lease.cell != NULL and verdict.cell == lease.cell and lease.restart(
                self.me, self.draw_end(lease.slot, end_ns))

    cdef Lease take_over(self, object key, int64_t cost, uint64_t mark_tag, uint64_t* before, Verdict* verdict):
        """The lease of an earlier request with this mark, for this process. None if its permits aren't held any more:
        then `before` is the mark's state.
        """
        cdef Slots slots
        cdef ForebayCell seen
        cdef uint64_t slot
        cdef Lease lease
        while True:
            before[0] = mark_state(self, mark_tag)
            if before[0] == 0:
                return None
            self.begin_lease_of(self.tag_of(key), self.lease, verdict)
            if verdict.cell == NULL:
                return None
            slots = self.slots_of(verdict.cell)
            slot = (before[0] >> FRACTION_BITS >> 1) & ((<uint64_t>1 << self.slot_bits) - 1)
            more = None
            if slot < self.limit:
                seen = load128_acquire(&slots.slots[slot])
                if seen.tag != 0 and seen.state == before[0] >> FRACTION_BITS:
                    more = other_slots(&slots, slot, seen, cost - 1)
            if more is not None and len(more) == cost - 1:
                lease = self.new_lease(key, [(slot, seen.state), *more], verdict, seen)
                lease.mark_tag = mark_tag
                if self.restart_marked(lease) and insert_mark(self, mark_tag, lease.held.state, before[0]):
                    return lease
                lease.release()
            elif mark_state(self, mark_tag) == before[0]:
                return None

    cdef Lease take_once(self, object key, int64_t cost, object request_id, Verdict* verdict):
        """The lease for a request with an id: of an earlier one with the same id if that holds its permits, or a new
        one."""
        cdef ForebayCell held
        cdef uint64_t before
        cdef Lease lease
        cdef uint64_t mark_tag = mark_tag_of(self, key, request_id, cost)
        self.check_process()
        while True:
            lease = self.take_over(key, cost, mark_tag, &before, verdict)
            if lease is not None:
                return lease
            lease = self.new_lease(key, self.take(self.tag_of(key), cost, verdict, &held), verdict, held)
            if lease.cell == NULL:
                # Allowed without permits, as the store has no room; or denied, unless the id has got permits meanwhile.
                if lease.allowed or mark_state(self, mark_tag) == before:
                    return lease
                continue
            lease.mark_tag = mark_tag
            if self.restart_marked(lease) and insert_mark(self, mark_tag, lease.held.state, before):
                return lease
            lease.release()

    @cython.binding(False)
    def acquire(self, key, cost=1, *, request_id=None):
        """Take `cost` permits of `key` if they are free now: a ``Lease``, which is true if they were.

        With a `request_id` (str, bytes, int or a tuple of them), a request that is repeated with the same id and cost
        while its permits are held takes no others: they move to the new lease, in whichever worker it is, and the lease
        of the earlier attempt has ended. Once they are given back, the id is free. While they are held, the id takes a
        cell of the store. A lease by an id is up to a sixteenth longer, or up to 1 µs for each permit of the limit if
        that is more. A process that is killed in between may leave permits that come back as after any kill. Then the
        repeated request takes others, and so it does while the earlier lease is just being renewed.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``StoreClosed``.
        """
        cdef Verdict verdict
        cdef ForebayCell held
        cdef Lease lease
        cdef int64_t slots = self.checked_cost(cost)
        cdef uint64_t tag = self.tag_of(key)
        if request_id is not None and slots != 0:
            lease = self.take_once(key, slots, request_id, &verdict)
            self.count_decision(lease.allowed, tag)
            return lease
        taken = self.take(tag, slots, &verdict, &held)
        self.count_decision(taken is not None, tag)
        return self.new_lease(key, taken, &verdict, held)

    def hold(self, key, cost=1, timeout=None):
        """A context manager, with or without ``async``, that waits for `cost` permits and gives them back at the end.

        Entering raises ``LimitExceeded`` if they don't become free within `timeout`: text like ``"500 ms"``, seconds or
        a ``timedelta``. With None it waits until they are free.
        """
        return holding.Hold(self, lease_taken, key, cost, timeout)

    def limited(self, key, cost=1, timeout=None):
        """A decorator: each call of the function, or each run of the coroutine, holds `cost` permits.

        `key` is a key, or a callable that makes a key from the call's arguments.
        """
        return holding.limited(self, key, cost, timeout)

    def exceeded(self, key):
        """The exception for a wait in which no permit of `key` became free in time."""
        return LimitExceeded(self.name, self.limit, self.peek(key).retry_after)

    @cython.binding(False)
    def allow(self, key, /):
        """Take one permit of `key` and say whether it was free. It comes back by ``refund``, or as leases do."""
        cdef Verdict verdict
        return self.take_unleased(self.tag_of(key), 1, &verdict)

    def hit(self, key, cost=1, *, request_id=None):
        """Take `cost` permits of `key` if they are free, and return the ``Decision``.

        ``retry_after`` is the time until enough leases end if no permit is given back before. `request_id` is that of
        ``acquire``: a ``refund`` with it gives the permits back in any worker.
        """
        cdef Verdict verdict
        cdef Lease lease
        cdef int64_t slots = self.checked_cost(cost)
        cdef uint64_t tag = self.tag_of(key)
        cdef bint allowed
        if slots == 0:
            return self.peek(key, 0)
        if request_id is not None:
            lease = self.take_once(key, slots, request_id, &verdict)
            self.count_decision(lease.allowed, tag)
            if lease.cell != NULL:
                self.add_unleased(tag, [(lease.slot, lease.held.state), *(lease.more or ())], verdict.now_ns)
            return self.verdict_decision(&verdict, slots, lease.allowed)
        allowed = self.take_unleased(tag, slots, &verdict)
        return self.verdict_decision(&verdict, slots, allowed)

    cdef Decision verdict_decision(self, const Verdict* verdict, int64_t cost, bint allowed):
        cdef Decision decision = self.decision(verdict.cell, verdict.now_ns, cost, allowed)
        if verdict.full:
            decision.flags = NO_ROOM
        if verdict.full and not allowed:
            # The key has no state. The verdict's state is the time at which a cell of its probe set becomes free.
            decision.outlook.available = 0
            decision.outlook.retry_after_ns = decision.outlook.reset_after_ns = verdict.state - verdict.now_ns
        return decision

    def peek(self, key, cost=1):
        """The decision that ``hit`` would return now. Takes nothing."""
        cdef uint64_t tag = self.tag_of(key)
        cdef int64_t slots = self.checked_cost(cost)
        cdef Slots found
        cdef ForebayCell* cell
        cdef uint64_t forget_ns, now_ns
        self.check_process()
        now_ns = table_now(&self.table)
        cell = table_find(&self.table, tag, &forget_ns)
        if cell != NULL:
            found = self.slots_of(cell)
            self.free_ended(&found)
        return self.decision(cell, now_ns, slots, None)

    cdef Decision decision(self, const ForebayCell* cell, uint64_t now_ns, int64_t cost, object allowed):
        """The Decision for the current slots. With `allowed` None, it allows if `cost` permits are free."""
        cdef Decision decision = Decision.__new__(Decision)
        cdef Slots slots
        cdef ForebayCell seen
        cdef uint64_t i
        ends = []
        if cell != NULL:
            slots = self.slots_of(cell)
            for i in range(slots.count):
                seen = load128_acquire(&slots.slots[i])
                if not is_free(seen, now_ns):
                    ends.append(seen.state)
        ends.sort()
        decision.limit = self.limit
        decision.limiter = self.name
        decision.outlook.available = self.limit - len(ends)
        decision.allowed = decision.outlook.available >= <uint64_t>cost if allowed is None else allowed
        if not decision.allowed and <uint64_t>cost > decision.outlook.available:
            decision.outlook.retry_after_ns = ends[<uint64_t>cost - decision.outlook.available - 1] - now_ns
        decision.outlook.reset_after_ns = ends[len(ends) - 1] - now_ns if ends else 0
        return decision

    def allow_many(self, keys, costs=None):
        """A list of bools, one per key, decided in order: ``allow`` for each. `costs` is an iterable of as many."""
        cdef Verdict verdict
        tags = [self.tag_of(key) for key in keys_of(keys)]
        cost_list = [self.checked_cost(cost) for cost in costs_of(costs, len(tags))]
        return [
            bool(self.take_unleased(tag, cost, &verdict)) if cost else True
            for tag, cost in zip(tags, cost_list, strict=True)
        ]

    def reserve(self, key, cost=1, max_delay=None):
        """Take `cost` permits if they are free now: a ``Reservation`` with a delay of 0, whose ``cancel`` gives them
        back.

        Otherwise nothing is taken, and ``delay`` is the time until enough leases end if no permit is given back before.
        """
        cdef Verdict verdict
        cdef Decision decision
        cdef int64_t slots = self.checked_cost(cost)
        cdef uint64_t tag = self.tag_of(key)
        delay_ns_of(max_delay)
        if slots == 0:
            return new_reservation(self, self.segment, key, 0, True, False, self.store.now_ns(), 0, 0, False)
        if self.take_unleased(tag, slots, &verdict):
            return new_reservation(
                self, self.segment, key, slots, True, not verdict.full, verdict.now_ns, 0, verdict.state,
                verdict.full)
        decision = self.verdict_decision(&verdict, slots, False)
        return new_reservation(
            self, self.segment, key, slots, False, False, verdict.now_ns, decision.outlook.retry_after_ns, 0,
            verdict.full)

    def refund(self, key, cost=1, *, request_id=None):
        """Give back `cost` of the permits that ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process.

        If those are fewer, all of them. With a `request_id`, gives back the permits of the requests with this id and
        cost, whichever process holds them.
        """
        cdef int64_t slots = min(whole_cost(cost), <int64_t>self.limit)
        cdef uint64_t before, tag = self.tag_of(key)
        cdef Verdict verdict
        cdef Lease lease
        self.check_process()
        if request_id is not None:
            if slots != 0 and <uint64_t>whole_cost(cost) <= self.limit:
                lease = self.take_over(key, slots, mark_tag_of(self, key, request_id, slots), &before, &verdict)
                if lease is not None:
                    lease.release()
            return
        self.give_back(tag, slots, 0)
        waiting.released(self, key)

    cdef int cancel_reserved(self, object key, object cost, tuple tier, uint64_t charged_state) except -1:
        """`charged_state` is the end of the permits' lease."""
        self.check_process()
        self.give_back(self.tag_of(key), cost, charged_state)
        waiting.released(self, key)
        return 0

    cdef int give_back(self, uint64_t tag, int64_t cost, uint64_t until_ns) except -1:
        """Free unleased permits: those whose lease ends at `until_ns`, or any if that is 0."""
        cdef uint64_t state, now_ns
        cdef ForebayCell* cell = table_find(&self.table, tag, &state)
        cdef list held
        with cython.critical_section(self):
            held = self.unleased.get(tag)
            if held is None:
                return 0
            now_ns = table_now(&self.table)
            trim(held, now_ns)
            if until_ns != 0:
                cost = self.free_unleased(cell, held, cost, until_ns)
            if until_ns == 0 or until_ns > now_ns:
                # A refund can't tell permits apart, and may have freed one of these instead of its own. Then free that
                # one.
                self.free_unleased(cell, held, cost, 0)
            if not held:
                self.unleased.pop(tag, None)
        return 0

    cdef int64_t free_unleased(self, ForebayCell* cell, list held, int64_t cost, uint64_t until_ns) except -1:
        """Free up to `cost` of the permits in `held`; return the number that is missing. Call in the critical section.
        """
        cdef Slots slots
        cdef Py_ssize_t i = 0
        cdef bint was_held
        # Oldest first: the permits that are left may last longer than necessary, but never shorter.
        while i < len(held) and cost > 0:
            slot, end_ns = held[i]
            if until_ns != 0 and end_ns != until_ns:
                i += 1
                continue
            del held[i]
            was_held = False
            if cell != NULL:
                slots = self.slots_of(cell)
                was_held = free_slot(&slots, slot, lease_of(self.me, end_ns))
                remember_free(&self.search, self.number_of(cell), slot)
            # A permit that a reset or the loss of the key's cell took away doesn't count: the next one is freed.
            cost -= was_held or until_ns != 0
        return cost

    def reset(self, key):
        """Free all permits of `key`, whichever process holds them."""
        cdef Slots slots
        cdef uint64_t i, state
        cdef uint64_t tag = self.tag_of(key)
        cdef ForebayCell* cell
        cdef ForebayCell seen
        self.check_process()
        cell = table_find(&self.table, tag, &state)
        if cell != NULL:
            slots = self.slots_of(cell)
            for i in range(slots.count):
                seen = load128_acquire(&slots.slots[i])
                # A renewal or a take-over may be faster: their permits are held, too.
                while not free_slot(&slots, i, seen) and seen.tag != 0:
                    seen = load128_acquire(&slots.slots[i])
        waiting.released(self, key)

    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1:
        attempt.tag = self.tag_of(key)
        attempt.own_charge.amount = self.checked_cost(cost)
        attempt.charge = &attempt.own_charge
        return 0

    cdef int check(self, Attempt* attempt, uint64_t now_ns) except -1:
        """Whether enough slots are free, or would be for a new cell."""
        cdef Slots slots
        cdef uint64_t i, state, free = 0
        self.check_process()
        attempt.verdict.full = False
        attempt.verdict.now_ns = now_ns
        attempt.verdict.outcome = ALLOWED
        attempt.verdict.cell = table_find(&self.table, attempt.tag, &state)
        if attempt.verdict.cell == NULL:
            return True
        slots = self.slots_of(attempt.verdict.cell)
        # Hints are enough here: the commit takes the slots.
        for i in range((slots.count + 63) // 64):
            free += free_bits(&slots, i) != 0
        if free >= attempt.charge.amount:
            return True
        for _ in range(2):
            free = 0
            for i in range(slots.count):
                free += is_free(load128_acquire(&slots.slots[i]), now_ns)
                if free >= attempt.charge.amount:
                    return True
            if not self.free_ended(&slots):
                break
        attempt.verdict.outcome = DENIED
        return False

    cdef int try_commit(self, Attempt* attempt) except -1:
        return attempt.charge.amount == 0

    cdef int commit(self, Attempt* attempt) except -1:
        cdef bint allowed = self.take_uncounted(attempt.tag, attempt.charge.amount, &attempt.verdict)
        attempt.verdict.outcome = ALLOWED if allowed else DENIED
        return allowed

    cdef int roll_back(self, Attempt* attempt) except -1:
        # A request that was allowed because the table was full holds no slot.
        if not attempt.verdict.full:
            self.give_back(attempt.tag, attempt.charge.amount, attempt.verdict.state)
        return 0

    cdef Decision decision_of(self, const Attempt* attempt, bint allowed):
        return self.verdict_decision(&attempt.verdict, attempt.charge.amount, allowed)


def lease_taken(Concurrency limiter, key, cost):
    """A lease for the permits that a ``wait`` of this process has just taken."""
    cdef Verdict verdict
    cdef uint64_t tag = limiter.tag_of(key)
    cdef uint64_t state
    taken = limiter.take_back(tag, limiter.checked_cost(cost))
    verdict.full = False
    verdict.cell = table_find(&limiter.table, tag, &state)
    return limiter.new_lease(key, taken, &verdict, lease_of(limiter.me, 0))
