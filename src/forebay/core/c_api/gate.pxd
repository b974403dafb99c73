"""The gate of the C API, which the end of the interpreter shuts."""

# Before the GIL is taken. False if the interpreter ends.
cdef bint enter() noexcept nogil

# After `enter`, once the GIL is released.
cdef void leave() noexcept nogil
