"""The record of hot keys: which keys were denied most of late, and which were allowed most.

A process that has switched the record on notes each key that it denies, and of those that it allows every 61st. No
decision reads the record, so nothing in it changes one.

State
-----
An extent of the store has two records, of denied and of allowed keys. A record is lines of four slots, and a slot is a
pair that changes as a whole, by one 128-bit CAS:

    +-----------------------------+---------+---------------+-------------+
    | 56 bits of the fingerprint  | limiter | time, 32 bits | count, 32   |
    +-----------------------------+---------+---------------+-------------+

The first word is the *name* of a key, which belongs to one line. The time is of the latest note, in units of 2^30 ns.
A count halves at every 64th unit, for all slots at once: its value *now* is the count shifted by as many halvings as
the line of time has had since the slot's time. A slot whose value now is 0 is *vacant*; its name stays until another
key takes it.

Transitions
-----------
Each is one acq_rel CAS from the pair that was read, by `note_once`. In a line whose slots it has read:

* *add*: a slot has the key's name. The same name, now, and one more than its value now. "hot keys: two of one key"
* *take*: no slot has it, and the slot of the least value is vacant. The key's name, now, and 1. "hot keys: two keys",
  "hot keys: a full line"
* *wear*: no slot has it, and none is vacant. The slot of the least value loses one, and keeps its name and its time.
  "hot keys: a full line that is worn"

Invariant
---------
The value of a slot is never more than the notes of the key of its name since it took the slot.

Proof
-----
Only *add* makes a count larger: by one, for one note of the key whose name the CAS expects. *take* sets 1 for one note.
Halving and *wear* only make it smaller: *wear* takes one off the value now, which isn't 0, so the subtraction leaves
the time as it is. The CAS expects name, time and count together. So it can't add to the count of a key that has taken
the slot meanwhile. If the same pair has come back, the transition from it is as right as before (no ABA). Name and
state are two loads, which may belong to different pairs. Then no pair is what the CAS expects, unless such a pair has
come since, from which the transition is right.

*Keys that come once* displace at most one key of a line: they wear the slot of the least value, and when one of them
has taken it, its slot has the least value. So the other three slots stay. The method is that of Misra and Gries,
"Finding repeated elements" (1982), except that only the least counter is worn, and that all are halved, which forgets.

Crash and stall
---------------
A note is one CAS, so a killed process leaves a whole note or none. It tries at most `NOTE_TRIES` times: a note that
loses so often is lost, so a process takes a bounded number of steps whatever others do. A decision whose process is
killed before it notes its key is not noted.

Not handled
-----------
A key may get two slots, if three processes change a line at once: a reader adds them up. Two keys of one limiter whose
fingerprints agree in 56 bits are taken for one. A process with an old reading of the clock counts in the slot's later
time. Damage makes the list wrong until the slots have been taken anew: a time that is further ahead than a reading can
be makes its slot vacant.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_HOT_COUNT_BITS, FOREBAY_HOT_HALVING_BITS, FOREBAY_HOT_LIMITER_BITS,
    FOREBAY_HOT_TIME_SHIFT, ForebayCell, cas128_acq_rel, coarse_ns, load_acquire, multiply_high,
)
from forebay.core.table.table cimport Table


cdef enum:
    NOTE_TRIES = 4
    # A prime, so that no cycle of requests is likely to have its length.
    ALLOWED_PER_NOTE = 61
    # As many halvings leave nothing of a count.
    ALL_HALVINGS = 63


# The records as a process has mapped them.
cdef struct HotKeys:
    ForebayCell* denied          # NULL: this process notes no keys
    ForebayCell* allowed
    uint64_t lines               # of each of them


cdef inline uint64_t coarse_now(const Table* table) noexcept nogil:
    """The table's time, some milliseconds late, by a clock that is read in a quarter of the time."""
    if table.manual_ns != NULL:
        return load_acquire(table.manual_ns)
    return max(coarse_ns(), table.epoch_ns) - table.epoch_ns


cdef inline uint64_t hot_name(uint64_t tag, uint64_t limiter) noexcept nogil:
    return tag >> FOREBAY_HOT_LIMITER_BITS << FOREBAY_HOT_LIMITER_BITS | limiter


cdef inline uint64_t halvings_of(uint64_t state, uint64_t now) noexcept nogil:
    """How often a slot's count has been halved since its time."""
    cdef uint64_t noted = state >> FOREBAY_HOT_COUNT_BITS
    if noted > now:
        # By a process whose reading was later than ours; or damage.
        return 0 if noted - now >> FOREBAY_HOT_HALVING_BITS == 0 else ALL_HALVINGS
    return min(
        (now >> FOREBAY_HOT_HALVING_BITS) - (noted >> FOREBAY_HOT_HALVING_BITS), <uint64_t>ALL_HALVINGS)


cdef inline uint64_t hot_count(uint64_t state, uint64_t now) noexcept nogil:
    """The value now of a slot's count."""
    return (state & ((<uint64_t>1 << FOREBAY_HOT_COUNT_BITS) - 1)) >> halvings_of(state, now)


cdef inline bint note_once(ForebayCell* line, uint64_t name, uint64_t now) noexcept nogil:
    """One attempt to note a key. False: the slot has changed meanwhile."""
    cdef ForebayCell seen, chosen, wanted
    cdef ForebayCell* slot = line
    cdef uint64_t count, order, least = ~<uint64_t>0
    cdef int i
    for i in range(FOREBAY_CELLS_PER_LINE):
        seen.tag = load_acquire(&line[i].tag)
        seen.state = load_acquire(&line[i].state)
        count = hot_count(seen.state, now)
        if seen.tag == name:
            slot, chosen = &line[i], seen
            wanted.tag = name
            wanted.state = max(now, seen.state >> FOREBAY_HOT_COUNT_BITS) if count != 0 else now
            # A count that is full stays full.
            count = min(count + 1, (<uint64_t>1 << FOREBAY_HOT_COUNT_BITS) - 1)
            wanted.state = wanted.state << FOREBAY_HOT_COUNT_BITS | count
            break
        # Of several with one value, the slot that was noted the longest ago.
        order = count << FOREBAY_HOT_COUNT_BITS | seen.state >> FOREBAY_HOT_COUNT_BITS
        if order < least:
            least = order
            slot, chosen = &line[i], seen
            if count == 0:
                wanted.tag = name
                wanted.state = now << FOREBAY_HOT_COUNT_BITS | 1
            else:
                wanted.tag = seen.tag
                wanted.state = seen.state - (<uint64_t>1 << halvings_of(seen.state, now))
    return cas128_acq_rel(slot, chosen, wanted)


cdef inline bint note_key(
    ForebayCell* slots, uint64_t lines, uint64_t tag, uint64_t limiter, uint64_t now_ns
) noexcept nogil:
    """Note one decision about a key in one of the records. False: other processes were faster each time."""
    cdef uint64_t name = hot_name(tag, limiter)
    cdef ForebayCell* line = slots + multiply_high(name, lines) * FOREBAY_CELLS_PER_LINE
    cdef int _
    for _ in range(NOTE_TRIES):
        if note_once(line, name, now_ns >> FOREBAY_HOT_TIME_SHIFT):
            return True
    return False
