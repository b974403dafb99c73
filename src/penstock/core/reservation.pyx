"""The answer to `reserve`.

Compiled, so that no signal handler, and no KeyboardInterrupt, comes between a booking and the object that can cancel
it.
"""

cimport cython
from libc.stdint cimport uint64_t

from penstock.core.decision cimport seconds_up


cdef Reservation new_reservation(
    object limiter, object key, object cost, bint allowed, bint booked, uint64_t now_ns, uint64_t delay_ns,
    uint64_t charged_state,
):
    cdef Reservation reservation = Reservation.__new__(Reservation)
    reservation.limiter = limiter
    reservation.key = key
    reservation.cost = cost
    reservation.booked = booked
    reservation.charged_state = charged_state
    reservation.allowed = allowed
    reservation.delay_ns = delay_ns
    reservation.due_ns = now_ns + delay_ns
    return reservation


@cython.final
cdef class Reservation:
    """Permits booked for later. True when they were.

    ``allowed``; ``delay``, the seconds from the booking on after which they may be used, or, when nothing was booked,
    after which asking again may succeed; ``delay_ns`` and ``due_ns``, the same in exact nanoseconds, and as the
    segment's time. Reservations are made by limiters only.
    """

    def __init__(self):
        raise TypeError("reservations are made by limiters: use limiter.reserve(key)")

    @property
    def delay(self):
        return seconds_up(self.delay_ns)

    def cancel(self):
        """Give the permits back, once, as far as they can be.

        Who has booked behind keeps its time. So as long as somebody has who may not go yet, nothing is given back: the
        time of this booking can't be given to anybody else.
        """
        if self.booked:
            self.booked = False
            self.limiter._cancel(self.key, self.cost, self.charged_state)

    def __bool__(self):
        return self.allowed

    def __repr__(self):
        return f"Reservation(allowed={self.allowed}, delay={self.delay})"

    def __reduce__(self):
        raise TypeError("a Reservation can't be pickled or copied")
