"""Permits that a host has borrowed for a key, and spends from its own table.

State
-----
A key has two cells, both of KIND_COUNT (see counts.pxd). A decision reads the *lease*: one CAS takes permits, as with
every other limiter. The *fetch slot* makes fetches single-flight: it names the one fetch that may call the server.

    lease       | time: its end, rounded down | generation | pending  | permits left  |
    fetch slot  | time: closed until          | size       | fetching | cost          |
                | the same, while fetching    | size       | fetching | waited | mark |

Transitions of the lease
------------------------
All are 128-bit acq_rel CASes. lease_steps.pxd has the decision function of each.

* *spend*: any request, if permits are there and the lease runs. Permits fall; nothing else changes. "leased: spending"
* *begin*: a fetch that is about to call the server. Sets `pending` and a generation of its own. The request to the
  server reports how many permits are left: so many are still on loan. It also reports the unspent permits of a lease
  that has ended on the host. The rest of the loan counts as spent.
* *deposit*: the same fetch, with the reply, only if the fetch slot is still its own and the cell still has its
  generation, pending. It drops those of the reported permits that the server doesn't count any more. It adds the grant,
  less the request's own cost, so the request that fetches is served. The end is that of the new lease.
* *abort*: the same fetch, without a grant. Clears `pending`, and drops permits in the same way.
* *withdraw*: a process that gives back, only if nothing is pending. Takes all permits out, to report them to the
  server.

A begin and a withdrawal are also stamped with the monotonic clock. The stamp is read between the load of the state and
its CAS, so stamps have the order of these steps. The server keeps the latest stamp of each loan, and ignores a step
that is not later. Tested by "leased: two fetches", "leased: a fetch that is killed" and the other programs of
tests/interleaving/leased_scenes.py.

Invariant
---------
The host never spends more than the server knows to be on loan to it.

The server caps the reported remainder at the amount on loan to that host. Bucket level + outstanding loans grows only
by refill and refunds.

Proof
-----
The server's loan is the remainder in the latest step that reached it, plus its grant for that step. The host may still
spend these permits:

* Permits in the cell at that step were reported. Spending since then only makes them fewer.
* Permits granted for that step are in the loan, and so is their end.
* Permits granted to an earlier fetch that is still under way are not in the loan, and never come to the cell: its
  deposit finds another generation. They are lost, and count as spent.
* A later step that has not reached the server adds no permits before its reply.

An overtaken report that arrives late has an older stamp. If the server has forgotten the loan by then, because all was
spent, the host has nothing, and the grant for the late report is lost.

*Reports of permits that are not on loan.* A report may arrive after its loan's end. The permits in it then count as
spent and may have been refilled and admitted. It may also reach a server that came back empty, or a key that was reset.
The server then counts no more than is on loan, and its reply has the number of permits that were reported beyond that.
Deposit and abort take these out of the cell. If the reply is lost, the host can spend them until the old lease's end on
the host, which is not later than the server's. A report that came after that end leaves none to spend.

*A generation does not repeat while it matters.* It is the clock, in units of which 128 are longer than a fetch and a
lease together. A begin may meet a generation of its own unit or one ahead of it. If nothing is pending there, no
fetch waits for that generation, and the begin takes the same; else it takes the next. Begins that overtake are at least
as far apart as a fetch slot is closed for, unless fetch slots are lost. So all that are under way within the time of a
lease differ. After that time a deposit's lease is over, and it deposits nothing.

*A cell that is lost* (evicted, reset): a begin that finds no cell reports that it doesn't know what is left, and the
server keeps on loan what was. An earlier fetch that is still under way must not deposit in the new cell: once another
begin has reported that cell, the earlier fetch's permits count as spent. So the fetch checks whether its fetch slot is
still as it left it: a state with a time and a mark. Another process leaves the same state in the same millisecond by a
chance of 1 in 32,767. The new cell's generation is ahead of the clock by a random amount.

*The end.* The server grants a lease for a time from its grant. The host counts that time from before its request. So
the host's end is never later than the server's, if both clocks run at one rate.

*Windows* need less. The server charges a loan in its window, and counts none of it as spent before the window's end.
Permits are added only to those of the same window.

The fetch slot
--------------
Advisory: a process that takes it wrongly costs a fetch, never a permit.

* *enter*: a request that lacks permits. Open -> fetching, closed until the fetch must have ended.
* *wait*: other requests. They sleep, and look whether there are permits. They wait for two fetches: the process of the
  first may be killed, and that of the next, too.
* *deny*: the fetch, after a denial. Closed until the limit can change, for requests that cost as much or more. They are
  denied by loads only. Two other steps close the fetch slot in the same way. After a partial grant the fetch closes it
  for a pause, for all requests that lack permits. A request that the server charges without a loan closes it after a
  denial, if it can enter.
* *leave*: the fetch. Fetching -> open, or reserved if `waited` is set.
* *wait in turn*: a process that has waited for long, while others were let in, sets `waited` in the fetch slot that it
  finds. A process that leaves such a slot *reserves* it: only processes that have waited for long may enter. The
  reservation ends after 16 ms, or at the time until which the fetch had closed the slot, if that is earlier. The state
  of a reserved slot is like that of a fetch, with a mark that no fetch has.

Without turns, a process that leaves the slot, spends the permits and returns at once would beat the waiters, which
sleep between two looks. Other threads of its process run only while it fetches, and to other processes the slot is open
for microseconds.

The fetch slot also remembers how much is borrowed at a time, as a power of two. It does so after its time, too, until
another key takes its cell. A request that needs as much as the host may have on loan borrows nothing. The server
charges it directly, past both cells; only its denial is left at a fetch slot that is open.

Crash and stall
---------------
* Before the request was sent: the fetch slot is closed until its time; the next fetch begins then.
* After it was sent, or with the reply: the same. The grant stays on loan until the next report, and is lost. The next
  fetch borrows no more than it needs, as does every fetch until a reply arrives. So if several replies in a row are
  lost, the first one loses a batch, and each other one loses what its request would have had.
* Between deposit and leaving the fetch slot: the same; meanwhile requests spend what was deposited.
* After a withdrawal: the withdrawn permits stay on loan until the next report or the lease's end, and are lost.
* A reserved fetch slot whose waiter was killed, or was served meanwhile: the others wait until its time.

A process that is stopped at one of these points and goes on is one that was overtaken.

Not handled
-----------
A fetch that is stopped between the check of its fetch slot and its deposit, while its cell is lost, meets its own
generation in the new cell by a chance of 1 in 64.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_bits_for, low_mask, low_of, time_of
from forebay.core.all_of cimport MOST, AllOf
from forebay.core.cell_limiter cimport (
    hash_of_id, hash_with_part, insert_mark, mark_state, mark_tag_of, remove_mark, tag_of_mark, whole_cost,
)
from forebay.core.decision cimport NO_ROOM, Decision
from forebay.core.lease_steps cimport (
    FETCH_SLOT_COST_BITS, FETCH_SLOT_LOW_BITS, FETCHING, GENERATION_BITS, UNKNOWN, WAITED, LeaseCharge, SlotRequest,
    Step, abort_fetch, begin_fetch, deposit_permits, enter_fetch_slot, is_closed, is_pending, leave_fetch_slot,
    lower_size, mark_waited, runs, size_of, spend, withdraw_permits,
)
from forebay.core.limiter cimport Attempt, Limiter
from forebay.core.table.keys cimport MARK, hash_key_of, hash_pair
from forebay.core.table.native cimport (
    COUNTER_ALLOWED, FOREBAY_KIND_COUNT, ForebayCell, ForebayLine, load128_acquire, monotonic_ns,
    prefetch,
)
from forebay.core.table.table cimport (
    ALLOWED, DENIED, UNDECIDED, Decide, Events, Outcome, Verdict, find_in_line, fingerprint_of, home_line, no_events,
    table_amend, table_decide, table_find, table_now, table_remove, table_try,
)

from forebay.core.arguments import ttl_without_id
from forebay.errors import CostExceedsLimit, InvalidLimiter


cdef uint64_t MOST_SLOT_COST = (1 << 16) - 1
cdef uint64_t MOST_MARK = (1 << 15) - 1

# In place of a size: no fetch has had a reply since.
UNKNOWN_SIZE = 31

# The outcomes of `enter`.
ENTERED, BUSY, CLOSED, FULL = 0, 1, 2, 3
# The resolution of a fetch slot's time.
FETCH_SLOT_QUANTUM_NS = 1 << 20


cdef class Permits(Limiter):
    """Permits of a limit at a server, borrowed in batches; the base of the classes that fetch them.

    `terms` gives the size of batches and the length of leases (``forebay.redis.leased.terms.Terms``). This class has
    the fast paths and the steps of a fetch, each one CAS. A derived class has `_lacking(key, cost)` and
    `_lacking_hit(key, cost)` for requests that need more permits than the lease has, and `_hit_once(key, cost,
    request_id, request_ttl)`.
    """

    def __cinit__(self, store, name, terms):
        self.terms = terms
        self.unit.amount = 1
        self.unit.permit_bits = count_bits_for(terms.most_on_loan)
        self.unit.low_bits = self.unit.permit_bits + GENERATION_BITS + 1
        self.unit.longest_ns = terms.longest_ns + (<uint64_t>1 << (self.unit.low_bits - FRACTION_BITS))
        self.clock_shift = count_bits_for(terms.longest_fetch_ns >> (GENERATION_BITS - 1))
        self.keep_ns = terms.fetch_deadline_ns
        self.cell_keep_ns = min(terms.fetch_deadline_ns, terms.lease_ns // 2)
        self.same_ns = terms.same_ns
        self.limit_permits = terms.limit
        self.reset_ns = terms.reset_ns
        # Other hosts have leases of their own length.
        self.longest_closed_ns = 2 * (self.unit.longest_ns + self.reset_ns) + <uint64_t>120_000_000_000
        self.register(
            terms.host_algorithm, b"leased %d %d %b" % (self.unit.low_bits, self.clock_shift, terms.encoding), 0)

    @cython.binding(False)
    def __init__(self, store, name, terms):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<leased {self.terms.strict!r}>"

    cdef int note_name(self, uint32_t algorithm, bytes encoding) except -1:
        """The limiter over Redis has the name. Limiters of several rates have permits of their own, by design."""
        return 0

    cdef uint64_t fetch_slot_of(self, uint64_t tag) noexcept:
        return fingerprint_of(hash_pair(tag, 0, self.hash_key, MARK)) | FOREBAY_KIND_COUNT

    cdef Outcome spend_now(self, uint64_t tag, const LeaseCharge* charge, Verdict* verdict) except UNDECIDED:
        """Take permits that are there. Never inserts anything."""
        cdef Events events
        cdef Outcome outcome
        self.ensure_attached()
        prefetch(home_line(&self.table, tag))
        verdict.now_ns = table_now(&self.table)
        outcome = table_try(&self.table, tag, verdict.now_ns, spend, charge, verdict)
        if outcome > ALLOWED:
            events = no_events()
            outcome = ALLOWED if table_amend(&self.table, tag, spend, charge, &events) else DENIED
            table_find(&self.table, tag, &verdict.state)
            self.count_events(&events)
        if outcome == ALLOWED:
            self.count_decision(True, tag)
        return outcome

    cdef uint64_t denied_ns(self, uint64_t tag, uint64_t cost, uint64_t now_ns) noexcept:
        """How long a denial of so much is still remembered. Loads only."""
        cdef uint64_t slot, slot_tag = self.fetch_slot_of(tag)
        cdef ForebayCell seen
        cdef ForebayCell* cell = find_in_line(home_line(&self.table, slot_tag), slot_tag)
        seen.tag = 0
        if cell != NULL:
            seen = load128_acquire(cell)
            slot = seen.state
        if seen.tag != slot_tag:
            table_find(&self.table, slot_tag, &slot)
        if slot & FETCHING or not is_closed(slot, now_ns, self.longest_closed_ns):
            return 0
        if min(cost, MOST_SLOT_COST) < low_of(slot, FETCH_SLOT_COST_BITS):
            return 0
        return time_of(slot, FETCH_SLOT_LOW_BITS) - now_ns

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        From the host's own memory, if its lease suffices or a denial is remembered; else one round trip. Raises
        ``InvalidKey``, ``StoreClosed``, ``StoreUnavailable``, ``ForeignState``.
        """
        allowed = self.allowed_now(key)
        return self._lacking(key, 1) if allowed is None else allowed

    @cython.binding(False)
    def allow_now(self, key, /):
        """True or False; None if only a call to Redis can decide."""
        return self.allowed_now(key)

    cdef object allowed_now(self, object key):
        cdef Verdict verdict
        cdef uint64_t tag = fingerprint_of(hash_key_of(key, self.hash_key)) | FOREBAY_KIND_COUNT
        if self.spend_now(tag, &self.unit, &verdict) == ALLOWED:
            return True
        if self.denied_ns(tag, 1, verdict.now_ns) == 0:
            return None
        self.count_decision(False, tag)
        return False

    def hit(self, key, cost=1, *, rate=None, burst=None, request_id=None, request_ttl=None):
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        From the host's own memory, if its lease suffices or a denial is remembered; else one round trip. ``remaining``
        is what the host knows: at least so many are left. ``reset_after`` is at the latest. A rate and a burst are for
        limiters that aren't leased.

        With a `request_id` (str, bytes, int or a tuple of them), a request that is repeated on this host with the same
        id and cost within `request_ttl` (5 minutes by default) is allowed again without a second charge, in any worker
        of the host. *Another host charges it again.* An id takes a cell of the host's store for that time.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``InvalidLimiter``, ``InvalidRate``,
        ``StoreClosed``, ``StoreUnavailable``, ``ForeignState``.
        """
        if rate is not None or burst is not None:
            self.refuse_extras()
        if request_id is not None:
            return self._hit_once(key, cost, request_id, request_ttl)
        if request_ttl is not None:
            raise ttl_without_id(request_ttl)
        decision = self.decided_now(key, self.checked_cost(cost))
        return self._lacking_hit(key, cost) if decision is None else decision

    def hit_now(self, key, cost):
        """A ``Decision``; None if only a call to Redis can decide."""
        return self.decided_now(key, self.checked_cost(cost))

    def look(self, key, cost):
        """The ``Decision`` that ``hit_now`` would make, by loads only; None if only a call to Redis can decide."""
        cdef uint64_t permits = self.checked_cost(cost)
        cdef Look look
        self.look_at(fingerprint_of(hash_key_of(key, self.hash_key)) | FOREBAY_KIND_COUNT, permits, &look)
        return None if look.outcome == UNDECIDED else self.decision_seen(&look)

    cdef int look_at(self, uint64_t tag, uint64_t permits, Look* look) except -1:
        """Fill in the answer that `permits` permits would get. Loads only. UNDECIDED if only Redis can decide."""
        cdef uint64_t state, now_ns
        self.ensure_attached()
        look.left = look.rest_ns = look.retry_ns = 0
        look.outcome = ALLOWED
        now_ns = table_now(&self.table)
        table_find(&self.table, tag, &state)
        if runs(&self.unit, state, now_ns):
            look.left = low_of(state, self.unit.permit_bits)
            look.rest_ns = time_of(state, self.unit.low_bits) - now_ns
        if look.left < permits:
            look.rest_ns = look.retry_ns = self.denied_ns(tag, permits, now_ns)
            look.outcome = DENIED if look.retry_ns != 0 else UNDECIDED
        return 0

    cdef Decision decision_seen(self, const Look* look):
        """A request that was not decided has not been denied."""
        return self.new_decision(look.outcome != DENIED, look.left, look.retry_ns, look.rest_ns)

    def refuse_extras(self):
        raise InvalidLimiter(
            f"{self!r} has one limit for all calls: over the RedisStore itself a call may have a rate and a burst")

    cdef object decided_now(self, object key, uint64_t cost):
        cdef Verdict verdict
        cdef LeaseCharge charge = self.unit
        cdef uint64_t tag = fingerprint_of(hash_key_of(key, self.hash_key)) | FOREBAY_KIND_COUNT
        cdef uint64_t retry_ns, end_ns
        charge.amount = cost
        if cost == 0:
            return None
        if cost <= low_mask(charge.permit_bits) and self.spend_now(tag, &charge, &verdict) == ALLOWED:
            end_ns = time_of(verdict.state, charge.low_bits)
            return self.new_decision(
                True, low_of(verdict.state, charge.permit_bits), 0, end_ns - min(verdict.now_ns, end_ns))
        retry_ns = self.denied_ns(tag, cost, table_now(&self.table))
        if retry_ns == 0:
            return None
        self.count_decision(False, tag)
        return self.new_decision(False, self.left(tag)[0], retry_ns, retry_ns)

    cdef uint64_t checked_cost(self, object cost) except? 0:
        cdef uint64_t permits = <uint64_t>whole_cost(cost)
        if permits > self.limit_permits:
            raise CostExceedsLimit(cost, self.limit_permits, self.name)
        return permits

    cdef Decision new_decision(self, bint allowed, uint64_t left, uint64_t retry_ns, uint64_t rest_ns):
        cdef Decision decision = Decision.__new__(Decision)
        decision.allowed = allowed
        decision.limiter = self.name
        decision.limit = self.limit_permits
        decision.outlook.available = min(left, self.limit_permits)
        decision.outlook.retry_after_ns = retry_ns
        decision.outlook.reset_after_ns = rest_ns + self.reset_ns
        return decision

    def decision(self, bint allowed, uint64_t left, uint64_t retry_ns, uint64_t rest_ns, bint full=False):
        """The Decision of a request that went to Redis; `full` if the host's store had no room for the key."""
        cdef Decision decision = self.new_decision(allowed, left, retry_ns, rest_ns)
        if full:
            decision.flags |= NO_ROOM
        return decision

    def checked(self, cost):
        """A cost as a whole number. Raises ``InvalidCost``, ``CostExceedsLimit``."""
        return self.checked_cost(cost)

    def tag(self, key):
        """The tag by which the steps of a fetch identify a key."""
        return fingerprint_of(hash_key_of(key, self.hash_key)) | FOREBAY_KIND_COUNT

    def now_ns(self):
        """The time of leases."""
        self.ensure_attached()
        return table_now(&self.table)

    def take(self, uint64_t tag, uint64_t cost):
        """Take `cost` permits of the lease; False if it doesn't have as many."""
        cdef Verdict verdict
        cdef LeaseCharge charge = self.unit
        charge.amount = cost
        return cost <= low_mask(charge.permit_bits) and self.spend_now(tag, &charge, &verdict) == ALLOWED

    def left(self, uint64_t tag):
        """The permits that are left, when the lease ends, and whether a fetch is pending."""
        cdef uint64_t state
        self.ensure_attached()
        table_find(&self.table, tag, &state)
        if not runs(&self.unit, state, table_now(&self.table)):
            return 0, 0, is_pending(&self.unit, state)
        return (
            low_of(state, self.unit.permit_bits), time_of(state, self.unit.low_bits), is_pending(&self.unit, state))

    def enter(self, uint64_t tag, uint64_t cost, bint has_waited=False):
        """Try to take the fetch slot: the outcome; until when it is closed, or was if it was taken; its state if it was
        taken; and the size of the loans. A caller that `has_waited` for long goes before others.

        A fetch slot that was left open was closed until then. So that time is when the last fetch ended, or 0.

        FULL if there is no room for a fetch slot: with the time at which there may be room, if the store's `on_full`
        denies the request, and with 0, if it allows it.
        """
        cdef SlotRequest request
        cdef Verdict verdict
        cdef Events events
        cdef ForebayLine* line = self.ensure_attached()
        events = no_events()
        request.cost = min(cost, MOST_SLOT_COST)
        request.until_ns = self.keep_ns
        request.mark = 1 + monotonic_ns() % MOST_MARK
        request.has_waited = has_waited
        request.longest_ns = self.longest_closed_ns
        verdict.now_ns = table_now(&self.table)
        table_decide(
            &self.table, self.fetch_slot_of(tag), line.number, &line.counters.claims, enter_fetch_slot, &request,
            &verdict, &events)
        self.count_events(&events)
        if verdict.full:
            return FULL, verdict.state if verdict.outcome == DENIED else 0, 0, 0
        if verdict.outcome == ALLOWED:
            return ENTERED, request.was_until_ns, verdict.state, size_of(verdict.state)
        if verdict.state & FETCHING == 0:
            return CLOSED, time_of(verdict.state, FETCH_SLOT_LOW_BITS), 0, 0
        if has_waited:
            self.amend(self.fetch_slot_of(tag), mark_waited, NULL)
        return BUSY, time_of(verdict.state, FETCH_SLOT_LOW_BITS), 0, size_of(verdict.state)

    def leave(self, uint64_t tag, uint64_t seen, uint64_t size, uint64_t until_ns=0, uint64_t cost=0):
        """Open the fetch slot, or close it until `until_ns` for requests of `cost` or more, if it holds so much."""
        cdef SlotRequest request
        request.cost = cost
        request.until_ns = until_ns if cost <= MOST_SLOT_COST else 0
        request.size = min(size, <uint64_t>UNKNOWN)
        request.seen = seen
        self.amend(self.fetch_slot_of(tag), leave_fetch_slot, &request)

    def mark_of(self, key, cost, request_id):
        """The tag of the mark of a request that this limiter alone charges."""
        return mark_tag_of(self, key, request_id, self.checked_cost(cost))

    def mark_of_several(self, limiters, keys, costs, request_id):
        """The tag of the mark of a request to all these limiters, each with a key and a cost. This store has the mark.

        Raises what a charge to each of them would raise for a wrong key or cost.
        """
        cdef Attempt attempt
        cdef Permits permits
        cdef uint64_t hashed = hash_of_id(self, request_id)
        for limiter, key, cost in zip(limiters, keys, costs, strict=True):
            if isinstance(limiter, Permits):
                permits = limiter
                attempt.own_charge.amount = permits.checked_cost(cost)
                attempt.charge = &attempt.own_charge
                attempt.tag = permits.tag(key)
            else:
                (<Limiter?>limiter).attempt_for(key, cost, &attempt)
            hashed = hash_with_part(self, hashed, &attempt)
        return tag_of_mark(hashed)

    def is_marked(self, uint64_t mark_tag):
        self.ensure_attached()
        return mark_state(self, mark_tag) != 0

    def insert_mark(self, uint64_t mark_tag, uint64_t ttl_ns):
        """Remember a request that was charged. False if another one has done so. True also if there is no room."""
        self.ensure_attached()
        return insert_mark(self, mark_tag, table_now(&self.table) + ttl_ns, 0)

    def remove_mark(self, uint64_t mark_tag):
        """Forget a request. False if it was not remembered any more."""
        return remove_mark(self, mark_tag)

    def repeated(self, key):
        """The ``Decision`` of a request that was charged before, by the host's memory alone."""
        cdef Look look
        self.look_at(self.tag(key), 0, &look)
        if look.rest_ns == 0:
            # The lease that its permits came from is over, or it had none: no lease ends later than one from now on.
            look.rest_ns = self.terms.longest_ns
        return self.decision_seen(&look)

    def shrink(self, uint64_t tag):
        """Borrow less next time, as the last batch was not needed."""
        self.amend(self.fetch_slot_of(tag), lower_size, NULL)

    def begin(self, uint64_t tag):
        """The begin of a fetch. None if there is no room for a lease.

        The generation; the time; the step's stamp; the permits left, or -1 if that isn't known; the permits that an
        expired lease had left; and that lease's end.
        """
        cdef Step step
        cdef Verdict verdict
        cdef Events events
        cdef ForebayLine* line = self.ensure_attached()
        events = no_events()
        step.charge = &self.unit
        step.epoch_ns = self.table.epoch_ns
        step.keep_ns = self.cell_keep_ns
        verdict.now_ns = table_now(&self.table)
        step.clock = verdict.now_ns >> self.clock_shift
        table_decide(
            &self.table, tag, line.number, &line.counters.claims, begin_fetch, &step, &verdict, &events)
        self.count_events(&events)
        if verdict.full:
            return None
        # Lease ends count from here, so it must not be later than the call.
        return (
            step.generation, step.now_ns, step.stamp_us, step.left if step.was_known else -1, step.unspent,
            step.was_end_ns)

    def holds(self, uint64_t tag, uint64_t seen):
        """Whether the fetch slot is still as `enter` left it."""
        cdef uint64_t slot
        self.ensure_attached()
        table_find(&self.table, self.fetch_slot_of(tag), &slot)
        return slot & ~WAITED == seen

    def deposit(
        self, uint64_t tag, uint64_t generation, uint64_t granted, uint64_t end_ns, uint64_t cost, uint64_t dropped=0
    ):
        """Add what was granted, and drop so many of the permits that were reported.

        Whether that could be done, and whether the request was served.
        """
        cdef Step step
        step.dropped = dropped
        step.charge = &self.unit
        step.generation = generation
        step.granted = granted
        step.end_ns = end_ns
        step.amount = cost
        step.same_ns = self.same_ns
        step.was_served = False
        deposited = self.amend(tag, deposit_permits, &step)
        served = bool(deposited and step.was_served)
        if served:
            self.count_decision(True, tag)
        return deposited, served

    def abort(self, uint64_t tag, uint64_t generation, uint64_t dropped=0):
        """The end of a fetch that has brought nothing. Drop so many of the permits that were reported."""
        cdef Step step
        step.dropped = dropped
        step.charge = &self.unit
        step.generation = generation
        self.amend(tag, abort_fetch, &step)

    def withdraw(self, uint64_t tag):
        """Take out the remaining permits, to give them back: the step's stamp, and their number. None if that can't be.
        """
        cdef Step step
        step.charge = &self.unit
        step.epoch_ns = self.table.epoch_ns
        return (step.stamp_us, step.unspent) if self.amend(tag, withdraw_permits, &step) else None

    cdef bint amend(self, uint64_t tag, Decide decide, const void* parameters) except -1:
        cdef Events events
        cdef bint amended
        self.ensure_attached()
        events = no_events()
        amended = table_amend(&self.table, tag, decide, parameters, &events)
        self.count_events(&events)
        return amended

    def count_allowed(self):
        self.count(COUNTER_ALLOWED, 1)

    def count_denied(self, uint64_t tag):
        self.count_decision(False, tag)

    def forget(self, uint64_t tag):
        """Neither lease nor denial."""
        cdef Events events
        self.ensure_attached()
        events = no_events()
        table_remove(&self.table, tag, &events)
        table_remove(&self.table, self.fetch_slot_of(tag), &events)
        self.count_events(&events)


def decide_now(AllOf limits, key, cost, tuple leased, leased_key, leased_cost, bint at_each):
    """Decide a request to several limits by this host's memory alone: `limits`, which may be None, and `leased` ones.

    A key and a cost are for all limits, or a list for each of them. The result is whether the request is allowed, or
    with `at_each` the decisions of `limits` and then of `leased`. It is None, and nothing is charged, if only a call to
    Redis can decide. If a lease that sufficed has been spent meanwhile, it is a tuple: of the leases before that one,
    when each was charged. The charges of `limits` are given back then.

    redis/leased/all_of.py has the argument. The order of the steps is the same there.
    """
    cdef Attempt[MOST] attempts
    cdef Look[MOST] looks
    cdef Verdict[MOST] verdicts
    cdef uint64_t[MOST] tags
    cdef uint64_t[MOST] amounts
    cdef LeaseCharge charge
    cdef Permits permits
    cdef Py_ssize_t i, count = len(leased)
    cdef int part
    cdef bint denied = False, undecided = False, charged = False
    cdef list decisions = []
    for i in range(count):
        permits = <Permits>leased[i]
        amounts[i] = permits.checked_cost((<list>leased_cost)[i] if type(leased_cost) is list else leased_cost)
        tags[i] = FOREBAY_KIND_COUNT | fingerprint_of(hash_key_of(
            (<list>leased_key)[i] if type(leased_key) is list else leased_key, permits.hash_key))
        permits.look_at(tags[i], amounts[i], &looks[i])
        denied |= looks[i].outcome == DENIED
        undecided |= looks[i].outcome == UNDECIDED
    if limits is not None:
        limits.begin_attempts(key, cost, attempts)
    if denied:
        for i in range(count):
            if looks[i].outcome == DENIED:
                (<Permits>leased[i]).count_decision(False, tags[i])
        if at_each and limits is not None:
            limits.check_all(attempts, True)
    elif undecided:
        return None
    elif limits is not None:
        denied = not limits.decide_begun(attempts, at_each)
    try:
        for i in range(0 if denied else count):
            permits = <Permits>leased[i]
            charge = permits.unit
            charge.amount = amounts[i]
            verdicts[i].now_ns = 0
            if amounts[i] != 0:
                if permits.spend_now(tags[i], &charge, &verdicts[i]) != ALLOWED:
                    return tuple([verdicts[before].now_ns for before in range(i)])
                looks[i].left = low_of(verdicts[i].state, charge.permit_bits)
        charged = True
    finally:
        if not charged and limits is not None:
            # In reverse order: several charges may be in one cell.
            for part in reversed(range(limits.count)):
                (<Limiter>limits.parts[part]).roll_back(&attempts[part])
    if not at_each:
        return not denied
    if limits is not None:
        decisions = limits.decisions(attempts)
    for i in range(count):
        decisions.append((<Permits>leased[i]).decision_seen(&looks[i]))
    return decisions


def repeated_each(AllOf limits, list keys, bint is_new):
    """The decisions of a request that was charged before. `is_new`: none of its limits has counted it yet."""
    cdef Attempt[MOST] attempts
    limits.begin_repeated(keys, attempts)
    if is_new:
        limits.count_allowed()
    return limits.decisions(attempts)
