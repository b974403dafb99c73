"""The declarations of forebay.h for Cython: ``from forebay.c_api cimport forebay_api, forebay_import``.

forebay.h is the documentation. Its directory, ``forebay.get_include()``, belongs to the extension's include_dirs.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t


cdef extern from "forebay.h":
    int FOREBAY_API_VERSION

    enum:
        FOREBAY_OK
        FOREBAY_DENIED
        FOREBAY_NOT_HELD
        FOREBAY_ALLOWED
        FOREBAY_HELD
        FOREBAY_INVALID_ARGUMENT
        FOREBAY_COST_EXCEEDS_LIMIT
        FOREBAY_CLOSED
        FOREBAY_FORKED
        FOREBAY_NOT_A_LIMITER
        FOREBAY_NEEDS_PYTHON
        FOREBAY_INVALID_RATE
        FOREBAY_NO_MEMORY
        FOREBAY_FAILED
        FOREBAY_FINALIZING
        FOREBAY_WRONG_LIMITER

    enum:
        FOREBAY_KEY_TEXT
        FOREBAY_KEY_BYTES
        FOREBAY_KEY_INT
        FOREBAY_KEY_LARGE_INT
        FOREBAY_KEY_PARTS

    enum:
        FOREBAY_BOOK

    enum:
        FOREBAY_MOST_LIMITS

    ctypedef struct forebay_limiter:
        pass

    ctypedef struct forebay_thread:
        pass

    ctypedef struct forebay_rate:
        pass

    ctypedef struct forebay_request:
        const void* key
        uint64_t key_size
        uint64_t hash
        uint64_t cost
        const forebay_rate* rate
        uint64_t max_delay_ns
        uint32_t key_kind
        uint32_t flags

    ctypedef struct forebay_result:
        uint64_t limit
        uint64_t remaining
        uint64_t retry_after_ns
        uint64_t reset_after_ns
        uint64_t delay_ns
        uint64_t charge
        uint32_t allowed
        uint32_t full
        uint32_t binding
        uint32_t reserved

    ctypedef struct forebay_lease:
        uint64_t maker
        uint64_t key
        uint64_t cell
        uint64_t slot
        uint64_t permits
        uint64_t owner
        uint64_t end_ns
        uint32_t full
        uint32_t available

    ctypedef struct forebay_api:
        uint32_t version
        uint64_t size
        const char* (*message)(int32_t status) noexcept nogil
        int32_t (*limiter_open)(void* object, forebay_limiter** limiter) noexcept
        void (*limiter_close)(forebay_limiter* limiter) noexcept nogil
        int32_t (*attach)(forebay_limiter* limiter, forebay_thread** thread) noexcept nogil
        void (*detach)(forebay_thread* thread) noexcept nogil
        int32_t (*rate_open)(
            forebay_limiter* limiter, uint64_t limit, uint64_t period_ns, uint64_t burst, forebay_rate** rate
        ) noexcept nogil
        void (*rate_close)(forebay_rate* rate) noexcept nogil
        int32_t (*maintain)(forebay_limiter* limiter) noexcept nogil
        int32_t (*hash)(
            const forebay_limiter* limiter, uint32_t key_kind, const void* key, size_t size, uint64_t* hash
        ) noexcept nogil
        int32_t (*allow)(forebay_thread* thread, const void* key, size_t size) noexcept nogil
        int32_t (*allow_hash)(forebay_thread* thread, uint64_t hash) noexcept nogil
        int32_t (*tick)(forebay_thread* thread) noexcept nogil
        int32_t (*allow_at_tick)(forebay_thread* thread, const void* key, size_t size) noexcept nogil
        int32_t (*decide)(
            forebay_thread* thread, const forebay_request* request, forebay_result* result) noexcept nogil
        int32_t (*peek)(forebay_thread* thread, const forebay_request* request, forebay_result* result) noexcept nogil
        int32_t (*refund)(forebay_thread* thread, const forebay_request* request, uint64_t charge) noexcept nogil
        int32_t (*reset)(forebay_thread* thread, const forebay_request* request) noexcept nogil
        int32_t (*decide_many)(
            forebay_thread* thread, const forebay_request* requests, size_t count, uint8_t* allowed) noexcept nogil
        int32_t (*decide_all)(
            forebay_thread** threads, const forebay_request* requests, size_t count, forebay_result* binding,
            forebay_result* each) noexcept nogil
        int32_t (*acquire)(
            forebay_thread* thread, const forebay_request* request, forebay_lease* lease) noexcept nogil
        int32_t (*renew)(forebay_thread* thread, forebay_lease* lease) noexcept nogil
        int32_t (*release)(forebay_thread* thread, forebay_lease* lease) noexcept nogil

    # With the GIL, after Python.h, which Cython includes first.
    const forebay_api* forebay_import() except NULL
