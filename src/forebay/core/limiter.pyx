"""The base class of all limiters: its number in the store's list, its counters, and how a fork changes them."""

from forebay.core.reservation cimport Reservable
from forebay.core.table.keys cimport derive_key
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport Events

import inspect
import warnings
from functools import lru_cache

from forebay import waiting
from forebay.awaited import Awaited
from forebay.errors import SegmentRemovedWarning, StoreClosed, redacted_repr
from forebay.segment import layout
from forebay.segment.limiter_list import encode_limiter_name


@lru_cache  # as this takes longer than all the rest of making a limiter
def signature_of(kind):
    """The parameters of a limiter of this class."""
    signature = inspect.signature(kind.__init__)
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)


def bound_arguments(kind, args, kwargs):
    """The arguments of a limiter of this class, by name.

    Its TypeError names the class. Cython's own would name ``__cinit__``.
    """
    signature = signature_of(kind)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{kind.__name__}{signature}: {error}") from None


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


cdef class Limiter(Reservable):
    """Base class of every limiter; not used by itself.

    A limiter is a name in a store. Limiters of the same name share their state, within a process and across processes:
    ``TokenBucket``, ``LeakyBucket`` and ``MinInterval`` with each other, whatever their rates; others with their own
    class only, if the parameters that docs/using.md names are the same.

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
            raise TypeError(
                f"the first argument of {type(self).__name__} is a Store, or a RedisStore(url) of forebay.redis, not "
                f"{redacted_repr(store)}")
        self.store = store
        self.segment = store.segment
        encode_limiter_name(name)
        self.name = name
        self.table = self.segment.table
        self.generation = self.segment.generation

    cdef int register(self, uint32_t algorithm, bytes encoding) except -1:
        """Take a number in the segment's list of limiters. Constructors call this last: invalid parameters take none.

        `algorithm` is one of the `ALGORITHM_*` numbers: counters are kept by name and algorithm.
        `encoding` identifies the format of states and is part of the keys' hash. So a limiter of the same name with
        another format starts afresh instead of misreading states.
        """
        name = encode_limiter_name(self.name)
        self.hash_key = derive_key(self.segment.hash_key, name + b"\0" + encoding if encoding else name)
        self.number = self.store.attachment.limiter_number(self.name, algorithm)
        return 0

    cdef int attach_process(self) except -1:
        cdef uint64_t generation
        if self.checks_name:
            # First, because other threads may run during the check, and one of them may fork or close the store.
            self.checks_name = False
            check_name(self.store)
        generation = self.generation[0]
        if self.line_generation != generation:
            if self.store.closed:
                raise StoreClosed(f"limiter {self.name!r} was used after its store was closed: {self.store!r}")
            line, shared = self.store.attachment.counter_line(self.number)
            self.counters = self.segment.counter_line(line)
            self.counters_are_shared = shared
            self.counter_line = line
            self.line_generation = generation
        if self.segment.follows_python:
            self.segment.follow_python()
        else:
            self.attached_generation = generation
        return 0

    cdef int attach_shared_line(self) except -1:
        """Count in the line that all processes share, until the next `attach_process`."""
        self.counters = self.segment.shared_counter_line(self.number)
        self.counters_are_shared = True
        self.counter_line = layout.OWNED_COUNTER_LINES + self.number
        return 0

    cdef void count_events(self, const Events* events) noexcept:
        self.count(&self.counters.inserted, events.inserted)
        self.count(&self.counters.evicted, events.evicted)
        self.count(&self.counters.full, events.full)
        self.count(&self.counters.cas_retries, events.cas_retries)
        # Every insertion and every lost CAS calls this, but no usual decision does.
        if self.segment.take_name_check():
            self.checks_name = True
            self.attached_generation = 0

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
