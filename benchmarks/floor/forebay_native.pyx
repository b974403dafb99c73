"""Loops over the C API, as native code calls it: no Python in between."""

from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memset, strlen
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_HELD, FOREBAY_MOST_LIMITS, forebay_api, forebay_import, forebay_lease, forebay_limiter,
    forebay_request, forebay_result, forebay_thread,
)

cdef extern from "forebay/layout.h" nogil:
    ctypedef struct ForebayCell:
        uint64_t tag
        uint64_t state


cdef extern from "forebay/hash.h" nogil:
    ctypedef struct ForebayHashKey:
        uint64_t k0
        uint64_t k1
    uint64_t siphash13 "forebay_siphash13"(ForebayHashKey key, const uint8_t* data, size_t size) noexcept


cdef extern from "forebay/clock.h" nogil:
    uint64_t monotonic_ns "forebay_monotonic_ns"() noexcept


cdef extern from "forebay/atomics.h" nogil:
    bint cas128_acq_rel "forebay_cas128_acq_rel"(
        ForebayCell* cell, ForebayCell expected, ForebayCell desired) noexcept


cdef extern from *:
    """
    static ForebayCell floor_cell __attribute__((aligned(64)));
    /* A decision with nothing around it. Not inlined, as a call of the API isn't. */
    static __attribute__((noinline)) int floor_decide(uint64_t hash) {
        uint64_t now_ns = forebay_monotonic_ns();
        ForebayCell seen = {hash, floor_cell.state};
        ForebayCell wanted = {hash, (seen.state > now_ns ? seen.state : now_ns) + 1};
        return seen.state < now_ns + (UINT64_C(1) << 40) && forebay_cas128_acq_rel(&floor_cell, seen, wanted);
    }
    static __attribute__((noinline)) int floor_decide_key(ForebayHashKey key, const uint8_t *data, size_t size) {
        return floor_decide(forebay_siphash13(key, data, size));
    }
    """
    ForebayCell floor_cell
    int floor_decide(uint64_t hash) noexcept nogil
    int floor_decide_key(ForebayHashKey key, const uint8_t* data, size_t size) noexcept nogil


cdef const forebay_api* forebay = forebay_import()


cdef enum:
    BATCH = 100


def read_clock(Py_ssize_t count):
    """Read the clock `count` times, as each decision does; return how often it could be read."""
    cdef timespec now
    cdef Py_ssize_t _turn, read = 0
    with nogil:
        for _turn in range(count):
            read += clock_gettime(CLOCK_MONOTONIC, &now) == 0
    return read


def least_decision(bytes key not None, bint with_hash, Py_ssize_t count):
    """Read the clock and swap one cell `count` times, by a hash or by the key; return how often it was swapped."""
    cdef ForebayHashKey hash_key = ForebayHashKey(1, 2)
    cdef const uint8_t* data = key
    cdef size_t size = len(key)
    cdef uint64_t hash = siphash13(hash_key, data, size)
    cdef Py_ssize_t _turn, swapped = 0
    floor_cell.tag = hash
    with nogil:
        for _turn in range(count):
            swapped += floor_decide(hash) if with_hash else floor_decide_key(hash_key, data, size)
    return swapped


cdef class Loop:
    """Decisions of one native thread about one key."""

    cdef forebay_limiter* limiter
    cdef forebay_thread* thread
    cdef bytes key

    def __cinit__(self, limiter, bytes key not None):
        cdef int32_t status = forebay.limiter_open(<void*>limiter, &self.limiter)
        self.key = key
        if status == 0:
            status = forebay.attach(self.limiter, &self.thread)
        if status < 0:
            raise ValueError(forebay.message(status).decode())

    def __dealloc__(self):
        forebay.detach(self.thread)
        forebay.limiter_close(self.limiter)

    def allow(self, Py_ssize_t count):
        """Decide `count` requests; return how many were allowed."""
        cdef const char* key = self.key
        cdef size_t size = len(self.key)
        cdef Py_ssize_t _turn, allowed = 0
        with nogil:
            for _turn in range(count):
                allowed += forebay.allow(self.thread, key, size) == FOREBAY_ALLOWED
        return allowed

    def allow_at_tick(self, Py_ssize_t count):
        """The same by one reading of the clock for 100 requests."""
        cdef const char* key = self.key
        cdef size_t size = len(self.key)
        cdef Py_ssize_t turn, allowed = 0
        with nogil:
            for turn in range(count):
                if turn % BATCH == 0:
                    forebay.tick(self.thread)
                allowed += forebay.allow_at_tick(self.thread, key, size) == FOREBAY_ALLOWED
        return allowed

    def allow_hash(self, Py_ssize_t count):
        """The same by the key's hash."""
        cdef const char* key = self.key
        cdef uint64_t hash
        cdef Py_ssize_t _turn, allowed = 0
        forebay.hash(self.limiter, 0, key, len(self.key), &hash)
        with nogil:
            for _turn in range(count):
                allowed += forebay.allow_hash(self.thread, hash) == FOREBAY_ALLOWED
        return allowed

    def decide(self, Py_ssize_t count):
        """The same with a full result."""
        cdef const char* key = self.key
        cdef forebay_request request
        cdef forebay_result result
        cdef Py_ssize_t _turn, allowed = 0
        memset(&request, 0, sizeof(request))
        request.key = key
        request.key_size = strlen(key)
        request.cost = 1
        with nogil:
            for _turn in range(count):
                allowed += forebay.decide(self.thread, &request, &result) == FOREBAY_ALLOWED
        return allowed

    def decide_many(self, Py_ssize_t count):
        """The same in batches of 100 requests."""
        cdef const char* key = self.key
        cdef size_t size = len(self.key)
        cdef forebay_request[BATCH] requests
        cdef uint8_t[BATCH] answers
        cdef Py_ssize_t _turn, allowed = 0
        cdef int i
        memset(requests, 0, sizeof(requests))
        for i in range(BATCH):
            requests[i].key = key
            requests[i].key_size = size
            requests[i].cost = 1
        with nogil:
            for _turn in range(count // BATCH):
                forebay.decide_many(self.thread, requests, BATCH, answers)
                for i in range(BATCH):
                    allowed += answers[i]
        return allowed

    def acquire(self, Py_ssize_t count):
        """Take and give back as many permits, one after the other."""
        cdef const char* key = self.key
        cdef forebay_request request
        cdef forebay_lease lease
        cdef Py_ssize_t _turn, held = 0
        memset(&request, 0, sizeof(request))
        request.key = key
        request.key_size = len(self.key)
        request.cost = 1
        with nogil:
            for _turn in range(count):
                if forebay.acquire(self.thread, &request, &lease) == FOREBAY_ALLOWED:
                    held += forebay.release(self.thread, &lease) == FOREBAY_HELD
        return held


cdef class AllLoop:
    """Requests of one native thread to several limits, all or none, for one key."""

    cdef list loops
    cdef bytes key

    def __cinit__(self, limiters, bytes key not None):
        self.loops = [Loop(limiter, key) for limiter in limiters]
        self.key = key

    def decide_all(self, Py_ssize_t count):
        """Decide `count` requests; return how many were allowed."""
        return self.decide(count, False)

    def decide_all_with_result(self, Py_ssize_t count):
        """The same with the result of the limit that binds."""
        return self.decide(count, True)

    cdef Py_ssize_t decide(self, Py_ssize_t count, bint with_result):
        cdef const char* key = self.key
        cdef forebay_request[FOREBAY_MOST_LIMITS] requests
        cdef forebay_thread* threads[FOREBAY_MOST_LIMITS]
        cdef forebay_result result
        cdef size_t size = len(self.loops)
        cdef Py_ssize_t _turn, i, allowed = 0
        memset(requests, 0, sizeof(requests))
        for i, loop in enumerate(self.loops):
            threads[i] = (<Loop>loop).thread
            requests[i].key = key
            requests[i].key_size = len(self.key)
            requests[i].cost = 1
        with nogil:
            for _turn in range(count):
                allowed += forebay.decide_all(
                    threads, requests, size, &result if with_result else NULL, NULL) == FOREBAY_ALLOWED
        return allowed
