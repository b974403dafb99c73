"""A ``framework_*.py`` under gunicorn with several workers, and a client."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from framework_limits import STORE_KEYS, Limits
from shop_server import EXAMPLE, PATIENCE_S, wait_until

from forebay import Store

WORKERS = 3
CLIENTS = 12

_LISTENING = re.compile(r"Listening at: http://127\.0\.0\.1:(?P<port>\d+) ")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def report(self) -> dict[str, Any]:
        """The body, parsed as JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


class Served:
    """An application on `port`, and its limits, opened by this process."""

    def __init__(self, port: int, limits: Limits, directory: Path) -> None:
        self.port, self.limits, self._directory = port, limits, directory

    def request(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return send_request(self.port, path, method, **headers)

    def send_requests(self, count: int, path: str, **headers: str) -> list[Answer]:
        """Send `count` requests from several concurrent clients."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(lambda _: self.request(path, **headers), range(count)))

    @contextmanager
    def started_stream(self, path: str, **headers: str) -> Iterator[socket.socket]:
        """A connection that has received the first line of a streamed response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n{fields}\r\n".encode())
            received = b""
            while b"first\n" not in received:
                part = connection.recv(65536)
                assert part, received
                received += part
            yield connection

    def open(self) -> None:
        """Let all streamed responses end from now on."""
        (self._directory / "open").touch()


def send_request(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send a request. Underscores in header names stand for hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Connection": "close", **fields})
        response = connection.getresponse()
        names = {name.lower() for name, _ in response.getheaders()}
        found = {name: ", ".join(response.headers.get_all(name, [])) for name in names}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


@contextmanager
def served(module: str, worker_class: str, store_name: str, directory: Path, app: str = "app") -> Iterator[Served]:
    """Serve a ``framework_*.py``; yield once several workers answer."""
    environment = {"FRAMEWORK_STORE": store_name, "FRAMEWORK_DIRECTORY": str(directory)}
    log_path = directory / "gunicorn.log"
    with (
        Store(store_name, keys=STORE_KEYS) as store,
        running(f"{module}:{app}", worker_class, Path(__file__).parent, log_path, **environment) as port,
    ):
        found = Served(port, Limits(store), directory)
        wait_until(lambda: len(workers_of(found.send_requests(CLIENTS, "/worker"))) > 1, "several workers answer")
        yield found


@contextmanager
def running(app: str, worker_class: str, folder: Path, log_path: Path, **environment: str) -> Iterator[int]:
    """Start gunicorn and yield its port. Its processes form one session and end with the block."""
    command = [
        *(str(Path(sys.executable).with_name("gunicorn")), "--config", str(EXAMPLE / "gunicorn.conf.py")),
        *("--bind", "127.0.0.1:0", "--workers", str(WORKERS), "--worker-class", worker_class),
        *("--threads", "8", "--graceful-timeout", "2", app),
    ]
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: bool(_port(log_path)) or server.poll() is not None, "gunicorn listens")
        assert _port(log_path), f"gunicorn ended with status {server.returncode} before it listened"
        yield _port(log_path)
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE_S)
        for process in _processes_of(server.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()
        print(log_path.read_text())


def workers_of(answers: Iterable[Answer]) -> set[int]:
    """The pids that admitted requests."""
    return {answer.report["worker"] for answer in answers if answer.status == 200}


def _port(log_path: Path) -> int:
    listening = _LISTENING.search(log_path.read_text())
    return int(listening["port"]) if listening else 0


def _processes_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
