from libc.stdint cimport uint64_t

from forebay.core.table.segment_view cimport Segment


cdef class Reservation:
    cdef object limiter
    cdef Segment segment
    cdef uint64_t forks                      # in which process it was booked
    cdef object key
    cdef object cost
    cdef bint booked                         # and not cancelled
    cdef uint64_t charged_state              # what the limiter's ``_cancel`` knows it by
    cdef readonly bint allowed
    cdef readonly bint full                  # whether `on_full` decided, as the store had no room for the key
    cdef readonly uint64_t delay_ns
    cdef readonly uint64_t due_ns


cdef Reservation new_reservation(
    object limiter, Segment segment, object key, object cost, bint allowed, bint booked, uint64_t now_ns,
    uint64_t delay_ns, uint64_t charged_state, bint full)

# A longest delay in ns; None is none.
cdef uint64_t delay_ns_of(object max_delay) except? 0
