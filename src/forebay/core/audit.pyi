from mmap import mmap
from typing import Final, final

from forebay.segment.process_identity import PID_BITS as PID_BITS

PROBLEMS: Final[tuple[str, ...]]
LATEST_NS: Final[int]

@final
class Counts:
    kinds: list[int]
    live: int
    stale_claims: int
    unfinished: int
    held: int
    busy: int
    problem_count: int
    problems: list[tuple[str, int, int, int, int, int]]

def look_at_cells(
    counts: Counts,
    memory: mmap,
    offset: int,
    group_count: int,
    first: int,
    last: int,
    *,
    used: int,
    kinds: tuple[int, ...],
    kept_bits: int,
    now_ns: int,
    latest_ns: int,
) -> None: ...
def look_at_words(
    counts: Counts,
    memory: mmap,
    offset: int,
    group_count: int,
    first: int,
    last: int,
    *,
    used: int,
    algorithm: int,
    word_count: int,
    limit: int,
    period_ns: int,
    phase_ns: int,
    low_bits: int,
    now_ns: int,
) -> None: ...
def copy_live(
    memory: mmap,
    offset: int,
    group_count: int,
    first: int,
    last: int,
    *,
    used: int,
    word_count: int,
    free_bits: int,
    now_ns: int,
) -> tuple[bytes, list[int]]: ...
def keyed_hash(hash_key: tuple[int, int], text: bytes) -> int: ...
def look_at_unused(memory: mmap | bytes, first: int, last: int) -> tuple[int, int]: ...
