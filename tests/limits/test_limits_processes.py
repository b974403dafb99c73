"""Many processes share one limit: with each strategy, together they admit exactly the limit."""

from __future__ import annotations

from typing import Any

import pytest
from limits import parse
from limits_storages import SCHEMES, STRATEGIES, limiter, open_storage
from process_helpers import Crew, Meeting

PROCESSES = 4
LIMIT = 200
HITS = 150
KEYS = ("ada", "bob", "cyd")


def hit_often(who: int, meeting: Meeting, strategy: str, storage: Any, uri: str) -> dict[str, int]:
    storage = storage or open_storage(uri)
    limited, item = limiter(strategy, storage), parse(f"{LIMIT}/year")
    meeting.wait(who)
    return {key: sum(limited.hit(item, key) for _ in range(HITS)) for key in KEYS}


@pytest.mark.parametrize("preloaded", [True, False], ids=["made before the fork", "made by each process"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_processes_share_a_limit(scheme: str, strategy: str, preloaded: bool, store_name: str, crew: Crew) -> None:
    uri = f"{scheme}:///{store_name}?keys=1000&moving_window_keys=100"
    storage = open_storage(uri) if preloaded else None
    counts = crew.run(PROCESSES, hit_often, Meeting(PROCESSES), strategy, storage, uri)
    assert {key: sum(count[key] for count in counts) for key in KEYS} == dict.fromkeys(KEYS, LIMIT)
    after = limiter(strategy, open_storage(uri))
    assert after.get_window_stats(parse(f"{LIMIT}/year"), "ada").remaining == 0
