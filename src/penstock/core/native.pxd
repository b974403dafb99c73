"""Everything that penstock takes from C: the only extern declarations of the package."""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "penstock/layout.h" nogil:
    const uint64_t PENSTOCK_CLOCK_MONOTONIC
    const uint64_t PENSTOCK_CLOCK_PYTHON
    const int PENSTOCK_CELLS_PER_LINE
    const int PENSTOCK_LINES_PER_GROUP
    const int PENSTOCK_GROUPS_PER_KEY
    const uint64_t PENSTOCK_KIND_BITS
    const uint64_t PENSTOCK_KIND_EMPTY
    const uint64_t PENSTOCK_KIND_CLAIM
    const uint64_t PENSTOCK_KIND_TAT
    const uint64_t PENSTOCK_KIND_COUNT
    const uint64_t PENSTOCK_KIND_BLOCKED
    const uint64_t PENSTOCK_ALGORITHM_BUCKETED_WINDOW
    const uint64_t PENSTOCK_ALGORITHM_CONCURRENCY
    const uint64_t PENSTOCK_ALGORITHM_SYNCED_WINDOW
    const uint64_t PENSTOCK_ALGORITHM_SYNCED_BUCKET

    ctypedef struct PenstockHeader:
        uint64_t manual_ns
        uint64_t extents_maker

    ctypedef struct PenstockLimiterEntry:
        uint64_t name_hash
        uint64_t name_bytes
        uint8_t* name

    ctypedef struct PenstockExtentEntry:
        uint64_t identity

    ctypedef struct PenstockCounterLine:
        uint32_t limiter
        uint64_t claims
        uint64_t allowed
        uint64_t denied
        uint64_t inserted
        uint64_t evicted
        uint64_t full
        uint64_t cas_retries

    ctypedef struct PenstockCell:
        uint64_t tag
        uint64_t state


cdef extern from "penstock/atomics.h" nogil:
    uint64_t load_relaxed "penstock_load_relaxed"(const uint64_t* p) noexcept
    uint64_t load_acquire "penstock_load_acquire"(const uint64_t* p) noexcept
    uint64_t load_seq_cst "penstock_load_seq_cst"(const uint64_t* p) noexcept
    void store_relaxed "penstock_store_relaxed"(uint64_t* p, uint64_t value) noexcept
    void store_release "penstock_store_release"(uint64_t* p, uint64_t value) noexcept
    void set_bits_acq_rel "penstock_set_bits_acq_rel"(uint64_t* p, uint64_t bits) noexcept
    void clear_bits_acq_rel "penstock_clear_bits_acq_rel"(uint64_t* p, uint64_t bits) noexcept
    bint cas_acq_rel "penstock_cas_acq_rel"(uint64_t* p, uint64_t expected, uint64_t desired) noexcept
    uint64_t fetch_add_relaxed "penstock_fetch_add_relaxed"(uint64_t* p, uint64_t value) noexcept
    bint cas128_acq_rel "penstock_cas128_acq_rel"(
        PenstockCell* cell, PenstockCell expected, PenstockCell desired) noexcept
    bint cas128_seq_cst "penstock_cas128_seq_cst"(
        PenstockCell* cell, PenstockCell expected, PenstockCell desired) noexcept
    PenstockCell load128_acquire "penstock_load128_acquire"(PenstockCell* cell) noexcept
    void prefetch "penstock_prefetch"(const void* p) noexcept


cdef extern from "penstock/arithmetic.h" nogil:
    uint64_t multiply_high "penstock_multiply_high"(uint64_t a, uint64_t b) noexcept
    bint likely "penstock_likely"(bint condition) noexcept
    uint64_t multiply_divide_up "penstock_multiply_divide_up"(uint64_t a, uint64_t b, uint64_t divisor) noexcept
    int lowest_bit "penstock_lowest_bit"(uint64_t bits) noexcept
    bint product_below "penstock_product_below"(uint64_t a, uint64_t b, uint64_t c, uint64_t d) noexcept
    uint64_t multiply_divide_down "penstock_multiply_divide_down"(uint64_t a, uint64_t b, uint64_t divisor) noexcept


cdef extern from "penstock/hash.h" nogil:
    ctypedef struct PenstockHashKey:
        uint64_t k0
        uint64_t k1

    uint64_t siphash13 "penstock_siphash13"(PenstockHashKey key, const uint8_t* data, size_t size) noexcept


cdef extern from "penstock/clock.h" nogil:
    uint64_t monotonic_ns "penstock_monotonic_ns"() noexcept


cdef extern from "penstock/generation.h" nogil:
    uint64_t penstock_generation
    uint64_t penstock_forks
    void next_generation "penstock_next_generation"() noexcept
    int watch_forks "penstock_watch_forks"() noexcept


cdef extern from "Python.h":
    # On objects that somebody else holds. These read memory only, so they ask for no reference and no GIL.
    bint is_text "PyUnicode_CheckExact"(PyObject* key) noexcept nogil
    bint is_compact_ascii "PyUnicode_IS_COMPACT_ASCII"(PyObject* text) noexcept nogil
    const uint8_t* text_data "PyUnicode_DATA"(PyObject* text) noexcept nogil
    size_t text_length "PyUnicode_GET_LENGTH"(PyObject* text) noexcept nogil
    PyObject** list_items "PySequence_Fast_ITEMS"(list items) noexcept
    void hide_from_collector "PyObject_GC_UnTrack"(list items) noexcept
    void show_to_collector "PyObject_GC_Track"(list items) noexcept
