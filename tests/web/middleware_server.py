"""``middleware_app`` under a real gunicorn or uvicorn, and concurrent clients."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.client import parse_headers
from pathlib import Path
from typing import Self

import psutil
from shop_server import PATIENCE_S, UVICORN, wait_until

WORKERS = 4
_LISTENING = re.compile(r"(?:Listening at:|Uvicorn running on) http://127\.0\.0\.1:(?P<port>\d+)")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    ratelimit: str
    retry_after: str
    body: bytes


class MiddlewareServer:
    """A running server. Its processes form one session; leaving the context ends them and prints their log."""

    def __init__(
        self, directory: Path, server: str, *, store_name: str = "", when: str = "import", workers: int = WORKERS,
        preload: bool = False, options: Iterable[str] = (), environment: dict[str, str] | None = None,
        app: str = "middleware_app",
    ) -> None:  # fmt: skip
        self.log_path, self.made = directory / "server.log", directory / "made"
        self.made.mkdir()
        self.workers = workers
        command = [str(Path(sys.executable).with_name("uvicorn" if server == "uvicorn" else "gunicorn"))]
        if server == "uvicorn":
            command += ["--app-dir", str(Path(__file__).parent), "--host", "127.0.0.1", "--port", str(_free_port())]
        else:
            command += ["--chdir", str(Path(__file__).parent), "--bind", "127.0.0.1:0", "--worker-class", server]
            command += ["--graceful-timeout", "1", *(["--threads", "8"] if server == "gthread" else [])]
            command += ["--preload"] if preload else []
        if "WEB_CONCURRENCY" not in (environment or {}):
            command += ["--workers", str(workers)]
        command += [*options, f"{app}:app"]
        variables = os.environ | {
            "MIDDLEWARE_STORE": store_name,
            "MIDDLEWARE_WHEN": when,
            "MIDDLEWARE_KIND": "asgi" if server in {"uvicorn", UVICORN} else "wsgi",
            "MIDDLEWARE_MADE": str(self.made),
        }
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                command, env=variables | (environment or {}), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        try:
            wait_until(lambda: bool(self._port()) or self._popen.poll() is not None, "the server listens")
            if not self._port():
                raise RuntimeError(f"the server ended with status {self._popen.returncode} before it listened")
            self.port = self._port()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(10)
        finally:
            for process in self._processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            self._popen.wait()
            wait_until(lambda: not self._processes(), "the server is gone")
            print(self.log)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_made(self, count: int) -> None:
        """Wait until `count` processes have made their middleware."""
        wait_until(lambda: len(list(self.made.iterdir())) >= count, f"{count} processes have made their middleware")

    def _port(self) -> int:
        found = _LISTENING.search(self.log)
        return int(found["port"]) if found else 0

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            self._popen.poll()
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self._popen.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def send_requests(self, path: str, count: int = 1, at_once: int = 32) -> list[Answer]:
        return asyncio.run(self._send_all(path, count, at_once))

    async def _send_all(self, path: str, count: int, at_once: int) -> list[Answer]:
        answers: list[Answer] = []
        left = iter(range(count))

        async def client() -> None:
            answers.extend([await self._send_one(path) for _ in left])

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())
        return answers

    async def _send_one(self, path: str) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
            answer = io.BytesIO(await reader.read())
        finally:
            writer.close()
        status = int(answer.readline().split()[1])
        fields = parse_headers(answer)
        return Answer(status, fields["RateLimit"] or "", fields["Retry-After"] or "", answer.read())

    def open_stream(self) -> tuple[int, socket.socket]:
        """Request ``/stream``; return the status, and the connection after the first part of the body."""
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: test\r\n\r\n")
        received = b""
        while len(received) < 4096:
            part = connection.recv(4096)
            received += part
            if b" 200 " not in received[:20] or not part:
                break
        return int(received.split()[1]), connection


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
