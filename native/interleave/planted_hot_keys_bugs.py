"""Bugs of the record of hot keys that the interleaving explorer must find: see planted_bugs.py."""

from __future__ import annotations

from bug import Bug

HOT_KEYS = "src/forebay/core/table/hot_keys.pxd"

HOT_KEYS_BUGS = [
    Bug(
        "a note replaces whatever its slot holds by now",
        HOT_KEYS,
        "    return cas128_acq_rel(slot, chosen, wanted)",
        "    if {here}:\n        chosen.tag, chosen.state = load_acquire(&slot.tag), load_acquire(&slot.state)\n"
        "    return cas128_acq_rel(slot, chosen, wanted)",
    ),
    Bug(
        "a lost note is not tried again",
        HOT_KEYS,
        "        if note_once(line, name, now_ns >> FOREBAY_HOT_TIME_SHIFT):",
        "        if note_once(line, name, now_ns >> FOREBAY_HOT_TIME_SHIFT) or {here}:",
    ),
    Bug(
        "a key takes a slot whose count has not come to 0",
        HOT_KEYS,
        "            if count == 0:\n                wanted.tag = name",
        "            if count == 0 or {here}:\n                wanted.tag = name",
    ),
    Bug(
        "any slot is worn",
        HOT_KEYS,
        "        if order < least:",
        "        if order < least or {here}:",
    ),
    Bug(
        "a count is added to before it is halved",
        HOT_KEYS,
        "        if seen.tag == name:\n",
        "        if {here}:\n            count = seen.state << FOREBAY_HOT_COUNT_BITS >> FOREBAY_HOT_COUNT_BITS\n"
        "        if seen.tag == name:\n",
    ),
]
