from libc.stdint cimport uint64_t


cdef class Reservation:
    cdef object limiter
    cdef object key
    cdef object cost
    cdef bint booked                         # and not cancelled
    cdef uint64_t charged_state              # the state of the key's cell that the booking left
    cdef readonly bint allowed
    cdef readonly uint64_t delay_ns
    cdef readonly uint64_t due_ns


cdef Reservation new_reservation(
    object limiter, object key, object cost, bint allowed, bint booked, uint64_t now_ns, uint64_t delay_ns,
    uint64_t charged_state)
