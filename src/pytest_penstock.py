"""Fixtures for users' tests. pytest finds them by itself wherever penstock is installed.

A module of its own, which imports penstock only when a test asks for a fixture: other tests don't pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock import Store
    from penstock.testing import ManualClock


@pytest.fixture
def penstock_clock() -> ManualClock:
    """A clock that stands at 0 until the test moves it: ``penstock_clock.advance(60)``."""
    from penstock.testing import ManualClock

    return ManualClock()


@pytest.fixture
def penstock_store(penstock_clock: ManualClock) -> Iterator[Store]:
    """An empty private store for 10,000 keys, with the time of ``penstock_clock``."""
    from penstock import Store

    with Store.private(keys=10_000, clock=penstock_clock) as store:
        yield store


@pytest.fixture
def penstock_private_stores(penstock_clock: ManualClock) -> Iterator[None]:
    """Stores that are made during the test are private and have the time of ``penstock_clock``."""
    from penstock.testing import private_stores

    with private_stores(penstock_clock):
        yield
