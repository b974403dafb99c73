"""The lists of hot keys that Redis publishes, as this host has read them. See hot.pyx."""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport FOREBAY_SYNCED_COUNT_BITS, ForebayHashKey
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport Events, Table


cdef enum:
    HOT_COUNT_BITS = FOREBAY_SYNCED_COUNT_BITS  # of a hot cell's state
    # The bits of a filter of names, one for each value of a name's first two bytes.
    FILTER_BITS = 1 << 16


# A key's published sums: a window's counts, its own and those of the window before; a bucket's theoretical arrival
# time. Zeros for nothing.
cdef struct Hot:
    uint64_t end_ns              # of the window
    uint64_t count
    uint64_t before
    uint64_t tat_ns


cdef inline Hot no_hot() noexcept nogil:
    return Hot(0, 0, 0, 0)


cdef inline bint is_hot(const Hot* hot) noexcept nogil:
    return hot.count != 0 or hot.before != 0 or hot.tat_ns != 0


# The hot cells of one limiter.
cdef struct HotCells:
    Table table
    ForebayHashKey hash_key
    uint64_t kind


cdef HotCells hot_cells(Segment segment, ForebayHashKey limiter_key, bytes encoding, uint64_t kind)

# The state of a key's hot cell, for the window that ends at `end_ns` (0: a bucket); 0 if there is none.
cdef uint64_t hot_state(HotCells* cells, const uint64_t* name, uint64_t end_ns) noexcept nogil

# Keep a published sum until a time, in place of an earlier one. Nothing if there is no room for it.
cdef void keep_hot(
    HotCells* cells, const uint64_t* name, uint64_t end_ns, uint64_t state, uint64_t until_ns,
    uint64_t counter_line, uint64_t* claim_sequence, Events* events) noexcept nogil

cdef void forget_hot(
    HotCells* cells, const uint64_t* name, uint64_t end_ns, Events* events) noexcept nogil


cdef inline bint may_have(const unsigned char* names, const uint64_t* name) noexcept nogil:
    """Whether a filter of names has this one, or one like it."""
    return names[(name[0] & (FILTER_BITS - 1)) >> 3] >> (name[0] & 7) & 1
