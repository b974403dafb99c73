"""Leases that are renewed while a request waits for its turn, is read or is sent: no other one gets its permit."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from held_permits import Held, WatchedClock
from web_requests import CLIENT, Kind, Wire, asgi_scope, call_wsgi, wsgi_environ

from forebay import Concurrency, MinInterval, Store, TokenBucket
from forebay.shedding import ReservedSlots
from forebay.testing import ManualClock
from forebay.web import ASGIMiddleware, BodyLimit, ByteRate, Rule, Shed, WSGIMiddleware, everyone

LEASE_S = 3


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def store(clock: WatchedClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


@pytest.fixture(params=["permit", "slot of a shed"])
def held(request: pytest.FixtureRequest, clock: WatchedClock, store: Store) -> Held:
    if request.param == "permit":
        limiter = Concurrency(store, "held", 1, lease=LEASE_S)
        return Held(clock, limiter, Rule(limiter, key=everyone))
    slots = ReservedSlots(store, "slots", 1, {"critical": 0, "default": 0}, lease=LEASE_S)
    return Held(clock, slots.limiters[0], Shed(slots, priority=lambda request: "critical"), key="all")


@pytest.fixture
def slow(store: Store) -> TokenBucket:
    """A byte each ten seconds: far longer than the lease."""
    return TokenBucket(store, "slow", "6 B/minute", burst=1)


def app(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return iter([b"abc"])


def sent_by(site: Any, held: Held, **options: Any) -> bytes:
    """The body that a server gets, while `held` is watched."""
    body = site(wsgi_environ(**options), lambda status, fields, exc_info=None: None)
    held.watch()
    got = b"".join(body)
    body.close()
    return got


def test_lease_is_renewed_while_a_piece_of_a_response_waits(held: Held, slow: TokenBucket) -> None:
    site = WSGIMiddleware(app, [held.rule, ByteRate(slow, most_wait="1 minute")])
    assert sent_by(site, held) == b"abc"
    assert held.ended()


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_leases_of_other_layers_are_renewed_while_a_piece_waits(held: Held, slow: TokenBucket, order: str) -> None:
    layers: list[Any] = [held.rule, ByteRate(slow)]
    site: Any = app
    for layer in layers if order == "inside" else layers[::-1]:
        site = WSGIMiddleware(site, [layer])
    assert sent_by(site, held) == b"abc"
    assert held.ended()


def test_lease_is_renewed_while_written_parts_wait(held: Held, slow: TokenBucket) -> None:
    def writing(environ: Any, start_response: Any) -> Iterable[bytes]:
        held.watch()
        start_response("200 OK", [("Content-Type", "text/plain")])(b"abc")
        return [b"d"]

    assert call_wsgi(WSGIMiddleware(writing, [held.rule, ByteRate(slow)])).body == b"abcd"
    assert held.ended()


def test_lease_is_renewed_with_each_written_part(held: Held, clock: WatchedClock) -> None:
    def writing(environ: Any, start_response: Any) -> Iterable[bytes]:
        held.watch()
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        for _ in range(10):
            clock.advance(LEASE_S / 2)
            write(b"a")
        return []

    assert call_wsgi(WSGIMiddleware(writing, [held.rule])).body == b"a" * 10
    assert held.ended()


READS: dict[str, Callable[[Any], bytes]] = {
    "whole": lambda body: body.read(),
    "whole, as None": lambda body: body.read(None),
    "by its length": lambda body: body.read(40_000),
    "by more than its length": lambda body: body.read(50_000),
    "in large parts": lambda body: b"".join(iter(lambda: body.read(20_000), b"")),
    "line by line": lambda body: b"".join(body),
    "in lines": lambda body: b"".join(body.readlines()),
    "in parts of lines": lambda body: b"".join(iter(lambda: body.readline(15_000), b"")),
    "through a buffer": lambda body: io.BufferedReader(body, 10_000).read(),
    "by lines of a buffer": lambda body: b"".join(io.BufferedReader(body, 10_000)),
    "as text": lambda body: io.TextIOWrapper(io.BufferedReader(body, 10_000)).read().encode(),
}
DATA = (b"x" * 19_999 + b"\n") * 2


@pytest.mark.parametrize("how", READS)
def test_lease_is_renewed_while_a_metered_body_is_read(held: Held, store: Store, how: str) -> None:
    uploads = TokenBucket(store, "uploads", "1 kB/second", burst=1000)
    got = []

    def reading(environ: Any, start_response: Any) -> Iterable[bytes]:
        held.watch()
        got.append(READS[how](environ["wsgi.input"]))
        start_response("200 OK", [])
        return [b""]

    rules = [held.rule, ByteRate(uploads, bodies="requests", most_wait="1 minute"), BodyLimit(60_000)]
    call_wsgi(WSGIMiddleware(reading, rules), method="POST", body=DATA)
    assert got == [DATA]
    assert held.ended()


class SlowBody(io.BytesIO):
    """A body whose client sends 4 KiB in half a lease."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(DATA)
        self.clock = clock

    def read(self, size: int | None = -1) -> bytes:
        return self._came(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        return self._came(super().readline(size))

    def _came(self, part: bytes) -> bytes:
        self.clock.advance(LEASE_S / 2 * len(part) / 4096)
        return part

    def server_s(self) -> str:
        return "of the server"


@pytest.mark.parametrize("how", READS)
def test_lease_is_renewed_while_a_client_sends_its_body(held: Held, clock: WatchedClock, how: str) -> None:
    got = []

    def reading(environ: Any, start_response: Any) -> Iterable[bytes]:
        held.watch()
        got.append(READS[how](environ["wsgi.input"]))
        got.append(environ["wsgi.input"].server_s())
        assert not hasattr(environ["wsgi.input"], "read1")
        start_response("200 OK", [])
        return [b""]

    site = WSGIMiddleware(reading, [held.rule])
    environ = {**wsgi_environ(method="POST", body=DATA), "wsgi.input": SlowBody(clock)}
    for _ in site(environ, lambda status, fields, exc_info=None: None):
        pass
    assert got == [DATA, "of the server"]
    assert held.ended()


def test_read_ends_where_the_server_returns_less(store: Store) -> None:
    """As a server does that can't tell the end of a body: one more read would wait for the client."""

    class Unended:
        def __init__(self) -> None:
            self.parts = [b"a" * 4096, b"b" * 100]

        def read(self, size: int) -> bytes:
            return self.parts.pop(0)[:size]

    got = []

    def reading(environ: Any, start_response: Any) -> Iterable[bytes]:
        got.append(environ["wsgi.input"].read(8192))
        start_response("200 OK", [])
        return [b""]

    site = WSGIMiddleware(reading, [Rule(Concurrency(store, "held", 1))])
    list(site({**wsgi_environ(method="POST"), "wsgi.input": Unended()}, lambda *_: print))
    assert got == [b"a" * 4096 + b"b" * 100]


def test_body_without_a_lease_is_the_servers(store: Store) -> None:
    def reading(environ: Any, start_response: Any) -> Iterable[bytes]:
        assert type(environ["wsgi.input"]) is io.BytesIO
        start_response("200 OK", [])
        return [b""]

    call_wsgi(WSGIMiddleware(reading, [Rule(TokenBucket(store, "api", "5/second"), charge_on={200})]))


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_lease_is_renewed_while_a_rule_delays(held: Held, store: Store, kind: Kind) -> None:
    gap = MinInterval(store, "gap", "1 minute")
    rules = [held.rule, Rule(gap, key=everyone, delay="1 hour")]
    gap.reserve("everyone")
    if kind == "wsgi":
        site: Any = WSGIMiddleware(app, rules)
        held.watch()
        assert call_wsgi(site).body == b"abc"
    else:
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        held.watch()
        asyncio.run(ASGIMiddleware(asgi, rules)(asgi_scope(), wire.receive, wire.send))
        assert wire.answered().body == b"abc"
    assert held.ended()


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"abc"})


def test_lease_of_an_outer_layer_is_renewed_while_a_rule_delays(held: Held, store: Store) -> None:
    gap = MinInterval(store, "gap", "1 minute")
    gap.reserve(CLIENT)
    site = WSGIMiddleware(WSGIMiddleware(app, [Rule(gap, delay="1 hour")]), [held.rule])
    held.watch()
    assert call_wsgi(site).body == b"abc"
    assert held.ended()


def test_several_turns_are_waited_for_in_slices(held: Held, store: Store) -> None:
    rules = [Rule(MinInterval(store, f"gap {n}", f"{n} minutes"), key=everyone, delay="1 hour") for n in (1, 2, 3)]
    site = WSGIMiddleware(app, [held.rule, *rules])
    assert call_wsgi(site).body == b"abc"
    held.watch()
    assert call_wsgi(site).body == b"abc"
    assert held.ended()


def test_shortest_lease_is_long_enough_to_be_renewed(store: Store, slow: TokenBucket, clock: WatchedClock) -> None:
    held = Concurrency(store, "shortest", 1, lease=1e-9)
    site = WSGIMiddleware(app, [Rule(held), ByteRate(slow)])
    assert call_wsgi(site).body == b"abc"
    assert clock.now() == 20


def test_a_body_whose_leases_are_renewed_can_be_copied(held: Held) -> None:
    def copying(environ: Any, start_response: Any) -> Iterable[bytes]:
        copied = copy.copy(environ["wsgi.input"])
        start_response("200 OK", [])
        return [copied.read()]

    assert call_wsgi(WSGIMiddleware(copying, [held.rule]), method="POST", body=b"abc").body == b"abc"


def test_input_of_any_server_can_be_buffered(held: Held) -> None:
    """PEP 3333 has four methods, and some servers' inputs have no others."""

    class Input:
        def __init__(self) -> None:
            stream = io.BytesIO(DATA)
            self.read, self.readline = stream.read, stream.readline

    def reading(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        with io.TextIOWrapper(io.BufferedReader(environ["wsgi.input"])) as lines:
            return [line.encode() for line in lines]

    site = WSGIMiddleware(reading, [held.rule])
    body: Any = site({**wsgi_environ(), "wsgi.input": Input()}, lambda *_: print)  # type: ignore[arg-type,return-value]
    assert b"".join(body) == DATA


def test_request_without_an_input_is_handled(held: Held, slow: TokenBucket) -> None:
    """As of a test's client, or a server that leaves it out although PEP 3333 has it."""
    environ = wsgi_environ()
    del environ["wsgi.input"]
    site = WSGIMiddleware(app, [held.rule, ByteRate(slow, bodies="requests"), BodyLimit(10)])
    body: Any = site(environ, lambda status, fields, exc_info=None: None)
    assert b"".join(body) == b"abc"
    body.close()
    assert held.is_free
