"""An example shop under a real server with four workers, and requests until each worker has answered."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKERS = 4
PATIENCE_S = 120.0

# The line that gunicorn or uvicorn logs.
_LISTENING = re.compile(r"(?:Listening at: |running on )http://127\.0\.0\.1:(?P<port>\d+) ")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    worker: int
    headers: dict[str, str]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S} s until {what}")
        time.sleep(0.02)


@contextmanager
def served(example: str, command: list[str], log_path: Path, **environment: str) -> Iterator[int]:
    """Serve ``examples/<example>`` and yield its port. All processes form one session and end with the block."""
    command = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=EXAMPLES / example,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: _LISTENING.search(log_path.read_text()) or server.poll() is not None, f"{command[0]} listens"
        )
        listening = _LISTENING.search(log_path.read_text())
        if listening is None:
            raise RuntimeError(f"{command[0]} ended with status {server.returncode} before it listened")
        port = int(listening["port"])
        wait_until(lambda: is_open(port), "a worker listens")
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE_S)
        finally:
            for process in processes_of(server.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            server.wait()
            print(log_path.read_text())


def free_port() -> int:
    """A free port for a server that does not log the port that it binds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
        return True
    return False


def processes_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def send_request(port: int) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/", headers={"X-Customer": "ada", "Connection": "close"})
        response = connection.getresponse()
        response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, int(headers["x-worker"]), headers)
    finally:
        connection.close()


def reach_all_workers(port: int) -> list[Answer]:
    """Send a hundred requests, twenty at a time, and repeat until all workers have answered."""
    answers: list[Answer] = []
    with ThreadPoolExecutor(20) as clients:

        def all_answered() -> bool:
            answers.extend(clients.map(send_request, [port] * 100))
            return len({answer.worker for answer in answers}) == WORKERS

        wait_until(all_answered, "every worker has answered")
    return answers


def statuses(answers: list[Answer]) -> dict[int, int]:
    return dict(Counter(answer.status for answer in answers))
