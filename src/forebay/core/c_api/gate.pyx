"""The gate of the C API.

A thread that asks for the GIL after the interpreter has begun to end never returns, or is ended. So each function that
takes the GIL first enters the *gate*. The gate is one word: how many are in, in which fork, and whether it is shut.
`atexit` shuts it, and waits, without the GIL, until all have left. As it is one word, a thread either is seen by that
wait or finds the gate shut. Decisions don't pass the gate: what they read and write stays mapped until the process
ends, because no handle that is open then is ever freed.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport cas_acq_rel, load_acquire, set_bits_acq_rel
from forebay.core.table.threads cimport forks_of_process

import atexit
import time


cdef enum:
    CALLER_BITS = 32
    FORK_BITS = 31

cdef uint64_t SHUT = <uint64_t>1 << (CALLER_BITS + FORK_BITS)
cdef uint64_t CALLERS = (<uint64_t>1 << CALLER_BITS) - 1

cdef uint64_t gate = 0


cdef inline uint64_t callers_in(uint64_t seen) noexcept nogil:
    """How many callers of this process are in. Those of the parent don't exist here."""
    return seen & CALLERS if (seen & ~SHUT) >> CALLER_BITS == this_fork() else 0


cdef inline uint64_t this_fork() noexcept nogil:
    return forks_of_process() & ((<uint64_t>1 << FORK_BITS) - 1)


cdef bint enter() noexcept nogil:
    """Before the GIL is taken. False if the interpreter ends."""
    cdef uint64_t seen
    while True:
        seen = load_acquire(&gate)
        if seen & SHUT:
            return False
        if cas_acq_rel(&gate, seen, this_fork() << CALLER_BITS | (callers_in(seen) + 1)):
            return True


cdef void leave() noexcept nogil:
    cdef uint64_t seen = load_acquire(&gate)
    while not cas_acq_rel(&gate, seen, seen - 1):
        seen = load_acquire(&gate)


def shut_gate():
    """At the end of the interpreter: let no more callers in, and wait for those that are."""
    set_bits_acq_rel(&gate, SHUT)
    while callers_in(load_acquire(&gate)):
        time.sleep(0.001)


atexit.register(shut_gate)
