"""Programs for the interleaving explorer: operations on real limiters, by processes that run one step at a time.

Compiled into the explorer's build of forebay only. A program's processes call the very functions that an application's
do, below the Python methods: `CellLimiter.decide` for ``allow`` and ``hit``, `return_charge` for ``refund``, and so on.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memset

from forebay.core.algorithms.concurrency cimport Concurrency, Lease, ends_drawn
from forebay.core.algorithms.credits cimport credits_add
from forebay.core.algorithms.gcra cimport gcra_add
from forebay.core.algorithms.slots cimport Slots, free_slot, lease_of
from forebay.core.all_of cimport MOST, AllOf
from forebay.core.batch cimport Batch
from forebay.core.cell_limiter cimport CellLimiter, mark_tag_of
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Attempt, Charge
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_KIND_BITS, FOREBAY_KIND_TAT, FOREBAY_LINES_PER_GROUP, ForebayCell,
    ForebayCounterLine, cas128_acq_rel, cas128_seq_cst, load_acquire, load_seq_cst, store_release,
)
from forebay.core.table.native cimport ForebayLine
from forebay.core.table.table cimport ALLOWED, Events, Verdict, home_line, no_events, table_decide, table_now

import itertools
from dataclasses import dataclass


VERDICTS = ("complete", "cut", "held up", "broken", "wrong", "too large", "not the same")
CELLS = FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE
SEGMENT_NS = 1_000_000 * 1_000_000_000


@dataclass(frozen=True)
class Done:
    """An operation after an execution. `before`: the indices of those that were done before its first step.

    `now_ns` is the clock reading that it was decided by, 0 if that isn't known; `first_ns` and `last_ns` are the first
    and the last that it had.
    """

    process: int
    begun: bool
    done: bool
    before: frozenset
    allowed: bool
    full: bool
    now_ns: int
    value: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class Explored:
    """The result of an exploration. `trace` is the failed schedule step by step, `replay` walks it again."""

    verdict: str
    executions: int
    states: int
    outcomes: int
    deepest: int
    replay: str
    trace: str
    complaint: str


cdef extern from *:
    """
    /* How many calls may still nest in this thread. A call that is never left, as in an execution that ends in its
       middle, would count for good. */
    #if PY_VERSION_HEX < 0x030C0000
    #define nesting_left() (PyThreadState_Get()->recursion_remaining)
    #define set_nesting_left(left) (PyThreadState_Get()->recursion_remaining = (left))
    #elif PY_VERSION_HEX < 0x030E0000
    #define nesting_left() (PyThreadState_Get()->c_recursion_remaining)
    #define set_nesting_left(left) (PyThreadState_Get()->c_recursion_remaining = (left))
    #else
    #define nesting_left() 0
    #define set_nesting_left(left) ((void)(left))
    #endif
    """
    int nesting_left()
    void set_nesting_left(int left)


cdef Program active = None
cdef int nesting_at_start = 0
cdef ForebayCell[4] litmus


cdef void run_litmus(int index, const Operation* operation) noexcept:
    """One access to a pair of words, of which it is the first."""
    cdef ForebayCell* pair = &litmus[operation.word]
    cdef uint64_t seen = 0
    explore_begin(index, 1)
    if operation.kind == LOAD:
        seen = load_seq_cst(&pair.tag) if operation.strong else load_acquire(&pair.tag)
    elif operation.kind == STORE:
        store_release(&pair.tag, operation.desired)
    elif operation.strong:
        seen = cas128_seq_cst(pair, ForebayCell(operation.expected, 0), ForebayCell(operation.desired, 0))
    else:
        seen = cas128_acq_rel(pair, ForebayCell(operation.expected, 0), ForebayCell(operation.desired, 0))
    explore_end(index, 1, 0, seen)


cdef void run_object(int index, Operation* operation) noexcept:
    """Operations that take Python's objects. None of their steps has Python code on the stack."""
    cdef Verdict verdict
    cdef Attempt[MOST] attempts
    cdef Decision decision
    cdef Lease lease
    cdef bint allowed = False
    cdef uint64_t now_ns = 0, value = 0
    if active.leases is None:
        explore_begin(index, 1)
    else:
        explore_begin_at_step(index)
    if operation.kind == HIT_ALL:
        allowed = (<AllOf>operation.limiter).decide(<object>operation.key, 1, attempts, False)
        now_ns = attempts[0].verdict.now_ns
    elif operation.kind == HIT_ONCE:
        decision = (<CellLimiter>operation.limiter).hit_once(
            <object>operation.key, &operation.charge, <object>operation.request_id, 3600)
        allowed = decision.allowed
    elif operation.kind == HIT_ALL_ONCE:
        decision = (<AllOf>operation.limiter).hit_once(<object>operation.key, 1, <object>operation.request_id, 3600)
        allowed = decision.allowed
    elif operation.kind == HIT_DECISION:
        decision = (<CellLimiter>operation.limiter).decide_once(<object>operation.key, &operation.charge)
        allowed, value = decision.allowed, decision.reset_after_ns
    elif operation.kind == ACQUIRE:
        operation.slot_count = 0
        taken = (<Concurrency>operation.limiter).take(operation.tag, operation.cost, &verdict, &operation.lease)
        if isinstance(taken, list):
            for slot, _ in taken:
                operation.slots[operation.slot_count] = slot
                operation.slot_count += 1
        elif taken is not None:
            operation.slots[0] = taken
            operation.slot_count = 1
        allowed = taken is not None
        now_ns = verdict.now_ns
    elif operation.kind == ACQUIRE_ONCE:
        lease = (<Concurrency>operation.limiter).take_once(
            <object>operation.key, operation.cost, <object>operation.request_id, &verdict)
        active.leases[index] = lease
        allowed = lease.allowed
        now_ns = verdict.now_ns
        value = explore_done()
    elif operation.kind == RESET_SLOTS:
        (<Concurrency>operation.limiter).reset(<object>operation.key)
        allowed = True
    elif operation.kind == REFUND_ONCE:
        (<Concurrency>operation.limiter).refund(
            <object>operation.key, operation.cost, request_id=<object>operation.request_id)
        allowed = True
    elif active.operations[operation.earlier].kind == ACQUIRE_ONCE:
        lease = active.leases[operation.earlier]
        allowed = lease.release() if operation.kind == RELEASE else lease.renew()
    else:
        allowed = undo_or_renew(<Concurrency>operation.limiter, operation, &now_ns)
    explore_end(index, allowed, now_ns, value)


cdef bint undo_or_renew(Concurrency limiter, Operation* operation, uint64_t* now_ns) noexcept:
    """As ``Lease.release`` and ``Lease.renew`` do."""
    cdef Operation* acquired = &active.operations[operation.earlier]
    cdef Slots slots = limiter.slots_of(limiter.table.cells)
    cdef Verdict verdict
    cdef ForebayCell renewed
    cdef bint held = acquired.slot_count > 0
    cdef int i
    if operation.kind == RELEASE:
        for i in range(acquired.slot_count):
            held &= free_slot(&slots, acquired.slots[i], acquired.lease)
        return held
    if not held:
        return False
    renewed = lease_of(acquired.lease.tag, limiter.begin_lease_of(operation.tag, limiter.lease, &verdict))
    now_ns[0] = verdict.now_ns
    if not cas128_acq_rel(&slots.slots[acquired.slots[0]], acquired.lease, renewed):
        return False
    acquired.lease = renewed
    return True


cdef void run_batch(int index, const Operation* operation) noexcept:
    """The part of ``allow_many`` after the keys are hashed to tags."""
    cdef CellLimiter limiter = <CellLimiter>operation.limiter
    cdef uint64_t[EXPLORE_OPERATIONS] tags
    cdef Batch batch
    cdef Events events
    cdef int i
    memset(&batch, 0, sizeof(batch))
    batch.size = operation.cost
    batch.tags = tags
    for i in range(operation.cost):
        tags[i] = active.operations[index + i].tag
    batch.unit = &limiter.unit
    batch.table = &limiter.table
    batch.yes, batch.no = <PyObject*><object>True, <PyObject*><object>False
    batch.counter_line, batch.claim_sequence = limiter.line_here().number, &limiter.line_here().counters.claims
    explore_begin(index, operation.cost)
    limiter.decide_batch(&batch, &events)
    for i in range(operation.cost):
        explore_end(index + i, tags[i] == <uint64_t>batch.yes, 0, 0)


cdef void run_operation(int index) noexcept:
    cdef Operation* operation = &active.operations[index]
    cdef Verdict verdict
    cdef Charge own_charge
    cdef Events events
    cdef CellLimiter limiter
    cdef ForebayLine* line
    if operation.kind == OTHER:
        active.run_other(index)
        return
    if operation.kind >= LOAD:
        run_litmus(index, operation)
        return
    if operation.kind >= HIT_ALL:
        run_object(index, operation)
        return
    if operation.kind == BATCH:
        run_batch(index, operation)
    if operation.kind == BATCH or operation.kind == BATCHED:
        return
    limiter = <CellLimiter>operation.limiter
    verdict.now_ns = verdict.state = 0
    verdict.full = False
    explore_begin(index, 1)
    if operation.kind == HIT:
        allowed = limiter.decide(operation.tag, &operation.charge, &verdict) == ALLOWED
    elif operation.kind == PEEK:
        allowed = limiter.peek_verdict(operation.tag, &operation.charge, &verdict)
    elif operation.kind == REFUND:
        limiter.return_charge(operation.tag, &operation.charge)
        allowed = True
    elif operation.kind == ADD:
        # As `add_permits`.
        events = no_events()
        line = limiter.line_here()
        verdict.now_ns = table_now(&limiter.table)
        table_decide(
            &limiter.table, operation.tag, line.number, &line.counters.claims,
            credits_add if limiter.table.new_may_be_denied else gcra_add, &operation.charge, &verdict, &events)
        allowed = verdict.outcome == ALLOWED
    elif operation.kind == RESERVE:
        allowed = limiter.decide_or_peek(operation.tag, &operation.charge, &verdict)
        operation.left = verdict.state if allowed else 0
        verdict.state = (
            limiter.booked_delay_ns(&operation.charge, &verdict) if allowed
            else limiter.refused_delay_ns(&operation.charge, &verdict))
    elif operation.kind == CANCEL:
        own_charge = operation.charge
        own_charge.charged_state = active.operations[operation.earlier].left
        allowed = own_charge.charged_state != 0
        if allowed:
            limiter.return_charge(operation.tag, &own_charge)
    else:
        events = no_events()
        limiter.forget(operation.tag, &events)
        limiter.count_events(&events)
        allowed = True
    explore_end(index, (YES if allowed else 0) | (FULL if verdict.full else 0), verdict.now_ns, verdict.state)


cdef void run_process(int process) noexcept:
    cdef int i
    set_nesting_left(nesting_at_start)
    for i in range(active.count):
        if active.operations[i].process == process:
            run_operation(i)


cdef int check_members() noexcept:
    """Check the invariant: no key has two members at any time, and the program's own conditions hold."""
    cdef int i, j, found
    cdef const Member* member
    for i in range(active.member_count):
        member = &active.members[i]
        found = 0
        for j in range(CELLS):
            found += member.cells[j].tag == member.tag
        if found > 1:
            return 1 + i
    return active.check_other()


cdef void look_at_end(uint64_t* finals) noexcept:
    """Store the value of each look at the end."""
    cdef int i
    finals[EXPLORE_FINALS - 1] = explore_clock()
    for i in range(len(active.looks)):
        finals[i] = active.looks[i]()


cdef uint64_t segment_ns(uint64_t clock_ns) noexcept:
    return clock_ns - active.epoch_ns if clock_ns else 0


cdef int judge_outcome(const ExploreOperation* operations, int count, const uint64_t* finals) noexcept:
    cdef int i
    done = [
        Done(
            active.operations[i].process, operations[i].state > 0, operations[i].state > 1,
            frozenset(j for j in range(count) if operations[i].before >> j & 1), operations[i].outcome & YES != 0,
            operations[i].outcome & FULL != 0, operations[i].now_ns, operations[i].value,
            segment_ns(operations[i].first_ns), segment_ns(operations[i].last_ns))
        for i in range(count)
    ]
    try:
        complaint = active.judge(
            done, [finals[i] for i in range(len(active.looks))], finals[EXPLORE_FINALS - 1] - active.epoch_ns)
    except BaseException as error:
        complaint = repr(error)
    if complaint:
        active.complaint = str(complaint)
        return 1
    return 0


cdef uint64_t foreign_tag(uint64_t cell) noexcept:
    return (cell + 1) << FOREBAY_KIND_BITS | FOREBAY_KIND_TAT


cdef int foreign_left(CellLimiter limiter, int cells) noexcept:
    cdef int i, left = 0
    for i in range(cells):
        left += limiter.table.cells[i].tag == foreign_tag(i)
    return left


class WatchedOwners:
    """The process identities that a concurrency limiter checks for ended processes."""

    def dead_among(self, owners):
        return {owner for owner in owners if explore_is_killed(owner - 1)}


cdef class Program:
    """The operations of several processes, each one after the other, on limiters of one small table.

    Add operations with `hit`, `refund` and so on, each for a process numbered from 0, then `explore`. The
    limiters' tables are cut down to one group of cells, and of those to `usable` cells: the others hold foreign keys
    that outlast everything. Before and between explorations, the limiters can be used as ever; the time is
    `now_ns` of the segment, and stands still.
    """

    def __init__(self, now_ns=SEGMENT_NS):
        self.held = []
        self.looks = []
        self.leases = None
        self.tables = []
        self.now_ns = now_ns
        explore_forget_memory()

    def adopt(self, CellLimiter limiter, usable=CELLS, foreign_ns=10**18):
        """Watch this limiter's table and words; call it once for each table, before the limiter is used."""
        cdef size_t i, used = usable
        cdef bint watched = True
        # As a worker is after its first decision.
        limiter.ensure_attached()
        limiter.table.group_count = 1
        limiter.segment.table.group_count = 1
        limiter.params.phase_ns = 0
        self.epoch_ns = limiter.table.epoch_ns
        explore_set_clock(limiter.table.epoch_ns + self.now_ns)
        if <size_t>limiter.table.cells not in self.tables:
            self.tables.append(<size_t>limiter.table.cells)
            for i in range(used, CELLS):
                self.foreign(limiter, i, foreign_ns + i)
            watched = explore_share(limiter.table.cells, CELLS * sizeof(ForebayCell), b"cells")
            if limiter.params.records != NULL:
                watched = watched and explore_share(
                    limiter.params.records, limiter.params.words_per_cell * <size_t>usable * 8, b"words")
        watched = watched and explore_put_back(limiter.line_here().counters, sizeof(ForebayCounterLine))
        if not watched:
            raise ValueError("more memory than the explorer can watch: take a smaller limit")
        self.held.append(limiter)

    def foreign(self, CellLimiter limiter, cell, state):
        """Put another key's member in a cell, with this state: the cell is vacant once the time in the state has come.
        """
        limiter.table.cells[<size_t>cell].tag = foreign_tag(cell)
        limiter.table.cells[<size_t>cell].state = state

    def move_clock(self, now_ns):
        """Set the time at which the program begins."""
        self.now_ns = now_ns
        explore_set_clock(self.epoch_ns + <uint64_t>now_ns)

    def look_for_foreign(self, CellLimiter limiter, cells):
        """How many of the first `cells` cells still hold the key that `foreign` put there: a number for `judge`."""
        self.look(lambda: foreign_left(limiter, cells))

    def key(self, CellLimiter limiter, line=0, number=0):
        """The `number`-th key with this home line: so schedules are the same whatever the segment's hash key."""
        cdef ForebayCell* home = limiter.table.cells + <size_t>line * FOREBAY_CELLS_PER_LINE
        for i in itertools.count():
            key = f"key:{i}"
            if home_line(&limiter.table, limiter.tag_of(key)) == home:
                if number == 0:
                    return key
                number -= 1

    cdef Operation* add(self, int process, Kind kind, CellLimiter limiter, key, cost) except NULL:
        cdef Operation* operation = self.next_operation(process, kind)
        operation.limiter = <void*>limiter
        operation.tag = limiter.tag_of(key)
        self.has_one(limiter.table.cells, operation.tag)
        limiter.charge_for(cost, &limiter.params, &operation.charge)
        return operation

    cdef int has_one(self, const ForebayCell* cells, uint64_t tag) except -1:
        """Of this key there may never be two members."""
        for i in range(self.member_count):
            if self.members[i].cells == cells and self.members[i].tag == tag:
                return 0
        if self.member_count == EXPLORE_OPERATIONS:
            raise ValueError("too many keys")
        self.members[self.member_count].cells = cells
        self.members[self.member_count].tag = tag
        self.member_count += 1
        return 0

    cdef Operation* next_operation(self, int process, Kind kind) except NULL:
        cdef Operation* operation = &self.operations[self.count]
        if self.count == EXPLORE_OPERATIONS or process >= EXPLORE_PROCESSES:
            raise ValueError("too many operations or processes")
        operation.process = process
        operation.kind = kind
        operation.limiter = NULL
        self.processes = max(self.processes, process + 1)
        self.count += 1
        return operation

    def hit(self, process, CellLimiter limiter, key, cost=1):
        self.add(process, HIT, limiter, key, cost)

    def refund(self, process, CellLimiter limiter, key, cost=1):
        self.add(process, REFUND, limiter, key, cost)

    def top_up(self, process, CellLimiter limiter, key, permits=1):
        """``TokenBucket.add``, ``Credits.add``."""
        self.add(process, ADD, limiter, key, 0).charge.amount = permits

    def peek(self, process, CellLimiter limiter, key, cost=1):
        self.add(process, PEEK, limiter, key, cost)

    def reset(self, process, CellLimiter limiter, key):
        self.add(process, RESET, limiter, key, 1)

    def reserve(self, process, CellLimiter limiter, key, max_wait_ns, cost=1):
        """``reserve`` with a longest delay; its number, for `cancel`. Its value in the end is the delay."""
        cdef Operation* operation = self.add(process, RESERVE, limiter, key, cost)
        limiter.allow_wait(&operation.charge, max_wait_ns)
        return self.count - 1

    def cancel(self, process, CellLimiter limiter, key, reserved, cost=1):
        self.add(process, CANCEL, limiter, key, cost).earlier = reserved

    def batch(self, process, CellLimiter limiter, keys):
        """``allow_many``: an operation for each of the keys, which begin and end together."""
        for number, key in enumerate(keys):
            self.add(process, BATCHED if number else BATCH, limiter, key, 1).cost = len(keys)

    def hit_all(self, process, AllOf limits, key):
        """``AllOf.allow``. Each of its limiters must have been adopted."""
        cdef CellLimiter part
        self.held.append((limits, key))
        for part, its_key in zip(limits.limiters, key):
            self.has_one(part.table.cells, part.tag_of(its_key))
        cdef Operation* operation = self.next_operation(process, HIT_ALL)
        operation.limiter, operation.key = <void*>limits, <void*>key

    def hit_once(self, process, CellLimiter limiter, key):
        """``hit`` with a request id, always the same: one whose mark has the last home line."""
        cdef Operation* operation = self.next_operation(process, HIT_ONCE)
        cdef uint64_t number = 0, mark
        limiter.charge_for(1, &limiter.params, &operation.charge)
        while True:
            mark = mark_tag_of(limiter, key, number, operation.charge.amount)
            if home_line(&limiter.table, mark) == &limiter.table.cells[CELLS - FOREBAY_CELLS_PER_LINE]:
                break
            number += 1
        self.has_one(limiter.table.cells, limiter.tag_of(key))
        self.has_one(limiter.table.cells, mark)
        cdef object request_id = number
        self.held.append((limiter, key, request_id))
        operation.limiter, operation.key, operation.request_id = <void*>limiter, <void*>key, <void*>request_id

    def hit_all_once(self, process, AllOf limits, keys):
        """``AllOf.hit`` with a request id, as ``hit_once``. Each of its limiters must have been adopted."""
        cdef Attempt[MOST] attempts
        cdef CellLimiter part = limits.limiters[0]
        cdef Operation* operation = self.next_operation(process, HIT_ALL_ONCE)
        cdef uint64_t number = 0, mark
        limits.begin_attempts(keys, 1, attempts)
        while True:
            mark = limits.mark_of(number, attempts)
            if home_line(&part.table, mark) == &part.table.cells[CELLS - FOREBAY_CELLS_PER_LINE]:
                break
            number += 1
        self.has_one(part.table.cells, mark)
        for part, its_key in zip(limits.limiters, keys):
            self.has_one(part.table.cells, part.tag_of(its_key))
        cdef object request_id = number
        self.held.append((limits, keys, request_id))
        operation.limiter, operation.key, operation.request_id = <void*>limits, <void*>keys, <void*>request_id

    def hit_decision(self, process, CellLimiter limiter, key, cost=1):
        """``hit``; its value in the end is the decision's ``reset_after_ns``."""
        cdef Operation* operation = self.add(process, HIT_DECISION, limiter, key, cost)
        self.held.append(key)
        operation.key = <void*>key

    def adopt_slots(self, list limiters, key):
        """Watch one concurrency limit, which each process has as an object of its own, and one key of it."""
        cdef Concurrency first = limiters[0], limiter
        cdef int i
        cdef bint watched
        first.ensure_attached()
        first.table.group_count = 1
        self.epoch_ns = first.table.epoch_ns
        explore_set_clock(first.table.epoch_ns + self.now_ns)
        # The key's own cell comes first, so its slots are the first words.
        first.table.cells[0].tag = first.tag_of(key)
        first.table.cells[0].state = self.now_ns + 2 * first.lease
        for i in range(1, CELLS):
            first.table.cells[i].tag = (<uint64_t>i + 1) << FOREBAY_KIND_BITS | FOREBAY_KIND_TAT
            first.table.cells[i].state = 10**18
        watched = explore_share(first.table.cells, CELLS * sizeof(ForebayCell), b"cells")
        watched = watched and explore_share(first.records.words, first.records.words_per_cell * 8, b"words")
        for i, other in enumerate(limiters):
            limiter = other
            limiter.ensure_attached()
            limiter.table, limiter.records = first.table, first.records
            limiter.me = i + 1
            limiter.my_forks = limiter.segment.forks[0]
            limiter.owners = WatchedOwners()
            memset(limiter.search.hints, 0, sizeof(limiter.search.hints))
            watched = watched and explore_put_back(&limiter.search, sizeof(limiter.search))
            watched = watched and explore_put_back(&limiter.watch_again_ns, sizeof(limiter.watch_again_ns))
            watched = watched and explore_put_back(limiter.line_here().counters, sizeof(ForebayCounterLine))
        if not watched:
            raise ValueError("more memory than the explorer can watch: take a smaller limit")
        self.held.append(limiters)

    def acquire(self, process, Concurrency limiter, key, cost=1):
        """``Concurrency.acquire``; its number, for `release` and `renew`."""
        cdef Operation* operation = self.next_operation(process, ACQUIRE)
        if cost > MOST_SLOTS:
            raise ValueError("too many slots")
        operation.limiter = <void*>limiter
        operation.tag = limiter.tag_of(key)
        operation.cost = cost
        self.has_one(limiter.table.cells, operation.tag)
        return self.count - 1

    def adopt_marks(self, Concurrency limiter):
        """Watch the marks of requests with an id, after `adopt_slots`. One line has room for them."""
        cdef ForebayCell* cells = limiter.segment.table.cells
        limiter.segment.table.group_count = 1
        for i in range(FOREBAY_CELLS_PER_LINE, CELLS):
            cells[<int>i].tag = foreign_tag(i)
            cells[<int>i].state = 10**18
        if not explore_share(cells, CELLS * sizeof(ForebayCell), b"marks"):
            raise ValueError("more memory than the explorer can watch")
        self.leases = {}
        # Which process draws which number makes no difference: no two are the same.
        explore_put_back(&ends_drawn, sizeof(ends_drawn))

    def request_id(self, Concurrency limiter, key, cost):
        """An id whose mark has the first home line."""
        cdef uint64_t mark
        for number in itertools.count():
            mark = mark_tag_of(limiter, key, number, cost)
            if home_line(&limiter.segment.table, mark) == limiter.segment.table.cells:
                self.has_one(limiter.segment.table.cells, mark)
                return number

    def acquire_once(self, process, Concurrency limiter, key, cost, request_id):
        """``Concurrency.acquire`` with a request id; its number, for `release` and `renew`.

        Its value in the end has bit i if operation i was done before it ended.
        """
        cdef Operation* operation = self.next_operation(process, ACQUIRE_ONCE)
        self.held.append((key, request_id))
        operation.limiter, operation.key, operation.request_id = <void*>limiter, <void*>key, <void*>request_id
        operation.tag = limiter.tag_of(key)
        operation.cost = cost
        self.has_one(limiter.table.cells, operation.tag)
        return self.count - 1

    def reset_slots(self, process, Concurrency limiter, key):
        """``Concurrency.reset``."""
        cdef Operation* operation = self.next_operation(process, RESET_SLOTS)
        self.held.append(key)
        operation.limiter, operation.key = <void*>limiter, <void*>key

    def refund_once(self, process, Concurrency limiter, key, cost, request_id):
        """``Concurrency.refund`` with a request id."""
        cdef Operation* operation = self.next_operation(process, REFUND_ONCE)
        self.held.append((key, request_id))
        operation.limiter, operation.key, operation.request_id = <void*>limiter, <void*>key, <void*>request_id
        operation.cost = cost

    def release(self, process, Concurrency limiter, acquired):
        cdef Operation* operation = self.next_operation(process, RELEASE)
        operation.limiter, operation.earlier = <void*>limiter, acquired

    def renew(self, process, Concurrency limiter, acquired):
        cdef Operation* operation = self.next_operation(process, RENEW)
        operation.limiter, operation.earlier = <void*>limiter, acquired
        operation.tag = self.operations[<int>acquired].tag

    cdef void run_other(self, int index) noexcept:
        pass

    cdef int check_other(self) noexcept:
        return 0

    def litmus(self, process, kind, word, expected=0, desired=1, strong=False):
        """One access of a litmus test, to one of four words that are 0: "load", "store" or "swap" if `expected`.

        Its value in the end is what it has read, or whether it has swapped.
        """
        cdef Operation* operation = self.next_operation(process, {"load": LOAD, "store": STORE, "swap": SWAP}[kind])
        operation.word, operation.expected, operation.desired, operation.strong = word, expected, desired, strong
        if not self.tables:
            self.tables.append(<size_t>litmus)
            memset(litmus, 0, sizeof(litmus))
            explore_share(litmus, sizeof(litmus), b"litmus")

    def look(self, look):
        """Call this at the end of each execution, for a number that `judge` gets. Its writes are undone."""
        if len(self.looks) == EXPLORE_FINALS - 1:
            raise ValueError("too many looks")
        self.looks.append(look)

    def look_at(self, limiter, key):
        """The key's remaining permits, in the same way."""
        self.look(lambda: limiter.peek(key).remaining)

    cdef ExploreBounds bounds(
        self, preemptions, crashes, stale_reads, clock_moves, jumps_ns, tick_ns, only_reads, steps_alone,
        most_executions,
    ) except *:
        cdef ExploreBounds bounds
        bounds.processes = self.processes
        bounds.operations = self.count
        bounds.preemptions = EXPLORE_UNLIMITED if preemptions is None else preemptions
        bounds.crashes = crashes
        bounds.stale_reads = stale_reads
        bounds.clock_moves = clock_moves
        bounds.jumps = len(jumps_ns)
        for i, jump_ns in enumerate(jumps_ns):
            bounds.jumps_ns[i] = jump_ns
        bounds.tick_ns = tick_ns
        bounds.only_reads = only_reads
        bounds.steps_alone = steps_alone
        bounds.most_executions = most_executions
        return bounds

    def explore(
        self, judge, *, preemptions=None, crashes=0, stale_reads=0, clock_moves=0, jumps_ns=(), tick_ns=0,
        only_reads=False, steps_alone=1000, most_executions=10**12, planted=0, replay="",
    ):
        """Walk every schedule within the bounds: an `Explored`. Stops at the first that fails.

        `judge` gets the operations, as a list of `Done`, what the looks saw in the end, and the time then; what it
        returns is a complaint. It is called once for each outcome that differs. `preemptions` None is as many as there
        can be. With `only_reads`, whatever writes to the limiters' memory has failed. With `replay`, only that
        schedule.
        """
        global active, explore_planted, nesting_at_start
        cdef ExploreProgram program
        cdef ExploreBounds bounds = self.bounds(
            preemptions, crashes, stale_reads, clock_moves, jumps_ns, tick_ns, only_reads, steps_alone,
            most_executions)
        cdef ExploreResult result
        cdef const uint8_t* decisions
        cdef const uint8_t* steps
        cdef size_t decided, words
        cdef bytes given, given_steps
        program.run = run_process
        program.invariant = check_members
        program.finals = look_at_end
        program.judge = judge_outcome
        self.judge = judge
        self.complaint = ""
        active = self
        nesting_at_start = nesting_left()
        explore_planted = planted
        try:
            if replay:
                given_steps, given = [bytes.fromhex(part) for part in replay.split(":")]
                result = explore_again(&program, &bounds, given, len(given), given_steps)
            else:
                result = explore_all(&program, &bounds)
            trace = ""
            replay = ""
            executions, states, outcomes, deepest = result.executions, result.states, result.outcomes, result.deepest
            verdict = VERDICTS[result.verdict]
            if result.verdict > 1:
                decided = explore_decisions(&decisions, &steps, &words)
                given_steps, given = steps[:words], decisions[:decided]
                replay = given_steps.hex() + ":" + given.hex()
                complaint = self.complaint
                result = explore_again(&program, &bounds, given, len(given), given_steps)
                trace = explore_trace().decode()
                self.complaint = complaint
        finally:
            set_nesting_left(nesting_at_start)
            explore_planted = 0
            active = None
        return Explored(verdict, executions, states, outcomes, deepest, replay, trace, self.complaint)
