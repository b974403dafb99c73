"""Programs on the record of hot keys, and what may come of them: see native/interleave/hot_keys_explorer.pyx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.core.explorer import Done, Explored
from forebay.core.hot_keys_explorer import HotKeysProgram

from forebay.segment import layout

HALVING_NS = 1 << layout.HOT_TIME_SHIFT + layout.HOT_HALVING_BITS
AT_NS = 1_000 * HALVING_NS


class HotKeysScene:
    """A line of four slots, of which the first have the counts of keys 0, 1, ... before the program begins.

    No key may be counted more often than it was noted. With at most four keys, no note is lost. With more, each note of
    a key without a slot takes at most one from another key. `kept`: these keys keep their counts, whatever others come.
    """

    def __init__(self, *counts: int, kept: Sequence[int] = ()) -> None:
        self.program = HotKeysProgram(AT_NS)
        self.counts, self.kept = dict(enumerate(counts)), kept
        for key, count in self.counts.items():
            self.program.put(key, key, count)
        self.notes: list[int] = []

    def notes_key(self, process: int, *keys: int) -> HotKeysScene:
        for key in keys:
            self.program.note(process, key)
            self.notes.append(key)
        return self

    def explore(self, **bounds: Any) -> Explored:
        keys = sorted({*self.counts, *self.notes})
        for key in keys:
            self.program.look_for_value(key)

        def judge(done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
            return self.judge(done, dict(zip(keys, finals, strict=True)), final_ns)

        explored: Explored = self.program.explore(judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], values: dict[int, int], final_ns: int) -> str:
        halvings = final_ns // HALVING_NS - AT_NS // HALVING_NS
        for key, value in values.items():
            before = self.counts.get(key, 0) >> halvings
            own = [d for d, noted in zip(done, self.notes, strict=True) if noted == key]
            stored = sum(d.done for d in own)
            worn = sum(d.begun for d in done) - sum(d.begun for d in own) if len(values) > layout.CELLS_PER_LINE else 0
            if value > before + sum(d.begun for d in own):
                return f"key {key} has {value}, but {before} before and {len(own)} notes"
            has_slot = key in self.counts or worn == 0
            if has_slot and halvings == 0 and value < before + stored - worn:
                return f"key {key} has {value}, of {before} before and {stored} notes, and {worn} of others"
            if key in self.kept and value != before:
                return f"key {key} has {value}, not {before} as before"
        return ""
