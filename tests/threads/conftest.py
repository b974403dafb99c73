"""Fixtures for the tests of threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from forebay import Store
from forebay.testing import ManualClock


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1, clock=clock) as opened:
        yield opened


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Where threads have a GIL, they pass it on soon."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual_s)
