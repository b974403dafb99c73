"""The simulated overload of docs/shedding.md: what the page states, and that goodput is at least 90 % of capacity."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import shedding_simulation  # noqa: E402


@pytest.fixture(params=shedding_simulation.MODES)
def mode(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def test_the_page_states_what_the_simulation_gives(mode: str) -> None:
    outcome = shedding_simulation.simulate(mode)
    assert shedding_simulation.row_of(mode, outcome) in (ROOT / "docs" / "shedding.md").read_text()
    if mode == "nothing":
        assert outcome.settled_goodput == 0
    else:
        assert outcome.settled_goodput >= 0.9
