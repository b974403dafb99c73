"""A minimum interval between requests: GCRA with a burst of one."""

cimport cython

from forebay.core.algorithms.gcra cimport GcraLimiter, gcra_take
from forebay.core.cell_limiter cimport allow_by

from forebay.rate import Rate, as_period_ns
from forebay.segment import layout


@cython.final
cdef class MinInterval(GcraLimiter):
    """At least `interval` from one allowed request of a key to the next.

    ``MinInterval(store, "sms", "30s")``. `interval` is text, a number of seconds or a ``timedelta``. ``interval_ns`` is
    the same in nanoseconds.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: allowed requests of a key are at least `interval` apart, over all processes. In a full store a new
    key is denied, unless the store has an `on_full`.
    """

    cdef readonly object interval_ns

    def __cinit__(self, store, name, interval):
        self.interval_ns = as_period_ns(interval)
        self.rate = Rate.per_ns(1, self.interval_ns)
        self.gcra_params(self.rate, 1, "burst", &self.params)
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_MIN_INTERVAL, b"", 1)

    @cython.binding(False)
    def __init__(self, store, name, interval):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<MinInterval {self.name!r} {self.rate}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, gcra_take, NULL)
