"""A snapshot with any damage makes no store, or a sound one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import BucketedWindow, Concurrency, Credits, FixedWindow, SlidingLog, Store, TokenBucket
from forebay.errors import SegmentError
from forebay.snapshots import restore, snapshot
from forebay.snapshots.document import DIGEST_BYTES
from forebay.verification import verify

DIGIT: Final = st.integers(0, 2**64 - 1) | st.sampled_from((0, 1, 2**32, 2**62, 2**63, 2**64 - 1))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def whole(place: Path) -> bytes:
    """A snapshot."""
    path, file = place / "forebay-shop", place / "whole"
    with Store("a", keys=100, path=path) as store:
        bucket, window = TokenBucket(store, "api", "10/hour"), FixedWindow(store, "window", "10/hour")
        log, buckets = SlidingLog(store, "log", "3/hour", keys=3), BucketedWindow(store, "b", "9/hour", 3, keys=3)
        assert Concurrency(store, "held", 2, keys=2).hit("job")
        Credits(store, "credits").add("key", 5)
        for key in range(3):
            assert all(one.hit(key, 1 + key) for one in (bucket, window, log, buckets))
    snapshot(path, file)
    path.unlink()
    return file.read_bytes()


def tried(place: Path, raw: bytes) -> None:
    file, path = place / "damaged", place / "forebay-shop"
    file.write_bytes(raw)
    file.chmod(0o600)
    with contextlib.suppress(SegmentError):
        restore(file, path)
        assert verify(path).sound
        path.unlink()
    assert not path.exists()


@given(where=st.integers(0), bits=st.integers(1, 255))
def test_a_changed_byte(place: Path, whole: bytes, where: int, bits: int) -> None:
    raw = bytearray(whole)
    raw[where % len(raw)] ^= bits
    with pytest.raises(SegmentError):
        restore_only(place, bytes(raw))


@given(size=st.integers(0))
def test_a_cut_file(place: Path, whole: bytes, size: int) -> None:
    with pytest.raises(SegmentError):
        restore_only(place, whole[: size % len(whole)])


def restore_only(place: Path, raw: bytes) -> None:
    file = place / "damaged"
    file.write_bytes(raw)
    file.chmod(0o600)
    restore(file, place / "forebay-shop")


@given(words=st.lists(st.tuples(st.integers(0), DIGIT), min_size=1, max_size=4), is_near=st.booleans())
def test_a_hostile_file(place: Path, whole: bytes, words: list[tuple[int, int]], is_near: bool) -> None:
    """Any values, under a checksum that is right."""
    raw = bytearray(whole[:-DIGEST_BYTES])
    for where, value in words:
        # Counters are most of the file, and any of them will do: half of the values are elsewhere.
        at = where % (2000 if is_near else len(raw)) % (len(raw) - 8)
        raw[at : at + 8] = value.to_bytes(8, "little")
    tried(place, bytes(raw) + blake2b(raw, digest_size=DIGEST_BYTES).digest())
