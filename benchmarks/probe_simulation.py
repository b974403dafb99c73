"""The simulation behind the choice of probe set: ``python benchmarks/probe_simulation.py``.

A key may live in any cell of its probe set. A larger probe set is full less often, and a lookup may read more lines.
The simulation uses the table's placement rule (``probe_set`` and ``choose_vacancy`` in core/table/table.pyx).

*Churn*: the advertised number of keys is live, and each step replaces a random key by a new one. How often does an
insertion find no vacancy, how many keys are at home, and how many lines does a lookup read? A key that finds no vacancy
is refused, and its place among the live keys stays empty until it is drawn again.

*Returning keys*: the same keys come in pass after pass, in random order, and each has expired before the next one
comes. How many have lost their cell to another key, and are inserted anew? Beside them, keys may come that never
return.
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
EMPTY = 0  # in place of the time at which a cell expires
NEVER = 1 << 62
# The acceptance bar: at most one insertion in 10,000 finds its probe set full.
MOST_FULL = 1e-4


@dataclass(frozen=True)
class Rule:
    """Which cells of a probe set a new key may take, and which of these it takes."""

    name: str
    empty_first: bool = True
    """An expired cell goes only if no cell of the probe set is empty."""
    old_part: int = 0
    """An expired cell goes only if it has been vacant for at least one part in so many of the longest time; 0: any
    goes."""
    first_fit: bool = False
    """The key takes the first line that has such a cell; else the home line, or the line that has most of them."""


CHOSEN_RULE = Rule("empty, else old by 1/8", old_part=8)
RULES = (
    Rule("any vacancy", empty_first=False),
    Rule("empty, else any"),
    Rule("empty, else old by 1/64", old_part=64),
    Rule("empty, else old by 1/16", old_part=16),
    CHOSEN_RULE,
    Rule("empty, else old by 1/4", old_part=4),
    Rule("empty, else old by 1/2", old_part=2),
    Rule("empty, else the longest vacant", old_part=1),
)


@dataclass(frozen=True)
class Choice:
    """A probe set, and the rule by which an insertion uses it."""

    groups: int
    lines: int
    rule: Rule = CHOSEN_RULE
    bytes_per_key: int = 21


CHOSEN = Choice(3, 4)
OTHERS = (
    Choice(1, 4),
    Choice(2, 2),
    Choice(2, 4),
    Choice(2, 8),
    Choice(8, 1),
    Choice(3, 4, Rule("first fit", old_part=CHOSEN_RULE.old_part, first_fit=True)),
    Choice(3, 4, bytes_per_key=20),
    Choice(3, 4, bytes_per_key=22),
)


@dataclass
class Churn:
    """The counts of a simulation in which keys leave for good and new ones come."""

    insertions: int = 0
    full: int = 0
    at_home: int = 0
    live: int = 0
    lines_to_find_live: int = 0


@dataclass(frozen=True)
class Place:
    """A cell, and the position of its line in the probe set that it was chosen from."""

    position: int
    cell: int


class Cells:
    """The cells of a table made for `keys` keys: for each the time at which it expires, or has expired."""

    def __init__(self, choice: Choice, keys: int) -> None:
        self.choice = choice
        self.group_count = keys * choice.bytes_per_key // (BYTES_PER_LINE * choice.lines)
        self.expiries = [EMPTY] * (self.group_count * choice.lines * CELLS_PER_LINE)

    def probe_set(self, fingerprint: int) -> list[int]:
        """A key's lines in search order: whole groups, each from the key's own line on."""
        groups: list[int] = []
        for multiplier in MULTIPLIERS[: self.choice.groups]:
            group = (fingerprint * multiplier & 0xFFFFFFFFFFFFFFFF) * self.group_count >> 64
            while group in groups:
                group = (group + 1) % self.group_count
            groups.append(group)
        start = (fingerprint >> KIND_BITS) & (self.choice.lines - 1)
        return [group * self.choice.lines + (start ^ i) for group in groups for i in range(self.choice.lines)]

    def choose(self, probe: list[int], now: int) -> Place | None:
        """The vacancy that a new key takes; None if there is none."""
        rule = self.choice.rule
        lines = [self.expiries[line * CELLS_PER_LINE : (line + 1) * CELLS_PER_LINE] for line in probe]
        earliest = min(map(min, lines))
        if earliest > now:
            return None
        if rule.empty_first and earliest == EMPTY:
            latest = EMPTY
        elif rule.old_part:
            latest = now - (now - earliest) // rule.old_part
        else:
            latest = now
        best, most = NOWHERE, 0
        for position, (a, b, c, d) in enumerate(lines):
            vacancies = (a <= latest) + (b <= latest) + (c <= latest) + (d <= latest)
            if vacancies > most:
                best, most = position, vacancies
                if position == 0 or rule.first_fit:
                    break
        line = lines[best]
        return Place(best, probe[best] * CELLS_PER_LINE + line.index(min(line)))


def fingerprint_by(chance: random.Random) -> int:
    return chance.getrandbits(64 - KIND_BITS) << KIND_BITS


def simulate_churn(choice: Choice, keys: int, insertions: int, seed: int, advance: Callable[[int], None]) -> Churn:
    """Fill a table made for `keys` keys with as many, then replace random keys, `insertions` times."""
    chance = random.Random(seed)
    table = Cells(choice, keys)
    places: list[Place | None] = [None] * keys
    churn = Churn()
    for number in range(-keys, insertions):
        slot = chance.randrange(keys) if number >= 0 else number
        now = number + keys + 1
        place = places[slot]
        if place is not None:
            table.expiries[place.cell] = now
        place = places[slot] = table.choose(table.probe_set(fingerprint_by(chance)), now)
        if place is not None:
            table.expiries[place.cell] = NEVER
        if number >= 0:
            churn.insertions += 1
            churn.full += place is None
            churn.at_home += place is not None and place.position == 0
        if number % STEP == 0:
            advance(STEP)
    churn.live = sum(place is not None for place in places)
    churn.lines_to_find_live = sum(place.position + 1 for place in places if place is not None)
    return churn


def simulate_returns(
    choice: Choice, keys: int, fill: float, others: float, passes: int, seed: int, advance: Callable[[int], None]
) -> float:
    """The share of returning keys that the last pass inserts anew into a table made for `keys` keys.

    `fill` is how many keys return, `others` how many more come in each pass once and never again, both as shares of
    `keys`. Every key has expired when the next one comes.
    """
    chance = random.Random(seed)
    table = Cells(choice, keys)
    probes = [table.probe_set(fingerprint_by(chance)) for _ in range(round(fill * keys))]
    cells = [NOWHERE] * len(probes)
    owners = [NOWHERE] * len(table.expiries)
    order = [*range(len(probes)), *[NOWHERE] * round(others * keys)]
    now = anew = 0
    for _ in range(passes + 1):
        anew = 0
        chance.shuffle(order)
        for key in order:
            now += 1
            if key == NOWHERE or cells[key] == NOWHERE or owners[cells[key]] != key:
                probe = table.probe_set(fingerprint_by(chance)) if key == NOWHERE else probes[key]
                place = table.choose(probe, now)
                assert place is not None
                owners[place.cell] = key
                table.expiries[place.cell] = now
                if key != NOWHERE:
                    cells[key] = place.cell
                    anew += 1
            else:
                table.expiries[cells[key]] = now
        advance(len(order))
    return anew / len(probes)


@dataclass(frozen=True)
class Returns:
    """A case of returning keys, in shares of the keys that the table is made for."""

    heading: str
    fill: float
    others: float = 0.0
    passes: int = 5


RETURNS = (
    Returns("100 % return", 1.0),
    Returns("75 %", 0.75),
    Returns("50 %", 0.5),
    Returns("75 %, 10 % don't", 0.75, 0.1, 15),
    Returns("50 %, 10 % don't", 0.5, 0.1, 15),
    Returns("170 %", 1.7),
)


def describe_churn(choice: Choice, churn: Churn) -> list[str]:
    return [
        f"{churn.full / churn.insertions:.1e}" if churn.full else f"< {1 / churn.insertions:.0e}",
        "yes" if churn.full <= MOST_FULL * churn.insertions else "no",
        f"{churn.at_home / churn.insertions:.3f}",
        f"{churn.lines_to_find_live / churn.live:.2f}",
    ]


def new_table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000, help="keys that each table is made for")
    parser.add_argument(
        "--insertions", type=int, default=1_000_000, help="in the churn of the chosen probe set and rule"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    keys, insertions, seed = arguments.keys, arguments.insertions, arguments.seed
    plan = [(CHOSEN, insertions), *((other, insertions // 3) for other in OTHERS)]
    rules = [Choice(CHOSEN.groups, CHOSEN.lines, rule) for rule in RULES]
    steps = sum(keys + count for _, count in plan) + len(rules) * (
        keys + insertions // 3 + sum(round((case.fill + case.others) * keys) * (case.passes + 1) for case in RETURNS)
    )

    sets = new_table(
        ("groups x lines", "rule", "bytes/key"),
        ("probe set full", "<= 1e-4", "put at home", "lines read to find a key", "to find none"),
    )
    compared = new_table(
        ("rule",), ("probe set full", "<= 1e-4", "put at home", "lines read", *(case.heading for case in RETURNS))
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Simulating", total=steps)

        def advance(count: int) -> None:
            progress.advance(task, count)

        for choice, count in plan:
            progress.update(task, description=f"{choice.groups} x {choice.lines} lines")
            churn = simulate_churn(choice, keys, count, seed, advance)
            sets.add_row(
                f"{choice.groups} x {choice.lines}" + (" (chosen)" if choice == CHOSEN else ""),
                choice.rule.name,
                str(choice.bytes_per_key),
                *describe_churn(choice, churn),
                str(choice.groups * choice.lines),
            )
        for choice in rules:
            progress.update(task, description=choice.rule.name)
            churn = simulate_churn(choice, keys, insertions // 3, seed, advance)
            shares = [
                simulate_returns(choice, keys, case.fill, case.others, case.passes, seed, advance) for case in RETURNS
            ]
            compared.add_row(
                choice.rule.name + (" (chosen)" if choice == CHOSEN else ""),
                *describe_churn(choice, churn),
                *(f"{share:.2%}" for share in shares),
            )
    console = Console(width=180)
    console.print(sets)
    console.print("\nReturning keys that are inserted anew in each pass, and the same churn:\n")
    console.print(compared)


if __name__ == "__main__":
    main()
