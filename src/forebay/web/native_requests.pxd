cdef class WSGIRequest:
    cdef readonly object native
    cdef object route

    cdef object peer_address(self)


cdef class ASGIRequest:
    cdef readonly object native

    cdef object peer_address(self)


cdef class PeerKey:
    cdef dict known
    cdef object field_name

    cdef object key_for(self, object request)


cdef bint is_options(object request) except -1
