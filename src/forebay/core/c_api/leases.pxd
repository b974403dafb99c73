"""Leases of native threads. The functions are forebay.h's."""

from libc.stdint cimport int32_t

from forebay.c_api cimport forebay_lease, forebay_request
from forebay.core.c_api.handles cimport HoldingThread


cdef int32_t acquire(HoldingThread thread, const forebay_request* request, forebay_lease* lease) noexcept nogil
cdef int32_t renew(HoldingThread thread, forebay_lease* lease) noexcept nogil
cdef int32_t release(HoldingThread thread, forebay_lease* lease) noexcept nogil
