"""The simulation behind the choice of probe set: ``python benchmarks/probe_simulation.py``.

A key may live in any cell of its probe set. A larger probe set is full less often, and a lookup may read more lines.
The simulation uses the table's placement rule (``probe_set`` and ``choose_vacancy`` in core/table/table.pyx) with the
advertised number of live keys under churn: each step replaces a random key by a new one. It counts how often an
insertion finds no vacancy, how many keys are at home, and how many lines a lookup reads.

It keeps only the number of vacancies per line: the cell that a key takes in a line makes no difference to these three.
A key that finds no vacancy is refused, and its place among the live keys stays empty until it is drawn again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

CELLS_PER_LINE = 4
BYTES_PER_LINE = 64
KIND_BITS = 3
# A key's hash times these gives the positions of its groups. core/table/table.pyx uses the first three.
MULTIPLIERS = (
    1,
    0x9E3779B97F4A7C15,
    0xD1342543DE82EF95,
    0xABC98388FB8FAC03,
    0x8CB92BA72F3D8DD7,
    0xAEF17502108EF2D9,
    0xF1357AEA2E62A9C5,
    0x9FB21C651E98DF25,
)
STEP = 10_000
NOWHERE = -1
# The acceptance bar: at most one insertion in 10,000 finds its probe set full.
MOST_FULL = 1e-4


@dataclass(frozen=True)
class Choice:
    """A probe set, and the order in which an insertion uses it."""

    groups: int
    lines: int
    first_fit: bool = False
    bytes_per_key: int = 21


CHOSEN = Choice(3, 4)
OTHERS = (
    Choice(1, 4),
    Choice(2, 2),
    Choice(2, 4),
    Choice(2, 8),
    Choice(8, 1),
    Choice(3, 4, first_fit=True),
    Choice(3, 4, bytes_per_key=20),
    Choice(3, 4, bytes_per_key=22),
)


@dataclass
class Outcome:
    """The counts of one simulation."""

    insertions: int = 0
    full: int = 0
    at_home: int = 0
    live: int = 0
    lines_to_find_live: int = 0


def probe_set(choice: Choice, fingerprint: int, group_count: int) -> list[int]:
    """A key's lines in search order: whole groups, each from the key's own line on."""
    groups: list[int] = []
    for multiplier in MULTIPLIERS[: choice.groups]:
        group = (fingerprint * multiplier & 0xFFFFFFFFFFFFFFFF) * group_count >> 64
        while group in groups:
            group = (group + 1) % group_count
        groups.append(group)
    start = (fingerprint >> KIND_BITS) & (choice.lines - 1)
    return [group * choice.lines + (start ^ i) for group in groups for i in range(choice.lines)]


def choose(choice: Choice, probe: list[int], vacancies: list[int]) -> int:
    """The position in `probe` of the line that takes the new key; NOWHERE if all lines are full."""
    if vacancies[probe[0]]:
        return 0
    best, most = NOWHERE, 0
    for position, line in enumerate(probe):
        if vacancies[line] > most:
            best, most = position, vacancies[line]
            if choice.first_fit:
                break
    return best


def simulate(choice: Choice, keys: int, insertions: int, seed: int, advance: Callable[[int], None]) -> Outcome:
    """Fill a table made for `keys` keys with as many, then replace random keys, `insertions` times."""
    chance = random.Random(seed)
    group_count = keys * choice.bytes_per_key // (BYTES_PER_LINE * choice.lines)
    vacancies = [CELLS_PER_LINE] * (group_count * choice.lines)
    line_of = [NOWHERE] * keys
    position_of = [NOWHERE] * keys
    outcome = Outcome()
    for number in range(-keys, insertions):
        slot = chance.randrange(keys) if number >= 0 else number
        if line_of[slot] != NOWHERE:
            vacancies[line_of[slot]] += 1
        fingerprint = chance.getrandbits(64 - KIND_BITS) << KIND_BITS
        probe = probe_set(choice, fingerprint, group_count)
        position = choose(choice, probe, vacancies)
        position_of[slot] = position
        line_of[slot] = NOWHERE
        if position != NOWHERE:
            line_of[slot] = probe[position]
            vacancies[probe[position]] -= 1
        if number >= 0:
            outcome.insertions += 1
            outcome.full += position == NOWHERE
            outcome.at_home += position == 0
        if number % STEP == 0:
            advance(STEP)
    outcome.live = sum(line != NOWHERE for line in line_of)
    outcome.lines_to_find_live = sum(position + 1 for position in position_of)
    return outcome


def describe(choice: Choice, outcome: Outcome) -> list[str]:
    return [
        f"{choice.groups} x {choice.lines}" + (" (chosen)" if choice == CHOSEN else ""),
        "first fit" if choice.first_fit else "home, else emptiest",
        str(choice.bytes_per_key),
        f"{outcome.full / outcome.insertions:.1e}" if outcome.full else f"< {1 / outcome.insertions:.0e}",
        "yes" if outcome.full <= MOST_FULL * outcome.insertions else "no",
        f"{outcome.at_home / outcome.insertions:.3f}",
        f"{outcome.lines_to_find_live / outcome.live:.2f}",
        str(choice.groups * choice.lines),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000, help="live keys that each table is made for, and holds")
    parser.add_argument("--insertions", type=int, default=3_000_000, help="of the chosen one; a third for others")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan = [(CHOSEN, arguments.insertions), *((other, arguments.insertions // 3) for other in OTHERS)]

    table = Table(box=box.MARKDOWN)
    for heading in ("groups x lines", "rule", "bytes/key"):
        table.add_column(heading)
    for heading in ("probe set full", "<= 1e-4", "put at home", "lines read to find a key", "to find none"):
        table.add_column(heading, justify="right")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Simulating", total=sum(arguments.keys + insertions for _, insertions in plan))
        for choice, insertions in plan:
            progress.update(task, description=f"{choice.groups} x {choice.lines} lines")
            outcome = simulate(
                choice, arguments.keys, insertions, arguments.seed, lambda steps: progress.advance(task, steps)
            )
            table.add_row(*describe(choice, outcome))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
