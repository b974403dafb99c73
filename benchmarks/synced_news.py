"""How old news is: after a host has counted a hot key, when does another host know, with and without ``push``?

``python benchmarks/synced_news.py`` starts a Redis server of its own. Five hosts exchange every second, each at a time
of its own. At random times one of them charges a new key with half of its limit, and another one looks at the key
every millisecond until it knows. Then two hosts exchange only by a call, and the time is from the end of that call. The
server's processor time and the bytes that it sends are of the whole run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

import redis
from redis_server import redis_on_a_free_port

from forebay import FixedWindow, Store
from forebay.redis import RedisStore, SyncedStore

HOSTS = 5
INTERVAL = "1 second"
LIMIT = 100


def ages_ms(port: int, keys: int, seed: int, *, push: bool) -> tuple[list[float], float, float]:
    """The age of each key's news, and per second the server's milliseconds and the kilobytes that it sent."""
    draw = random.Random(seed)
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis(port=port))
        client.flushall()
        made: list[Any] = []
        for _ in range(HOSTS):
            over = stack.enter_context(RedisStore(f"redis://127.0.0.1:{port}"))
            host = stack.enter_context(Store.private(keys=10_000))
            synced = stack.enter_context(SyncedStore(over, host, INTERVAL, keys=10_000, push=push))
            made.append(FixedWindow(synced, "api", f"{LIMIT}/year"))
            time.sleep(1 / HOSTS)
        time.sleep(1)
        before, begin_s = used_by(client), time.monotonic()
        due_s = [begin_s + at for at in sorted(draw.uniform(0, keys / 10) for _ in range(keys))]
        waiting: dict[int, tuple[float, Any]] = {}
        ages: list[float] = []
        charged = 0
        while len(ages) < keys:
            while charged < keys and due_s[charged] <= time.monotonic():
                counting, looking = draw.sample(made, 2)
                counting.hit(charged, LIMIT // 2)
                waiting[charged] = time.monotonic(), looking
                charged += 1
            for key, (at_s, looking) in list(waiting.items()):
                if looking.peek(key).remaining < LIMIT:
                    ages.append(1000 * (time.monotonic() - at_s))
                    del waiting[key]
            time.sleep(0.001)
        passed_s = time.monotonic() - begin_s
        ms, sent = (later - earlier for earlier, later in zip(before, used_by(client), strict=True))
        return sorted(ages), ms / passed_s, sent / 1000 / passed_s


def ages_after_exchanges_ms(port: int, keys: int) -> list[float]:
    """With push, the time from the end of an exchange until another host knows."""
    ages = []
    with ExitStack() as stack:
        made: list[tuple[SyncedStore, Any]] = []
        for _ in range(2):
            over = stack.enter_context(RedisStore(f"redis://127.0.0.1:{port}"))
            host = stack.enter_context(Store.private(keys=10_000))
            synced = stack.enter_context(SyncedStore(over, host, "1 hour", keys=10_000, push=True))
            made.append((synced, FixedWindow(synced, "after", f"{LIMIT}/year")))
        time.sleep(1)
        (counting, limiter), (_, looking) = made
        for key in range(keys):
            limiter.hit(key, LIMIT // 2)
            counting.exchange()
            exchanged_s = time.monotonic()
            while looking.peek(key).remaining == LIMIT:
                time.sleep(0.0001)
            ages.append(1000 * (time.monotonic() - exchanged_s))
            time.sleep(0.15)
    return sorted(ages)


def used_by(client: redis.Redis) -> tuple[float, float]:
    processor: Any = client.info("cpu")
    stats: Any = client.info("stats")
    return 1000 * (processor["used_cpu_user"] + processor["used_cpu_sys"]), stats["total_net_output_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=200, help="ten of them in a second")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print("| | median | 9 of 10 | longest | ms of Redis a second | kB a second from it |", flush=True)
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with redis_on_a_free_port() as port:
        for push in (False, True):
            ages, ms, sent = ages_ms(port, arguments.keys, arguments.seed, push=push)
            shown = [f"{age:,.0f} ms" for age in (statistics.median(ages), ages[len(ages) * 9 // 10], ages[-1])]
            print(f"| push={push} | {' | '.join(shown)} | {ms:.1f} | {sent:.1f} |", flush=True)
        ages = ages_after_exchanges_ms(port, arguments.keys)
    shown = [f"{age:.1f} ms" for age in (statistics.median(ages), ages[len(ages) * 9 // 10], ages[-1])]
    print(f"| after the exchange, push=True | {' | '.join(shown)} | | |")


if __name__ == "__main__":
    main()
