"""The fields of a concurrency limiter in each process, and of a lease."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.slots cimport Slots
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Limiter
from forebay.core.table.keys cimport hash_key_of
from forebay.core.table.native cimport FOREBAY_KIND_TAT, ForebayCell
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport Verdict, fingerprint_of


cdef enum:
    HINTS = 64                           # a power of two


cdef class Lease


@cython.final
cdef class Concurrency(Limiter):
    cdef readonly uint64_t limit
    cdef readonly object lease_ns
    cdef uint64_t lease
    cdef uint64_t words_per_cell
    cdef uint64_t bit_words
    cdef uint64_t last_cell              # that has words
    cdef uint64_t* words
    cdef Extent extent
    cdef object owners
    cdef uint64_t me                     # this process as an owner
    cdef uint64_t my_forks               # for which `me` is right
    cdef uint64_t watch_again_ns         # the earliest time of the next search for ended processes
    cdef uint64_t scanned                # the cell whose slots were all found held, xor the next two words
    cdef uint64_t scan_again_ns          # the earliest time of their next scan
    cdef uint64_t first_end_ns           # the earliest end of their leases; 0: not all were held
    cdef dict unleased                       # by tag, what was taken without a lease object: lists of (slot, end)
    cdef Py_ssize_t unleased_swept           # how many tags there may be before lapsed ones are swept out
    cdef uint64_t[HINTS] hints           # by cell, a slot that was free a while ago

    cdef Slots slots_of(self, const ForebayCell* cell) noexcept
    cdef int check_process(self) except -1
    cdef int begin_process(self) except -1
    cdef void remember_free(self, const ForebayCell* cell, uint64_t slot) noexcept nogil
    cdef bint was_scanned(self, const Verdict* verdict, uint64_t now_ns) noexcept nogil
    cdef void remember_scan(self, const Verdict* verdict, uint64_t first_end_ns, uint64_t again_ns) noexcept nogil
    cdef uint64_t begin_lease(self, object key, Verdict* verdict) except 0
    cdef uint64_t begin_lease_of(self, uint64_t tag, Verdict* verdict) except 0
    cdef int64_t take_one(self, const Slots* slots, Verdict* verdict, ForebayCell lease) except -2
    cdef bint free_ended(self, const Slots* slots) except -1
    cdef object take(self, uint64_t tag, int64_t cost, Verdict* verdict, ForebayCell* lease)
    cdef int free_slots(self, const Slots* slots, list taken, ForebayCell lease) except -1
    cdef int64_t checked_cost(self, object cost) except -1
    cdef bint take_unleased(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1
    cdef bint take_uncounted(self, uint64_t tag, int64_t cost, Verdict* verdict) except -1
    cdef int add_unleased(self, uint64_t tag, list taken, uint64_t now_ns) except -1
    cdef list take_back(self, uint64_t tag, int64_t cost)
    cdef Lease new_lease(self, object key, object taken, const Verdict* verdict, ForebayCell held)
    cdef Decision verdict_decision(self, const Verdict* verdict, int64_t cost, bint allowed)
    cdef Decision decision(self, const ForebayCell* cell, uint64_t now_ns, int64_t cost, object allowed)
    cdef int64_t free_unleased(self, ForebayCell* cell, list held, int64_t cost, uint64_t until_ns) except -1
    cdef int give_back(self, uint64_t tag, int64_t cost, uint64_t until_ns) except -1

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
    cdef uint64_t forks
    cdef bint released
    cdef readonly bint allowed
    cdef readonly bint full              # whether `on_full` decided, as the store had no room for the key

    cdef bint restart(self, uint64_t end_ns) except -1
