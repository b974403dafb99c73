"""Different keys never share a bucket and equal keys always do, whatever their types."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from forebay import Store, TokenBucket
from forebay.testing import ManualClock


class Text(str):
    """A subclass of str, as frameworks' safe strings are."""

    __slots__ = ()

    def __str__(self) -> str:
        return "misleading"

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"misleading"


class Data(bytes):
    __slots__ = ()

    def __len__(self) -> int:
        return 3

    def __radd__(self, other: object) -> bytes:
        return b"misleading"


class Number(int):
    __slots__ = ()

    def __int__(self) -> int:
        return 3

    def __index__(self) -> int:
        return 3

    def bit_length(self) -> int:
        return 3


SUBCLASSES = {str: Text, bytes: Data, int: Number}

texts = st.text(st.characters(exclude_categories=()), max_size=12)
numbers = (
    st.integers()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from(
        [sign * 2**power + off for sign in (1, -1) for power in (7, 8, 31, 32, 63, 64, 127) for off in (-1, 0, 1)]
    )
)
atoms = texts | st.binary(max_size=12) | numbers
keys = atoms | st.lists(atoms, max_size=4).map(tuple)


def identity(key: Any) -> Any:
    """A value that is equal for equal keys only; Python's own == has 1 == True."""
    if isinstance(key, tuple):
        return tuple, tuple(identity(part) for part in key)
    return type(key), key


def are_apart(distinct: list[Any]) -> None:
    with Store.private(keys=1, clock=ManualClock(1)) as store:
        limiter = TokenBucket(store, "keys", "1/hour")
        for key in distinct:
            assert limiter.allow(key), f"{key!r:.100} shares its bucket with one of {distinct!r:.1000}"
        for key in distinct:
            assert not limiter.allow(key)
            assert not limiter.hit(key)
        assert limiter.allow_many(distinct) == [False] * len(distinct)
        assert store.stats().live_keys == len(distinct)


@given(st.lists(keys, max_size=30, unique_by=identity))
@example([("a/b",), ("a", "b"), "a/b", b"a/b", "ab", ("ab",), ("", "ab"), ("ab", ""), ("a", b"b"), (b"a", "b")])
@example([1, "1", b"1", b"\x01", "\x01", (1,), ("1",), (b"1",), b"\1\0\0\0\0\0\0\0", "\1\0\0\0\0\0\0\0"])
@example(["", b"", 0, (), ("",), (b"",), (0,), ("", ""), ((b"", b""))])
@example(
    [-1, 2**64 - 1, 2**63, -(2**63), 2**63 - 1, -(2**63) - 1, 2**64, -(2**64), 2**65 - 1, 255, -256, 2**128, -(2**128)]
)
@example([2**63, (2**63).to_bytes(9, "little"), 2**64, (2**64).to_bytes(9, "little"), -(2**64)])
@example([b"\xff" * 8, b"\xff" * 9, -1, 2**72 - 1, -(2**64)])
@example(["\ud800", "\udc00", "\ud800\udc00", "\U00010000", "?", b"\xed\xa0\x80", "\udced\udca0\udc80"])
@example(["\xe9", "e\u0301", b"\xe9", b"\xc3\xa9", "\xc3\xa9"])
@example([("a", "b"), ("asb",), (b"a", b"b"), (b"abb",), ("a", b"b"), ("abb",), (1, 1), (b"\1i\1",), ("\1i\1",)])
@example([("a", "b"), ("as\x01\0\0\0\0\0\0\0b",), b"s\x01\0\0\0\0\0\0\0as\x01\0\0\0\0\0\0\0b"])
@example(
    ["x" * 2**20, "x" * 2**20 + "y", "y" + "x" * 2**20, b"x" * 2**20, ("x" * 2**20,), 1 << 2**20, (1 << 2**20) + 1]
)
def test_different_keys_never_share_a_bucket(distinct: list[Any]) -> None:
    are_apart(distinct)


@given(st.integers(0, 17))
def test_keys_that_differ_in_one_byte_never_share_a_bucket(length: int) -> None:
    """Covers every length of a hash's last block, with each of its bytes changed."""
    base = "k" * length
    are_apart([base, *(base[:i] + "l" + base[i + 1 :] for i in range(length)), base + "\0", base + "\0\0"])
    are_apart([base.encode(), *(base[:i].encode() + b"l" + base[i + 1 :].encode() for i in range(length))])


@given(keys)
@example("x" * 2**20)
def test_equal_keys_of_any_subclass_share_a_bucket(key: Any) -> None:
    def disguised(part: Any) -> Any:
        return SUBCLASSES[type(part)](part)

    same = tuple(disguised(part) for part in key) if isinstance(key, tuple) else disguised(key)
    for first, second in ((key, same), (same, key)):
        with Store.private(keys=1, clock=ManualClock(1)) as store:
            limiter = TokenBucket(store, "keys", "1/hour")
            assert limiter.allow(first)
            assert not limiter.allow(second)
            assert limiter.allow_many([second, first]) == [False, False]
            limiter.reset(second)
            assert limiter.allow(first)
