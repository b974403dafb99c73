"""A key has one state, however it is named: by Python's object, by bytes anywhere in memory, or by its hash."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import c_api
import pytest
from c_api import ALLOWED, API, OK, Handle, Request, Thread
from hypothesis import example, given
from hypothesis import strategies as st

from forebay import FixedWindow, Store, TokenBucket
from forebay.testing import ManualClock

LIMIT: Final = 100
# One of each way through the hash: no word, a part of a word by each of its loads, whole words, words and a part.
LENGTHS: Final = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 2**20 + 5)


@dataclass(frozen=True)
class Placed:
    """Bytes at an address that is no multiple of 8, unless `shift` is 0."""

    memory: Any
    pointer: ctypes.c_char_p
    size: int

    @classmethod
    def of(cls, data: bytes, shift: int) -> Placed:
        memory = (ctypes.c_uint64 * (len(data) // 8 + 3))()
        address = ctypes.addressof(memory) + shift
        ctypes.memmove(address, data, len(data))
        return cls(memory, ctypes.c_char_p(address), len(data))

    def request(self, kind: int) -> Request:
        return Request(self.pointer, self.size, 0, 1, None, 0, kind, 0)


@dataclass(frozen=True)
class Opened:
    limiter: Any
    handle: Handle
    thread: Thread

    def ways(self, key: str | bytes, placed: Placed, kind: int) -> Iterator[Callable[[], int]]:
        """Calls that each charge one permit of the key. They return how many they charged."""
        thread = self.thread.pointer
        value = ctypes.c_uint64()
        assert API.hash(self.handle.pointer, kind, placed.pointer, placed.size, value) == OK
        by_hash = c_api.request_of(key_hash=value.value)
        both = (Request * 2)(placed.request(kind), by_hash)
        allowed = (ctypes.c_uint8 * 2)()
        yield lambda: self.limiter.allow(key)
        yield lambda: API.allow_hash(thread, value.value)
        yield lambda: API.decide(thread, placed.request(kind), None)
        yield lambda: API.decide(thread, by_hash, c_api.Result())
        yield lambda: API.decide_many(thread, both, 2, allowed) or sum(allowed)
        yield lambda: 2 * API.decide_all(c_api.array_of([self.thread] * 2), both, 2, None, None)
        if kind == c_api.TEXT:
            yield lambda: API.allow(thread, placed.pointer, placed.size)
            yield lambda: API.allow_at_tick(thread, placed.pointer, placed.size)


@pytest.fixture(scope="module", params=[TokenBucket, FixedWindow])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with Store.private(keys=1000, clock=ManualClock(1000)) as store:
        limiter = request.param(store, "api", f"{LIMIT}/hour")
        with Handle(limiter) as handle:
            yield Opened(limiter, handle, handle.attach())


def check_one_state(opened: Opened, key: str | bytes, data: bytes, kind: int, shift: int) -> None:
    placed = Placed.of(data, shift)
    opened.limiter.reset(key)
    left = LIMIT
    # Each way charges what each other one has left.
    for _ in range(2):
        for way in opened.ways(key, placed, kind):
            charged = int(way())
            assert charged >= ALLOWED
            left -= charged
            assert opened.limiter.peek(key).remaining == left
            peeked = c_api.Result()
            assert API.peek(opened.thread.pointer, placed.request(kind), peeked) == ALLOWED
            assert peeked.remaining == left
    assert API.reset(opened.thread.pointer, placed.request(kind)) == OK
    assert opened.limiter.peek(key).remaining == LIMIT


@pytest.mark.parametrize("size", LENGTHS)
def test_a_key_of_any_length_at_any_address_is_one_key(opened: Opened, size: int) -> None:
    data = random.Random(size).randbytes(size)
    text = bytes(byte & 127 for byte in data)
    for shift in range(8):
        check_one_state(opened, data, data, c_api.BYTES, shift)
        check_one_state(opened, text.decode(), text, c_api.TEXT, shift)


@given(data=st.binary(max_size=100), shift=st.integers(0, 15))
@example(data=b"\0", shift=1)
@example(data=b"\0" * 8, shift=0)
@example(data=b"a\0b", shift=3)
def test_any_bytes_are_one_key(opened: Opened, data: bytes, shift: int) -> None:
    check_one_state(opened, data, data, c_api.BYTES, shift)


@given(key=st.text(max_size=40), shift=st.integers(0, 15))
@example(key="\0", shift=0)
@example(key="\ud800", shift=0)
def test_any_text_is_one_key(opened: Opened, key: str, shift: int) -> None:
    check_one_state(opened, key, key.encode(errors="surrogatepass"), c_api.TEXT, shift)


@given(first=st.binary(max_size=20), second=st.binary(max_size=20))
def test_a_byte_more_or_less_is_another_key(opened: Opened, first: bytes, second: bytes) -> None:
    hashes = {data: opened.handle.hash(data, c_api.BYTES) for data in (first, second, first + b"\0", second + b"\0")}
    assert len(set(hashes.values())) == len(hashes)
