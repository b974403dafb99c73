"""The decision server's requests per second over Redis, beside those in shared memory.

`python benchmarks/server/over_redis.py` measures the forebay-server that is installed, with a Redis of its own. Each
round measures all stores one after the other, and a figure is the median of the rounds. h2load is the client (8
connections with 16 requests at once each). It, Redis and the servers have the same processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from figures import asked
from processes import free_port, running

from forebay import Store

RULES = """
version = 1
store = "{store}"
client = {{ trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }}
[limits.api]
algorithm = "token-bucket"
rate = "1000000/second"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
"""
QUESTION = ["-H", "X-Forwarded-Uri: /api/x", "-H", "X-Forwarded-Method: GET", "-H", "X-Forwarded-For: 192.0.2.7"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60_000, help="of a round; fewer over Redis, which takes longer")
    options = parser.parse_args()
    threads = str(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, redis_port = f"forebay-over-redis-{os.getpid()}", free_port()
        stack.callback(Store.unlink, name, missing_ok=True)
        redis = ["redis-server", "--port", str(redis_port), "--bind", "127.0.0.1", "--save", ""]
        stack.enter_context(running(redis_port, *redis))
        host = f"shm:///{name}?keys=100000"
        url = f"redis://127.0.0.1:{redis_port}/0"
        stores = {
            "shared memory": (host, 1),
            "synced": (f"synced+{url}?keys=1000&host={host}", 2),
            "leased": (f"leased+{url}?host={host}", 2),
            "Redis": (url, 8),
        }
        servers = []
        for number, (store, part) in enumerate(stores.values()):
            file, port = Path(folder) / f"{number}.toml", free_port()
            file.write_text(RULES.format(store=store))
            command = [sys.executable, "-m", "forebay", "serve", file, "--threads", threads]
            server = stack.enter_context(running(port, *command, "--listen", f"127.0.0.1:{port}"))
            servers.append((server, options.requests // part))
        rounds = [
            [asked(server, "/auth/traefik", count, *QUESTION) for server, count in servers]
            for _ in range(options.rounds)
        ]
    for number, kind in enumerate(stores):
        rate, cpu_us = (statistics.median(one[number][part] for one in rounds) for part in (0, 1))
        ratio = statistics.median(one[number][0] / one[0][0] for one in rounds)
        print(f"{kind:14} {rate:10,.0f} requests/s  {ratio:5.2f} of shared memory  {cpu_us:6.1f} us of its CPU")


if __name__ == "__main__":
    main()
