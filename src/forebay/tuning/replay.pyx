"""Deciding requests of the past by a limiter, and judging the decisions.

The judge counts, for each key, the requests that were admitted in the period up to now: in (now - period, now], as a
sliding log does. It walks through the requests twice at a time: one position is now, the other a period earlier. A
request enters the count of its key at the first and leaves it at the second. So a pass takes O(1) per request and
memory per key, and one bit per request.
"""

cimport cython
from cpython.array cimport array
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_KEY_TEXT, forebay_api, forebay_import, forebay_limiter, forebay_thread,
)
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.table.native cimport prefetch, store_release
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport home_line
from forebay.segment.mapping cimport HeldBytes
from forebay.tuning.requests cimport Keys, Request

from forebay.errors import ForebayError

cdef const forebay_api* forebay = forebay_import()


cdef extern from "<time.h>" nogil:
    int CLOCK_THREAD_CPUTIME_ID

    struct timespec:
        int64_t tv_sec
        int64_t tv_nsec

    int clock_gettime(int clock, timespec* time)


cdef enum:
    BATCH = 4096                         # requests that are decided between two readings of the CPU's time
    AHEAD = 16                           # requests between a prefetch and its use


cdef uint64_t cpu_ns() noexcept nogil:
    """The time that this thread has been running, without the time in which others ran in its place."""
    cdef timespec time
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)
    return <uint64_t>(time.tv_sec * 1_000_000_000 + time.tv_nsec)


cdef inline bint bit_of(const uint8_t* bits, uint64_t index) noexcept nogil:
    return bits[index >> 3] >> (index & 7) & 1


cdef inline void set_bit(uint8_t* bits, uint64_t index) noexcept nogil:
    bits[index >> 3] |= 1 << (index & 7)


cdef uint64_t count_of(HeldBytes requests) noexcept nogil:
    return requests.size // sizeof(Request)


cdef const Request* requests_in(HeldBytes requests) except NULL:
    if requests.size < sizeof(Request):
        raise ValueError("there are no requests to replay")
    return <const Request*>requests.start


def demand(requests, uint64_t span_ns, array peaks not None):
    """Put the most requests of each key in any span of this length in `peaks`, which are 0 before.

    Returns how many keys had a request within one such span, at most. O(requests).
    """
    cdef HeldBytes held = HeldBytes(requests)
    cdef const Request* items = requests_in(held)
    cdef uint64_t size = count_of(held)
    cdef uint64_t now, expired = 0
    cdef uint32_t live = 0, most_live = 0, key
    cdef uint32_t* most = peaks.data.as_uints
    cdef uint32_t* counts = <uint32_t*>PyMem_Calloc(len(peaks), sizeof(uint32_t))
    if counts == NULL:
        raise MemoryError
    with nogil:
        for now in range(size):
            while items[expired].time_ns + span_ns <= items[now].time_ns:
                key = items[expired].key
                counts[key] -= 1
                live -= counts[key] == 0
                expired += 1
            key = items[now].key
            live += counts[key] == 0
            counts[key] += 1
            most_live = max(most_live, live)
            most[key] = max(most[key], counts[key])
    PyMem_Free(counts)
    return most_live


def exact_log(requests, uint32_t keys, uint64_t limit, uint64_t period_ns):
    """The decisions of an exact log: a bit for each request, set where the request is admitted. O(requests)."""
    cdef HeldBytes held = HeldBytes(requests)
    cdef const Request* items = requests_in(held)
    cdef uint64_t size = count_of(held)
    cdef uint64_t now, expired = 0
    cdef bytearray admitted = bytearray(size // 8 + 1)
    cdef uint8_t* bits = admitted
    cdef uint32_t* counts = <uint32_t*>PyMem_Calloc(keys, sizeof(uint32_t))
    if counts == NULL:
        raise MemoryError
    with nogil:
        for now in range(size):
            while items[expired].time_ns + period_ns <= items[now].time_ns:
                counts[items[expired].key] -= bit_of(bits, expired)
                expired += 1
            if counts[items[now].key] < limit:
                counts[items[now].key] += 1
                set_bit(bits, now)
    PyMem_Free(counts)
    return admitted


@cython.final
cdef class Replay:
    """Decides the requests by `limiter`, of a store with a manual clock, which follows the requests' times.

    `exact` is the result of `exact_log` for the same limit. The first request begins the first of `bins` bins of
    `bin_ns` each, in which denials are counted. For one thread at a time; runs without the GIL.
    """
    cdef HeldBytes requests                  # keeps their memory
    cdef const Request* items
    cdef uint64_t size
    cdef bytearray exact_bits
    cdef const uint8_t* exact
    cdef bytearray admitted_bits
    cdef uint8_t* own
    cdef uint64_t limit
    cdef uint64_t period_ns
    cdef uint64_t bin_ns
    cdef uint32_t* counts                    # by key: admitted in the period up to now
    cdef uint64_t* hashes                    # by key
    cdef uint32_t* denied_key
    cdef uint64_t* denied_bin
    cdef CellLimiter limiter
    cdef uint64_t* clock_ns                  # of the limiter's segment
    cdef forebay_limiter* opened
    cdef forebay_thread* thread
    cdef uint64_t now                        # the request that is next
    cdef uint64_t expired                    # the first request that is in the period up to now
    cdef readonly uint64_t admitted
    cdef readonly uint64_t largest           # most admitted requests of a key in any period
    cdef readonly uint64_t differing         # decisions that differ from the exact log's
    cdef readonly uint64_t wrongly_allowed   # although the limiter had admitted `limit` in the period
    cdef readonly uint64_t wrongly_denied    # although it had admitted fewer
    cdef readonly uint64_t decision_ns       # the CPU's time for all decisions
    cdef readonly array denied_by_key
    cdef readonly array denied_by_bin

    def __cinit__(
        self, CellLimiter limiter not None, requests, Keys keys not None, bytearray exact not None,
        uint64_t limit, uint64_t period_ns, uint64_t bin_ns, Py_ssize_t bins,
    ):
        cdef Segment segment = limiter.store.segment
        if segment.table.manual_ns == NULL:
            raise ValueError(f"requests are replayed by a limiter with a ManualClock, and {limiter!r} has none")
        self.requests = HeldBytes(requests)
        self.items, self.size = requests_in(self.requests), count_of(self.requests)
        if <uint64_t>len(exact) * 8 < self.size:
            raise ValueError(f"the exact log has {len(exact)} bytes, too few for {self.size} requests")
        if bins < 1 or bin_ns < 1 or (self.items[self.size - 1].time_ns - self.items[0].time_ns) // bin_ns >= (
                <uint64_t>bins):
            raise ValueError(f"{bins} bins of {bin_ns} ns do not hold the requests")
        self.exact_bits, self.exact = exact, exact
        self.admitted_bits = bytearray(self.size // 8 + 1)
        self.own = self.admitted_bits
        self.limit, self.period_ns, self.bin_ns = limit, period_ns, bin_ns
        self.denied_by_key = array("I", bytes(4 * keys.count))
        self.denied_by_bin = array("Q", bytes(8 * bins))
        self.denied_key = self.denied_by_key.data.as_uints
        self.denied_bin = <uint64_t*>self.denied_by_bin.data.as_ulongs
        self.limiter, self.clock_ns = limiter, segment.table.manual_ns
        self.counts = <uint32_t*>PyMem_Calloc(keys.count, sizeof(uint32_t))
        self.hashes = <uint64_t*>PyMem_Malloc(keys.count * sizeof(uint64_t))
        if self.counts == NULL or self.hashes == NULL:
            raise MemoryError
        check(forebay.limiter_open(<void*>limiter, &self.opened))
        check(forebay.attach(self.opened, &self.thread))
        for key in range(keys.count):
            check(forebay.hash(
                self.opened, FOREBAY_KEY_TEXT, keys.texts + keys.starts[<uint32_t>key],
                keys.starts[<uint32_t>key + 1] - keys.starts[<uint32_t>key], &self.hashes[<uint32_t>key]))

    def __dealloc__(self):
        self.close()
        PyMem_Free(self.counts)
        PyMem_Free(self.hashes)

    def close(self):
        """Detach from the limiter, so that its store can go."""
        forebay.detach(self.thread)
        forebay.limiter_close(self.opened)
        self.thread, self.opened = NULL, NULL

    def run(self, uint64_t count):
        """Decide and judge the next `count` requests. Returns how many are left."""
        cdef uint8_t[BATCH] allowed
        cdef uint64_t end = min(self.now + count, self.size)
        cdef uint64_t batch
        cdef int32_t status = 0
        if self.thread == NULL:
            raise ValueError("this Replay was closed")
        with nogil:
            while self.now < end and status >= 0:
                batch = min(end - self.now, <uint64_t>BATCH)
                status = self.decide(batch, allowed)
                if status >= 0:
                    self.judge(batch, allowed)
                    self.now += batch
        check(status)
        return self.size - self.now

    cdef int32_t decide(self, uint64_t batch, uint8_t* allowed) noexcept nogil:
        cdef uint64_t begin_ns = cpu_ns()
        cdef const Request* request = self.items + self.now
        cdef uint64_t left = self.size - self.now
        cdef int32_t status = 0
        cdef uint64_t i
        for i in range(batch):
            # As a batch of `allow_many` does: cache misses of several keys overlap.
            if i + 2 * AHEAD < left:
                prefetch(&self.hashes[request[i + 2 * AHEAD].key])
                prefetch(home_line(&self.limiter.table, self.hashes[request[i + AHEAD].key]))
            store_release(self.clock_ns, request[i].time_ns)
            status = forebay.allow_hash(self.thread, self.hashes[request[i].key])
            if status < 0:
                break
            allowed[i] = status == FOREBAY_ALLOWED
        self.decision_ns += cpu_ns() - begin_ns
        return status

    cdef void judge(self, uint64_t batch, const uint8_t* allowed) noexcept nogil:
        cdef uint64_t first_ns = self.items[0].time_ns
        cdef uint64_t i, index, time_ns
        cdef uint32_t key
        for i in range(batch):
            index = self.now + i
            if index + AHEAD < self.size:
                prefetch(&self.counts[self.items[index + AHEAD].key])
                prefetch(&self.counts[self.items[self.expired + AHEAD].key])
            time_ns, key = self.items[index].time_ns, self.items[index].key
            while self.items[self.expired].time_ns + self.period_ns <= time_ns:
                self.counts[self.items[self.expired].key] -= bit_of(self.own, self.expired)
                self.expired += 1
            self.differing += allowed[i] != bit_of(self.exact, index)
            if allowed[i]:
                self.wrongly_allowed += self.counts[key] >= self.limit
                self.counts[key] += 1
                self.largest = max(self.largest, self.counts[key])
                self.admitted += 1
                set_bit(self.own, index)
            else:
                self.wrongly_denied += self.counts[key] < self.limit
                self.denied_key[key] += 1
                self.denied_bin[(time_ns - first_ns) // self.bin_ns] += 1


cdef int check(int32_t status) except -1:
    """Raise the error that a negative status means."""
    if status < 0:
        raise ForebayError(f"a decision failed: {forebay.message(status).decode()}")
    return 0
