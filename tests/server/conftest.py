from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from decision_server import HEAD, MILD, Both, DecisionServer
from redis_server import RedisServer, redis_server

from forebay import Store
from forebay.testing import ManualClock


@pytest.fixture
def store_name() -> Iterator[str]:
    name = f"test-server-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    Store.unlink(name, missing_ok=True)


@pytest.fixture
def serve(store_name: str, tmp_path: Path) -> Iterator[Callable[..., DecisionServer]]:
    """Start servers of the rules in a text, over the store `store_name`; all of them end with the test."""
    with ExitStack() as servers:

        def start(
            rules: str, *options: str, head: str = HEAD, name: str = "limits", store: str = "", **listen: Any
        ) -> DecisionServer:
            file = tmp_path / f"{name}.toml"
            file.write_text(f'store = "{store or f"shm:///{store_name}?keys=10000"}"\n{head}{rules}')
            return servers.enter_context(DecisionServer(file, *options, **listen))

        yield start


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecisionServer]:
    """A server for all tests of a module: none of them leaves anything that another one finds."""
    name = f"test-server-{os.getpid()}-{secrets.token_hex(4)}"
    file = tmp_path_factory.mktemp("patient") / "limits.toml"
    file.write_text(f'store = "shm:///{name}?keys=1000"\n{HEAD}{MILD}')
    try:
        with DecisionServer(file, "--idle", "1") as server:
            yield server
            assert server.stop() == 0
    finally:
        Store.unlink(name, missing_ok=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(shared: RedisServer) -> RedisServer:
    """Empty, with the scripts forgotten."""
    with shared.client() as client:
        client.flushall()
        client.script_flush()
    return shared


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """For a test that ends or stops it."""
    with redis_server() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def both(tmp_path: Path, clock: ManualClock) -> Iterator[Callable[[str], Both]]:
    """The rules in a text, by the server's code and by Python's gate, at the times of one clock."""
    with ExitStack() as stores:

        def make(rules: str) -> Both:
            served, own = (stores.enter_context(Store.private(keys=4096, clock=clock)) for _ in range(2))
            return Both(tmp_path / "limits.toml", rules, served, own)

        yield make


class _App(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.path.encode()
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def app() -> Iterator[int]:
    """The port of an application, which returns the path of a request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _App)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()
