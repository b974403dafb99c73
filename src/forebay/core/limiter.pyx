"""The base class of all limiters: its number in the store's list, its counters, and how a fork changes them."""

from forebay.core.reservation cimport Reservable
from forebay.core.table.hot_keys cimport ALLOWED_PER_NOTE, HotKeys, coarse_now, hot_name, note_key
from forebay.core.table.keys cimport derive_key, hash_key_of
from forebay.core.table.native cimport (
    COUNTER_ALLOWED, COUNTER_CAS_RETRIES, COUNTER_DENIED, COUNTER_EVICTED, COUNTER_FULL, COUNTER_INSERTED,
    FREE_THREADED, ForebayCell, ForebayLine, ForebayThread, count_in, free_lines, line_of, load_acquire, load_relaxed,
    store_relaxed,
)
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport DENY, Events
from forebay.core.table.threads cimport generation_counter, join_threads

import sys
import warnings

from forebay import waiting
from forebay.awaited import Awaited
from forebay.core.limiter_arguments import bound_arguments, not_a_store
from forebay.errors import SegmentRemovedWarning, StoreClosed
from forebay.segment import layout
from forebay.segment.limiter_list import ALGORITHM_NAMES, encode_limiter_name


cdef void report_unraisable(object error) noexcept:
    """Pass an exception to ``sys.unraisablehook``, as every `noexcept` function does."""
    raise error


cdef int check_name(object store) except -1:
    """Warn if the segment's file was removed. Runs before a decision, and never makes it fail.

    A filter may turn the warning into an error, and a closed ``sys.stderr`` or a log handler may raise one:
    ``sys.unraisablehook`` reports it. An exception that a signal handler raises during the look-up of the name ends the
    call before a decision. While the warning is shown, only an exception that isn't an ``Exception`` does so, such as
    KeyboardInterrupt.
    """
    message = store.attachment.name_watch.take_removal_by_others()
    if message is not None:
        try:
            warnings.warn(message, SegmentRemovedWarning, stacklevel=1)
        except Exception as error:
            report_unraisable(error)
    return 0


cdef inline void note_in_record(Limiter limiter, ForebayLine* line, bint allowed, uint64_t tag) noexcept:
    """Note the key of a decision, if this process notes keys and, of one that was allowed, if it is its turn."""
    cdef const HotKeys* hot_keys = &limiter.segment.hot_keys
    cdef ForebayCell* slots = hot_keys.denied
    cdef uint64_t turn
    if slots == NULL:
        return
    if allowed:
        turn = load_relaxed(&line.turn) + 1
        store_relaxed(&line.turn, turn if turn != ALLOWED_PER_NOTE else 0)
        if turn != ALLOWED_PER_NOTE:
            return
        slots = hot_keys.allowed
    note_key(slots, hot_keys.lines, tag, limiter.number, coarse_now(&limiter.table))


cdef class Limiter(Reservable):
    """Base class of every limiter; not used by itself.

    A limiter is a name in a store. Limiters of the same name share their state, within a process and across processes:
    ``TokenBucket``, ``LeakyBucket`` and ``MinInterval`` with each other, whatever their rates; others with their own
    class only, if the parameters that docs/using.md names are the same. A limiter has its arguments as attributes, such
    as ``store``, ``name`` and ``rate``. ``may_free_early`` is true if a permit may be free before a decision's
    ``retry_after``, because its holder gave it back.

    *Threads*: every method may be called from any thread. *Processes*: the store shares the state. The object itself
    can't be pickled: make one in each process, from the same store and name. *Fork*: a limiter made before a fork works
    in parent and child; the child takes counters of its own at its first decision.
    """

    may_free_early = False

    def __cinit__(self, *args, **kwargs):
        arguments = bound_arguments(type(self), args, kwargs)
        if "store" not in arguments:
            raise TypeError(f"{type(self).__name__} is a base of the limiters: use TokenBucket or another one")
        store, name = arguments["store"], arguments["name"]
        if not isinstance(getattr(store, "segment", None), Segment):
            raise not_a_store(type(self), store)
        self.store = store
        self.segment = store.segment
        encode_limiter_name(name)
        # Each Decision has a reference to it. Interned, it has no count that all threads would change.
        self.name = sys.intern(name) if FREE_THREADED and type(name) is str else name
        self.table = self.segment.table
        self.lines.common.generation = generation_counter()

    def __dealloc__(self):
        free_lines(&self.lines)

    cdef int register(self, uint32_t algorithm, bytes encoding, uint64_t most) except -1:
        """Take a number in the segment's list of limiters. Constructors call this last: invalid parameters take none.

        `algorithm` is one of the `ALGORITHM_*` numbers: counters are kept by name and algorithm.
        `encoding` identifies the format of states and is part of the keys' hash. So a limiter of the same name with
        another format starts afresh instead of misreading states.
        `most` is how many permits a fresh key has. With one, one request uses up a key's limit, so no live key has used
        less than another: then a full table denies a new key, unless the store has an `on_full`.
        """
        if most == 1 and self.store.on_full is None:
            self.table.on_full = DENY
        name = encode_limiter_name(self.name)
        self.hash_key = derive_key(self.segment.hash_key, name + b"\0" + encoding if encoding else name)
        self.number = self.store.attachment.limiter_number(self.name, algorithm)
        # Of threads that have not attached, or have no slot.
        self.lines.common.shared = self.segment.shared_counter_line(self.number)
        self.attach_shared_line(&self.lines.common)
        self.note_name(algorithm, encoding)
        return 0

    cdef int note_name(self, uint32_t algorithm, bytes encoding) except -1:
        """Warn if this process has a limiter of that name with another state."""
        # Without an encoding, states are times: limiters of other classes may use them, too.
        self.store.names.note(self, ALGORITHM_NAMES[algorithm], encoding, is_common=not encoding)
        return 0

    cdef ForebayLine* attach_process(self) except NULL:
        cdef uint64_t generation
        cdef object attachment = self.store.attachment
        cdef ForebayThread* thread = join_threads(attachment)
        cdef ForebayLine* line = line_of(&self.lines, thread)
        if line == NULL:
            raise MemoryError
        if line.checks_name:
            # First, because other threads may run during the check, and one of them may fork or close the store.
            line.checks_name = False
            check_name(self.store)
        generation = load_acquire(line.generation)
        if line.line_generation != generation:
            if self.store.closed:
                raise StoreClosed(f"limiter {self.name!r} was used after its store was closed: {self.store!r}")
            number, shared = attachment.counter_line(self.number, (thread.number or None) if FREE_THREADED else 0)
            line.counters = self.segment.counter_line(number)
            line.is_shared = shared
            line.is_plain = not line.is_shared and self.segment.hot_keys.denied == NULL
            line.number = number
            line.line_generation = generation
            if load_acquire(line.generation) != generation:
                # Another thread has closed a store meanwhile, perhaps this one: the line may be another process's.
                return self.attach_process()
        if self.segment.follows_python:
            self.segment.follow_python()
        else:
            line.attached_generation = generation
        return line

    cdef int attach_shared_line(self, ForebayLine* line) except -1:
        """Count in the line that all processes share, until the next `attach_process`."""
        line.counters = self.segment.shared_counter_line(self.number)
        line.is_shared = True
        line.is_plain = False
        line.number = layout.OWNED_COUNTER_LINES + self.number
        return 0

    cdef void count_events(self, const Events* events) noexcept:
        cdef ForebayLine* line = self.line_here()
        count_in(line, COUNTER_INSERTED, events.inserted)
        count_in(line, COUNTER_EVICTED, events.evicted)
        count_in(line, COUNTER_FULL, events.full)
        count_in(line, COUNTER_CAS_RETRIES, events.cas_retries)
        # Every insertion and every lost CAS calls this, but no usual decision does.
        if self.segment.take_name_check():
            line.checks_name = True
            line.attached_generation = 0

    cdef void count_and_note(self, ForebayLine* line, bint allowed, uint64_t tag) noexcept:
        """Count a decision in a line that isn't plain, and note its key: see hot_keys.pxd."""
        count_in(line, COUNTER_ALLOWED if allowed else COUNTER_DENIED, 1)
        note_in_record(self, line, allowed, tag)

    cdef void note_decision(self, ForebayLine* line, bint allowed, uint64_t tag) noexcept:
        note_in_record(self, line, allowed, tag)

    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1:
        raise TypeError(f"{self!r} can't be one of several limits")

    cdef int check(self, Attempt* attempt, uint64_t now_ns) except -1:
        return 0

    cdef int try_commit(self, Attempt* attempt) except -1:
        return 0

    cdef int commit(self, Attempt* attempt) except -1:
        return 0

    cdef int roll_back(self, Attempt* attempt) except -1:
        return 0

    cdef Decision decision_of(self, const Attempt* attempt, bint allowed):
        return None

    def wait(self, key, cost=1, timeout=None, *, jitter=0.0):
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Sleeps, and never polls another process. Waiters in one process get their permits in the order of their calls.
        A wait charges nothing if it ends early (``KeyboardInterrupt``, any exception) or would take too long. With
        `jitter` 0.1 each sleep is longer by a random share of up to a tenth, within the timeout. With a ``ManualClock``
        the thread doesn't sleep: the wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(self, key, cost=1, timeout=None, *, jitter=0.0):
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter))

    def __reduce__(self):
        raise TypeError(
            f"{type(self).__name__} {self.name!r} can't be pickled: make it again from the same store and name")


def hot_name_of(Limiter limiter, key):
    """The name of a limiter's key in the record of hot keys."""
    return hot_name(hash_key_of(key, limiter.hash_key), limiter.number)
