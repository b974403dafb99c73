"""The decision function that adds credits. See credits.pyx."""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport ForebayCell
from forebay.core.table.table cimport Next


# Add so many permits as the charge's amount. Denies if they would be too many.
cdef bint credits_add(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil
