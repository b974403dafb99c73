"""Leaky bucket as a queue: GCRA, where the theoretical arrival time is the time at which the queue is empty."""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.gcra cimport GcraLimiter, ahead_of, gcra_take
from forebay.core.cell_limiter cimport allow_by
from forebay.core.limiter cimport Charge
from forebay.core.table.table cimport Verdict

from forebay.errors import LimitExceeded
from forebay.rate import as_rate
from forebay.segment import layout


@cython.final
cdef class LeakyBucket(GcraLimiter):
    """A queue of `capacity` places that empties at `rate`, however requests arrive.

    ``LeakyBucket(store, "printer", "1/second", capacity=4)``. ``reserve`` and ``wait`` give each request a time of
    departure, one interval of the rate after the departure before it; they deny when the queue is full. ``allow`` and
    ``hit`` also take a place in the queue, but the caller decides when to proceed: use them where the work itself is
    queued.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: with ``reserve`` and ``wait``, any two departures are apart by at least the time of the first one's
    cost, over all processes. Algorithm: GCRA, ITU-T Recommendation I.371 (its "continuous-state leaky bucket").
    """

    cdef readonly uint64_t capacity

    def __cinit__(self, store, name, rate, capacity):
        self.rate = as_rate(rate)
        self.gcra_params(self.rate, capacity, "capacity", &self.params)
        # Every place in the queue is a booking.
        self.params.due_ns = 0
        self.capacity = self.params.limit
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_LEAKY_BUCKET, b"", self.capacity)

    @cython.binding(False)
    def __init__(self, store, name, rate, capacity):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<LeakyBucket {self.name!r} {self.rate}, capacity={self.capacity}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, gcra_take, NULL)

    def exceeded(self, key, cost=1):
        """The exception for a wait in which `cost` permits of `key` didn't come in time.

        If the queue has room, its departures were too late: then ``retry_after`` is the time until it is empty.
        """
        decision = self.peek(key, cost)
        return LimitExceeded(self.name, decision.limit, decision.retry_after or decision.reset_after)

    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil:
        """Limit the queue to the places that depart within `max_wait_ns`; it never has more than its capacity."""
        charge.max_wait_ns = max_wait_ns
        charge.room = min(charge.room, max_wait_ns)

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        """The time until its departure, if that would be too late; else until the queue has room."""
        cdef uint64_t ahead_ns = verdict.state - verdict.now_ns
        return ahead_ns if ahead_ns > charge.max_wait_ns else ahead_ns + charge.amount - charge.params.tolerance_ns

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        """The time until all earlier requests have departed."""
        cdef uint64_t ahead_ns = ahead_of(verdict)
        return ahead_ns - charge.amount if ahead_ns > charge.amount else 0
