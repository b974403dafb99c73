"""Four gunicorn workers under real load: the admissions with one limit for the host, and with one for each worker.

Started by ci/demo. Ends with status 1 if forebay admitted more than the limit allows, or didn't serve at all.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forebay import Store, TokenBucket

HERE = Path(__file__).parent
SHOP = HERE.parent / "shop"
STORE = f"demo-{os.getpid()}"
STORE_KEYS = 100_000  # as in the shop

WORKERS = 4
PER_SECOND = 100
BURST = 50
LOAD_SECONDS = 4
CONNECTIONS = 32
DECIDING_SECONDS = 0.7
START_SECONDS = 20  # the time in which gunicorn must listen
BAR_WIDTH = 24

console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """The shop's responses to one load."""

    seconds: float
    statuses: dict[str, int]
    admitted_by: dict[str, int]
    """Admissions by the worker's pid."""
    counted: int
    """Admissions by the shared store's count, which includes responses that came too late for the client."""

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())

    @property
    def admitted(self) -> int:
        return max(self.statuses.get("200", 0), self.counted)

    @property
    def unanswered(self) -> int:
        """Requests admitted after the client had gone; their worker is unknown."""
        return self.admitted - sum(self.admitted_by.values())

    @property
    def at_most(self) -> int:
        """The most that the limit admits in that time."""
        return math.ceil(BURST + PER_SECOND * self.seconds)

    @property
    def is_limited(self) -> bool:
        return self.admitted <= self.at_most


def main() -> int:
    console.print(
        f"\nA shop under gunicorn {version('gunicorn')}. One customer may order {PER_SECOND} times a second,\n"
        f"{BURST} at once, and sends as fast as responses come over {CONNECTIONS} connections for {LOAD_SECONDS} s\n"
        f"(by {'wrk' if shutil.which('wrk') else 'examples/demo/count.py'}).\n"
    )
    with console.status("forebay, preloaded") as status:
        preloaded = run("app:app", "--preload")
        status.update("forebay, not preloaded")
        loaded = run("app:app")
        status.update("each worker counts for itself")
        per_process = run("per_process:app")
        status.update("decisions a second")
        speeds = measure_decisions()
    rows = [
        ("forebay", "preloaded", preloaded),
        ("forebay", "not preloaded", loaded),
        ("no sharing", "each for itself", per_process),
    ]
    console.print(limits_table(rows))
    console.print(speeds_table(speeds))

    problems = [
        f"forebay, {how}: {run.admitted} were admitted, and the limit allows {run.at_most}"
        for name, how, run in rows
        if name == "forebay" and not run.is_limited
    ]
    problems += [
        f"{name}, {how}: answers {run.statuses}, admitted by workers {run.admitted_by}"
        for name, how, run in rows
        if run.statuses.keys() != {"200", "429"} or run.admitted < BURST or len(run.admitted_by) < 2
    ]
    for problem in problems:
        console.print(f"[bold red]WRONG[/]  {problem}")
    if not problems:
        console.print("\n[bold green]OK[/]  Together, all workers admitted what the limit allows and no more.\n")
    return len(problems)


# gunicorn and load


def run(app: str, *options: str) -> Run:
    """Start the shop, load it for `LOAD_SECONDS`, end it."""
    Store.unlink(STORE, missing_ok=True)
    with Store(STORE, keys=STORE_KEYS) as store, gunicorn(app, *options) as port:
        start = time.monotonic()
        client = subprocess.run(load_command(port), check=True, stdout=subprocess.PIPE, text=True)
        # Read the time last: the shop still decides requests that the client gave up.
        counted = store.stats().limiters["orders"].allowed
        seconds = time.monotonic() - start
        counts = json.loads(client.stdout.splitlines()[-1])
        return Run(seconds, counts["statuses"], counts["admitted_by"], counted)


def load_command(port: int) -> list[str]:
    wrk = shutil.which("wrk")
    if wrk:
        seconds, url = f"{LOAD_SECONDS}s", f"http://127.0.0.1:{port}/"
        return [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}", "-s", str(HERE / "count.lua"), "-HX-Customer: ada", url]
    return [sys.executable, str(HERE / "count.py"), str(port), str(CONNECTIONS), str(LOAD_SECONDS), "ada"]


@contextmanager
def gunicorn(app: str, *options: str) -> Iterator[int]:
    """Starts the shop on a free port, which it yields. Prints the log after an error."""
    command = [sys.executable, "-m", "gunicorn", "--chdir", str(SHOP), "--config", str(SHOP / "gunicorn.conf.py")]
    command += ["--bind", "127.0.0.1:0", "--workers", str(WORKERS), *options, app]
    environment = os.environ | {"SHOP_STORE": STORE, "SHOP_RATE": f"{PER_SECOND}/second", "SHOP_BURST": str(BURST)}
    with tempfile.NamedTemporaryFile("r") as log:
        server = subprocess.Popen(command, env=environment, stdout=log.fileno(), stderr=subprocess.STDOUT)
        try:
            yield wait_for_port(server, Path(log.name))
            if server.poll() is not None:
                raise RuntimeError(f"gunicorn ended by itself with status {server.returncode}")
        except BaseException:
            console.print(Path(log.name).read_text(), markup=False, highlight=False)
            raise
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def wait_for_port(server: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        listening = re.search(r"Listening at: http://127\.0\.0\.1:(\d+)", log.read_text())
        if listening:
            return int(listening[1])
        time.sleep(0.02)
    raise RuntimeError("gunicorn did not start")


# Decisions


def measure_decisions() -> list[tuple[str, list[float]]]:
    """Calls per second of each process, by operation."""
    Store.unlink(STORE, missing_ok=True)
    with Store(STORE, keys=STORE_KEYS), ProcessPoolExecutor(WORKERS) as pool:

        def measure(call: str, rate: str, keys: list[str]) -> list[float]:
            start = time.monotonic() + 0.2
            return list(pool.map(calls_per_second, *zip(*[(start, call, rate, key) for key in keys], strict=True)))

        own_keys = [f"user:{number}" for number in range(WORKERS)]
        endless, exhausted = "1_000_000_000/second", "1/year"
        return [
            ("time.monotonic_ns(), to compare", measure("time", endless, own_keys[:1])),
            ("allow(key), one process", measure("allow", endless, own_keys[:1])),
            (f"allow(key), {WORKERS} processes, a key each", measure("allow", endless, own_keys)),
            (f"allow(key), {WORKERS} processes, one denied key", measure("allow", exhausted, ["flooder"] * WORKERS)),
        ]


def calls_per_second(start: float, what: str, rate: str, key: str) -> float:
    """Runs in a process of the pool: how often `what` can be called from `start` on."""
    with Store(STORE, keys=STORE_KEYS) as store:
        allow = TokenBucket(store, f"speed {rate}", rate).allow
        loop = repeat_clock if what == "time" else repeat_allow
        loop(allow, key, 10_000)
        time.sleep(max(0.0, start - time.monotonic()))
        calls, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < DECIDING_SECONDS:
            loop(allow, key, 10_000)
            calls += 10_000
        return calls / (time.perf_counter() - begun)


def repeat_allow(allow: Callable[[str], bool], key: str, calls: int) -> None:
    for _ in itertools.repeat(None, calls):
        allow(key)


def repeat_clock(_allow: Callable[[str], bool], _key: str, calls: int) -> None:
    monotonic_ns = time.monotonic_ns
    for _ in itertools.repeat(None, calls):
        monotonic_ns()


# Output


def limits_table(rows: list[tuple[str, str, Run]]) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="dim")
    table.add_column("counting")
    for header in ("workers", "requests", "admitted", "at most"):
        table.add_column(header, justify="right")
    table.add_column("admitted by each worker", min_width=BAR_WIDTH)
    most = max(run.admitted / run.at_most for _, _, run in rows)
    for name, how, run in rows:
        times = run.admitted / run.at_most
        colour, verdict = ("green", "held") if run.is_limited else ("red", "BROKEN")
        by_worker = " + ".join(str(count) for count in sorted(run.admitted_by.values(), reverse=True))
        if run.unanswered:
            by_worker += f" + {run.unanswered} too late for the client"
        table.add_row(
            Text.assemble((name, "bold"), f"\n{how}"),
            str(len(run.admitted_by)),
            f"{run.requests:,}\n{run.requests / run.seconds:,.0f}/s",
            Text(f"{run.admitted:,}", f"bold {colour}"),
            f"{run.at_most:,}",
            Group(
                Bar(most, 0, times, width=BAR_WIDTH, color=colour),
                Text(f"{times:.2f} x the limit: {verdict}", colour),
                Text(by_worker, "dim"),
            ),
        )
    return table


def speeds_table(speeds: list[tuple[str, list[float]]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("decisions")
    table.add_column("a second", justify="right")
    table.add_column("ns each", justify="right")
    table.add_column("")
    most = max(sum(per_process) for _, per_process in speeds)
    for name, per_process in speeds:
        total = sum(per_process)
        each_ns = 1e9 * len(per_process) / total
        table.add_row(name, f"{total:,.0f}", f"{each_ns:.0f}", Bar(most, 0, total, width=BAR_WIDTH // 2, color="blue"))
    return table


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal without the bars' characters
    try:
        sys.exit(main())
    finally:
        Store.unlink(STORE, missing_ok=True)
