"""Consistency checks of a segment's bytes, for `forebay.verification`, and copies of its keys, for `forebay.snapshots`.

Processes may take decisions during a check, and the mapping may be read-only. So nothing here writes, and no load here
may be a CAS on any processor. A finding may be an intermediate state of a running operation: the caller checks again
before it reports the finding.

This module computes a key's probe set by its own code, on purpose. A check that called table.pyx would accept every
place that table.pyx has chosen.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t

from forebay.core.algorithms.counts cimport FRACTION_BITS, count_time, low_mask, low_of, time_of
from forebay.core.table.native cimport (
    FOREBAY_ALGORITHM_BUCKETED_WINDOW, FOREBAY_ALGORITHM_CONCURRENCY, FOREBAY_ALGORITHM_SYNCED_FIXED_WINDOW,
    FOREBAY_ALGORITHM_SYNCED_SLIDING_WINDOW, FOREBAY_ALGORITHM_SYNCED_TOKEN_BUCKET, FOREBAY_CELLS_PER_LINE,
    FOREBAY_GROUPS_PER_KEY, FOREBAY_KIND_BITS, FOREBAY_KIND_BLOCKED, FOREBAY_KIND_CLAIM, FOREBAY_KIND_COUNT,
    FOREBAY_KIND_EMPTY, FOREBAY_KIND_TAT, FOREBAY_KIND_USED, FOREBAY_LINES_PER_GROUP, FOREBAY_SYNCED_CHECKSUM_WORD,
    FOREBAY_SYNCED_COUNT_BITS, FOREBAY_SYNCED_INCARNATION_WORD, FOREBAY_SYNCED_REPORTED_UNTIL_WORD,
    FOREBAY_SYNCED_REPORTED_WORD, FOREBAY_SYNCED_WORDS_PER_CELL, ForebayCell, ForebayHashKey, load_acquire,
    multiply_high, prefetch, siphash13,
)
from forebay.core.table.moving cimport thawed
from forebay.core.table.table cimport TIME_BITS, holds_permits
from forebay.segment.mapping cimport HeldBytes

from forebay.segment import layout
from forebay.segment.process_identity import PID_BITS


cdef enum:
    CELLS_PER_GROUP = FOREBAY_CELLS_PER_LINE * FOREBAY_LINES_PER_GROUP
    # The most reads of a value that changes while it is read.
    MOST_READS = 100
    # The most problems that one `Counts` describes. It counts all of them.
    MOST_PROBLEMS = 1000
    # Bits of a sliding log's entry.
    LAP_BIT = 62
    GIVEN_BACK_BIT = 63
    # Places of a synced limiter's words, see docs/segment-format.md.
    INCARNATION = FOREBAY_SYNCED_INCARNATION_WORD
    CHECKSUM = FOREBAY_SYNCED_CHECKSUM_WORD
    REPORTED_COUNTS = FOREBAY_SYNCED_REPORTED_WORD + 1
    REPORTED_UNTIL = FOREBAY_SYNCED_REPORTED_UNTIL_WORD
    UNANSWERED_BIT = FOREBAY_SYNCED_COUNT_BITS - 1

cdef uint64_t PID_MASK = (<uint64_t>1 << <int>PID_BITS) - 1
cdef uint64_t COUNTER_LINES = layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY


LATEST_NS = (<uint64_t>1 << TIME_BITS) - 1


# A problem of a cell or its words; 0 for none.
cdef enum Problem:
    FINE
    BAD_KIND
    BAD_EMPTY
    BAD_STATE
    BAD_CLAIM
    BAD_BLOCKED
    BAD_PLACE
    TWICE
    BAD_POSITION
    BAD_LAP
    BAD_ORDER
    BAD_TIME
    BAD_BUCKET
    BAD_MARK_PLACE
    BAD_TOTAL
    BAD_HINT
    BAD_SLOT
    BAD_LEASE
    BAD_REST
    BAD_CHECKSUM
    BAD_INCARNATION
    BAD_REPORTED
    BAD_UNTIL


PROBLEMS = (
    "", "kind", "empty", "state", "claim", "blocked", "place", "twice", "position", "lap", "order", "time", "bucket",
    "mark place", "total", "hint", "slot", "lease", "rest", "checksum", "incarnation", "reported", "until",
)


@cython.final
cdef class Counts:
    """The counts and problems that the checks of a range of cells have found."""

    cdef public list kinds               # cells, by kind
    cdef public uint64_t live
    cdef public uint64_t stale_claims
    cdef public uint64_t unfinished      # rings with entries that are claimed, but not written
    cdef public uint64_t held            # slots
    cdef public uint64_t busy            # cells that changed during each of `MOST_READS` reads
    cdef public uint64_t problem_count
    cdef public list problems            # the first: (problem, cell, its tag, its state, place, value there)

    def __cinit__(self):
        self.kinds = [0] * (1 << FOREBAY_KIND_BITS)
        self.problems = []


cdef int add_problem(
    Counts counts, Problem problem, uint64_t index, ForebayCell seen, uint64_t other, uint64_t there
) except -1:
    counts.problem_count += 1
    if len(counts.problems) < MOST_PROBLEMS:
        counts.problems.append((PROBLEMS[problem], index, seen.tag, seen.state, other, there))
    return 0


cdef ForebayCell read_pair(const ForebayCell* cell) noexcept nogil:
    """Both halves of a cell as of one moment; if they change during each of `MOST_READS` reads, of two moments."""
    cdef ForebayCell seen
    cdef int _
    for _ in range(MOST_READS):
        seen.tag = load_acquire(&cell.tag)
        seen.state = load_acquire(&cell.state)
        if load_acquire(&cell.tag) == seen.tag and load_acquire(&cell.state) == seen.state:
            break
    return seen


cdef inline uint64_t kind_of(uint64_t tag) noexcept nogil:
    return tag & low_mask(FOREBAY_KIND_BITS)


cdef inline void probe_groups(uint64_t tag, uint64_t group_count, uint64_t* groups) noexcept nogil:
    """The groups of a key's probe set. If the table has fewer groups than a probe set, some of them repeat."""
    cdef uint64_t fingerprint = tag & ~low_mask(FOREBAY_KIND_BITS)
    groups[0] = multiply_high(fingerprint, group_count)
    groups[1] = multiply_high(fingerprint * <uint64_t>0x9E3779B97F4A7C15, group_count)
    groups[2] = multiply_high(fingerprint * <uint64_t>0xD1342543DE82EF95, group_count)
    if groups[1] == groups[0]:
        groups[1] = (groups[1] + 1) % group_count
    while group_count > 2 and (groups[2] == groups[0] or groups[2] == groups[1]):
        groups[2] = (groups[2] + 1) % group_count


cdef inline bint is_among(uint64_t group, const uint64_t* groups) noexcept nogil:
    return group == groups[0] or group == groups[1] or group == groups[2]


cdef struct Cells:
    const ForebayCell* cells
    uint64_t group_count
    uint64_t used                # cells that keys may live in
    uint64_t kinds               # a bit for each kind that may be there
    uint64_t now_ns
    uint64_t latest_ns           # no valid state is later
    int kept_bits                # bits of a state that belong to the cell; -1: their number is unknown


cdef Cells cells_at(
    HeldBytes memory, uint64_t offset, uint64_t group_count, uint64_t used, tuple kinds, int kept_bits,
    uint64_t now_ns, uint64_t latest_ns,
):
    cdef Cells cells
    if offset % sizeof(ForebayCell) or offset + group_count * <uint64_t>layout.GROUP_BYTES > memory.size:
        raise IndexError("the cells are not in the segment")
    cells.cells = <const ForebayCell*>(memory.start + offset)
    cells.group_count = group_count
    cells.used = used
    cells.kinds = 1 << FOREBAY_KIND_EMPTY | 1 << FOREBAY_KIND_CLAIM
    for kind in kinds:
        cells.kinds |= 1 << <int>kind
    cells.kept_bits = kept_bits
    cells.now_ns = now_ns
    cells.latest_ns = latest_ns
    return cells


cdef Problem problem_of(const Cells* cells, uint64_t index, ForebayCell seen) noexcept nogil:
    """The problem of one cell, judged without other cells."""
    cdef uint64_t[FOREBAY_GROUPS_PER_KEY] groups
    cdef uint64_t kind = kind_of(seen.tag)
    if index >= cells.used:
        return FINE if seen.tag == FOREBAY_KIND_BLOCKED and seen.state == 0 else BAD_BLOCKED
    if not cells.kinds >> kind & 1:
        return BAD_KIND
    if kind == FOREBAY_KIND_EMPTY:
        return BAD_EMPTY if seen.tag != 0 or (cells.kept_bits >= 0 and seen.state >> cells.kept_bits) else FINE
    # Token buckets, which may have permits above their burst, are in the table of all kinds.
    if kind == FOREBAY_KIND_TAT and seen.state > cells.latest_ns and not (
            holds_permits(seen.state) and cells.kinds >> FOREBAY_KIND_COUNT & 1):
        return BAD_STATE
    if (kind == FOREBAY_KIND_COUNT or kind == FOREBAY_KIND_USED) and seen.state >> FRACTION_BITS > cells.latest_ns:
        return BAD_STATE
    if kind == FOREBAY_KIND_CLAIM and cells.kept_bits >= 0 and (
            counter_line_of(seen.state, cells.kept_bits) >= COUNTER_LINES):
        return BAD_CLAIM
    probe_groups(seen.tag, cells.group_count, groups)
    return FINE if is_among(index // CELLS_PER_GROUP, groups) else BAD_PLACE


# The length of a claim's sequence number, part of its id: see docs/segment-format.md.
cdef inline int claim_sequence_bits(int kept_bits) noexcept nogil:
    return 28 if kept_bits <= 16 else 20 if kept_bits <= 24 else 16


cdef inline uint64_t counter_line_of(uint64_t state, int kept_bits) noexcept nogil:
    return state >> (kept_bits + claim_sequence_bits(kept_bits)) & low_mask(12)


cdef bint is_stale_claim(const Cells* cells, uint64_t state) noexcept nogil:
    cdef int shift = cells.kept_bits + claim_sequence_bits(cells.kept_bits) + 12
    cdef uint64_t mask = ~<uint64_t>0 >> shift
    cdef uint64_t age = ((cells.now_ns >> 30) - (state >> shift)) & mask
    return 2 <= age <= mask - 2


cdef int64_t find_again(const Cells* cells, uint64_t index, uint64_t tag) noexcept nogil:
    """The index of another cell of the probe set that has this tag, if it is greater than `index`; -1 for none."""
    cdef uint64_t[FOREBAY_GROUPS_PER_KEY] groups
    cdef uint64_t group, i
    cdef int g
    probe_groups(tag, cells.group_count, groups)
    for g in range(FOREBAY_GROUPS_PER_KEY):
        group = groups[g]
        if group < index // CELLS_PER_GROUP:
            continue
        for i in range(CELLS_PER_GROUP * group, CELLS_PER_GROUP * (group + 1)):
            if load_acquire(&cells.cells[i].tag) == tag and i > index:
                return <int64_t>i
    return -1


cdef void prefetch_probes(const Cells* cells, uint64_t first) noexcept nogil:
    """Prefetch the later groups in the probe sets of one group's cells. Without it each read would wait for memory."""
    cdef uint64_t[FOREBAY_GROUPS_PER_KEY] groups
    cdef uint64_t tag
    cdef int i, g, line
    for i in range(CELLS_PER_GROUP):
        tag = load_acquire(&cells.cells[first + i].tag)
        if kind_of(tag) in (FOREBAY_KIND_TAT, FOREBAY_KIND_COUNT, FOREBAY_KIND_USED):
            probe_groups(tag, cells.group_count, groups)
            for g in range(FOREBAY_GROUPS_PER_KEY):
                if groups[g] > first // CELLS_PER_GROUP:
                    for line in range(FOREBAY_LINES_PER_GROUP):
                        prefetch(&cells.cells[groups[g] * CELLS_PER_GROUP + line * FOREBAY_CELLS_PER_LINE])


def look_at_cells(
    Counts counts, memory, uint64_t offset, uint64_t group_count, uint64_t first, uint64_t last, *,
    uint64_t used, tuple kinds, int kept_bits, uint64_t now_ns, uint64_t latest_ns,
):
    """Check the cells `first` to `last` - 1 of the table at `offset`: each one alone, and for a second cell of its key.
    """
    cdef HeldBytes bytes = HeldBytes(memory)
    cdef Cells cells = cells_at(bytes, offset, group_count, used, kinds, kept_bits, now_ns, latest_ns)
    cdef uint64_t[1 << FOREBAY_KIND_BITS] by_kind
    cdef uint64_t index, kind, live = 0, stale = 0
    cdef ForebayCell seen
    cdef Problem problem
    cdef int64_t other
    cdef int i
    for i in range(1 << FOREBAY_KIND_BITS):
        by_kind[i] = 0
    with nogil:
        for index in range(first, min(last, group_count * CELLS_PER_GROUP)):
            if index % CELLS_PER_GROUP == 0:
                prefetch_probes(&cells, index)
            seen = read_pair(&cells.cells[index])
            if kind_of(seen.tag) > FOREBAY_KIND_USED and cells.kinds >> kind_of(seen.tag) & 1:
                seen = thawed(seen)
            kind = kind_of(seen.tag)
            by_kind[kind] += 1
            other = -1
            problem = problem_of(&cells, index, seen)
            if kind == FOREBAY_KIND_TAT or kind == FOREBAY_KIND_COUNT or kind == FOREBAY_KIND_USED:
                live += (seen.state if kind == FOREBAY_KIND_TAT else seen.state >> FRACTION_BITS) > now_ns
                if problem == FINE:
                    other = find_again(&cells, index, seen.tag)
                    # The key may have moved to that cell between the two reads.
                    if other >= 0 and load_acquire(&cells.cells[index].tag) == seen.tag:
                        problem = TWICE
            elif kind == FOREBAY_KIND_CLAIM and kept_bits >= 0:
                stale += is_stale_claim(&cells, seen.state)
            if problem != FINE:
                with gil:
                    add_problem(counts, problem, index, seen, <uint64_t>max(other, 0), 0)
    for i in range(1 << FOREBAY_KIND_BITS):
        counts.kinds[i] += by_kind[i]
    counts.live += live
    counts.stale_claims += stale


# The words of an extent, and how to read them.
cdef struct Words:
    const uint64_t* first
    uint64_t count               # words per cell
    uint64_t limit
    uint64_t period_ns           # the window, the length of a bucket, or the longest lease
    uint64_t phase_ns
    int low_bits                 # bits of a state below its time
    uint64_t now_ns              # the latest valid time


cdef struct Found:
    Problem problem
    uint64_t where               # index of the cell's word, or of the slot
    uint64_t there               # the value there
    bint unfinished


cdef Found check_ring(const Words* words, ForebayCell seen, const uint64_t* ring) noexcept nogil:
    """Check the ring of a sliding log, see sliding_log.pyx. An entry is a time plus 1.

    From the oldest entry to the newest, a time may be earlier than the one before by less than a quantum. This happens
    if two processes write the entries of one request: the helper's time may be that much later than the claimant's.
    An entry that was given back doesn't count, and may belong to an older key.
    """
    cdef uint64_t limit = words.limit
    cdef uint64_t quantum_ns = max(<uint64_t>1, <uint64_t>1 << words.low_bits >> FRACTION_BITS)
    cdef bint is_member = kind_of(seen.tag) == FOREBAY_KIND_COUNT
    cdef uint64_t low = low_of(seen.state, words.low_bits)
    cdef uint64_t position = low >> 1
    cdef uint64_t leaves_ns = time_of(seen.state, words.low_bits)
    cdef uint64_t latest = words.now_ns + 1
    cdef uint64_t i, place, entry, time
    cdef bint finished = False
    cdef Found found = Found(FINE, 0, 0, False)
    if position >= limit:
        return Found(BAD_POSITION, position, 0, False)
    if is_member:
        latest = min(latest, leaves_ns - min(leaves_ns, words.period_ns) + 1)
    # Newest entry first. The last request may not have written its entries yet; if its process was killed, it never
    # will.
    for i in range(limit):
        place = position + limit - 1 - i
        if place >= limit:
            place -= limit
        entry = load_acquire(&ring[place])
        if (entry >> LAP_BIT & 1) == ((low & 1) ^ (place < position)):
            finished = True
        elif finished:
            return Found(BAD_LAP, place, entry, False)
        else:
            found.unfinished = True
            continue
        time = entry & low_mask(LAP_BIT)
        if time > latest:
            return Found(BAD_TIME if i == 0 else BAD_ORDER, place, entry, False)
        if is_member and time != 0 and entry >> GIVEN_BACK_BIT == 0:
            latest = min(latest, time + quantum_ns - 1)
    return found


cdef Found check_marks(const Words* words, ForebayCell seen, const uint64_t* marks) noexcept nogil:
    """Check the marks of a bucketed window, see bucketed_window.pyx."""
    cdef uint64_t buckets = words.count
    cdef uint64_t total = low_of(seen.state, words.low_bits)
    cdef uint64_t leaves_ns = time_of(seen.state, words.low_bits)
    cdef uint64_t last = (words.now_ns + words.phase_ns) // words.period_ns
    cdef uint64_t end = (leaves_ns + words.phase_ns) // words.period_ns
    cdef uint64_t newest = end - buckets
    cdef bint is_member = kind_of(seen.tag) == FOREBAY_KIND_COUNT
    cdef uint64_t i, mark, bucket
    if is_member and (
        end < buckets or newest > last
        or count_time(end * words.period_ns - words.phase_ns, words.low_bits) != seen.state - total
    ):
        return Found(BAD_BUCKET, end, 0, False)
    for i in range(buckets):
        mark = load_acquire(&marks[i])
        bucket = mark >> words.low_bits
        if mark == 0:
            continue
        if bucket % buckets != i or bucket > last:
            return Found(BAD_MARK_PLACE, i, mark, False)
        # A process wrote the mark of a bucket later than the state's. It was killed, or will move the state there next.
        if is_member and bucket <= newest < bucket + buckets and (
                low_of(total - mark, words.low_bits) > low_mask(words.low_bits) >> 1):
            return Found(BAD_TOTAL, i, mark, False)
    return Found(FINE, 0, 0, False)


cdef Found check_slots(const Words* words, const uint64_t* own, uint64_t* held) noexcept nogil:
    """Check the words of a concurrency limit, see slots.pxd: hints, slots, and zeros to the end of the cache line."""
    cdef uint64_t limit = words.limit
    cdef uint64_t bit_words = (limit + 127) // 128 * 2
    cdef uint64_t i, bits, beyond
    cdef ForebayCell slot
    held[0] = 0
    for i in range(bit_words):
        bits = load_acquire(&own[i])
        beyond = max(limit, i * 64) - i * 64
        if beyond < 64 and bits >> beyond:
            return Found(BAD_HINT, i, bits, False)
    for i in range(limit):
        slot = read_pair(<const ForebayCell*>(own + bit_words) + i)
        if slot.tag == 0 and slot.state == 0:
            continue
        if slot.tag & PID_MASK == 0:
            return Found(BAD_SLOT, i, slot.tag, False)
        if slot.state >> TIME_BITS or slot.state > words.now_ns + words.period_ns:
            return Found(BAD_LEASE, i, slot.state, False)
        held[0] += slot.state > words.now_ns
    for i in range(bit_words + 2 * limit, words.count):
        bits = load_acquire(&own[i])
        if bits != 0:
            return Found(BAD_REST, i, bits, False)
    return Found(FINE, 0, 0, False)


cdef Found check_synced(const Words* words, uint64_t algorithm, const uint64_t* own) noexcept nogil:
    """Check a synced limiter's words, see synced/limiter.pyx: each alone, as they change while the cell doesn't."""
    cdef uint64_t checksum = load_acquire(&own[CHECKSUM])
    cdef uint64_t incarnation = load_acquire(&own[INCARNATION])
    cdef uint64_t last = load_acquire(&own[REPORTED_UNTIL])
    cdef uint64_t reported, before
    if checksum != 0 and checksum & 1 == 0:
        return Found(BAD_CHECKSUM, CHECKSUM, checksum, False)
    if counter_line_of(incarnation, 0) >= COUNTER_LINES:
        return Found(BAD_INCARNATION, INCARNATION, incarnation, False)
    if algorithm == FOREBAY_ALGORITHM_SYNCED_TOKEN_BUCKET:
        return Found(BAD_UNTIL if last > words.now_ns else FINE, REPORTED_UNTIL, last, False)
    reported = low_of(last >> FOREBAY_SYNCED_COUNT_BITS, UNANSWERED_BIT)
    before = low_of(last, UNANSWERED_BIT)
    # A fixed window's state holds one count, a sliding window's two.
    if max(reported, before) > low_mask(
            words.low_bits // 2 if algorithm == FOREBAY_ALGORITHM_SYNCED_SLIDING_WINDOW else words.low_bits):
        return Found(BAD_REPORTED, REPORTED_COUNTS, last, False)
    return Found(FINE, 0, 0, False)


def look_at_words(
    Counts counts, memory, uint64_t offset, uint64_t group_count, uint64_t first, uint64_t last, *,
    uint64_t used, uint64_t algorithm, uint64_t word_count, uint64_t limit, uint64_t period_ns, uint64_t phase_ns,
    int low_bits, uint64_t now_ns,
):
    """Check the words of the cells `first` to `last` - 1, read while the cell itself didn't change."""
    cdef HeldBytes bytes = HeldBytes(memory)
    cdef Cells cells = cells_at(bytes, offset, group_count, used, (), -1, now_ns, 0)
    cdef Words words = Words(NULL, word_count, limit, period_ns, phase_ns, low_bits, now_ns)
    cdef uint64_t begin = offset + group_count * <uint64_t>layout.GROUP_BYTES
    cdef uint64_t index, held = 0
    cdef uint64_t needed = limit
    cdef bint is_synced = algorithm in (
        FOREBAY_ALGORITHM_SYNCED_FIXED_WINDOW, FOREBAY_ALGORITHM_SYNCED_SLIDING_WINDOW,
        FOREBAY_ALGORITHM_SYNCED_TOKEN_BUCKET)
    cdef const uint64_t* own
    cdef ForebayCell seen, again
    cdef Found found
    cdef int _
    if used > group_count * CELLS_PER_GROUP or begin + used * word_count * 8 > bytes.size:
        raise IndexError("the words are not in the segment")
    if algorithm == FOREBAY_ALGORITHM_CONCURRENCY:
        needed = (limit + 127) // 128 * 2 + 2 * limit
    elif is_synced:
        needed = FOREBAY_SYNCED_WORDS_PER_CELL
    if word_count < max(needed, <uint64_t>1) or period_ns == 0 or not 0 <= low_bits <= TIME_BITS:
        raise ValueError("these are no words of a limiter")
    words.first = <const uint64_t*>(bytes.start + begin)
    for index in range(first, min(last, used)):
        own = words.first + index * word_count
        with nogil:
            for _ in range(MOST_READS):
                seen = read_pair(&cells.cells[index])
                if algorithm == FOREBAY_ALGORITHM_CONCURRENCY:
                    found = check_slots(&words, own, &held)
                elif algorithm == FOREBAY_ALGORITHM_BUCKETED_WINDOW:
                    found = check_marks(&words, seen, own)
                elif is_synced:
                    found = check_synced(&words, algorithm, own)
                else:
                    found = check_ring(&words, seen, own)
                again = read_pair(&cells.cells[index])
                if again.tag == seen.tag and again.state == seen.state:
                    break
            else:
                found = Found(FINE, 0, 0, False)
                with gil:
                    counts.busy += 1
        counts.unfinished += found.unfinished
        counts.held += held
        if found.problem != FINE:
            add_problem(counts, found.problem, index, seen, found.where, found.there)


cdef inline bint is_live(ForebayCell seen, uint64_t now_ns) noexcept nogil:
    """Whether a cell holds a key whose state matters at this time."""
    cdef uint64_t kind = kind_of(seen.tag)
    if kind == FOREBAY_KIND_TAT:
        return holds_permits(seen.state) or (seen.state >> TIME_BITS == 0 and seen.state > now_ns)
    return (kind == FOREBAY_KIND_COUNT or kind == FOREBAY_KIND_USED) and seen.state >> FRACTION_BITS > now_ns


def copy_live(
    memory, uint64_t offset, uint64_t group_count, uint64_t first, uint64_t last, *,
    uint64_t used, uint64_t word_count, int free_bits, uint64_t now_ns,
):
    """A copy of the live keys in the cells `first` to `last` - 1, and a list of cells that could not be copied.

    A key's copy is the cell's number, its tag and state, and its `word_count` words, read while tag and state stayed.
    Only the lowest `free_bits` of the state may have changed meanwhile; then the copy has the later state.
    """
    cdef HeldBytes held = HeldBytes(memory)
    cdef Cells cells = cells_at(held, offset, group_count, used, (), -1, now_ns, 0)
    cdef uint64_t begin = offset + group_count * <uint64_t>layout.GROUP_BYTES
    cdef uint64_t size = 3 + word_count
    cdef uint64_t index, i, stop = min(last, used)
    cdef const uint64_t* own
    cdef uint64_t* copy
    cdef uint64_t* place
    cdef ForebayCell seen, again
    cdef bint is_same
    cdef int _
    if used > group_count * CELLS_PER_GROUP or used * word_count * 8 > held.size - begin:
        raise IndexError("the words are not in the segment")
    copied = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>((stop - min(first, stop)) * size * 8))
    copy = place = <uint64_t*>PyBytes_AS_STRING(copied)
    busy = []
    with nogil:
        for index in range(first, stop):
            seen = read_pair(&cells.cells[index])
            if word_count == 0:
                # A resize may have frozen it.
                seen = thawed(seen)
            own = <const uint64_t*>(held.start + begin) + index * word_count
            is_same = word_count == 0
            for _ in range(MOST_READS):
                if is_same or not is_live(seen, now_ns):
                    break
                for i in range(word_count):
                    place[3 + i] = load_acquire(&own[i])
                again = read_pair(&cells.cells[index])
                is_same = again.tag == seen.tag and again.state >> free_bits == seen.state >> free_bits
                seen = again
            if not is_live(seen, now_ns):
                continue
            if not is_same:
                with gil:
                    busy.append(index)
                continue
            place[0] = index
            place[1] = seen.tag
            place[2] = seen.state
            place += size
    return copied[:<Py_ssize_t>(place - copy) * 8], busy


cdef ForebayHashKey hash_key_from(tuple hash_key) except *:
    cdef ForebayHashKey key
    key.k0, key.k1 = hash_key
    return key


def keyed_hash(tuple hash_key, bytes text):
    """The identity of a limiter or an extent in its list: the keyed hash of its text."""
    return siphash13(
        hash_key_from(hash_key), <const uint8_t*>PyBytes_AS_STRING(text), <size_t>PyBytes_GET_SIZE(text)) | 1


cdef int64_t first_used(const uint8_t* bytes, uint64_t first, uint64_t last, uint64_t* blocked) noexcept nogil:
    cdef uint64_t place = first
    cdef uint64_t word
    while place + 8 <= last:
        word = load_acquire(<const uint64_t*>(bytes + place))
        if word == FOREBAY_KIND_BLOCKED and place % sizeof(ForebayCell) == 0:
            blocked[0] += 1
        elif word != 0:
            return <int64_t>place
        place += 8
    while place < last:
        if bytes[place] != 0:
            return <int64_t>place
        place += 1
    return -1


def look_at_unused(memory, uint64_t first, uint64_t last):
    """Check bytes that no limiter uses: the number of blocked cells, and the place of the first word that is neither
    blocked nor zero; -1 if there is none."""
    cdef HeldBytes bytes = HeldBytes(memory)
    cdef uint64_t blocked = 0
    cdef int64_t used = -1
    if first % 8 or last > bytes.size:
        raise IndexError("the bytes are not in the segment")
    if first < last:
        with nogil:
            used = first_used(bytes.start, first, last, &blocked)
    return blocked, used
