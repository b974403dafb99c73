"""The part of its state that a key keeps when its limit changes: see ``convert`` of token buckets and windows."""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport multiply_divide_up, product_below


# In the order of `KEPT` in core/arguments.py.
cdef enum Keep:
    KEEP_PERMITS
    KEEP_SHARE
    KEEP_USED


cdef inline uint64_t scaled(uint64_t value, uint64_t by, uint64_t divisor, uint64_t most) noexcept nogil:
    """``value * by / divisor``, rounded up, at most `most`."""
    return multiply_divide_up(value, by, divisor) if product_below(value, by, most, divisor) else most
