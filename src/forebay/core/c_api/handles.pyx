"""The handles' objects, how they are made and closed, and the rare part of what calls begin with."""

cimport cython
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, uint32_t, uint64_t

from forebay.c_api cimport (
    FOREBAY_CLOSED, FOREBAY_FAILED, FOREBAY_FINALIZING, FOREBAY_FORKED, FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE,
    FOREBAY_NEEDS_PYTHON, FOREBAY_NOT_A_LIMITER, FOREBAY_NO_MEMORY, FOREBAY_OK, FOREBAY_WRONG_LIMITER,
    forebay_limiter, forebay_rate, forebay_thread,
)
from forebay.core.algorithms.concurrency cimport Concurrency
from forebay.core.algorithms.slots cimport begin_search
from forebay.core.c_api.gate cimport callers_in, enter, leave, shut
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.limiter cimport Limiter, check_name, report_unraisable
from forebay.core.synced.limiter cimport SyncedLimiter
from forebay.core.table.hot_keys cimport coarse_now, note_key
from forebay.core.table.keys cimport LEASES, in_domain
from forebay.core.table.native cimport FOREBAY_KIND_TAT, load_acquire, siphash13
from forebay.core.table.table cimport Events, table_now
from forebay.core.table.threads cimport forks_of_process, generation_counter

import atexit
import time

from forebay.errors import InvalidLimiter, InvalidRate, StoreClosed
from forebay.rate import Rate

cdef uint64_t gate = 0


def shut_gate():
    """At the end of the interpreter: let no more callers in, and wait for those that are."""
    shut(&gate)
    while callers_in(load_acquire(&gate)):
        time.sleep(0.001)


atexit.register(shut_gate)


class Refused(Exception):
    """A call that ends with this status."""


@cython.final
@cython.no_gc
cdef class OpenedLimiter:

    def __cinit__(self, limiter):
        if not isinstance(limiter, Limiter):
            raise Refused(FOREBAY_NOT_A_LIMITER)
        self.use = HOLDS if isinstance(limiter, Concurrency) else DECIDES
        if (
            (self.use == DECIDES and not isinstance(limiter, CellLimiter)) or isinstance(limiter, SyncedLimiter)
            or (<Limiter>limiter).segment.follows_python
            # Python computes where windows by the calendar end.
            or (self.use == DECIDES and (<CellLimiter>limiter).params.edges != NULL)
            # Python checks the costs of a bucket with initial permits.
            or (self.use == DECIDES and (<CellLimiter>limiter).params.missing_ns != 0)
            # Python reports that a store has no room for credits that come back.
            or (<Limiter>limiter).table.new_may_be_denied
        ):
            raise Refused(FOREBAY_NEEDS_PYTHON)
        self.limiter = limiter
        attachment = self.limiter.store.attachment
        attachment.hold()
        self.attachment = attachment

    def __dealloc__(self):
        if self.attachment is not None:
            self.attachment.release()


@cython.final
@cython.no_gc
cdef class OpenedRate:

    def __cinit__(self, OpenedLimiter opened, uint64_t limit, uint64_t period_ns, uint64_t burst):
        cdef CellLimiter limiter
        if opened.use != DECIDES:
            raise Refused(FOREBAY_INVALID_RATE)
        limiter = opened.limiter
        self.opened = opened
        self.handle.owner = <PyObject*>self
        self.handle.limiter = <PyObject*>limiter
        limiter.params_for_call(Rate.per_ns(limit, period_ns), burst if burst else None, &self.handle.params)


@cython.no_gc
cdef class AttachedThread:

    def __cinit__(self, OpenedLimiter opened):
        cdef Limiter limiter = opened.limiter
        self.table = limiter.table
        self.hash_key = limiter.hash_key
        self.use = opened.use
        self.generation = generation_counter()
        self.closed = &limiter.segment.closed
        self.my_forks = forks_of_process()
        line, shared = opened.attachment.counter_line(limiter.number, self.holder())
        self.counters = limiter.segment.counter_line(line)
        self.counters_are_shared = shared
        self.counter_line = line
        self.hot_keys = limiter.segment.hot_keys
        self.limiter_number = limiter.number
        self.opened = opened

    cdef object holder(self):
        """A number that no other holder of counter lines has: those of Python threads are not negative."""
        return -<object><size_t><void*>self

    def __dealloc__(self):
        if self.opened is not None:
            self.opened.attachment.release_lines(self.holder())


@cython.final
@cython.no_gc
cdef class DecidingThread(AttachedThread):

    def __cinit__(self, OpenedLimiter opened):
        cdef CellLimiter limiter = opened.limiter
        self.limiter = limiter
        self.kind = limiter.kind
        self.params = limiter.params
        self.unit = limiter.unit
        self.unit.params = &self.params
        self.tick_ns = table_now(&self.table)
        # The other limiters of this kind of state can't be opened.
        self.is_gcra = limiter.kind == FOREBAY_KIND_TAT
        self.take = limiter.take
        self.give_back = limiter.give_back
        self.after_charge = limiter.after_charge
        self.set_charge = limiter.set_charge
        self.describe = limiter.describe


@cython.final
@cython.no_gc
cdef class HoldingThread(AttachedThread):

    def __cinit__(self, OpenedLimiter opened):
        cdef Concurrency limiter = opened.limiter
        limiter.check_owner()
        self.me = limiter.me
        self.kind = FOREBAY_KIND_TAT
        self.records = limiter.records
        self.lease_ns = limiter.lease
        self.maker = siphash13(in_domain(self.hash_key, LEASES), NULL, 0) | 1
        begin_search(&self.search, self.me + self.counter_line, limiter.limit)


# Calls that take the GIL

cdef int32_t status_of(object error) noexcept:
    if isinstance(error, Refused):
        return error.args[0]
    if isinstance(error, StoreClosed):
        return FOREBAY_CLOSED
    if isinstance(error, (InvalidRate, InvalidLimiter)):
        return FOREBAY_INVALID_RATE
    if isinstance(error, MemoryError):
        return FOREBAY_NO_MEMORY
    report_unraisable(error)
    return FOREBAY_FAILED


cdef inline void* own(object handle) noexcept:
    Py_INCREF(handle)
    return <void*>handle


cdef int32_t open_limiter(PyObject* given, forebay_limiter** limiter) noexcept with gil:
    try:
        limiter[0] = <forebay_limiter*>own(OpenedLimiter(<object>given))
        return FOREBAY_OK
    except BaseException as error:
        return status_of(error)


cdef int32_t open_thread(PyObject* limiter, forebay_thread** thread) noexcept with gil:
    cdef OpenedLimiter opened
    try:
        opened = <OpenedLimiter>limiter
        thread[0] = <forebay_thread*>own(DecidingThread(opened) if opened.use == DECIDES else HoldingThread(opened))
        return FOREBAY_OK
    except BaseException as error:
        return status_of(error)


cdef int32_t open_rate(
    PyObject* limiter, uint64_t limit, uint64_t period_ns, uint64_t burst, forebay_rate** rate
) noexcept with gil:
    cdef OpenedRate opened
    try:
        opened = OpenedRate(<OpenedLimiter>limiter, limit, period_ns, burst)
        own(opened)
        rate[0] = <forebay_rate*>&opened.handle
        return FOREBAY_OK
    except BaseException as error:
        return status_of(error)


cdef int32_t maintain_limiter(PyObject* limiter) noexcept with gil:
    cdef OpenedLimiter opened
    try:
        opened = <OpenedLimiter>limiter
        if opened.limiter.store.closed:
            return FOREBAY_CLOSED
        check_name(opened.limiter.store)
        if opened.use == HOLDS:
            (<Concurrency>opened.limiter).free_all_ended()
        return FOREBAY_OK
    except BaseException as error:
        return status_of(error)


cdef void close_handle(void* handle) noexcept with gil:
    # A destructor of the caller's may run while it handles an exception.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    PyErr_Fetch(&kind, &value, &trace)
    Py_DECREF(<object>handle)
    PyErr_Restore(kind, value, trace)


cdef inline int32_t enter_with(const void* given, void** made) noexcept nogil:
    """Enter the gate for a call that makes a handle from what it is given. Until it is made, the handle is NULL."""
    if made == NULL:
        return FOREBAY_INVALID_ARGUMENT
    made[0] = NULL
    if given == NULL:
        return FOREBAY_INVALID_ARGUMENT
    return FOREBAY_OK if enter(&gate) else FOREBAY_FINALIZING


cdef int32_t limiter_open(void* object, forebay_limiter** limiter) noexcept nogil:
    cdef int32_t status = enter_with(object, <void**>limiter)
    if status == FOREBAY_OK:
        status = open_limiter(<PyObject*>object, limiter)
        leave(&gate)
    return status


cdef int32_t attach(forebay_limiter* limiter, forebay_thread** thread) noexcept nogil:
    cdef int32_t status = enter_with(limiter, <void**>thread)
    if status == FOREBAY_OK:
        status = open_thread(<PyObject*>limiter, thread)
        leave(&gate)
    return status


cdef int32_t rate_open(
    forebay_limiter* limiter, uint64_t limit, uint64_t period_ns, uint64_t burst, forebay_rate** rate
) noexcept nogil:
    cdef int32_t status = enter_with(limiter, <void**>rate)
    if status == FOREBAY_OK:
        status = open_rate(<PyObject*>limiter, limit, period_ns, burst, rate)
        leave(&gate)
    return status


cdef int32_t maintain(forebay_limiter* limiter) noexcept nogil:
    cdef void* nothing
    cdef int32_t status = enter_with(limiter, &nothing)
    if status == FOREBAY_OK:
        status = maintain_limiter(<PyObject*>limiter)
        leave(&gate)
    return status


cdef void close_object(void* handle) noexcept nogil:
    """`limiter_close` and `detach`."""
    if handle != NULL and enter(&gate):
        close_handle(handle)
        leave(&gate)


cdef void rate_close(forebay_rate* rate) noexcept nogil:
    if rate != NULL:
        close_object((<RateHandle*>rate).owner)


# The beginning of calls

cdef int32_t check_process(AttachedThread thread, Use use) noexcept nogil:
    cdef uint64_t generation = load_acquire(thread.generation)
    if thread.use != use:
        return FOREBAY_WRONG_LIMITER
    if forks_of_process() != thread.my_forks:
        return FOREBAY_FORKED
    if load_acquire(thread.closed):
        return FOREBAY_CLOSED
    thread.checked_generation[<int>use] = generation
    return FOREBAY_OK


cdef void count_events(AttachedThread thread, const Events* events) noexcept nogil:
    count(thread, &thread.counters.inserted, events.inserted)
    count(thread, &thread.counters.evicted, events.evicted)
    count(thread, &thread.counters.full, events.full)
    count(thread, &thread.counters.cas_retries, events.cas_retries)


cdef void note_denied(AttachedThread thread, uint64_t tag) noexcept nogil:
    note_key(thread.hot_keys.denied, thread.hot_keys.lines, tag, thread.limiter_number, coarse_now(&thread.table))


cdef int32_t hash_key(
    OpenedLimiter limiter, uint32_t key_kind, const void* key, size_t size, uint64_t* hash
) noexcept nogil:
    if <void*>limiter == NULL or hash == NULL:
        return FOREBAY_INVALID_ARGUMENT
    return hash_bytes(limiter.limiter.hash_key, key_kind, key, size, hash)
