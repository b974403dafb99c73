"""A model of *count* and *next generation* of core/table/threads.pyx: every order of their steps, with store buffers.

One thread counts twice in its line. Another closes the store, and a process then takes the line and counts in it. Each
thread's stores wait in a buffer, in order, and become visible at any later time, as on x86-64. A barrier empties the
buffer. The counts of all three must be there at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

OLD, NEW = 1, 2
COUNTS: Final = 2


class Memory(NamedTuple):
    generation: int = OLD
    counting: int = 0
    line: int = 0
    shared: int = 0


class State(NamedTuple):
    memory: Memory = Memory()
    buffer: tuple[tuple[str, int], ...] = ()
    """The counting thread's stores that no other sees yet."""
    step: int = 0
    done: int = 0
    is_own: bool = False
    seen: int = 0
    closing: int = 0
    heir: int = 0
    heir_seen: int = 0


class Protocol(NamedTuple):
    """The steps as they are; each of these leaves one out or moves it."""

    has_barrier: bool = True
    waits: bool = True
    reads_generation_first: bool = False
    ends_before_its_store: bool = False
    draws_generation: bool = True


def seen_by_counter(state: State, word: str) -> int:
    for name, value in reversed(state.buffer):
        if name == word:
            return value
    return int(getattr(state.memory, word))


def stored(state: State, word: str, value: int) -> State:
    return state._replace(buffer=(*state.buffer, (word, value)))


def visible(state: State) -> State:
    """With the oldest store of the buffer in memory."""
    (word, value), *rest = state.buffer
    return state._replace(memory=state.memory._replace(**{word: value}), buffer=tuple(rest))


def counter_steps(state: State, protocol: Protocol) -> Iterator[State]:
    order = ["mark", "check", "read", "store", "unmark"]
    if protocol.reads_generation_first:
        order[:2] = ["check", "mark"]
    if protocol.ends_before_its_store:
        order[3:] = ["unmark", "store"]
    if state.done == COUNTS:
        return
    name = order[state.step]
    after = state._replace(step=state.step + 1)
    if name == "mark":
        yield stored(after, "counting", 1)
    elif name == "check":
        yield after._replace(is_own=seen_by_counter(state, "generation") == OLD)
    elif name == "read":
        yield after._replace(seen=seen_by_counter(state, "line"))
    elif name == "store":
        if state.is_own:
            yield ended(stored(after, "line", state.seen + 1), order)
        elif not state.buffer:
            # An atomic addition empties the buffer first.
            yield ended(after._replace(memory=state.memory._replace(shared=state.memory.shared + 1)), order)
    else:
        yield ended(stored(after, "counting", 0), order)


def ended(state: State, order: list[str]) -> State:
    return state._replace(step=0, done=state.done + 1) if state.step == len(order) else state


def closer_steps(state: State, protocol: Protocol) -> Iterator[State]:
    after = state._replace(closing=state.closing + 1)
    if state.closing == 0:
        new = NEW if protocol.draws_generation else OLD
        yield after._replace(memory=state.memory._replace(generation=new))
    elif state.closing == 1:
        while protocol.has_barrier and after.buffer:
            after = visible(after)
        yield after
    elif state.closing == 2 and (state.memory.counting == 0 or not protocol.waits):
        yield after


def heir_steps(state: State) -> Iterator[State]:
    if state.closing < 3:
        return
    after = state._replace(heir=state.heir + 1)
    if state.heir == 0:
        yield after._replace(heir_seen=state.memory.line)
    elif state.heir == 1:
        yield after._replace(memory=state.memory._replace(line=state.heir_seen + 1))


def next_states(state: State, protocol: Protocol) -> list[State]:
    found = [*counter_steps(state, protocol), *closer_steps(state, protocol), *heir_steps(state)]
    return [*found, visible(state)] if state.buffer else found


def sums(protocol: Protocol) -> set[int]:
    """The numbers of counts at the end of all orders."""
    reached, waiting, found = {State()}, [State()], set()
    while waiting:
        state = waiting.pop()
        following = next_states(state, protocol)
        if not following:
            assert state.closing == 3, "the closing thread waits for ever"
            found.add(state.memory.line + state.memory.shared)
        for after in following:
            if after not in reached:
                reached.add(after)
                waiting.append(after)
    return found


def test_no_count_is_lost_in_any_order() -> None:
    assert sums(Protocol()) == {COUNTS + 1}


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(has_barrier=False),
        Protocol(waits=False),
        Protocol(reads_generation_first=True),
        Protocol(ends_before_its_store=True),
        Protocol(draws_generation=False),
    ],
    ids=lambda protocol: next(name for name, value in protocol._asdict().items() if value != getattr(Protocol(), name)),
)
def test_each_step_is_needed(protocol: Protocol) -> None:
    assert min(sums(protocol)) < COUNTS + 1
