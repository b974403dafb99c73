"""The table of functions of the C API, in its capsule."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from forebay.c_api cimport (
    FOREBAY_ALLOWED, FOREBAY_API_VERSION, FOREBAY_CLOSED, FOREBAY_COST_EXCEEDS_LIMIT, FOREBAY_DENIED, FOREBAY_FAILED,
    FOREBAY_FINALIZING, FOREBAY_FORKED, FOREBAY_INVALID_ARGUMENT, FOREBAY_INVALID_RATE, FOREBAY_NEEDS_PYTHON,
    FOREBAY_NOT_A_LIMITER, FOREBAY_NO_MEMORY, FOREBAY_WRONG_LIMITER, forebay_api, forebay_lease, forebay_limiter,
    forebay_request, forebay_result, forebay_thread,
)
from forebay.core.c_api.decisions cimport (
    allow, allow_at_tick, allow_hash, decide, decide_all, decide_many, peek, refund, reset, tick,
)
from forebay.core.c_api.handles cimport (
    attach, close_object, hash_key, limiter_open, maintain, rate_close, rate_open,
)
from forebay.core.c_api.leases cimport acquire, release, renew


cdef const char* message(int32_t status) noexcept nogil:
    if status == FOREBAY_DENIED:
        return "denied, done, or not held"
    if status == FOREBAY_ALLOWED:
        return "allowed, or held"
    if status == FOREBAY_INVALID_ARGUMENT:
        return "an argument is NULL, a negative size, or an unknown flag or kind of key"
    if status == FOREBAY_COST_EXCEEDS_LIMIT:
        return "the cost is above the limit: the request can never be allowed"
    if status == FOREBAY_CLOSED:
        return "the store was closed"
    if status == FOREBAY_FORKED:
        return "the thread was attached in the parent of this process: attach again"
    if status == FOREBAY_NOT_A_LIMITER:
        return "the object is no limiter of a Store"
    if status == FOREBAY_NEEDS_PYTHON:
        return "the limiter decides in Python: it has windows of a calendar or initial permits, or its store has " \
            "clock='time', or is leased or synced"
    if status == FOREBAY_INVALID_RATE:
        return "not a rate, or not one for this limiter"
    if status == FOREBAY_NO_MEMORY:
        return "no memory"
    if status == FOREBAY_FAILED:
        return "Python raised an exception, which sys.unraisablehook has reported"
    if status == FOREBAY_FINALIZING:
        return "the interpreter has ended"
    if status == FOREBAY_WRONG_LIMITER:
        return "the limiter is of another kind than the call is for, in another store, or not the lease's"
    return "no status of forebay"


ctypedef int32_t (*LimiterOpen)(void*, forebay_limiter**) noexcept
ctypedef void (*LimiterClose)(forebay_limiter*) noexcept nogil
ctypedef void (*Detach)(forebay_thread*) noexcept nogil
ctypedef int32_t (*Hash)(const forebay_limiter*, uint32_t, const void*, size_t, uint64_t*) noexcept nogil
ctypedef int32_t (*Allow)(forebay_thread*, const void*, size_t) noexcept nogil
ctypedef int32_t (*AllowHash)(forebay_thread*, uint64_t) noexcept nogil
ctypedef int32_t (*Tick)(forebay_thread*) noexcept nogil
ctypedef int32_t (*Decide)(forebay_thread*, const forebay_request*, forebay_result*) noexcept nogil
ctypedef int32_t (*Refund)(forebay_thread*, const forebay_request*, uint64_t) noexcept nogil
ctypedef int32_t (*Reset)(forebay_thread*, const forebay_request*) noexcept nogil
ctypedef int32_t (*DecideMany)(forebay_thread*, const forebay_request*, size_t, uint8_t*) noexcept nogil
ctypedef int32_t (*DecideAll)(
    forebay_thread**, const forebay_request*, size_t, forebay_result*, forebay_result*) noexcept nogil
ctypedef int32_t (*Acquire)(forebay_thread*, const forebay_request*, forebay_lease*) noexcept nogil
ctypedef int32_t (*Release)(forebay_thread*, forebay_lease*) noexcept nogil

cdef forebay_api api

# Here the types of handles change: to a caller they are pointers to structs that it can't see into.
memset(&api, 0, sizeof(api))
api.version = FOREBAY_API_VERSION
api.size = sizeof(api)
api.message = message
api.limiter_open = <LimiterOpen>limiter_open
api.limiter_close = <LimiterClose>close_object
api.attach = attach
api.detach = <Detach>close_object
api.rate_open = rate_open
api.rate_close = rate_close
api.maintain = maintain
api.hash = <Hash><void*>hash_key
api.allow = <Allow><void*>allow
api.allow_hash = <AllowHash><void*>allow_hash
api.tick = <Tick><void*>tick
api.allow_at_tick = <Allow><void*>allow_at_tick
api.decide = <Decide><void*>decide
api.peek = <Decide><void*>peek
api.refund = <Refund><void*>refund
api.reset = <Reset><void*>reset
api.decide_many = <DecideMany><void*>decide_many
api.decide_all = <DecideAll><void*>decide_all
api.acquire = <Acquire><void*>acquire
api.renew = <Release><void*>renew
api.release = <Release><void*>release

capsule = PyCapsule_New(&api, "forebay.core._C_API", NULL)
