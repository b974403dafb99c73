"""The segment's list of limiters, as statistics and ``verify`` read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from forebay.errors import InvalidLimiter, short_repr
from forebay.segment import layout

__all__ = ["ALGORITHM_NAMES", "LIST_BYTES", "ListedLimiter", "encode_limiter_name", "labels_of", "listed_limiters"]

NAME_DIGEST_BYTES: Final = 8
LIST_BYTES: Final = layout.LIMITER_CAPACITY * layout.LIMITER_ENTRY.size

ALGORITHM_NAMES: Final = {
    layout.ALGORITHM_SLIDING_LOG: "SlidingLog",
    layout.ALGORITHM_BUCKETED_WINDOW: "BucketedWindow",
    layout.ALGORITHM_CONCURRENCY: "Concurrency",
    layout.ALGORITHM_SYNCED_FIXED_WINDOW: "synced FixedWindow",
    layout.ALGORITHM_SYNCED_SLIDING_WINDOW: "synced SlidingWindow",
    layout.ALGORITHM_SYNCED_TOKEN_BUCKET: "synced TokenBucket",
    layout.ALGORITHM_TOKEN_BUCKET: "TokenBucket",
    layout.ALGORITHM_LEAKY_BUCKET: "LeakyBucket",
    layout.ALGORITHM_MIN_INTERVAL: "MinInterval",
    layout.ALGORITHM_FIXED_WINDOW: "FixedWindow",
    layout.ALGORITHM_SLIDING_WINDOW: "SlidingWindow",
    layout.ALGORITHM_LEASED_TOKEN_BUCKET: "leased TokenBucket",
    layout.ALGORITHM_LEASED_FIXED_WINDOW: "leased FixedWindow",
    layout.ALGORITHM_LEASED_SLIDING_WINDOW: "leased SlidingWindow",
    layout.ALGORITHM_CREDITS: "Credits",
    layout.ALGORITHM_SHEDDER: "load shedder",
    layout.ALGORITHM_HOT_KEYS: "hot keys",
}


def encode_limiter_name(name: str) -> bytes:
    """`name` as the segment holds it. A name that is too long is cut and ends with a digest of the whole name."""
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise InvalidLimiter(f"a limiter's name is text, and not empty; not {short_repr(name)}")
    if len(encoded) > layout.LIMITER_NAME_BYTES:
        ending = b"~" + blake2b(encoded, digest_size=NAME_DIGEST_BYTES).hexdigest().encode()
        beginning = encoded[: layout.LIMITER_NAME_BYTES - len(ending)].decode(errors="ignore")
        encoded = beginning.encode() + ending
    return encoded


class ListedLimiter(NamedTuple):
    """An entry of the list of limiters."""

    name: bytes
    algorithm: int

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name in statistics and reports. After damage, `algorithm` may be any number."""
        return ALGORITHM_NAMES.get(self.algorithm, f"algorithm {self.algorithm}")

    @property
    def identity_text(self) -> bytes:
        """The text whose hash is the entry's identity."""
        return self.name + b"\0" + self.algorithm.to_bytes(4, "little")


def listed_limiters(raw: bytes) -> Iterator[tuple[int, ListedLimiter]]:
    """The limiters whose entries are in place, by number. A name may be anything but empty."""
    for number, (identity, name_bytes, algorithm, name) in enumerate(layout.LIMITER_ENTRY.iter_unpack(raw)):
        if identity and name_bytes:
            yield number, ListedLimiter(name[: min(name_bytes, layout.LIMITER_NAME_BYTES)], algorithm)


def labels_of(limiters: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A text for each pair of a name and an algorithm's name, no two the same.

    The text is the name where only one limiter has it. Otherwise it is ``name (algorithm)``. A name that reads like
    such a text of another limiter gets its own algorithm, too.
    """
    pairs = dict.fromkeys(limiters)
    holders = Counter(name for name, _ in pairs)
    while True:
        labels = {pair: pair[0] if holders[pair[0]] == 1 else f"{pair[0]} ({pair[1]})" for pair in pairs}
        shared = {label for label, count in Counter(labels.values()).items() if count > 1}
        if not shared:
            return labels
        holders.update(shared)
