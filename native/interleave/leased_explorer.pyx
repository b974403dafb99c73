"""Programs of leased permits for the interleaving explorer: hosts, each with a table, and a server that lends to them.

The steps of a fetch are `Permits`' own. forebay/redis/leased/fetch.py puts them together, but it can't run in a
coroutine of the explorer. So `run_allow`, `run_refund` and `run_withdraw` go through the same steps in the same order.
The server acts as scripts/lease_bucket.lua and lease_window.lua do, for one key and with whole nanoseconds. Each call
is one step, as Redis runs scripts one after the other.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from forebay.core.algorithms.counts cimport FRACTION_BITS, low_of, time_of
from forebay.core.explorer cimport (
    EXPLORE_OPERATIONS, OTHER, YES, Operation, Program, explore_begin, explore_call, explore_clock, explore_end,
    explore_put_back, explore_set_clock, explore_share,
)
from forebay.core.lease_steps cimport LeaseCharge
from forebay.core.leased cimport Permits
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_LINES_PER_GROUP, ForebayCell, ForebayCounterLine, load_acquire, store_release,
)
from forebay.core.table.table cimport ALLOWED, Events, Verdict, home_line, table_remove

import itertools


cdef enum:
    BUSY = 1                     # of `enter`
    HOSTS = 2
    CELLS = 16
    OVERTAKEN = 2
    UNKNOWN = 31
    # The flags of a fetch slot.
    FETCHING = 1 << 16
    WAITED = 1 << 15


cdef enum What:
    ALLOW                        # from the lease, or else from the server
    IN_TURN                      # as that; it has waited for long
    SPEND                        # from the lease only
    WITHDRAW                     # and give back
    REFUND
    FORGIVE                      # enter the fetch slot and leave it
    RESET                        # at the server and on the host
    LOSE                         # the lease's cell goes to another key; with a cost, the fetch slot's, too
    EMPTY                        # the server comes back with nothing but so many permits that have been spent
    DELIVER                      # a request that was late


cdef enum Fate:
    ANSWERED
    REQUEST_LOST
    REPLY_LOST
    REQUEST_LATE                 # the process that has sent it doesn't wait


# Bits of an operation's value: its outcome. The bits above these: the permits granted.
cpdef enum Said:
    ENTERED = 1                  # the fetch slot
    BEGUN = 2
    ANSWER = 4                   # of the server
    LATER = 8                    # the server had heard of a later step
    NOT_HELD = 16                # the fetch slot isn't as it was left
    DEPOSITED = 32
    BY_DEPOSIT = 64              # served by it
    FOUND_BUSY = 128             # the fetch slot
    REQUESTED = 256              # a turn at it, or another process had
    GRANTED = 512                # times what was granted


cdef struct Request:
    What what                    # ALLOW: borrow
    int host
    uint64_t stamp_us
    int64_t left
    uint64_t unspent
    uint64_t need
    uint64_t want
    uint64_t undone
    uint64_t window_ns           # of what is given back


cdef struct Reply:
    int status
    uint64_t granted
    uint64_t left_ns
    uint64_t retry_ns
    uint64_t dropped
    uint64_t now_ns


cdef struct Act:
    What what
    Fate fate
    int host
    uint64_t cost
    int earlier                  # which one's request is delivered
    Request request


cdef struct Loan:
    uint64_t permits
    uint64_t ends_ns
    uint64_t stamp_us
    uint64_t is_known


# The server's state of the key.
cdef struct Lent:
    uint64_t tat_ns              # of a window: its end
    uint64_t used                # of a window
    Loan[HOSTS] loans


cdef struct Called:
    Request* request
    Reply* reply


cdef LeasedProgram serving = None
cdef Lent server
cdef uint64_t[EXPLORE_OPERATIONS] sent


cdef uint64_t on_loan(const Lent* lent) noexcept:
    return lent.loans[0].permits + lent.loans[1].permits


cdef void move_on(Lent* lent, uint64_t now_ns) noexcept:
    cdef uint64_t unit_ns = serving.unit_ns
    cdef Loan* first
    cdef int i
    while True:
        first = NULL
        for i in range(HOSTS):
            if lent.loans[i].is_known and lent.loans[i].ends_ns <= now_ns and (
                first == NULL or lent.loans[i].ends_ns < first.ends_ns
            ):
                first = &lent.loans[i]
        if first == NULL:
            break
        lent.tat_ns = max(lent.tat_ns, first.ends_ns + unit_ns * on_loan(lent))
        memset(first, 0, sizeof(first[0]))
    lent.tat_ns = max(lent.tat_ns, now_ns + unit_ns * on_loan(lent))


cdef void take_back(Lent* lent, uint64_t permits, uint64_t now_ns) noexcept:
    lent.tat_ns = max(
        lent.tat_ns - min(serving.unit_ns * permits, lent.tat_ns), now_ns + serving.unit_ns * on_loan(lent))


cdef uint64_t bucket_room(const Lent* lent, uint64_t now_ns) noexcept:
    cdef uint64_t ahead_ns = lent.tat_ns - now_ns
    cdef uint64_t most_ns = serving.limit * serving.unit_ns
    return (most_ns - ahead_ns) // serving.unit_ns if ahead_ns < most_ns else 0


cdef void answer_of_bucket(Lent* lent, const Request* request, Reply* reply, uint64_t now_ns) noexcept:
    """scripts/lease_bucket.lua."""
    cdef Loan* loan = &lent.loans[request.host]
    cdef Loan own = loan[0]
    cdef uint64_t left, need = request.need, want = request.want
    move_on(lent, now_ns)
    own = loan[0]
    if own.is_known and request.stamp_us <= own.stamp_us:
        take_back(lent, request.undone, now_ns)
        reply.status = OVERTAKEN
        return
    if not own.is_known:
        own.ends_ns = now_ns + serving.lease_ns
    own.stamp_us = request.stamp_us
    if request.left >= 0:
        left = request.left
        reply.dropped = left - min(left, own.permits)
        left -= reply.dropped
        need = need + reply.dropped if need > 0 else 0
        want = max(want, need)
        loan.permits = left
        take_back(lent, min(request.unspent, own.permits - left), now_ns)
        own.permits = left
    take_back(lent, request.undone, now_ns)
    reply.granted = min(want, bucket_room(lent, now_ns))
    if reply.granted < need:
        reply.granted = 0
    if reply.granted > 0:
        lent.tat_ns += serving.unit_ns * reply.granted
        own.permits += reply.granted
        own.ends_ns = now_ns + serving.lease_ns
    own.is_known = own.permits > 0
    loan[0] = own
    if not own.is_known:
        memset(loan, 0, sizeof(own))
    reply.status = reply.granted > 0
    reply.left_ns = own.ends_ns - now_ns
    reply.retry_ns = serving.unit_ns


cdef void open_window(Lent* lent, uint64_t now_ns) noexcept:
    if lent.tat_ns <= now_ns:
        lent.tat_ns = now_ns + serving.period_ns - now_ns % serving.period_ns
        lent.used = 0


cdef void answer_of_window(Lent* lent, const Request* request, Reply* reply, uint64_t now_ns) noexcept:
    """scripts/lease_window.lua; and decide.lua's "cancel" for what is given back."""
    open_window(lent, now_ns)
    reply.left_ns = reply.retry_ns = lent.tat_ns - now_ns
    if request.what == WITHDRAW:
        if request.window_ns == lent.tat_ns:
            lent.used -= min(request.unspent, lent.used)
        return
    reply.granted = min(request.want, serving.limit - lent.used)
    if reply.granted < request.need:
        reply.granted = 0
    lent.used += reply.granted
    reply.status = reply.granted > 0


cdef void answer(uint64_t* values, void* context) noexcept:
    cdef Called* called = <Called*>context
    cdef Lent* lent = <Lent*>values
    cdef uint64_t now_ns = explore_clock() - serving.epoch_ns
    memset(called.reply, 0, sizeof(called.reply[0]))
    called.reply.now_ns = now_ns
    if called.request.what == EMPTY:
        memset(lent, 0, sizeof(lent[0]))
        lent.tat_ns = now_ns + serving.unit_ns * called.request.need
    elif serving.period_ns:
        answer_of_window(lent, called.request, called.reply, now_ns)
    else:
        answer_of_bucket(lent, called.request, called.reply, now_ns)


cdef void call(Request* request, Reply* reply) noexcept:
    cdef Called called = Called(request, reply)
    if serving.travels:
        # A request takes time on its way to the server.
        explore_clock()
    explore_call(<uint64_t*>&server, sizeof(server) // 8, answer, &called)


cdef bint ask(int index, Act* act, Reply* reply) noexcept:
    """Whether an answer came in time."""
    act.request.host = act.host
    if act.fate == REQUEST_LATE:
        store_release(&sent[index], 1)
    elif act.fate != REQUEST_LOST:
        call(&act.request, reply)
    return act.fate == ANSWERED


cdef bint spent(Permits permits, uint64_t tag, uint64_t cost, uint64_t* now_ns) noexcept:
    cdef Verdict verdict
    cdef LeaseCharge charge = permits.unit
    charge.amount = cost
    if permits.spend_now(tag, &charge, &verdict) != ALLOWED:
        return False
    now_ns[0] = verdict.now_ns
    return True


cdef uint64_t fetched(
    int index, Act* act, Permits permits, uint64_t tag, uint64_t seen, uint64_t size, uint64_t* granted_ns
) noexcept:
    """As `fetched` of redis/leased/fetch.py; its outcome, and the time of a grant."""
    cdef Reply reply
    cdef Request* request = &act.request
    cdef uint64_t generation, now_ns, end_ns, said = ENTERED | BEGUN, closed_until_ns = 0, closed_for = 0
    cdef uint64_t wanted_size = 0 if size == UNKNOWN else size
    cdef bint settles = True
    begun = permits.begin(tag)
    generation, now_ns, request.stamp_us = begun[0], begun[1], begun[2]
    request.left, request.unspent = begun[3], begun[4]
    begun = None
    request.what = ALLOW
    request.need = max(<int64_t>act.cost - max(request.left, 0), 1)
    request.want = max(
        <int64_t>act.cost, <int64_t>min(<uint64_t>1 << wanted_size, serving.most_on_loan) - max(request.left, 0))
    request.undone = 0
    size = UNKNOWN
    memset(&reply, 0, sizeof(reply))
    if not ask(index, act, &reply):
        reply.dropped = 0
    elif reply.status == OVERTAKEN:
        said |= ANSWER | LATER
    elif reply.granted == 0:
        said |= ANSWER
        size = wanted_size
        closed_until_ns, closed_for = permits.now_ns() + reply.retry_ns, act.cost
    else:
        said |= ANSWER | reply.granted * GRANTED
        granted_ns[0] = reply.now_ns
        if reply.granted < request.want:
            closed_until_ns, closed_for = permits.now_ns() + reply.retry_ns, 1
        end_ns = now_ns + reply.left_ns
        if not permits.holds(tag, seen):
            said |= NOT_HELD
            settles = False
        else:
            deposited, served = permits.deposit(tag, generation, reply.granted, end_ns, act.cost, reply.dropped)
            if deposited:
                settles = False
                size = wanted_size
                said |= DEPOSITED | (BY_DEPOSIT if served else 0)
    if settles:
        permits.abort(tag, generation, reply.dropped)
    permits.leave(tag, seen, size, closed_until_ns, closed_for)
    return said


cdef void run_allow(int index, Act* act, Permits permits, uint64_t tag) noexcept:
    cdef uint64_t seen, size, said = 0, now_ns = 0
    cdef bint served = spent(permits, tag, act.cost, &now_ns)
    cdef int slot
    if not served and act.what != SPEND:
        entered = permits.enter(tag, act.cost, act.what == IN_TURN)
        slot, seen, size = entered[0], entered[2], entered[3]
        entered = None
        if slot == 0:
            said = ENTERED
            served = spent(permits, tag, act.cost, &now_ns)
            if served:
                permits.leave(tag, seen, UNKNOWN)
            else:
                said = fetched(index, act, permits, tag, seen, size, &now_ns)
                served = said & BY_DEPOSIT != 0
        elif slot == BUSY:
            said = FOUND_BUSY
            # In the step by which it has found that out, or brought it about.
            if act.what == IN_TURN and serving.slot_now(act.host) & (FETCHING | WAITED) == FETCHING | WAITED:
                said |= REQUESTED
    explore_end(index, YES if served else 0, now_ns, said)


cdef void run_refund(int index, Act* act, Permits permits, uint64_t tag) noexcept:
    """As `reported`: a refund that finds the fetch slot busy for too long goes on without it."""
    cdef Reply reply
    cdef uint64_t generation, seen, size, said = BEGUN
    entered = permits.enter(tag, 0)
    seen, size = entered[2], entered[3]
    entered = None
    begun = permits.begin(tag)
    generation = begun[0]
    act.request.stamp_us, act.request.left, act.request.unspent = begun[2], begun[3], begun[4]
    begun = None
    act.request.what = REFUND
    act.request.need = act.request.want = 0
    act.request.undone = act.cost
    memset(&reply, 0, sizeof(reply))
    if ask(index, act, &reply):
        said |= ANSWER | (LATER if reply.status == OVERTAKEN else 0)
    else:
        reply.dropped = 0
    permits.abort(tag, generation, reply.dropped)
    if seen:
        said |= ENTERED
        permits.leave(tag, seen, size)
    explore_end(index, YES, 0, said)


cdef void run_withdraw(int index, Act* act, Permits permits, uint64_t tag) noexcept:
    """As `Holdings.unused`, of what was lent before the program began."""
    cdef Reply reply
    cdef Request* request = &act.request
    cdef uint64_t end_ns = permits.left(tag)[1]
    cdef bint gave = False
    if end_ns == serving.lent_until_ns[act.host]:
        withdrawn = permits.withdraw(tag)
        if withdrawn is not None:
            request.stamp_us, request.unspent = withdrawn[0], withdrawn[1]
            withdrawn = None
            request.what = WITHDRAW
            request.left = 0
            request.need = request.want = request.undone = 0
            request.window_ns = serving.window_ns
            ask(index, act, &reply)
            gave = True
    explore_end(index, YES if gave else 0, 0, 0)


cdef void run_act(int index) noexcept:
    cdef Act* act = &serving.acts[index]
    cdef Permits permits = <Permits>serving.hosts[act.host]
    cdef uint64_t tag = serving.tags[act.host]
    cdef Reply reply
    cdef Events events
    explore_begin(index, 1)
    if act.what == ALLOW or act.what == IN_TURN or act.what == SPEND:
        run_allow(index, act, permits, tag)
        return
    if act.what == REFUND:
        run_refund(index, act, permits, tag)
        return
    if act.what == WITHDRAW:
        run_withdraw(index, act, permits, tag)
        return
    act.request.what = EMPTY
    act.request.need = 0
    if act.what == DELIVER:
        if load_acquire(&sent[act.earlier]):
            call(&serving.acts[act.earlier].request, &reply)
    elif act.what == FORGIVE:
        entered = permits.enter(tag, 0)
        if entered[2]:
            permits.leave(tag, entered[2], entered[3])
    elif act.what == LOSE:
        table_remove(&permits.table, tag, &events)
        if act.cost:
            table_remove(&permits.table, permits.fetch_slot_of(tag), &events)
    elif act.what == RESET:
        call(&act.request, &reply)
        permits.forget(tag)
    else:
        act.request.need = act.cost
        call(&act.request, &reply)
    explore_end(index, YES, 0, 0)


cdef class LeasedProgram(Program):
    """The operations of the processes of up to two hosts on one key's permits, which a server lends.

    `limit` permits, refilled one by one each `unit_ns`, or with a `period_ns` all at the end of each window.
    """

    cdef Act[EXPLORE_OPERATIONS] acts
    cdef void* hosts[HOSTS]
    cdef uint64_t[HOSTS] tags
    cdef uint64_t[HOSTS] lent_until_ns
    cdef int host_count
    cdef uint64_t limit
    cdef uint64_t unit_ns
    cdef uint64_t period_ns
    cdef uint64_t lease_ns
    cdef uint64_t window_ns
    cdef uint64_t most_on_loan
    cdef readonly bint travels
    cdef bint is_strict

    def __init__(self, limit, unit_ns, period_ns, lease_ns, most_on_loan, **options):
        """As `Program`."""
        global serving
        Program.__init__(self, **options)
        self.limit, self.unit_ns, self.period_ns, self.lease_ns = limit, unit_ns, period_ns, lease_ns
        self.most_on_loan = most_on_loan
        self.window_ns = self.now_ns + period_ns - self.now_ns % period_ns if period_ns else 0
        self.is_strict = True
        memset(&server, 0, sizeof(server))
        memset(sent, 0, sizeof(sent))
        serving = self
        explore_share(&server, sizeof(server), b"server")
        explore_share(sent, sizeof(sent), b"sent")

    def adopt_host(self, Permits permits):
        """Watch this host's table. Returns the number of the host."""
        cdef int host = self.host_count
        permits.ensure_attached()
        permits.table.group_count = 1
        if host == 0:
            self.epoch_ns = permits.table.epoch_ns
            explore_set_clock(self.epoch_ns + self.now_ns)
        permits.table.epoch_ns = self.epoch_ns
        if CELLS != FOREBAY_CELLS_PER_LINE * FOREBAY_LINES_PER_GROUP or host == HOSTS or not (
            explore_share(permits.table.cells, CELLS * sizeof(ForebayCell), b"cells" if host == 0 else b"others")
            and explore_put_back(permits.line_here().counters, sizeof(ForebayCounterLine))
        ):
            raise ValueError("more than the explorer can watch")
        self.held.append(permits)
        self.hosts[host] = <void*>permits
        self.tags[host] = self.tag_of(permits)
        self.has_one(permits.table.cells, self.tags[host])
        self.has_one(permits.table.cells, permits.fetch_slot_of(self.tags[host]))
        self.host_count += 1
        return host

    cdef uint64_t tag_of(self, Permits permits) except 0:
        """Of some key of which the lease's home is the first line, and the fetch slot's the second."""
        cdef uint64_t tag
        for i in itertools.count():
            tag = permits.tag(f"key:{i}")
            if home_line(&permits.table, tag) == permits.table.cells and (
                home_line(&permits.table, permits.fetch_slot_of(tag)) == permits.table.cells + FOREBAY_CELLS_PER_LINE
            ):
                return tag

    def lend(self, host, permits, size=1):
        """Before the program begins: a lease, and a fetch slot that is open."""
        cdef Permits its = <Permits>self.hosts[<int>host]
        cdef uint64_t tag = self.tags[<int>host]
        cdef Request request
        cdef Reply reply
        _, _, seen, _ = its.enter(tag, 1)
        generation, now_ns, _, left, *_ = its.begin(tag)
        request.what, request.host, request.stamp_us, request.left = ALLOW, host, 0, left
        request.unspent = request.undone = 0
        request.need = request.want = permits
        call(&request, &reply)
        its.deposit(tag, generation, reply.granted, now_ns + reply.left_ns, 0)
        its.leave(tag, seen, size)
        self.lent_until_ns[<int>host] = its.left(tag)[1]

    def open_fetch_slot(self, host, size=1):
        """Before the program begins: a fetch slot that is open, and no lease."""
        cdef Permits its = <Permits>self.hosts[<int>host]
        its.leave(self.tags[<int>host], its.enter(self.tags[<int>host], 1)[2], size)

    def use_up(self, permits):
        """Before the program begins: at the server, so many have been spent."""
        server.tat_ns = self.now_ns + self.unit_ns * <uint64_t>permits
        server.used = permits
        if self.period_ns:
            server.tat_ns = self.window_ns

    def act(self, process, what, host, cost, fate="answered", earlier=0):
        cdef int index = self.count
        cdef Operation* operation = self.next_operation(process, OTHER)
        cdef Act* act = &self.acts[index]
        operation.tag = self.tags[<int>host]
        act.what = {
            "allow": ALLOW, "allow in turn": IN_TURN, "spend": SPEND, "withdraw": WITHDRAW, "refund": REFUND,
            "forgive": FORGIVE, "reset": RESET, "lose": LOSE, "empty": EMPTY, "deliver": DELIVER,
        }[what]
        act.fate = {
            "answered": ANSWERED, "request lost": REQUEST_LOST, "reply lost": REPLY_LOST, "late": REQUEST_LATE,
        }[fate]
        act.host, act.cost, act.earlier = host, cost, earlier
        return index

    def expect(self, *, travels, is_strict):
        """`travels`: the clock is read on the way to the server. `is_strict`: no host ever has what isn't on loan."""
        self.travels, self.is_strict = travels, is_strict

    cdef void run_other(self, int index) noexcept:
        run_act(index)

    cdef uint64_t state_of(self, int host) noexcept:
        cdef Permits permits = <Permits>self.hosts[host]
        cdef int i
        for i in range(CELLS):
            if permits.table.cells[i].tag == self.tags[host]:
                return permits.table.cells[i].state
        return 0

    cdef uint64_t left_of(self, int host, uint64_t now_ns) noexcept:
        """The permits that can be spent now."""
        cdef Permits permits = <Permits>self.hosts[host]
        cdef uint64_t state = self.state_of(host)
        if time_of(state, permits.unit.low_bits) - now_ns - 1 >= permits.unit.longest_ns:
            return 0
        return low_of(state, permits.unit.permit_bits)

    cdef uint64_t loan_of(self, int host, uint64_t now_ns) noexcept:
        cdef Loan* loan = &server.loans[host]
        return loan.permits if loan.is_known and loan.ends_ns > now_ns else 0

    cdef uint64_t room_at(self, uint64_t now_ns) noexcept:
        cdef Lent lent = server
        if self.period_ns:
            open_window(&lent, now_ns)
            return self.limit - lent.used
        move_on(&lent, now_ns)
        return bucket_room(&lent, now_ns)

    cdef int check_other(self) noexcept:
        """No host has more than it was lent; and there is never more than the limit to be had at once."""
        cdef uint64_t now_ns = explore_clock() - self.epoch_ns
        cdef uint64_t left, all_left = 0
        cdef int host
        if not self.is_strict:
            return 0
        for host in range(self.host_count):
            left = self.left_of(host, now_ns)
            all_left += left
            if not self.period_ns and left > self.loan_of(host, now_ns):
                return 101 + host
        return 100 if all_left + self.room_at(now_ns) > self.limit else 0

    def left(self, host):
        return self.left_of(host, explore_clock() - self.epoch_ns)

    def loan(self, host):
        return self.loan_of(host, explore_clock() - self.epoch_ns)

    def room(self):
        return self.room_at(explore_clock() - self.epoch_ns)

    def pending(self, host):
        return self.state_of(host) >> (<Permits>self.hosts[<int>host]).unit.permit_bits & 1

    cdef uint64_t slot_now(self, int host) noexcept:
        cdef Permits permits = <Permits>self.hosts[host]
        cdef uint64_t slot_tag = permits.fetch_slot_of(self.tags[host])
        cdef int i
        for i in range(CELLS):
            if permits.table.cells[i].tag == slot_tag:
                return permits.table.cells[i].state
        return 0

    def fetching_ns(self, host):
        """How long the fetch slot stays closed for a process that fetches or whose turn it is; 0 if it is open."""
        cdef uint64_t now_ns = explore_clock() - self.epoch_ns
        cdef uint64_t state = self.slot_now(host)
        return max(state >> 22 << 22 >> FRACTION_BITS, now_ns) - now_ns if state & FETCHING else 0

    def is_reserved(self, host):
        return self.slot_now(host) & ((1 << 17) - 1) == FETCHING
