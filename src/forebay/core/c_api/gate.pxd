"""The gate of the C API.

A thread that asks for the GIL after the interpreter has begun to end never returns, or is ended. So each function that
takes the GIL first enters the *gate*. The gate is one word: how many are in, in which fork, and whether it is shut. At
the end `shut_gate` shuts it, and waits, without the GIL, until all have left. As it is one word, a thread either is
seen by that wait or finds the gate shut. Decisions don't pass the gate: what they read and write stays mapped until the
process ends, because no handle that is open then is ever freed.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport cas_acq_rel, load_acquire, set_bits_acq_rel
from forebay.core.table.threads cimport forks_of_process


cdef enum:
    CALLER_BITS = 32
    FORK_BITS = 31


cdef inline uint64_t shut_bit() noexcept nogil:
    return <uint64_t>1 << (CALLER_BITS + FORK_BITS)


cdef inline uint64_t this_fork() noexcept nogil:
    return forks_of_process() & ((<uint64_t>1 << FORK_BITS) - 1)


cdef inline uint64_t callers_in(uint64_t seen) noexcept nogil:
    """How many callers of this process are in. Those of the parent don't exist here."""
    if (seen & ~shut_bit()) >> CALLER_BITS != this_fork():
        return 0
    return seen & ((<uint64_t>1 << CALLER_BITS) - 1)


cdef inline bint enter(uint64_t* gate) noexcept nogil:
    """Before the GIL is taken. False if the interpreter ends."""
    cdef uint64_t seen
    while True:
        seen = load_acquire(gate)
        if seen & shut_bit():
            return False
        if cas_acq_rel(gate, seen, this_fork() << CALLER_BITS | (callers_in(seen) + 1)):
            return True


cdef inline void leave(uint64_t* gate) noexcept nogil:
    """After `enter`, once the GIL is released."""
    cdef uint64_t seen = load_acquire(gate)
    while not cas_acq_rel(gate, seen, seen - 1):
        seen = load_acquire(gate)


cdef inline void shut(uint64_t* gate) noexcept nogil:
    """Let no more callers in."""
    set_bits_acq_rel(gate, shut_bit())
