"""Every limiter, wherever it is kept, and the oracle, told the same things at the same times, answer alike.

What a host has on loan it knows less of: for leases see ``test_hosts.py``, and ``test_leased_model.py`` in tests/redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from examples import examples
from limiter_cases import MEMORY, OF_ONE_HOST, REDIS, SYNCED, cases_of
from oracle_machine import LimiterAndOracle
from redis_server import RedisServer

# How each place counts, and how often it is tried with each limiter: seldom where another decides by the same code.
PLACES: Final = {
    "private": (MEMORY, 60),
    "named": (MEMORY, 8),
    "redis": (REDIS, 25),
    "asyncio": (REDIS, 8),
    "synced": (SYNCED, 20),
}


@pytest.fixture(autouse=True)
def served(shared_server: RedisServer) -> Iterator[None]:
    LimiterAndOracle.server = shared_server
    yield
    LimiterAndOracle.server = None


def machine_of(kind: str, place_kind: str) -> Any:
    measure, count = PLACES[place_kind]
    machine: Any = type(
        f"{kind}{place_kind.title()}",
        (LimiterAndOracle,),
        {"cases": cases_of(measure)[kind], "place_kind": place_kind},
    )
    machine.TestCase.settings = examples(count)
    return machine.TestCase


# In memory which of several permits that end at one instant a cancellation gives back is another matter.
APART = [("Concurrency", "private"), ("Concurrency", "named")]
for kind in cases_of(MEMORY):
    for place_kind in PLACES:
        if (kind, place_kind) not in APART and (place_kind != "synced" or kind in OF_ONE_HOST):
            globals()[f"Test{kind}{place_kind.title()}"] = machine_of(kind, place_kind)
