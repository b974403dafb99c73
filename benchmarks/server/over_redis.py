"""The decision server's requests per second over Redis, beside those in shared memory.

`python benchmarks/server/over_redis.py` measures the forebay-server that is installed, with a Redis of its own. Each
round measures all stores one after the other, by HTTP/2 and by `ShouldRateLimit` with one descriptor, and a figure is
the median of the rounds. h2load is the client (8 connections with 16 requests at once each). It, Redis and the servers
have the same processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from figures import GRPC, SHOULD_RATE_LIMIT, asked, rate_limit_request
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
[[rules]]
name = "user"
limits = ["api"]
headers = {{ user = "*" }}
key = "header:user | address"
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
            # The request names it.
            file, port = Path(folder) / str(number) / "figures.toml", free_port()
            file.parent.mkdir()
            file.write_text(RULES.format(store=store))
            command = [sys.executable, "-m", "forebay", "serve", file, "--threads", threads]
            server = stack.enter_context(running(port, *command, "--listen", f"127.0.0.1:{port}"))
            servers.append((server, options.requests // part))
        body = Path(folder) / "asked"
        body.write_bytes(rate_limit_request())
        ways = {"HTTP/2": ("/auth/traefik", *QUESTION), "ShouldRateLimit": (SHOULD_RATE_LIMIT, *GRPC, str(body))}
        rounds = [
            {
                way: [asked(server, path, count, *more) for server, count in servers]
                for way, (path, *more) in ways.items()
            }
            for _ in range(options.rounds)
        ]
    for way in ways:
        print(way)
        for number, kind in enumerate(stores):
            rate, cpu_us = (statistics.median(one[way][number][part] for one in rounds) for part in (0, 1))
            ratio = statistics.median(one[way][number][0] / one[way][0][0] for one in rounds)
            print(f"  {kind:14} {rate:10,.0f} requests/s  {ratio:5.2f} of shared memory  {cpu_us:6.1f} us of its CPU")


if __name__ == "__main__":
    main()
