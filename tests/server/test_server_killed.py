"""A server that is killed under load: it leaves nothing held, stops nobody, and leaves a store that is sound."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from decision_server import DecisionServer

from forebay import Concurrency, FixedWindow, Store

Serve = Callable[..., DecisionServer]

MOST = 40
RULES = f"""
[limits.api]
algorithm = "fixed-window"
rate = "1000000/hour"
align = "first"
[limits.queue]
algorithm = "token-bucket"
rate = "1000000/second"
[limits.jobs]
algorithm = "concurrency"
limit = {MOST}
lease = "1 hour"
[[rules]]
name = "api"
limits = ["api"]
request_id = {{ lasts = "1 hour" }}
[[rules]]
name = "queue"
limits = ["queue"]
path = "/queue"
[[rules]]
name = "jobs"
limits = ["jobs"]
path = "/jobs"
"""
CLIENT = "192.0.2.7"


@contextlib.contextmanager
def asking(server: DecisionServer) -> Iterator[Callable[..., Any]]:
    """Asks in one connection. The block ends once the server is killed."""
    with contextlib.closing(server.connect()) as connection:

        def ask(call: str, **question: Any) -> Any:
            connection.request("POST", f"/v1/{call}", json.dumps(question), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

        with contextlib.suppress(OSError, http.client.HTTPException):
            yield ask


@contextlib.contextmanager
def threads(count: int, work: Callable[[int], None]) -> Iterator[None]:
    """Threads that end by themselves after the block."""
    started = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        for thread in started:
            thread.join()


def verify(store_name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "verify", store_name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_answered_request_of_a_killed_server_is_charged(serve: Serve, store_name: str) -> None:
    server = serve(RULES, "--no-proxies")
    counts: list[int] = []
    reached = threading.Event()

    def work(number: int) -> None:
        count = 0
        with asking(server) as ask:
            while ask("decide", uri="/", client=CLIENT)["allowed"]:
                count += 1
                reached.set()
        counts.append(count)

    with threads(4, work):
        was_reached = reached.wait(60)
        server.kill()
    assert was_reached
    verify(store_name)
    with Store.attach(store_name) as store:
        left = FixedWindow(store, "api", "1000000/hour", align="first").peek(CLIENT).remaining
    # At most one more request of each connection.
    assert 0 <= 1_000_000 - left - sum(counts) <= 4


def test_a_killed_server_holds_nothing_and_stops_nobody(serve: Serve, store_name: str) -> None:
    server = serve(RULES, "--no-proxies")
    with Store.attach(store_name) as store:
        jobs = Concurrency(store, "jobs", MOST, lease="1 hour")
        api = FixedWindow(store, "api", "1000000/hour", align="first")
        for seed in range(3):
            _kill_under_load(server, seed, jobs, api)
            verify(store_name)
            # Its permits come back, as soon as a request looks for one.
            while jobs.peek(CLIENT).remaining < MOST:
                pass
            server = serve(RULES, "--no-proxies")
            leases = [server.ask("acquire", uri="/jobs", client=CLIENT) for _ in range(MOST + 1)]
            assert [lease["allowed"] for lease in leases] == [True] * MOST + [False]
            assert all(server.ask("release", lease=lease["lease"]["id"])["released"] for lease in leases[:-1])


def _kill_under_load(server: DecisionServer, seed: int, jobs: Concurrency, api: FixedWindow) -> None:
    ended, is_full, decides = threading.Event(), threading.Event(), threading.Event()

    def ask_server(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        with asking(server) as ask:
            while True:
                lease = ask("acquire", uri="/jobs", client=CLIENT)
                if not lease["allowed"]:
                    is_full.set()
                elif draw.random() < 0.3:
                    ask("renew", lease=lease["lease"]["id"])
                    ask("release", lease=lease["lease"]["id"])
                booked = ask("reserve", uri="/queue", client=CLIENT, max_delay=1)
                ask("refund", charge=booked["charge"])
                question = {"uri": "/queue", "client": CLIENT, "headers": {"Idempotency-Key": f"{draw.randrange(9)}"}}
                ask("batch", requests=[question] * 5)

    def decide(number: int) -> None:
        while not ended.is_set():
            with jobs.acquire(f"own {number}"):
                assert api.allow(f"own {number}")
            decides.set()

    with threads(2, decide):
        with threads(4, ask_server):
            was_full = is_full.wait(120)
            server.kill()
        # Those who are still there decide.
        decides.clear()
        are_deciding = decides.wait(60)
        ended.set()
    assert was_full
    assert are_deciding
