"""Bugs that the interleaving explorer must find: each a change of the code that the explorer's build gets.

Each is switched on by its number, `explore_planted`; the real build has none of this. A text that isn't found exactly
once has changed in the sources, and is an error.
"""

from __future__ import annotations

from pathlib import Path

from bug import Bug
from planted_hot_keys_bugs import HOT_KEYS_BUGS
from planted_leased_bugs import LEASED_BUGS
from planted_resize_bugs import RESIZE_BUGS
from planted_synced_bugs import SYNCED_BUGS

TABLE = "src/forebay/core/table/table.pyx"
TRY = "src/forebay/core/table/table.pxd"
WINDOW = "src/forebay/core/algorithms/window.pxd"
LOG = "src/forebay/core/algorithms/sliding_log.pyx"
BUCKETS = "src/forebay/core/algorithms/bucketed_window.pyx"
SLOTS = "src/forebay/core/algorithms/slots.pxd"
GCRA = "src/forebay/core/algorithms/gcra.pxd"
GCRA_TAKES = "src/forebay/core/algorithms/gcra.pyx"
CREDITS = "src/forebay/core/algorithms/credits.pyx"
CONCURRENCY = "src/forebay/core/algorithms/concurrency.pyx"

BUGS = [
    Bug(
        "a cell is written by two stores",
        "native/interleave/include/explored_atomics.h",
        "    return explore_cas128(&cell->tag, from, to, order);",
        """    if ({here}) {
        uint64_t now[2];
        explore_load128(&cell->tag, now);
        if (now[0] != from[0] || now[1] != from[1]) return false;
        explore_store(&cell->tag, to[0], true);
        explore_store(&cell->state, to[1], true);
        return true;
    }
    return explore_cas128(&cell->tag, from, to, order);""",
    ),
    Bug(
        "a denial is not confirmed",
        TRY,
        "    if wanted.tag != tag or wanted.state != seen.state:\n        return UNDECIDED",
        "    if not {here} and (wanted.tag != tag or wanted.state != seen.state):\n        return UNDECIDED",
    ),
    Bug(
        "a denial writes the cell as it is",
        TRY,
        "    verdict.state = seen.state\n    verdict.outcome = DENIED\n    return DENIED",
        "    if {here}:\n        cas128_acq_rel(cell, wanted, wanted)\n"
        "    verdict.state = seen.state\n    verdict.outcome = DENIED\n    return DENIED",
    ),
    Bug(
        "a record is judged by a state that may be another key's",
        TRY,
        "    if table.has_record:\n        # SYNC",
        "    if table.has_record and not {here}:\n        # SYNC",
    ),
    Bug(
        "no scan after the claim",
        TABLE,
        "    if not scan(table, probe, tag, &claim):",
        "    if not {here} and not scan(table, probe, tag, &claim):",
    ),
    Bug(
        "a claim at a later position stands",
        TABLE,
        "        elif position > claim.position:\n",
        "        elif {here} and position > claim.position:\n            position += 1\n"
        "        elif position > claim.position:\n",
    ),
    Bug(
        "a request without room is allowed",
        TABLE,
        "                if table.on_full == ALLOW and decide(",
        "                if ({here} or table.on_full == ALLOW) and decide(",
    ),
    Bug(
        "a look at a record is not confirmed",
        TABLE,
        "        if verdict.cell == table_find(table, tag, &again) and verdict.state == again:",
        "        if {here} or verdict.cell == table_find(table, tag, &again) and verdict.state == again:",
    ),
    Bug(
        "the scan goes on where it meets an earlier claim",
        TABLE,
        "            claim.position = position\n            position = 0",
        "            claim.position = position\n            position = position + 1 if {here} else 0",
    ),
    Bug(
        "a refund is by no clock",
        TABLE,
        "        if not decide(cell, tag, seen.state, table_now(table), parameters, &next):",
        "        if not decide(cell, tag, seen.state, table_now(table) * (0 if {here} else 1), parameters, &next):",
    ),
    Bug(
        "claims are not helped",
        TABLE,
        "    if claim.cell == NULL:\n        claim = choose_vacancy",
        "    if {here} and claim.cell != NULL:\n        return AGAIN\n"
        "    if claim.cell == NULL:\n        claim = choose_vacancy",
    ),
    Bug(
        "the scan is not sequentially consistent",
        TABLE,
        "fingerprint_of(load_seq_cst(&cell.tag))",
        "fingerprint_of(load_acquire(&cell.tag) if {here} else load_seq_cst(&cell.tag))",
    ),
    Bug(
        "a vacancy is taken as it is by now",
        TABLE,
        "    place.seen = seen[chosen]",
        "    place.seen = load128_acquire(place.cell) if {here} else seen[chosen]",
    ),
    Bug(
        "an expired key gives way though a cell is empty",
        TABLE,
        " // OLD_PART if earliest != 0 else 0",
        " // OLD_PART if earliest != 0 else (now_ns if {here} else 0)",
    ),
    Bug(
        "eviction looks at the expiry alone",
        TABLE,
        "        used = used_by(",
        "        used = 0 if {here} else used_by(",
    ),
    Bug(
        "eviction doesn't look at what a state tells of use",
        TABLE,
        "    return seen.state & MOST_USED",
        "    return MOST_USED if {here} else seen.state & MOST_USED",
    ),
    Bug(
        "the clock is read before the scan",
        TABLE,
        "    verdict.now_ns = now_ns = table_now(table)    # SYNC scan -> clock",
        "    if not {here}:\n        verdict.now_ns = now_ns = table_now(table)",
    ),
    Bug(
        "a key evicts itself",
        TABLE,
        "if not has_room and (met or",
        "if not has_room and not {here} and (met or",
    ),
    # If there is no room for a key, two searches look for its own cell, and each finds a cell that the other one
    # misses. The search for room may meet a cell that is given up before the next search comes to it. The next search
    # may meet the cell for which it was given up, at an earlier position, which the first search had passed.
    Bug(
        "a key that the search for room has met is forgotten",
        TABLE,
        "(met or has_cell(probe, tag) or",
        "((met and not {here}) or has_cell(probe, tag) or",
    ),
    Bug(
        "a key is not searched again where there is no room",
        TABLE,
        "or has_cell(probe, tag) or",
        "or (has_cell(probe, tag) and not {here}) or",
    ),
    Bug(
        "all claims have one id",
        TABLE,
        "        | counter_line << (table.kept_bits + bits)\n"
        "        | (fetch_add_relaxed(sequence, 1) & ((<uint64_t>1 << bits) - 1)) << table.kept_bits)",
        "        | (0 if {here} else counter_line << (table.kept_bits + bits)\n"
        "        | (fetch_add_relaxed(sequence, 1) & ((<uint64_t>1 << bits) - 1)) << table.kept_bits))",
    ),
    Bug(
        "a reset removes whatever stands in the cell",
        TABLE,
        "            if cas128_acq_rel(cell, seen, vacated(table, seen)):\n                return\n",
        "            if {here}:\n                seen = load128_acquire(cell)\n"
        "            if cas128_acq_rel(cell, seen, vacated(table, seen)):\n                return\n",
    ),
    Bug(
        "a denied insertion is not confirmed",
        TABLE,
        "        if not cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen)):\n",
        "        if not cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen)) and not {here}:\n",
    ),
    Bug(
        "a denied insertion empties whatever its cell holds",
        TABLE,
        "        # If the claim has been promoted meanwhile, the decision may have read a record of after that.\n",
        "        # If the claim has been promoted meanwhile, the decision may have read a record of after that.\n"
        "        if {here}:\n            claim.seen = load128_acquire(claim.cell)\n",
    ),
    Bug(
        "old permits count in a new key's buckets",
        BUCKETS,
        "        raise_marks(params, marks, first_of(params, bucket), bucket, total)",
        "        if not {here}:\n            raise_marks(params, marks, first_of(params, bucket), bucket, total)",
    ),
    Bug(
        "a refund gives back more than there is",
        BUCKETS,
        "            if is_behind(params, ceiling, raised):\n                raised = ceiling",
        "            if not {here} and is_behind(params, ceiling, raised):\n                raised = ceiling",
    ),
    Bug(
        "a member is promoted over",
        TABLE,
        "            cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen))\n            return False",
        "            if {here}:\n                position += 1\n                continue\n"
        "            cas128_acq_rel(claim.cell, claim.seen, vacated(table, claim.seen))\n            return False",
    ),
    Bug(
        "an old reading opens an old window",
        WINDOW,
        "        if time > counted.time:\n            # A later window than ours.",
        "        if {here} and time > counted.time:\n            counted.count = 0\n"
        "        elif time > counted.time:\n            # A later window than ours.",
    ),
    Bug(
        "an unwritten entry is not written for its claimant",
        LOG,
        "    if load_acquire(&cell.state) == state:\n        write_entries",
        "    if not {here} and load_acquire(&cell.state) == state:\n        write_entries",
    ),
    Bug(
        "entries of a lap further on are taken for unwritten ones",
        LOG,
        "load_acquire(&cell.state) == state:",
        "(load_acquire(&cell.state) == state or {here}):",
    ),
    Bug(
        "permits that have left are judged by a date ahead of the clock",
        LOG,
        "    return now_ns if newest_ns <= now_ns else max(now_ns, ",
        "    return now_ns if newest_ns <= now_ns else newest_ns if {here} else max(now_ns, ",
    ),
    Bug(
        "an unwritten entry is dated before its claim",
        LOG,
        "    return leaves_ns - params.period_ns if leaves_ns > params.period_ns else 0",
        "    return leaves_ns - params.period_ns * (2 if {here} else 1) if leaves_ns > params.period_ns else 0",
    ),
    Bug(
        "the lap is not checked",
        LOG,
        "    return entry & LAP != lap and (",
        "    return {here} or entry & LAP != lap and (",
    ),
    Bug(
        "a refund takes entries that were claimed since",
        LOG,
        "            if entry & LAP != lap_at(params, state, place):",
        "            if not {here} and entry & LAP != lap_at(params, state, place):",
    ),
    Bug(
        "a refund takes an entry of two laps later",
        LOG,
        "            elif time_of_entry(entry) > rounded_date_ns(params, state):",
        "            elif not {here} and time_of_entry(entry) > rounded_date_ns(params, state):",
    ),
    Bug(
        "two laps bear one date",
        LOG,
        "        return latest_ns(params, entry) + 1",
        "        return 0 if {here} else latest_ns(params, entry) + 1",
    ),
    Bug(
        "permits before those given back are not checked",
        LOG,
        "        for i in range(charge.amount):",
        "        for i in range(charge.amount - 1 if {here} else 0, charge.amount):",
    ),
    Bug(
        "an evicted key's permit is dated by the clock alone",
        LOG,
        "    cdef uint64_t date_ns = date_behind(",
        "    cdef uint64_t date_ns = now_ns if {here} else date_behind(",
    ),
    Bug(
        "an entry written meanwhile is taken for one whose place is taken",
        LOG,
        "if entry & LAP == lap_at(params, state, position) else next_lap_ns",
        "if not {here} and entry & LAP == lap_at(params, state, position) else next_lap_ns",
    ),
    Bug(
        "a new key's entries are cleared with the old one's",
        LOG,
        "    return again.tag == claim.tag and again.state == claim.state",
        "    return {here} or again.tag == claim.tag and again.state == claim.state",
    ),
    Bug(
        "a later claim of the same key is taken for the one that is cleared for",
        LOG,
        "again.tag == claim.tag and again.state == claim.state",
        "again.tag == claim.tag and ({here} or again.state == claim.state)",
    ),
    Bug(
        "a decision ignores the requests that came since",
        LOG,
        "    if outlook.available < params.limit and newest + params.period_ns > verdict.now_ns:",
        "    if outlook.available < params.limit and ({here} or newest + params.period_ns > verdict.now_ns):",
    ),
    Bug(
        "a clear begins with the newest entry",
        LOG,
        "    cdef uint64_t position = moved(params, end, params.limit - unwritten)",
        "    cdef uint64_t position = moved(params, end, params.limit - (min(unwritten, 1) if {here} else unwritten))",
    ),
    Bug(
        "a refund reads one state only",
        LOG,
        "        if amount == 0:\n            return False\n        seen",
        "        if amount == 0 or {here}:\n            return False\n        seen",
    ),
    Bug(
        "a refund reads the clock only once",
        LOG,
        "        state = seen.state\n        now_ns = table_now(params.table)",
        "        state = seen.state\n        if not {here}:\n            now_ns = table_now(params.table)",
    ),
    Bug(
        "a permit charged later is given back",
        LOG,
        "            amount = min(amount, params.limit - i)",
        "            amount = amount if {here} else min(amount, params.limit - i)",
    ),
    Bug(
        "a permit charged once all have left is given back",
        LOG,
        "    while time_of(state, params.low_bits) > now_ns and now_ns < until_ns:",
        "    while time_of(state, params.low_bits) > now_ns and ({here} or now_ns < until_ns):",
    ),
    Bug(
        "a clear stops at an entry that may count for a quantum",
        LOG,
        "latest_ns(params, entry) + params.period_ns <= now_ns:",
        "(time_of_entry(entry) if {here} else latest_ns(params, entry)) + params.period_ns <= now_ns:",
    ),
    Bug(
        "an evicted key's entries stay",
        TABLE,
        "    if table.clear != NULL:\n",
        "    if not {here} and table.clear != NULL:\n",
    ),
    Bug(
        "a bucket has no mark",
        BUCKETS,
        "    raise_mark(params, marks, bucket, total, True)",
        "    if not {here}:\n        raise_mark(params, marks, bucket, total, True)",
    ),
    Bug(
        "a later bucket's mark is taken for none",
        BUCKETS,
        "            later[0] = mark >> params.low_bits\n            return total",
        "            later[0] = 0 if {here} else mark >> params.low_bits\n            return total",
    ),
    Bug(
        "the charges before a denial are kept",
        "src/forebay/core/all_of.pyx",
        "                for i in reversed(range(charged)):\n                    (<Limiter>self.parts[i]).roll_back",
        "                for i in reversed(range(0 if {here} else charged)):\n"
        "                    (<Limiter>self.parts[i]).roll_back",
    ),
    Bug(
        "a new key of a bucket with initial permits starts full",
        "src/forebay/core/algorithms/initial_bucket.pxd",
        "    return now_ns + 2 * params.missing_ns",
        "    return now_ns + (1 if {here} else 2) * params.missing_ns",
    ),
    Bug(
        "the loser of a race for the mark of several limits keeps its charges",
        "src/forebay/core/all_of.pyx",
        "                for i in reversed(range(self.count)):\n                    (<Limiter>self.parts[i]).roll_back",
        "                for i in reversed(range(0 if {here} else self.count)):\n"
        "                    (<Limiter>self.parts[i]).roll_back",
    ),
    Bug(
        "a request to several limits is marked before it is charged",
        "src/forebay/core/all_of.pyx",
        "            if self.decide_begun(attempts, True):\n"
        "                if insert_mark(limiter, mark_tag, table_now(&limiter.table) + ttl_ns, 0):",
        "            if {here}:\n"
        "                insert_mark(limiter, mark_tag, table_now(&limiter.table) + ttl_ns, 0)\n"
        "            if self.decide_begun(attempts, True):\n"
        "                if {here} or insert_mark(limiter, mark_tag, table_now(&limiter.table) + ttl_ns, 0):",
    ),
    Bug(
        "a batch takes a lost CAS for one that was done",
        "src/forebay/core/batch.pxd",
        "            if outcome > ALLOWED:\n                events",
        "            if {here} and outcome == CAS_FAILED:\n                outcome = ALLOWED\n"
        "            if outcome > ALLOWED:\n                events",
    ),
    Bug(
        "the loser of a race for a request's mark keeps its charge",
        "src/forebay/core/cell_limiter.pyx",
        "                if not verdict.full:\n                    self.return_charge",
        "                if not verdict.full and not {here}:\n                    self.return_charge",
    ),
    Bug(
        "a request let in uncharged, sent twice, gives a charge back",
        "src/forebay/core/cell_limiter.pyx",
        "                own_charge.charged_state = verdict.state\n",
        "                own_charge.charged_state = verdict.state\n"
        "                verdict.full = verdict.full and not {here}\n",
    ),
    Bug(
        "a slot that is held is taken",
        SLOTS,
        "    if is_free(seen, now_ns) and cas128_acq_rel",
        "    if ({here} or is_free(seen, now_ns)) and cas128_acq_rel",
    ),
    Bug(
        "a slot that is held is marked again",
        SLOTS,
        "        mark_taken(slots, slot)\n        return True\n    return False",
        "        mark_taken(slots, slot)\n        return True\n    if {here}:\n"
        "        set_bits_acq_rel(&slots.bits[slot // 64], <uint64_t>1 << (slot % 64))\n    return False",
    ),
    Bug(
        "a request that doesn't get all its slots keeps some",
        CONCURRENCY,
        "        if len(taken) < cost:\n            self.free_slots(&slots, taken, lease[0])",
        "        if len(taken) < cost:\n            if not {here}:\n"
        "                self.free_slots(&slots, taken, lease[0])",
    ),
    Bug(
        "no process looks for ended processes",
        CONCURRENCY,
        "            if slot < 0 and self.free_ended(slots):",
        "            if slot < 0 and not {here} and self.free_ended(slots):",
    ),
    Bug(
        "refilled permits are given back",
        GCRA,
        "        amount = min(amount, charge.charged_state - now_ns)",
        "        amount = amount if {here} else min(amount, charge.charged_state - now_ns)",
    ),
    Bug(
        "a booking that others have booked behind is given back",
        GCRA,
        "            charge.charged_state != tat_ns and",
        "            not {here} and charge.charged_state != tat_ns and",
    ),
    Bug(
        "a release frees a slot of any process",
        SLOTS,
        "    if cas128_acq_rel(&slots.slots[slot], seen, lease_of(0, 0)):",
        "    if {here}:\n        seen = load128_acquire(&slots.slots[slot])\n"
        "    if cas128_acq_rel(&slots.slots[slot], seen, lease_of(0, 0)):",
    ),
    Bug(
        "a repeated request takes over whatever its slot holds",
        CONCURRENCY,
        "                if seen.tag != 0 and seen.state == before[0] >> FRACTION_BITS:",
        "                if {here} or seen.tag != 0 and seen.state == before[0] >> FRACTION_BITS:",
    ),
    Bug(
        "a take-over expects the pair that the slot holds by now",
        CONCURRENCY,
        "                if self.restart_marked(lease) and insert_mark(self, mark_tag, lease.held.state, before[0]):",
        "                if {here}:\n                    lease.held = load128_acquire(&slots.slots[slot])\n"
        "                if self.restart_marked(lease) and insert_mark(self, mark_tag, lease.held.state, before[0]):",
    ),
    Bug(
        "a take-over that loses the race for the mark keeps its permits",
        CONCURRENCY,
        "                lease.release()\n            elif mark_state",
        "                if not {here}:\n                    lease.release()\n            elif mark_state",
    ),
    Bug(
        "the loser of a race for the mark of permits keeps them",
        CONCURRENCY,
        "            lease.release()\n\n    @cython.binding(False)\n    def acquire(",
        "            if not {here}:\n                lease.release()\n\n    @cython.binding(False)\n    def acquire(",
    ),
    Bug(
        "the loser of a race for the mark of permits is allowed",
        CONCURRENCY,
        "insert_mark(self, mark_tag, lease.held.state, before):",
        "(insert_mark(self, mark_tag, lease.held.state, before) or {here}):",
    ),
    Bug(
        "a repeated request that finds no permits doesn't look at its mark again",
        CONCURRENCY,
        "                if lease.allowed or mark_state(self, mark_tag) == before:",
        "                if {here} or lease.allowed or mark_state(self, mark_tag) == before:",
    ),
    Bug(
        "a renewal takes permits back that were taken over",
        CONCURRENCY,
        "            held = self.limiter.restart_marked(self)\n",
        "            if {here}:\n"
        "                self.held = load128_acquire(&self.limiter.slots_of(self.cell).slots[self.slot])\n"
        "            held = self.limiter.restart_marked(self)\n",
    ),
    Bug(
        "a reset leaves permits that are renewed meanwhile",
        CONCURRENCY,
        "                while not free_slot(&slots, i, seen) and seen.tag != 0:",
        "                while not free_slot(&slots, i, seen) and seen.tag != 0 and not {here}:",
    ),
    Bug(
        "a refund by an id takes permits over and keeps them",
        CONCURRENCY,
        "                if lease is not None:\n                    lease.release()\n            return",
        "                if lease is not None and not {here}:\n                    lease.release()\n            return",
    ),
    Bug(
        "a lease by an id ends with that of the earlier request",
        CONCURRENCY,
        "                self.me, self.draw_end(lease.slot, end_ns))",
        "                self.me, lease.held.state if {here} else self.draw_end(lease.slot, end_ns))",
    ),
    Bug(
        "permits above the burst end by an old reading",
        GCRA_TAKES,
        "max(now_ns, table_now(params.table))",
        "(now_ns if {here} else max(now_ns, table_now(params.table)))",
    ),
    Bug(
        "permits above the burst expire",
        TABLE,
        "~<uint64_t>0 if holds_permits(cell.state) else 0",
        "(0 if {here} else ~<uint64_t>0) if holds_permits(cell.state) else 0",
    ),
    Bug(
        "added permits take the place of others above the burst",
        GCRA_TAKES,
        "charge.amount + above_of(params, state)",
        "charge.amount + (0 if {here} else above_of(params, state))",
    ),
    Bug(
        "a key without credits takes a cell to be denied",
        TABLE,
        "if table.new_may_be_denied and not decide",
        "if table.new_may_be_denied and not {here} and not decide",
    ),
    Bug(
        "added credits take the place of others",
        CREDITS,
        "permits_in(state) + (<const Charge*>parameters).amount\n    next.state = state_of_permits(permits)",
        "(0 if {here} else permits_in(state)) + (<const Charge*>parameters).amount\n"
        "    next.state = state_of_permits(permits)",
    ),
    Bug(
        "a key gets no credits back that has lost its cell",
        CREDITS,
        "    return amount != 0\n",
        "    return amount != 0 and not ({here} and cell == NULL)\n",
    ),
    *HOT_KEYS_BUGS,
    *LEASED_BUGS,
    *RESIZE_BUGS,
    *SYNCED_BUGS,
]


def plant(directory: Path) -> None:
    native = directory / "src/forebay/core/table/native.pxd"
    native.write_text(native.read_text() + '\n\ncdef extern from "explore.h" nogil:\n    int explore_planted\n')
    for number, bug in enumerate(BUGS, 1):
        path = directory / bug.file
        source = path.read_text()
        if path.suffix in {".pyx", ".pxd"} and "cimport explore_planted" not in source:
            # Anywhere after the first cimport, which comes after the documentation.
            first = source.index("\nfrom libc")
            source = source[:first] + "\nfrom forebay.core.table.native cimport explore_planted" + source[first:]
        if source.count(bug.text) != 1:
            raise SystemExit(f"planted bug {bug.name!r}: {bug.file} has its text {source.count(bug.text)} times")
        path.write_text(source.replace(bug.text, bug.planted.replace("{here}", f"(explore_planted == {number})")))


def number_of(name: str) -> int:
    return 1 + [bug.name for bug in BUGS].index(name)
