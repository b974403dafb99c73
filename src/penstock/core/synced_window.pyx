"""Fixed and sliding windows that are synced with other hosts; read synced.pyx first.

The cell's state is that of a fixed or a sliding window (see window.pyx) and counts what *this host* has admitted. What
other hosts have is behind the cell, a word for each of two windows: the window's id and a count. A request is judged by
the sum, and charged by one CAS of the cell: so of this host's own usage every request sees all, and no update is lost.
What others have counted is news that is always a little old; it is read before the CAS, and may change meanwhile.

A window's *id* is its end in units of a power of two that is no longer than a period: later windows have greater ids,
modulo 2**32. A word whose id isn't asked for says nothing. Of the two words, a new window takes the one that doesn't
belong to the window before it.

SYNC claim -> others: whoever claims a cell for another key clears those words before it is promoted. Who stores what
another host has counted looks at the cell's tag first. Between the two it may be stopped: if the cell gets another key
of the same window meanwhile, that one is judged by a wrong number until the next exchange.

A count of Redis may be more than a word holds, or than the limit: then it is the limit or more, and that is all that a
decision asks.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t

from penstock.core.cell_limiter cimport CellLimiter
from penstock.core.counts cimport count_bits_for, low_mask, low_of, time_of, window_end_ns
from penstock.core.decision cimport Decision
from penstock.core.limiter cimport Ask, Draw, Shape
from penstock.core.native cimport (
    PENSTOCK_KIND_BITS, PENSTOCK_KIND_COUNT, PenstockCell, load128_acquire, load_acquire, monotonic_ns, product_below,
    store_release,
)
from penstock.core.synced cimport (
    BIRTH, COUNT_BITS, LOOK_ONLY, NAME, OTHERS, TOLD, WORDS_PER_CELL, NamedDraw, SyncedMemory, begin_words,
    checked_batch, commit_named, decide_named, is_turn, words_of,
)
from penstock.core.table cimport (
    ALLOWED, UNDECIDED, Events, Next, Outcome, Verdict, table_amend, table_find,
)
from penstock.core.window cimport (
    Counted, fixed_counted, sliding_counted, sliding_state, until_estimate, was_charged_before, weighted,
)

from penstock import layout
from penstock.errors import InvalidLimiter
from penstock.extents import ExtentShape, Purpose, open_extent
from penstock.rate import as_rate


cdef uint64_t MOST_OF_OTHERS = low_mask(COUNT_BITS)
# With a count that Redis knew: it may know another that it has been told since. Above every limit.
cdef uint64_t UNANSWERED = <uint64_t>1 << (COUNT_BITS - 1)


cdef inline uint64_t id_of(const Shape* shape, uint64_t end_ns) noexcept nogil:
    return end_ns >> shape.window_shift & low_mask(COUNT_BITS)


cdef inline uint64_t counted_in(const uint64_t* pair, uint64_t window_id) noexcept nogil:
    """What a pair of words says of a window."""
    cdef uint64_t word = load_acquire(&pair[0])
    if word >> COUNT_BITS != window_id:
        word = load_acquire(&pair[1])
    return word & low_mask(COUNT_BITS) if word >> COUNT_BITS == window_id else 0


cdef inline uint64_t others_in(
    const Shape* shape, const PenstockCell* cell, uint64_t end_ns
) noexcept nogil:
    return counted_in(&words_of(shape, cell)[OTHERS], id_of(shape, end_ns)) if cell != NULL else 0


cdef void set_counted(uint64_t* pair, uint64_t window_id, uint64_t id_before, uint64_t count) noexcept nogil:
    cdef uint64_t first = load_acquire(&pair[0]) >> COUNT_BITS
    cdef uint64_t second = load_acquire(&pair[1]) >> COUNT_BITS
    cdef int place = 0 if first == window_id else 1 if second == window_id or first == id_before else 0
    cdef uint64_t later = ((second if place else first) - window_id) & low_mask(COUNT_BITS)
    # A later window's is left alone: whoever brings this was stopped for long.
    if later == 0 or later >> (COUNT_BITS - 1) or load_acquire(&pair[place]) == 0:
        store_release(&pair[place], window_id << COUNT_BITS | min(count, low_mask(COUNT_BITS)))


cdef int64_t telling(uint64_t* pair, uint64_t window_id, uint64_t id_before, uint64_t count) noexcept:
    """A count that is about to be told; -1 if there is nothing and nothing was told before."""
    if count == 0 and load_acquire(&pair[0]) >> COUNT_BITS != window_id and (
            load_acquire(&pair[1]) >> COUNT_BITS != window_id):
        return -1
    set_counted(pair, window_id, id_before, counted_in(pair, window_id) | UNANSWERED)
    return <int64_t>count


cdef bint synced_fixed_take(
    PenstockCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Draw* draw = <const Draw*>parameters
    cdef Counted counted = fixed_counted(draw.shape, tag, state, now_ns)
    next.state = counted.time | (counted.count + draw.amount)
    return counted.count + others_in(draw.shape, cell, counted.end_ns) <= draw.room


cdef bint synced_fixed_give_back(
    PenstockCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """The window stays, with whatever is left in it: that is to be told to the others."""
    cdef const Draw* draw = <const Draw*>parameters
    cdef Counted counted = fixed_counted(draw.shape, tag, state, now_ns)
    if was_charged_before(draw, state):
        return False
    next.state = counted.time | (counted.count - min(counted.count, draw.amount))
    return counted.count != 0


cdef inline Counted sliding_counted_of_all(
    const Shape* shape, const PenstockCell* cell, uint64_t state, uint64_t now_ns
) noexcept nogil:
    cdef Counted counted = sliding_counted(shape, state, now_ns)
    counted.count += others_in(shape, cell, counted.end_ns)
    counted.previous += others_in(shape, cell, counted.end_ns - shape.period_ns)
    return counted


cdef bint synced_sliding_take(
    PenstockCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    cdef const Draw* draw = <const Draw*>parameters
    cdef const Shape* shape = draw.shape
    cdef Counted own = sliding_counted(shape, state, now_ns)
    cdef Counted of_all = sliding_counted_of_all(shape, cell, state, now_ns)
    own.count += draw.amount
    next.state = sliding_state(shape, &own)
    # weighted(...) <= room - count, without the division.
    return of_all.count <= draw.room and product_below(
        of_all.previous, of_all.left_ns, draw.room - of_all.count + 1, shape.period_ns)


cdef bint synced_sliding_give_back(
    PenstockCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    """From the current count first, then from the previous one."""
    cdef const Draw* draw = <const Draw*>parameters
    cdef Counted counted = sliding_counted(draw.shape, state, now_ns)
    cdef uint64_t from_count = min(counted.count, draw.amount)
    cdef uint64_t from_previous = min(counted.previous, draw.amount - from_count)
    if was_charged_before(draw, state) or (from_count == 0 and from_previous == 0):
        return False
    counted.count -= from_count
    counted.previous -= from_previous
    next.state = sliding_state(draw.shape, &counted)
    return True


cdef void window_clear(PenstockCell* cell, PenstockCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    cdef const NamedDraw* named = <const NamedDraw*>parameters
    cdef uint64_t* words = words_of(named.draw.shape, cell)
    cdef int i
    if begin_words(cell, claim, named):
        # SYNC claim -> others
        for i in range(OTHERS, WORDS_PER_CELL):
            store_release(&words[i], 0)


@cython.final
cdef class SyncedWindow(CellLimiter):
    """What ``FixedWindow`` and ``SlidingWindow`` are over a ``SyncedStore``; made by those.

    Each method decides in this host's memory, as those do over a ``Store``, and may be called from any thread and in
    asyncio's. ``reset`` forgets what this host has counted, and tells the others so; what they have counted is known
    again after the next exchange.
    """

    cdef readonly object rate
    cdef readonly object synced_store
    cdef readonly bint slides
    cdef SyncedMemory memory

    def __cinit__(self, store, name, rate, synced_store, bint slides, keys, name_of):
        cdef int period_bits
        self.rate = as_rate(rate)
        self.synced_store = synced_store
        self.slides = slides
        self.kind = PENSTOCK_KIND_COUNT
        self.take = synced_sliding_take if slides else synced_fixed_take
        self.give_back = synced_sliding_give_back if slides else synced_fixed_give_back
        self.shape.limit = self.shape.rate_limit = self.rate.limit
        self.shape.period_ns = self.rate.period_ns
        self.shape.phase_ns = self.segment.wall_epoch_ns % self.shape.period_ns
        period_bits = count_bits_for(self.shape.period_ns)
        self.shape.window_shift = period_bits - 1
        self.shape.previous_bits = count_bits_for(self.shape.limit) if slides else 0
        self.shape.low_bits = count_bits_for(self.shape.limit) + self.shape.previous_bits
        # A quantum, 2**(low_bits - 2) ns, is at most half a window.
        if self.shape.low_bits > period_bits or self.shape.limit >= UNANSWERED:
            raise InvalidLimiter(
                f"{self.rate} is too much for a window that is synced: take a longer period, or a token bucket")
        encoding = b"synced %d %d %d" % (2 if slides else 1, self.shape.period_ns, self.shape.low_bits)
        ExtentShape.checked(keys, WORDS_PER_CELL, name)
        self.memory = SyncedMemory(open_extent(store, name, Purpose(
            algorithm=layout.ALGORITHM_SYNCED_WINDOW, words_per_cell=WORDS_PER_CELL, low_bits=self.shape.low_bits,
            limit=2 if slides else 1, period_ns=self.shape.period_ns), keys), name_of)
        self.draw(1, &self.shape, &self.unit)
        self.enroll(encoding)
        self.memory.lay_out(&self.table, &self.shape, self.hash_key, window_clear)

    @cython.binding(False)
    def __init__(self, store, name, rate, synced_store, slides, keys, name_of):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        kind = "SlidingWindow" if self.slides else "FixedWindow"
        return f"<{kind} {self.name!r} {self.rate}, over {self.synced_store!r}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        cdef uint64_t tag = self.tag_of(key)
        if self.take == synced_fixed_take:
            return decide_named(
                self, self.memory, key, tag, &self.unit, &verdict, synced_fixed_take, NULL) == ALLOWED
        return decide_named(self, self.memory, key, tag, &self.unit, &verdict, synced_sliding_take, NULL) == ALLOWED

    def reserve(self, key, cost=1, max_delay=None):
        """As ``CellLimiter.reserve``: a window can't be booked ahead."""
        self.memory.note(key, self.tag_of(key), &self.table)
        return CellLimiter.reserve(self, key, cost, max_delay)

    @cython.binding(False)
    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key. As so many calls of ``hit``, after all are checked."""
        return [self.hit(key, cost).allowed for key, cost in checked_batch(self, keys, costs)]

    @property
    def keys(self):
        return self.memory.extent.keys

    @property
    def _low_bits(self):
        """Limits of one name and period share their cells if these are the same, too."""
        return self.shape.low_bits

    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED:
        return decide_named(self, self.memory, None, tag, draw, verdict, self.take, NULL)

    cdef Decision decide_once(self, object key, const Draw* draw):
        cdef Verdict verdict
        cdef uint64_t tag = self.tag_of(key)
        cdef bint allowed
        if draw.amount == 0:
            allowed = self.decide_or_peek(tag, draw, &verdict)
        else:
            allowed = decide_named(self, self.memory, key, tag, draw, &verdict, self.take, NULL) == ALLOWED
        return self.new_decision(draw, &verdict, allowed)

    cdef Decision hit_once(self, object key, const Draw* draw, object request_id, object request_ttl):
        self.memory.note(key, self.tag_of(key), &self.table)
        return CellLimiter.hit_once(self, key, draw, request_id, request_ttl)

    cdef int ask(self, object key, object cost, Ask* ask) except -1:
        CellLimiter.ask(self, key, cost, ask)
        self.memory.note(key, ask.tag, &self.table)
        return 0

    cdef int commit(self, Ask* ask) except -1:
        return commit_named(self, self.memory, ask)

    cdef int forget(self, uint64_t tag) except -1:
        """The cell stays, as there is something to tell: that nothing is counted any more."""
        cdef Events events
        cdef Draw all_of_it
        cdef uint64_t state
        cdef PenstockCell* cell = table_find(&self.table, tag, &state)
        cdef uint64_t* words
        if cell != NULL:
            words = words_of(&self.shape, cell)
            store_release(&words[OTHERS], 0)
            store_release(&words[OTHERS + 1], 0)
        all_of_it = self.unit
        all_of_it.amount = ~<uint64_t>0
        events.inserted = events.evicted = events.full = events.cas_retries = 0
        table_amend(&self.table, tag, self.give_back, &all_of_it, &events)
        self.count_events(&events)
        return 0

    cdef int describe(self, const Draw* draw, const Verdict* verdict, Decision decision) except -1:
        cdef const Shape* shape = draw.shape
        cdef Counted counted
        cdef uint64_t to_end_ns, estimate
        if self.slides:
            counted = sliding_counted_of_all(shape, verdict.cell, verdict.state, verdict.now_ns)
            # Of a window that is later than ours, the part of it that we haven't come to counts for waiting.
            to_end_ns = counted.end_ns - verdict.now_ns
            estimate = counted.count + weighted(shape, counted.previous, counted.left_ns)
            decision.retry_after_ns = 0 if decision.allowed else until_estimate(
                shape, &counted, to_end_ns, draw.room)
            decision.reset_after_ns = 0 if estimate == 0 else until_estimate(shape, &counted, to_end_ns, 0)
        else:
            counted = fixed_counted(shape, verdict.tag, verdict.state, verdict.now_ns)
            estimate = counted.count + others_in(shape, verdict.cell, counted.end_ns)
            decision.retry_after_ns = 0 if decision.allowed else counted.left_ns
            decision.reset_after_ns = counted.left_ns if estimate else 0
        decision.available = shape.limit - estimate if estimate < shape.limit else 0
        return 0

    def _cells(self):
        """For the exchange: how many cells there are to look at."""
        return self.memory.extent.used_cells

    def _usages(self, uint64_t first, uint64_t last, int64_t turn):
        """For the exchange: when this was read, in microseconds of the host; and what is to be told of the keys in the
        cells from `first` to before `last`, a tuple for each: cell, tag, name, birth, end of the window in ns since
        1970; and of it and of the one before each what this host has counted (-1 where there is only something to ask),
        what of that Redis knew, and what others had counted.

        All that Redis doesn't know yet, and of the others those whose turn it is: every `IDLE_TURNS`-th; with a turn
        of -1 all that count, with -2 none, nor with -3, which only looks. Also, how many are left out for want of a
        name.
        """
        cdef uint64_t read_us = (monotonic_ns() - self.table.epoch_ns) // 1000
        cdef uint64_t now_ns = self.segment.now_ns()
        cdef uint64_t index, end_ns, window_id, id_before, own, previous, told, told_before, others, others_before
        cdef uint64_t unnamed = 0
        cdef list usages = []
        cdef PenstockCell* cell
        cdef PenstockCell seen
        cdef uint64_t* words
        cdef bint is_told
        for index in range(first, min(last, self.memory.extent.used_cells)):
            cell = self.table.cells + index
            seen = load128_acquire(cell)
            if not self.read_usage(seen, now_ns, &end_ns, &own, &previous):
                continue
            words = words_of(&self.shape, cell)
            window_id = id_of(&self.shape, end_ns)
            id_before = id_of(&self.shape, end_ns - self.shape.period_ns)
            told = counted_in(&words[TOLD], window_id)
            told_before = counted_in(&words[TOLD], id_before)
            others = counted_in(&words[OTHERS], window_id)
            others_before = counted_in(&words[OTHERS], id_before)
            is_told = told == own and (not self.slides or told_before == previous)
            if is_told and not is_turn(index, turn):
                continue
            name, birth = PyBytes_FromStringAndSize(<char*>&words[NAME], 16), load_acquire(&words[BIRTH])
            # Read between two looks at the cell, and sealed: all of one key.
            if load_acquire(&cell.tag) != seen.tag:
                continue
            if not self.memory.is_sealed(words, seen.tag):
                unnamed += 1
                continue
            usages.append((
                index, seen.tag, name, birth, end_ns + self.segment.wall_epoch_ns,
                -1 if turn == LOOK_ONLY else telling(&words[TOLD], window_id, id_before, own),
                told & ~UNANSWERED, others,
                -1 if turn == LOOK_ONLY or not self.slides else telling(
                    &words[TOLD], id_before, window_id, previous),
                told_before & ~UNANSWERED, others_before))
        return read_us, usages, unnamed

    cdef bint read_usage(
        self, PenstockCell seen, uint64_t now_ns, uint64_t* end_ns, uint64_t* own, uint64_t* previous
    ) noexcept:
        """What a cell says of this window and of the one before; False if it says nothing of them.

        A key that was counted in the window before and is only denied in this one stays in that: what the others count
        in this one must be asked for all the same. A state of a later window is taken at its word.
        """
        cdef const Shape* shape = &self.shape
        cdef uint64_t state_end_ns = time_of(seen.state, shape.low_bits)
        cdef int count_bits = shape.low_bits - shape.previous_bits
        cdef uint64_t now_end_ns
        if seen.tag & low_mask(PENSTOCK_KIND_BITS) != PENSTOCK_KIND_COUNT:
            return False
        now_end_ns = window_end_ns(shape, 0, now_ns)
        # A quantum is less than a window, so rounding down finds its end.
        state_end_ns -= (state_end_ns + shape.phase_ns) % shape.period_ns
        end_ns[0] = state_end_ns - shape.period_ns if self.slides else state_end_ns
        own[0] = low_of(seen.state, count_bits)
        previous[0] = low_of(seen.state, shape.low_bits) >> count_bits
        if end_ns[0] < now_end_ns:
            previous[0] = own[0] if self.slides else 0
            own[0] = 0
            end_ns[0] += shape.period_ns
        return end_ns[0] >= now_end_ns

    def _learn(self, uint64_t index, uint64_t tag, uint64_t birth, uint64_t end_ns, *answers):
        """For the exchange: what Redis has answered of a cell's key, if that is still of this birth.

        Of the window, and of the one before if it was asked for: what is known of this host, what of the others, and
        whether that is only the least that they have counted. None where it hasn't answered, or was told nothing.
        """
        cdef PenstockCell* cell
        cdef uint64_t* words
        cdef uint64_t window_id, id_before
        if index >= self.memory.extent.used_cells:
            raise IndexError(f"there is no cell {index}")
        end_ns -= self.segment.wall_epoch_ns
        window_id = id_of(&self.shape, end_ns)
        id_before = id_of(&self.shape, end_ns - self.shape.period_ns)
        cell = self.table.cells + index
        words = words_of(&self.shape, cell)
        for (which_id, before), (told, others, is_least) in zip(
            ((window_id, id_before), (id_before, window_id)), answers, strict=False,
        ):
            # SYNC claim -> others
            if others is not None and load_acquire(&cell.tag) == tag and load_acquire(&words[BIRTH]) == birth:
                if is_least:
                    others = max(others, counted_in(&words[OTHERS], which_id))
                set_counted(&words[OTHERS], which_id, before, min(others, MOST_OF_OTHERS))
            if told is not None and load_acquire(&cell.tag) == tag and load_acquire(&words[BIRTH]) == birth:
                set_counted(&words[TOLD], which_id, before, told)
