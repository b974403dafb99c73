"""Generated traffic. The same seed generates the same requests."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from forebay.rate import NS, Rate
from forebay.tuning.requests import Columns

__all__ = ["KINDS", "Generated", "generate"]

START_NS: Final = 1_767_225_600 * NS  # 2026
CHUNK: Final = 16_384
BURST: Final = 20
"""Requests in a burst, on average."""
BURST_GAP_S: Final = 0.05
ZIPF_EXPONENT: Final = 1.1
ATTACKERS: Final = 10
ATTACK_FACTOR: Final = 100
"""An attacker sends so many times as many requests as a user."""


@dataclass(frozen=True)
class Generated:
    """Traffic to generate: `users` keys that send `rate` each on average, independently of each other.

    - ``poisson``: all users alike; the times of each are a Poisson process
    - ``bursts``: users send bursts of 20 requests on average, 50 ms apart on average
    - ``zipf``: the user of rank k sends in proportion to 1 / k**1.1
    - ``attack``: ``poisson``, and in the middle third of the time 10 more keys that send 100 times as much each
    """

    kind: str
    requests: int
    users: int
    rate: Rate
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.users:,} users of {self.rate} each, seed {self.seed}"


def generate(
    traffic: Generated, columns: Columns, progress: Callable[[int, int | None], None] = lambda done, total: None
) -> None:
    """Put generated requests in `columns`."""
    events = itertools.islice(KINDS[traffic.kind](traffic, random.Random(traffic.seed)), traffic.requests)
    done = 0
    while chunk := list(itertools.islice(events, CHUNK)):
        columns.extend([START_NS + round(time_s * NS) for time_s, _ in chunk], [key for _, key in chunk])
        done += len(chunk)
        progress(done, traffic.requests)
    columns.finish()


def _per_second(traffic: Generated) -> float:
    return traffic.users * traffic.rate.limit * NS / traffic.rate.period_ns


def _poisson(traffic: Generated, random: random.Random) -> Iterator[tuple[float, str]]:
    now_s, rate, users = 0.0, _per_second(traffic), traffic.users
    while True:
        now_s += random.expovariate(rate)
        yield now_s, f"user-{int(random.random() * users)}"


def _zipf(traffic: Generated, random: random.Random) -> Iterator[tuple[float, str]]:
    now_s, rate = 0.0, _per_second(traffic)
    users = [f"user-{number}" for number in range(traffic.users)]
    weights = list(itertools.accumulate((number + 1) ** -ZIPF_EXPONENT for number in range(traffic.users)))
    while True:
        for user in random.choices(users, cum_weights=weights, k=CHUNK):
            now_s += random.expovariate(rate)
            yield now_s, user


def _bursts(traffic: Generated, random: random.Random) -> Iterator[tuple[float, str]]:
    begin_s, rate = 0.0, _per_second(traffic) / BURST
    running: list[tuple[float, str]] = []
    while True:
        begin_s += random.expovariate(rate)
        while running and running[0][0] < begin_s:
            now_s, user = running[0]
            yield now_s, user
            if random.random() < 1 - 1 / BURST:
                heapq.heapreplace(running, (now_s + random.expovariate(1 / BURST_GAP_S), user))
            else:
                heapq.heappop(running)
        heapq.heappush(running, (begin_s, f"user-{int(random.random() * traffic.users)}"))


def _attack(traffic: Generated, random: random.Random) -> Iterator[tuple[float, str]]:
    usual = _per_second(traffic)
    attacking = ATTACKERS * ATTACK_FACTOR * usual / traffic.users
    third_s = traffic.requests / (3 * usual + attacking)
    now_s = 0.0
    while True:
        under_attack = third_s <= now_s < 2 * third_s
        now_s += random.expovariate(usual + attacking * under_attack)
        if under_attack and random.random() * (usual + attacking) < attacking:
            yield now_s, f"attacker-{int(random.random() * ATTACKERS)}"
        else:
            yield now_s, f"user-{int(random.random() * traffic.users)}"


KINDS: Final[dict[str, Callable[[Generated, random.Random], Iterator[tuple[float, str]]]]] = {
    "poisson": _poisson,
    "bursts": _bursts,
    "zipf": _zipf,
    "attack": _attack,
}
