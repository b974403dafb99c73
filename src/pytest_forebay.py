"""Fixtures for users' tests. pytest finds them itself if forebay is installed.

The module imports forebay only when a test requests a fixture, so other tests don't pay for the import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forebay import Store
    from forebay.testing import ManualClock


@pytest.fixture
def forebay_clock() -> ManualClock:
    """A clock that stays at 0 until the test moves it: ``forebay_clock.advance(60)``."""
    from forebay.testing import ManualClock

    return ManualClock()


@pytest.fixture
def forebay_store(forebay_clock: ManualClock) -> Iterator[Store]:
    """An empty private store for 10,000 keys, with the time of ``forebay_clock``."""
    from forebay import Store

    with Store.private(keys=10_000, clock=forebay_clock) as store:
        yield store


@pytest.fixture
def forebay_private_stores(forebay_clock: ManualClock) -> Iterator[None]:
    """Stores that are made during the test are private and have the time of ``forebay_clock``."""
    from forebay.testing import private_stores

    with private_stores(forebay_clock):
        yield
