"""The result of `reserve`.

Compiled, so that no signal handler, and so no KeyboardInterrupt, can run between a booking and the creation of the
object that cancels it.
"""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.decision cimport seconds_up
from forebay.core.table.segment_view cimport Segment

from inspect import Signature

from forebay.errors import StoreFull
from forebay.rate import as_delay_ns


cdef uint64_t delay_ns_of(object max_delay) except? 0:
    if max_delay is None:
        return ~<uint64_t>0
    return min(as_delay_ns(max_delay, "max_delay is None or"), ~<uint64_t>0)


cdef Reservation new_reservation(
    Reservable limiter, Segment segment, object key, object cost, bint allowed, bint booked, uint64_t now_ns,
    uint64_t delay_ns, uint64_t charged_state, bint full,
):
    cdef Reservation reservation = Reservation.__new__(Reservation)
    reservation.limiter = limiter
    reservation.segment = segment
    reservation.forks = segment.forks[0]
    reservation.key = key
    reservation.cost = cost
    reservation.booked = booked
    reservation.charged_state = charged_state
    reservation.allowed = allowed
    reservation.full = full
    reservation.delay_ns = delay_ns
    reservation.due_ns = now_ns + delay_ns
    return reservation


cdef class Reservable:
    """Base class of limiters and of ``AllOf``, which make reservations."""

    cdef int cancel_reserved(self, object key, object cost, tuple tier, uint64_t charged_state) except -1:
        """Give back what a reservation of `key` and `cost` charged, if it still counts."""
        return 0


@cython.final
cdef class Reservation:
    """Permits booked for later use. True if they were booked.

    * ``allowed``
    * ``delay``: seconds from the booking until the permits may be used; if nothing was booked, until another attempt
      may succeed
    * ``delay_ns``: the same in exact nanoseconds
    * ``due_ns``: the segment's time at the end of the delay
    * ``full``: the store had no room for the key, and its ``on_full`` decided

    Only limiters make reservations.
    """

    __signature__ = Signature()  # inspect finds no signature of a compiled class by itself

    def __init__(self):
        raise TypeError("reservations are made by limiters: use limiter.reserve(key)")

    @property
    def delay(self):
        return seconds_up(self.delay_ns)

    def cancel(self):
        """Give back those of the permits that still count. Further calls do nothing.

        Later bookings keep their times, so no other request can take the place of this one. Nothing is given back while
        a later booking still waits for its time. In a child that was forked since the booking, ``cancel`` does nothing:
        only the process that booked can cancel. After ``StoreFull``, which only ``Credits`` raise, another call tries
        again.
        """
        cdef bint booked
        with cython.critical_section(self):
            # Of several threads that cancel, one gives back.
            booked = self.booked and self.forks == self.segment.forks[0]
            if booked:
                self.booked = False
        if booked:
            try:
                self.limiter.cancel_reserved(self.key, self.cost, self.tier, self.charged_state)
            except StoreFull:
                self.booked = True
                raise

    def __bool__(self):
        return self.allowed

    def __repr__(self):
        return f"Reservation(allowed={self.allowed}, delay={self.delay})"

    def __reduce__(self):
        raise TypeError("a Reservation can't be pickled or copied")
