"""Requests in several threads: caches of keys, gates that are replaced, warnings and log lines that come once."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import pytest
from redis.exceptions import RedisError, SlotNotCoveredError
from thread_helpers import race, together
from web_requests import asgi_scope, wsgi_environ

from forebay import Concurrency, FixedWindow, Store, StoreUnavailable
from forebay.redis.transport import cluster as transport
from forebay.redis.transport.timed_socket import UNTIL_S
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import ASGIMiddleware, ClientAddress, Gate, Rule, WSGIMiddleware, denials
from forebay.web.native_requests import PeerKey

ROUNDS: Final = 150


class Reversed(PeerKey):
    """Its keys exist nowhere else, so that a key that the cache drops ends."""

    def __init__(self) -> None:
        super().__init__(None)

    def key_of(self, peer: str, field: str | None) -> str:
        return peer[::-1]


def test_keys_of_peers_are_right_while_threads_fill_and_empty_their_cache() -> None:
    key_of = Reversed()

    def ask() -> None:
        for number in range(60_000):
            request = SimpleNamespace(peer=f"peer {number % 5000}")
            assert key_of(request) == request.peer[::-1]

    together(ask, ask, ask)


def one_for_all(request: Any) -> str:
    return "k"


def start_nothing(status: str, headers: Any, exc_info: Any = None) -> Any:
    return None


def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b""]


def test_gate_is_replaced_while_wsgi_requests_come(store: Store) -> None:
    window = FixedWindow(store, "w", "1000000/hour")
    app = WSGIMiddleware(answer, [Rule(window, key=one_for_all)])

    def replace() -> None:
        for _ in range(ROUNDS):
            app.gate = Gate([Rule(window, key=one_for_all)])

    def ask() -> None:
        environ = wsgi_environ()
        for _ in range(20 * ROUNDS):
            assert list(app(environ, start_nothing)) == [b""]

    together(replace, replace, ask, ask)
    assert window.peek("k").remaining < 1_000_000


def test_gate_of_an_asgi_application_is_replaced_as_a_whole(store: Store) -> None:
    """A request of a gate with held permits needs another way through the middleware than one without."""
    window, held = FixedWindow(store, "w", "1000000/hour"), Concurrency(store, "held", 64)
    rules = [Rule(window, key=one_for_all)], [Rule(held, key=one_for_all)]
    gates = [Gate(one, encoded=True) for one in rules]
    handled = [0, 0]

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        handled[scope["me"]] += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = ASGIMiddleware(respond, rules[0])

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        pass

    def replace() -> None:
        for turn in range(10 * ROUNDS):
            app.gate = gates[turn % 2]

    async def ask(me: int) -> None:
        for _ in range(10 * ROUNDS):
            await app(asgi_scope(me=me), receive, send)

    together(replace, lambda: asyncio.run(ask(0)), lambda: asyncio.run(ask(1)))
    assert handled == [10 * ROUNDS] * 2
    assert held.peek("k").remaining == 64


def test_paths_without_a_request_are_warned_of_once(store: Store) -> None:
    window = FixedWindow(store, "w", "1000000/hour")

    def make() -> Gate:
        gate = Gate([Rule(window, path="/api/*", key=one_for_all)], client=one_for_all)
        for _ in range(990):
            assert gate.enter(other) is None
        return gate

    def enter(gate: Gate) -> None:
        for _ in range(30):
            gate.enter(other)

    other: Any = SimpleNamespace(methods=("GET",), paths=("/v1/api",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rounds = sum(1 for _ in race(ROUNDS // 10, make, enter, enter, enter))
    assert len(caught) == rounds


def test_error_that_all_requests_repeat_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> StoreUnavailable:
        monkeypatch.setattr(denials, "_log_turns", Seldom(denials.LOG_EVERY_S))
        caplog.clear()
        return StoreUnavailable("away")

    def log(error: StoreUnavailable) -> None:
        denials.log_for_operator(503, error)

    with caplog.at_level(logging.ERROR, "forebay.web"):
        for _ in race(ROUNDS, make, log, log, log):
            assert len(caplog.messages) == 1


class LostCluster:
    """A cluster's client that knows no owner of any slot. Counts its refreshes."""

    def __init__(self) -> None:
        self.refreshes: list[float] = []
        self.nodes_manager = SimpleNamespace(initialize=lambda: self.refreshes.append(UNTIL_S.get()))

    def get_node_from_key(self, key: bytes) -> Any:
        raise SlotNotCoveredError("no owner")


def fail(cluster: transport.Cluster) -> None:
    UNTIL_S.set(0.0)
    try:
        with pytest.raises(RedisError):
            cluster.execute_command("EVALSHA", "sha", 1, b"k")
    finally:
        UNTIL_S.set(math.inf)


def test_threads_whose_calls_fail_start_one_refresh_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine may stop a thread until a further refresh would be due.
    monkeypatch.setattr(transport, "REFRESH_EVERY_S", math.inf)
    for cluster, _ in race(ROUNDS, lambda: transport.Cluster(LostCluster), fail, fail, fail):
        own = cluster._own()
        assert own.refresher is not None
        own.refresher.join()
        assert len(own.cluster.refreshes) == 1


def test_refresh_has_no_deadline_of_the_call_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On free-threaded CPython 3.14 a thread begins with its starter's context, as here on every version."""

    class Inheriting(threading.Thread):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._begin_in = contextvars.copy_context()

        def run(self) -> None:
            self._begin_in.run(super().run)

    monkeypatch.setattr(transport.threading, "Thread", Inheriting)
    cluster = transport.Cluster(LostCluster)
    fail(cluster)
    own = cluster._own()
    assert own.refresher is not None
    own.refresher.join()
    assert own.cluster.refreshes == [math.inf]


def test_clients_addresses_are_right_in_all_threads(store: Store, clock: ManualClock) -> None:
    """`ClientAddress` behind proxies, whose cache has the field, too."""
    address = ClientAddress(trusted_proxies=["10.0.0.0/8"], header="X-Forwarded-For")

    def ask() -> None:
        for number in range(10_000):
            client = f"192.0.{number // 250}.{number % 250}"
            request = SimpleNamespace(peer="10.0.0.1", header=lambda name, client=client: client)
            assert address(request) == client

    together(ask, ask)
