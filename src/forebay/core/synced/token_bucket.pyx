"""Token buckets that are synced with other hosts; read limiter.pyx beside it first.

State
-----
The cell's state is the theoretical arrival time (TAT) of what this host knows: its own charges at once, the others'
since the last exchange. The last four words of the record:

    CHARGED           ns of refill that this host has charged, less refunds; never set, only added to
    CHARGED_BEFORE    the value of CHARGED when the incarnation began
    CHARGED_REPORTED  us of this incarnation that Redis knows of | sequence | unanswered
    REPORTED_UNTIL    when CHARGED was read for that

A report has the key's own part: `CHARGED` less `CHARGED_BEFORE`.

Transitions
-----------
* *charge*: a request. Two steps: the 128-bit acq_rel CAS of the cell that decides, then a relaxed addition to CHARGED.
  A refund is the same two steps. "synced bucket: two messages"
* *claim for another key*: CHARGED_BEFORE -> CHARGED, by one 128-bit CAS of both from a pair that was read before the
  claim was seen to stand. At that time no process adds charges of the key before any more, nor charges of the new key
  yet. A late process finds the pair changed, or writes the values that are there.
* *report*: an exchanger. Marks CHARGED_REPORTED as unanswered, by a 128-bit acq_rel CAS. "synced bucket: two messages"
* *merge*: the same exchanger. Moves the TAT on, by a 128-bit acq_rel CAS. "synced bucket: learned while it counts"

Invariant
---------
In the long run all hosts together admit no more than the rate.

Proof
-----
*At Redis* there is a TAT for the sum of all hosts. A host reports the amount d that it has charged since its last
report, which was at the time s. Redis treats d as spread over that time: ``tat = max(tat, s) + d``. So the refill of
that time isn't lost. With ``max(tat, now) + d``, a host that always stays within its limit would learn after every
exchange that it had used an interval's worth at once. The TAT is too early if d was spent at the end of that time and
the bucket had been full before: by at most the refill of that time. The TAT has no upper bound: if the hosts together
have admitted more than the rate, the excess stays a debt, which they pay by admitting less.

*Back on the host* the TAT moves on to the time of the report's reading, plus how far Redis' TAT was ahead, plus the
charges since, less the refunds since. It never moves back: the host knows its own charges best, and Redis may be behind
because it spread them. So hosts that have learned of a charge don't learn that another host gave it back: for them it
is refilled in its time. But a `reset` moves the TAT to now, whichever host had charged the key; the next exchange
brings back the charges that still stand at Redis. A host alone learns nothing that it doesn't know: Redis' TAT was
moved by the same sum, from no later a time (except by as much as one of its messages took longer than a later one).

*A lost reply.* Redis may know the last report, or only the one before. So a report is first marked as unanswered, and
is sent again until a reply comes. Otherwise there might seem to be nothing to report, when the reported charges have
been given back meanwhile. (A window's count is marked likewise.)

Crash and stall
---------------
Killed between the two steps of a charge, a process has charged this one request (or given this back) on this host only;
the others never learn it. Stopped in between, it reports late; if the cell has another key by then, the charge is
reported as that key's.

Not handled
-----------
A charge that is between its two steps while a reply is merged hides an equal amount of the other hosts' charges until
the next exchange (for good, if the process is killed there).
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.counts cimport low_mask
from forebay.core.algorithms.gcra cimport (
    gcra_booked_delay_ns, gcra_charge, gcra_describe, gcra_give_back, gcra_params_of, gcra_refused_delay_ns, gcra_take,
    most_ahead_of,
)
from forebay.core.limiter cimport Charge, LimitParams, copy_of, record_of
from forebay.core.synced.limiter cimport (
    BEHIND_ONLY, CHARGED, CHARGED_BEFORE, CHARGED_REPORTED, INCARNATION, LOOK_ONLY, SHARE, WORDS_PER_CELL, NamedCharge,
    SyncedLimiter, begin_pair, begin_record, decide_named, is_due, pair_at, stands,
)
from forebay.core.synced.hot cimport Hot, forget_hot, may_have, no_hot, hot_state
from forebay.core.table.native cimport (
    FOREBAY_KIND_BITS, FOREBAY_KIND_TAT, ForebayCell, cas128_acq_rel, fetch_add_relaxed, load128_acquire,
    load_acquire, monotonic_ns,
)
from forebay.core.table.table cimport ALLOWED, TIME_BITS, Events, Next, Verdict, table_find, table_now

from forebay.errors import InvalidLimiter
from forebay.rate import as_rate
from forebay.segment import layout
from forebay.segment.extents import Purpose


cdef enum:
    # Bits of CHARGED_REPORTED. If a sequence repeats while a process is stopped, REPORTED_UNTIL differs.
    SEQUENCE_BITS = 10
    US_BITS = 53
    # A published time of arrival is imprecise by the time that a query takes.
    LEAST_BEHIND_NS = 1_000_000


# CHARGED_REPORTED, decoded: the us that Redis knows; if unanswered, Redis may know a later report.
cdef struct Reported:
    uint64_t us
    uint64_t sequence
    bint is_unanswered


cdef inline Reported reported_in(uint64_t word) noexcept nogil:
    return Reported(word >> (SEQUENCE_BITS + 1), word >> 1 & low_mask(SEQUENCE_BITS), word & 1)


cdef inline uint64_t reported_word(Reported reported) noexcept nogil:
    return (
        min(reported.us, low_mask(US_BITS)) << (SEQUENCE_BITS + 1) | (reported.sequence & low_mask(SEQUENCE_BITS)) << 1
        | reported.is_unanswered)


cdef void bucket_after_charge(const Charge* charge, const Verdict* verdict) noexcept nogil:
    if verdict.cell != NULL:
        fetch_add_relaxed(&record_of(charge.params, verdict.cell)[CHARGED], charge.amount)


cdef inline uint64_t charged_by_incarnation(const uint64_t* record) noexcept nogil:
    """The ns charged in this incarnation; never negative, even if a late process gives back a charge of the key before.
    """
    cdef uint64_t charged = load_acquire(&record[CHARGED]) - load_acquire(&record[CHARGED_BEFORE])
    return charged if charged >> 63 == 0 else 0


cdef void bucket_clear(ForebayCell* cell, ForebayCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    cdef const NamedCharge* named = <const NamedCharge*>parameters
    cdef uint64_t* record = record_of(named.charge.params, cell)
    cdef ForebayCell seen, wanted
    begin_record(cell, claim, named)
    # SYNC pair -> claim: the pair is read before the claim is seen to stand.
    seen = load128_acquire(pair_at(record, CHARGED))
    while stands(cell, claim):
        wanted.tag = wanted.state = seen.tag
        if cas128_acq_rel(pair_at(record, CHARGED), seen, wanted):
            break
        seen = load128_acquire(pair_at(record, CHARGED))
    begin_pair(cell, claim, pair_at(record, CHARGED_REPORTED), reported_word(Reported(0, claim.state, False)), now_ns)


cdef bint bucket_begin_hot(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = (<const NamedCharge*>parameters).hot.tat_ns
    return state == 0 and next.state > now_ns


@cython.final
cdef class SyncedTokenBucket(SyncedLimiter):
    """A ``TokenBucket`` over a ``SyncedStore``, which makes it.

    Each method decides in this host's memory, as over a ``Store``, and may be called from any thread and in asyncio's.
    ``reset`` fills the bucket for this host, and reports to the others the part that this host had charged itself. The
    next exchange brings back what they have charged.
    """

    cdef readonly object rate
    cdef readonly uint64_t burst
    cdef uint64_t most_ahead_ns

    def __cinit__(self, store, name, rate, burst, synced_store, keys, name_of):
        self.rate = as_rate(rate)
        self.most_ahead_ns = most_ahead_of(self)
        self.params_of(self.rate, burst, &self.params)
        self.burst = self.params.limit
        self.kind = FOREBAY_KIND_TAT
        self.take = gcra_take
        self.give_back = gcra_give_back
        self.after_charge = bucket_after_charge
        self.set_charge = gcra_charge
        self.describe = gcra_describe
        self.begin_hot = bucket_begin_hot
        purpose = Purpose(
            algorithm=layout.ALGORITHM_SYNCED_TOKEN_BUCKET, words_per_cell=WORDS_PER_CELL, low_bits=0, limit=0,
            period_ns=0)
        self.begin(purpose, keys, synced_store, name_of, b"synced", bucket_clear)

    @cython.binding(False)
    def __init__(self, store, name, rate, burst, synced_store, keys, name_of):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}, over {self.synced_store!r}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        return decide_named(
            self, key, self.tag_of(key), &self.unit, &verdict, gcra_take, bucket_after_charge) == ALLOWED

    def add(self, key, permits, *, rate=None, burst=None):
        raise InvalidLimiter(
            f"{self!r} can't have permits above its burst, as hosts report what they have used: a token bucket over a "
            "Store or a RedisStore can")

    cdef int params_of(self, object rate, object burst, LimitParams* params) except -1:
        return gcra_params_of(
            self, rate, rate.limit if burst is None else burst, "burst", self.most_ahead_ns, params)

    cdef int params_for_call(self, object rate, object burst, LimitParams* params) except -1:
        # With the place of the records.
        params[0] = copy_of(&self.params)
        if rate is None and burst is None:
            return 0
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        self.params_of(as_rate(rate), burst, params)
        # Bookings of this limiter and of the call wait on one state: neither takes the other's time.
        params.due_ns = min(params.due_ns, self.params.due_ns)
        return 0

    cdef void allow_wait(self, Charge* charge, uint64_t max_wait_ns) noexcept nogil:
        charge.room += min(max_wait_ns, self.most_ahead_ns - charge.params.tolerance_ns)

    cdef uint64_t booked_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        return gcra_booked_delay_ns(charge, verdict)

    cdef uint64_t refused_delay_ns(self, const Charge* charge, const Verdict* verdict) noexcept nogil:
        return gcra_refused_delay_ns(charge, verdict)

    cdef int return_charge(self, uint64_t tag, const Charge* charge) except -1:
        """Give back at most what this host has charged. The other hosts learn it.

        A cancelled reservation gives back the part that hasn't been refilled, even if charges of other hosts that were
        learned since lie behind it: the reservation itself is known to have been charged.
        """
        cdef Charge own = charge[0]
        cdef uint64_t state, now_ns
        cdef uint64_t* record
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
        cdef Next next
        own.charged_state = 0
        self.ensure_attached_to_return()
        while True:
            cell = table_find(&self.table, tag, &state)
            if cell == NULL:
                return 0
            record = record_of(&self.params, cell)
            seen = load128_acquire(cell)
            now_ns = table_now(&self.table)
            own.amount = min(charge.amount, charged_by_incarnation(record))
            if charge.charged_state != 0:
                own.amount = min(own.amount, charge.charged_state - min(now_ns, charge.charged_state))
            if seen.tag != tag:
                continue
            if not gcra_give_back(cell, tag, seen.state, now_ns, &own, &next):
                return 0
            wanted.tag = tag
            wanted.state = next.state
            # Linearizes here, on this host.
            if cas128_acq_rel(cell, seen, wanted):
                fetch_add_relaxed(&record[CHARGED], next.state - seen.state)
                return 0

    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil:
        """Full for this host, whichever host has charged it. The other hosts learn what this host had charged."""
        cdef uint64_t state, now_ns, given
        cdef uint64_t* record
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
        while True:
            cell = table_find(&self.table, tag, &state)
            if cell == NULL:
                return
            record = record_of(&self.params, cell)
            seen = load128_acquire(cell)
            now_ns = table_now(&self.table)
            given = charged_by_incarnation(record)
            if seen.tag != tag:
                continue
            if seen.state <= now_ns:
                return
            given = min(given, seen.state - now_ns)
            wanted.tag = tag
            wanted.state = now_ns
            # Linearizes here, on this host.
            if cas128_acq_rel(cell, seen, wanted):
                fetch_add_relaxed(&record[CHARGED], 0 - given)
                return

    def learn(self, bytes name, uint64_t tat_ns):
        """For the exchange: by its published sum, the bucket with this name is full again at this time."""
        cdef uint64_t now_ns = self.segment.now_ns()
        self.keep(name, 0, max(min(tat_ns, now_ns + self.most_ahead_ns), 1), tat_ns)

    cdef Hot hot_of(self, const uint64_t* name, uint64_t now_ns) noexcept:
        cdef Hot hot = no_hot()
        cdef uint64_t tat_ns = hot_state(&self.hot_cells, name, 0)
        if now_ns < tat_ns and tat_ns >> TIME_BITS == 0:
            hot.tat_ns = tat_ns
        return hot

    cdef uint64_t state_as_hot(self, const Hot* hot, uint64_t now_ns) noexcept:
        return hot.tat_ns

    cdef int forget_hot_of(self, const uint64_t* name, Events* events) noexcept:
        forget_hot(&self.hot_cells, name, 0, events)
        return 0

    cdef bint is_behind(
        self, ForebayCell seen, const uint64_t* record, uint64_t now_ns, const unsigned char* learned
    ) noexcept:
        """Whether this host knows less of a key than is published, if this exchange has read its name."""
        cdef uint64_t[4] name
        if learned == NULL or not may_have(learned, record) or not self.is_intact(record, seen.tag, name):
            return False
        return self.hot_of(name, now_ns).tat_ns > max(seen.state, now_ns) + LEAST_BEHIND_NS

    cdef tuple report_of(
        self, uint64_t index, uint64_t now_ns, int64_t round_number, const unsigned char* learned, uint64_t* unnamed
    ):
        """The ns that this host has charged in this incarnation, the microseconds that Redis knew of, the time in ns
        of this reading, and of the one that Redis knew."""
        cdef ForebayCell* cell = self.table.cells + index
        cdef uint64_t* record = record_of(&self.params, cell)
        cdef uint64_t[4] name
        cdef uint64_t read_us, read_ns, charged
        cdef ForebayCell seen, asked, wanted
        cdef Reported reported
        cdef bint is_reported, is_known_hot
        if load_acquire(&cell.tag) & low_mask(FOREBAY_KIND_BITS) != FOREBAY_KIND_TAT:
            return None
        while True:
            # SYNC sequence -> reading: the sequence is loaded before the cell and the clock are read.
            asked = wanted = load128_acquire(pair_at(record, CHARGED_REPORTED))
            seen = load128_acquire(cell)
            if seen.tag & low_mask(FOREBAY_KIND_BITS) != FOREBAY_KIND_TAT:
                return None
            if round_number == BEHIND_ONLY and not self.is_behind(seen, record, now_ns, learned):
                return None
            reported = reported_in(asked.tag)
            is_reported = reported.us == charged_by_incarnation(record) // 1000 and not reported.is_unanswered
            is_known_hot = seen.state >= now_ns + self.params.tolerance_ns // SHARE
            if is_reported and (seen.state <= now_ns or not is_due(index, round_number, is_known_hot)) and (
                    not self.is_behind(seen, record, now_ns, learned)):
                # There is nothing to report of the time until now.
                wanted.state = max(asked.state, now_ns)
                cas128_acq_rel(pair_at(record, CHARGED_REPORTED), asked, wanted)
                return None
            if not self.is_intact(record, seen.tag, name):
                unnamed[0] += load_acquire(&cell.tag) == seen.tag
                return None
            # Read between two looks at the cell, with the right checksum: all of one key.
            if load_acquire(&cell.tag) != seen.tag:
                return None
            read_ns = table_now(&self.table)
            charged = charged_by_incarnation(record)
            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000
            if round_number == LOOK_ONLY:
                break
            if is_reported:
                wanted.state = read_ns
            reported.sequence = (reported.sequence + 1) & low_mask(SEQUENCE_BITS)
            reported.is_unanswered = True
            wanted.tag = reported_word(reported)
            # SYNC reading -> sequence: the sequence is raised after the cell and the clock were read.
            if cas128_acq_rel(pair_at(record, CHARGED_REPORTED), asked, wanted):
                break
        return (
            (index, seen.tag, name[INCARNATION], reported.sequence), PyBytes_FromStringAndSize(<char*>name, 16),
            read_us,
            charged, reported.us, read_ns, min(wanted.state, read_ns))

    def merge(self, tuple place, uint64_t charged, uint64_t known_us, uint64_t read_ns, uint64_t ahead_ns):
        """Merge Redis' reply to a message that reported `charged` and was read at `read_ns`. `known_us` is the part of
        this host's charges that Redis knows, `ahead_ns` how far Redis' TAT is ahead of now.
        """
        cdef uint64_t index, tag, incarnation, sequence, now_charged
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
        cdef uint64_t* record
        cdef Reported reported
        index, tag, incarnation, sequence = place
        if index >= self.extent.used_cells:
            raise IndexError(f"there is no cell {index}")
        cell = self.table.cells + index
        record = record_of(&self.params, cell)
        while True:
            # SYNC pair -> claim: the pair is read before the cell, so the CAS fails after a later claim.
            seen = wanted = load128_acquire(pair_at(record, CHARGED_REPORTED))
            reported = reported_in(seen.tag)
            if load_acquire(&cell.tag) != tag or load_acquire(&record[INCARNATION]) != incarnation:
                return
            if reported.sequence != sequence or read_ns < seen.state:
                # A later report followed, whether answered yet or not; also if the sequence has come
                # back meanwhile.
                break
            wanted.tag = reported_word(Reported(known_us, sequence, False))
            if known_us == charged // 1000:
                wanted.state = read_ns
            if cas128_acq_rel(pair_at(record, CHARGED_REPORTED), seen, wanted):
                break
        ahead_ns = min(ahead_ns, self.most_ahead_ns)
        seen = load128_acquire(cell)
        while seen.tag == tag and load_acquire(&record[INCARNATION]) == incarnation:
            now_charged = charged_by_incarnation(record)
            wanted.tag = tag
            if now_charged >= charged:
                wanted.state = read_ns + ahead_ns + min(now_charged - charged, self.most_ahead_ns)
            else:
                # Permits that were given back since the report must not be learned as charged again.
                wanted.state = read_ns + ahead_ns - min(charged - now_charged, ahead_ns)
            if wanted.state == read_ns or (seen.state >= wanted.state and seen.state >> TIME_BITS == 0):
                return
            if wanted.state >> TIME_BITS or cas128_acq_rel(cell, seen, wanted):
                return
            seen = load128_acquire(cell)
