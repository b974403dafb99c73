"""A Redis of the tests' own: on the loopback, on a free port, storing nothing, gone afterwards."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import redis

PATIENCE_S = 60.0


@dataclass(frozen=True)
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=PATIENCE_S)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While it is entered, the server is there and does nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_until_it_answers(process, port)
        yield RedisServer(process, port)
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port) as client:
            client.ping()
            return
        time.sleep(0.02)
    raise RuntimeError(f"redis-server did not answer on port {port}")
