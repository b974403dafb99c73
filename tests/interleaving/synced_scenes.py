"""The programs of synced limiters that are explored, as in scenes.py, and by which each planted bug is found."""

from __future__ import annotations

from scenes import Explorable
from synced_programs import NS, SyncedScene

# So that no two messages are read at one time.
TICK = {"tick_ns": 1001}
WINDOW_LATER = {**TICK, "clock_moves": 1, "jumps_ns": [NS]}

SYNCED_SCENES: dict[str, Explorable] = {
    "synced bucket: insertion": Explorable(
        lambda: SyncedScene(bucket=True).does(0, "hit").does(1, "hit").does(2, "exchange"),
        {**TICK, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced bucket: reported while it counts": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "hit", "refund").does(1, "exchange").does(2, "exchange"),
        {**TICK, "preemptions": 3, "crashes": 1},
        {"preemptions": 4},
    ),
    "synced bucket: learned while it counts": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "hit").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced bucket: a lost reply": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "hit", "refund").does(1, "ask"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced bucket: eviction": Explorable(
        lambda: SyncedScene(bucket=True, evicts=True).does(0, "hit").does(1, "hit", key=1).does(2, "exchange"),
        {**TICK, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: insertion": Explorable(
        lambda: SyncedScene().does(0, "hit").does(1, "hit").does(2, "others", "ask", "learn"),
        {**TICK, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: reported while it counts": Explorable(
        lambda: SyncedScene().before().does(0, "hit", "refund").does(1, "exchange").does(2, "others", "exchange"),
        {**TICK, "preemptions": 3, "crashes": 1},
        {"preemptions": 4},
    ),
    "synced window: learned while it counts": Explorable(
        lambda: SyncedScene().before().does(0, "hit").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced window: a lost reply": Explorable(
        lambda: SyncedScene().before().does(0, "hit", "refund").does(1, "ask"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced window: eviction": Explorable(
        lambda: SyncedScene(evicts=True).does(0, "hit").does(1, "hit", key=1).does(2, "exchange"),
        {**TICK, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: a late writer": Explorable(
        lambda: SyncedScene(evicts=True).does(0, "hit").does(1, "hit").does(1, "hit", key=1).does(1, "exchange"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced window: a clean start after an eviction": Explorable(
        lambda: SyncedScene(evicts=True).before(others=2).does(0, "hit", key=1).does(1, "hit", key=1),
        {**TICK, "crashes": 1},
    ),
    "synced window: a key without a name": Explorable(
        lambda: SyncedScene(nameless=1).does(0, "hit").does(1, "hit", key=1).does(2, "exchange"),
        {**TICK, "preemptions": 2},
        {"crashes": 1},
    ),
    "synced window: a late reply": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced bucket: a late reply": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "ask", "learn").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced window: a message over its end": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "others later", "ask", "learn"),
        {**WINDOW_LATER, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: two replies": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "ask", "learn").does(2, "others", "hit"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced window: a reply to another incarnation": Explorable(
        lambda: SyncedScene(evicts=True).before(others=2).does(0, "ask", "learn").does(1, "hit", "hit", key=1),
        {**TICK, "crashes": 1},
    ),
    "synced window: two messages": Explorable(
        lambda: SyncedScene().before().does(0, "hit", "refund").does(1, "ask", "learn").does(2, "ask", "learn"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced bucket: two messages": Explorable(
        lambda: (
            SyncedScene(bucket=True).before().does(0, "hit", "refund").does(1, "ask", "learn").does(2, "ask", "learn")
        ),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced sliding window: learned while it counts": Explorable(
        lambda: SyncedScene(slides=True).before().does(0, "hit").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced sliding window: two messages": Explorable(
        lambda: (
            SyncedScene(slides=True).before().does(0, "hit", "refund").does(1, "ask", "learn").does(2, "ask", "learn")
        ),
        {**TICK, "preemptions": 2},
        {"preemptions": 3},
    ),
    "synced sliding window: reported over its end": Explorable(
        lambda: SyncedScene(slides=True).before().does(0, "hit", "hit").does(1, "exchange").does(2, "ask", "learn"),
        {**WINDOW_LATER, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced bucket: two messages, one reply": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "hit", "refund").does(1, "ask", "learn").does(2, "ask"),
        {**TICK, "preemptions": 3},
        {"preemptions": 4, "crashes": 1},
    ),
    "synced window: reported on weaker memory": Explorable(
        lambda: SyncedScene().does(0, "hit").does(1, "hit").does(2, "exchange"),
        {**TICK, "preemptions": 2, "stale_reads": 1},
        {"preemptions": 3},
    ),
    "synced window: reported over its end": Explorable(
        lambda: SyncedScene().before().does(0, "hit", "hit").does(1, "exchange").does(2, "exchange"),
        {**WINDOW_LATER, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: a hot key that is new": Explorable(
        lambda: SyncedScene().does(0, "hit").does(1, "others", "others", "read lists", "hit").does(2, "hit"),
        {**TICK, "preemptions": 1},
    ),
    "synced sliding window: a hot key that is new": Explorable(
        lambda: SyncedScene(slides=True).does(0, "hit").does(1, "others", "others", "read lists", "hit"),
        {**TICK, "preemptions": 1},
    ),
    "synced bucket: a hot key that is new": Explorable(
        lambda: SyncedScene(bucket=True).does(0, "hit").does(1, "others", "others", "read lists", "hit").does(2, "hit"),
        {**TICK, "preemptions": 1},
    ),
    "synced window: a hot key that was counted": Explorable(
        lambda: SyncedScene().before().does(0, "hit").does(1, "others", "others", "read lists", "hit"),
        {**TICK, "preemptions": 2, "crashes": 1},
    ),
    "synced bucket: a hot key that was counted": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "hit").does(1, "others", "others", "read lists", "hit"),
        {**TICK, "preemptions": 2, "crashes": 1},
    ),
    "synced window: lists read by two": Explorable(
        lambda: SyncedScene().does(0, "others", "read lists").does(1, "others", "others", "read lists", "hit"),
        {**TICK, "preemptions": 1},
    ),
    "synced window: a hot key over its end": Explorable(
        lambda: SyncedScene().does(0, "others", "read lists", "hit").does(1, "hit"),
        {**WINDOW_LATER, "preemptions": 1},
    ),
}
SYNCED_FOUND_BY = {
    "a claim's record is written whether the claim stands or not": "synced window: insertion",
    "CHARGED_BEFORE is written whether the claim stands or not": "synced bucket: insertion",
    "a record's checksum is not checked": "synced window: a key without a name",
    "the charges of a cell's former keys are reported": "synced bucket: eviction",
    "a bucket that is reported isn't marked as unanswered": "synced bucket: a lost reply",
    "charges made while a reply is under way are forgotten": "synced bucket: learned while it counts",
    "a bucket's sequences are all the same": "synced bucket: two messages, one reply",
    "a bucket's message takes the next sequence though another was read meanwhile": "synced bucket: two messages",
    "a bucket learns what Redis knows from the reply to any message": "synced bucket: two messages",
    "a reading of a bucket is dated before its sequence was read": "synced bucket: two messages",
    "a window that is reported isn't marked as unanswered": "synced window: a lost reply",
    "other hosts' counts of a cell's former key stay": "synced window: a clean start after an eviction",
    "the counts of a cell's former key that Redis knew stay": "synced window: a clean start after an eviction",
    "a window's sequences are all the same": "synced window: a late reply",
    "a window's message takes the next sequence though another was read meanwhile": "synced window: two messages",
    "a window is read before its sequence": "synced window: two replies",
    "a message is about the window that was current when the look began": "synced window: a message over its end",
    "a reading of a window is dated before its sequence was read": "synced window: two messages",
    "a reply is merged though a later one was": "synced window: a late reply",
    "a window learns what Redis knows from the reply to any message": "synced window: two messages",
    "other hosts' counts of a former key are learned": "synced window: a reply to another incarnation",
    "a sliding window never reports the charges that were pending at its end": (
        "synced sliding window: reported over its end"
    ),
    "a hot key is inserted without its published count": "synced window: a hot key that is new",
    "a published count takes the place of a window that was counted": "synced window: a hot key that is new",
    "a published time takes the place of a bucket that was charged": "synced bucket: a hot key that is new",
    "a key that was counted is not requested though more is published": "synced window: a hot key that was counted",
    "a bucket that was charged is not requested though more is published": "synced bucket: a hot key that was counted",
    "an earlier published sum stays": "synced window: lists read by two",
}
