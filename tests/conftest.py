"""Fixtures for all tests."""

from __future__ import annotations

import os
import pickle
import secrets
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import examples
import process_helpers
import pytest
from hypothesis import HealthCheck, settings

from forebay import Store
from forebay.testing import ManualClock

Result = TypeVar("Result")
LONGEST_CHILD_S = 600

# A shell starts background processes with SIGINT ignored, and some tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on the machine's speed or leaves files behind; a failure prints how to run it again.
settings.register_profile(
    "forebay", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("forebay")


FIGURES = pytest.StashKey[list[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="proofs with their full bounds: an hour instead of minutes")
    parser.addoption("--few", action="store_true", help="a tenth of the examples that Hypothesis draws")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []
    if config.getoption("--full"):
        examples.be_full()
    if config.getoption("--few"):
        examples.be_few()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[FIGURES]:
        terminalreporter.section("what was walked, killed and counted")
        width = max(len(what) for what, _ in config.stash[FIGURES])
        for what, figure in config.stash[FIGURES]:
            terminalreporter.write_line(f"{what:{width}}  {figure}")


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether ``--full`` is given, for the proofs' full bounds."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """``record("kills", 3000)`` prints a figure at the end of the run, an integer with thousands separators."""

    def record(what: str, figure: object) -> None:
        shown = f"{figure:,}" if isinstance(figure, int) else str(figure)
        request.config.stash[FIGURES].append((what, shown))

    return record


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def make_name() -> Iterator[Callable[[], str]]:
    """Makes unique store names; unlinks the stores of these names at the end."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test-{os.getpid()}-{secrets.token_hex(6)}")
        return names[-1]

    yield make
    for name in names:
        Store.unlink(name, missing_ok=True)


@pytest.fixture
def store_name(make_name: Callable[[], str]) -> str:
    return make_name()


@pytest.fixture(params=["private", "named"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Store]:
    """A small store with `clock`: once private, once named."""
    if request.param == "private":
        opened = Store.private(keys=1, clock=clock)
    else:
        opened = Store(request.getfixturevalue("store_name"), keys=1, clock=clock)
    with opened:
        yield opened


@pytest.fixture
def crew(name: str) -> Iterator[process_helpers.Crew]:
    """Forked processes, ended before the store's files are removed: a process may be about to create the store."""
    crew = process_helpers.Crew()
    yield crew
    crew.end()


@pytest.fixture
def name() -> Iterator[str]:
    """A unique store name; files made under it are removed at the end."""
    name = f"process-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    for file in process_helpers.files_of(name):
        Path(file).unlink(missing_ok=True)


@pytest.fixture
def in_child() -> Callable[[Callable[[], Result]], Result]:
    return run_in_child


def run_in_child(function: Callable[[], Result]) -> Result:
    """Run `function` in a forked child; return its result or raise its exception.

    A child that a signal kills fails the test, and so does one that hangs: it shows where.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                answer = (True, function())
            except Exception as error:
                answer = (False, error)
            with open(writing, "wb") as pipe:
                pipe.write(pickle.dumps(answer))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        if not waiting.poll(LONGEST_CHILD_S * 1000):
            os.kill(pid, signal.SIGABRT)  # pytest's fault handler prints the child's stack
        payload = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with exit code {os.waitstatus_to_exitcode(status)}"
    returned, value = pickle.loads(payload)
    if not returned:
        raise value
    return value
