"""Bugs of synced limiters that the interleaving explorer must find: see planted_bugs.py."""

from __future__ import annotations

from bug import Bug

SYNCED = "src/forebay/core/synced/limiter.pyx"
BUCKET = "src/forebay/core/synced/token_bucket.pyx"
WINDOW = "src/forebay/core/synced/window.pyx"

SYNCED_BUGS = [
    Bug(
        "a claim's words are written whether it stands or not",
        SYNCED,
        "    while stands(cell, claim) and not cas128_acq_rel(pair, seen, wanted):",
        "    while ({here} or stands(cell, claim)) and not cas128_acq_rel(pair, seen, wanted):",
    ),
    Bug(
        "what was charged before is noted whether the claim stands or not",
        BUCKET,
        "    while stands(cell, claim):",
        "    while {here} or stands(cell, claim):",
    ),
    Bug(
        "words are believed that were not sealed for their key",
        SYNCED,
        "    return seen[SEAL] != 0 and seen[SEAL] ==",
        "    return {here} or seen[SEAL] != 0 and seen[SEAL] ==",
    ),
    Bug(
        "what a cell's keys were charged before is told",
        BUCKET,
        "        wanted.tag = wanted.state = seen.tag",
        "        wanted.tag = wanted.state = seen.tag\n        if {here}:\n            wanted.state = 0",
    ),
    Bug(
        "a bucket that is told isn't marked as unanswered",
        BUCKET,
        "            told.is_unanswered = True",
        "            told.is_unanswered = not {here}",
    ),
    Bug(
        "what is charged while an answer is under way is forgotten",
        BUCKET,
        "                wanted.state = read_ns + ahead_ns + min(now_charged - charged, self.most_ahead_ns)",
        "                wanted.state = read_ns + ahead_ns + min(\n"
        "                    0 if {here} else now_charged - charged, self.most_ahead_ns)",
    ),
    Bug(
        "a bucket's tickets are all the same",
        BUCKET,
        "            told.ticket = (told.ticket + 1) & low_mask(TICKET_BITS)",
        "            told.ticket = (told.ticket + (0 if {here} else 1)) & low_mask(TICKET_BITS)",
    ),
    Bug(
        "a bucket's question takes the next ticket, whatever was asked meanwhile",
        BUCKET,
        "            wanted.tag = told_word(told)\n",
        "            if {here}:\n                asked = load128_acquire(pair_at(words, CHARGED_TOLD))\n"
        "                told.ticket = (told_in(asked.tag).ticket + 1) & low_mask(TICKET_BITS)\n"
        "            wanted.tag = told_word(told)\n",
    ),
    Bug(
        "a bucket learns of any question what Redis knows",
        BUCKET,
        "            if told.ticket != ticket or read_ns < seen.state:",
        "            if (told.ticket != ticket or read_ns < seen.state) and not {here}:",
    ),
    Bug(
        "a reading of a bucket is dated before its ticket was read",
        BUCKET,
        "            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000",
        "            read_us = (now_ns if {here} else monotonic_ns() - self.table.epoch_ns) // 1000",
    ),
    Bug(
        "a window that is told isn't marked as unanswered",
        WINDOW,
        "    told[0] |= UNANSWERED",
        "    told[0] |= 0 if {here} else UNANSWERED",
    ),
    Bug(
        "what others have counted of a cell's former key stays",
        WINDOW,
        "    begin_pair(cell, claim, pair_at(words, OTHERS), ticket, 0)",
        "    if not {here}:\n        begin_pair(cell, claim, pair_at(words, OTHERS), ticket, 0)",
    ),
    Bug(
        "what Redis knew of a cell's former key stays",
        WINDOW,
        "    begin_pair(cell, claim, pair_at(words, TOLD), ticket, 0)",
        "    if not {here}:\n        begin_pair(cell, claim, pair_at(words, TOLD), ticket, 0)",
    ),
    Bug(
        "a window's tickets are all the same",
        WINDOW,
        "            ticket = (ticket_of(asked) + 1) & low_mask(COUNT_BITS)",
        "            ticket = (ticket_of(asked) + (0 if {here} else 1)) & low_mask(COUNT_BITS)",
    ),
    Bug(
        "a window's question takes the next ticket, whatever was asked meanwhile",
        WINDOW,
        "            # SYNC reading -> ticket\n",
        "            if {here}:\n                asked = load128_acquire(pair_at(words, TOLD))\n"
        "                ticket = (ticket_of(asked) + 1) & low_mask(COUNT_BITS)\n"
        "            # SYNC reading -> ticket\n",
    ),
    Bug(
        "a window is read before its ticket",
        WINDOW,
        "            asked = load128_acquire(pair_at(words, TOLD))\n"
        "            # Of the clock, too: else the later question might be about the earlier window.\n"
        "            time_ns = table_now(&self.table)\n            seen = load128_acquire(cell)\n",
        "            if {here}:\n                seen = load128_acquire(cell)\n"
        "            asked = load128_acquire(pair_at(words, TOLD))\n            time_ns = table_now(&self.table)\n"
        "            if not {here}:\n                seen = load128_acquire(cell)\n",
    ),
    Bug(
        "a question is about the window that was when the look began",
        WINDOW,
        "self.read_counts(cell, seen, time_ns, asks,",
        "self.read_counts(cell, seen, now_ns if {here} else time_ns, asks,",
    ),
    Bug(
        "a reading of a window is dated before its ticket was read",
        WINDOW,
        "            read_us = (monotonic_ns() - self.table.epoch_ns) // 1000",
        "            read_us = (now_ns if {here} else monotonic_ns() - self.table.epoch_ns) // 1000",
    ),
    Bug(
        "what others have counted of a former key is learned",
        WINDOW,
        "            if load_acquire(&cell.tag) != tag or load_acquire(&words[BIRTH]) != birth:\n"
        "                return\n            if not is_later",
        "            if not {here} and (load_acquire(&cell.tag) != tag or load_acquire(&words[BIRTH]) != birth):\n"
        "                return\n            if not is_later",
    ),
    Bug(
        "an answer is learned though a later one was",
        WINDOW,
        "            if not is_later(ticket, ticket_of(seen)):",
        "            if not {here} and not is_later(ticket, ticket_of(seen)):",
    ),
    Bug(
        "a window learns of any question what Redis knows",
        WINDOW,
        "            if ticket_of(seen) != ticket:",
        "            if ticket_of(seen) != ticket and not {here}:",
    ),
    Bug(
        "what a sliding window hasn't told when it is over is never told",
        WINDOW,
        "            if told.count == own and (not self.slides or told.before == previous) and",
        "            if told.count == own and ({here} or not self.slides or told.before == previous) and",
    ),
]
