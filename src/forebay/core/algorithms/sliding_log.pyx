"""Sliding log: a ring of `limit` times per key, so that the bound is exact.

State
-----
The cell's state is of KIND_COUNT (see counts.pxd):

    63                    low_bits              1     0
     +-----------------------+-------------------+-----+
     | when the newest leaves| position          | lap |     position: where the next permit will be written
     +-----------------------+-------------------+-----+     lap: changes each time the position comes round

The time is when the newest permit leaves the window, rounded up to a quantum. So the state alone dates the last
request, except for that rounding.

The record is a ring of `limit` entries. Behind the position lie the oldest entries, before it the newest:

    63      62    61                                  0
     +-------+-----+----------------------------------+
     | given | lap | time of the permit in ns, plus 1 |     0: there was none
     | back  |     |                                  |     lap: that in which the entry was written
     +-------+-----+----------------------------------+

Transitions
-----------
A request of n permits may pass when the youngest of the n oldest entries has left the window or was given back. Then
all n have or were, because dates never fall along the ring and the oldest are given back first.

* *claim*: a request that may pass. State: position + n, this request's date. 128-bit acq_rel CAS. This is the decision.
  "sliding log: hits"
* *write*: the claimant, after the claim. Its n entries in the order of the ring, each from the lap before. acq_rel CAS.
  "sliding log: larger costs"
* *help*: a request that finds the newest entry unwritten, because the last claimant is between claim and write or was
  killed there. It writes that request's entries first, with the date in the state, rounded up to a quantum
  (`rounded_date_ns`). They are the entries of the wrong lap at the end of the claimed ones, while the state stands.
  acq_rel CAS. "sliding log: hits", with a crash
* *give back*: a refund. The oldest entries that count -> marked. acq_rel CAS. "sliding log: a hit and a refund"
* *clear*: each process that would promote a claim for another key, see *A cell for another key*. acq_rel CAS. "sliding
  log: a clean start after an eviction"

Invariant
---------
Any limit + 1 permits that are kept span more than a window.

Proof
-----
*Dates.* Let d(p) be the date of the permit at position p, counted on from lap to lap, and r(p) the entry in the ring
for it: d(p), d(p) rounded up, or later if `log_clear` wrote it. A request judges what has left the window by a time
that has come (`past_ns`): its own clock reading, or the newest r if that is later, but no later than the clock. The
date of a request is its own reading or the newest r, whichever is later. So d never falls. For each entry whose place
it takes (`next_lap_ns`), the date is not before that entry has left the window. If that entry was given back, the date
is behind the quantum of the entry's date. By the host's clock this is so anyhow, as two CASes of each entry take longer
than a quantum. A date is some ns later only with a clock that stands still, or with readings that grew old while
permits were given back and taken again.

SYNC claim -> help: a process that reads the state by an acquire load sees a ring in which everything before the last
claim is written. The claimant had seen to that, and its CAS released it.

*Exact.* A claim requires the newest entry to be written, hence by induction all entries before it. Every writer writes
d(p) or later: r(p) >= d(p). Unless p was given back, the claim of p + limit had read r(p) + window <= d(p + limit). So
d(p + limit) >= d(p) + window.

*A denial* reads entries after the state. It holds only if the state is still the same then, which the table checks (a
seqlock read).

Crash and stall
---------------
*Killed* before the claim: nothing happened. Between claim and write, or within the write: the next request of the key
writes what is missing. No process waits.

*Stalled* in the write: an entry's next lap is dated later than anything that is written in this lap, and its claimant
has seen this lap's entry written. A late writer finds its own lap, the next lap's later date, or its own lap's bit
again; its CAS fails in each case. No entry and no state returns to an earlier value (no ABA), so a stalled refund or
claim fails, too. A late helper counts the unwritten entries, and then checks that the state still stands, before it
writes.

*A cell for another key.* Position and lap belong to the cell. They stay when the key's time has come or the key is
evicted, and another key moves in. While the cell is claimed for that key, each process that would promote the claim
first writes, as given back, the entries that the old key's process has left unwritten. Then it marks all others that
still count (`log_clear`). So a new member begins with a ring in which nothing counts. A process that is stopped in
there can't harm the new key: it changes only what an entry held before it saw the claim stand.

Not handled
-----------
A clock that goes back: a `ManualClock` that is set. Then what `log_clear` writes may be dated before the late writer's
date.
"""

cimport cython
from libc.stdint cimport uint64_t

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_state, low_of, time_of
from forebay.core.cell_limiter cimport CellLimiter, allow_by
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams, record_of
from forebay.core.table.native cimport (
    FOREBAY_KIND_COUNT, ForebayCell, cas_acq_rel, load128_acquire, load_acquire,
)
from forebay.core.table.segment_view cimport Extent
from forebay.core.table.table cimport Events, Next, Verdict, table_find, table_now

from forebay.core.limiter_arguments import log_bits, log_shape
from forebay.rate import as_rate
from forebay.segment import layout
from forebay.segment.extents import Purpose, open_extent


# Bits of an entry; the rest is its time plus 1.
cdef uint64_t GIVEN_BACK = <uint64_t>1 << 63
cdef uint64_t LAP = <uint64_t>1 << 62


cdef inline uint64_t position_of(const LimitParams* params, uint64_t state) noexcept nogil:
    # Damage must not lead out of the ring.
    return min(low_of(state, params.low_bits) >> 1, params.limit - 1)


cdef inline uint64_t lap_at(const LimitParams* params, uint64_t state, uint64_t position) noexcept nogil:
    """The lap in which the entry at `position` was last claimed."""
    # In the first lap, with the lap's bit of the state clear, entries are written with it set: they were clear before.
    return LAP if (state & 1 != 0) != (position < position_of(params, state)) else 0


cdef inline uint64_t moved(const LimitParams* params, uint64_t position, uint64_t by) noexcept nogil:
    """`by` at most the limit."""
    return position + by if by < params.limit - position else position + by - params.limit


cdef inline uint64_t time_of_entry(uint64_t entry) noexcept nogil:
    return (entry & ~(GIVEN_BACK | LAP)) - 1


cdef inline bint left_window(const LimitParams* params, uint64_t entry, uint64_t now_ns) noexcept nogil:
    """Whether an entry doesn't count any more."""
    return entry & ~LAP == 0 or entry & GIVEN_BACK != 0 or time_of_entry(entry) + params.period_ns <= now_ns


cdef inline bint is_of_lap_before(uint64_t entry, uint64_t lap, uint64_t time_ns) noexcept nogil:
    """Whether an entry may be replaced by one of this lap and time."""
    return entry & LAP != lap and (entry & ~LAP == 0 or time_of_entry(entry) < time_ns)


cdef void write_entries(
    const LimitParams* params, uint64_t* ring, uint64_t state, uint64_t count, uint64_t time_ns
) noexcept nogil:
    """Write the newest `count` entries of a state, oldest first: once the newest is written, all are."""
    cdef uint64_t position = moved(params, position_of(params, state), params.limit - count)
    cdef uint64_t _, lap, seen
    for _ in range(count):
        lap = lap_at(params, state, position)
        seen = load_acquire(&ring[position])
        while is_of_lap_before(seen, lap, time_ns) and not cas_acq_rel(&ring[position], seen, lap | (time_ns + 1)):
            seen = load_acquire(&ring[position])
        position = moved(params, position, 1)


cdef inline uint64_t rounded_date_ns(const LimitParams* params, uint64_t state) noexcept nogil:
    """The date of the last claim, rounded up: less than a quantum later than the claim wrote."""
    cdef uint64_t leaves_ns = time_of(state, params.low_bits)
    return leaves_ns - params.period_ns if leaves_ns > params.period_ns else 0


cdef inline uint64_t latest_ns(const LimitParams* params, uint64_t entry) noexcept nogil:
    """The latest time that any writer brings for the permit of this entry."""
    return rounded_date_ns(params, count_state(time_of_entry(entry) + params.period_ns, params.low_bits, 0))


cdef inline uint64_t next_lap_ns(const LimitParams* params, uint64_t entry) noexcept nogil:
    """The earliest date of a permit that takes this entry's place: behind every date that its writers may write."""
    if entry & GIVEN_BACK:
        return latest_ns(params, entry) + 1
    return time_of_entry(entry) + params.period_ns if entry & ~LAP else 0


cdef inline uint64_t count_unwritten(
    const LimitParams* params, uint64_t* ring, uint64_t state, uint64_t newest
) noexcept nogil:
    """The number of unwritten entries of the last claim, whose last entry is `newest`."""
    cdef uint64_t position = newest
    cdef uint64_t unwritten = 0
    while unwritten < params.limit and load_acquire(&ring[position]) & LAP != lap_at(params, state, position):
        unwritten += 1
        position = moved(params, position, params.limit - 1)
    return unwritten


cdef inline uint64_t newest_ns(const LimitParams* params, ForebayCell* cell, uint64_t state) noexcept nogil:
    """The time of the newest permit of a state, which is written first if need be."""
    cdef uint64_t* ring = record_of(params, cell)
    cdef uint64_t newest = moved(params, position_of(params, state), params.limit - 1)
    cdef uint64_t entry = load_acquire(&ring[newest])
    cdef uint64_t unwritten
    if entry & LAP == lap_at(params, state, newest):
        return time_of_entry(entry) if entry & ~(GIVEN_BACK | LAP) else 0
    if time_of(state, params.low_bits) == 0:
        # A claim's, and others have promoted it since its entries were seen to.
        return 0
    unwritten = count_unwritten(params, ring, state, newest)
    # If the state has gone meanwhile, others' may have been taken for them, of a lap further on.
    if load_acquire(&cell.state) == state:
        write_entries(params, ring, state, unwritten, rounded_date_ns(params, state))
    return time_of_entry(load_acquire(&ring[newest]))


cdef inline uint64_t past_ns(const LimitParams* params, uint64_t newest_ns, uint64_t now_ns) noexcept nogil:
    """The time by which to judge what has left the window: our reading, or that of an earlier request.

    The newest permit's date may be ahead of any reading, so it counts only up to the clock.
    """
    return now_ns if newest_ns <= now_ns else max(now_ns, min(newest_ns, table_now(params.table)))


cdef bint log_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef uint64_t* ring
    cdef uint64_t position, last, entry, newest, date_ns, i
    if cell == NULL:
        next.state = 0
        return True
    ring = record_of(params, cell)
    position = position_of(params, state)
    newest = newest_ns(params, cell, state)
    date_ns = max(now_ns, newest)
    if charge.amount != 0:
        last = moved(params, position, charge.amount - 1)
        if not left_window(params, load_acquire(&ring[last]), past_ns(params, newest, now_ns)):
            return False
        for i in range(charge.amount):
            entry = load_acquire(&ring[moved(params, position, i)])
            date_ns = max(date_ns, next_lap_ns(params, entry))
        last = moved(params, last, 1)
        # Come round?
        if last <= position:
            state ^= 1
        position = last
    next.state = count_state(date_ns + params.period_ns, params.low_bits, position << 1 | (state & 1))
    next.decided_ns = date_ns
    return True


cdef void log_after_charge(const Charge* charge, const Verdict* verdict) noexcept nogil:
    """Write the entries that the verdict's state has claimed."""
    if verdict.cell != NULL:
        write_entries(
            charge.params, record_of(charge.params, verdict.cell), verdict.state, charge.amount, verdict.decided_ns)


cdef uint64_t count_left(const LimitParams* params, uint64_t* ring, uint64_t position, uint64_t now_ns) noexcept nogil:
    """How many of the oldest entries don't count any more: bisection, as they come before those that do."""
    cdef uint64_t low = 0
    cdef uint64_t high = params.limit
    cdef uint64_t middle
    while low < high:
        middle = (low + high) // 2
        if left_window(params, load_acquire(&ring[moved(params, position, middle)]), now_ns):
            low = middle + 1
        else:
            high = middle
    return low


cdef bint log_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """Mark the oldest entries that count as given back; the state doesn't change.

    The oldest entries, so that the entries that don't count stay the oldest ones: a request of several permits relies
    on that. And the entries that stay are never earlier than the permits that were kept.

    An entry whose lap differs from the state's has been claimed since. Then a newer state must show which entries are
    the oldest, and by then the cell may be another key's. The same holds for an entry that is later than the state: it
    was claimed twice since, so its lap bit is the same again. By then the charge may also have left the window, so the
    clock is read again.

    A refund gives back at most as many permits as counted at one moment at which its state stood, and none once all of
    those have left the window. A refund of more than there is, or a reset, has no right to permits that are charged
    later. A refund of permits that were charged has a right to as many, even if other refunds took the oldest entries,
    its own among them.
    """
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef uint64_t* ring = record_of(params, cell)
    cdef ForebayCell seen
    cdef uint64_t entry, place, i, gone_ns
    cdef uint64_t amount = charge.amount
    cdef uint64_t until_ns = ~<uint64_t>0
    cdef bint limited = False
    while time_of(state, params.low_bits) > now_ns and now_ns < until_ns:
        if charge.charged_state != 0 and time_of(charge.charged_state, params.low_bits) <= now_ns + (
                <uint64_t>1 << params.low_bits >> FRACTION_BITS):
            return False
        gone_ns = past_ns(params, newest_ns(params, cell, state), now_ns)
        i = count_left(params, ring, position_of(params, state), gone_ns)
        seen = load128_acquire(cell)
        if not limited and seen.tag == tag and seen.state == state:
            amount = min(amount, params.limit - i)
            until_ns = time_of(state, params.low_bits)
            limited = True
        while limited and amount != 0 and i < params.limit:
            place = moved(params, position_of(params, state), i)
            entry = load_acquire(&ring[place])
            if entry & LAP != lap_at(params, state, place):
                break
            if left_window(params, entry, gone_ns):
                i += 1
            elif time_of_entry(entry) > rounded_date_ns(params, state):
                break
            # Linearizes here, for one permit.
            elif cas_acq_rel(&ring[place], entry, entry | GIVEN_BACK):
                amount -= 1
                i += 1
        if amount == 0:
            return False
        seen = load128_acquire(cell)
        # The same state once more: it is damage that made the lap another one.
        if seen.tag != tag or seen.state == state:
            return False
        state = seen.state
        now_ns = table_now(params.table)
    return False


cdef inline bint stands(const ForebayCell* cell, ForebayCell claim) noexcept nogil:
    cdef ForebayCell again = load128_acquire(cell)
    return again.tag == claim.tag and again.state == claim.state


cdef uint64_t date_behind(
    const LimitParams* params, uint64_t* ring, uint64_t state, uint64_t unwritten, uint64_t now_ns
) noexcept nogil:
    """A date that is not before the last claim's, of which the newest `unwritten` entries are missing.

    The last claim's state, which had the date, is gone; `state` has its position. The sources of the date are still
    there: a clock reading before ours, the permit before, and the entries. Or the entry has been written meanwhile,
    with that date or a later one. No claim has taken the place of such an entry yet, so the place doesn't show when its
    time is over.
    """
    cdef uint64_t position = moved(params, position_of(params, state), params.limit - unwritten)
    cdef uint64_t before = load_acquire(&ring[moved(params, position, params.limit - 1)])
    cdef uint64_t date_ns = max(now_ns, time_of_entry(before) if before & ~LAP else 0)
    cdef uint64_t entry, _
    for _ in range(unwritten):
        entry = load_acquire(&ring[position])
        date_ns = max(date_ns, (
            time_of_entry(entry) if entry & LAP == lap_at(params, state, position) else next_lap_ns(params, entry)))
        position = moved(params, position, 1)
    return date_ns


cdef void log_clear(ForebayCell* cell, ForebayCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    """Give back everything that counts of the key that was there before.

    First the entries that it had claimed and not written, in the order of the ring as always, so that none is missing
    where the newest one is there. Then the others, from the newest one back to one that has left the window. Each is
    changed by a CAS from what it was before the claim was seen to stand: so it isn't the new key's, which claims
    entries only once it is a member.
    """
    cdef const LimitParams* params = (<const Charge*>parameters).params
    cdef uint64_t* ring = record_of(params, cell)
    cdef uint64_t end = position_of(params, claim.state)
    cdef uint64_t unwritten = count_unwritten(params, ring, claim.state, moved(params, end, params.limit - 1))
    cdef uint64_t position = moved(params, end, params.limit - unwritten)
    cdef uint64_t date_ns = date_behind(params, ring, claim.state, unwritten, now_ns)
    cdef uint64_t entry, lap, _
    for _ in range(unwritten):
        lap = lap_at(params, claim.state, position)
        while True:
            entry = load_acquire(&ring[position])
            if not stands(cell, claim):
                return
            if entry & LAP == lap or cas_acq_rel(&ring[position], entry, lap | GIVEN_BACK | (date_ns + 1)):
                break
        position = moved(params, position, 1)
    position = end
    for _ in range(params.limit):
        position = moved(params, position, params.limit - 1)
        while True:
            entry = load_acquire(&ring[position])
            if not stands(cell, claim):
                return
            # Whether it was given back or not: those behind it may be dated as late as the end of its quantum.
            if entry & ~LAP == 0 or latest_ns(params, entry) + params.period_ns <= now_ns:
                return
            if entry & GIVEN_BACK or cas_acq_rel(&ring[position], entry, entry | GIVEN_BACK):
                break


cdef uint64_t until_left(
    const LimitParams* params, uint64_t* ring, uint64_t position, uint64_t now_ns
) noexcept nogil:
    """How long until the entry at `position` has left the window."""
    cdef uint64_t entry = load_acquire(&ring[position])
    return 0 if left_window(params, entry, now_ns) else time_of_entry(entry) + params.period_ns - now_ns


cdef void describe_log(const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef uint64_t* ring
    cdef uint64_t position, newest
    if verdict.cell == NULL:
        outlook.available = params.limit
        if verdict.full:
            # Allowed though the table is full: as if it had been written.
            outlook.available -= charge.amount
            outlook.reset_after_ns = params.period_ns if charge.amount else 0
        return
    ring = record_of(params, verdict.cell)
    newest = newest_ns(params, verdict.cell, verdict.state)
    position = position_of(params, verdict.state)
    outlook.available = count_left(params, ring, position, past_ns(params, newest, verdict.now_ns))
    if not allowed:
        outlook.retry_after_ns = until_left(params, ring, moved(params, position, charge.amount - 1), verdict.now_ns)
    # Others may have come since, and find that all had left.
    if outlook.available < params.limit and newest + params.period_ns > verdict.now_ns:
        outlook.reset_after_ns = newest + params.period_ns - verdict.now_ns


cdef uint64_t log_used(ForebayCell* cell, uint64_t state, uint64_t now_ns, const void* context) noexcept nogil:
    """The permits that count, less one. While entries are being written, it may be too small."""
    cdef const LimitParams* params = <const LimitParams*>context
    cdef uint64_t counting = params.limit - count_left(
        params, record_of(params, cell), position_of(params, state), now_ns)
    return max(counting, <uint64_t>1) - 1


@cython.final
cdef class SlidingLog(CellLimiter):
    """Never more permits than the rate allows in any span as long as the period: exact, at the price of memory.

    ``SlidingLog(store, "export", "10/hour", keys=10_000)``. `keys` is how many keys can be live at once, that is,
    have a permit in the last period. Each takes 8 bytes for every permit of the limit. Room to find a key's place at
    once adds a third of that from 49 keys on, and up to two thirds for some dozens of keys.
    ``SlidingLog.bytes_needed(rate, keys=...)`` returns the total. The memory is taken when the limiter is first made,
    behind the store's table, and kept until the store is unlinked.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``, and ``SegmentSpaceError`` with the bytes needed if
    there is no room. Threads, processes, fork: see ``Limiter``.

    ``allow`` is O(1) whatever the limit, two CASes on two cache lines; a denied one writes nothing shared but what a
    killed process has left to write. A cost of n writes n times. ``hit`` and ``peek`` find ``remaining`` in
    O(log limit). A refund gives back the oldest permits that still count; taken again, they are dated behind those: by
    a clock that stands still, some ns ahead of it. A limit above 2**23, or above the period in ns, is refused; one up
    to half of that is not.
    """

    cdef readonly object rate
    cdef Extent extent

    def __cinit__(self, store, name, rate, *, keys):
        self.rate = as_rate(rate)
        log_shape(self.rate, keys, name)
        self.kind = FOREBAY_KIND_COUNT
        self.take = log_take
        self.give_back = log_give_back
        self.after_charge = log_after_charge
        self.describe = describe_log
        self.params.limit = self.params.rate_limit = self.params.words_per_cell = self.rate.limit
        self.params.period_ns = self.rate.period_ns
        self.params.low_bits = log_bits(self.rate)
        encoding = b"log %d %d" % (self.params.limit, self.params.period_ns)
        self.extent = open_extent(store.attachment, name, Purpose(
            algorithm=layout.ALGORITHM_SLIDING_LOG, words_per_cell=self.params.words_per_cell,
            low_bits=self.params.low_bits, limit=self.params.limit, period_ns=self.params.period_ns), keys)
        self.table = self.extent.table
        self.table.clear = log_clear
        self.table.used = log_used
        self.table.used_context = &self.params
        self.table.kept_bits = self.params.low_bits
        self.params.cells = self.table.cells
        self.params.records = self.extent.records
        self.params.last_cell = self.extent.used_cells - 1
        self.params.table = &self.table
        self.charge_for(1, &self.params, &self.unit)
        self.register(layout.ALGORITHM_SLIDING_LOG, encoding, self.params.limit)

    @cython.binding(False)
    def __init__(self, store, name, rate, *, keys):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    @staticmethod
    def bytes_needed(rate, *, keys):
        """How many bytes a sliding log of this rate and number of keys takes of its store's file system."""
        return log_shape(as_rate(rate), keys, "").bytes

    def __repr__(self):
        return f"<SlidingLog {self.name!r} {self.rate}, keys={self.keys}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        return allow_by(self, key, log_take, log_after_charge)

    @property
    def keys(self):
        return self.extent.keys

    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil:
        cdef uint64_t state
        cdef Next unchanged
        cdef ForebayCell* cell = table_find(&self.table, tag, &state)
        cdef Charge everything = self.unit
        everything.amount = self.params.limit
        if cell != NULL:
            log_give_back(cell, tag, state, table_now(&self.table), &everything, &unchanged)
