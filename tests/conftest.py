"""Fixtures for all tests."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from penstock import Store
from penstock.testing import ManualClock

Result = TypeVar("Result")

# Whoever is started in the background by a shell has it ignored, and some tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may depend on how fast the machine is, nor leave files behind; a failure prints how to run it again.
settings.register_profile(
    "penstock", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def make_name() -> Iterator[Callable[[], str]]:
    """Makes names that no other store has; the stores of these names are unlinked at the end."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test-{os.getpid()}-{secrets.token_hex(6)}")
        return names[-1]

    yield make
    for name in names:
        with suppress(FileNotFoundError):
            Store.unlink(name)


@pytest.fixture
def store_name(make_name: Callable[[], str]) -> str:
    return make_name()


@pytest.fixture(params=["private", "named"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Store]:
    """A small store with `clock`, of each kind."""
    if request.param == "private":
        opened = Store.private(keys=1, clock=clock)
    else:
        opened = Store(request.getfixturevalue("store_name"), keys=1, clock=clock)
    with opened:
        yield opened


@pytest.fixture
def in_child() -> Callable[[Callable[[], Result]], Result]:
    return run_in_child


def run_in_child(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises in a forked child; a child that is killed by a signal fails the test."""
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
        payload = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with exit code {os.waitstatus_to_exitcode(status)}"
    returned, value = pickle.loads(payload)
    if not returned:
        raise value
    return value
