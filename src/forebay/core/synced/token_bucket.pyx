"""Token buckets that are synced with other hosts; read synced/limiter.pyx first.

The cell's state is the theoretical arrival time (TAT) of what this host knows: its own usage at once, the others' since
the last exchange. Behind it stands what this host has *charged*, in ns of refill, a sum that is told to Redis as far as
it belongs to the key (`CHARGED` less `CHARGED_BEFORE`).

A charge is two steps: the CAS that decides, then an addition to the sum. So is what gives back. Killed in between, a
process has charged this one request (or given this back) on this host only, and the others are never told. Stopped in
between, it tells it late; if the cell has got another key by then, it is told as that one's.

CHARGED is never set, only added to. Who claims the cell for another key makes CHARGED_BEFORE the same by one CAS of
both, which was read before the claim was seen to stand: when nothing is added any more for the key before, nor yet for
the new one. One that is late finds it changed, or puts there what is there.

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

*An answer that is lost*: Redis may know what it was told, or what it knew before. So what is told is marked as not
answered first, and told again as long as it is: it might otherwise seem that there is nothing to tell, when what was
told has been given back meanwhile. (So is a window's count.)
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint64_t

from forebay.core.algorithms.counts cimport low_mask
from forebay.core.algorithms.gcra cimport (
    gcra_booked_delay_ns, gcra_describe, gcra_draw, gcra_give_back, gcra_refused_delay_ns, gcra_shape_of, gcra_take,
    most_ahead_of,
)
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Draw, Shape
from forebay.core.synced.limiter cimport (
    BIRTH, CHARGED, CHARGED_BEFORE, CHARGED_TOLD, LOOK_ONLY, WORDS_PER_CELL, NamedDraw, SyncedLimiter, begin_pair,
    begin_words, decide_named, is_turn, pair_at, stands, words_of,
)
from forebay.core.table.native cimport (
    FOREBAY_KIND_BITS, FOREBAY_KIND_TAT, ForebayCell, cas128_acq_rel, fetch_add_relaxed, load128_acquire,
    load_acquire, monotonic_ns,
)
from forebay.core.table.table cimport ALLOWED, TIME_BITS, Next, Verdict, table_find, table_now

from forebay.errors import InvalidLimiter
from forebay.rate import as_rate
from forebay.segment import layout
from forebay.segment.extents import Purpose


cdef enum:
    # Of CHARGED_TOLD. A ticket that has come back, as a process was stopped meanwhile, is told apart by TOLD_UNTIL.
    TICKET_BITS = 10
    US_BITS = 53


# What CHARGED_TOLD says: what Redis knows, or something that it has been told since.
cdef struct Told:
    uint64_t us
    uint64_t ticket
    bint is_unanswered


cdef inline Told told_in(uint64_t word) noexcept nogil:
    return Told(word >> (TICKET_BITS + 1), word >> 1 & low_mask(TICKET_BITS), word & 1)


cdef inline uint64_t told_word(Told told) noexcept nogil:
    return (
        min(told.us, low_mask(US_BITS)) << (TICKET_BITS + 1) | (told.ticket & low_mask(TICKET_BITS)) << 1
        | told.is_unanswered)


cdef void bucket_record(const Draw* draw, const Verdict* verdict) noexcept nogil:
    if verdict.cell != NULL:
        fetch_add_relaxed(&words_of(draw.shape, verdict.cell)[CHARGED], draw.amount)


cdef inline uint64_t charged_since_birth(const uint64_t* words) noexcept nogil:
    """What a process that was late to charge the key before may have given back doesn't make it negative."""
    cdef uint64_t charged = load_acquire(&words[CHARGED]) - load_acquire(&words[CHARGED_BEFORE])
    return charged if charged >> 63 == 0 else 0


cdef void bucket_clear(ForebayCell* cell, ForebayCell claim, uint64_t now_ns, const void* parameters) noexcept nogil:
    cdef const NamedDraw* named = <const NamedDraw*>parameters
    cdef uint64_t* words = words_of(named.draw.shape, cell)
    cdef ForebayCell seen, wanted
    begin_words(cell, claim, named)
    # SYNC pair -> claim
    seen = load128_acquire(pair_at(words, CHARGED))
    while stands(cell, claim):
        wanted.tag = wanted.state = seen.tag
        if cas128_acq_rel(pair_at(words, CHARGED), seen, wanted):
            break
        seen = load128_acquire(pair_at(words, CHARGED))
    begin_pair(cell, claim, pair_at(words, CHARGED_TOLD), told_word(Told(0, claim.state, False)), now_ns)


@cython.final
cdef class SyncedTokenBucket(SyncedLimiter):
    """What ``TokenBucket`` is over a ``SyncedStore``; made by that.

    Each method decides in this host's memory, as over a ``Store``, and may be called from any thread and in asyncio's.
    ``reset`` fills the bucket for this host, and tells the others what of that it had charged itself; what they have
    charged is known again after the next exchange.
    """

    cdef readonly object rate
    cdef readonly uint64_t burst
    cdef uint64_t most_ahead_ns

    def __cinit__(self, store, name, rate, burst, synced_store, keys, name_of):
        self.rate = as_rate(rate)
        self.most_ahead_ns = most_ahead_of(self)
        self.shape_of(self.rate, burst, &self.shape)
        self.burst = self.shape.limit
        self.kind = FOREBAY_KIND_TAT
        self.take = gcra_take
        self.give_back = gcra_give_back
        self.record = bucket_record
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
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
        cdef Verdict verdict
        return decide_named(
            self, key, self.tag_of(key), &self.unit, &verdict, gcra_take, bucket_record) == ALLOWED

    cdef int shape_of(self, object rate, object burst, Shape* shape) except -1:
        return gcra_shape_of(
            self, rate, rate.limit if burst is None else burst, "burst", self.most_ahead_ns, shape)

    cdef int shape_for_call(self, object rate, object burst, Shape* shape) except -1:
        # With where the words are.
        shape[0] = self.shape
        if rate is None and burst is None:
            return 0
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        return self.shape_of(as_rate(rate), burst, shape)

    cdef int draw(self, object cost, const Shape* shape, Draw* draw) except -1:
        return gcra_draw(self, cost, shape, draw)

    cdef int be_patient(self, Draw* draw, uint64_t patience_ns) except -1:
        draw.room += min(patience_ns, self.most_ahead_ns - draw.shape.tolerance_ns)
        return 0

    cdef uint64_t booked_delay_ns(self, const Draw* draw, const Verdict* verdict) noexcept:
        return gcra_booked_delay_ns(draw, verdict)

    cdef uint64_t refused_delay_ns(self, const Draw* draw, const Verdict* verdict) except? 0:
        return gcra_refused_delay_ns(draw, verdict)

    cdef int describe(self, const Draw* draw, const Verdict* verdict, Decision decision) except -1:
        return gcra_describe(draw, verdict, decision)

    cdef int return_draw(self, uint64_t tag, const Draw* draw) except -1:
        """Of what this host has charged, and so that the others are told.

        A reservation that is cancelled comes back as far as it hasn't been refilled, though what was learned of others
        since lies behind it: that it was charged at all is known to be so.
        """
        cdef Draw own = draw[0]
        cdef uint64_t state, now_ns
        cdef uint64_t* words
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
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
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
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

    cdef tuple report_of(self, uint64_t index, uint64_t now_ns, int64_t turn, uint64_t* unnamed):
        """The ns that this host has charged since the key's birth, the microseconds that Redis knew of, the time in ns
        of this reading, and of the one that Redis knew."""
        cdef ForebayCell* cell = self.table.cells + index
        cdef uint64_t* words = words_of(&self.shape, cell)
        cdef uint64_t[4] name
        cdef uint64_t read_us, read_ns, charged
        cdef ForebayCell seen, asked, wanted
        cdef Told told
        cdef bint is_told
        if load_acquire(&cell.tag) & low_mask(FOREBAY_KIND_BITS) != FOREBAY_KIND_TAT:
            return None
        while True:
            # SYNC ticket -> reading
            asked = wanted = load128_acquire(pair_at(words, CHARGED_TOLD))
            seen = load128_acquire(cell)
            if seen.tag & low_mask(FOREBAY_KIND_BITS) != FOREBAY_KIND_TAT:
                return None
            told = told_in(asked.tag)
            is_told = told.us == charged_since_birth(words) // 1000 and not told.is_unanswered
            if is_told and (seen.state <= now_ns or not is_turn(index, turn)):
                # There is nothing to tell of the time until now.
                wanted.state = max(asked.state, now_ns)
                cas128_acq_rel(pair_at(words, CHARGED_TOLD), asked, wanted)
                return None
            if not self.is_sealed(words, seen.tag, name):
                unnamed[0] += load_acquire(&cell.tag) == seen.tag
                return None
            # Read between two looks at the cell, and sealed: all of one key.
            if load_acquire(&cell.tag) != seen.tag:
                return None
            read_ns = table_now(&self.table)
            charged = charged_since_birth(words)
            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000
            if turn == LOOK_ONLY:
                break
            if is_told:
                wanted.state = read_ns
            told.ticket = (told.ticket + 1) & low_mask(TICKET_BITS)
            told.is_unanswered = True
            wanted.tag = told_word(told)
            # SYNC reading -> ticket
            if cas128_acq_rel(pair_at(words, CHARGED_TOLD), asked, wanted):
                break
        return (
            (index, seen.tag, name[BIRTH], told.ticket), PyBytes_FromStringAndSize(<char*>name, 16), read_us,
            charged, told.us, read_ns, min(wanted.state, read_ns))

    def merge(self, tuple place, uint64_t charged, uint64_t known_us, uint64_t read_ns, uint64_t ahead_ns):
        """For the exchange: what Redis has answered to a message that said `charged` and was read at `read_ns`: what it
        knows of this host, and how far its TAT is ahead of now."""
        cdef uint64_t index, tag, birth, ticket, now_charged
        cdef ForebayCell* cell
        cdef ForebayCell seen, wanted
        cdef uint64_t* words
        cdef Told told
        index, tag, birth, ticket = place
        if index >= self.extent.used_cells:
            raise IndexError(f"there is no cell {index}")
        cell = self.table.cells + index
        words = words_of(&self.shape, cell)
        while True:
            # SYNC pair -> claim
            seen = wanted = load128_acquire(pair_at(words, CHARGED_TOLD))
            told = told_in(seen.tag)
            if load_acquire(&cell.tag) != tag or load_acquire(&words[BIRTH]) != birth:
                return
            if told.ticket != ticket or read_ns < seen.state:
                # More has been told since then, and it isn't answered yet, or it has been; also if the ticket has come
                # back meanwhile.
                break
            wanted.tag = told_word(Told(known_us, ticket, False))
            if known_us == charged // 1000:
                wanted.state = read_ns
            if cas128_acq_rel(pair_at(words, CHARGED_TOLD), seen, wanted):
                break
        ahead_ns = min(ahead_ns, self.most_ahead_ns)
        seen = load128_acquire(cell)
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
