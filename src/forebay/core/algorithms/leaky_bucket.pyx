"""Leaky bucket as a queue: GCRA, where the theoretical arrival time is the time at which the queue is empty."""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.gcra cimport GcraLimiter, ahead_of, gcra_take
from forebay.core.cell_limiter cimport allow_by
from forebay.core.limiter cimport Charge, let_stores_make
from forebay.core.table.table cimport Verdict

from forebay.rate import as_rate
from forebay.segment import layout


@cython.final
cdef class LeakyBucket(GcraLimiter):
    """A queue of `capacity` places that is emptied at `rate`, however the requests come.

    ``LeakyBucket(store, "printer", "1/second", capacity=4)``. ``reserve`` and ``wait`` give each request its time of
    departure, one rate's interval after the one before it; when the queue is full they deny. ``allow`` and ``hit`` take
    a place in the queue just the same, and leave it to the caller when to go: use them where the work itself is
    queued.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), one CAS on one cache line in the usual case; a denied one writes nothing shared. 21 bytes of
    the store per key. Guarantee: with ``reserve`` and ``wait`` any two departures are at least the time of the first
    one's cost apart, over all processes. Algorithm: GCRA, ITU-T Recommendation I.371 (its "continuous-state leaky
    bucket").
    """

    cdef readonly uint64_t capacity

    def __cinit__(self, store, name, rate, capacity):
        self.rate = as_rate(rate)
        self.gcra_params(self.rate, capacity, "capacity", &self.params)
        # Every place in the queue is a booking.
        self.params.due_ns = 0
        self.capacity = self.params.limit
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_LEAKY_BUCKET, b"")

    @cython.binding(False)
    def __init__(self, store, name, rate, capacity):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<LeakyBucket {self.name!r} {self.rate}, capacity={self.capacity}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, gcra_take, NULL)

    cdef int allow_wait(self, Charge* charge, uint64_t max_wait_ns) except -1:
        """The queue has its capacity and no more; less, if the request would have to wait for too long."""
        charge.max_wait_ns = max_wait_ns
        charge.room = min(charge.room, max_wait_ns)
        return 0

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) except? 0:
        """Its departure, if that would have been too late; else until there is room."""
        cdef uint64_t ahead_ns = verdict.state - verdict.now_ns
        return ahead_ns if ahead_ns > charge.max_wait_ns else ahead_ns + charge.amount - charge.params.tolerance_ns

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept:
        """Until those are gone who came before."""
        cdef uint64_t ahead_ns = ahead_of(verdict)
        return ahead_ns - charge.amount if ahead_ns > charge.amount else 0


let_stores_make(LeakyBucket)
