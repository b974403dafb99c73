"""Everything that forebay takes from C: the only extern declarations of the package."""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "forebay/layout.h" nogil:
    const uint64_t FOREBAY_CLOCK_MONOTONIC
    const uint64_t FOREBAY_CLOCK_PYTHON
    const int FOREBAY_CELLS_PER_LINE
    const int FOREBAY_LINES_PER_GROUP
    const int FOREBAY_GROUPS_PER_KEY
    const uint64_t FOREBAY_KIND_BITS
    const uint64_t FOREBAY_KIND_EMPTY
    const uint64_t FOREBAY_KIND_CLAIM
    const uint64_t FOREBAY_KIND_TAT
    const uint64_t FOREBAY_KIND_COUNT
    const uint64_t FOREBAY_KIND_USED
    const uint64_t FOREBAY_KIND_FROZEN
    const uint64_t FOREBAY_KIND_BLOCKED
    const int FOREBAY_MOVED_GROUPS_BITS
    const uint64_t FOREBAY_EXTENT_ALIGNMENT
    const uint64_t FOREBAY_ALGORITHM_BUCKETED_WINDOW
    const uint64_t FOREBAY_ALGORITHM_CONCURRENCY
    const uint64_t FOREBAY_ALGORITHM_SYNCED_FIXED_WINDOW
    const uint64_t FOREBAY_ALGORITHM_SYNCED_SLIDING_WINDOW
    const uint64_t FOREBAY_ALGORITHM_SYNCED_TOKEN_BUCKET

    const int FOREBAY_SYNCED_NAME_WORD
    const int FOREBAY_SYNCED_INCARNATION_WORD
    const int FOREBAY_SYNCED_CHECKSUM_WORD
    const int FOREBAY_SYNCED_OTHERS_WORD
    const int FOREBAY_SYNCED_REPORTED_WORD
    const int FOREBAY_SYNCED_CHARGED_WORD
    const int FOREBAY_SYNCED_CHARGED_BEFORE_WORD
    const int FOREBAY_SYNCED_CHARGED_REPORTED_WORD
    const int FOREBAY_SYNCED_REPORTED_UNTIL_WORD
    const int FOREBAY_SYNCED_WORDS_PER_CELL
    const int FOREBAY_SYNCED_COUNT_BITS
    const int FOREBAY_LEASE_GENERATION_BITS
    const int FOREBAY_HOT_LIMITER_BITS
    const int FOREBAY_HOT_COUNT_BITS
    const int FOREBAY_HOT_TIME_SHIFT
    const int FOREBAY_HOT_HALVING_BITS
    const int FOREBAY_LATENCY_BUCKETS
    const uint64_t FOREBAY_LATENCY_LEAST_NS

    ctypedef struct ForebayHeader:
        uint64_t manual_ns
        uint64_t extents_maker
        uint64_t rules_version
        uint64_t moved_table
        uint64_t moved_keys
        uint64_t moved_check
        uint64_t resize_progress
        uint64_t* decision_latency
        uint64_t* redis_latency

    ctypedef struct ForebayLimiterEntry:
        uint64_t identity
        uint32_t name_bytes
        uint32_t algorithm
        uint8_t* name

    ctypedef struct ForebayExtentEntry:
        uint64_t identity

    ctypedef struct ForebayCounterLine:
        uint32_t limiter
        uint64_t claims
        uint64_t allowed
        uint64_t denied
        uint64_t inserted
        uint64_t evicted
        uint64_t full
        uint64_t cas_retries

    ctypedef struct ForebayCell:
        uint64_t tag
        uint64_t state


cdef extern from "forebay/atomics.h" nogil:
    uint64_t load_relaxed "forebay_load_relaxed"(const uint64_t* p) noexcept
    uint64_t load_acquire "forebay_load_acquire"(const uint64_t* p) noexcept
    uint32_t load_acquire32 "forebay_load_acquire32"(const uint32_t* p) noexcept
    uint64_t load_seq_cst "forebay_load_seq_cst"(const uint64_t* p) noexcept
    void store_relaxed "forebay_store_relaxed"(uint64_t* p, uint64_t value) noexcept
    void store_release "forebay_store_release"(uint64_t* p, uint64_t value) noexcept
    void store_release32 "forebay_store_release32"(uint32_t* p, uint32_t value) noexcept
    void set_bits_acq_rel "forebay_set_bits_acq_rel"(uint64_t* p, uint64_t bits) noexcept
    void clear_bits_acq_rel "forebay_clear_bits_acq_rel"(uint64_t* p, uint64_t bits) noexcept
    bint cas_acq_rel "forebay_cas_acq_rel"(uint64_t* p, uint64_t expected, uint64_t desired) noexcept
    uint64_t fetch_add_relaxed "forebay_fetch_add_relaxed"(uint64_t* p, uint64_t value) noexcept
    bint cas128_acq_rel "forebay_cas128_acq_rel"(
        ForebayCell* cell, ForebayCell expected, ForebayCell desired) noexcept
    bint cas128_seq_cst "forebay_cas128_seq_cst"(
        ForebayCell* cell, ForebayCell expected, ForebayCell desired) noexcept
    ForebayCell load128_acquire "forebay_load128_acquire"(ForebayCell* cell) noexcept
    void prefetch "forebay_prefetch"(const void* p) noexcept


cdef extern from "forebay/arithmetic.h" nogil:
    uint64_t multiply_high "forebay_multiply_high"(uint64_t a, uint64_t b) noexcept
    bint likely "forebay_likely"(bint condition) noexcept
    uint64_t multiply_divide_up "forebay_multiply_divide_up"(uint64_t a, uint64_t b, uint64_t divisor) noexcept
    int lowest_bit "forebay_lowest_bit"(uint64_t bits) noexcept
    int highest_bit "forebay_highest_bit"(uint64_t bits) noexcept
    int count_ones "forebay_count_ones"(uint64_t bits) noexcept
    bint product_below "forebay_product_below"(uint64_t a, uint64_t b, uint64_t c, uint64_t d) noexcept
    uint64_t multiply_divide_down "forebay_multiply_divide_down"(uint64_t a, uint64_t b, uint64_t divisor) noexcept


cdef extern from "forebay/hash.h" nogil:
    ctypedef struct ForebayHashKey:
        uint64_t k0
        uint64_t k1

    uint64_t siphash13 "forebay_siphash13"(ForebayHashKey key, const uint8_t* data, size_t size) noexcept


cdef extern from "forebay/clock.h" nogil:
    uint64_t coarse_ns "forebay_coarse_ns"()
    uint64_t monotonic_ns "forebay_monotonic_ns"() noexcept


cdef extern from "forebay/counting.h" nogil:
    bint FREE_THREADED "FOREBAY_FREE_THREADED"
    int THREADS "FOREBAY_THREADS"

    ctypedef struct ForebayThread:
        uint64_t number

    ctypedef struct ForebayLine:
        ForebayCounterLine* counters
        ForebayCounterLine* shared
        const uint64_t* generation
        uint64_t attached_generation
        uint64_t line_generation
        uint64_t number
        bint is_shared
        bint is_plain
        bint checks_name
        uint64_t turn
        ForebayThread* thread

    ctypedef struct ForebayLines:
        ForebayLine common

    ctypedef enum ForebayCounter:
        COUNTER_ALLOWED "FOREBAY_COUNTER_ALLOWED"
        COUNTER_DENIED "FOREBAY_COUNTER_DENIED"
        COUNTER_INSERTED "FOREBAY_COUNTER_INSERTED"
        COUNTER_EVICTED "FOREBAY_COUNTER_EVICTED"
        COUNTER_FULL "FOREBAY_COUNTER_FULL"
        COUNTER_CAS_RETRIES "FOREBAY_COUNTER_CAS_RETRIES"

    ctypedef ForebayThread* (*ThreadHere)() noexcept nogil

    void count_in "forebay_count"(const ForebayLine* line, ForebayCounter counter, uint64_t n) noexcept
    void count_plain "forebay_count_plain"(const ForebayLine* line, ForebayCounter counter) noexcept
    ForebayLine* native_line_here "forebay_line_here"(ForebayLines* lines, ThreadHere here) noexcept
    ForebayLine* line_of "forebay_line_of"(ForebayLines* lines, ForebayThread* thread) noexcept
    bint take_due "forebay_take_due"(uint64_t* due_ns, uint64_t now_ns, uint64_t interval_ns) noexcept
    void free_lines "forebay_free_lines"(ForebayLines* lines) noexcept


cdef extern from "Python.h":
    # On objects that the caller keeps alive. These only read memory, so they need no reference and no GIL.
    bint is_text "PyUnicode_CheckExact"(PyObject* key) noexcept nogil
    bint is_compact_ascii "PyUnicode_IS_COMPACT_ASCII"(PyObject* text) noexcept nogil
    const uint8_t* text_data "PyUnicode_DATA"(PyObject* text) noexcept nogil
    size_t text_length "PyUnicode_GET_LENGTH"(PyObject* text) noexcept nogil
    PyObject** list_items "PySequence_Fast_ITEMS"(list items) noexcept
    void hide_from_collector "PyObject_GC_UnTrack"(list items) noexcept
    void show_to_collector "PyObject_GC_Track"(list items) noexcept
