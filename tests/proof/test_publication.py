"""An entry of a segment's lists is whole as soon as others can find it, after every instruction of its creator."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from process_helpers import path_of
from single_steps import Stepped, check_platform

from forebay import Store
from forebay.segment import layout

# The bytes that a killed creator may have left in a free entry: any, except in the field by which it is found.
LEFT: Final = b"\xff"


def seen(name: str, offset: int, size: int, act: Callable[[Any], object]) -> Iterator[bytes]:
    """These bytes of the segment before `act` of its internals, in another process, and after each instruction."""
    with Store(name, keys=1) as store:
        process = Stepped(lambda: store.segment, act)
        try:
            with open(path_of(name), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                yield memory[offset : offset + size]
                while process.step():
                    yield memory[offset : offset + size]
        finally:
            process.kill()


def dirty(name: str, offset: int, size: int) -> None:
    with Store(name, keys=1), open(path_of(name), "r+b") as file:
        file.seek(offset)
        file.write(LEFT * size)


def test_an_extent_that_is_found_has_its_whole_entry(name: str, record: Callable[[str, object], None]) -> None:
    check_platform()
    number = 3
    offset = layout.EXTENTS_OFFSET + number * layout.EXTENT_ENTRY.size
    identity = slice(layout.EXTENT_ENTRY_IDENTITY, layout.EXTENT_ENTRY_IDENTITY + 8)
    entry = bytes(range(1, 1 + layout.EXTENT_ENTRY.size))
    dirty(name, offset + identity.stop, layout.EXTENT_ENTRY.size - identity.stop)
    states = list(seen(name, offset, len(entry), lambda segment: segment.publish_extent(number, entry)))
    for state in states:
        assert state == entry or state[identity] == bytes(8), state.hex(" ", 8)
    assert states[-1] == entry
    # It came to be in more than one step, so one by one they were seen.
    assert len(set(states)) > 2
    record("an extent's entry, looked at after each of", f"{len(states):,} instructions, {len(set(states))} states")


@pytest.mark.parametrize("limiter", [b"limiter", bytes(range(1, 1 + layout.LIMITER_NAME_BYTES))], ids=["short", "long"])
def test_a_limiter_that_has_a_length_has_its_whole_name(
    name: str, limiter: bytes, record: Callable[[str, object], None]
) -> None:
    check_platform()
    size = layout.LIMITER_ENTRY.size
    padded = limiter.ljust(layout.LIMITER_NAME_BYTES, b"\0")
    states = list(
        seen(
            name,
            layout.LIMITERS_OFFSET,
            size,
            lambda segment: segment.limiter_number(limiter, layout.ALGORITHM_TOKEN_BUCKET),
        )
    )
    for state in states:
        identity, length, algorithm, named = layout.LIMITER_ENTRY.unpack(state)
        is_whole = identity and named == padded and algorithm == layout.ALGORITHM_TOKEN_BUCKET
        assert not length or is_whole, state.hex(" ", 8)
    assert length == len(limiter)
    assert len(set(states)) > 3
    record("a limiter's entry, looked at after each of", f"{len(states):,} instructions, {len(set(states))} states")
