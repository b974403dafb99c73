"""Hot keys: what a host knows of keys that only other hosts have counted. Read limiter.pyx beside it first.

State
-----
*At Redis*, beside the hashes with the counts, there are *hot lists* (src/forebay/redis/scripts/sync.lua). A list has
the names and the sums of at most 64 *hot* keys, whose sums have reached a quarter of their limit. Each of the 16 shards
of a limiter's keys has a list; a window has lists of its own. A list has a version, which every change raises. A list
and the hashes of its keys are in one slot, and one script changes both. So a copy of Redis that is behind has them as
they were at one time.

*On the host*, a hot key has a *hot cell* in the store's table, for each window that still counts:

    tag      a keyed hash of the key's name at Redis and of the window's end
    state    of a window: until when it counts | the sum, in 32 bits; of a bucket: the TAT

That is not the cell of the key, which belongs to the limiter's own table. A key's tag there is a hash of its text by a
secret of this segment. A name at Redis is another hash of the text, and Redis has no text. So no process can find a
key's cell by its name alone. But a request has the text, and computes the name before it inserts the key. An exchange
finds the cells of keys that were counted here by the names in their records.

*In a process* that exchanges: the version of each list that it has caught up with. *In an exchange*: a filter of the
names that it has read, by their first two bytes. Threads of a process may exchange at once.

Transitions
-----------
* *publish*: Redis, in the script that takes a report.
* *read*: an exchanger, before its reports: each list whose version is not the one that this process has caught up with.
  Every eighth exchange reads all lists.
* *keep*: the same exchanger. A hot cell -> the sum that was read. By insertion into the table or by an acq_rel CAS of
  the cell. "synced window: a hot key that is new"
* *adopt*: a request whose key has no cell, if it has a hot cell. It inserts the key without a charge. The record has
  the published counts as the others' counts; the state of a bucket is the published TAT. Then the request is decided as
  for every key. "synced window: a hot key that is new"
* *catch up*: an exchanger, for a cell whose name it has just read, if its host knows less than is published. It queries
  Redis for the key, although the host has nothing to report, and merges the reply. "synced window: a hot key that was
  counted"
* *query*: an exchanger, for a cell of which its host has nothing to report: in every eighth exchange if the key is hot
  by what the host knows (its own count and the others'), else in every 64th. As *catch up*. So the host learns what
  others give back, and Redis gets counts again that it has lost. The bound below doesn't need this step.
* *hear*: with ``push``, the host's listener, between exchanges, after another host has published that some lists have
  changed. As *read*, *keep* and *catch up*, for these lists alone. The bound below doesn't need this step.

Invariant
---------
A request that begins after an exchange of its host knows of its key at least what the lists had when the exchange
began.

Proof
-----
The exchanger keeps all sums that it has read, and only then scans the cells. There are two kinds of keys.

* *The key has a cell when the scan reads it.* The exchanger finds the name in the filter. If the cell's record has less
  than the hot cell, the exchanger queries Redis. The merge of the reply is as for every report, see limiter.pyx.
* *The key has no cell then.* A later request that finds no cell reads the hot cell before it inserts the key.

SYNC hot cell -> insertion: the hot cell is changed before the scan reads a cell, and a request reads the hot cell after
its search for the key's cell. So if the scan doesn't meet the key, a request that begins later finds the hot cell as
the exchange has left it.

*Nothing counts twice.* A published sum contains what this host has reported itself. It is taken as the others' count
only for a key without a cell: for a new incarnation, whose own count begins anew. For a key with a cell, it is only
compared with what Redis knew of this host and of the others. The reply to the query is exact.

*Adoption loses no charge.* It is an insertion like any other, which leaves a member as it is. All processes that help a
claim write what they have read in the hot cell, the last of them perhaps after the promotion, but none after a merge
(SYNC pair -> claim). If they have read different values, either stands until the next exchange catches up.

*The bound.* Let I be the interval plus the time that an exchange takes. Let a host decide at time t about a key of a
window. The other hosts have reported their admissions up to t - 2 I by t - I. The host's last exchange began after
that, so it has read a list that counts them, if the key was hot. If it was not, their sum was less than a quarter of
the limit. The host admits only while its own count and the others' known counts are below the limit. So all hosts
together admit at most

    the limit, what the other hosts admit within 2 I, and less than a quarter of the limit.

The quarter is only missing from what a host knows if the host has not exchanged since its own first admission of the
key. Without hot keys, such a host may admit a whole limit in addition to any admissions of the others. For buckets the
argument is the same with the refill of 2 I in addition: the published TAT is that of all hosts together.

Crash and stall
---------------
Redis publishes in the script that takes the report, so there is no step between the two. An exchange notes the
versions of its lists after it has caught up with their names. If it is killed or fails before, the next exchange reads
the lists again. A process that is stopped between read and keep may replace a later sum by an earlier one. That stands
until the sum changes again, and for at most eight exchanges.

A request that is stopped between its search and its insertion for a whole exchange inserts what was published before.
The next exchange that reads the key's list catches up.

Not handled
-----------
* A list has no room for more than 64 keys, and keeps the hottest. The hot cells of a key that loses its place stay as
  they are until their time is over. A host learns of a key without a place when it next reports or queries it.
* Without room in the host's table, nothing is kept: a hot cell evicts no key. But a key may evict a hot cell, if the
  store's policy is to evict. The bound of such a key is that of keys that are not hot.
* A key without a name is not adopted.
* A host reads the lists of the window that it is in by its own clock. Counts of a host with a fast clock for the
  next window are read in the first exchange after that window has begun.
* A bucket's published TAT is in this host's time. It is too early by as long as the query took to reach Redis. An
  exchange doesn't catch up with less than a millisecond.
"""

from libc.stdint cimport uint8_t, uint64_t

from forebay.core.table.keys cimport derive_key
from forebay.core.table.native cimport ForebayCell, ForebayHashKey, siphash13
from forebay.core.table.segment_view cimport Segment
from forebay.core.table.table cimport (
    DENY, Events, Next, Verdict, fingerprint_of, prefetch_away, table_amend, table_decide, table_find,
    table_now, table_remove,
)


cdef uint64_t hot_tag(const HotCells* cells, const uint64_t* name, uint64_t end_ns) noexcept nogil:
    cdef uint64_t[3] words = [name[0], name[1], end_ns]
    return fingerprint_of(siphash13(cells.hash_key, <const uint8_t*>words, sizeof(words))) | cells.kind


cdef bint replace(
    ForebayCell* cell, uint64_t tag, uint64_t state, uint64_t now_ns, const void* parameters, Next* next,
) noexcept nogil:
    next.state = (<const uint64_t*>parameters)[0]
    return next.state != state


cdef HotCells hot_cells(Segment segment, ForebayHashKey limiter_key, bytes encoding, uint64_t kind):
    cdef HotCells cells
    cells.table = segment.table
    cells.table.on_full = DENY
    cells.hash_key = derive_key(limiter_key, b"hot " + encoding)
    cells.kind = kind
    return cells


cdef uint64_t hot_state(HotCells* cells, const uint64_t* name, uint64_t end_ns) noexcept nogil:
    cdef uint64_t state
    cdef uint64_t tag = hot_tag(cells, name, end_ns)
    prefetch_away(&cells.table, tag)
    table_find(&cells.table, tag, &state)
    return state


cdef void keep_hot(
    HotCells* cells, const uint64_t* name, uint64_t end_ns, uint64_t state, uint64_t until_ns,
    uint64_t counter_line, uint64_t* claim_sequence, Events* events,
) noexcept nogil:
    cdef Verdict verdict
    cdef uint64_t tag = hot_tag(cells, name, end_ns)
    verdict.now_ns = table_now(&cells.table)
    if until_ns <= verdict.now_ns:
        # Nothing to insert; but an earlier sum counts no more.
        table_amend(&cells.table, tag, replace, &state, events)
    else:
        table_decide(&cells.table, tag, counter_line, claim_sequence, replace, &state, &verdict, events)


cdef void forget_hot(
    HotCells* cells, const uint64_t* name, uint64_t end_ns, Events* events
) noexcept nogil:
    table_remove(&cells.table, hot_tag(cells, name, end_ns), events)
