"""The method of measurement; README.md has the reasons.

A subject is timed in short rounds, and its reference before and after each round. Each round has its own ratio, so a
machine that is slow for a second slows both sides. The report takes the median.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from timeit import Timer
from typing import Any

import pytest
import redis
from pytest_benchmark.fixture import BenchmarkFixture
from redis_server import redis_on_a_free_port

from forebay import Store, TokenBucket
from forebay.benchmarking.limiters import GENEROUS
from forebay.benchmarking.timing import statement, time_per_call
from forebay.redis import RedisStore

sys.path.insert(0, str(Path(sys.prefix) / "floor"))

CLOCK = "time.monotonic_ns()"
FLOOR_CALLS = 50_000
BUSY_CORES = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="smaller tables, fewer rounds: a check, not a measurement")


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--quick"))


@pytest.fixture(scope="session")
def all_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _one_core(all_cores: list[int], quick: bool) -> Iterator[None]:
    """Runs each measurement on one core: the one that is most idle. The first core is for servers."""
    os.sched_setaffinity(0, {idlest(all_cores[1:] or all_cores, 0.02 if quick else 0.2)})
    yield
    os.sched_setaffinity(0, all_cores)


def idle_shares(cores: list[int], seconds: float) -> dict[int, float]:
    """The idle share of each core during the coming `seconds`."""

    def idle_ticks() -> dict[int, int]:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        return {int(fields[0][3:]): int(fields[4]) for fields in lines if fields[0][3:].isdigit()}

    before = idle_ticks()
    time.sleep(seconds)
    after = idle_ticks()
    return {core: (after[core] - before[core]) / (seconds * os.sysconf("SC_CLK_TCK")) for core in cores}


def idlest(cores: list[int], seconds: float) -> int:
    shares = idle_shares(cores, seconds)
    return max(cores, key=lambda core: (shares[core], core))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    machine_info["busy_cores"] = config.stash[BUSY_CORES]


@pytest.fixture
def store_name() -> Iterator[str]:
    name = f"bench-{os.getpid()}-{time.monotonic_ns()}"

    def unlink() -> None:
        Store.unlink(name, missing_ok=True)

    # Needed if the run is interrupted before any teardown.
    atexit.register(unlink)
    yield name
    unlink()
    atexit.unregister(unlink)


@pytest.fixture
def generous() -> Iterator[TokenBucket]:
    with Store.private(keys=100_000) as store:
        yield TokenBucket(store, "generous", **GENEROUS)


@pytest.fixture(scope="session")
def redis_port() -> Iterator[int]:
    with redis_on_a_free_port() as port:
        yield port


@pytest.fixture
def redis_store(redis_port: int) -> Iterator[RedisStore]:
    with redis.Redis(host="127.0.0.1", port=redis_port, db=4) as client:
        client.flushdb()
    with RedisStore(f"redis://127.0.0.1:{redis_port}/4", timeout=10) as opened:
        yield opened


def must(condition: bool) -> None:
    """Stops a benchmark that would measure another path."""
    if not condition:
        raise AssertionError("the benchmark measures the wrong path")


def clock_floor() -> Timer:
    return statement("clock()", clock=time.monotonic_ns)


class Measure:
    """Times a subject and, round by round, its references; stores both in pytest-benchmark's JSON."""

    def __init__(self, benchmark: BenchmarkFixture, quick: bool, say: Callable[[str], None]) -> None:
        self.benchmark = benchmark
        self.quick = quick
        self.say = say

    def __call__(
        self,
        title: str,
        timer: Timer | Callable[[], Timer],
        *,
        calls: int = 50_000,
        operations_per_call: int = 1,
        rounds: int = 61,
        beside: dict[str, Callable[[], float]] | None = None,
        **facts: Any,
    ) -> None:
        """`timer`, or a function that makes each round's timer, untimed, is the subject. `beside` maps names to further
        functions that return nanoseconds per operation, timed in each round; the clock is always among them."""
        if self.quick:
            rounds = max(3, rounds // 5)
        clock = clock_floor()
        others = {CLOCK: lambda: time_per_call(clock, FLOOR_CALLS), **(beside or {})}
        readings: dict[str, list[float]] = {name: [] for name in others}
        timers: list[Timer] = []

        def read_others() -> None:
            for name, read in others.items():
                readings[name].append(read())

        def prepare() -> tuple[tuple[object, ...], dict[str, object]]:
            read_others()
            timers[:] = [timer if isinstance(timer, Timer) else timer()]
            return (calls,), {}

        if isinstance(timer, Timer) and operations_per_call == 1:
            timer.timeit(min(calls, 1000))
        self.benchmark.pedantic(lambda n: timers[0].timeit(n), setup=prepare, rounds=rounds)
        read_others()
        self.benchmark.extra_info.update(
            title=title,
            operations=calls * operations_per_call,
            # The mean of the readings before and after a round.
            beside={
                name: [(before + after) / 2 for before, after in itertools.pairwise(read)]
                for name, read in readings.items()
            },
            **facts,
        )
        self.say(f"{self.benchmark.stats.stats.median * 1e9 / (calls * operations_per_call):12,.1f} ns")


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Complete the progress line."""
    return lambda text: request.node.user_properties.append(("result", text))


@pytest.fixture
def measure(benchmark: BenchmarkFixture, quick: bool, say: Callable[[str], None]) -> Measure:
    return Measure(benchmark, quick, say)


class Progress:
    """Prints a line per benchmark: its name at the start, then the result."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.total = 0
        self.number = 0

    def write(self, text: str) -> None:
        self.config.pluginmanager.get_plugin("terminalreporter").write(text, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.number += 1
        name = nodeid.rpartition("::")[2].removeprefix("bench_").replace("_", " ")
        self.write(f"{self.number:3}/{self.total}  {name:<46}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        # No dot, as the line below says more.
        return ("passed", "", "") if report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.write(f"{dict(report.user_properties).get('result', report.outcome)}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Progress(config))
    shares = idle_shares(sorted(os.sched_getaffinity(0)), 1)
    config.stash[BUSY_CORES] = max(0.0, len(shares) - sum(shares.values()))
