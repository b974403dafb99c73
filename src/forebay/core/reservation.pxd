from libc.stdint cimport uint64_t

from forebay.core.table.segment_view cimport Segment


cdef class Reservable:
    cdef int cancel_reserved(self, object key, object cost, tuple tier, uint64_t charged_state) except -1


cdef class Reservation:
    cdef Reservable limiter
    cdef Segment segment
    cdef uint64_t forks                      # the fork count of the process that booked
    cdef object key
    cdef object cost
    cdef tuple tier                          # the rate and burst of the call; None: the limiter's own
    cdef bint booked                         # and not cancelled
    cdef uint64_t charged_state              # the state that the booking left, for the limiter
    cdef readonly bint allowed
    cdef readonly bint full                  # whether `on_full` decided, as the store had no room for the key
    cdef readonly uint64_t delay_ns
    cdef readonly uint64_t due_ns


cdef Reservation new_reservation(
    Reservable limiter, Segment segment, object key, object cost, bint allowed, bint booked, uint64_t now_ns,
    uint64_t delay_ns, uint64_t charged_state, bint full)

# `max_delay` in ns; for None the largest number.
cdef uint64_t delay_ns_of(object max_delay) except? 0
