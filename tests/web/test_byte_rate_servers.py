"""Byte rates under real servers: bodies of all workers together go no faster than one limiter allows."""

from __future__ import annotations

import socket
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest
from bytes_app_limits import AFTER, BURST, KEYS, RATE, SIZE
from middleware_server import UVICORN, MiddlewareServer
from shop_server import PATIENCE_S, wait_until

from forebay import Store

NS = 1_000_000_000
AT_ONCE = 3


class Transfer(NamedTuple):
    status: int
    worker: str
    count: int


def transfers(site: MiddlewareServer, store: Store, path: str) -> list[Transfer]:
    """Send requests at once. At no time have more bytes come than the limiter allows until then, by the store's clock.

    Bytes that the application reads are counted when it has read them all.
    """
    begin_ns = store.now_ns()
    counts = [0] * AT_ONCE
    finished: list[Transfer] = []
    excess: list[str] = []

    def check() -> None:
        # What the clients count has been sent before, and the time is read after that.
        metered = sum(max(count - AFTER, 0) for count in counts)
        elapsed_ns = store.now_ns() - begin_ns
        if metered > BURST + RATE * elapsed_ns // NS + 1:
            excess.append(f"{metered} bytes after {elapsed_ns} ns")

    def send_one(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
        body = b"x" * SIZE if path == "/upload" else None
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        if body is not None:
            counts[number] = SIZE
            check()
        while part := answer.read1(65536):
            counts[number] += len(part)
            check()
        worker, read = answer.headers["X-Worker"], answer.headers["X-Read"]
        assert read == str(SIZE)
        finished.append(Transfer(answer.status, worker, counts[number]))
        connection.close()

    threads = [threading.Thread(target=send_one, args=(number,)) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert excess == []
    return finished


@pytest.mark.parametrize("server", ["sync", "gthread", "gevent", UVICORN, "uvicorn"])
def test_bodies_of_all_workers_share_one_rate(server: str, store_name: str, tmp_path: Path) -> None:
    with (
        MiddlewareServer(tmp_path, server, store_name=store_name, app="bytes_app") as site,
        Store(store_name, keys=KEYS) as store,
    ):
        site.wait_made(site.workers)
        for path in ("/body", "/file", "/upload"):
            finished = transfers(site, store, path)
            assert [(one.status, one.count) for one in finished] == [(200, SIZE)] * AT_ONCE
            if server == "sync":
                assert len({one.worker for one in finished}) == AT_ONCE, "each worker has sent one"


@pytest.mark.parametrize("server", [UVICORN, "uvicorn"])
def test_disconnect_ends_a_body_that_waits(server: str, store_name: str, tmp_path: Path) -> None:
    with MiddlewareServer(tmp_path, server, store_name=store_name, app="bytes_app", workers=1) as site:
        site.wait_made(1)

        def ask() -> tuple[int, socket.socket]:
            connection = socket.create_connection(("127.0.0.1", site.port), PATIENCE_S)
            connection.sendall(b"GET /stuck HTTP/1.1\r\nHost: test\r\n\r\n")
            return int(connection.recv(4096).split()[1]), connection

        def is_answered_by(status: int) -> bool:
            got, connection = ask()
            if got == status == 200:
                connections.append(connection)
            else:
                connection.close()
            return got == status

        connections: list[socket.socket] = []
        wait_until(lambda: is_answered_by(200), "the first is admitted")
        wait_until(lambda: is_answered_by(503), "a body waits, and no other is admitted")
        connections.pop().close()
        wait_until(lambda: is_answered_by(200), "the body has ended, and another one is admitted")
        connections.pop().close()
