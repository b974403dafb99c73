"""The example shop under a real gunicorn, and a client that sends concurrent requests."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.client import parse_headers
from pathlib import Path
from typing import Self

import psutil

from forebay import LimiterStats, Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "shop"
STORE_KEYS = 100_000  # the same as in the example
WORKERS = 4
PATIENCE_S = 120.0  # A wait of this length fails the test. No test asserts another duration.
UVICORN = "uvicorn_worker.UvicornWorker"

_LISTENING = re.compile(r"Listening at: http://127\.0\.0\.1:(?P<port>\d+) \((?P<master>\d+)\)")


@dataclass(frozen=True, slots=True)
class Answer:
    """The shop's response. Status 0 and worker 0 mean that the worker ended during the request."""

    status: int
    worker: int


LOST = Answer(0, 0)
Serve = Callable[..., "ShopServer"]


def statuses(answers: Iterable[Answer]) -> dict[int, int]:
    """The number of answers of each status."""
    return dict(Counter(answer.status for answer in answers))


def workers_of(answers: Iterable[Answer]) -> set[int]:
    """The pids that answered."""
    return {answer.worker for answer in answers} - {LOST.worker}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when `condition` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S} s until {what}")
        time.sleep(0.02)


class ShopServer:
    """A gunicorn on a free loopback port that serves the shop. Its limit does not refill during a test.

    All its processes, workers, upgraded masters and orphans, are in one session of their own; leaving the context
    ends them and prints their log, which pytest shows when the test has failed.
    """

    def __init__(
        self,
        store_name: str,
        log_path: Path,
        *,
        worker_class: str,
        preload: bool,
        burst: int,
        options: Iterable[str] = (),
    ) -> None:
        self.store_name, self.log_path = store_name, log_path
        command = [
            str(Path(sys.executable).with_name("gunicorn")),
            *("--chdir", str(EXAMPLE), "--config", str(EXAMPLE / "gunicorn.conf.py"), "--bind", "127.0.0.1:0"),
            *("--workers", str(WORKERS), "--worker-class", worker_class),
            # On QUIT uvicorn's workers do nothing until this is over.
            *("--graceful-timeout", "5"),
            *(["--preload"] if preload else []),
            *options,
            "asgi:app" if worker_class == UVICORN else "app:app",
        ]
        environment = os.environ | {"SHOP_STORE": store_name, "SHOP_RATE": "1/day", "SHOP_BURST": str(burst)}
        with log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.session = self._popen.pid

    def __enter__(self) -> Self:
        try:
            wait_until(lambda: bool(self._listening()) or self._popen.poll() is not None, "gunicorn listens")
            listening = self._listening()
            if not listening:
                raise RuntimeError(f"gunicorn ended with status {self._popen.returncode} before it listened")
            self.port = int(listening[0]["port"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        masters = [process for process in self.processes() if process.pid in {self.session, *self.masters()}]
        try:
            self._signal(masters, signal.SIGTERM)
            self.wait_gone(process.pid for process in masters)
        finally:
            self._signal(self.processes(), signal.SIGKILL)
            self._popen.wait()
            wait_until(lambda: not self.processes(), "gunicorn is gone")
            print(self.log_path.read_text())

    # Processes

    def _listening(self) -> list[re.Match[str]]:
        return list(_LISTENING.finditer(self.log_path.read_text()))

    def masters(self) -> list[int]:
        """The pids of all masters so far, in order of their start."""
        return [int(match["master"]) for match in self._listening()]

    def processes(self) -> list[psutil.Process]:
        """All live processes."""
        found = []
        for process in psutil.process_iter():
            self._popen.poll()
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self.session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """The live workers: of all masters, and orphans."""
        masters = self.masters()
        return [process for process in self.processes() if process.pid not in masters]

    def signal(self, pids: Iterable[int], signal_number: int) -> None:
        """Signal the live processes among `pids`."""
        self._signal([process for process in self.processes() if process.pid in set(pids)], signal_number)

    def wait_gone(self, pids: Iterable[int]) -> None:
        """Return when none of `pids` is left."""
        gone = set(pids)
        wait_until(lambda: not gone & {process.pid for process in self.processes()}, f"{sorted(gone)} have ended")

    @staticmethod
    def _signal(processes: Iterable[psutil.Process], signal_number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)

    # Requests

    def send_requests(
        self, count: int, *, at_once: int = 200, every: int = 0, then: Callable[[], object] = lambda: None
    ) -> list[Answer]:
        """Send `count` requests, `at_once` of them concurrently. Call `then()` after each `every` answers."""
        return asyncio.run(self._send_all(count, at_once, every, then))

    def send_until(self, enough: Callable[[list[Answer]], bool], what: str) -> list[Answer]:
        """Send 200 concurrent requests at a time until the answers are `enough`."""
        answers: list[Answer] = []

        def has_enough() -> bool:
            answers.extend(self.send_requests(200))
            return enough(answers)

        wait_until(has_enough, what)
        return answers

    def reach_all_workers(self) -> list[Answer]:
        """Send requests until all workers are alive and each one has answered."""

        def all_answered(answers: list[Answer]) -> bool:
            pids = {process.pid for process in self.workers()}
            return len(pids) == WORKERS and pids <= workers_of(answers)

        return self.send_until(all_answered, "every worker has answered")

    async def _send_all(self, count: int, at_once: int, every: int, then: Callable[[], object]) -> list[Answer]:
        answers: list[Answer] = []
        started = iter(range(count))

        async def client() -> None:
            for _ in started:
                answers.append(await self._send_one())
                if every and len(answers) % every == 0:
                    then()

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())
        return answers

    async def _send_one(self) -> Answer:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionError:
            return LOST
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: shop\r\nX-Customer: ada\r\nConnection: close\r\n\r\n")
            answer = io.BytesIO(await reader.read())
        except ConnectionError:
            return LOST
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        status_line = answer.readline().split()
        # A sync worker that quits aborts its request with a 500 of gunicorn.
        worker = parse_headers(answer)["X-Worker"]
        return Answer(int(status_line[1]), int(worker)) if worker else LOST

    # Statistics

    def stats(self) -> LimiterStats:
        """The limiter's statistics, read by a process outside gunicorn."""
        with Store(self.store_name, keys=STORE_KEYS) as store:
            return store.stats().limiters["orders"]
