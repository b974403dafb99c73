"""The result of `hit` and `peek`."""

cimport cython
from libc.math cimport INFINITY, nextafter
from libc.stdint cimport uint64_t

from inspect import Signature


cdef double seconds_up(uint64_t duration_ns) noexcept:
    """A duration in seconds, never less than in ns: a caller that sleeps that long must not wake too early."""
    cdef double seconds = <double>duration_ns / 1e9
    if is_never(duration_ns):
        return INFINITY
    # Below 2**50 ns (13 days) the division's error is under half a nanosecond, and rounding gives the duration back.
    # Above that, conversion and division may each lose half a unit in the last place.
    return seconds if duration_ns < <uint64_t>1 << 50 else nextafter(nextafter(seconds, INFINITY), INFINITY)


def seconds_from_ns(uint64_t duration_ns):
    """`seconds_up`, for Python."""
    return seconds_up(duration_ns)


@cython.final
@cython.freelist(64)
@cython.no_gc                            # its one object is a str
cdef class Decision:
    """A limiter's decision about one request. True if the request was allowed.

    * ``allowed``
    * ``limiter``: the name of the limiter whose limit bound the request
    * ``limit``: the most permits that can be allowed at once (a bucket's burst)
    * ``remaining``: the permits that would still be allowed right after this decision; more than the limit if ``add``
      gave a key more
    * ``retry_after``: seconds after which the same request is allowed if nothing else happens; 0.0 when allowed, and
      infinity if no time brings the permits (``Credits``)
    * ``reset_after``: seconds after which the key is as if it had never been seen
    * ``next_after``: seconds after which more than now is allowed. That is ``retry_after`` for a denial, the time to
      the next permit for a bucket, else ``reset_after``
    * ``retry_after_ns``, ``reset_after_ns``, ``next_after_ns``: the same in exact nanoseconds
    * ``degraded``: Redis was unavailable, and the store's ``when_unavailable`` policy decided
    * ``full``: the store had no room for the key, and its ``on_full`` decided
    * ``reason``: why the request was denied: ``"limit"``, or ``"no room"`` (then ``full`` is true, and it is not the
      client's fault); None if it was allowed

    Immutable, so safe to share between threads. Only limiters make decisions.
    """

    __signature__ = Signature()  # inspect finds no signature of a compiled class by itself

    def __cinit__(self):
        # For limiters that count permits, not time; the rest is 0.
        self.outlook.rate_limit = 1
        self.outlook.rate_period_ns = 1

    def __init__(self):
        raise TypeError("decisions are made by limiters: use limiter.hit(key)")

    @property
    def degraded(self):
        return self.flags & DEGRADED != 0

    @property
    def full(self):
        return self.flags & NO_ROOM != 0

    @property
    def reason(self):
        return None if self.allowed else "no room" if self.flags & NO_ROOM else "limit"

    @property
    def remaining(self):
        return remaining_of(self)

    @property
    def retry_after_ns(self):
        return self.outlook.retry_after_ns

    @property
    def reset_after_ns(self):
        return self.outlook.reset_after_ns

    @property
    def next_after_ns(self):
        return next_after_ns_of(self)

    @property
    def next_after(self):
        return seconds_up(next_after_ns_of(self))

    @property
    def retry_after(self):
        return seconds_up(self.outlook.retry_after_ns)

    @property
    def reset_after(self):
        return seconds_up(self.outlook.reset_after_ns)

    def __bool__(self):
        return self.allowed

    def __repr__(self):
        return (
            f"Decision(allowed={self.allowed}, limit={self.limit}, remaining={self.remaining}, "
            f"retry_after={self.retry_after}, reset_after={self.reset_after}"
            f"{', degraded=True' if self.degraded else ''}{', full=True' if self.full else ''})"
        )

    def __reduce__(self):
        raise TypeError("a Decision can't be pickled or copied: take the fields you need")


def _decision(
    str limiter, bint allowed, uint64_t limit, uint64_t available, uint64_t rate_limit, uint64_t rate_period_ns,
    uint64_t retry_after_ns, uint64_t reset_after_ns, bint degraded=False, bint full=False,
):
    """Make a Decision, for limiters whose state is not in shared memory."""
    cdef Decision decision = Decision.__new__(Decision)
    decision.limiter = limiter
    decision.allowed = allowed
    decision.flags = (DEGRADED if degraded else 0) | (NO_ROOM if full else 0)
    decision.limit = limit
    decision.outlook = Outlook(available, rate_limit, rate_period_ns, retry_after_ns, reset_after_ns)
    return decision
