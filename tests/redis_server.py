"""A private Redis server: on the loopback, on a free port, without persistence, ended after the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

PATIENCE_S = 60.0
# Set the variable to test another version, or another server of the same protocol.
PROGRAM = os.environ.get("FOREBAY_REDIS_SERVER", "redis-server")
# A cluster's nodes connect to each other on their port plus this.
BUS_OFFSET = 10_000


@dataclass(frozen=True)
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments for a client."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, socket_timeout=PATIENCE_S, **self.options)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the server's process within the block: it accepts connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(*arguments: str, port: int | None = None, **options: Any) -> Iterator[RedisServer]:
    """Start one more server. `options` go to its clients."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            server = stack.enter_context(_begun(arguments, port or free_port(), options))
            # The server ends at once if another process has taken the port meanwhile.
            if port or server.process.poll() is None:
                break
        assert server.process.poll() is None, f"{PROGRAM} has ended"
        yield server


@contextlib.contextmanager
def _begun(arguments: tuple[str, ...], port: int, options: dict[str, Any]) -> Iterator[RedisServer]:
    ports = ("--port", "0", "--tls-port", str(port)) if options.get("ssl") else ("--port", str(port))
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [PROGRAM, "--dir", folder.name, *ports, *arguments, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        server = RedisServer(process, port, options)
        until(lambda: process.poll() is not None or answers(server), f"{PROGRAM} answers on port {port}")
        yield server
    finally:
        process.kill()
        process.wait()
        folder.cleanup()


def free_port(highest: int = 65535) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= highest:
            return port


def free_cluster_port() -> int:
    while True:
        port = free_port(65535 - BUS_OFFSET)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + BUS_OFFSET))
            return port


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"this did not happen: {what}"
        time.sleep(0.02)


def answers(server: RedisServer) -> bool:
    with contextlib.suppress(redis.ConnectionError), server.client() as client:
        # A server that is loading its data is up as well.
        with contextlib.suppress(redis.BusyLoadingError):
            client.ping()
        return True
    return False
