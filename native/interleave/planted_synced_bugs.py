"""Bugs of synced limiters that the interleaving explorer must find: see planted_bugs.py."""

from __future__ import annotations

from bug import Bug

SYNCED = "src/forebay/core/synced/limiter.pyx"
BUCKET = "src/forebay/core/synced/token_bucket.pyx"
WINDOW = "src/forebay/core/synced/window.pyx"
HOT = "src/forebay/core/synced/hot.pyx"

SYNCED_BUGS = [
    Bug(
        "a claim's record is written whether the claim stands or not",
        SYNCED,
        "    while stands(cell, claim) and not cas128_acq_rel(pair, seen, wanted):",
        "    while ({here} or stands(cell, claim)) and not cas128_acq_rel(pair, seen, wanted):",
    ),
    Bug(
        "CHARGED_BEFORE is written whether the claim stands or not",
        BUCKET,
        "    while stands(cell, claim):",
        "    while {here} or stands(cell, claim):",
    ),
    Bug(
        "a record's checksum is not checked",
        SYNCED,
        "    return seen[CHECKSUM] != 0 and seen[CHECKSUM] ==",
        "    return {here} or seen[CHECKSUM] != 0 and seen[CHECKSUM] ==",
    ),
    Bug(
        "the charges of a cell's former keys are reported",
        BUCKET,
        "        wanted.tag = wanted.state = seen.tag",
        "        wanted.tag = wanted.state = seen.tag\n        if {here}:\n            wanted.state = 0",
    ),
    Bug(
        "a bucket that is reported isn't marked as unanswered",
        BUCKET,
        "            reported.is_unanswered = True",
        "            reported.is_unanswered = not {here}",
    ),
    Bug(
        "charges made while a reply is under way are forgotten",
        BUCKET,
        "                wanted.state = read_ns + ahead_ns + min(now_charged - charged, self.most_ahead_ns)",
        "                wanted.state = read_ns + ahead_ns + min(\n"
        "                    0 if {here} else now_charged - charged, self.most_ahead_ns)",
    ),
    Bug(
        "a bucket's sequences are all the same",
        BUCKET,
        "            reported.sequence = (reported.sequence + 1) & low_mask(SEQUENCE_BITS)",
        "            reported.sequence = (reported.sequence + (0 if {here} else 1)) & low_mask(SEQUENCE_BITS)",
    ),
    Bug(
        "a bucket's message takes the next sequence though another was read meanwhile",
        BUCKET,
        "            wanted.tag = reported_word(reported)\n",
        "            if {here}:\n                asked = load128_acquire(pair_at(record, CHARGED_REPORTED))\n"
        "                reported.sequence = (reported_in(asked.tag).sequence + 1) & low_mask(SEQUENCE_BITS)\n"
        "            wanted.tag = reported_word(reported)\n",
    ),
    Bug(
        "a bucket learns what Redis knows from the reply to any message",
        BUCKET,
        "            if reported.sequence != sequence or read_ns < seen.state:",
        "            if (reported.sequence != sequence or read_ns < seen.state) and not {here}:",
    ),
    Bug(
        "a reading of a bucket is dated before its sequence was read",
        BUCKET,
        "            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000",
        "            read_us = (now_ns if {here} else monotonic_ns() - self.table.epoch_ns) // 1000",
    ),
    Bug(
        "a window that is reported isn't marked as unanswered",
        WINDOW,
        "    reported[0] |= UNANSWERED",
        "    reported[0] |= 0 if {here} else UNANSWERED",
    ),
    Bug(
        "other hosts' counts of a cell's former key stay",
        WINDOW,
        "    begin_pair(cell, claim, pair_at(record, OTHERS), others.tag, others.state)",
        "    if not {here}:\n        begin_pair(cell, claim, pair_at(record, OTHERS), others.tag, others.state)",
    ),
    Bug(
        "the counts of a cell's former key that Redis knew stay",
        WINDOW,
        "    begin_pair(cell, claim, pair_at(record, REPORTED), sequence, 0)",
        "    if not {here}:\n        begin_pair(cell, claim, pair_at(record, REPORTED), sequence, 0)",
    ),
    Bug(
        "a window's sequences are all the same",
        WINDOW,
        "            sequence = (sequence_of(asked) + 1) & low_mask(COUNT_BITS)",
        "            sequence = (sequence_of(asked) + (0 if {here} else 1)) & low_mask(COUNT_BITS)",
    ),
    Bug(
        "a window's message takes the next sequence though another was read meanwhile",
        WINDOW,
        "            # SYNC reading -> sequence\n",
        "            if {here}:\n                asked = load128_acquire(pair_at(record, REPORTED))\n"
        "                sequence = (sequence_of(asked) + 1) & low_mask(COUNT_BITS)\n"
        "            # SYNC reading -> sequence\n",
    ),
    Bug(
        "a window is read before its sequence",
        WINDOW,
        "            asked = load128_acquire(pair_at(record, REPORTED))\n"
        "            # The clock is read in this order, too: else the later report might be about the earlier window.\n"
        "            time_ns = table_now(&self.table)\n            seen = load128_acquire(cell)\n",
        "            if {here}:\n                seen = load128_acquire(cell)\n"
        "            asked = load128_acquire(pair_at(record, REPORTED))\n            time_ns = table_now(&self.table)\n"
        "            if not {here}:\n                seen = load128_acquire(cell)\n",
    ),
    Bug(
        "a message is about the window that was current when the look began",
        WINDOW,
        "self.read_counts(cell, seen, time_ns, asks,",
        "self.read_counts(cell, seen, now_ns if {here} else time_ns, asks,",
    ),
    Bug(
        "a reading of a window is dated before its sequence was read",
        WINDOW,
        "            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000",
        "            read_us = (now_ns if {here} else monotonic_ns() - self.table.epoch_ns) // 1000",
    ),
    Bug(
        "other hosts' counts of a former key are learned",
        WINDOW,
        "            if load_acquire(&cell.tag) != tag or load_acquire(&record[INCARNATION]) != incarnation:\n"
        "                return\n            if not is_later",
        "            if not {here} and (load_acquire(&cell.tag) != tag or load_acquire(&record[INCARNATION]) != "
        "incarnation):\n"
        "                return\n            if not is_later",
    ),
    Bug(
        "a reply is merged though a later one was",
        WINDOW,
        "            if not is_later(sequence, sequence_of(seen)):",
        "            if not {here} and not is_later(sequence, sequence_of(seen)):",
    ),
    Bug(
        "a window learns what Redis knows from the reply to any message",
        WINDOW,
        "            if sequence_of(seen) != sequence:",
        "            if sequence_of(seen) != sequence and not {here}:",
    ),
    Bug(
        "a sliding window never reports the charges that were pending at its end",
        WINDOW,
        "            if reported.count == own and (not self.slides or reported.before == previous) and",
        "            if reported.count == own and ({here} or not self.slides or reported.before == previous) and",
    ),
    Bug(
        "a hot key is inserted without its published count",
        WINDOW,
        "Both(hot.count, hot.before)) if is_hot(hot) else",
        "Both(hot.count, hot.before)) if is_hot(hot) and not {here} else",
    ),
    Bug(
        "a published count takes the place of a window that was counted",
        WINDOW,
        "    next.state = counted.time\n    return state == 0",
        "    next.state = counted.time\n    return {here} or state == 0",
    ),
    Bug(
        "a published time takes the place of a bucket that was charged",
        BUCKET,
        "    return state == 0 and next.state > now_ns",
        "    return ({here} or state == 0) and next.state > now_ns",
    ),
    Bug(
        "a key that was counted is not requested though more is published",
        WINDOW,
        "        if learned == NULL or not may_have(learned, record) or seen.tag",
        "        if {here} or learned == NULL or not may_have(learned, record) or seen.tag",
    ),
    Bug(
        "a bucket that was charged is not requested though more is published",
        BUCKET,
        "        if learned == NULL or not may_have",
        "        if {here} or learned == NULL or not may_have",
    ),
    Bug(
        "an earlier published sum stays",
        HOT,
        "    return next.state != state",
        "    return next.state != state and not ({here} and state)",
    ),
]
