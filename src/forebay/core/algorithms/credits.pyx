"""Credits: prepaid permits that no time brings.

**State.** The *balance* of a key, in a cell of KIND_TAT.

* A balance of at least one permit is a number of permits (`holds_permits` in table.pxd). The cell never expires, and
  no key takes it.
* A balance of 0 is a time: that of the last permit's charge and `SPENT_NS` more. Until then the cell is kept, so that
  permits which are given back find room. Then any key may take it. A key without a cell has the balance 0, too.

No state says when, or at what rate: the balance is all that a decision depends on. So no clock reading is too old, and
a CAS that finds a balance again which was spent and added in between (ABA) charges rightly.

**Transitions.** Quoted names are programs of tests/interleaving.

* *add*: any balance -> a larger one; inserts the cell of a key that has none. One CAS. "credits: permits are added"
* *take*: a balance -> a smaller one. One CAS. "credits: permits are spent"
* *give back*: as *add*, but at most `most_permits` are there afterwards. One CAS. "credits: permits are given back"
* *deny*: writes nothing. A key without a cell has no balance, so the request inserts none, and evicts no other key
  (`Table.new_may_be_denied`). "credits: a key without any is denied"

A denial of a key without a cell is linearizable. The search reads each cell of the probe set once. As long as the key
has a balance, its cell stays where it is: it isn't evicted, and only requests of the key change it. So a search that
doesn't find the cell overlaps a moment at which the key had no balance.

**Crash and stall.** Each transition is one CAS: a killed process has added, taken or given back all or nothing. A
process that is killed between its charge and what it was for leaves the charge.

**Not handled.** A charge is given back more than `SPENT_NS` after it spent the last permit, and the store has no room
for a new key by then: ``refund`` and ``cancel`` raise ``StoreFull``. A request to several limits reports it to
``sys.unraisablehook``, as its other limits must be given back, too.
"""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.gcra cimport add_permits
from forebay.core.cell_limiter cimport CellLimiter
from forebay.core.decision cimport Decision, Outlook, never_ns
from forebay.core.limiter cimport Attempt, Charge, report_unraisable
from forebay.core.table.native cimport FOREBAY_KIND_TAT, ForebayCell, ForebayLine
from forebay.core.table.table cimport (
    ALLOWED, Events, Next, Verdict, most_permits, no_events, permits_in, state_of_permits, table_decide, table_now,
)

from forebay.core.arguments import no_reset_of_credits, permits_of
from forebay.errors import StoreFull
from forebay.segment import layout


# As long as a request id is remembered by default.
cdef uint64_t SPENT_NS = 300 * <uint64_t>1_000_000_000


cdef bint credits_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef uint64_t amount = (<const Charge*>parameters).amount
    cdef uint64_t permits = permits_in(state)
    next.state = state_of_permits(permits - amount) if amount < permits else now_ns + SPENT_NS
    return amount <= permits


cdef bint credits_add(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef uint64_t permits = permits_in(state) + (<const Charge*>parameters).amount
    next.state = state_of_permits(permits)
    return permits <= most_permits()


cdef bint credits_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef uint64_t amount = (<const Charge*>parameters).amount
    next.state = state_of_permits(min(permits_in(state) + amount, most_permits()))
    return amount != 0


cdef void describe_credits(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    outlook.available = permits_in(verdict.state)
    outlook.retry_after_ns = 0 if allowed else never_ns()
    outlook.reset_after_ns = never_ns()


@cython.final
cdef class Credits(CellLimiter):
    """Prepaid permits: a key has as many as ``add`` gave it, and no time brings more.

    ``Credits(store, "api calls")``, and ``add(key, 1000)`` once the customer has paid. A key begins with none. A
    request that costs more than the key's balance is denied, not an error. A decision's ``limit`` and ``remaining`` are
    the balance after it; its ``reset_after``, and ``retry_after`` of a denial, are infinity. ``wait`` returns False at
    once if the balance is too low, and ``limited`` raises ``LimitExceeded`` then.

    The store never evicts a key that has a balance, and such a key keeps its cell until the balance is spent: make the
    store for as many keys. A store in shared memory is no ledger: a reboot of the host, or ``Store.unlink``, loses all
    balances. Over Redis they last as long as Redis keeps its data.

    Raises ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``. A decision is O(1),
    usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per key. Guarantee: a key
    is never charged more permits than were added or given back to it, over all processes.
    """

    def __cinit__(self, store, name):
        self.kind = FOREBAY_KIND_TAT
        self.take = credits_take
        self.give_back = credits_give_back
        self.describe = describe_credits
        self.params.limit = most_permits()
        self.table.new_may_be_denied = True
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_CREDITS, b"credits", self.params.limit)

    @cython.binding(False)
    def __init__(self, store, name):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<Credits {self.name!r}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        return self.decide(self.tag_of(key), &self.unit, &verdict) == ALLOWED

    def add(self, key, permits):
        """Give `key` so many permits more. Returns its balance.

        Raises ``InvalidCost`` if `permits` is no whole number of at least 0, or if the balance would be above
        281,474,976,710,655; ``StoreFull`` if there is no room for a new key; ``InvalidKey`` and ``StoreClosed``. Then
        nothing was added. O(1), one CAS: a process that is killed has added all or nothing, and permits that several
        add at once are all there.
        """
        cdef uint64_t number = permits_of(permits, self.name)
        return add_permits(self, key, number, &self.params, credits_add) if number else self.peek(key, 0).remaining

    def reset(self, key):
        """Raises ``InvalidLimiter``: to forget a key would delete what it has paid for.

        ``take_up_to(key, 2**48)`` takes the whole balance, and returns how much that was.
        """
        raise no_reset_of_credits(self)

    cdef Decision new_decision(self, const Charge* charge, const Verdict* verdict, bint allowed):
        cdef Decision decision = CellLimiter.new_decision(self, charge, verdict, allowed)
        decision.limit = decision.outlook.available
        return decision

    cdef int return_charge(self, uint64_t tag, const Charge* charge) except -1:
        """As in the base class, but a key that has lost its cell gets one: to it, that is no key with all permits."""
        cdef Verdict verdict
        cdef ForebayLine* line = self.ensure_attached_to_return()
        cdef Events events = no_events()
        verdict.now_ns = table_now(&self.table)
        table_decide(
            &self.table, tag, line.number, &line.counters.claims, credits_give_back, charge, &verdict, &events)
        self.count_events(&events)
        if verdict.full:
            raise StoreFull(self.name)
        return 0

    cdef int roll_back(self, Attempt* attempt) except -1:
        try:
            CellLimiter.roll_back(self, attempt)
        except StoreFull as error:
            report_unraisable(error)
        return 0
