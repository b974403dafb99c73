"""The servers that figures.py measures: each a process on a free loopback port, or several."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The limit of figures.py, as Envoy's ratelimit has it.
DESCRIPTORS = """
domain: figures
descriptors:
  - key: user
    rate_limit:
      unit: second
      requests_per_unit: 100000000
"""


class Server:
    """A process that listens to a port."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self._process = port, process

    def cpu_s(self) -> float:
        """The CPU time of the process, without the client's."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(port: int, *command: str | Path, **environment: str) -> Iterator[Server]:
    process = subprocess.Popen(
        list(map(str, command)), env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                time.sleep(0.02)
            else:
                break
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} has ended with {process.returncode}")
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def ratelimit(program: Path, directory: Path) -> Iterator[Server]:
    """Envoy's ratelimit with a Redis of its own."""
    redis_port, port = free_port(), free_port()
    (directory / "ratelimit" / "config").mkdir(parents=True)
    (directory / "ratelimit" / "config" / "figures.yaml").write_text(DESCRIPTORS)
    settings = {
        "USE_STATSD": "false", "LOG_LEVEL": "error", "REDIS_SOCKET_TYPE": "tcp", "REDIS_URL": f"127.0.0.1:{redis_port}",
        "RUNTIME_ROOT": str(directory), "RUNTIME_SUBDIRECTORY": "ratelimit", "RUNTIME_WATCH_ROOT": "false",
        "GRPC_HOST": "127.0.0.1", "GRPC_PORT": str(port), "HOST": "127.0.0.1", "PORT": str(free_port()),
        "DEBUG_HOST": "127.0.0.1", "DEBUG_PORT": str(free_port()),
    }  # fmt: skip
    redis = running(redis_port, "redis-server", "--port", str(redis_port), "--save", "")
    with redis, running(port, program, **settings) as server:
        yield server


@contextmanager
def gubernator(program: Path) -> Iterator[Server]:
    """A gubernator without peers."""
    port, members = free_port(), f"127.0.0.1:{free_port()}"
    address = f"127.0.0.1:{port}"
    settings = {
        "GUBER_GRPC_ADDRESS": address, "GUBER_ADVERTISE_ADDRESS": address, "GUBER_LOG_LEVEL": "error",
        "GUBER_HTTP_ADDRESS": f"127.0.0.1:{free_port()}", "GUBER_MEMBERLIST_ADDRESS": members,
        "GUBER_MEMBERLIST_KNOWN_NODES": members,
    }  # fmt: skip
    with running(port, program, **settings) as server:
        yield server
