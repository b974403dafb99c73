"""Token buckets that are synced with other hosts; read synced.pyx first.

The cell's state is the theoretical arrival time (TAT) of what this host knows: its own usage at once, the others' since
the last exchange. Behind it stands what this host has *charged*, in ns of refill, a sum that is told to Redis as far as
it belongs to the key (`CHARGED` less `CHARGED_BEFORE`).

A charge is two steps: the CAS that decides, then an addition to the sum. So is what gives back. Killed in between, a
process has charged this one request (or given this back) on this host only, and the others are never told. Stopped in
between, it tells it late; if the cell has got another key by then, it is told as that one's.

CHARGED is never set, only added to: so it doesn't matter that several promote a claim, and that one of them may be
late. They all read it before they see the claim stand, when nothing is added to it any more for the key before, nor yet
for the new one, and store the same as CHARGED_BEFORE. One that is stopped just before that store, until the cell has
got yet another key, makes that one's CHARGED_BEFORE older: what the keys in between were charged is told as its own.

*At Redis* there is a TAT for the sum of all hosts. What a host has charged since it told last, d, is taken as spread
over that time, which began at s: ``tat = max(tat, s) + d``. So what was refilled meanwhile isn't lost, as it would be
with ``max(tat, now) + d``: by that a host that always stays within its limit would be told after every exchange that it
had used an interval's worth at once. It is too little if d was spent at the end of that time and the bucket had been
full before: by what is refilled in that time at most. There is no upper bound to the TAT: what hosts together have
admitted beyond the rate stays a debt, which is paid by admitting less, so that in the long run the rate holds.

*Back on the host* the TAT is moved on to the time of the message's reading, plus how far Redis' was ahead, plus what
was charged since, less what was given back; never back, as the host knows best what it has charged itself, and Redis
may be behind for having spread it. So of what another host gives back, those that have learned of it hear nothing: for
them it is refilled in its time. But a `reset` moves the TAT to now, whoever had used it; the next exchange brings what
is still booked at Redis. A host alone is told nothing that it doesn't know: Redis' TAT has been moved by the same sum,
from no later a time (but for as much as one of its messages took longer than a later one).

*An answer that is lost*: Redis may know what it was told, or what it knew before. So what is told is marked as
`UNANSWERED` first, and told again as long as it is: it might otherwise seem that there is nothing to tell, when what
was told has been given back meanwhile. (So is a window's count.)
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t

from penstock.core.cell_limiter cimport CellLimiter
from penstock.core.decision cimport Decision
from penstock.core.gcra cimport GcraLimiter, gcra_give_back, gcra_take
from penstock.core.limiter cimport Ask, Draw, Shape
from penstock.core.native cimport (
    PENSTOCK_KIND_BITS, PENSTOCK_KIND_TAT, PenstockCell, cas128_acq_rel, fetch_add_relaxed, load128_acquire,
    load_acquire, monotonic_ns, store_release,
)
from penstock.core.synced cimport (
    BIRTH, CHARGED, CHARGED_BEFORE, CHARGED_TOLD, LOOK_ONLY, NAME, TOLD_UNTIL, WORDS_PER_CELL, NamedDraw, SyncedMemory,
    begin_words, checked_batch, commit_named, decide_named, is_turn, words_of,
)
from penstock.core.table cimport ALLOWED, TIME_BITS, UNDECIDED, Next, Outcome, Verdict, table_find, table_now

from penstock import layout
from penstock.errors import InvalidLimiter
from penstock.extents import ExtentShape, Purpose, open_extent
from penstock.rate import as_rate


# Of CHARGED_TOLD: Redis may know this, or what it has been told since.
cdef uint64_t UNANSWERED = <uint64_t>1 << 63


cdef void bucket_record(const Draw* draw, const Verdict* verdict) noexcept nogil:
    if verdict.cell != NULL:
        fetch_add_relaxed(&words_of(draw.shape, verdict.cell)[CHARGED], draw.amount)


cdef inline uint64_t charged_since_birth(const uint64_t* words) noexcept nogil:
    """What a process that was late to charge the key before may have given back doesn't make it negative."""
    cdef uint64_t charged = load_acquire(&words[CHARGED]) - load_acquire(&words[CHARGED_BEFORE])
    return charged if charged >> 63 == 0 else 0


cdef void bucket_clear(PenstockCell* cell, PenstockCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    cdef const NamedDraw* named = <const NamedDraw*>parameters
    cdef uint64_t* words = words_of(named.draw.shape, cell)
    # Before the claim is seen to stand: so it is of before anything is charged to the new key.
    cdef uint64_t charged = load_acquire(&words[CHARGED])
    if begin_words(cell, claim, named):
        store_release(&words[CHARGED_BEFORE], charged)
        store_release(&words[CHARGED_TOLD], 0)
        store_release(&words[TOLD_UNTIL], now_ns)


@cython.final
cdef class SyncedTokenBucket(GcraLimiter):
    """What ``TokenBucket`` is over a ``SyncedStore``; made by that.

    Each method decides in this host's memory, as over a ``Store``, and may be called from any thread and in asyncio's.
    ``reset`` fills the bucket for this host, and tells the others what of that it had charged itself; what they have
    charged is known again after the next exchange.
    """

    cdef readonly uint64_t burst
    cdef readonly object synced_store
    cdef SyncedMemory memory

    def __cinit__(self, store, name, rate, burst, synced_store, keys, name_of):
        self.rate = as_rate(rate)
        self.synced_store = synced_store
        self.gcra_shape(self.rate, self.rate.limit if burst is None else burst, "burst", &self.shape)
        self.burst = self.shape.limit
        self.record = bucket_record
        ExtentShape.checked(keys, WORDS_PER_CELL, name)
        self.memory = SyncedMemory(open_extent(store, name, Purpose(
            algorithm=layout.ALGORITHM_SYNCED_BUCKET, words_per_cell=WORDS_PER_CELL, low_bits=0, limit=0, period_ns=0),
            keys), name_of)
        self.draw(1, &self.shape, &self.unit)
        self.enroll(b"synced")
        self.memory.lay_out(&self.table, &self.shape, self.hash_key, bucket_clear)

    @cython.binding(False)
    def __init__(self, store, name, rate, burst, synced_store, keys, name_of):
        """For its signature. ``__cinit__`` has done the work: it can't be skipped or run twice."""

    def __repr__(self):
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}, over {self.synced_store!r}>"

    @cython.binding(False)
    def allow(self, key, /):
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        return decide_named(
            self, self.memory, key, self.tag_of(key), &self.unit, &verdict, gcra_take, bucket_record) == ALLOWED

    def reserve(self, key, cost=1, max_delay=None):
        """Book `cost` permits of `key` and say after how many seconds they may be used, as far as this host knows."""
        self.memory.note(key, self.tag_of(key), &self.table)
        return CellLimiter.reserve(self, key, cost, max_delay)

    @cython.binding(False)
    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key. As so many calls of ``hit``, after all are checked."""
        return [self.hit(key, cost).allowed for key, cost in checked_batch(self, keys, costs)]

    @property
    def keys(self):
        return self.memory.extent.keys

    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1:
        # With where the words are.
        shape[0] = self.shape
        if rate is None and burst is None:
            return 0
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        rate = as_rate(rate)
        return self.gcra_shape(rate, rate.limit if burst is None else burst, "burst", shape)

    cdef Outcome decide(self, uint64_t tag, const Draw* draw, Verdict* verdict) except UNDECIDED:
        return decide_named(self, self.memory, None, tag, draw, verdict, gcra_take, bucket_record)

    cdef Decision decide_once(self, object key, const Draw* draw):
        cdef Verdict verdict
        cdef uint64_t tag = self.tag_of(key)
        cdef bint allowed
        if draw.amount == 0:
            allowed = self.decide_or_peek(tag, draw, &verdict)
        else:
            allowed = decide_named(self, self.memory, key, tag, draw, &verdict, gcra_take, bucket_record) == ALLOWED
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

    cdef int return_draw(self, uint64_t tag, const Draw* draw) except -1:
        """Of what this host has charged, and so that the others are told.

        A reservation that is cancelled comes back as far as it hasn't been refilled, though what was learned of others
        since lies behind it: that it was charged at all is known to be so.
        """
        cdef Draw own = draw[0]
        cdef uint64_t state, now_ns
        cdef uint64_t* words
        cdef PenstockCell* cell
        cdef PenstockCell seen, wanted
        cdef Next next
        own.charged_state = 0
        self.check_bound()
        while True:
            cell = table_find(&self.table, tag, &state)
            if cell == NULL:
                return 0
            words = words_of(&self.shape, cell)
            seen = load128_acquire(cell)
            now_ns = table_now(&self.table)
            own.amount = min(draw.amount, charged_since_birth(words))
            if draw.charged_state != 0:
                own.amount = min(own.amount, draw.charged_state - min(now_ns, draw.charged_state))
            if seen.tag != tag:
                continue
            if not gcra_give_back(cell, tag, seen.state, now_ns, &own, &next):
                return 0
            wanted.tag = tag
            wanted.state = next.state
            if cas128_acq_rel(cell, seen, wanted):
                fetch_add_relaxed(&words[CHARGED], next.state - seen.state)
                return 0

    cdef int forget(self, uint64_t tag) except -1:
        """Full for this host, whoever has used what. Of that the others are told what was its own."""
        cdef uint64_t state, now_ns, given
        cdef uint64_t* words
        cdef PenstockCell* cell
        cdef PenstockCell seen, wanted
        self.check_bound()
        while True:
            cell = table_find(&self.table, tag, &state)
            if cell == NULL:
                return 0
            words = words_of(&self.shape, cell)
            seen = load128_acquire(cell)
            now_ns = table_now(&self.table)
            given = charged_since_birth(words)
            if seen.tag != tag:
                continue
            if seen.state <= now_ns:
                return 0
            given = min(given, seen.state - now_ns)
            wanted.tag = tag
            wanted.state = now_ns
            if cas128_acq_rel(cell, seen, wanted):
                fetch_add_relaxed(&words[CHARGED], 0 - given)
                return 0

    def _cells(self):
        """For the exchange: how many cells there are to look at."""
        return self.memory.extent.used_cells

    def _usages(self, uint64_t first, uint64_t last, int64_t turn):
        """For the exchange: when this was read, in microseconds of the host; and what is to be told of the keys in the
        cells from `first` to before `last`, a tuple for each: cell, tag, name, birth, the ns that this host has charged
        since then, those that Redis knew of, the time in ns of this reading, and of the one that Redis knew.

        All that Redis doesn't know yet, to the microsecond, and of the others those whose turn it is: every
        `IDLE_TURNS`-th; with a turn of -1 all that count, with -2 none, nor with -3, which only looks. Also, how many
        are left out for want of a name.
        """
        cdef uint64_t read_us = (monotonic_ns() - self.table.epoch_ns) // 1000
        cdef uint64_t now_ns = self.segment.now_ns()
        cdef uint64_t index, charged, told, told_until_ns
        cdef uint64_t unnamed = 0
        cdef list usages = []
        cdef PenstockCell* cell
        cdef PenstockCell seen
        cdef uint64_t* words
        for index in range(first, min(last, self.memory.extent.used_cells)):
            cell = self.table.cells + index
            seen = load128_acquire(cell)
            if seen.tag & ((1 << PENSTOCK_KIND_BITS) - 1) != PENSTOCK_KIND_TAT:
                continue
            words = words_of(&self.shape, cell)
            charged = charged_since_birth(words)
            told = load_acquire(&words[CHARGED_TOLD]) & ~UNANSWERED
            told_until_ns = load_acquire(&words[TOLD_UNTIL])
            if charged // 1000 == load_acquire(&words[CHARGED_TOLD]) // 1000:
                # There is nothing to tell of the time until now.
                store_release(&words[TOLD_UNTIL], now_ns)
                if seen.state <= now_ns or not is_turn(index, turn):
                    continue
            name, birth = PyBytes_FromStringAndSize(<char*>&words[NAME], 16), load_acquire(&words[BIRTH])
            # Read between two looks at the cell, and sealed: all of one key.
            if load_acquire(&cell.tag) == seen.tag and self.memory.is_sealed(words, seen.tag):
                if turn != LOOK_ONLY:
                    store_release(&words[CHARGED_TOLD], told | UNANSWERED)
                usages.append((index, seen.tag, name, birth, charged, told, now_ns, min(told_until_ns, now_ns)))
            elif load_acquire(&cell.tag) == seen.tag:
                unnamed += 1
        return read_us, usages, unnamed

    def _learn(
        self, uint64_t index, uint64_t tag, uint64_t birth, uint64_t charged, uint64_t told, uint64_t read_ns,
        uint64_t ahead_ns,
    ):
        """For the exchange: what Redis has answered to a message that said `charged` and was read at `read_ns`: what it
        knows of this host, and how far its TAT is ahead of now."""
        cdef PenstockCell* cell
        cdef PenstockCell seen, wanted
        cdef uint64_t* words
        cdef uint64_t now_charged
        if index >= self.memory.extent.used_cells:
            raise IndexError(f"there is no cell {index}")
        cell = self.table.cells + index
        words = words_of(&self.shape, cell)
        seen = load128_acquire(cell)
        if seen.tag != tag or load_acquire(&words[BIRTH]) != birth:
            return
        ahead_ns = min(ahead_ns, self.most_ahead_ns)
        store_release(&words[CHARGED_TOLD], told)
        if told // 1000 == charged // 1000:
            store_release(&words[TOLD_UNTIL], read_ns)
        while seen.tag == tag and load_acquire(&words[BIRTH]) == birth:
            now_charged = charged_since_birth(words)
            wanted.tag = tag
            if now_charged >= charged:
                wanted.state = read_ns + ahead_ns + min(now_charged - charged, self.most_ahead_ns)
            else:
                # What was given back since then isn't to be learned again.
                wanted.state = read_ns + ahead_ns - min(charged - now_charged, ahead_ns)
            if wanted.state == read_ns or (seen.state >= wanted.state and seen.state >> TIME_BITS == 0):
                return
            if wanted.state >> TIME_BITS or cas128_acq_rel(cell, seen, wanted):
                return
            seen = load128_acquire(cell)
