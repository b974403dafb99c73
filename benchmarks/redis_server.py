"""A private Redis server: on the loopback, on a free port, without persistence, ended after the run."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import redis


@contextlib.contextmanager
def redis_on_a_free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    executable = shutil.which("redis-server")
    if executable is None:
        raise FileNotFoundError("redis-server is not installed; ci/bench installs it")
    # Not on the client's core.
    first_core = min(os.sched_getaffinity(0))
    server = subprocess.Popen(
        [executable, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {first_core}),
    )
    # Needed if the run is interrupted before any teardown.
    atexit.register(server.terminate)
    try:
        _wait_until_it_answers(port, server)
        yield port
    finally:
        server.terminate()
        server.wait(10)
        atexit.unregister(server.terminate)


def _wait_until_it_answers(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port) as client:
            client.ping()
            return
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"redis-server did not answer on port {port}")
