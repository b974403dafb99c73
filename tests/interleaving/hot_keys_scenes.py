"""The programs on the record of hot keys that are explored, as in scenes.py, and by which each planted bug is found."""

from __future__ import annotations

from hot_keys_programs import HALVING_NS, HotKeysScene
from scenes import Explorable

HOT_KEYS_SCENES: dict[str, Explorable] = {
    "hot keys: two of one key": Explorable(
        lambda: HotKeysScene(2).notes_key(0, 0).notes_key(1, 0).notes_key(2, 0),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 4, "stale_reads": 1},
    ),
    "hot keys: two keys": Explorable(
        lambda: HotKeysScene().notes_key(0, 0).notes_key(1, 1).notes_key(2, 0),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 4},
    ),
    "hot keys: a full line": Explorable(
        lambda: HotKeysScene(4, 3, 1, 5, kept=[0, 1, 3]).notes_key(0, 4).notes_key(1, 5, 4),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 5, "stale_reads": 1},
    ),
    "hot keys: a full line that is worn": Explorable(
        lambda: HotKeysScene(7, 5, 4, 6, kept=[0, 1, 3]).notes_key(0, 4).notes_key(1, 5, 4),
        {"preemptions": 3, "crashes": 1},
        {"preemptions": 5, "stale_reads": 1},
    ),
    "hot keys: over a halving": Explorable(
        lambda: HotKeysScene(4).notes_key(0, 0).notes_key(1, 0),
        {"clock_moves": 1, "jumps_ns": [HALVING_NS], "crashes": 1},
        {"stale_reads": 1},
    ),
}

HOT_KEYS_FOUND_BY = {
    "a note replaces whatever its slot holds by now": "hot keys: two keys",
    "a lost note is not tried again": "hot keys: two of one key",
    "a key takes a slot whose count has not come to 0": "hot keys: a full line that is worn",
    "any slot is worn": "hot keys: a full line",
    "a count is added to before it is halved": "hot keys: over a halving",
}
