cdef class WSGIRequest:
    cdef readonly object native


cdef class ASGIRequest:
    cdef readonly object native


cdef class PeerKey:
    cdef dict known
    cdef object field_name
