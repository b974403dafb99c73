"""An application under gunicorn that gets three times as many requests as its backend can answer.

``python benchmarks/shedding_gunicorn.py`` prints the second table of docs/shedding.md; with ``--write`` it also writes
the figures of its pictures into docs/shedding.json. All of it is on this host, over loopback, for about a minute for
each shedder. The load is `OVERLOAD` times what the backend of shedding_app.py can answer, 150 requests a second: so
few that the load generator and gunicorn's workers don't compete for the processors.

A client opens a connection for each request, at times that are drawn beforehand, whatever happened to the requests
before (an open loop). It closes the connection after DEADLINE_S. *Goodput* is the number of answers within that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shedding_app import SERVERS, SERVICE_S, SHEDDERS
from shedding_simulation import DEADLINE_S, FIGURES, OVERLOAD, QUIET, SEED, percentile

from forebay import Store

LEARN_S, OVERLOAD_S, RECOVER_S = 12, 24, 12
SETTLED_S = 16
CAPACITY = SERVERS / SERVICE_S
WORKERS, THREADS = 2, 32
HERE = Path(__file__).parent


@contextmanager
def running(command: list[str], environ: dict[str, str], ready: str | int) -> Iterator[None]:
    """A process, which is ended by its pid. `ready`: the socket or the port at which it listens."""
    process = subprocess.Popen(command, env=os.environ | environ, cwd=HERE, start_new_session=True)
    try:
        for _ in range(600):
            with socket.socket(socket.AF_UNIX if isinstance(ready, str) else socket.AF_INET) as probe:
                if probe.connect_ex(ready if isinstance(ready, str) else ("127.0.0.1", ready)) == 0:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} has ended with status {process.returncode}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def ask(port: int) -> tuple[int, float]:
    """The status of one request, 0 without an answer in time, and how long it took in seconds."""
    began = time.perf_counter()
    status = 0
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                status = int(answer[9:12]) if len(answer) > 12 else 0
            finally:
                writer.close()
    except (TimeoutError, OSError):
        status = 0
    return status, time.perf_counter() - began


async def load(port: int) -> list[list[tuple[int, float]]]:
    """The results of the requests, by the second in which they were sent."""
    draw = random.Random(SEED)
    length_s = LEARN_S + OVERLOAD_S + RECOVER_S
    seconds: list[list[asyncio.Task[tuple[int, float]]]] = [[] for _ in range(length_s)]
    began, due_s = time.perf_counter(), 0.0
    while True:
        factor = OVERLOAD if LEARN_S <= due_s < LEARN_S + OVERLOAD_S else QUIET
        due_s += draw.expovariate(factor * CAPACITY)
        if due_s >= length_s:
            break
        await asyncio.sleep(began + due_s - time.perf_counter())
        seconds[int(due_s)].append(asyncio.create_task(ask(port)))
    return [list(await asyncio.gather(*second)) for second in seconds]


def measure(shedder: str) -> list[list[tuple[int, float]]]:
    name = f"shedding-{os.getpid()}"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(Store.unlink, name, missing_ok=True)
        path = f"{folder}/backend"
        stack.enter_context(running([sys.executable, "shedding_app.py", path], {}, path))
        command = [
            *(sys.executable, "-m", "gunicorn", "shedding_app:make_app()", "-b", f"127.0.0.1:{port}"),
            *(
                "-k",
                "gthread",
                "-w",
                str(WORKERS),
                "--threads",
                str(THREADS),
                "--log-level",
                "critical",
                "--graceful-timeout",
                "1",
            ),
        ]
        environ = {"SHEDDER": shedder, "SHEDDING_STORE": name, "SHEDDING_BACKEND": path}
        stack.enter_context(running(command, environ, port))
        return asyncio.run(load(port))


def main() -> None:
    figures = {}
    print("| shedder | goodput, of the capacity | p99 of the answers | p99 of the 503s |")
    print("| --- | ---: | ---: | ---: |")
    for shedder in SHEDDERS:
        seconds = measure(shedder)
        good = [[took_s for status, took_s in second if status == 200] for second in seconds]
        end = LEARN_S + OVERLOAD_S
        settled = [took_s for second in good[end - SETTLED_S : end] for took_s in second]
        shed = [took_s for second in seconds for status, took_s in second if status == 503]
        print(
            f"| {shedder} | {len(settled) / SETTLED_S / CAPACITY:.0%} | "
            f"{f'{percentile(settled, 0.99) * 1000:,.0f} ms' if settled else 'no answer'} | "
            f"{f'{percentile(shed, 0.99) * 1000:,.0f} ms' if shed else ''} |"
        )
        figures[shedder] = {
            "goodput": [round(len(second) / CAPACITY, 3) for second in good],
            # A client that got no answer has waited until its deadline.
            "p99_s": [
                round(percentile([took_s for status, took_s in second if status != 503], 0.99), 3) for second in seconds
            ],
        }
    if "--write" in sys.argv[1:]:
        known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        FIGURES.write_text(json.dumps(known | {"gunicorn": figures}) + "\n")


if __name__ == "__main__":
    main()
