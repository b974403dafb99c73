"""Limits that are counted on each host at once and exchanged with the others at intervals, over Redis.

Here is what their keys are called and how that is kept; synced_window.pyx and synced_bucket.pyx decide and say what is
to be exchanged, penstock.redis.synced exchanges it.

What is exchanged
-----------------
A host tells Redis of a key: *I have counted U of it so far* (of a window: in that window; of a bucket: since the key
came to its cell). Redis keeps U for each host, adds the difference to what it had, and answers with the total. So a
message that is lost, repeated, or overtaken by a later one changes nothing that the next one doesn't put right: what is
told is never an event, always a state. Nothing is lost and nothing counted twice, however often a process is killed
in between, however many exchange at once, and though nobody remembers what was sent.

* *U may fall*, by a refund. So each message bears the time at which U was read, of this host's one clock, and Redis
  leaves a message that was read before the last one alone.
* *A key may lose its cell* (eviction) and come back, with U begun anew. So each message bears the key's *birth*, the id
  of the claim by which it came to its cell, which no other claim has. Of another birth than it knows, Redis counts U
  besides what it has, and takes nothing away for it. Of a window the host then gets its own former count back as if it
  were another host's. An answer is learned only if the cell's key is still of the birth that the message bore. (Between
  that look and the store the key may go and come back. Then it may seem that Redis knows more of it than it does, until
  its count differs from that or its turn comes: a window's is put right then; of a bucket as much is never told.)
* *Two limiters may have one name and period but other limits*, and then other cells if their counts need other bits.
  Each is a host of its own at Redis: its field has the bits in it. Both add to one sum.
* *Redis may forget* (emptied, or a key evicted). A message bears what the host believes to be
  known. Of a bucket only what has been charged since is added then; the hosts' own times still stand. Of a window all
  is told again, by each host in its turn; until all have, the sum is too small. So who finds that Redis doesn't know it
  any more, or has no sum at all though there once were others' counts, marks the window as *lost*, and of a lost window
  a host never takes others' count for less than it knew. That holds until the window is over, so what is given back in
  a lost window isn't learned by the others. It isn't noticed that Redis knows an older count of a host, as after a
  failover to a copy that was behind: what that lacks is missing until its host tells it again.

The name of a key
-----------------
The exchanger needs 128 bits that stand for the key at Redis. The table has 61 others, by a hash that only this segment
knows, and most keys were counted by other processes. So each cell has words behind it: the name, the birth, and a
*seal*, a keyed hash of these and of the cell's tag.

Who inserts a key writes them (`begin_words`) while the cell is a claim, before it is promoted: SYNC words -> promote:
who reads the member by an acquire load sees them. All that promote one claim write the same, as they have it from the
key and the claim. So a process may be killed anywhere: before the promotion, nothing was counted; after it, the words
are there.

*Late writers.* One that was stopped between seeing its claim stand and writing may write into the words of another key
that has got the cell meanwhile. Then the seal is wrong, as it is for half-written words, and the exchanger leaves that
key alone: until it comes to a cell again, it is limited on this host by what this host knows. So no key's window is
ever told under another's name (at odds of 2**-64); for what a bucket has behind its seal, see synced_bucket.pyx. A key
that has come back to the very cell within that moment may be told under its former birth. A key is without a name also
if it lost its cell between being looked for and being inserted by the same request.

*Reading*: the cell, its words, the cell again. If its tag is still the same and the seal is right, they belong
together. Its birth may be that of before if the key was evicted and came back to this cell in between; the next message
says better.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from penstock.core.cell_limiter cimport CellLimiter, whole_cost
from penstock.core.keys cimport derive_key
from penstock.core.limiter cimport Ask, Draw, Shape
from penstock.core.native cimport (
    PenstockCell, PenstockHashKey, load128_acquire, load_acquire, siphash13, store_release,
)
from penstock.core.table cimport ALLOWED, Clear, Events, Table, fingerprint_of, table_decide, table_find, table_now

from penstock.errors import InvalidCost, InvalidKey, shown


cdef enum:
    # Between noting a name and using it there are only other threads' requests.
    MOST_NAMES = 1024


cdef uint64_t seal_of(const uint64_t* words, uint64_t tag, PenstockHashKey key) noexcept nogil:
    # In docs/segment-format.md, too.
    cdef uint64_t[4] sealed = [words[NAME], words[NAME + 1], words[BIRTH], fingerprint_of(tag)]
    return siphash13(key, <const uint8_t*>sealed, sizeof(sealed)) | 1


cdef bint begin_words(PenstockCell* cell, PenstockCell claim, const NamedDraw* named) noexcept nogil:
    cdef uint64_t* words = words_of(named.draw.shape, cell)
    cdef uint64_t[4] wanted = [named.name[0], named.name[1], claim.state, 0]
    cdef PenstockCell again = load128_acquire(cell)
    cdef int i
    if again.tag != claim.tag or again.state != claim.state:
        return False
    wanted[SEAL] = seal_of(wanted, claim.tag, named.seal_key) if named.is_named else 0
    # SYNC words -> promote
    for i in range(NAME, SEAL + 1):
        store_release(&words[i], wanted[i])
    return True


cdef list checked_batch(CellLimiter limiter, object keys, object costs):
    cdef Draw draw
    if isinstance(keys, (str, bytes)):
        raise InvalidKey(f"allow_many takes a list of keys, not the one key {shown(keys)}")
    if isinstance(costs, int):
        raise InvalidCost(f"costs is a list with one cost for each key, not {shown(costs)}")
    keys = list(keys)
    costs = [1] * len(keys) if costs is None else [whole_cost(cost) for cost in costs]
    if len(costs) != len(keys):
        raise InvalidCost(f"{len(keys)} keys need {len(keys)} costs, not {len(costs)}")
    for key, cost in zip(keys, costs, strict=True):
        limiter.tag_of(key)
        limiter.draw(cost, &limiter.shape, &draw)
    return list(zip(keys, costs, strict=True))


cdef int commit_named(CellLimiter limiter, SyncedMemory memory, Ask* ask) except -1:
    cdef Events events
    cdef NamedDraw named
    memory.name_draw(ask.tag, ask.draw, &named)
    events.inserted = events.evicted = events.full = events.cas_retries = 0
    ask.verdict.full = False
    ask.verdict.now_ns = table_now(&limiter.table)
    table_decide(
        &limiter.table, ask.tag, limiter.claim_stripe, &limiter.counters.claims, limiter.take, &named.draw,
        &ask.verdict, &events)
    limiter.count_events(&events)
    if ask.verdict.outcome == ALLOWED and limiter.record != NULL:
        limiter.record(ask.draw, &ask.verdict)
    return ask.verdict.outcome == ALLOWED


@cython.final
cdef class SyncedMemory:
    """What a synced limiter has behind its cells, and what its keys are called. Of one limiter object."""

    def __cinit__(self, extent, name_of):
        self.extent = extent
        self.name_of = name_of
        self.names = {}

    cdef int lay_out(self, Table* table, Shape* shape, PenstockHashKey hash_key, Clear clear) except -1:
        """Let a limiter use it."""
        table[0] = self.extent.table
        # A state and its tag that don't belong together do no harm: nothing is written for them.
        table.has_words = False
        table.clear = clear
        shape.cells = table.cells
        shape.words = self.extent.words
        shape.last_cell = self.extent.used_cells - 1
        self.seal_key = derive_key(hash_key, b"seal")
        return 0

    cdef int note(self, object key, uint64_t tag, const Table* table) except -1:
        """What a key is called, if it may have to be inserted: that takes a microsecond."""
        cdef uint64_t state
        if table_find(table, tag, &state) == NULL and tag not in self.names:
            if len(self.names) >= MOST_NAMES:
                self.names.pop(next(iter(self.names)), None)
            self.names[tag] = self.name_of(key)
        return 0

    cdef int name_draw(self, uint64_t tag, const Draw* draw, NamedDraw* named) except -1:
        cdef bytes name = self.names.get(tag)
        named.draw = draw[0]
        named.is_named = name is not None and PyBytes_GET_SIZE(name) == sizeof(named.name)
        named.name[0] = named.name[1] = 0
        named.seal_key = self.seal_key
        if named.is_named:
            memcpy(named.name, PyBytes_AS_STRING(name), sizeof(named.name))
        return 0

    cdef bint is_sealed(self, const uint64_t* words, uint64_t tag) noexcept:
        cdef uint64_t[4] seen
        cdef int i
        for i in range(NAME, SEAL + 1):
            seen[i] = load_acquire(&words[i])
        return seen[SEAL] != 0 and seen[SEAL] == seal_of(seen, tag, self.seal_key)
