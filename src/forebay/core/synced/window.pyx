"""Fixed and sliding windows that are synced with other hosts; read limiter.pyx beside it first.

State
-----
The cell's state is that of a fixed or a sliding window (see algorithms/window.pyx) and counts what *this host* has
admitted. The last four words of the record are two pairs, `OTHERS` and `REPORTED`:

    63                     32 31                   0
     +-----------------------+---------------------+
     | id of a window        | sequence            |
     +-----------------------+---------------------+
     | count in that window  | in the one before   |     of the other hosts; of this host as Redis knows it
     +-----------------------+---------------------+

A window's *id* is its end in units of a power of two that is no longer than a period, modulo 2**32. So no two windows
that follow each other have the same.

Transitions
-----------
* *charge*: a request, by one 128-bit acq_rel CAS of the cell. It is judged by the sum of both counts. "synced window:
  learned while it counts"
* *report* and *merge*: an exchanger, see limiter.pyx. Pairs change only as a whole, by a 128-bit acq_rel CAS.

Invariant
---------
Every request sees all of this host's own count, and no update of it is lost.

Proof
-----
The charge's CAS is of the very state that was judged. The others' counts are always a little old. A request reads them
before the CAS, and they may change meanwhile. A decision reads the id, the counts, and the id again (a seqlock read).
No two replies have one sequence, so it takes no counts for another window's.

Crash and stall
---------------
See limiter.pyx.

Not handled
-----------
A count at Redis may be more than a word holds, or than the limit. It is cut then, and still is the limit or more: a
decision needs no more.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t

from forebay.core.algorithms.counts cimport count_bits_for, count_state, low_mask, low_of, time_of, window_end_ns
from forebay.core.algorithms.window cimport (
    Counted, describe_counts, fixed_counted, has_room, sliding_counted, sliding_give_back, sliding_state,
    was_charged_before,
)
from forebay.core.decision cimport Outlook
from forebay.core.limiter cimport Charge, LimitParams, record_of
from forebay.core.synced.limiter cimport (
    BEHIND_ONLY, COUNT_BITS, INCARNATION, LOOK_ONLY, OTHERS, REPORTED, SHARE, WORDS_PER_CELL, NamedCharge,
    SyncedLimiter, begin_pair, begin_record, decide_named, is_due, pair_at,
)
from forebay.core.synced.hot cimport (
    HOT_COUNT_BITS, Hot, forget_hot, is_hot, may_have, no_hot, hot_state,
)
from forebay.core.table.native cimport (
    FOREBAY_KIND_BITS, FOREBAY_KIND_COUNT, ForebayCell, cas128_acq_rel, load128_acquire, load_acquire, monotonic_ns,
)
from forebay.core.table.table cimport ALLOWED, Events, Next, Verdict, table_amend, table_find, table_now

from forebay.core.limiter_arguments import rounds_up
from forebay.errors import InvalidLimiter
from forebay.rate import as_rate
from forebay.segment import layout
from forebay.segment.extents import Purpose


cdef uint64_t MOST_OF_OTHERS = low_mask(COUNT_BITS)
# Beside a count that Redis knew: a later report may have changed it. Above every limit.
cdef uint64_t UNANSWERED = <uint64_t>1 << (COUNT_BITS - 1)


cdef inline uint64_t id_of(const LimitParams* params, uint64_t end_ns) noexcept nogil:
    return end_ns >> params.window_shift & low_mask(COUNT_BITS)


# The counts in a pair of words: of a window and of the one before.
cdef struct Both:
    uint64_t count
    uint64_t before


cdef inline Both both_in(const LimitParams* params, uint64_t head, uint64_t counts, uint64_t end_ns) noexcept nogil:
    """The counts of the window that ends at `end_ns`. The pair may belong to the window before or after it."""
    cdef uint64_t window_id = head >> COUNT_BITS
    cdef uint64_t count = counts >> COUNT_BITS
    cdef uint64_t before = counts & low_mask(COUNT_BITS)
    if window_id == id_of(params, end_ns):
        return Both(count, before)
    if window_id == id_of(params, end_ns - params.period_ns):
        return Both(0, count)
    return Both(before if window_id == id_of(params, end_ns + params.period_ns) else 0, 0)


cdef inline ForebayCell pair_of(
    const LimitParams* params, uint64_t end_ns, uint64_t sequence, Both both
) noexcept nogil:
    cdef ForebayCell pair
    pair.tag = id_of(params, end_ns) << COUNT_BITS | (sequence & low_mask(COUNT_BITS))
    pair.state = both.count << COUNT_BITS | both.before
    return pair


cdef inline uint64_t sequence_of(ForebayCell pair) noexcept nogil:
    return pair.tag & low_mask(COUNT_BITS)


cdef inline bint is_later(uint64_t sequence, uint64_t other) noexcept nogil:
    return 0 < ((sequence - other) & low_mask(COUNT_BITS)) < low_mask(COUNT_BITS - 1)


cdef inline Both others_in(const LimitParams* params, const ForebayCell* cell, uint64_t end_ns) noexcept nogil:
    cdef const uint64_t* pair
    cdef uint64_t head, counts
    if cell == NULL:
        return Both(0, 0)
    pair = &record_of(params, cell)[OTHERS]
    while True:
        head, counts = load_acquire(&pair[0]), load_acquire(&pair[1])
        if load_acquire(&pair[0]) == head:
            return both_in(params, head, counts, end_ns)


cdef inline int64_t report(uint64_t count, uint64_t* reported) noexcept:
    """The count to report; -1 if there is none, nor any that Redis may know."""
    if count == 0 and reported[0] == 0:
        return -1
    reported[0] |= UNANSWERED
    return <int64_t>count


cdef bint synced_fixed_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = fixed_counted(charge.params, tag, state, now_ns)
    next.state = counted.time | (counted.count + charge.amount)
    return counted.count + others_in(charge.params, cell, counted.end_ns).count <= charge.room


cdef bint synced_fixed_give_back(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """The window stays, with whatever is left in it, which the other hosts learn."""
    cdef const Charge* charge = <const Charge*>parameters
    cdef Counted counted = fixed_counted(charge.params, tag, state, now_ns)
    if was_charged_before(charge, state):
        return False
    next.state = counted.time | (counted.count - min(counted.count, charge.amount))
    return counted.count != 0


cdef inline Counted sliding_counted_of_all(
    const LimitParams* params, const ForebayCell* cell, uint64_t state, uint64_t now_ns
) noexcept nogil:
    cdef Counted counted = sliding_counted(params, state, now_ns)
    cdef Both others = others_in(params, cell, counted.end_ns)
    counted.count += others.count
    counted.previous += others.before
    return counted


cdef bint synced_sliding_take(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Charge* charge = <const Charge*>parameters
    cdef const LimitParams* params = charge.params
    cdef Counted own = sliding_counted(params, state, now_ns)
    cdef Counted of_all = sliding_counted_of_all(params, cell, state, now_ns)
    own.count += charge.amount
    next.state = sliding_state(params, &own)
    return has_room(params, &of_all, charge.room)


cdef void window_clear(ForebayCell* cell, ForebayCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    cdef const NamedCharge* named = <const NamedCharge*>parameters
    cdef uint64_t* record = record_of(named.charge.params, cell)
    # Each life begins with other sequences: so what is learned late of another key finds the pair changed.
    cdef uint64_t sequence = claim.state & low_mask(COUNT_BITS)
    cdef const Hot* hot = &named.hot
    cdef ForebayCell others = pair_of(
        named.charge.params, hot.end_ns, sequence, Both(hot.count, hot.before)) if is_hot(hot) else ForebayCell(
            sequence, 0)
    begin_record(cell, claim, named)
    begin_pair(cell, claim, pair_at(record, OTHERS), others.tag, others.state)
    begin_pair(cell, claim, pair_at(record, REPORTED), sequence, 0)


cdef void describe_synced_fixed(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef const LimitParams* params = charge.params
    cdef Counted counted = fixed_counted(params, verdict.tag, verdict.state, verdict.now_ns)
    cdef uint64_t estimate = counted.count + others_in(params, verdict.cell, counted.end_ns).count
    outlook.retry_after_ns = 0 if allowed else counted.left_ns
    outlook.reset_after_ns = counted.left_ns if estimate else 0
    outlook.available = params.limit - estimate if estimate < params.limit else 0


cdef void describe_synced_sliding(
    const Charge* charge, const Verdict* verdict, bint allowed, Outlook* outlook
) noexcept nogil:
    cdef Counted counted = sliding_counted_of_all(charge.params, verdict.cell, verdict.state, verdict.now_ns)
    describe_counts(charge, &counted, verdict.now_ns, allowed, outlook)


cdef bint fixed_begin_hot(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef Counted counted = fixed_counted((<const Charge*>parameters).params, tag, 0, now_ns)
    next.state = counted.time
    return state == 0


cdef bint sliding_begin_hot(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const LimitParams* params = (<const Charge*>parameters).params
    cdef Counted counted = sliding_counted(params, 0, now_ns)
    next.state = sliding_state(params, &counted)
    return state == 0


@cython.final
cdef class SyncedWindow(SyncedLimiter):
    """A ``FixedWindow`` or ``SlidingWindow`` over a ``SyncedStore``, which makes it.

    Each method decides in this host's memory, as those do over a ``Store``, and may be called from any thread and in
    asyncio's. ``reset`` forgets what this host has counted, and reports that to the others. The next exchange brings
    back what they have counted.
    """

    cdef readonly object rate
    cdef readonly bint slides

    def __cinit__(self, store, name, rate, synced_store, bint slides, keys, name_of, rounding=None):
        cdef int period_bits
        self.rate = as_rate(rate)
        self.slides = slides
        self.kind = FOREBAY_KIND_COUNT
        self.take = synced_sliding_take if slides else synced_fixed_take
        self.give_back = sliding_give_back if slides else synced_fixed_give_back
        self.describe = describe_synced_sliding if slides else describe_synced_fixed
        self.begin_hot = sliding_begin_hot if slides else fixed_begin_hot
        self.params.limit = self.params.rate_limit = self.rate.limit
        self.params.rounds_up = slides and rounds_up(rounding, self.rate.limit)
        self.params.period_ns = self.rate.period_ns
        self.params.phase_ns = self.segment.wall_epoch_ns % self.params.period_ns
        period_bits = count_bits_for(self.params.period_ns)
        self.params.window_shift = period_bits - 1
        self.params.previous_bits = count_bits_for(self.params.limit) if slides else 0
        self.params.low_bits = count_bits_for(self.params.limit) + self.params.previous_bits
        # A quantum, 2**(low_bits - 2) ns, is at most half a window.
        if self.params.low_bits > period_bits or self.params.limit >= UNANSWERED:
            raise InvalidLimiter(
                f"{self.rate} is too much for a window that is synced: take a longer period, or a token bucket")
        encoding = b"synced %d %d %d" % (2 if slides else 1, self.params.period_ns, self.params.low_bits)
        purpose = Purpose(
            algorithm=layout.ALGORITHM_SYNCED_SLIDING_WINDOW if slides else layout.ALGORITHM_SYNCED_FIXED_WINDOW,
            words_per_cell=WORDS_PER_CELL, low_bits=self.params.low_bits, limit=0, period_ns=self.params.period_ns)
        self.begin(purpose, keys, synced_store, name_of, encoding, window_clear)

    @cython.binding(False)
    def __init__(self, store, name, rate, synced_store, slides, keys, name_of, rounding=None):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    cdef int note_name(self, uint32_t algorithm, bytes encoding) except -1:
        """Limiters of one period add to one sum at Redis, though their cells have other formats."""
        return SyncedLimiter.note_name(self, algorithm, b"%d" % self.params.period_ns)

    def __repr__(self):
        kind = "SlidingWindow" if self.slides else "FixedWindow"
        rounding = f" rounding={self.rounding!r}" if self.slides and self.params.rounds_up != rounds_up(
            None, self.params.limit) else ""
        return f"<{kind} {self.name!r} {self.rate}{rounding}, over {self.synced_store!r}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        cdef uint64_t tag = self.tag_of(key)
        if self.take == synced_fixed_take:
            return decide_named(self, key, tag, &self.unit, &verdict, synced_fixed_take, NULL) == ALLOWED
        return decide_named(self, key, tag, &self.unit, &verdict, synced_sliding_take, NULL) == ALLOWED

    @property
    def rounding(self):
        """The rounding of a sliding window. None for a fixed window."""
        return ("up" if self.params.rounds_up else "down") if self.slides else None

    @property
    def low_bits(self):
        """The number of bits of a state below its time. Limiters of one name and period share their cells only if it is
        equal.
        """
        return self.params.low_bits

    cdef void forget(self, uint64_t tag, Events* events) noexcept nogil:
        """Reset a key's counts. The cell stays, because the next report must carry the zero."""
        cdef Charge all_of_it
        cdef uint64_t state
        cdef ForebayCell* cell = table_find(&self.table, tag, &state)
        cdef ForebayCell seen, wanted
        while cell != NULL:
            seen = wanted = load128_acquire(pair_at(record_of(&self.params, cell), OTHERS))
            wanted.state = 0
            if load_acquire(&cell.tag) != tag or cas128_acq_rel(
                    pair_at(record_of(&self.params, cell), OTHERS), seen, wanted):
                break
        all_of_it = self.unit
        all_of_it.amount = ~<uint64_t>0
        table_amend(&self.table, tag, self.give_back, &all_of_it, events)

    def window_number(self, uint64_t now_ns):
        """The number of the window at this time: its end, in periods since 1970."""
        return (window_end_ns(&self.params, 0, now_ns) + self.segment.wall_epoch_ns) // self.params.period_ns

    def learn(self, bytes name, uint64_t end_ns, uint64_t count):
        """For the exchange: the published sum of the key with this name. The window's end is in ns since 1970."""
        cdef uint64_t until_ns
        end_ns -= self.segment.wall_epoch_ns
        until_ns = end_ns + (self.params.period_ns if self.slides else 0)
        self.keep(name, end_ns, count_state(until_ns, HOT_COUNT_BITS, min(count, MOST_OF_OTHERS)), until_ns)

    cdef Hot hot_of(self, const uint64_t* name, uint64_t now_ns) noexcept:
        cdef Hot hot = no_hot()
        hot.end_ns = window_end_ns(&self.params, 0, now_ns)
        hot.count = low_of(hot_state(&self.hot_cells, name, hot.end_ns), HOT_COUNT_BITS)
        if self.slides:
            hot.before = low_of(
                hot_state(&self.hot_cells, name, hot.end_ns - self.params.period_ns), HOT_COUNT_BITS)
        return hot

    cdef uint64_t state_as_hot(self, const Hot* hot, uint64_t now_ns) noexcept:
        cdef const LimitParams* params = &self.params
        cdef int count_bits = params.low_bits - params.previous_bits
        cdef Counted counted
        if not self.slides:
            counted = fixed_counted(params, 0, 0, now_ns)
            return counted.time | min(hot.count, low_mask(count_bits))
        counted = sliding_counted(params, 0, now_ns)
        counted.count = min(hot.count, low_mask(count_bits))
        counted.previous = min(hot.before, low_mask(params.previous_bits))
        return sliding_state(params, &counted)

    cdef int forget_hot_of(self, const uint64_t* name, Events* events) noexcept:
        cdef uint64_t end_ns = window_end_ns(&self.params, 0, table_now(&self.table))
        forget_hot(&self.hot_cells, name, end_ns, events)
        if self.slides:
            forget_hot(&self.hot_cells, name, end_ns - self.params.period_ns, events)
        return 0

    cdef bint is_behind(
        self, ForebayCell* cell, ForebayCell seen, uint64_t now_ns, const unsigned char* learned
    ) noexcept:
        """Whether this host knows less of a key than is published, if this exchange has read its name."""
        cdef const LimitParams* params = &self.params
        cdef uint64_t* record = record_of(params, cell)
        cdef uint64_t[4] name
        cdef Hot hot
        cdef Both others, reported
        cdef ForebayCell pair
        if learned == NULL or not may_have(learned, record) or seen.tag & low_mask(FOREBAY_KIND_BITS) != (
                FOREBAY_KIND_COUNT) or not self.is_intact(record, seen.tag, name):
            return False
        hot = self.hot_of(name, now_ns)
        others = others_in(params, cell, hot.end_ns)
        pair = load128_acquire(pair_at(record, REPORTED))
        reported = both_in(params, pair.tag, pair.state, hot.end_ns)
        return hot.count > others.count + (reported.count & ~UNANSWERED) or (
            hot.before > others.before + (reported.before & ~UNANSWERED))

    cdef tuple report_of(
        self, uint64_t index, uint64_t now_ns, int64_t round_number, const unsigned char* learned, uint64_t* unnamed
    ):
        """The end of the window, in ns since 1970; then three numbers for it and three for the window before.

        They are this host's count (-1: query Redis and report nothing), the part of it that Redis knew, and the count
        of the other hosts.
        """
        cdef const LimitParams* params = &self.params
        cdef ForebayCell* cell = self.table.cells + index
        cdef uint64_t* record = record_of(params, cell)
        cdef uint64_t[4] name
        cdef uint64_t end_ns, own, previous, sequence, time_ns, read_us
        cdef int64_t count, before
        cdef ForebayCell seen, asked
        cdef Both reported, marked, others
        cdef bint asks = self.slides and is_due(index, round_number, True)
        cdef bint is_behind_here, is_known_hot
        seen = load128_acquire(cell)
        is_behind_here = self.is_behind(cell, seen, now_ns, learned)
        if round_number == BEHIND_ONLY and not is_behind_here:
            return None
        if not self.read_counts(cell, seen, now_ns, asks, is_behind_here, &end_ns, &own, &previous):
            return None
        while True:
            # SYNC sequence -> reading: the sequence is loaded before the cell and the clock are read.
            asked = load128_acquire(pair_at(record, REPORTED))
            # The clock is read in this order, too: else the later report might be about the earlier window.
            time_ns = table_now(&self.table)
            seen = load128_acquire(cell)
            if not self.read_counts(cell, seen, time_ns, asks, is_behind_here, &end_ns, &own, &previous):
                return None
            reported = both_in(params, asked.tag, asked.state, end_ns)
            others = others_in(params, cell, end_ns)
            is_known_hot = SHARE * (own + previous + others.count + others.before) >= params.limit
            if reported.count == own and (not self.slides or reported.before == previous) and not is_due(
                    index, round_number, is_known_hot) and not is_behind_here:
                return None
            if not self.is_intact(record, seen.tag, name):
                unnamed[0] += load_acquire(&cell.tag) == seen.tag
                return None
            # Read between two looks at the cell, with the right checksum: all of one key.
            if load_acquire(&cell.tag) != seen.tag:
                return None
            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000
            sequence = (sequence_of(asked) + 1) & low_mask(COUNT_BITS)
            marked = reported
            count = report(own, &marked.count)
            before = report(previous, &marked.before) if self.slides else -1
            # SYNC reading -> sequence
            if round_number == LOOK_ONLY or cas128_acq_rel(
                    pair_at(record, REPORTED), asked, pair_of(params, end_ns, sequence, marked)):
                break
        return (
            (index, seen.tag, name[INCARNATION], sequence), PyBytes_FromStringAndSize(<char*>name, 16), read_us,
            end_ns + self.segment.wall_epoch_ns,
            count, reported.count & ~UNANSWERED, others.count, before, reported.before & ~UNANSWERED, others.before)

    cdef bint read_counts(
        self, const ForebayCell* cell, ForebayCell seen, uint64_t now_ns, bint asks, bint is_behind_here,
        uint64_t* end_ns, uint64_t* own, uint64_t* previous
    ) noexcept:
        """The counts of a cell in this window and in the one before; False if there is nothing to report of them.

        The state of a key that was counted in the window before, and only denied in this one, stays in the one before.
        Its report is still needed, to learn what the others count in this window. With `asks` it is needed as long as
        the others' counts in the window before may deny it, and if more is published. A state of a later window is
        reported as it is.
        """
        cdef const LimitParams* params = &self.params
        cdef Both others
        cdef uint64_t state_end_ns = time_of(seen.state, params.low_bits)
        cdef int count_bits = params.low_bits - params.previous_bits
        cdef uint64_t now_end_ns
        if seen.tag & low_mask(FOREBAY_KIND_BITS) != FOREBAY_KIND_COUNT:
            return False
        now_end_ns = window_end_ns(params, 0, now_ns)
        # A quantum is less than a window, so rounding down finds its end.
        state_end_ns -= (state_end_ns + params.phase_ns) % params.period_ns
        end_ns[0] = state_end_ns - params.period_ns if self.slides else state_end_ns
        own[0] = low_of(seen.state, count_bits)
        previous[0] = low_of(seen.state, params.low_bits) >> count_bits
        if end_ns[0] < now_end_ns:
            previous[0] = own[0] if self.slides else 0
            own[0] = 0
            end_ns[0] += params.period_ns
        if end_ns[0] >= now_end_ns:
            return True
        if not asks and not is_behind_here:
            return False
        end_ns[0] = now_end_ns
        own[0] = previous[0] = 0
        others = others_in(params, cell, now_end_ns)
        return is_behind_here or others.count != 0 or others.before != 0

    def merge(self, tuple place, uint64_t end_ns, reply, reply_before=None):
        """For the exchange: take Redis' reply about a cell's key, if that is still of this incarnation.

        `reply` is for the window, `reply_before` for the one before if the report had it: the count that Redis knows
        of this host, the count of the others, and whether that is only a lower bound. None if Redis has not replied.
        """
        cdef const LimitParams* params = &self.params
        cdef uint64_t index, tag, incarnation, sequence
        cdef ForebayCell* cell
        cdef ForebayCell seen
        cdef uint64_t* record
        cdef Both both
        index, tag, incarnation, sequence = place
        if index >= self.extent.used_cells:
            raise IndexError(f"there is no cell {index}")
        end_ns -= self.segment.wall_epoch_ns
        cell = self.table.cells + index
        record = record_of(params, cell)
        while True:
            # SYNC pair -> claim: the pair is read before the cell, so the CAS fails after a later claim.
            seen = load128_acquire(pair_at(record, OTHERS))
            if load_acquire(&cell.tag) != tag or load_acquire(&record[INCARNATION]) != incarnation:
                return
            if not is_later(sequence, sequence_of(seen)):
                break
            both = both_in(params, seen.tag, seen.state, end_ns)
            both.count = others_by(reply, both.count)
            both.before = others_by(reply_before, both.before)
            # Linearizes here, for the others' counts.
            if cas128_acq_rel(pair_at(record, OTHERS), seen, pair_of(params, end_ns, sequence, both)):
                break
        while True:
            seen = load128_acquire(pair_at(record, REPORTED))
            if load_acquire(&cell.tag) != tag or load_acquire(&record[INCARNATION]) != incarnation:
                return
            if sequence_of(seen) != sequence:
                # More has been reported since then, with or without a reply.
                return
            both = both_in(params, seen.tag, seen.state, end_ns)
            both.count = self.known_by(reply, both.count)
            both.before = self.known_by(reply_before, both.before)
            if cas128_acq_rel(pair_at(record, REPORTED), seen, pair_of(params, end_ns, sequence, both)):
                return

    cdef uint64_t known_by(self, object reply, uint64_t before) except? 0:
        """The count that Redis knows of this host, at most the largest that a count's bits hold."""
        cdef int count_bits = self.params.low_bits - self.params.previous_bits
        return before if reply is None else min(<uint64_t>reply[0], low_mask(count_bits))


cdef uint64_t others_by(object reply, uint64_t before) except? 0:
    cdef uint64_t others
    if reply is None:
        return before
    others = reply[1]
    return min(max(others, before) if reply[2] else others, MOST_OF_OTHERS)
