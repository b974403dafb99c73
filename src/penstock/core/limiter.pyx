"""The base of all limiters: its place in a store, its counters, and what a fork does to them."""

from penstock.core.keys cimport derive_key
from penstock.core.segment cimport Segment
from penstock.core.table cimport Events

from penstock import layout
from penstock.errors import StoreClosed, shown


cdef class Limiter:
    """Base class of every limiter; not used by itself.

    A limiter is a name in a store. Limiters of one name share their state, in one process or in many.

    *Threads*: every method may be called from any thread. *Processes*: state is shared through the store; the object
    itself isn't picklable, make one per process from the same store and name. *Fork*: a limiter made before a fork
    works in parent and child; the child takes counters of its own at its first decision.
    """

    def __cinit__(self, store, name, *args, **kwargs):
        if type(self) is Limiter:
            raise TypeError("Limiter is the base of the limiters: use TokenBucket")
        if not isinstance(getattr(store, "_segment", None), Segment):
            raise TypeError(f"the first argument of {type(self).__name__} is a Store, not {shown(store)}")
        self.store = store
        self.segment = store._segment
        self.hash_key = derive_key(self.segment.hash_key, store._limiter_name(name))
        self.name = name
        self.table = self.segment.table
        self.generation = self.segment.generation

    cdef int enroll(self) except -1:
        """Take a place among the segment's limiters. Last, so that parameters that are refused don't use one up."""
        self.number = self.store._limiter_number(self.name)
        return 0

    cdef int bind(self) except -1:
        cdef uint64_t generation = self.generation[0]
        if self.store.closed:
            raise StoreClosed(f"limiter {self.name!r} was used after its store was closed: {self.store!r}")
        line, shared = self.store._counter_line(self.number)
        self.counters = self.segment.counter_line(line)
        self.counters_are_shared = shared
        self.claim_stripe = line
        self.bound_generation = generation
        return 0

    cdef int bind_shared(self) except -1:
        """Until the next `bind`, count in the line that all processes may use at any time."""
        self.counters = self.segment.shared_counter_line(self.number)
        self.counters_are_shared = True
        self.claim_stripe = layout.OWNED_COUNTER_LINES + self.number
        return 0

    cdef void count_events(self, const Events* events) noexcept:
        self.count(&self.counters.inserted, events.inserted)
        self.count(&self.counters.evicted, events.evicted)
        self.count(&self.counters.full, events.full)
        self.count(&self.counters.cas_retries, events.cas_retries)

    def __reduce__(self):
        raise TypeError(
            f"{type(self).__name__} {self.name!r} can't be pickled: make it again from the same store and name")
