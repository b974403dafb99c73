"""A service that gets three times as many requests as its backend can answer, with and without load shedding.

``python benchmarks/shedding_simulation.py`` prints the table of docs/shedding.md; with ``--write`` it also writes the
figures of its pictures into docs/shedding.json.

Real are the shedders: they decide, in shared memory, by a manual clock. The rest is this model, as an event queue:

* *Traffic* is a Poisson process: LEARN_S seconds at half of the capacity, OVERLOAD_S at three times the capacity, and
  RECOVER_S at half of it again. A fifth of the requests is critical, a half usual, the rest of the least importance.
* *The service* has THREADS threads. Requests that find none free wait in front of it, in the order in which they came.
* *The backend* handles SERVERS requests at one time, each for an exponentially distributed time with a mean of
  SERVICE_S, and queues the others. So its capacity is SERVERS / SERVICE_S requests a second.
* *Clients* wait for DEADLINE_S. A later answer is worth nothing, but the service doesn't know that, and works for it.
  A client that is denied does not come back.

*Goodput* is the number of answers within the deadline. All is a function of the seed.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay import Store
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, Gradient2, Shedder
from forebay.shedding.shedder import Admission
from forebay.testing import ManualClock

FIGURES = Path(__file__).parent.parent / "docs" / "shedding.json"
SEED = 20
LEARN_S, OVERLOAD_S, RECOVER_S = 30, 60, 30
OVERLOAD, QUIET = 3.0, 0.5
SERVERS, SERVICE_S = 10, 0.05
CAPACITY = SERVERS / SERVICE_S
THREADS = 64
DEADLINE_S = 1.0
SETTLED_S = 30
"""The part of the overload that is counted in the table: its last seconds."""
IMPORTANCE = {"critical": 0.2, "default": 0.5, "test": 0.3}
RESERVED = {"critical": "20%", "default": "20%", "test": "0%"}

MODES: dict[str, Callable[[Store], Shedder | None]] = {
    "nothing": lambda store: None,
    "Gradient2": lambda store: AdaptiveLimit(store, "backend", Gradient2()),
    "Gradient2, reserved": lambda store: AdaptiveLimit(store, "backend", Gradient2(), reserved=RESERVED),
    "AIMD": lambda store: AdaptiveLimit(store, "backend", AIMD(timeout="200ms")),
    "BusyWorkers": lambda store: BusyWorkers(store, "threads", THREADS, list(IMPORTANCE)),
}


@dataclass(eq=False)
class Request:
    came_s: float
    importance: str
    admission: Admission | None = None


@dataclass
class Second:
    """The outcomes of the requests that came in one second."""

    came: int = 0
    good: int = 0
    shed: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return percentile(self.latencies_s, 0.99)


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


class Service:
    """The model with one shedder."""

    def __init__(self, make_shedder: Callable[[Store], Shedder | None]) -> None:
        self.clock = ManualClock(1000)
        self.store = Store.private(keys=100, clock=self.clock)
        self.shedder = make_shedder(self.store)
        self.draw = random.Random(SEED)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s = 0.0
        self.in_front: deque[Request] = deque()
        self.in_queue: deque[Request] = deque()
        self.threads = self.serving = self.scheduled = 0
        self.seconds = [Second() for _ in range(LEARN_S + OVERLOAD_S + RECOVER_S)]
        self.good_by_importance = dict.fromkeys(IMPORTANCE, 0)
        self.came_by_importance = dict.fromkeys(IMPORTANCE, 0)

    def run(self) -> None:
        self.at(self.draw.expovariate(QUIET * CAPACITY), self.arrive)
        while self.events:
            self.now_s, _, act = heapq.heappop(self.events)
            self.clock.set(1000 + self.now_s)
            act()
        self.store.close()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        self.scheduled += 1
        heapq.heappush(self.events, (time_s, self.scheduled, act))

    def arrive(self) -> None:
        load = OVERLOAD if LEARN_S <= self.now_s < LEARN_S + OVERLOAD_S else QUIET
        next_s = self.now_s + self.draw.expovariate(load * CAPACITY)
        [importance] = self.draw.choices(list(IMPORTANCE), list(IMPORTANCE.values()))
        request = Request(self.now_s, importance)
        self.second_of(request).came += 1
        if self.is_settled(request):
            self.came_by_importance[importance] += 1
        self.in_front.append(request)
        if next_s < len(self.seconds):
            self.at(next_s, self.arrive)
        self.start_threads()

    def start_threads(self) -> None:
        while self.in_front and self.threads < THREADS:
            request = self.in_front.popleft()
            if self.shedder is not None:
                request.admission = self.shedder.admit(request.importance if self.shedder.priorities else None)
                if not request.admission:
                    self.second_of(request).shed += 1
                    continue
            self.threads += 1
            self.in_queue.append(request)
            self.start_serving()

    def start_serving(self) -> None:
        while self.in_queue and self.serving < SERVERS:
            request = self.in_queue.popleft()
            self.serving += 1
            self.at(self.now_s + self.draw.expovariate(1 / SERVICE_S), lambda request=request: self.answer(request))

    def answer(self, request: Request) -> None:
        self.serving -= 1
        self.threads -= 1
        if request.admission is not None:
            request.admission.end()
        latency_s = self.now_s - request.came_s
        second = self.second_of(request)
        second.latencies_s.append(latency_s)
        if latency_s <= DEADLINE_S:
            second.good += 1
            self.good_by_importance[request.importance] += self.is_settled(request)
        self.start_serving()
        self.start_threads()

    def second_of(self, request: Request) -> Second:
        return self.seconds[int(request.came_s)]

    def is_settled(self, request: Request) -> bool:
        end_s = LEARN_S + OVERLOAD_S
        return end_s - SETTLED_S <= request.came_s < end_s


@dataclass(frozen=True)
class Outcome:
    goodput: list[float]
    """For each second, as a part of the capacity."""
    p99_s: list[float]
    settled_goodput: float
    settled_p99_s: float
    good_parts: dict[str, float]
    """The share of the requests of each importance that were answered in time."""


def outcome_of(service: Service) -> Outcome:
    end = LEARN_S + OVERLOAD_S
    settled = service.seconds[end - SETTLED_S : end]
    return Outcome(
        [second.good / CAPACITY for second in service.seconds],
        [second.p99_s for second in service.seconds],
        sum(second.good for second in settled) / SETTLED_S / CAPACITY,
        percentile([latency for second in settled for latency in second.latencies_s], 0.99),
        {name: service.good_by_importance[name] / came for name, came in service.came_by_importance.items()},
    )


def simulate(mode: str) -> Outcome:
    # A BusyWorkers draws from Python's own generator.
    random.seed(SEED)
    service = Service(MODES[mode])
    service.run()
    return outcome_of(service)


def row_of(mode: str, outcome: Outcome) -> str:
    """A row of the page's table."""
    parts = ", ".join(f"{part:.0%}" for part in outcome.good_parts.values())
    return f"| {mode} | {outcome.settled_goodput:.0%} | {outcome.settled_p99_s * 1000:,.0f} ms | {parts} |"


def main() -> None:
    outcomes = {mode: simulate(mode) for mode in MODES}
    print("| shedder | goodput, of the capacity | p99 | answered of critical, default, test |")
    print("| --- | ---: | ---: | ---: |")
    for mode, one in outcomes.items():
        print(row_of(mode, one))
    if "--write" in sys.argv[1:]:
        known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        known["simulation"] = {
            mode: {
                "goodput": [round(part, 3) for part in one.goodput],
                "p99_s": [round(p99_s, 3) for p99_s in one.p99_s],
            }
            for mode, one in outcomes.items()
        }
        FIGURES.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
