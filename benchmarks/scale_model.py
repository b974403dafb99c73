"""A model of fleets of hosts over Redis, for ``scale_simulation.py`` and ``scale_reality.py``.

Real are the limiters, the steps of leases, the exchanges, and the Lua scripts, which ``lua_redis.py`` runs in this
process. The rest is this model:

* *Time* is simulated: each host has a manual clock, and the scripts read a time that is set.
* *Traffic*: the requests of a key are a Poisson process, and each goes to a host drawn at random. The frequencies of
  keys are Zipf's. A request costs one permit. All keys have one limit.
* *Network*: a round trip takes a time by a lognormal distribution, with a median of RTT_MEDIAN_S; one in a hundred
  takes longer than RTT_WORST_S.
* *Redis*: an operation is one script for one key, or for one hot list. It takes a shard's processor as long as
  SERVER_US says: an assumption, as processors differ. A shard is used to LOAD of its time, and an operation waits there
  as in an M/M/1 queue. A cluster's client adds nothing.
* *Failure*: for OUTAGE_S no operation is done. The hosts' circuit breakers are open, so calls fail at once.
* *A synced host* decides all requests of an interval at its end, just before its exchange, which takes no time.
* *A host that gives permits back* sends one query before, for all its keys. Here it is one for each key, which is too
  many by up to one operation for each lease that is given back.

Simulated exactly is one key on all hosts, at each of some rates of requests (RATES). For rare keys it is as many keys
as give WANTED requests. Scaled is the rest: keys share nothing but Redis. So a fleet's figure is the sum over all its
keys of the figure at each key's rate, interpolated between the simulated rates on logarithmic axes. A strict limit
needs no interpolation: each decision is one operation.

Left out: keys that lack room in a host's store, or on a hot list; processors of the hosts, except for the time that an
exchange takes them (EXCHANGE_US).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from lua_redis import LuaRedis, size_of

from forebay import FixedWindow, Store
from forebay.core.synced.window import SyncedWindow
from forebay.errors import StoreUnavailable
from forebay.redis import LeasedStore, RedisStore
from forebay.redis.commands import Command
from forebay.redis.keys import fingerprint
from forebay.redis.leased import fetch
from forebay.redis.synced.exchange import SHARDS, SHARE, ListsCommand, WindowExchange, name_of
from forebay.testing import ManualClock

NS = 1_000_000_000
START_S = 1_000_000_020  # the beginning of a minute
RTT_MEDIAN_S, RTT_WORST_S = 0.0005, 0.002
OUTAGE_S = 10.0
LOAD = 0.5
SERVER_US = 20.0
# A host's processor and the server's together, for one report of an exchange.
EXCHANGE_US = 25.0
# Of one hot list, in bytes: the query, the reply without keys, and each key in it.
LIST_SENT, LIST_RECEIVED, HOT_KEY_RECEIVED = 150, 35, 46
MOST_HOT = 64  # as in sync.lua
RATES = tuple(10 ** (exponent / 2) for exponent in range(-4, 15))
WANTED = 2_000
ZIPF = 1.0


@dataclass(frozen=True)
class Fleet:
    hosts: int
    limit: int = 6_000
    period_s: int = 60
    interval_s: float = 1.0
    lease_s: float = 1.0
    share: float = 0.1
    wanted: int = WANTED

    @property
    def rate_text(self) -> str:
        return f"{self.limit} per {self.period_s} seconds"

    def key_count(self, rate: float) -> int:
        """How many keys of this rate have `wanted` requests in a window."""
        return max(math.ceil(self.wanted / (rate * self.period_s)), 1)


@dataclass
class Tally:
    """The requests, denials and calls of the keys of one rate in a time."""

    requests: int = 0
    allowed: int = 0
    waited: int = 0
    """The requests that waited for Redis."""
    lost: int = 0
    """The requests that nothing could decide, as Redis was away."""
    operations: int = 0
    sent: int = 0
    """Bytes, to Redis."""
    received: int = 0


@dataclass
class Traffic:
    """The keys of one rate, and their tallies in the phases of a simulation."""

    rate: float
    keys: list[str]
    limit: int
    tallies: list[Tally]

    def during(self, *phases: int) -> Tally:
        chosen = [self.tallies[phase] for phase in phases]
        return Tally(*(sum(getattr(tally, name) for tally in chosen) for name in vars(Tally())))

    def entitled(self, tally: Tally) -> float:
        """How many of a window's requests one limiter for all hosts would have allowed."""
        return min(tally.requests, self.limit * len(self.keys))


class Timeline:
    """The simulated time, and the steps to come. It takes the place of the module ``time`` in the steps of leases."""

    def __init__(self) -> None:
        self.now_ns = START_S * NS
        self._steps: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._steps, (self.now_ns + round(delay_s * NS), next(self._numbers), step))

    def run(self, until_ns: int) -> None:
        while self._steps and self._steps[0][0] < until_ns:
            self.now_ns, _, step = heapq.heappop(self._steps)
            step()
        self.now_ns = until_ns

    def monotonic(self) -> float:
        return self.now_ns / NS


class ModelledRedis:
    """Runs the scripts. Latency, load and failure are the model's."""

    def __init__(self, timeline: Timeline, draw: random.Random, rtt_median_s: float) -> None:
        # It gives the commands their keys, and never connects.
        self.store = RedisStore("redis://127.0.0.1")
        self._server = LuaRedis()
        self.is_away = False
        self._timeline, self._draw = timeline, draw
        self._mean, self._deviation = math.log(rtt_median_s), math.log(RTT_WORST_S / RTT_MEDIAN_S) / 2.326

    def way_s(self) -> float:
        """Half a round trip, and half of the time at the server: in its queue, and its work."""
        trip_s = self._draw.lognormvariate(self._mean, self._deviation)
        return (trip_s + self._draw.expovariate((1 - LOAD) / (SERVER_US / 1e6))) / 2

    def has(self, key: bytes) -> bool:
        return self._server.has(key)

    def execute(self, command: Command[Any], tally: Tally | None = None) -> list[Any]:
        self._server.now_us = self._timeline.now_ns // 1000
        reply = self._server.run(command)
        if tally:
            tally.operations += 1
            tally.sent += size_of(command.call)
            tally.received += size_of(reply)
        return reply


class Host:
    def __init__(self, timeline: Timeline, keys: int) -> None:
        self._timeline, self._clock = timeline, ManualClock(START_S)
        self.store = Store.private(keys=keys, clock=self._clock)

    def look_at_the_clock(self) -> None:
        self._clock.set_ns(self._timeline.now_ns)


# The phases of a simulation of three windows: at the end of the first an outage begins, the third is as usual.
BEFORE, OUTAGE, OUTAGE_IN_NEXT, LATER, USUAL = range(5)


class Simulation(ABC):
    """All hosts of a fleet, and the keys of some rates."""

    def __init__(
        self, fleet: Fleet, rates: Sequence[float], *, seed: int = 1, rtt_median_s: float = RTT_MEDIAN_S
    ) -> None:
        self.fleet, self.draw, self.timeline = fleet, random.Random(seed), Timeline()
        self.redis = ModelledRedis(self.timeline, self.draw, rtt_median_s)
        self.traffic = [
            Traffic(rate, [f"{number}/{rate}" for number in range(fleet.key_count(rate))], fleet.limit, [])
            for rate in rates
        ]
        self.phase_end_ns = START_S * NS

    def run(self, advance: Callable[[float], None] = lambda seconds: None) -> list[Traffic]:
        """Simulate. `advance` is called with simulated seconds."""
        period_s, outage_s = self.fleet.period_s, min(OUTAGE_S, self.fleet.period_s / 2)
        ends_s = (period_s - outage_s / 2, period_s, period_s + outage_s / 2, 2 * period_s, 3 * period_s)
        with ExitStack() as stack:
            stack.callback(self.redis.store.close)
            stack.enter_context(patch.object(fetch, "time", self.timeline))
            self.begin(stack)
            for phase, end_s in enumerate(ends_s):
                self.redis.is_away = phase in (OUTAGE, OUTAGE_IN_NEXT)
                for traffic in self.traffic:
                    traffic.tallies.append(Tally())
                self.phase_end_ns = round((START_S + end_s) * NS)
                while self.timeline.now_ns < self.phase_end_ns:
                    before_ns = self.timeline.now_ns
                    self.timeline.run(min(before_ns + NS, self.phase_end_ns))
                    advance((self.timeline.now_ns - before_ns) / NS)
        return self.traffic

    @abstractmethod
    def begin(self, stack: ExitStack) -> None:
        """Make the hosts, and their first steps."""

    def poisson(self, mean: float) -> int:
        """How many events there are, if `mean` are expected."""
        if mean > 100:
            return max(round(self.draw.gauss(mean, math.sqrt(mean))), 0)
        count, product, least = 0, self.draw.random(), math.exp(-mean)
        while product > least:
            count += 1
            product *= self.draw.random()
        return count


class LeasingHost(Host):
    def __init__(self, timeline: Timeline, keys: int, fleet: Fleet, redis_store: RedisStore) -> None:
        super().__init__(timeline, keys)
        leased = LeasedStore(redis_store, self.store, lease=fleet.lease_s, share=fleet.share)
        self.permits: Any = FixedWindow(leased, "api", fleet.rate_text)
        self.holdings = fetch.Holdings()
        self.gives_back = False
        self.sure_until_ns = 0
        """Until then all requests of the only key get the same outcome."""
        self.is_lost = False


class LeasedSimulation(Simulation):
    """Keys of one rate, whose requests come one by one to each host."""

    def begin(self, stack: ExitStack) -> None:
        (self.only,) = self.traffic
        self.rate_of_host = self.only.rate * len(self.only.keys) / self.fleet.hosts
        # Two cells for each key, and as many requests as one window and the next bring.
        keys = 100 + min(8 * len(self.only.keys), 10 * round(self.rate_of_host * self.fleet.period_s))
        for _ in range(self.fleet.hosts):
            host = LeasingHost(self.timeline, keys, self.fleet, self.redis.store)
            stack.callback(host.store.close)
            self.timeline.after(self.draw.expovariate(self.rate_of_host), partial(self.arrive, host))

    @property
    def tally(self) -> Tally:
        return self.only.tallies[-1]

    def arrive(self, host: LeasingHost) -> None:
        now_ns, later_ns = self.timeline.now_ns, host.sure_until_ns
        if now_ns < later_ns:
            # The outcome of this request and of the others until then is known.
            count = 1 + self.poisson(self.rate_of_host * (later_ns - now_ns) / NS)
            self.tally.requests += count
            self.tally.lost += count * host.is_lost
        else:
            later_ns = now_ns
            host.look_at_the_clock()
            self.go_on(host, self.request(host, self.draw.choice(self.only.keys)))
        self.timeline.after(
            (later_ns - now_ns) / NS + self.draw.expovariate(self.rate_of_host), partial(self.arrive, host)
        )

    def request(self, host: LeasingHost, key: str) -> fetch.Steps[None]:
        tally = self.tally
        tally.requests += 1
        decision = host.permits.hit_now(key, 1)
        if decision is None:
            tally.waited += 1
            try:
                decision = yield from fetch.shared(host.permits, host.holdings, key, 1)
            except StoreUnavailable:
                tally.lost += 1
                self.be_sure(host, self.phase_end_ns, is_lost=True)
                return
            if host.holdings.leases and not host.gives_back:
                host.gives_back = True
                self.timeline.after(self.fleet.lease_s / fetch.CHECKS_PER_LEASE, partial(self.check, host))
        tally.allowed += decision.allowed
        if not decision.allowed:
            self.be_sure(host, self.timeline.now_ns + decision.retry_after_ns, is_lost=False)

    def be_sure(self, host: LeasingHost, until_ns: int, *, is_lost: bool) -> None:
        if len(self.only.keys) == 1:
            host.sure_until_ns, host.is_lost = min(until_ns, self.phase_end_ns), is_lost

    def check(self, host: LeasingHost) -> None:
        """The work of the thread that gives back."""
        host.look_at_the_clock()
        self.go_on(host, self.give_back(host))
        host.gives_back = bool(host.holdings.leases)
        if host.gives_back:
            self.timeline.after(self.fleet.lease_s / fetch.CHECKS_PER_LEASE, partial(self.check, host))

    def give_back(self, host: LeasingHost) -> fetch.Steps[None]:
        with suppress(StoreUnavailable):
            yield from host.holdings.unused()

    def go_on(
        self, host: LeasingHost, steps: fetch.Steps[None], result: Any = None, error: Exception | None = None
    ) -> None:
        """Run steps until they wait for something, and do what they wait for."""
        host.look_at_the_clock()
        try:
            step: Any = steps.send(result) if error is None else steps.throw(error)
        except StopIteration:
            return
        if isinstance(step, float):
            self.timeline.after(step, partial(self.go_on, host, steps))
        elif self.redis.is_away:
            self.timeline.after(0, partial(self.go_on, host, steps, error=StoreUnavailable("an outage")))
        else:
            self.timeline.after(self.redis.way_s(), partial(self.serve, host, steps, step))

    def serve(self, host: LeasingHost, steps: fetch.Steps[None], command: Command[Any]) -> None:
        reply = self.redis.execute(command, self.tally)
        self.timeline.after(self.redis.way_s(), partial(self.go_on, host, steps, command.result(reply)))


class StrictSimulation(Simulation):
    """Each request is a command. Its latency changes no decision."""

    def begin(self, stack: ExitStack) -> None:
        (self.only,) = self.traffic
        self.limiter: Any = FixedWindow(self.redis.store, "api", self.fleet.rate_text)
        self.arrive()

    def arrive(self) -> None:
        tally = self.only.tallies[-1] if self.only.tallies else Tally()
        tally.requests += 1
        tally.waited += 1
        if self.redis.is_away:
            tally.lost += 1
        else:
            command = self.limiter.commands.allow(self.draw.choice(self.only.keys), 1)
            reply = self.redis.execute(command, tally)
            tally.allowed += command.result(reply)
        self.timeline.after(self.draw.expovariate(self.only.rate * len(self.only.keys)), self.arrive)


class SyncingHost(Host):
    def __init__(self, timeline: Timeline, keys: int, number: int, simulation: SyncedSimulation) -> None:
        super().__init__(timeline, 2 * keys + 200)
        self.limiter = SyncedWindow(self.store, "api", simulation.fleet.rate_text, None, False, keys, name_of)
        self.exchange = ModelledExchange(simulation, self.limiter, b"%016x" % number)
        self.round = number


class ModelledExchange(WindowExchange):
    """The real exchange, which sends its messages to the modelled Redis."""

    def __init__(self, simulation: SyncedSimulation, limiter: SyncedWindow[Any], host: bytes) -> None:
        super().__init__(simulation.redis.store, limiter, host)
        self._simulation = simulation

    def send(self, messages: list[Command[None]]) -> list[Any]:
        if self._simulation.redis.is_away:
            raise StoreUnavailable("an outage")
        server, now_us = self._simulation.redis, self._simulation.timeline.now_ns // 1000
        if isinstance(messages[0], ListsCommand):
            return [
                server.execute(message) if any(map(server.has, message.keys)) else [1, now_us, *[0, 0] * message.size]
                for message in messages
            ]
        return [server.execute(message, self._simulation.tally_of(message)) for message in messages]


class SyncedSimulation(Simulation):
    """Keys of several rates, as a host exchanges all of them at once."""

    def begin(self, stack: ExitStack) -> None:
        self.by_name = {fingerprint(key): number for number, traffic in enumerate(self.traffic) for key in traffic.keys}
        # As many as one window and the next bring.
        keys = 100 + 3 * sum(
            min(len(traffic.keys), round(traffic.rate * len(traffic.keys) * self.fleet.period_s / self.fleet.hosts))
            for traffic in self.traffic
        )
        for number in range(self.fleet.hosts):
            host = SyncingHost(self.timeline, keys, number, self)
            stack.callback(host.store.close)
            self.timeline.after(self.draw.uniform(0, self.fleet.interval_s), partial(self.exchange, host))

    def tally_of(self, command: Command[Any]) -> Tally:
        return self.traffic[self.by_name[command.keys[0].split(b":")[-2]]].tallies[-1]

    def exchange(self, host: SyncingHost) -> None:
        host.look_at_the_clock()
        for traffic in self.traffic:
            count = self.poisson(traffic.rate * len(traffic.keys) * self.fleet.interval_s / self.fleet.hosts)
            tally = traffic.tallies[-1]
            tally.requests += count
            if len(traffic.keys) == 1 and count:
                # As many times `allow`: the first decision inserts the key, also if it denies.
                (key,) = traffic.keys
                tally.allowed += host.limiter.allow(key) + (host.limiter.take_up_to(key, count - 1) if count > 1 else 0)
            else:
                tally.allowed += sum(host.limiter.allow(self.draw.choice(traffic.keys)) for _ in range(count))
        host.round += 1
        with suppress(StoreUnavailable):
            if failed := host.exchange.run(host.round):
                raise failed
        self.timeline.after(self.fleet.interval_s, partial(self.exchange, host))


def reports_a_second(fleet: Fleet, rate: float) -> float:
    """The reports of one key, by arithmetic, if less than a quarter of its limit is requested.

    A host reports a key if it has counted it since its last exchange, and at every 64th exchange if it has counted it
    in this window or in the one before. From a quarter of the limit on, it also queries what others have reported.
    """
    of_host, period_s, interval_s = rate / fleet.hosts, fleet.period_s, fleet.interval_s
    has_news = -math.expm1(-of_host * interval_s)
    # The mean over a window.
    has_counted = 1 + math.exp(-of_host * period_s) * math.expm1(-of_host * period_s) / (of_host * period_s)
    return fleet.hosts / interval_s * (has_news + max(has_counted - has_news, 0) / 64)


@dataclass(frozen=True)
class Point:
    """The cost of one key at one rate. All but the rate are a second."""

    rate: float
    operations: float
    sent: float
    received: float
    waited: float
    allowed: float
    entitled: float
    lost: float
    """In the outage."""
    allowed_later: float
    """In the window that begins in the outage."""
    entitled_later: float


def point_of(traffic: Traffic) -> Point:
    usual, outage = traffic.during(USUAL), traffic.during(OUTAGE, OUTAGE_IN_NEXT)
    later = traffic.during(OUTAGE_IN_NEXT, LATER)

    def a_second(number: float, of: Tally) -> float:
        return traffic.rate * number / of.requests if of.requests else 0.0

    return Point(
        traffic.rate,
        *(a_second(number, usual) for number in (usual.operations, usual.sent, usual.received, usual.waited)),
        a_second(usual.allowed, usual),
        a_second(traffic.entitled(usual), usual),
        a_second(outage.lost, outage),
        a_second(later.allowed, later),
        a_second(traffic.entitled(later), later),
    )


class Curve:
    """The cost of a key at any rate: by a power law between two points and above them, in proportion below them."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = sorted(points, key=lambda point: point.rate)
        self._rates = [point.rate for point in self.points]

    def at(self, name: str, rate: float) -> float:
        place = bisect_left(self._rates, rate)
        if place == 0:
            return rate / self._rates[0] * float(getattr(self.points[0], name))
        place = min(place, len(self.points) - 1)
        low, high = self.points[place - 1 : place + 1]
        first, second = getattr(low, name), getattr(high, name)
        part = math.log(rate / low.rate) / math.log(high.rate / low.rate)
        if first <= 0 or second <= 0:
            return float(first + part * (second - first))
        return float(first * (second / first) ** part)


def zipf(keys: int, rate: float, exponent: float = ZIPF) -> Iterator[tuple[float, float]]:
    """Numbers of keys, and the rate of each of them. The first 1,000 ranks stand alone, the others in groups."""
    edges = [*range(1, min(keys, 1000) + 1)]
    while edges[-1] < keys:
        edges.append(min(math.ceil(edges[-1] * 1.02), keys))
    edges.append(keys + 1)
    weights = [weight_of(first, last, exponent) for first, last in itertools.pairwise(edges)]
    unit = rate / sum(weights)
    for (first, last), weight in zip(itertools.pairwise(edges), weights, strict=True):
        yield last - first, unit * weight / (last - first)


def weight_of(first: int, last: int, exponent: float) -> float:
    """The sum of rank ** -exponent over the ranks from `first` to below `last`."""
    if last - first < 10:
        return sum(rank**-exponent for rank in range(first, last))
    low, high = first - 0.5, last - 0.5
    if exponent == 1:
        return math.log(high / low)
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


@dataclass(frozen=True)
class Cost:
    """The cost of a fleet for its Redis and its clients."""

    operations: float
    megabytes: float
    shards: float
    hottest: float
    """Shards that the hottest key takes, which has only one."""
    waited: float
    """The share of requests that waits for Redis."""
    admitted: float
    """As a part of what one limiter for all hosts would have allowed."""
    lost: float
    """The share of requests that nothing decides in an outage."""
    admitted_later: float
    """As `admitted`, in the window that begins in the outage."""
    exchange_s: float = 0.0


def strict_cost(point: Point, keys: int, rate: float) -> Cost:
    """By arithmetic: each decision is one operation, as at the simulated rate."""
    share = SERVER_US / 1e6 / LOAD
    hottest = next(zipf(keys, rate))[1]
    megabytes = rate / point.rate * (point.sent + point.received) / 1e6
    return Cost(rate, megabytes, rate * share, hottest * share, 1.0, 1.0, 1.0, 1.0)


def scaled_cost(fleet: Fleet, curve: Curve, mode: str, keys: int, rate: float) -> Cost:
    """The sum over all keys."""
    groups = list(zipf(keys, rate))
    sums = {
        name: sum(count * curve.at(name, each) for count, each in groups)
        for name in Point.__dataclass_fields__
        if name != "rate"
    }
    hottest = curve.at("operations", groups[0][1])
    share = SERVER_US / 1e6 / LOAD
    operations, sent, received = (sums[name] for name in ("operations", "sent", "received"))
    shards, exchange_s = operations * share, 0.0
    if mode == "synced":
        exchange_s = operations * fleet.interval_s / fleet.hosts * EXCHANGE_US / 1e6
        exchanges = fleet.hosts / fleet.interval_s
        hot = sum(count for count, each in groups if each * fleet.period_s >= fleet.limit / SHARE)
        operations += SHARDS * exchanges
        sent, received = sent + LIST_SENT * SHARDS * exchanges, received + hot_bytes(hot) * exchanges
        shards += SHARDS * exchanges * SERVER_US / 1e6 / LOAD
    return Cost(
        operations,
        (sent + received) / 1e6,
        shards,
        hottest * share,
        sums["waited"] / rate,
        sums["allowed"] / sums["entitled"],
        sums["lost"] / rate,
        sums["allowed_later"] / sums["entitled_later"],
        exchange_s,
    )


def hot_bytes(hot: float) -> float:
    """The bytes of all hot lists, if each has changed."""
    return SHARDS * LIST_RECEIVED + min(hot, SHARDS * MOST_HOT) * HOT_KEY_RECEIVED


def simulate(
    fleet: Fleet,
    rates: Sequence[float],
    advance: Callable[[float], None],
    *,
    seed: int,
    rtt_median_s: float = RTT_MEDIAN_S,
) -> dict[str, Curve]:
    """The curves of all modes; of strict limits only one point."""
    options: Any = {"seed": seed, "rtt_median_s": rtt_median_s}
    near_one = min(rates, key=lambda rate: abs(math.log(rate)))
    runs = {
        "strict": StrictSimulation(fleet, [near_one], **options).run(advance),
        "leased": [LeasedSimulation(fleet, [rate], **options).run(advance)[0] for rate in rates],
        "synced": SyncedSimulation(fleet, rates, **options).run(advance),
    }
    return {mode: Curve([point_of(traffic) for traffic in run]) for mode, run in runs.items()}
