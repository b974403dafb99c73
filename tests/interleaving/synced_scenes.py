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
    "synced bucket: an answer that is lost": Explorable(
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
    "synced window: an answer that is lost": Explorable(
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
    "synced window: an answer that is late": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced bucket: an answer that is late": Explorable(
        lambda: SyncedScene(bucket=True).before().does(0, "ask", "learn").does(1, "others", "ask", "learn"),
        {**TICK, "crashes": 1},
        {"crashes": 2},
    ),
    "synced window: a question over its end": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "others later", "ask", "learn"),
        {**WINDOW_LATER, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "synced window: two answers": Explorable(
        lambda: SyncedScene().before().does(0, "ask", "learn").does(1, "ask", "learn").does(2, "others", "hit"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced window: an answer of another life": Explorable(
        lambda: SyncedScene(evicts=True).before(others=2).does(0, "ask", "learn").does(1, "hit", "hit", key=1),
        {**TICK, "crashes": 1},
    ),
    "synced window: two questions": Explorable(
        lambda: SyncedScene().before().does(0, "hit", "refund").does(1, "ask", "learn").does(2, "ask", "learn"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "synced bucket: two questions": Explorable(
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
    "synced sliding window: two questions": Explorable(
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
    "synced bucket: two questions, one answer": Explorable(
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
}
SYNCED_FOUND_BY = {
    "a claim's record is written whether it stands or not": "synced window: insertion",
    "what was charged before is noted whether the claim stands or not": "synced bucket: insertion",
    "a record is believed whose checksum is of another key": "synced window: a key without a name",
    "what a cell's keys were charged before is reported": "synced bucket: eviction",
    "a bucket that is reported isn't marked as unanswered": "synced bucket: an answer that is lost",
    "what is charged while an answer is under way is forgotten": "synced bucket: learned while it counts",
    "a bucket's sequences are all the same": "synced bucket: two questions, one answer",
    "a bucket's question takes the next sequence, whatever was asked meanwhile": "synced bucket: two questions",
    "a bucket learns of any question what Redis knows": "synced bucket: two questions",
    "a reading of a bucket is dated before its sequence was read": "synced bucket: two questions",
    "a window that is reported isn't marked as unanswered": "synced window: an answer that is lost",
    "what others have counted of a cell's former key stays": "synced window: a clean start after an eviction",
    "what Redis knew of a cell's former key stays": "synced window: a clean start after an eviction",
    "a window's sequences are all the same": "synced window: an answer that is late",
    "a window's question takes the next sequence, whatever was asked meanwhile": "synced window: two questions",
    "a window is read before its sequence": "synced window: two answers",
    "a question is about the window that was when the look began": "synced window: a question over its end",
    "a reading of a window is dated before its sequence was read": "synced window: two questions",
    "an answer is learned though a later one was": "synced window: an answer that is late",
    "a window learns of any question what Redis knows": "synced window: two questions",
    "what others have counted of a former key is learned": "synced window: an answer of another life",
    "a sliding window never reports what was pending at its end": "synced sliding window: reported over its end",
}
