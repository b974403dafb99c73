"""Permits that requests hold by one id: one of them at a time, however their steps interleave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from forebay import Concurrency, Store
from forebay.testing import ManualClock


def remaining(limiter: Concurrency, key: Any = "k") -> int:
    return limiter.peek(key).remaining


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what happens before a step of the next call. The store reads time.time before each step."""
    steps: list[Callable[[], object] | None] = []

    def read() -> float:
        if steps and (act := steps.pop(0)):
            act()
        return 1_800_000_000.0

    def plan(step: int, act: Callable[[], object] | None) -> None:
        steps[:] = [*[None] * step, act]

    monkeypatch.setattr(time, "time", read)
    return plan


@pytest.mark.parametrize("limit", [2, 6])
@pytest.mark.parametrize("cost", [1, 2])
@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("held", [False, True])
def test_two_requests_at_once_hold_one_set_of_permits(
    before_step: Callable[..., None], held: bool, step: int, cost: int, limit: int
) -> None:
    others: list[Any] = []
    with Store.private(keys=10, clock="time") as store:
        limiter = Concurrency(store, "some", limit, keys=4)
        if held:
            assert limiter.acquire("k", cost, request_id="r")
        before_step(step, lambda: others.append(limiter.acquire("k", cost, request_id="r")))
        lease = limiter.acquire("k", cost, request_id="r")
        before_step(0, None)
        assert lease
        assert remaining(limiter) == limit - cost
        # The later of the two holds the permits.
        holders = [one for one in (lease, *others) if one.renew()]
        assert len(holders) == 1
        assert holders[0].release()
        assert remaining(limiter) == limit


@pytest.mark.parametrize("step", range(6))
def test_request_at_once_with_a_renewal_never_goes_without_a_permit(
    before_step: Callable[..., None], step: int
) -> None:
    others: list[Any] = []
    with Store.private(keys=10, clock="time") as store:
        limiter = Concurrency(store, "six", 6, keys=4)
        lease = limiter.acquire("k", request_id="r")
        before_step(step, lambda: others.append(limiter.acquire("k", request_id="r")))
        renewed = lease.renew()
        before_step(0, None)
        holders = [one for one in (lease, *others) if one.renew()]
        assert len(holders) == 6 - remaining(limiter) >= 1
        assert lease in holders or not renewed
        assert all(one.release() for one in holders)
        assert remaining(limiter) == 6


def test_store_without_room_for_marks_takes_permits_again(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock, on_full="deny") as store:
        limiter = Concurrency(store, "many", 20_000, lease=30, keys=1)
        for number in range(2000):
            assert limiter.acquire("k", request_id=number)
        assert remaining(limiter) == 18_000
        for number in range(2000):
            assert limiter.acquire("k", request_id=number)
        # Those ids that found a cell hold one permit, the others two.
        assert 16_000 < remaining(limiter) < 18_000


@pytest.mark.parametrize(("limit", "lease_s"), [(1, 30.0), (20, 30.0), (20, 0.001), (20, 1e-6), (10_000, 0.1)])
def test_lease_by_an_id_is_hardly_longer(clock: ManualClock, limit: int, lease_s: float) -> None:
    with Store.private(keys=1000, clock=clock) as store:
        limiter = Concurrency(store, "some", limit, lease=lease_s, keys=1)
        longest_s = lease_s + max(lease_s / 16, limit * 1.024e-6)
        for number in range(300):
            lease = limiter.acquire("k", request_id=number)
            assert lease_s <= limiter.peek("k").reset_after <= longest_s
            assert lease.release()
            clock.advance(0.013)
