"""Compares the hot path of two builds: ``python regression.py BEFORE AFTER CALLGRIND_LIBRARY``.

BEFORE and AFTER are folders with the package. Each generation starts two processes of each build, on one core. They
take turns in short rounds, so a machine that is slow for a second slows both builds. A process's figure is its fastest
round. The change is the median of the generations, each of which compares the means of two processes. The noise is the
largest difference that any generation has found between two processes of one build.

Callgrind counts the instructions of a call, which no other process changes. It is the second opinion, for code that
moves within a module can be slower or faster by some percent, and on a busy machine the noise hides a slow-down.

A row fails if it is slower beyond the noise and executes more instructions. One of the two alone is enough from a tenth
on. Exits with 1 if a row fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

GENERATIONS = 6
ROUNDS = 30
ROUND_NS = 1_000_000
TRIAL_CALLS = 200
COUNTED_CALLS = 500
# Some six instructions of four hundred differ from process to process.
MORE_INSTRUCTIONS = 0.02
ALONE = 0.1

WORKER = Path(__file__).parent / "hot_rows.py"


class Worker:
    """A process of one build."""

    def __init__(self, package: Path, *before: str, after: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, str(WORKER), *after],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(package), "PYTHONHASHSEED": "0"},
        )

    def rows(self) -> list[str]:
        return self._line().split()

    def measure(self, row: str, calls: int) -> float:
        self.send(row, calls)
        return float(self._line())

    def send(self, row: str, calls: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{row} {calls}\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of a build ended: exit {self.process.wait()}")
        return line

    def end(self) -> None:
        self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"a process of a build failed: exit {self.process.returncode}")


@contextlib.contextmanager
def started(packages: list[Path]) -> Iterator[list[Worker]]:
    workers = [Worker(package) for package in packages]
    try:
        yield workers
        for worker in workers:
            worker.end()
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


@dataclass
class Times:
    """One row's figures: of each generation, those of two processes of either build, in ns per call."""

    before: list[tuple[float, float]]
    after: list[tuple[float, float]]

    @property
    def change(self) -> float:
        """The share by which it became slower."""
        return median(sum(new) / sum(old) for old, new in zip(self.before, self.after, strict=True)) - 1

    @property
    def noise(self) -> float:
        return max(max(pair) / min(pair) for pair in [*self.before, *self.after]) - 1


def timed(before: Path, after: Path) -> dict[str, Times]:
    order = random.Random(1)
    times: dict[str, Times] = {}
    calls: dict[str, int] = {}
    for _ in range(GENERATIONS):
        with started([before, before, after, after]) as workers:
            rows, *_ = [worker.rows() for worker in workers]
            for row in rows:
                if row not in calls:
                    calls[row] = max(1, round(ROUND_NS / workers[0].measure(row, TRIAL_CALLS)))
                    times[row] = Times([], [])
                best = [float("inf")] * len(workers)
                for _ in range(ROUNDS):
                    for number in order.sample(range(len(workers)), len(workers)):
                        best[number] = min(best[number], workers[number].measure(row, calls[row]))
                times[row].before.append((best[0], best[1]))
                times[row].after.append((best[2], best[3]))
    return times


def counted(package: Path, library: str) -> dict[str, float]:
    """Instructions per call, of each row: the difference between twice as many calls and as many."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts", "--quiet")
        worker = Worker(package, "valgrind", *options, after=(library,))
        rows = worker.rows()
        for row in rows:
            # The first is thrown away: afterwards all code has run once.
            for calls in (10, COUNTED_CALLS, 2 * COUNTED_CALLS):
                worker.send(row, calls)
        worker.end()
        counts = {}
        for file in Path(folder).iterdir():
            text = file.read_text()
            if found := re.search(r"^desc: Trigger: Client Request: (\w+):(\d+)$", text, re.MULTILINE):
                total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
                assert total is not None
                counts[found[1], int(found[2])] = int(total[1])
    return {row: (counts[row, 2 * COUNTED_CALLS] - counts[row, COUNTED_CALLS]) / COUNTED_CALLS for row in rows}


def main() -> int:
    before, after, library = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    times = timed(before, after)
    old, new = counted(before, library), counted(after, library)
    print(f"{'':8}{'before':>13}{'after':>13}{'change':>9}{'noise':>8}   {'instructions':>18}{'change':>9}")
    failed = []
    for row, one in times.items():
        more = new[row] / old[row] - 1
        is_slower = one.change > one.noise
        fails = (is_slower and (more > MORE_INSTRUCTIONS or one.change > ALONE)) or more > ALONE
        failed += [row] * fails
        print(
            f"{row:8}{median(map(min, one.before)):10,.1f} ns{median(map(min, one.after)):10,.1f} ns{one.change:+9.1%}"
            f"{one.noise:8.1%}   {old[row]:8,.1f} {new[row]:9,.1f}{more:+9.1%}"
            f"{'  slower beyond the noise' if is_slower else ''}{'  FAILS' if fails else ''}"
        )
    if failed:
        print(
            f"slower: {', '.join(failed)}. If that is meant, compare with the commit that has it: FOREBAY_COMPARE=HEAD"
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
