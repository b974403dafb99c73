"""The model behind docs/scale.md, against arithmetic where there is any: see benchmarks/scale_model.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from scripts_clock import CLOCK, KEY

from forebay.redis.commands import Command
from forebay.redis.scripts import source

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import scale_model as scale
from lua_redis import LuaRedis, size_of

FLEET = scale.Fleet(5, limit=100, period_s=10, wanted=200)


def usual(simulation: scale.Simulation) -> scale.Tally:
    (traffic,) = simulation.run()
    return traffic.during(scale.USUAL)


def test_a_strict_decision_is_one_operation() -> None:
    tally = usual(scale.StrictSimulation(FLEET, [3.0]))
    assert 0 < tally.requests == tally.operations == tally.waited
    assert tally.lost == 0


def test_a_leased_decision_of_a_rare_key_is_one_operation() -> None:
    """No host borrows more than one permit, and none is left to be given back."""
    tally = usual(scale.LeasedSimulation(FLEET, [0.01]))
    assert 0 < tally.requests == tally.allowed == tally.waited
    assert tally.requests <= tally.operations <= 1.1 * tally.requests


@pytest.mark.parametrize("rate", [0.3, 1.0, 5.0])
def test_a_leased_decision_of_any_key_is_hardly_more_than_one_operation(rate: float) -> None:
    tally = usual(scale.LeasedSimulation(FLEET, [rate]))
    assert tally.allowed == tally.requests
    assert tally.operations <= 1.3 * tally.requests


def test_a_leased_key_above_its_limit_costs_a_few_operations_of_each_host() -> None:
    tally = usual(scale.LeasedSimulation(FLEET, [100_000.0]))
    assert tally.requests > 900_000
    # A denial is remembered until the window's end. The limit is lent in parts of a tenth of it, or in smaller ones.
    assert FLEET.hosts <= tally.operations < FLEET.limit
    assert 0.9 * FLEET.limit <= tally.allowed <= FLEET.limit


@pytest.mark.parametrize("mode", [scale.LeasedSimulation, scale.StrictSimulation])
def test_a_key_above_its_limit_never_gets_more(mode: Any) -> None:
    tally = usual(mode(FLEET, [50.0]))
    assert 0.9 * FLEET.limit <= tally.allowed <= FLEET.limit


def test_reports_are_those_of_the_arithmetic() -> None:
    fleet = scale.Fleet(5, limit=100, period_s=10, wanted=1000)
    for traffic in scale.SyncedSimulation(fleet, [0.05, 0.3, 1.0]).run():
        tally = traffic.during(scale.USUAL)
        assert tally.allowed == tally.requests
        expected = scale.reports_a_second(fleet, traffic.rate) * fleet.period_s * len(traffic.keys)
        assert tally.operations == pytest.approx(expected, rel=0.1)


def test_synced_hosts_admit_more_than_the_limit() -> None:
    (traffic,) = scale.SyncedSimulation(FLEET, [50_000.0]).run()
    # All five count alone until the first exchange.
    assert traffic.during(scale.USUAL).allowed == FLEET.hosts * FLEET.limit


def test_an_outage_costs_what_each_mode_says() -> None:
    outage = scale.OUTAGE, scale.OUTAGE_IN_NEXT
    (strict,) = scale.StrictSimulation(FLEET, [3.0]).run()
    assert 0 < strict.during(*outage).lost == strict.during(*outage).requests
    (leased,) = scale.LeasedSimulation(FLEET, [50.0]).run()
    # Denials are remembered until the window's end. In the next one no host has a lease.
    assert leased.during(scale.OUTAGE).lost == 0
    assert 0 < leased.during(scale.OUTAGE_IN_NEXT).lost == leased.during(scale.OUTAGE_IN_NEXT).requests
    (synced,) = scale.SyncedSimulation(FLEET, [50.0]).run()
    assert synced.during(*outage).lost == 0
    assert synced.during(scale.OUTAGE_IN_NEXT, scale.LATER).allowed > FLEET.limit


class Recorder:
    """Notes what a simulation sends, and when, and the replies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, Command[Any], list[Any]]] = []
        run = LuaRedis.run

        def noted(server: LuaRedis, command: Command[Any]) -> list[Any]:
            reply = run(server, command)
            self.seen.append((server.now_us, command, reply))
            return reply

        monkeypatch.setattr(LuaRedis, "run", noted)


@pytest.mark.parametrize(
    ("mode", "rates"),
    [(scale.StrictSimulation, [50.0]), (scale.LeasedSimulation, [50.0]), (scale.SyncedSimulation, [1.0, 20.0, 50.0])],
)
def test_the_scripts_reply_as_over_redis(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, mode: Any, rates: list[float]
) -> None:
    recorder = Recorder(monkeypatch)
    mode(scale.Fleet(3, limit=100, period_s=3, wanted=50), rates).run()
    assert len(recorder.seen) > 50
    for now_us, command, reply in recorder.seen:
        client.set(KEY, now_us)
        text = CLOCK + command.script.text.removeprefix(source("clock"))
        assert client.eval(text, len(command.keys), *command.keys, *command.arguments) == reply


def test_sizes_are_those_on_the_wire() -> None:
    call = "EVALSHA", "0123", b"1", b"key"
    assert size_of(call) == len(b"".join(redis.Connection().pack_command(*call)))
    assert size_of([1, -20, b"abc", [b""]]) == len(b"*4\r\n:1\r\n:-20\r\n$3\r\nabc\r\n*1\r\n$0\r\n\r\n")


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_rates_of_keys_are_zipfs(exponent: float) -> None:
    groups = list(scale.zipf(20_000, 1e6, exponent))
    assert sum(count for count, _ in groups) == 20_000
    assert sum(count * rate for count, rate in groups) == pytest.approx(1e6)
    each = [rate for count, rate in groups for _ in range(int(count))]
    whole = sum(rank**-exponent for rank in range(1, 20_001))
    for rank in (1, 2, 1000, 1500, 20_000):
        assert each[rank - 1] == pytest.approx(1e6 * rank**-exponent / whole, rel=0.02)
    rare = sum(rank**-exponent for rank in range(10_001, 20_001))
    assert sum(each[10_000:]) == pytest.approx(1e6 * rare / whole, rel=0.001)


def point(rate: float, operations: float) -> scale.Point:
    return scale.Point(rate, operations, *[0.0] * 8)


def test_a_curve_goes_through_its_points() -> None:
    curve = scale.Curve([point(1.0, 1.0), point(100.0, 10.0), point(10_000.0, 10.0)])
    expected = {0.01: 0.01, 1.0: 1.0, 10.0: 10**0.5, 100.0: 10.0, 1000.0: 10.0, 10_000.0: 10.0, 1e6: 10.0}
    assert {rate: curve.at("operations", rate) for rate in expected} == pytest.approx(expected)


def test_a_fleet_of_strict_limits_costs_one_operation_a_decision() -> None:
    cost = scale.strict_cost(point(3.0, 3.0), 10**6, 1e7)
    assert cost.operations == 1e7
    assert cost.shards == pytest.approx(1e7 * scale.SERVER_US / 1e6 / scale.LOAD)


def test_a_fleet_is_the_sum_of_its_keys() -> None:
    """Keys that cost one operation a request up to 100 requests a second, and no more above."""
    curve = scale.Curve([point(rate, min(rate, 100.0)) for rate in scale.RATES])
    for field in ("allowed", "entitled", "allowed_later", "entitled_later"):
        for one in curve.points:
            object.__setattr__(one, field, 1.0)
    cost = scale.scaled_cost(FLEET, curve, "leased", 1000, 1e5)
    assert cost.operations == pytest.approx(sum(min(rate, 100.0) for _, rate in scale.zipf(1000, 1e5)), rel=0.001)
