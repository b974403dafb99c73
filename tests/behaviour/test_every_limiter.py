"""Every limiter at every place, and the oracle: the same operations at the same times give the same answers.

A host with leases knows less than Redis: ``test_hosts.py`` and ``test_leased_model.py`` in tests/redis test those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from examples import examples
from limiter_cases import MEMORY, OF_ONE_HOST, REDIS, SYNCED, cases_of
from oracle_machine import LimiterAndOracle
from redis_server import RedisServer

# Each place's unit, and its number of examples for each limiter: few where another place runs the same code.
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


# In memory, a cancellation of one of several permits that end at one instant may give back another of them.
APART = [("Concurrency", "private"), ("Concurrency", "named")]
for kind in cases_of(MEMORY):
    for place_kind in PLACES:
        if kind not in cases_of(PLACES[place_kind][0]):
            continue
        if (kind, place_kind) not in APART and (place_kind != "synced" or kind in OF_ONE_HOST):
            globals()[f"Test{kind}{place_kind.title()}"] = machine_of(kind, place_kind)
