"""Decisions of native threads. The functions are forebay.h's."""

from libc.stdint cimport int32_t, uint8_t, uint64_t

from forebay.c_api cimport forebay_request, forebay_result
from forebay.core.c_api.handles cimport DecidingThread


cdef int32_t allow(DecidingThread thread, const void* key, size_t size) noexcept nogil
cdef int32_t allow_hash(DecidingThread thread, uint64_t hash) noexcept nogil
cdef int32_t tick(DecidingThread thread) noexcept nogil
cdef int32_t allow_at_tick(DecidingThread thread, const void* key, size_t size) noexcept nogil
cdef int32_t decide(
    DecidingThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil
cdef int32_t peek(
    DecidingThread thread, const forebay_request* request, forebay_result* result
) noexcept nogil
cdef int32_t refund(DecidingThread thread, const forebay_request* request, uint64_t charged_state) noexcept nogil
cdef int32_t reset(DecidingThread thread, const forebay_request* request) noexcept nogil
cdef int32_t decide_many(
    DecidingThread thread, const forebay_request* requests, size_t size, uint8_t* allowed
) noexcept nogil
cdef int32_t decide_all(
    void** threads, const forebay_request* requests, size_t size, forebay_result* binding, forebay_result* each
) noexcept nogil
