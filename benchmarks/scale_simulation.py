"""The cost of limits for a fleet and its Redis: ``python benchmarks/scale_simulation.py``.

docs/scale.md has the results.

``scale_model.py`` states the model's assumptions, and what is simulated and what is scaled.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from scale_model import RATES, Curve, Fleet, scaled_cost, simulate, strict_cost

MODES = ("leased", "synced")
HOSTS, KEYS, DECISIONS = (10, 100, 1000), (10**5, 10**6, 10**7, 10**8), (10**6, 10**7, 10**8)


KEY_HEADINGS = (
    "hosts",
    "requests/s of one key",
    *(f"{what}, {mode}" for what in ("operations/s", "admitted", "after the outage") for mode in MODES),
    "wait, leased",
    "lost in the outage, leased",
)
FLEET_HEADINGS = (
    "hosts",
    "decisions/s",
    "keys",
    *(f"{what}, {mode}" for what in ("operations/s", "MB/s", "shards") for mode in ("strict", *MODES)),
    "shards of the hottest key, strict",
    "wait, leased",
    "lost, leased",
    "an exchange takes",
)


def add_rows(by_key: Table, by_fleet: Table, fleet: Fleet, curves: dict[str, Curve]) -> None:
    hosts = f"{fleet.hosts:,}"
    for row in zip(*(curves[mode].points for mode in MODES), strict=True):
        by_key.add_row(
            hosts,
            few(row[0].rate),
            *(few(point.operations) for point in row),
            *(multiple(point.allowed / point.entitled) for point in row),
            *(multiple(point.allowed_later / point.entitled_later) for point in row),
            f"{row[0].waited / row[0].rate:.2%}",
            f"{row[0].lost / row[0].rate:.1%}",
        )
    for rate, keys in itertools.product(DECISIONS, KEYS):
        strict = strict_cost(curves["strict"].points[0], keys, rate)
        leased, synced = (scaled_cost(fleet, curves[mode], mode, keys, rate) for mode in MODES)
        costs = (strict, leased, synced)
        by_fleet.add_row(
            hosts,
            few(rate),
            few(keys),
            *(few(cost.operations) for cost in costs),
            *(few(cost.megabytes) for cost in costs),
            *(few(max(cost.shards, 1)) for cost in costs),
            few(strict.hottest),
            f"{leased.waited:.1%}",
            f"{leased.lost:.1%}",
            f"{few(synced.exchange_s)} s",
        )


def new_table(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def few(number: float) -> str:
    """Two digits, with a unit."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.2g}" + name if number < 99.5 * unit else f"{number / unit:.0f}" + name
    return f"{number:.2g}" if number < 99.5 else f"{number:.0f}"


def multiple(number: float) -> str:
    """Three digits."""
    return f"{number:.3g}" if number < 999.5 else few(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three hosts, few rates, short windows: some seconds")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rates = RATES[::4] if arguments.quick else RATES
    fleets = (
        [Fleet(3, period_s=10, limit=1000, wanted=200)]
        if arguments.quick
        else [Fleet(hosts) for hosts in arguments.hosts]
    )

    by_key, by_fleet = new_table(*KEY_HEADINGS), new_table(*FLEET_HEADINGS)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        # A synced host's work is for all rates at once.
        task = progress.add_task("", total=sum((len(rates) + 2) * 3 * fleet.period_s for fleet in fleets))
        for fleet in fleets:
            progress.update(task, description=f"{fleet.hosts} hosts")
            curves = simulate(fleet, rates, partial(progress.advance, task), seed=arguments.seed)
            add_rows(by_key, by_fleet, fleet, curves)
    console = Console(width=400)
    console.print(by_key)
    console.print(by_fleet)


if __name__ == "__main__":
    main()
