"""Load shedders under gunicorn: a worker that is killed in the middle of a request leaves no slot behind."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sheds_app import WORKERS, Shedders
from shop_server import wait_until

from forebay import Store
from forebay.shedding.adaptive import SAMPLES
from forebay.shedding.samples import Samples

HERE = Path(__file__).resolve().parent


@pytest.fixture
def port(name: str, tmp_path: Path) -> Iterator[int]:
    """The port of gunicorn with sync workers, on this host."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        listening.set_inheritable(True)
        command = [
            *(sys.executable, "-m", "gunicorn", "--chdir", str(HERE), "--bind", f"fd://{listening.fileno()}"),
            *("--workers", str(WORKERS), "--timeout", "600", "--graceful-timeout", "1", "sheds_app:make_app()"),
        ]
        environ = os.environ | {"SHEDS_STORE": name, "SHEDS_PIDS": str(tmp_path)}
        gunicorn = subprocess.Popen(command, env=environ, pass_fds=[listening.fileno()], start_new_session=True)
        try:
            yield listening.getsockname()[1]
        finally:
            gunicorn.send_signal(signal.SIGTERM)
            gunicorn.wait()


def ask(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_killed_worker_leaves_no_slot_behind(port: int, name: str, tmp_path: Path) -> None:
    assert ask(port, "/") == 200
    with Store(name, keys=100) as store:
        shedders = Shedders(store)
        samples = Samples.of(shedders.backend.words.load(SAMPLES)).samples
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for connection in hanging:
            connection.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two requests hang")
        assert shedders.workers.busy == shedders.backend.in_flight == 2
        # The third slot is reserved, and a worker is left for it.
        assert ask(port, "/") == 503
        assert ask(port, "/pay") == 200
        for pid in tmp_path.iterdir():
            with suppress(ProcessLookupError):
                os.kill(int(pid.name), signal.SIGKILL)
        wait_until(lambda: shedders.workers.busy == shedders.backend.in_flight == 0, "the workers' end")
        assert ask(port, "/") == 200
        for connection in hanging:
            connection.close()
        # /pay and / gave one each. Requests that were killed gave none, nor did the one that was shed.
        assert Samples.of(shedders.backend.words.load(SAMPLES)).samples == samples + 2
