"""The C API: native threads decide without the GIL. The contract is forebay.h; here is why it holds.

Handles
-------
A `forebay_limiter`, a `forebay_thread` and a `forebay_rate` are references to the objects below. A thread's object has
all that its decisions read, and refers to the limiter's. So the limiter, its store and its mapping live as
long as any handle, in whatever order the handles are closed.

The counter line
----------------
A thread counts by plain loads and stores in a line that no other thread and no other process writes. The process owns
the line by a lock on the store's file, which ends when the file is closed.

* *attach* (with the GIL): takes a line that is free, or, with none, the limiter's shared line.
* *detach* (with the GIL): gives the line back.
* *close of the store*, in any thread, at any time: marks the segment as closed, then starts a new generation. The file
  stays open until the last handle is closed (`Attachment.hold`). So a thread that is between its decision and its count
  counts in a line that is still its own. It needs no flag that close would have to wait for, and close waits for none.
* *a decision*: compares the generation. If it has changed, the thread looks whether the process was forked or the
  segment was closed, and only then takes the new generation for checked. It loads the generation first: a close
  after that changes it again.
* *a fork*: the child's copy of a thread's object has the parent's number of forks, so it says FOREBAY_FORKED for ever,
  and writes nothing. `detach` in the child gives back no line, as this process owns none there.
* *the end of a thread* without detach: the line stays locked, and counts nothing.
* *a kill*: the kernel drops the lock, and the next owner continues the line's counts.

The end of the interpreter
--------------------------
A thread that asks for the GIL after the interpreter has begun to end never returns, or is ended. So each function
that takes the GIL first enters the *gate*. The gate is one word: how many are in, in which fork, and whether it is
shut. `atexit` shuts it, and waits, without the GIL, until all have left. As it is one word, a thread either is seen by
that wait or finds the gate shut. Decisions don't pass the gate: what they read and write stays mapped until the process
ends, because no handle that is open then is ever freed.
"""

cimport cython
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_API_VERSION, FOREBAY_BOOK, FOREBAY_CLOSED, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_DENIED,
    FOREBAY_FAILED, FOREBAY_FINALIZING, FOREBAY_FORKED, FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE, FOREBAY_KEY_INT,
    FOREBAY_KEY_PARTS, FOREBAY_NEEDS_PYTHON, FOREBAY_NOT_A_LIMITER, FOREBAY_NO_MEMORY, FOREBAY_OK, forebay_api,
    forebay_limiter, forebay_rate, forebay_request, forebay_result, forebay_thread,
)
from forebay.core.algorithms.gcra cimport gcra_take
from forebay.core.batch cimport Batch
from forebay.core.cell_limiter cimport CellLimiter, begin_decision, set_outlook
from forebay.core.decision cimport Outlook, no_outlook, remaining_in
from forebay.core.limiter cimport (
    AfterCharge, Charge, Describe, Limiter, LimitParams, SetCharge, add_to_counter, check_name, report_unraisable,
)
from forebay.core.synced.limiter cimport SyncedLimiter
from forebay.core.table.keys cimport KeyDomain, in_domain
from forebay.core.table.native cimport (
    FOREBAY_KIND_TAT, ForebayCounterLine, ForebayHashKey, cas_acq_rel, load_acquire, set_bits_acq_rel, siphash13,
)
from forebay.core.table.segment_view cimport forks_of_process
from forebay.core.table.table cimport (
    ALLOWED, CAS_FAILED, Decide, Events, Outcome, Table, Verdict, fingerprint_of, no_events, table_amend, table_decide,
    table_now, table_peek,
)

import atexit
import time

from forebay.errors import InvalidLimiter, InvalidRate, StoreClosed
from forebay.rate import Rate


# The gate

cdef enum:
    CALLER_BITS = 32
    FORK_BITS = 31

cdef uint64_t SHUT = <uint64_t>1 << (CALLER_BITS + FORK_BITS)
cdef uint64_t CALLERS = (<uint64_t>1 << CALLER_BITS) - 1

cdef uint64_t gate = 0


cdef inline uint64_t callers_in(uint64_t seen) noexcept nogil:
    """How many callers of this process are in. Those of the parent don't exist here."""
    return seen & CALLERS if (seen & ~SHUT) >> CALLER_BITS == this_fork() else 0


cdef inline uint64_t this_fork() noexcept nogil:
    return forks_of_process() & ((<uint64_t>1 << FORK_BITS) - 1)


cdef bint enter() noexcept nogil:
    """Before the GIL is taken. False if the interpreter ends."""
    cdef uint64_t seen
    while True:
        seen = load_acquire(&gate)
        if seen & SHUT:
            return False
        if cas_acq_rel(&gate, seen, this_fork() << CALLER_BITS | (callers_in(seen) + 1)):
            return True


cdef void leave() noexcept nogil:
    cdef uint64_t seen = load_acquire(&gate)
    while not cas_acq_rel(&gate, seen, seen - 1):
        seen = load_acquire(&gate)


def shut_gate():
    """At the end of the interpreter: let no more callers in, and wait for those that are."""
    set_bits_acq_rel(&gate, SHUT)
    while callers_in(load_acquire(&gate)):
        time.sleep(0.001)


atexit.register(shut_gate)


# The objects behind the handles

class Refused(Exception):
    """A call that ends with this status."""


@cython.final
@cython.no_gc
cdef class OpenedLimiter:
    """A limiter's handle."""

    cdef CellLimiter limiter
    cdef object attachment

    def __cinit__(self, limiter):
        if not isinstance(limiter, Limiter):
            raise Refused(FOREBAY_NOT_A_LIMITER)
        if (
            not isinstance(limiter, CellLimiter) or isinstance(limiter, SyncedLimiter)
            or (<Limiter>limiter).segment.follows_python
        ):
            raise Refused(FOREBAY_NEEDS_PYTHON)
        self.limiter = limiter
        attachment = (<CellLimiter>limiter).store.attachment
        attachment.hold()
        self.attachment = attachment

    def __dealloc__(self):
        if self.attachment is not None:
            self.attachment.release()


# A `forebay_rate` is a pointer to this, because decisions can't read objects that they only have an address of.
cdef struct RateHandle:
    PyObject* owner                          # the object that it is in
    PyObject* limiter
    LimitParams params


@cython.final
@cython.no_gc
cdef class OpenedRate:
    """A rate's handle."""

    cdef OpenedLimiter opened
    cdef RateHandle handle

    def __cinit__(self, OpenedLimiter opened, uint64_t limit, uint64_t period_ns, uint64_t burst):
        cdef CellLimiter limiter = opened.limiter
        self.opened = opened
        self.handle.owner = <PyObject*>self
        self.handle.limiter = <PyObject*>limiter
        limiter.params_for_call(Rate.per_ns(limit, period_ns), burst if burst else None, &self.handle.params)


@cython.final
@cython.no_gc
cdef class AttachedThread:
    """A thread's handle: all that a decision reads, so that threads share no cache line."""

    cdef Table table
    cdef ForebayHashKey hash_key
    cdef uint64_t kind
    cdef Charge unit                         # a cost of 1
    cdef LimitParams params
    cdef bint is_gcra
    cdef Decide take
    cdef Decide give_back
    cdef AfterCharge after_charge
    cdef SetCharge set_charge
    cdef Describe describe
    cdef ForebayCounterLine* counters
    cdef bint counters_are_shared
    cdef uint64_t counter_line
    cdef const uint64_t* generation
    cdef const uint64_t* closed
    cdef uint64_t checked_generation         # the latest in which the thread was neither forked nor closed
    cdef uint64_t my_forks
    cdef CellLimiter limiter
    cdef OpenedLimiter opened                # keeps all of this alive

    def __cinit__(self, OpenedLimiter opened):
        cdef CellLimiter limiter = opened.limiter
        self.limiter = limiter
        self.table = limiter.table
        self.hash_key = limiter.hash_key
        self.kind = limiter.kind
        self.params = limiter.params
        self.unit = limiter.unit
        self.unit.params = &self.params
        # The other limiters of this kind of state can't be opened.
        self.is_gcra = limiter.kind == FOREBAY_KIND_TAT
        self.take = limiter.take
        self.give_back = limiter.give_back
        self.after_charge = limiter.after_charge
        self.set_charge = limiter.set_charge
        self.describe = limiter.describe
        self.generation = limiter.segment.generation
        self.closed = &limiter.segment.closed
        self.my_forks = forks_of_process()
        line, shared = opened.attachment.counter_line(limiter.number, self.holder())
        self.counters = limiter.segment.counter_line(line)
        self.counters_are_shared = shared
        self.counter_line = line
        self.opened = opened

    cdef object holder(self):
        """A number that no other holder of counter lines has: those of Python threads are not negative."""
        return -<object><size_t><void*>self

    def __dealloc__(self):
        if self.opened is not None:
            self.opened.attachment.release_lines(self.holder())


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
    try:
        thread[0] = <forebay_thread*>own(AttachedThread(<OpenedLimiter>limiter))
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
    try:
        if (<OpenedLimiter>limiter).limiter.store.closed:
            return FOREBAY_CLOSED
        check_name((<OpenedLimiter>limiter).limiter.store)
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


cdef int32_t limiter_open(void* object, forebay_limiter** limiter) noexcept nogil:
    cdef int32_t status
    if limiter == NULL:
        return FOREBAY_INVALID_ARGUMENT
    limiter[0] = NULL
    if object == NULL:
        return FOREBAY_INVALID_ARGUMENT
    if not enter():
        return FOREBAY_FINALIZING
    status = open_limiter(<PyObject*>object, limiter)
    leave()
    return status


cdef int32_t attach(forebay_limiter* limiter, forebay_thread** thread) noexcept nogil:
    cdef int32_t status
    if thread == NULL:
        return FOREBAY_INVALID_ARGUMENT
    thread[0] = NULL
    if limiter == NULL:
        return FOREBAY_INVALID_ARGUMENT
    if not enter():
        return FOREBAY_FINALIZING
    status = open_thread(<PyObject*>limiter, thread)
    leave()
    return status


cdef int32_t rate_open(
    forebay_limiter* limiter, uint64_t limit, uint64_t period_ns, uint64_t burst, forebay_rate** rate
) noexcept nogil:
    cdef int32_t status
    if rate == NULL:
        return FOREBAY_INVALID_ARGUMENT
    rate[0] = NULL
    if limiter == NULL:
        return FOREBAY_INVALID_ARGUMENT
    if not enter():
        return FOREBAY_FINALIZING
    status = open_rate(<PyObject*>limiter, limit, period_ns, burst, rate)
    leave()
    return status


cdef int32_t maintain(forebay_limiter* limiter) noexcept nogil:
    cdef int32_t status
    if limiter == NULL:
        return FOREBAY_INVALID_ARGUMENT
    if not enter():
        return FOREBAY_FINALIZING
    status = maintain_limiter(<PyObject*>limiter)
    leave()
    return status


cdef void close_object(void* handle) noexcept nogil:
    """`limiter_close` and `detach`."""
    if handle != NULL and enter():
        close_handle(handle)
        leave()


cdef void rate_close(forebay_rate* rate) noexcept nogil:
    if rate != NULL:
        close_object((<RateHandle*>rate).owner)


# Decisions: they run beside any other thread, so nothing here may touch an object's reference count.

cdef int32_t check_process(AttachedThread thread) noexcept nogil:
    """After a fork or a close in this process."""
    cdef uint64_t generation = load_acquire(thread.generation)
    if forks_of_process() != thread.my_forks:
        return FOREBAY_FORKED
    if load_acquire(thread.closed):
        return FOREBAY_CLOSED
    thread.checked_generation = generation
    return FOREBAY_OK


cdef inline int32_t ensure_usable(AttachedThread thread) noexcept nogil:
    if load_acquire(thread.generation) != thread.checked_generation:
        return check_process(thread)
    return FOREBAY_OK


cdef inline void count(AttachedThread thread, uint64_t* counter, uint64_t n) noexcept nogil:
    add_to_counter(counter, n, thread.counters_are_shared)


cdef void count_events(AttachedThread thread, const Events* events) noexcept nogil:
    count(thread, &thread.counters.inserted, events.inserted)
    count(thread, &thread.counters.evicted, events.evicted)
    count(thread, &thread.counters.full, events.full)
    count(thread, &thread.counters.cas_retries, events.cas_retries)


cdef inline int32_t decide_tag(
    AttachedThread thread, uint64_t tag, const Charge* charge, Verdict* verdict
) noexcept nogil:
    """Decide one request and count it: `decide_by` for a native thread."""
    cdef Events events
    cdef Outcome outcome
    cdef int32_t status = ensure_usable(thread)
    if status < 0:
        return status
    if thread.is_gcra:
        # The compiler puts it in here, and most limiters are such.
        outcome = begin_decision(&thread.table, tag, charge, verdict, gcra_take)
    else:
        outcome = begin_decision(&thread.table, tag, charge, verdict, thread.take)
    if outcome > ALLOWED:
        events = no_events()
        events.cas_retries = outcome == CAS_FAILED
        table_decide(
            &thread.table, tag, thread.counter_line, &thread.counters.claims, thread.take, charge, verdict, &events)
        count_events(thread, &events)
    if verdict.outcome == ALLOWED:
        if thread.after_charge != NULL:
            thread.after_charge(charge, verdict)
        count(thread, &thread.counters.allowed, 1)
        return FOREBAY_ALLOWED
    count(thread, &thread.counters.denied, 1)
    return FOREBAY_DENIED


cdef int32_t allow_tag(AttachedThread thread, uint64_t tag) noexcept nogil:
    cdef Verdict verdict
    return decide_tag(thread, tag, &thread.unit, &verdict)


cdef int32_t peek_tag(AttachedThread thread, uint64_t tag, const Charge* charge, Verdict* verdict) noexcept nogil:
    cdef int32_t status = ensure_usable(thread)
    if status < 0:
        return status
    verdict.full = False
    verdict.tag = tag
    verdict.now_ns = table_now(&thread.table)
    return FOREBAY_ALLOWED if table_peek(
        &thread.table, tag, verdict.now_ns, thread.take, charge, verdict) else FOREBAY_DENIED


cdef inline int32_t check_key(uint32_t key_kind, const void* key, uint64_t size) noexcept nogil:
    if key_kind > <uint32_t>FOREBAY_KEY_PARTS or (key == NULL and size != 0):
        return FOREBAY_INVALID_ARGUMENT
    if key_kind == <uint32_t>FOREBAY_KEY_INT and size != 8:
        return FOREBAY_INVALID_ARGUMENT
    return FOREBAY_OK


cdef int32_t hash_bytes(
    ForebayHashKey hash_key, uint32_t key_kind, const void* key, uint64_t size, uint64_t* hash
) noexcept nogil:
    cdef int32_t status = check_key(key_kind, key, size)
    if status == FOREBAY_OK:
        # The kinds of keys are the domains of keys.pxd.
        hash[0] = siphash13(in_domain(hash_key, <KeyDomain>key_kind), <const uint8_t*>key, size)
    return status


cdef int32_t read_key(AttachedThread thread, const forebay_request* request, uint64_t* tag) noexcept nogil:
    cdef uint64_t hash
    cdef int32_t status = FOREBAY_OK
    if <void*>thread == NULL or request == NULL:
        return FOREBAY_INVALID_ARGUMENT
    if request.key == NULL:
        hash = request.hash
    else:
        status = hash_bytes(thread.hash_key, request.key_kind, request.key, request.key_size, &hash)
    tag[0] = fingerprint_of(hash) | thread.kind
    return status


cdef int32_t params_of(
    AttachedThread thread, const forebay_request* request, const LimitParams** params
) noexcept nogil:
    """The limit that judges a request: the limiter's own, or the rate's."""
    cdef const RateHandle* rate = <const RateHandle*>request.rate
    params[0] = &thread.params
    if rate != NULL:
        if <void*>rate.limiter != <void*>thread.limiter:
            return FOREBAY_INVALID_RATE
        params[0] = &rate.params
    return FOREBAY_OK


cdef int32_t read_charge(AttachedThread thread, const forebay_request* request, Charge* charge) noexcept nogil:
    cdef const LimitParams* params
    cdef int32_t status
    if request.flags & ~<uint32_t>FOREBAY_BOOK:
        return FOREBAY_INVALID_ARGUMENT
    status = params_of(thread, request, &params)
    if status < 0:
        return status
    if request.cost > params.limit:
        return FOREBAY_COST_EXCEEDS_LIMIT
    thread.set_charge(request.cost, params, charge)
    if request.flags & <uint32_t>FOREBAY_BOOK:
        thread.limiter.allow_wait(charge, request.max_delay_ns)
    return FOREBAY_OK


cdef int32_t read_request(
    AttachedThread thread, const forebay_request* request, uint64_t* tag, Charge* charge
) noexcept nogil:
    cdef int32_t status = read_key(thread, request, tag)
    return status if status < 0 else read_charge(thread, request, charge)


cdef void write_result(
    AttachedThread thread, const Charge* charge, const Verdict* verdict, bint allowed, forebay_result* result
) noexcept nogil:
    """The result of a request that has charged and booked nothing."""
    cdef Outlook outlook = no_outlook()
    set_outlook(charge, verdict, allowed, thread.describe, &outlook)
    result.limit = charge.params.limit
    result.remaining = remaining_in(&outlook, charge.params.limit)
    result.retry_after_ns = outlook.retry_after_ns
    result.reset_after_ns = outlook.reset_after_ns
    result.delay_ns = 0
    result.charge = 0
    result.allowed = allowed
    result.full = verdict.full


cdef int32_t hash_key(
    OpenedLimiter limiter, uint32_t key_kind, const void* key, size_t size, uint64_t* hash
) noexcept nogil:
    if <void*>limiter == NULL or hash == NULL:
        return FOREBAY_INVALID_ARGUMENT
    return hash_bytes(limiter.limiter.hash_key, key_kind, key, size, hash)


cdef int32_t allow(AttachedThread thread, const void* key, size_t size) noexcept nogil:
    if <void*>thread == NULL or (key == NULL and size != 0):
        return FOREBAY_INVALID_ARGUMENT
    # As a compact ASCII str in keys.pxd. Any other str hashes by its UTF-8 in the same way.
    return allow_tag(
        thread, fingerprint_of(siphash13(thread.hash_key, <const uint8_t*>key, size)) | thread.kind)


cdef int32_t allow_hash(AttachedThread thread, uint64_t hash) noexcept nogil:
    if <void*>thread == NULL:
        return FOREBAY_INVALID_ARGUMENT
    return allow_tag(thread, fingerprint_of(hash) | thread.kind)


cdef int32_t decide(
    AttachedThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil:
    cdef Verdict verdict
    cdef Charge charge
    cdef uint64_t tag
    cdef int32_t status = read_request(thread, request, &tag, &charge)
    if status < 0:
        return status
    if charge.amount != 0:
        status = decide_tag(thread, tag, &charge, &verdict)
    else:
        status = peek_tag(thread, tag, &charge, &verdict)
        if status >= 0:
            count(thread, &thread.counters.allowed if status == FOREBAY_ALLOWED else &thread.counters.denied, 1)
    if status < 0 or result == NULL:
        return status
    write_result(thread, &charge, &verdict, status == FOREBAY_ALLOWED, result)
    if status == FOREBAY_ALLOWED:
        if request.flags & <uint32_t>FOREBAY_BOOK:
            result.delay_ns = thread.limiter.booked_delay_ns(&charge, &verdict)
        # A request that was allowed because the table was full has left no charge.
        if charge.amount != 0 and not verdict.full:
            result.charge = verdict.state
    return status


cdef int32_t peek(
    AttachedThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil:
    cdef Verdict verdict
    cdef Charge charge
    cdef uint64_t tag
    cdef int32_t status = read_request(thread, request, &tag, &charge)
    if status < 0:
        return status
    status = peek_tag(thread, tag, &charge, &verdict)
    if status >= 0 and result != NULL:
        write_result(thread, &charge, &verdict, status == FOREBAY_ALLOWED, result)
    return status


cdef int32_t refund(AttachedThread thread, const forebay_request* request, uint64_t charged_state) noexcept nogil:
    cdef const LimitParams* params
    cdef Events events
    cdef Charge charge
    cdef uint64_t tag
    cdef int32_t status = read_key(thread, request, &tag)
    if status < 0:
        return status
    status = params_of(thread, request, &params)
    if status < 0:
        return status
    status = ensure_usable(thread)
    if status < 0:
        return status
    thread.set_charge(min(request.cost, params.limit), params, &charge)
    charge.charged_state = charged_state
    events = no_events()
    table_amend(&thread.table, tag, thread.give_back, &charge, &events)
    count_events(thread, &events)
    return FOREBAY_OK


cdef int32_t reset(AttachedThread thread, const forebay_request* request) noexcept nogil:
    cdef Events events
    cdef uint64_t tag
    cdef int32_t status = read_key(thread, request, &tag)
    if status < 0:
        return status
    status = ensure_usable(thread)
    if status < 0:
        return status
    events = no_events()
    thread.limiter.forget(tag, &events)
    count_events(thread, &events)
    return FOREBAY_OK


cdef enum:
    CHUNK = 256                          # requests of a batch whose charges are on the stack at a time


cdef int32_t check_batch(
    AttachedThread thread, const forebay_request* requests, size_t count
) noexcept nogil:
    """The status of the first request that can't be decided."""
    cdef Charge charge
    cdef int32_t status
    cdef size_t i
    for i in range(count):
        if requests[i].flags:
            return FOREBAY_INVALID_ARGUMENT
        status = read_charge(thread, &requests[i], &charge)
        if status == FOREBAY_OK and requests[i].key != NULL:
            status = check_key(requests[i].key_kind, requests[i].key, requests[i].key_size)
        if status < 0:
            return status
    return FOREBAY_OK


cdef void decide_chunk(
    AttachedThread thread, const forebay_request* requests, size_t size, uint8_t* allowed
) noexcept nogil:
    cdef uint64_t[CHUNK] tags
    cdef Charge[CHUNK] charges
    cdef Batch batch
    cdef Events events
    cdef uint64_t admitted
    cdef size_t i
    for i in range(size):
        read_request(thread, &requests[i], &tags[i], &charges[i])
    batch.size = <Py_ssize_t>size
    batch.keys = NULL
    batch.tags = tags
    batch.charges = charges
    batch.unit = &thread.unit
    batch.table = &thread.table
    batch.hash_key = thread.hash_key
    batch.kind = thread.kind
    # The results, in place of the tags: no objects.
    batch.yes = <PyObject*>1
    batch.no = NULL
    batch.counter_line = thread.counter_line
    batch.claim_sequence = &thread.counters.claims
    admitted = thread.limiter.decide_batch(&batch, &events)
    for i in range(size):
        allowed[i] = <uint8_t>tags[i]
    count(thread, &thread.counters.allowed, admitted)
    count(thread, &thread.counters.denied, size - admitted)
    count_events(thread, &events)


cdef int32_t decide_many(
    AttachedThread thread, const forebay_request* requests, size_t size, uint8_t* allowed
) noexcept nogil:
    cdef size_t done = 0
    cdef int32_t status
    if <void*>thread == NULL or (size != 0 and (requests == NULL or allowed == NULL)):
        return FOREBAY_INVALID_ARGUMENT
    status = check_batch(thread, requests, size)
    if status < 0:
        return status
    # Once: a batch that has begun is completed.
    status = ensure_usable(thread)
    if status < 0:
        return status
    while done < size:
        decide_chunk(thread, &requests[done], min(size - done, <size_t>CHUNK), &allowed[done])
        done += CHUNK
    return FOREBAY_OK


cdef const char* message(int32_t status) noexcept nogil:
    if status == FOREBAY_DENIED:
        return "denied, or done"
    if status == FOREBAY_ALLOWED:
        return "allowed"
    if status == FOREBAY_INVALID_ARGUMENT:
        return "an argument is NULL, or an unknown flag or kind of key"
    if status == FOREBAY_COST_EXCEEDS_LIMIT:
        return "the cost is above the limit: the request can never be allowed"
    if status == FOREBAY_CLOSED:
        return "the store was closed"
    if status == FOREBAY_FORKED:
        return "the thread was attached in the parent of this process: attach again"
    if status == FOREBAY_NOT_A_LIMITER:
        return "the object is no limiter of a Store"
    if status == FOREBAY_NEEDS_PYTHON:
        return "the limiter decides in Python: its store has clock='time', or is leased or synced"
    if status == FOREBAY_INVALID_RATE:
        return "not a rate, or not one for this limiter"
    if status == FOREBAY_NO_MEMORY:
        return "no memory"
    if status == FOREBAY_FAILED:
        return "Python raised an exception, which sys.unraisablehook has reported"
    if status == FOREBAY_FINALIZING:
        return "the interpreter has ended"
    return "no status of forebay"


# The table

ctypedef int32_t (*DecideMany)(forebay_thread*, const forebay_request*, size_t, uint8_t*) noexcept nogil

cdef forebay_api api

# Here the types of handles change: to a caller they are pointers to structs that it can't see into.
memset(&api, 0, sizeof(api))
api.version = FOREBAY_API_VERSION
api.size = sizeof(api)
api.message = message
api.limiter_open = <int32_t (*)(void*, forebay_limiter**) noexcept>limiter_open
api.limiter_close = <void (*)(forebay_limiter*) noexcept nogil>close_object
api.attach = attach
api.detach = <void (*)(forebay_thread*) noexcept nogil>close_object
api.rate_open = rate_open
api.rate_close = rate_close
api.maintain = maintain
api.hash = <int32_t (*)(const forebay_limiter*, uint32_t, const void*, size_t, uint64_t*) noexcept nogil><void*>hash_key
api.allow = <int32_t (*)(forebay_thread*, const void*, size_t) noexcept nogil><void*>allow
api.allow_hash = <int32_t (*)(forebay_thread*, uint64_t) noexcept nogil><void*>allow_hash
api.decide = <int32_t (*)(forebay_thread*, const forebay_request*, forebay_result*) noexcept nogil><void*>decide
api.peek = <int32_t (*)(forebay_thread*, const forebay_request*, forebay_result*) noexcept nogil><void*>peek
api.refund = <int32_t (*)(forebay_thread*, const forebay_request*, uint64_t) noexcept nogil><void*>refund
api.reset = <int32_t (*)(forebay_thread*, const forebay_request*) noexcept nogil><void*>reset
api.decide_many = <DecideMany><void*>decide_many

capsule = PyCapsule_New(&api, "forebay.core._C_API", NULL)
