"""The table's uncommon cases: keys away from their home line, insertion, eviction, lost races.

Insertion follows Purcell and Harris, "Non-blocking hashtables with open addressing" (2005). Their processes back off
from a claim; here each process helps it.

State
-----
A cell is two words that change together, by a 128-bit CAS:

    tag      63                                    3 2   0
              +-------------------------------------+-----+
              | fingerprint of the key              | kind|     kind: EMPTY, CLAIM, TAT, COUNT, USED, BLOCKED
              +-------------------------------------+-----+
    state, of a member: the algorithm's (see algorithms/)
    state, of a claim:
              63                                            0
              +-------+--------------+----------+-----------+
              | stamp | counter line | sequence | kept bits |   the claim's id, above the bits that stay with the cell
              +-------+--------------+----------+-----------+

The *probe set* of a key is the cells that may hold it, in one order for all processes. A *member* is a cell that holds
the key with its state. A *claim* reserves a cell for the key.

Transitions
-----------
Quoted names are programs of tests/interleaving.

* *claim*: a request whose key has neither member nor claim. A vacancy, or a live cell if `on_full` evicts -> claim.
  seq_cst CAS. "insertion by two"
* *help*: a request that finds a claim of its own key. It skips the claim step and goes on with that claim. Acquire
  load. "insertion by two" with a crash
* *scan*: each process, for its claim. Reads the tag of every other cell of the probe set. seq_cst loads. "insertion
  beside another key on weaker memory"
* *give up*: the scan meets a member. The claim that the process works on -> empty. acq_rel CAS. "insertion by two"
* *remove*: the scan meets a claim at a later position. That claim -> empty. acq_rel CAS. "insertion beside another key"
* *move*: the scan meets a claim at an earlier position. The claim that the process works on -> empty; the scan begins
  again for the earlier claim. acq_rel CAS. "insertion, three claims"
* *promote*: each process that has scanned. Claim -> member with the state that its own request leaves. acq_rel CAS.
  "insertion by two"
* *deny*: a process that has scanned, if its request is denied. Claim -> empty, another process's claim too. acq_rel
  CAS. A record that denies may be one that another process has charged after it promoted the claim. Then the CAS fails,
  and the request begins again. "sliding log: eviction"

The promoter's request is the one that is charged. If cells have records, the promoter has made the record the new key's
before (`Clear`, `Prepare`).

Invariant
---------
A key has at most one member: with two it would have two limits.

Proof
-----
SYNC claim -> scan: every scan for a claim starts after the claim was placed, because the scanner wrote or read the
claim before. Two processes that each place a claim and then scan must not both miss the other's claim (store
buffering). Acquire and release allow that, so the CAS that places a claim and the loads of the scan are sequentially
consistent.

*At most one member.* Suppose that claims A and B of one key in cells a and b are both promoted. Each promotion's CAS
names the claim's unique id, so the claim stood from its placing to its promotion. A's promoter read b between the
placing and the promotion of A; B's promoter read a likewise. CASes that place claims are totally ordered; let A be the
later one. When A's promoter reads b, B has been placed. There are three cases:

* The promoter reads claim B at a later position. It removes B, and B can't be promoted after that; or its CAS fails and
  it reads again.
* The promoter reads claim B at an earlier position. It gives A up for B, so it does not promote A.
* B has gone before the read. If B was promoted, the promoter reads the member and gives A up. If that member has been
  evicted or reset since, or has expired and its cell was reused, it is no longer a member.

So A and B are not both members at one time.

*No key evicts itself.* Between a request's search for its key and its choice of a cell, another request may insert the
key. So a request that finds no vacancy searches for its key again. If the live cell that it has chosen is its own
key's, the search finds it. If that member has gone again, the CAS fails.

*Time.* Any key may reuse an expired cell. A process with an old clock reading that finds its key gone must not use that
reading for the fresh state. The old state was in force until the later reading at which its cell was reused. So the
process reads the clock again, after the scan has shown that there is no member.

SYNC scan -> clock: the reading that saw the old state as expired happens before the CAS that reused the cell. That CAS
happens before the scan's load of the cell, and that load before our reading. The clock is the host's monotonic clock
(I-7).

Crash and stall
---------------
A claim is removed in favour of a member or of an earlier claim of the same key, or when its stamp is old, or when a
request is denied. That request is decided then. Positions are finite, so otherwise some claim stands until a process
that reads it promotes it: insertion is lock-free. A process that is killed after the claim step leaves the claim. The
key's next request promotes it. Requests of other keys may reuse the cell once the stamp is CLAIM_LIFE old (1.1 to 2.1
s). Removing a claim is always safe: its owner's promotion fails, and the owner starts again.

Not handled
-----------
A claim's id may repeat (ABA) when its sequence number wraps while a process is stopped: docs/arithmetic.md has the
numbers. A full probe set evicts, denies or allows, as `on_full` says.
"""

from libc.stdint cimport uint64_t

from forebay.core.table.moving cimport kind_in, thawed
from forebay.core.table.native cimport (
    FOREBAY_CELLS_PER_LINE, FOREBAY_GROUPS_PER_KEY, FOREBAY_KIND_BITS, FOREBAY_KIND_CLAIM, FOREBAY_KIND_COUNT,
    FOREBAY_KIND_EMPTY, FOREBAY_KIND_TAT, FOREBAY_KIND_USED, FOREBAY_LINES_PER_GROUP, ForebayCell,
    cas128_acq_rel, cas128_seq_cst, fetch_add_relaxed, load128_acquire, load_acquire, load_seq_cst, multiply_high,
    prefetch,
)


cdef enum:
    # A claim's id: when it was placed (in 2^30 ns), by whom (12 bits), a sequence number. Below it the cell's own bits.
    CLAIM_STAMP_UNIT_BITS = 30
    COUNTER_LINE_BITS = 12
    # In stamp units. An insertion takes a microsecond; a slower one may lose its claim, and then starts again.
    CLAIM_LIFE = 2
    # The cells of a probe set.
    CELLS_PER_KEY = FOREBAY_GROUPS_PER_KEY * FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE
    OLD_PART = 8
    # When a request that a stopped resize denies may be repeated.
    RESIZE_RETRY_NS = 1_000_000_000


# The lines of a key, most often twelve: three groups, all different, each from the key's own line of it onwards. A
# table of fewer groups has them all in every probe set.
cdef struct ProbeSet:
    ForebayCell* groups[FOREBAY_GROUPS_PER_KEY]
    int lines
    int first_line


# A cell and its position in the probe set; NULL for none.
cdef struct Place:
    ForebayCell* cell
    int position
    ForebayCell seen


cdef inline ForebayCell pair(uint64_t tag, uint64_t state) noexcept nogil:
    cdef ForebayCell value
    value.tag = tag
    value.state = state
    return value


cdef inline uint64_t kept_of(const Table* table, uint64_t state) noexcept nogil:
    """The bits that stay with the cell for any key that comes to it."""
    return state & ((<uint64_t>1 << table.kept_bits) - 1)


cdef inline int sequence_bits(const Table* table) noexcept nogil:
    """The width of a claim's sequence number, so that at least four bits are left for its stamp."""
    return 28 if table.kept_bits <= 16 else 20 if table.kept_bits <= 24 else 16


cdef inline int stamp_shift(const Table* table) noexcept nogil:
    return table.kept_bits + sequence_bits(table) + COUNTER_LINE_BITS


cdef inline uint64_t claim_id(
    const Table* table, uint64_t now_ns, uint64_t counter_line, uint64_t* sequence
) noexcept nogil:
    cdef int bits = sequence_bits(table)
    return (
        now_ns >> CLAIM_STAMP_UNIT_BITS << stamp_shift(table)
        | counter_line << (table.kept_bits + bits)
        | (fetch_add_relaxed(sequence, 1) & ((<uint64_t>1 << bits) - 1)) << table.kept_bits)


cdef inline ForebayCell vacated(const Table* table, ForebayCell seen) noexcept nogil:
    """An empty cell in place of what was seen."""
    return pair(FOREBAY_KIND_EMPTY, kept_of(table, seen.state))


cdef inline uint64_t claim_tag(uint64_t tag) noexcept nogil:
    return fingerprint_of(tag) | FOREBAY_KIND_CLAIM


cdef inline ProbeSet probe_set(const Table* table, uint64_t tag) noexcept nogil:
    cdef uint64_t fingerprint = fingerprint_of(tag)
    cdef uint64_t[FOREBAY_GROUPS_PER_KEY] groups
    cdef ProbeSet probe
    cdef int g
    groups[0] = multiply_high(fingerprint, table.group_count)
    # Odd multipliers (the golden ratio's, and one of Steele and Vigna's) make the high bits depend on all bits.
    groups[1] = multiply_high(fingerprint * <uint64_t>0x9E3779B97F4A7C15, table.group_count)
    groups[2] = multiply_high(fingerprint * <uint64_t>0xD1342543DE82EF95, table.group_count)
    if groups[1] == groups[0]:
        groups[1] = (groups[1] + 1) % table.group_count
    while table.group_count > 2 and (groups[2] == groups[0] or groups[2] == groups[1]):
        groups[2] = (groups[2] + 1) % table.group_count
    probe.lines = <int>min(table.group_count, <uint64_t>FOREBAY_GROUPS_PER_KEY) * FOREBAY_LINES_PER_GROUP
    for g in range(FOREBAY_GROUPS_PER_KEY):
        probe.groups[g] = table.cells + groups[g] * (FOREBAY_LINES_PER_GROUP * FOREBAY_CELLS_PER_LINE)
    probe.first_line = (fingerprint >> FOREBAY_KIND_BITS) & table.line_mask
    return probe


cdef inline ForebayCell* probe_line(const ProbeSet* probe, int line) noexcept nogil:
    """Line 0 is the home line, 1 to 3 the rest of its group, and so on."""
    return probe.groups[line // FOREBAY_LINES_PER_GROUP] + (
        probe.first_line ^ (line % FOREBAY_LINES_PER_GROUP)) * FOREBAY_CELLS_PER_LINE


cdef inline ForebayCell* probe_cell(const ProbeSet* probe, int position) noexcept nogil:
    return probe_line(probe, position // FOREBAY_CELLS_PER_LINE) + position % FOREBAY_CELLS_PER_LINE


cdef inline void prefetch_lines(const ProbeSet* probe) noexcept nogil:
    """All lines except the home line, at once: to read them one after the other is to wait for each."""
    cdef int line
    for line in range(1, probe.lines):
        prefetch(probe_line(probe, line))


cdef void prefetch_away(const Table* table, uint64_t tag) noexcept nogil:
    cdef ProbeSet probe = probe_set(table, tag)
    prefetch_lines(&probe)


cdef ForebayCell* find_member(const ProbeSet* probe, uint64_t tag) noexcept nogil:
    """The member of a key, or NULL. The home line comes last, as the caller has just searched it."""
    cdef ForebayCell* cell
    cdef int line
    for line in range(1, probe.lines):
        cell = find_in_line(probe_line(probe, line), tag)
        if cell != NULL:
            return cell
    return find_in_line(probe_line(probe, 0), tag)


cdef inline bint is_fresh_claim(const Table* table, uint64_t claim_id, uint64_t now_ns) noexcept nogil:
    cdef uint64_t mask = ~<uint64_t>0 >> stamp_shift(table)
    cdef uint64_t age = ((now_ns >> CLAIM_STAMP_UNIT_BITS) - (claim_id >> stamp_shift(table))) & mask
    # A little below zero: the claim was stamped by a process whose reading was later than ours.
    return age < CLAIM_LIFE or age > mask - CLAIM_LIFE


cdef uint64_t expiry_of(const Table* table, ForebayCell cell, uint64_t now_ns) noexcept nogil:
    """The time at which the cell may be reused: 0 if it holds nothing; the largest number for a fresh claim, for
    permits, and for a cell that a resize has frozen, which no key may take.

    A cell that is frozen although there is no resize is damaged: a mover raises `resize_progress` before it freezes
    any. A blocked cell has 0, too. Only `table.end` prevents that a key takes it.
    """
    cdef uint64_t kind = cell.tag & ((<uint64_t>1 << FOREBAY_KIND_BITS) - 1)
    if kind == FOREBAY_KIND_TAT:
        return cell.state if cell.state >> TIME_BITS == 0 else ~<uint64_t>0 if holds_permits(cell.state) else 0
    if kind == FOREBAY_KIND_COUNT or kind == FOREBAY_KIND_USED:
        return cell.state >> 2
    if kind > FOREBAY_KIND_USED:
        return ~<uint64_t>0 if is_moving(table) else 0    # SYNC freeze -> search
    if kind == FOREBAY_KIND_CLAIM and is_fresh_claim(table, cell.state, now_ns):
        return ~<uint64_t>0
    return 0


cdef inline bint tells_use(const Table* table, ForebayCell seen) noexcept nogil:
    """Whether a live cell tells how much its key has used. Other kinds expire in the order of use."""
    return table.used != NULL or seen.tag & ((<uint64_t>1 << FOREBAY_KIND_BITS) - 1) == FOREBAY_KIND_USED


cdef inline uint64_t used_by(
    const Table* table, ForebayCell* cell, ForebayCell seen, uint64_t now_ns
) noexcept nogil:
    """How much the key of such a cell has used: a number to compare with those of other keys of the table."""
    if table.used != NULL:
        return table.used(cell, seen.state, now_ns, table.used_context)
    return seen.state & MOST_USED


cdef inline uint64_t order_of(ForebayCell seen) noexcept nogil:
    """When a live cell expires, in quarters of a ns. Of states with one time, that of the larger count comes last."""
    return seen.state << 2 if seen.tag & ((<uint64_t>1 << FOREBAY_KIND_BITS) - 1) == FOREBAY_KIND_TAT else seen.state


cdef int choose_victim(
    const Table* table, const ProbeSet* probe, const ForebayCell* seen, const uint64_t* expiries, uint64_t now_ns
) noexcept nogil:
    """The position of the live cell to evict.

    Some keys tell how much they have used: among these, the candidate has used least, and of several such it expires
    first. Among the others, the candidate is the key that expires first. Use can't compare these two candidates, so the
    one that expires first is chosen. But a key that has used nothing, such as the mark of a request, goes before all.

    All cells are live, claimed, not to be used, or hold permits; at least one is live. In a damaged one, what it has
    used and when it expires may both be the largest number: it is the candidate if there is no other.
    """
    cdef uint64_t used, order, earliest = ~<uint64_t>0, least = ~<uint64_t>0, earliest_other = ~<uint64_t>0
    cdef int position, candidate = -1, other = -1
    for position in range(probe.lines * FOREBAY_CELLS_PER_LINE):
        if expiries[position] == ~<uint64_t>0:
            continue
        order = order_of(seen[position])
        if not tells_use(table, seen[position]):
            if other < 0 or order < earliest_other:
                other = position
                earliest_other = order
            continue
        # A record is read only where it can change the choice.
        if least == 0 and order >= earliest:
            continue
        used = used_by(table, probe_cell(probe, position), seen[position], now_ns)
        if candidate < 0 or used < least or (used == least and order < earliest):
            candidate = position
            least = used
            earliest = order
    return candidate if other < 0 or least == 0 or earliest < earliest_other else other


cdef Place choose_vacancy(
    const Table* table, const ProbeSet* probe, uint64_t tag, uint64_t now_ns, uint64_t* first_expiry_ns, bint* met
) noexcept nogil:
    """The cell for a new key; when evicting, the live cell of `choose_victim` if there is no vacancy.

    An expired key may return, and then it is found if its cell has not been taken. So an empty cell anywhere in the
    probe set goes first. Without one, an expired cell goes if it has been vacant for at least 1 / OLD_PART of the time
    of the longest-vacant one. The new key takes one of these cells in its home line, else one in the line that has most
    of them; within the line the longest vacant. benchmarks/probe_simulation.py compares this with other rules.

    `met` is whether one of the cells held the key itself.
    """
    cdef Place place = Place(NULL, 0, pair(FOREBAY_KIND_EMPTY, 0))
    cdef ForebayCell[CELLS_PER_KEY] seen
    cdef uint64_t[CELLS_PER_KEY] expiries
    cdef ForebayCell* cell
    cdef int position, i, line, vacancies, most = 0, chosen = 0
    cdef int cells = probe.lines * FOREBAY_CELLS_PER_LINE
    cdef uint64_t latest, expiry, earliest = ~<uint64_t>0
    first_expiry_ns[0] = ~<uint64_t>0
    met[0] = False
    for position in range(cells):
        if position == FOREBAY_CELLS_PER_LINE and earliest == 0:
            # An empty one at home.
            cells = FOREBAY_CELLS_PER_LINE
            break
        cell = probe_cell(probe, position)
        expiries[position] = ~<uint64_t>0
        if table.end != NULL and cell >= table.end:
            continue
        seen[position] = load128_acquire(cell)
        met[0] = met[0] or seen[position].tag == tag or seen[position].tag == claim_tag(tag)
        expiry = expiry_of(table, seen[position], now_ns)
        expiries[position] = expiry
        earliest = min(earliest, expiry)
        if now_ns < expiry < first_expiry_ns[0]:
            first_expiry_ns[0] = expiry
    if earliest <= now_ns:
        latest = now_ns - (now_ns - earliest) // OLD_PART if earliest != 0 else 0
        for line in range(cells // FOREBAY_CELLS_PER_LINE):
            vacancies = 0
            position = line * FOREBAY_CELLS_PER_LINE
            for i in range(line * FOREBAY_CELLS_PER_LINE, (line + 1) * FOREBAY_CELLS_PER_LINE):
                vacancies += expiries[i] <= latest
                if expiries[i] < expiries[position]:
                    position = i
            if vacancies > most:
                most = vacancies
                chosen = position
                if line == 0:
                    break
    elif table.on_full == EVICT and first_expiry_ns[0] != ~<uint64_t>0:
        chosen = choose_victim(table, probe, seen, expiries, now_ns)
    else:
        return place
    place.cell = probe_cell(probe, chosen)
    place.position = chosen
    place.seen = seen[chosen]
    return place


cdef Place find_claim(const ProbeSet* probe, uint64_t tag) noexcept nogil:
    """The earliest claim of a key."""
    cdef Place place = Place(NULL, 0, pair(FOREBAY_KIND_EMPTY, 0))
    cdef int position
    for position in range(probe.lines * FOREBAY_CELLS_PER_LINE):
        place.cell = probe_cell(probe, position)
        if load_acquire(&place.cell.tag) == claim_tag(tag):
            place.seen = load128_acquire(place.cell)
            if place.seen.tag == claim_tag(tag):
                place.position = position
                return place
    place.cell = NULL
    return place


cdef bint has_cell(const ProbeSet* probe, uint64_t tag) noexcept nogil:
    """Whether a key has a member or a claim.

    Reads each cell once, from the last position to the first. A cell goes from claim to member and, when the member has
    gone, to a claim again; one load recognizes either. A claim is given up for a member, or for a claim at an earlier
    position that stands by then. So a key that has a cell all the time is met, unless its cell moves to a later
    position: then it had none in between.
    """
    cdef uint64_t seen
    cdef int position = probe.lines * FOREBAY_CELLS_PER_LINE
    while position > 0:
        position -= 1
        seen = load_acquire(&probe_cell(probe, position).tag)
        if seen == tag or seen == claim_tag(tag):
            return True
    return False


cdef bint scan(const Table* table, const ProbeSet* probe, uint64_t tag, Place* claim) noexcept nogil:
    """Scan for `claim`. False: there is a member, and the claim has been given up.

    On return `claim` is the one to promote: an earlier claim of the key, met on the way, takes its place.
    """
    cdef ForebayCell* cell
    cdef ForebayCell seen
    cdef int position = 0
    while position < probe.lines * FOREBAY_CELLS_PER_LINE:
        cell = probe_cell(probe, position)
        # SYNC claim -> scan
        if position == claim.position or fingerprint_of(load_seq_cst(&cell.tag)) != fingerprint_of(tag):
            position += 1
            continue
        seen = load128_acquire(cell)
        if seen.tag == tag:
            cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen))
            return False
        if seen.tag != claim_tag(tag):
            position += 1
        elif position > claim.position:
            # Not removed: it changed, so look at the same cell again.
            if cas128_acq_rel(cell, seen, vacated(table, seen)):
                position += 1
        else:
            cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen))
            claim.cell = cell
            claim.seen = seen
            claim.position = position
            position = 0
    return True


cdef enum Insertion:
    INSERTED
    AGAIN                        # lost a race, or another process inserted the key
    FULL


cdef Insertion insert(
    const Table* table, const ProbeSet* probe, uint64_t tag, uint64_t counter_line, uint64_t* claim_sequence,
    Decide decide, const void* parameters, Verdict* verdict, Events* events,
) noexcept nogil:
    """One attempt to make a member of a key that had none, with the state that the request leaves."""
    cdef uint64_t first_expiry_ns, now_ns = verdict.now_ns
    cdef bint met, has_room
    cdef ForebayCell seen
    cdef Next next
    cdef Place claim = find_claim(probe, tag)
    if claim.cell == NULL:
        claim = choose_vacancy(table, probe, tag, now_ns, &first_expiry_ns, &met)
        # No vacancy: another process may have just taken the last one for this very key. Then the key has a cell. It
        # must neither lose it to itself, nor cost a neighbour's, nor be denied for want of room.
        # Nor may any of this be for want of the vacancies that a resize has frozen.
        has_room = claim.cell != NULL and expiry_of(table, claim.seen, now_ns) <= now_ns
        if not has_room and (met or has_cell(probe, tag) or is_moving(table)):    # SYNC freeze -> search
            return AGAIN
        if claim.cell == NULL:
            # No expiry at all: the probe set is full of permits and of other keys' claims. The claims last CLAIM_LIFE
            # at the most; when permits leave is not known.
            if first_expiry_ns == ~<uint64_t>0:
                first_expiry_ns = now_ns + (<uint64_t>(CLAIM_LIFE + 1) << CLAIM_STAMP_UNIT_BITS)
            verdict.state = first_expiry_ns
            return FULL
        seen = claim.seen
        claim.seen = pair(
            claim_tag(tag), claim_id(table, now_ns, counter_line, claim_sequence) | kept_of(table, seen.state))
        if not cas128_seq_cst(claim.cell, seen, claim.seen):    # SYNC claim -> scan
            events.cas_retries += 1
            return AGAIN
        if expiry_of(table, seen, now_ns) > now_ns:
            events.evicted += 1
    if not scan(table, probe, tag, &claim):
        return AGAIN
    if is_moving(table):    # SYNC freeze -> search
        cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen))
        return AGAIN
    verdict.now_ns = now_ns = table_now(table)    # SYNC scan -> clock
    verdict.cell = claim.cell
    next.decided_ns = now_ns
    if table.clear != NULL:
        table.clear(claim.cell, claim.seen, now_ns, parameters)
    if not decide(claim.cell, tag, kept_of(table, claim.seen.state), now_ns, parameters, &next):
        # If the claim has been promoted meanwhile, the decision may have read a record of after that.
        if not cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen)):
            events.cas_retries += 1
            return AGAIN
        verdict.state = 0
        verdict.outcome = DENIED
        return INSERTED
    if table.prepare != NULL:
        table.prepare(claim.cell, kept_of(table, claim.seen.state), &next, parameters)
    # Linearizes here.
    if cas128_acq_rel(claim.cell, claim.seen, pair(tag, next.state)):
        events.inserted += 1
        verdict.state = next.state
        verdict.decided_ns = next.decided_ns
        verdict.outcome = ALLOWED
    else:
        events.cas_retries += 1
        return AGAIN
    return INSERTED


cdef bint follow(Table* table, ProbeSet* probe, uint64_t tag) noexcept nogil:
    """Wait for the end of a resize, and use the table of after that. False if the resize was stopped."""
    if not table.home.follow(table):
        return False
    probe[0] = probe_set(table, tag)
    return True


cdef void table_decide(
    Table* table, uint64_t tag, uint64_t counter_line, uint64_t* claim_sequence, Decide decide,
    const void* parameters, Verdict* verdict, Events* events,
) noexcept nogil:
    cdef ProbeSet probe = probe_set(table, tag)
    cdef ForebayCell* cell
    cdef ForebayCell seen
    cdef ForebayCell again
    cdef Next next
    cdef Insertion insertion
    prefetch_lines(&probe)
    verdict.full = False
    while True:
        cell = find_member(&probe, tag)
        if cell == NULL:
            insertion = AGAIN
            if is_moving(table):    # SYNC freeze -> search
                if follow(table, &probe, tag):
                    verdict.now_ns = table_now(table)
                    continue
                insertion = FULL
                verdict.state = verdict.now_ns + RESIZE_RETRY_NS
            # A denial writes nothing (I-3), and evicts no key. Only a table that says so asks, as others never deny.
            elif table.new_may_be_denied and not decide(NULL, tag, 0, verdict.now_ns, parameters, &next):
                # Linearizes within the search: see algorithms/credits.pyx.
                verdict.state = 0
                verdict.cell = NULL
                verdict.outcome = DENIED
                return
            else:
                insertion = insert(
                    table, &probe, tag, counter_line, claim_sequence, decide, parameters, verdict, events)
                if insertion == INSERTED:
                    return
            if insertion == FULL:
                events.full += 1
                verdict.full = True
                verdict.outcome = DENIED
                verdict.cell = NULL
                if table.on_full == ALLOW and decide(NULL, tag, 0, verdict.now_ns, parameters, &next):
                    verdict.state = next.state
                    verdict.outcome = ALLOWED
                return
            continue
        seen = load128_acquire(cell)
        if seen.tag != tag:
            continue
        verdict.cell = cell
        next.decided_ns = verdict.now_ns
        if not decide(cell, tag, seen.state, verdict.now_ns, parameters, &next):
            # The record was read after the state: a denial holds only if they belong together.
            # Linearizes here.
            again = load128_acquire(cell)
            if again.tag != seen.tag or again.state != seen.state:
                continue
            verdict.state = seen.state
            verdict.outcome = DENIED
            return
        if table.prepare != NULL:
            table.prepare(cell, seen.state, &next, parameters)
        # Linearizes here.
        if cas128_acq_rel(cell, seen, pair(tag, next.state)):
            verdict.state = next.state
            verdict.decided_ns = next.decided_ns
            verdict.outcome = ALLOWED
            return
        events.cas_retries += 1


cdef bint table_amend(
    Table* table, uint64_t tag, Decide decide, const void* parameters, Events* events,
) noexcept nogil:
    cdef ProbeSet probe = probe_set(table, tag)
    cdef ForebayCell* cell
    cdef ForebayCell seen
    cdef Next next
    while True:
        cell = find_member(&probe, tag)
        if cell == NULL:
            if is_moving(table) and follow(table, &probe, tag):    # SYNC freeze -> search
                continue
            return False
        seen = load128_acquire(cell)
        if seen.tag != tag:
            continue
        # The clock is read after the state: a refund must find that the permits still count.
        if not decide(cell, tag, seen.state, table_now(table), parameters, &next):
            return False
        # Linearizes here.
        if cas128_acq_rel(cell, seen, pair(tag, next.state)):
            return True
        events.cas_retries += 1


cdef void table_remove(Table* table, uint64_t tag, Events* events) noexcept nogil:
    cdef ProbeSet probe = probe_set(table, tag)
    cdef ForebayCell* cell
    cdef ForebayCell seen
    while True:
        cell = find_member(&probe, tag)
        if cell == NULL:
            if is_moving(table) and follow(table, &probe, tag):    # SYNC freeze -> search
                continue
            return
        seen = load128_acquire(cell)
        if seen.tag == tag:
            # Linearizes here.
            if cas128_acq_rel(cell, seen, vacated(table, seen)):
                return
            events.cas_retries += 1


cdef ForebayCell* table_find(Table* table, uint64_t tag, uint64_t* state) noexcept nogil:
    cdef ProbeSet probe = probe_set(table, tag)
    cdef ForebayCell* cell
    cdef ForebayCell seen
    while True:
        cell = find_member(&probe, tag)
        if cell == NULL:
            if is_moving(table) and follow(table, &probe, tag):    # SYNC freeze -> search
                continue
            state[0] = 0
            return NULL
        seen = load128_acquire(cell)
        if seen.tag == tag:
            state[0] = seen.state
            return cell


cdef bint table_peek(
    Table* table, uint64_t tag, uint64_t now_ns, Decide decide, const void* parameters, Verdict* verdict
) noexcept nogil:
    cdef Next next
    cdef uint64_t again
    cdef bint allowed
    while True:
        verdict.cell = table_find(table, tag, &verdict.state)
        allowed = decide(verdict.cell, tag, verdict.state, now_ns, parameters, &next)
        # The record was read after the state: they must belong together.
        if verdict.cell == table_find(table, tag, &again) and verdict.state == again:
            return allowed


cdef uint64_t table_count_live(Table* table, uint64_t now_ns) noexcept nogil:
    cdef uint64_t i, live = 0
    cdef ForebayCell cell
    if is_moving(table):
        table.home.follow(table)
    for i in range(cells_in(table)):
        cell = thawed(load128_acquire(&table.cells[i]))
        if kind_in(cell.tag) != FOREBAY_KIND_CLAIM:
            live += expiry_of(table, cell, now_ns) > now_ns
    return live
