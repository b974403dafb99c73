"""The fields of a concurrency limiter in each process, and of a lease."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.slots cimport SlotRecords, Slots, SlotSearch, slots_at
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Limiter
from forebay.core.table.keys cimport hash_key_of
from forebay.core.table.native cimport FOREBAY_KIND_TAT, ForebayCell, prefetch
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport (
    TIME_BITS, Next, Outcome, Table, Verdict, fingerprint_of, home_line, table_now, table_try,
)


cdef enum:
    # The least time between two scans of all slots, and between two searches for ended processes, while denials follow
    # each other.
    WATCH_INTERVAL_NS = 100_000
    LONGEST_WATCH_INTERVAL_NS = 10_000_000


# How many ends this process has drawn for leases by request ids, of all limiters.
cdef uint64_t ends_drawn


cdef inline bint touch(
    ForebayCell* cell, uint64_t tag, uint64_t forget_ns, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Keep the key's cell at least until a lease that begins now ends. Writes up to two leases, so writes are rare."""
    cdef uint64_t lease_ns = (<const uint64_t*>parameters)[0]
    next.state = now_ns + 2 * lease_ns
    return forget_ns < now_ns + lease_ns or forget_ns >> TIME_BITS != 0


cdef inline Outcome touch_key(
    const Table* table, uint64_t tag, const uint64_t* lease_ns, Verdict* verdict
) noexcept nogil:
    """Keep a cell for a key that has one. An outcome above ALLOWED is for `table_decide`, with `touch`."""
    prefetch(home_line(table, tag))
    verdict.now_ns = table_now(table)
    verdict.full = False
    verdict.tag = tag
    return table_try(table, tag, verdict.now_ns, touch, lease_ns, verdict)


cdef inline uint64_t time_to_watch(uint64_t begin_ns, uint64_t end_ns) noexcept nogil:
    """When the next search for ended processes may begin. With many slots a search takes longer than the interval. It
    may take at most about a tenth of the time.
    """
    return begin_ns + max(
        <uint64_t>WATCH_INTERVAL_NS, min(11 * (end_ns - begin_ns), <uint64_t>LONGEST_WATCH_INTERVAL_NS))


cdef class Lease


@cython.final
cdef class Concurrency(Limiter):
    cdef readonly uint64_t limit
    cdef readonly object lease_ns
    cdef uint64_t lease
    cdef SlotRecords records
    cdef Extent extent
    cdef object owners
    cdef uint64_t me                     # this process as an owner
    cdef uint64_t my_forks               # for which `me` is right
    cdef uint64_t watch_again_ns         # the earliest time of the next search for ended processes
    cdef dict unleased                       # by tag, what was taken without a lease object: lists of (slot, end)
    cdef Py_ssize_t unleased_swept           # how many tags there may be before lapsed ones are swept out
    cdef SlotSearch search
    cdef int slot_bits                       # of the end of a lease by a request id, those that are its slot's number
    cdef uint64_t end_grain_ns               # a power of two; such an end is later than the lease's by less than this

    cdef int check_process(self) except -1
    cdef int check_owner(self) except -1
    cdef int begin_process(self) except -1
    cdef uint64_t begin_lease_of(self, uint64_t tag, uint64_t kept_ns, Verdict* verdict) except 0
    cdef int64_t take_one(self, const Slots* slots, Verdict* verdict, ForebayCell lease) except -2
    cdef bint free_ended(self, const Slots* slots) except -1
    cdef int free_all_ended(self) except -1
    cdef object take(self, uint64_t tag, int64_t cost, Verdict* verdict, ForebayCell* lease)
    cdef int free_slots(self, const Slots* slots, list taken, ForebayCell lease) except -1
    cdef int64_t checked_cost(self, object cost) except -1
    cdef bint take_unleased(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1
    cdef bint take_uncounted(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1
    cdef int add_unleased(self, uint64_t tag, list taken, uint64_t now_ns) except -1
    cdef list take_back(self, uint64_t tag, int64_t cost)
    cdef Lease new_lease(self, object key, object taken, const Verdict* verdict, ForebayCell held)
    cdef uint64_t draw_end(self, uint64_t slot, uint64_t end_ns) noexcept
    cdef bint restart_marked(self, Lease lease) except -1
    cdef Lease take_over(self, object key, int64_t cost, uint64_t mark_tag, uint64_t* before, Verdict* verdict)
    cdef Lease take_once(self, object key, int64_t cost, object request_id, Verdict* verdict)
    cdef Decision verdict_decision(self, const Verdict* verdict, int64_t cost, bint allowed)
    cdef Decision decision(self, const ForebayCell* cell, uint64_t now_ns, int64_t cost, object allowed)
    cdef int64_t free_unleased(self, ForebayCell* cell, list held, int64_t cost, uint64_t until_ns) except -1
    cdef int give_back(self, uint64_t tag, int64_t cost, uint64_t until_ns) except -1

    cdef inline uint64_t number_of(self, const ForebayCell* cell) noexcept nogil:
        return <uint64_t>(cell - self.table.cells)

    cdef inline Slots slots_of(self, const ForebayCell* cell) noexcept nogil:
        return slots_at(&self.records, self.number_of(cell))

    cdef inline uint64_t tag_of(self, object key) except 0:
        return fingerprint_of(hash_key_of(key, self.hash_key)) | FOREBAY_KIND_TAT


@cython.final
cdef class Lease:
    cdef Concurrency limiter
    cdef object key
    cdef object more                     # what `cost` above 1 takes: a list of (slot, end) of which the first is below
    cdef ForebayCell* cell              # NULL: none was allowed, or allowed without a slot because the table is full
    cdef uint64_t slot
    cdef ForebayCell held
    cdef uint64_t mark_tag               # of the request's id; 0: it has none
    cdef uint64_t forks
    cdef bint released
    cdef readonly bint allowed
    cdef readonly bint full              # whether `on_full` decided, as the store had no room for the key

    cdef bint restart(self, uint64_t owner, uint64_t end_ns) except -1
