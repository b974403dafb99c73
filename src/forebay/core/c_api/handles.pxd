"""The objects behind the handles of the C API, and what the calls of a native thread begin with.

Such a call runs beside any other thread, without the GIL. So it may not touch an object's reference count.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from forebay.c_api cimport (
    FOREBAY_INVALID_ARGUMENT, FOREBAY_KEY_INT, FOREBAY_KEY_PARTS, FOREBAY_OK, forebay_limiter, forebay_rate,
    forebay_request, forebay_thread,
)
from forebay.core.algorithms.slots cimport SlotRecords, SlotSearch
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport (
    AfterCharge, Charge, Describe, Limiter, LimitParams, SetCharge, add_to_counter,
)
from forebay.core.table.hot_keys cimport HotKeys
from forebay.core.table.keys cimport KeyDomain, in_domain
from forebay.core.table.native cimport ForebayCounterLine, ForebayHashKey, load_acquire, siphash13
from forebay.core.table.table cimport Decide, Events, Table, fingerprint_of


# The threads of a limiter.
cdef enum Use:
    DECIDES                              # the limiter's state is a cell
    HOLDS                                # it is a Concurrency


# A limiter's handle.
cdef class OpenedLimiter:
    cdef Limiter limiter
    cdef Use use
    cdef object attachment


# A `forebay_rate` is a pointer to this, because decisions can't read objects that they only have an address of.
cdef struct RateHandle:
    PyObject* owner                      # the object that it is in
    PyObject* limiter
    LimitParams params


cdef class OpenedRate:
    cdef OpenedLimiter opened
    cdef RateHandle handle


# A thread's handle: all that its calls read, so that threads share no cache line.
cdef class AttachedThread:
    cdef Table table
    cdef ForebayHashKey hash_key
    cdef uint64_t kind
    cdef ForebayCounterLine* counters
    cdef bint counters_are_shared
    cdef uint64_t counter_line
    cdef const uint64_t* generation
    cdef const uint64_t* closed
    cdef Use use
    # By use, the latest generation in which the thread was neither forked nor closed. For the other use it stays 0,
    # which no generation is, so `check_process` refuses each call.
    cdef uint64_t[2] checked_generation
    cdef uint64_t my_forks
    cdef HotKeys hot_keys
    cdef uint64_t limiter_number
    cdef OpenedLimiter opened            # keeps all of this alive

    cdef object holder(self)


# A native thread attached to a limiter whose state is a cell.
cdef class DecidingThread(AttachedThread):
    cdef Charge unit                     # a cost of 1
    cdef LimitParams params
    cdef uint64_t tick_ns                # the time of the last `tick`
    cdef bint is_gcra
    cdef Decide take
    cdef Decide give_back
    cdef AfterCharge after_charge
    cdef SetCharge set_charge
    cdef Describe describe
    cdef CellLimiter limiter


# A native thread attached to a Concurrency.
cdef class HoldingThread(AttachedThread):
    cdef SlotRecords records
    cdef SlotSearch search               # of this thread alone
    cdef uint64_t lease_ns
    cdef uint64_t me                     # this process as an owner
    cdef uint64_t maker                  # the limiter, in its leases; never 0


cdef int32_t limiter_open(void* object, forebay_limiter** limiter) noexcept nogil
cdef int32_t attach(forebay_limiter* limiter, forebay_thread** thread) noexcept nogil
cdef int32_t rate_open(
    forebay_limiter* limiter, uint64_t limit, uint64_t period_ns, uint64_t burst, forebay_rate** rate) noexcept nogil
cdef int32_t maintain(forebay_limiter* limiter) noexcept nogil
cdef void rate_close(forebay_rate* rate) noexcept nogil

# `limiter_close` and `detach`.
cdef void close_object(void* handle) noexcept nogil

# Hashes a key with a limiter's hash key.
cdef int32_t hash_key(
    OpenedLimiter limiter, uint32_t key_kind, const void* key, size_t size, uint64_t* hash) noexcept nogil

cdef void count_events(AttachedThread thread, const Events* events) noexcept nogil

cdef void note_denied(AttachedThread thread, uint64_t tag) noexcept nogil

# After a fork or a close in this process, or if the limiter is for another use.
cdef int32_t check_process(AttachedThread thread, Use use) noexcept nogil


cdef inline int32_t ensure_usable(AttachedThread thread, Use use) noexcept nogil:
    if load_acquire(thread.generation) != thread.checked_generation[<int>use]:
        return check_process(thread, use)
    return FOREBAY_OK


cdef inline bint can_be(const void* data, uint64_t size) noexcept nogil:
    """Whether the caller can have so many bytes there. No array has more than PTRDIFF_MAX: it has passed -1."""
    return (data != NULL or size == 0) and <int64_t>size >= 0


cdef inline int32_t check_key(uint32_t key_kind, const void* key, uint64_t size) noexcept nogil:
    """Refuse a malformed key."""
    if key_kind > <uint32_t>FOREBAY_KEY_PARTS or not can_be(key, size):
        return FOREBAY_INVALID_ARGUMENT
    if key_kind == <uint32_t>FOREBAY_KEY_INT and size != 8:
        return FOREBAY_INVALID_ARGUMENT
    return FOREBAY_OK


cdef inline int32_t hash_bytes(
    ForebayHashKey hash_key, uint32_t key_kind, const void* key, uint64_t size, uint64_t* hash
) noexcept nogil:
    cdef int32_t status = check_key(key_kind, key, size)
    if status == FOREBAY_OK:
        # The kinds of keys are the domains of keys.pxd.
        hash[0] = siphash13(in_domain(hash_key, <KeyDomain>key_kind), <const uint8_t*>key, size)
    return status


cdef inline int32_t read_key(AttachedThread thread, const forebay_request* request, uint64_t* tag) noexcept nogil:
    """The tag of a request's key."""
    cdef uint64_t hash = request.hash
    cdef int32_t status = FOREBAY_OK
    if request.key != NULL:
        status = hash_bytes(thread.hash_key, request.key_kind, request.key, request.key_size, &hash)
    elif request.key_size != 0:
        # The caller has lost the key's pointer.
        status = FOREBAY_INVALID_ARGUMENT
    tag[0] = fingerprint_of(hash) | thread.kind
    return status


cdef inline int32_t begin(
    AttachedThread thread, Use use, const forebay_request* request, uint64_t* tag
) noexcept nogil:
    """Every call with a request begins with this."""
    cdef int32_t status
    if <void*>thread == NULL or request == NULL:
        return FOREBAY_INVALID_ARGUMENT
    status = ensure_usable(thread, use)
    return status if status < 0 else read_key(thread, request, tag)


cdef inline void count(AttachedThread thread, uint64_t* counter, uint64_t n) noexcept nogil:
    add_to_counter(counter, n, thread.counters_are_shared)


cdef inline void count_decision(AttachedThread thread, bint allowed, uint64_t tag) noexcept nogil:
    """Count a decision. Native threads note the keys that they deny, and none that they allow."""
    count(thread, &thread.counters.allowed if allowed else &thread.counters.denied, 1)
    if not allowed and thread.hot_keys.denied != NULL:
        note_denied(thread, tag)
