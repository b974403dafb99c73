"""Which thread counts in which counter lines, without the GIL; and when a line is lost to other processes.

A counter line has one writer, so its counters change by loads and stores. With the GIL that writer is a process. In a
free-threaded build of CPython it is a thread. Atomic additions to one line would be as exact, but threads that share a
line move it from core to core: two threads together are then hardly faster than one.

State
-----
* *slot*: one of 128 in a process (`ForebayThread`), with a bit in a bitmap. The thread that has taken it keeps its
  address in a thread-local variable. Its number is the holder of the thread's lines (`Attachment.counter_line`).
  Slot 0 stands for all threads that have none; it owns no lines.
* *line*: for each limiter and slot, the counter line that the slot's thread uses, and the generation in which it took
  it (`ForebayLine`).
* *generation*: of a slot; numbers are never drawn twice. A line is the thread's own as long as both generations are
  equal.
* *counting*: of a slot: 1 while its thread may store to a line.

Transitions
-----------
* *join*: a thread, before its first decision. A clear bit -> set, by an acquire CAS; then it draws a generation, so the
  former owner's lines aren't its own. No free slot: slot 0, for good.
* *attach*: a thread whose generation isn't the line's. It gets a line from the attachment, under the attachment's lock,
  and stores the generation that it had read before.
* *count*: a thread, in its own line. `counting` := 1; load the generation; if it is the line's, add to the counter by
  load and store; `counting` := 0, with release. If the generation is another, it adds to the limiter's shared line, by
  an atomic addition.
* *next generation*: a thread that closes a store. Every slot draws a generation. Then a barrier in all threads
  (membarrier), and a wait until each slot was seen with `counting` 0. Only then it closes the file, which frees the
  lines for other processes.
* *leave*: a thread at its end. It moves to slot 0, gives its lines back to the attachments, and clears its bit, with
  release.
* *fork*, in the child: the only thread keeps its slot, all other bits are cleared, no slot is counting, and every slot
  draws a generation: its lines are the parent's.

Invariant
---------
No counter line has two writers at one time, except shared lines, whose writers add atomically. So no count is lost.

Proof
-----
*Within a process.* The attachment gives a line to one holder at a time. SYNC slot -> slot: a slot's next owner acquires
what its former owner released. So it sees the former owner's stores, and a line that was not given back continues.

*Beside a close.* SYNC counting -> generation: a counting thread stores `counting` and then loads its generation. A
closing thread stores the generations and then loads `counting`. Both are store buffering, so each side needs a full
barrier between its two accesses. The closing thread executes it for all threads. If a thread's barrier comes after its
store, the closing thread reads `counting` 1 and waits. If it comes before, the thread loads the new generation and
counts in the shared line. Where the kernel has no membarrier, each thread executes the barrier itself.

*Beside a fork.* The child has its own copy of all slots. Its generations are new before its first decision.

*Attaching beside a close.* The closing thread marks the attachment as closed before it draws generations. A thread
attaches under the attachment's lock. If it reads a new generation first, it finds the attachment closed. If it read the
old one, its line has the old generation, so it counts in the shared line.

*Claim ids* contain a line's number and its sequence, which is drawn by an atomic addition. So they differ between
threads, and also if a thread draws one from a line that it has just lost.

Crash and stall
---------------
A thread can't be killed without its process, whose lines the kernel frees. A thread that is stopped while it counts
delays its own process's close by as long as it is stopped, and no decision.

Not handled
-----------
A thread whose Python state ends while it goes on, as in a callback from a thread that Python did not start, uses slot 0
from then on. A thread without a slot keeps slot 0 after slots have become free.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from forebay.core.table.native cimport FREE_THREADED, ForebayThread

import sys
from weakref import ref


cdef extern from "forebay/threads.h" nogil:
    uint64_t forebay_generation
    uint64_t forebay_forks
    int begin_threads "forebay_begin_threads"() noexcept
    void native_next_generation "forebay_next_generation"() noexcept
    bint any_slot_taken "forebay_any_slot_taken"() noexcept
    void wait_for_counts "forebay_wait_for_counts"() noexcept
    ForebayThread* native_thread_here "forebay_thread_here"() noexcept
    ForebayThread* take_slot "forebay_take_slot"() noexcept
    void leave_slot "forebay_leave_slot"() noexcept
    void give_slot_back "forebay_give_slot_back"(uint64_t number) noexcept


cdef extern from "Python.h":
    PyObject* PyThreadState_GetDict() noexcept


if begin_threads() != 0:
    raise MemoryError("forebay could not register its fork handler")


def forks():
    """The number of forks between the process that imported this module and this process."""
    return forebay_forks


def next_generation():
    """Start a new generation: each limiter of this process attaches again before its next decision.

    Returns once no thread writes to a counter line that it had before.
    """
    native_next_generation()
    if any_slot_taken():
        # A thread that counts takes no lock, but may have to wait for this one if the interpreter stops all threads.
        with nogil:
            wait_for_counts()


cdef const uint64_t* forks_counter() noexcept:
    return &forebay_forks


cdef uint64_t forks_of_process() noexcept nogil:
    return forebay_forks


cdef const uint64_t* generation_counter() noexcept:
    return &forebay_generation


cdef ForebayThread* thread_here() noexcept nogil:
    return native_thread_here()


cdef ForebayThread* join_threads(object attachment) except? NULL:
    cdef ForebayThread* thread
    cdef PyObject* state
    if not FREE_THREADED:
        return NULL
    thread = native_thread_here()
    if thread != NULL and thread.number == 0:
        return thread
    state = PyThreadState_GetDict()
    if state == NULL:
        leave_slot()
        return native_thread_here()
    end = (<dict>state).get(ThreadEnd)
    if end is None:
        end = (<dict>state)[ThreadEnd] = ThreadEnd()
    if thread == NULL:
        thread = take_slot()
    end.number = thread.number
    end.note(attachment)
    return thread


class ThreadEnd:
    """In the state of each thread that has joined: gives back its slot and its lines when that state ends."""

    def __init__(self):
        self.number = 0
        self.attachments = set()

    def note(self, attachment):
        """Remember an attachment that the thread may have lines of, by a weak reference."""
        # Not a WeakSet: another thread that frees an attachment would change it, and this one may be reading it.
        self.attachments = {known for known in self.attachments if known() is not None} | {ref(attachment)}

    def __del__(self, finalizing=sys.is_finalizing):
        # In the child of a fork, Python ends the states of the parent's other threads. Their slots are free by then.
        cdef ForebayThread* thread = native_thread_here()
        if self.number == 0 or thread == NULL or thread.number != <uint64_t>self.number or finalizing():
            return
        leave_slot()
        try:
            for known in self.attachments:
                attachment = known()
                if attachment is not None:
                    attachment.release_lines(self.number)
        finally:
            give_slot_back(self.number)
