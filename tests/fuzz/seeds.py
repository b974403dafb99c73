"""The inputs that fuzzing begins with: ``python seeds.py DIRECTORY`` writes a folder for each target."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from targets import KINDS, TARGETS


def seeds(target: str) -> Iterator[bytes]:
    """Bytes at random, the same every time: nearly all of them mean something.

    One begins with each of the limiters, for the targets that choose one first.
    """
    draws = random.Random(target)
    for number in range(len(KINDS)):
        yield bytes([number]) + draws.randbytes(60)


def main() -> None:
    for target in TARGETS:
        folder = Path(sys.argv[1], target)
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds(target)):
            (folder / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    main()
