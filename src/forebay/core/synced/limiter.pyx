"""Limits that each host counts at once and exchanges with the others at intervals, over Redis.

This module keeps the names of keys beside their cells. window.pyx and token_bucket.pyx beside it decide and make the
reports; hot.pyx has what a host knows of keys that it hasn't counted. forebay.redis.synced.store exchanges all that.

State
-----
A state-based CRDT: for each key, a counter per host, of which Redis keeps the latest value and the sum (a G-counter,
but a refund may lower a host's value). Behind each cell is a record of eight words:

    0, 1  name: 128 bits that name the key at Redis
    2     incarnation: the unique id of the claim by which the key came to the cell
    3     checksum: a keyed hash of the words before and of the cell's tag; 0: no name
    4..7  two pairs of counts and sequences, see window.pyx and token_bucket.pyx

Transitions
-----------
* *report*: an exchanger. *This host has counted U of the key so far*: in a window, of that window; in a bucket, since
  the incarnation began. It reads the sequence, which window it is, the cell and the clock, and then raises the sequence
  by a 128-bit acq_rel CAS of the pair of words that holds it. If that CAS fails, it reads all again. "synced window:
  two messages"
* *merge*: the same exchanger, with the reply. By 128-bit acq_rel CASes of the two pairs. "synced window: two replies"
* *insert*: the process that inserts a key writes the record (`begin_record`) while the cell is a claim, before it is
  promoted. Each pair by a 128-bit acq_rel CAS. "synced window: a key without a name". If the key is hot,
  it is inserted without a charge first, see hot.pyx.

Redis keeps U for each host, adds the difference to what it had, and replies with the total. A report is a state, never
an event. So a report that is lost, repeated, or overtaken by a later one changes nothing that the next report doesn't
put right.

Invariant
---------
Nothing is lost and nothing is counted twice, however often processes are killed in between and however many exchange at
once, and though no process remembers what was sent. No key is reported under another's name or under an earlier
incarnation.

Proof: the exchange
-------------------
* *U may fall*, by a refund. So each report has the time at which U was read, of this host's one clock. Redis takes only
  a report that was read later than the one it took last.
* *A key may lose its cell* (eviction) and come back, with U begun anew. So each report has the key's incarnation. For
  another incarnation than it knows, Redis counts U in addition, and takes nothing away for it. In a window the host
  then gets its own former count back as if it were another host's. A reply is merged only if the cell's key is still of
  the incarnation in the report.
* *Two limiters may have one name and period but other limits*, and then other cells if their counts need other bits.
  Each is a host of its own at Redis: its field has the bits in it. Both add to one sum.
* *Redis may forget* (emptied, or a key evicted). A report has what the host believes Redis to know. In a bucket only
  what was charged since is added then; the hosts' own times still stand. In a window each host reports all again, in
  its round; until all have, the sum is too small. A host may find that Redis doesn't know it any more, or has no sum at
  all though there once were others' counts. It then marks the window as *lost*. In a lost window a host never takes the
  others' count for less than it knew. That holds until the window is over, so others don't learn what is given back in
  a lost window.

*The order of reports.* A process may be stopped anywhere, and go on when others of its host have exchanged since.
Between two sequences there is one reading. So of two reports of a key, the one with the later sequence was read later,
is about no earlier window, and has no earlier time. If two reports have one microsecond, Redis takes the first that
arrives, and replies to the other with the count that it knows.

SYNC sequence -> reading, SYNC reading -> sequence: the exchanger loads the pair with the sequence before it reads the
cell and the clock, and raises the sequence by a CAS from that value after it has read them.

* *The counts of other hosts* in a window are merged together with the report's sequence, by one CAS of both, and only
  if that sequence is later than the one merged last. So a process that goes on late takes nothing back.
* *The part of this host's counts that Redis knows* is learned from the reply to the last report only. That report has
  marked it as unanswered. It stays so, and the key pending, until that reply comes or a reply to the next report. Redis
  has the state that it replied: it ignores earlier reports that arrive later.
* *A bucket's TAT* only ever moves on, so its replies need no order.

The order is this host's, of reports. It is not an order of replies by the server's time or by a count that is kept
there. A server's clock may be set back, and a server may be emptied or replaced by a copy that is behind. Every reply
would then seem old until the server has caught up.

*Another incarnation.* A pair changes only by a CAS from what was read before the cell was read. A process that claims
the cell for another key puts another pair in it while its claim stands (SYNC pair -> claim). Hardly any other claim has
the same pair: in a window it has 32 bits of the claim's id, in a bucket ten of them and the time. So a process that is
late to merge or to report finds the pair changed, and leaves it alone.

Proof: the name of a key
------------------------
The exchanger needs 128 bits that stand for the key at Redis. The table has 61 others, by a hash that only this segment
knows, and other processes counted most keys. So the record has the name.

SYNC words -> promote: the record is written before the claim is promoted, so a process that reads the member by an
acquire load sees it. `begin_record` writes pairs, each by a CAS from a value that it had read before it saw its claim
stand. So a process may be killed or stopped anywhere. Before the promotion, nothing was counted; after it, the record
is complete. A late writer finds that the process that promoted the claim has changed the pair, or it writes the same
value. The name is the exception: the key of before may have come back to the cell, or the late writer had no name. Then
the checksum is wrong.

All processes that promote one claim write the same, as they have it from the key and the claim, except the sum of a
hot key (hot.pyx). But a key is *without a name* if it lost its cell between the search for it and its insertion by the
same request. It has no checksum then, and the exchanger leaves it alone. Until it comes to a cell again, this host
limits it by what this host knows. The same holds if the checksum is wrong, by such a late writer or by damage (at odds
of 2**-64).

*Reading* (a seqlock read): the sequence, the cell, its record, the cell again. If its tag is still the same, the
checksum is right and the sequence can be raised, they belong together.

Crash and stall
---------------
Killed or stopped between report and merge, or between the two CASes of a merge: the key is reported again.

Not handled
-----------
* Redis may know an older count of a host, for example after a failover to a copy that was behind. No host notices; the
  difference is missing until the host reports the key again.
* One process is stopped between its report's reading and its sending. Another, whose report was read later, is stopped
  between its reply and the merge. The first may merge news before the second merges what is older. The next exchange
  puts it right.
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from forebay.core.cell_limiter cimport CellLimiter, whole_cost
from forebay.core.decision cimport Decision
from forebay.core.limiter cimport Attempt, Charge, record_of
from forebay.core.synced.hot cimport FILTER_BITS, Hot, is_hot, keep_hot, no_hot, hot_cells
from forebay.core.table.keys cimport derive_key
from forebay.core.table.native cimport (
    ForebayCell, ForebayHashKey, ForebayLine, cas128_acq_rel, load128_acquire, load_acquire, siphash13,
)
from forebay.core.table.table cimport (
    ALLOWED, UNDECIDED, Clear, Events, Next, Outcome, Verdict, fingerprint_of, no_events, table_decide, table_find,
    table_now,
)

from threading import local

from forebay.core.arguments import costs_of, keys_of
from forebay.segment.extents import ExtentShape, open_extent


cdef enum:
    # A thread uses the name that it has noted before it notes this many others.
    MOST_NAMES = 1024


class Names(local):
    """The latest names, by tag. Other threads note any number while one waits for the name in a further limit."""

    def __init__(self):
        self.by_tag = {}


cdef uint64_t checksum_of(const uint64_t* record, uint64_t tag, ForebayHashKey key) noexcept nogil:
    # In docs/segment-format.md, too.
    cdef uint64_t[4] covered = [record[NAME], record[NAME + 1], record[INCARNATION], fingerprint_of(tag)]
    return siphash13(key, <const uint8_t*>covered, sizeof(covered)) | 1


cdef void begin_pair(
    ForebayCell* cell, ForebayCell claim, ForebayCell* pair, uint64_t first, uint64_t second
) noexcept nogil:
    cdef ForebayCell wanted = ForebayCell(first, second)
    # SYNC pair -> claim: the pair is read before the claim is seen to stand.
    cdef ForebayCell seen = load128_acquire(pair)
    while stands(cell, claim) and not cas128_acq_rel(pair, seen, wanted):
        seen = load128_acquire(pair)


cdef void begin_record(ForebayCell* cell, ForebayCell claim, const NamedCharge* named) noexcept nogil:
    cdef uint64_t* record = record_of(named.charge.params, cell)
    cdef uint64_t[4] wanted = [named.name[0], named.name[1], claim.state, 0]
    wanted[CHECKSUM] = checksum_of(wanted, claim.tag, named.checksum_key) if named.is_named else 0
    begin_pair(cell, claim, pair_at(record, NAME), wanted[NAME], wanted[NAME + 1])
    begin_pair(cell, claim, pair_at(record, INCARNATION), wanted[INCARNATION], wanted[CHECKSUM])


cdef class SyncedLimiter(CellLimiter):
    """Base class of the limiters that are synced; not used by itself.

    Every method that may insert a key gives it a name before it gets a cell.
    """

    cdef int begin(
        self, object purpose, object keys, object synced_store, object name_of, bytes encoding, Clear clear
    ) except -1:
        """Open the extent, and register, once the params are known."""
        ExtentShape.checked(keys, WORDS_PER_CELL, self.name)
        self.extent = open_extent(self.store.attachment, self.name, purpose, keys)
        self.synced_store, self.name_of, self.names = synced_store, name_of, Names()
        self.charge_for(1, &self.params, &self.unit)
        self.table = self.extent.table
        self.register(purpose.algorithm, encoding, self.params.limit)
        # A state and its tag that don't belong together do no harm: nothing is written for them.
        self.table.has_record = False
        self.table.clear = clear
        self.params.cells = self.table.cells
        self.params.records = self.extent.records
        self.params.words_per_cell = WORDS_PER_CELL
        self.params.last_cell = self.extent.used_cells - 1
        self.hot_cells = hot_cells(self.segment, self.hash_key, encoding, self.kind)
        self.checksum_key = derive_key(self.hash_key, b"checksum")
        return 0

    @property
    def keys(self):
        return self.extent.keys

    def reserve(self, key, cost=1, max_delay=None, *, rate=None, burst=None):
        """Book `cost` permits of `key`. The ``delay`` until they may be used is by this host's knowledge.

        A window can't be booked ahead: it only charges a request that is allowed now.
        """
        self.note(key, self.tag_of(key))
        return CellLimiter.reserve(self, key, cost, max_delay, rate=rate, burst=burst)

    def peek(self, key, cost=1, *, rate=None, burst=None):
        """The decision that `hit` with the same arguments would return now. Charges and counts nothing."""
        self.note(key, self.tag_of(key))
        return CellLimiter.peek(self, key, cost, rate=rate, burst=burst)

    def reset(self, key):
        """Forget what this host has counted of `key`, and what it knows of the others. Each kind says more."""
        cdef NamedCharge named
        cdef Events events
        cdef uint64_t tag = self.tag_of(key)
        cdef bint is_new = self.note(key, tag)
        self.ensure_attached()
        events = no_events()
        if is_new:
            self.name_charge(tag, &self.unit, table_now(&self.table), &named)
            self.forget_hot_of(named.name, &events)
        self.forget(tag, &events)
        self.count_events(&events)

    @cython.binding(False)
    def allow_many(self, keys, costs=None):
        """Decide a batch in order: a list of bools, one per key. As so many calls of ``hit``, after all are checked."""
        cdef Charge charge
        keys = keys_of(keys)
        costs = [whole_cost(cost) for cost in costs_of(costs, len(keys))]
        for key, cost in zip(keys, costs, strict=True):
            self.tag_of(key)
            self.charge_for(cost, &self.params, &charge)
        return [self.hit(key, cost).allowed for key, cost in zip(keys, costs, strict=True)]

    cdef Outcome decide(self, uint64_t tag, const Charge* charge, Verdict* verdict) except UNDECIDED:
        return decide_named(self, None, tag, charge, verdict, self.take, self.after_charge)

    cdef Decision decide_once(self, object key, const Charge* charge):
        cdef Verdict verdict
        cdef uint64_t tag = self.tag_of(key)
        cdef bint allowed
        if charge.amount == 0:
            self.note(key, tag)
            allowed = self.decide_or_peek(tag, charge, &verdict)
        else:
            allowed = decide_named(self, key, tag, charge, &verdict, self.take, self.after_charge) == ALLOWED
        return self.new_decision(charge, &verdict, allowed)

    cdef Decision hit_once(self, object key, const Charge* charge, object request_id, object request_ttl):
        self.note(key, self.tag_of(key))
        return CellLimiter.hit_once(self, key, charge, request_id, request_ttl)

    cdef int attempt_for(self, object key, object cost, Attempt* attempt) except -1:
        cdef NamedCharge named
        CellLimiter.attempt_for(self, key, cost, attempt)
        if self.note(key, attempt.tag):
            self.ensure_attached()
            self.name_charge(attempt.tag, attempt.charge, table_now(&self.table), &named)
            self.adopt(attempt.tag, &named)
        return 0

    cdef int commit(self, Attempt* attempt) except -1:
        cdef Events events
        cdef NamedCharge named
        cdef ForebayLine* line = self.line_here()
        events = no_events()
        attempt.verdict.full = False
        attempt.verdict.now_ns = table_now(&self.table)
        self.name_charge(attempt.tag, attempt.charge, attempt.verdict.now_ns, &named)
        table_decide(
            &self.table, attempt.tag, line.number, &line.counters.claims, self.take, &named.charge,
            &attempt.verdict, &events)
        self.count_events(&events)
        if attempt.verdict.outcome == ALLOWED and self.after_charge != NULL:
            self.after_charge(attempt.charge, &attempt.verdict)
        return attempt.verdict.outcome == ALLOWED

    cdef bint peek_verdict(self, uint64_t tag, const Charge* charge, Verdict* verdict) except -1:
        """As every limiter's; but a hot key without a cell has its published sum."""
        cdef NamedCharge named
        cdef Next next
        cdef uint64_t state
        cdef bint allowed = CellLimiter.peek_verdict(self, tag, charge, verdict)
        if verdict.cell != NULL:
            return allowed
        self.name_charge(tag, charge, verdict.now_ns, &named)
        state = self.state_as_hot(&named.hot, verdict.now_ns) if is_hot(&named.hot) else 0
        if state == 0:
            return allowed
        verdict.state = state
        return self.take(NULL, tag, state, verdict.now_ns, charge, &next)

    cdef bint note(self, object key, uint64_t tag) except -1:
        """Whether a key has no cell. Its name is computed and kept then, which takes a microsecond."""
        cdef uint64_t state
        cdef dict names
        if table_find(&self.table, tag, &state) != NULL:
            return False
        if key is not None:
            names = self.names.by_tag
            if tag not in names:
                name = self.name_of(key)
                if len(names) >= MOST_NAMES:
                    names.pop(next(iter(names)), None)
                names[tag] = name
        return True

    cdef int name_charge(self, uint64_t tag, const Charge* charge, uint64_t now_ns, NamedCharge* named) except -1:
        cdef dict names = self.names.by_tag
        cdef bytes name = names.get(tag)
        named.charge = charge[0]
        named.is_named = name is not None and PyBytes_GET_SIZE(name) == sizeof(named.name)
        named.name[0] = named.name[1] = 0
        named.checksum_key = self.checksum_key
        named.hot = no_hot()
        if named.is_named:
            memcpy(named.name, PyBytes_AS_STRING(name), sizeof(named.name))
            named.hot = self.hot_of(named.name, now_ns)
        return 0

    cdef int adopt(self, uint64_t tag, const NamedCharge* named) except -1:
        """Insert a hot key without a cell, with its published sum and without a charge; if there is room."""
        cdef Events events
        cdef Verdict verdict
        cdef ForebayLine* line = self.line_here()
        if not is_hot(&named.hot):
            return 0
        events = no_events()
        verdict.now_ns = table_now(&self.table)
        table_decide(
            &self.table, tag, line.number, &line.counters.claims, self.begin_hot, named, &verdict, &events)
        # The request itself counts that.
        events.full = 0
        self.count_events(&events)
        return 0

    cdef Hot hot_of(self, const uint64_t* name, uint64_t now_ns) noexcept:
        """The published record of the key with this name. Each kind has its own."""
        return no_hot()

    cdef uint64_t state_as_hot(self, const Hot* hot, uint64_t now_ns) noexcept:
        """The state of a hot key as if this host had counted all of it. Each kind has its own."""
        return 0

    cdef int keep(self, bytes name, uint64_t end_ns, uint64_t state, uint64_t until_ns) except -1:
        """Keep the published sum of a key, as the state of its hot cell."""
        cdef Events events
        cdef uint64_t[2] words
        cdef ForebayLine* line
        if PyBytes_GET_SIZE(name) != sizeof(words):
            raise ValueError(f"a name of {PyBytes_GET_SIZE(name)} bytes")
        memcpy(words, PyBytes_AS_STRING(name), sizeof(words))
        line = self.ensure_attached()
        events = no_events()
        keep_hot(
            &self.hot_cells, words, end_ns, state, until_ns, line.number, &line.counters.claims, &events)
        # A hot cell is no key of the limiter.
        events.inserted = events.full = 0
        self.count_events(&events)
        return 0

    cdef int forget_hot_of(self, const uint64_t* name, Events* events) noexcept:
        """Forget the published sum of a key. Each kind has its own."""
        return 0

    cdef bint is_intact(self, const uint64_t* record, uint64_t tag, uint64_t* seen) noexcept:
        """Whether a name and an incarnation belong to the key with this tag; `seen` is left with a copy of them."""
        cdef int i
        for i in range(NAME, CHECKSUM + 1):
            seen[i] = load_acquire(&record[i])
        return seen[CHECKSUM] != 0 and seen[CHECKSUM] == checksum_of(seen, tag, self.checksum_key)

    def reports(self, uint64_t first, uint64_t last, int64_t round_number, bytearray learned=None):
        """The reports that an exchange sends for the keys in the cells from `first` to before `last`.

        A report is a tuple: the key's place, for `merge`; its name; when it was read, in microseconds of the host; and
        its `report_of`. Keys with counts that Redis lacks are always reported. By `round_number`, a
        `HOT_ROUNDS`-th of the others is reported too if they are hot by what this host knows, and a `COLD_ROUNDS`-th of
        the rest; with -1, all others that count; with -2 and -3, no others. -3 only reads. `learned` is a filter of the
        names that this exchange has read in hot lists: keys of which this host knows less than is published are
        reported, too. With -4, only these are reported.

        The second result is the number of keys that are left out because they have no name.
        """
        cdef uint64_t index
        cdef uint64_t unnamed = 0
        cdef list reports = []
        cdef const unsigned char* filter = NULL
        if learned is not None:
            if PyByteArray_GET_SIZE(learned) != FILTER_BITS // 8:
                raise ValueError(f"a filter of {PyByteArray_GET_SIZE(learned)} bytes")
            filter = <const unsigned char*>PyByteArray_AS_STRING(learned)
        # A segment's clock that follows Python's stands still from here on.
        cdef uint64_t now_ns = self.segment.now_ns()
        for index in range(first, min(last, self.extent.used_cells)):
            report = self.report_of(index, now_ns, round_number, filter, &unnamed)
            if report is not None:
                reports.append(report)
        return reports, unnamed

    cdef tuple report_of(
        self, uint64_t index, uint64_t now_ns, int64_t round_number, const unsigned char* learned, uint64_t* unnamed
    ):
        """The report of one key, or None if there is nothing to report. Each kind has its own."""
        return None

    @property
    def cell_count(self):
        """The number of cells that ``reports`` can read."""
        return self.extent.used_cells
