"""Byte rates: bodies that are sent and read at the rate of a limiter, after a free first part."""

from __future__ import annotations

import asyncio
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest
from web_requests import CLIENT, Kind, Wire, asgi_scope, call_asgi, call_wsgi, wsgi_environ

from forebay import (
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    InvalidRate,
    LimitsDisabledWarning,
    MinInterval,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.redis import RedisStore
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import (
    AddressList,
    ASGIMiddleware,
    BodyLimit,
    ByteRate,
    ClientAddress,
    Denial,
    Request,
    Rule,
    WSGIMiddleware,
    denials,
    everyone,
    turns,
)

KIB, MIB = 2**10, 2**20
NS = 1_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


@pytest.fixture
def slow(store: Store) -> TokenBucket:
    """Ten bytes a second, of which ten may go at once."""
    return TokenBucket(store, "slow", "10 B/second")


class Sent(NamedTuple):
    """A part of a body, and the time at which the server got it."""

    part: bytes
    at_s: float


class Download:
    """An application that answers with `parts`, behind the middleware."""

    def __init__(self, kind: Kind, clock: ManualClock, rules: Iterable[Any], **options: Any) -> None:
        self.kind, self.clock = kind, clock
        self.parts: list[bytes] = []
        self.status = 200
        self.handled = 0
        self.on_part: Callable[[], object] = lambda: None
        """Called with each part that the server gets."""
        self.fields: list[tuple[str, str]] = []
        self.got_status = 0
        made: Any = WSGIMiddleware if kind == "wsgi" else ASGIMiddleware
        self.app: Any = made(self._wsgi if kind == "wsgi" else self._asgi, rules, **options)

    def __call__(self, *parts: bytes, **options: Any) -> list[Sent]:
        """The parts that the server gets of a response."""
        self.parts = list(parts)
        return (self._call_wsgi if self.kind == "wsgi" else self._call_asgi)(**options)

    def _call_wsgi(self, **options: Any) -> list[Sent]:
        def start(status: str, fields: list[tuple[str, str]], exc_info: Any = None) -> Any:
            self.got_status, self.fields = int(status[:3]), fields

        response = self.app(wsgi_environ(**options), start)
        try:
            return [self._sent(part) for part in response]
        finally:
            if hasattr(response, "close"):
                response.close()

    def _call_asgi(self, **options: Any) -> list[Sent]:
        sent = []
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})

        async def send(message: Any) -> None:
            await wire.send(message)
            if message["type"] == "http.response.body":
                sent.append(self._sent(message["body"]))

        asyncio.run(self.app(asgi_scope(**options), wire.receive, send))
        answered = wire.answered()
        self.got_status, self.fields = answered.status, answered.fields
        more = [message.get("more_body", False) for message in wire.sent[1:]]
        assert more == [True] * (len(more) - 1) + [False]
        return sent

    def _sent(self, part: bytes) -> Sent:
        self.on_part()
        return Sent(part, self.clock.now())

    def _wsgi(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        self.handled += 1
        start_response(f"{self.status} Answer", [("Content-Length", str(sum(map(len, self.parts))))])
        return iter(self.parts)

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.handled += 1
        fields = [(b"content-length", str(sum(map(len, self.parts))).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": fields})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has each line, although another test has written it less than a minute ago."""
    monkeypatch.setattr(denials, "_log_turns", Seldom())


MakeDownload = Callable[..., Download]


@pytest.fixture(params=["wsgi", "asgi"])
def download(request: pytest.FixtureRequest, clock: ManualClock) -> MakeDownload:
    return lambda *rules, **options: Download(request.param, clock, rules, **options)


def whole(sent: list[Sent]) -> bytes:
    return b"".join(part for part, _ in sent)


def test_w22_first_ten_mebibytes_are_free_and_the_rest_goes_at_one_a_second(
    download: MakeDownload, store: Store, clock: ManualClock
) -> None:
    bucket = TokenBucket(store, "downloads", "1 MiB/second", burst=64 * KIB)
    got = download(ByteRate(bucket, after="10 MiB"))
    body = os.urandom(13 * MIB)
    sent = got(*[body[at : at + 300_000] for at in range(0, len(body), 300_000)])
    assert whole(sent) == body
    assert dict(got.fields)["Content-Length" if got.kind == "wsgi" else "content-length"] == str(len(body))
    count = 0
    for part, at_s in sent:
        count += len(part)
        metered = count - 10 * MIB
        # In no span more than the burst and the rate allow, and no byte later than that.
        assert metered <= 64 * KIB + 1 + MIB * at_s
        assert at_s <= max(metered, 0) / MIB
        assert at_s == 0 or metered > 64 * KIB
    assert clock.now() == pytest.approx(3 - 64 / 1024, abs=1e-6)


def test_bodies_of_a_key_share_its_rate_and_other_keys_have_their_own(
    store: Store, slow: TokenBucket, clock: ManualClock
) -> None:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return iter([b"x" * 20])

    site = WSGIMiddleware(app, [ByteRate(slow)])
    one, other, third = (iter(site(wsgi_environ(client=c), lambda *_: print)) for c in (CLIENT, CLIENT, "192.0.2.9"))
    assert [(len(next(each)), clock.now()) for each in (one, other, one, other)] == [
        (10, 0.0),
        (10, 1.0),
        (10, 2.0),
        (10, 3.0),
    ]
    assert (len(next(third)), clock.now()) == (10, 3.0)


def test_parts_are_split_at_the_free_bytes_the_burst_and_64_kib(
    download: MakeDownload, store: Store, slow: TokenBucket
) -> None:
    fast = TokenBucket(store, "fast", "1 MB/second")
    sent = download(ByteRate(slow, after=7, path="/slow"), ByteRate(fast, path="/fast"))
    sizes = [len(part) for part, _ in sent(b"x" * 30, b"", b"y" * 5, path="/slow") if part]
    assert sizes == [7, 10, 10, 3, 5]
    assert [len(part) for part, _ in sent(b"x" * 100_000, path="/fast") if part] == [65536, 34464]
    # A rate of few bytes: no piece waits for more than a second.
    few = download(ByteRate(TokenBucket(store, "few", "3 B/second", burst=1000)))
    assert [len(part) for part, _ in few(b"x" * 8) if part] == [3, 3, 2]
    least = download(ByteRate(TokenBucket(store, "least", "30 B/minute", burst=2)))
    assert [len(part) for part, _ in least(b"x" * 2) if part] == [1, 1]


def test_several_rates_hold_together(download: MakeDownload, store: Store, slow: TokenBucket) -> None:
    total = TokenBucket(store, "total", "5 B/second", burst=5)
    got = download(ByteRate(slow), ByteRate(total, after=20, key=everyone))
    sent = [(len(part), at_s) for part, at_s in got(b"x" * 40) if part]
    assert sent == [(10, 0.0), (10, 1.0), (5, 1.5), (5, 2.5), (5, 3.5), (5, 4.5)]


def test_responses_without_a_body_are_free(download: MakeDownload, slow: TokenBucket, clock: ManualClock) -> None:
    got = download(ByteRate(slow))
    got(b"x" * 100, method="HEAD")
    for got.status in (204, 304):
        got(b"x" * 100)
    got.status = 200
    got()
    assert (slow.peek(CLIENT).remaining, clock.now()) == (10, 0.0)


@pytest.mark.parametrize("limit", ["rate", "size"])
def test_body_in_answer_to_head_never_reaches_a_server_of_wsgi(slow: TokenBucket, limit: str) -> None:
    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        write = start_response("200 OK", [("Content-Length", "100")])
        write(b"x" * 10)
        try:
            for _ in range(9):
                yield b""
                yield b"x" * 10
                made.append(10)
        finally:
            closed.append(True)

    made: list[int] = []
    closed: list[bool] = []
    site = WSGIMiddleware(app, [ByteRate(slow) if limit == "rate" else BodyLimit(5, responses=True)])
    answer = call_wsgi(site, method="HEAD")
    assert (answer.status, answer["content-length"], answer.body) == (200, "100", b"")
    assert (made, closed) == ([], [True])


def test_requests_that_a_rate_is_not_for_are_free(
    download: MakeDownload, slow: TokenBucket, clock: ManualClock
) -> None:
    got = download(
        ByteRate(slow, path="/files/*", methods="GET", exempt=lambda request: request.header("X-Free") == "yes"),
        ByteRate(slow, path="/free", exempt=AddressList(CLIENT)),
    )
    got(b"x" * 100, path="/files/1", method="POST")
    got(b"x" * 100, path="/other")
    got(b"x" * 100, path="/free")
    got(b"x" * 100, path="/files/1", fields=[("X-Free", "yes")])
    assert clock.now() == 0.0
    got(b"x" * 30, path="/files/1")
    assert clock.now() == 2.0


def test_tiers_have_rates_of_their_own(
    download: MakeDownload, store: Store, slow: TokenBucket, clock: ManualClock
) -> None:
    pro = TokenBucket(store, "pro", "100 B/second")
    got = download(
        ByteRate(slow, tiers={"pro": pro, "internal": None}, tier=lambda request: request.header("X-Plan") or "free")
    )
    for plan, seconds in (("internal", 0.0), ("pro", 2.0), ("free", 29.0)):
        begin = clock.now()
        got(b"x" * 300, fields=[("X-Plan", plan)])
        assert clock.now() - begin == pytest.approx(seconds)


def test_request_bodies_are_read_at_the_rate(slow: TokenBucket, clock: ManualClock) -> None:
    reads: dict[str, Callable[[Any], Any]] = {
        "whole": lambda body: body.read(),
        "sizes": lambda body: body.read(25) + body.read(100) + body.read(0),
        "lines": lambda body: b"".join(body),
        "list of lines": lambda body: b"".join(body.readlines()),
        "one line": lambda body: body.readline(4) + body.readline() + body.read(None),
    }
    data = b"0123456\n" * 5
    for how, read in reads.items():
        got = []

        def app(environ: Any, start_response: Any, read: Any = read, got: Any = got) -> list[bytes]:
            got.append(read(environ["wsgi.input"]))
            start_response("200 OK", [("Content-Length", "100")])
            return [b"x" * 100]

        clock.advance(1)
        begin = clock.now()
        site = WSGIMiddleware(app, [ByteRate(slow, bodies="requests", after=10)])
        assert call_wsgi(site, method="POST", body=data).body == b"x" * 100
        assert (how, got, clock.now() - begin) == (how, [data], pytest.approx(2.0))


def test_line_without_an_end_is_read_in_pieces(store: Store) -> None:
    """A client that sends no end of line doesn't fill the memory with bytes whose turn hasn't come."""
    most = []

    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            most.append(size)
            return super().readline(size)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"%d" % len(environ["wsgi.input"].readline())]

    uploads = TokenBucket(store, "uploads", "1 MiB/second")
    site = WSGIMiddleware(app, [ByteRate(uploads, bodies="requests")])
    environ = wsgi_environ(method="POST") | {"wsgi.input": Endless(b"x" * 200_000)}
    assert list(site(environ, lambda *_: print)) == [b"200000"]  # type: ignore[arg-type,return-value]
    assert all(size is not None and 0 < size <= 65_536 for size in most)


def test_messages_of_a_request_are_received_at_the_rate(slow: TokenBucket, clock: ManualClock) -> None:
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            got.append((message["body"], clock.now()))
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 100})

    site = ASGIMiddleware(app, [ByteRate(slow, bodies="requests", after=7), BodyLimit(100)])
    assert call_asgi(site, method="POST", body=b"x" * 42).body == b"x" * 100
    assert [(len(body), round(at_s, 9)) for body, at_s in got] == [
        (7, 0.0),
        (7, 0.0),
        (7, 0.4),
        (7, 1.1),
        (7, 1.8),
        (7, 2.5),
    ]


def test_cancelled_call_loses_no_message() -> None:
    bucket = hourly()
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for is_due in (True, False, False, True):
            if is_due:
                bucket.reset(CLIENT)
            waiting = asyncio.ensure_future(receive())
            for _ in range(20):
                await asyncio.sleep(0)
            if waiting.done():
                got.append(waiting.result())
            waiting.cancel()

    parts = [{"type": "http.request", "body": body, "more_body": body == b"a"} for body in (b"a", b"b")]
    wire = Wire(*parts)
    site = ASGIMiddleware(app, [ByteRate(bucket, bodies="requests", most_wait="9 hours")])
    asyncio.run(site(asgi_scope(method="POST"), wire.receive, wire.send))  # type: ignore[arg-type]
    assert got == parts


def test_written_parts_wait_for_their_turn(slow: TokenBucket, clock: ManualClock) -> None:
    times = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [("Content-Type", "text/plain")])
        for _ in range(3):
            write(b"x" * 10)
            times.append(clock.now())
        return [b"y" * 10]

    site: Any = validator(WSGIMiddleware(validator(app), [ByteRate(slow)]))  # type: ignore[arg-type]
    assert call_wsgi(site).body == b"x" * 30 + b"y" * 10
    assert (times, clock.now()) == ([0.0, 1.0, 2.0], 3.0)


def test_files_are_read_in_parts_and_closed(slow: TokenBucket, clock: ManualClock) -> None:
    file = io.BytesIO(b"x" * 40)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return environ["wsgi.file_wrapper"](file, 25)

    environ = {**wsgi_environ(), "wsgi.file_wrapper": FileWrapper}
    response: Any = WSGIMiddleware(app, [ByteRate(slow)])(environ, lambda *_: print)
    assert not isinstance(response, FileWrapper)
    assert [len(piece) for piece in response] == [10, 10, 5, 10, 5]
    response.close()
    assert (file.closed, clock.now()) == (True, 3.0)


def test_extensions_that_send_files_are_hidden_and_refused(slow: TokenBucket) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(set(scope["extensions"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/etc/hostname"})

    extensions: dict[str, Any] = {f"http.response.{name}": {} for name in ("pathsend", "zerocopysend", "debug")}
    with pytest.raises(RuntimeError, match=r"bytes of this response are limited, and http.response.pathsend would"):
        call_asgi(ASGIMiddleware(app, [ByteRate(slow)]), extensions=extensions)
    assert seen == [{"http.response.debug"}]
    site = ASGIMiddleware(app, [ByteRate(slow, bodies="requests")])
    call_asgi(site, extensions=extensions)
    assert len(seen.pop()) == 3


def test_websockets_are_not_metered(slow: TokenBucket, clock: ManualClock) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": b"x" * 100})

    wire = Wire()
    scope = {**asgi_scope(), "type": "websocket"}
    asyncio.run(ASGIMiddleware(app, [ByteRate(slow)])(scope, wire.receive, wire.send))  # type: ignore[arg-type]
    assert (len(wire.sent), clock.now(), slow.peek(CLIENT).remaining) == (2, 0.0, 10)


# Waits


def hourly() -> TokenBucket:
    """Over the host's clock; after the first byte each one waits for an hour."""
    return TokenBucket(Store.private(keys=10), "hourly", "1 B/hour")


def test_disconnect_ends_the_wait_and_gives_the_booking_back() -> None:
    bucket = hourly()
    messages = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"b", b"c" * 1000):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        messages.extend([await receive(), await receive()])

    statuses = []
    rules = [
        ByteRate(bucket, most_wait="9 hours"),
        Rule(FixedWindow(Store.private(keys=1), "x", "9/year"), charge_on=lambda s: not statuses.append(s)),  # type: ignore[func-returns-value]
    ]
    request = {"type": "http.request", "body": b"question", "more_body": False}
    wire = Wire(request, {"type": "http.disconnect"})
    asyncio.run(ASGIMiddleware(app, rules)(asgi_scope(), wire.receive, wire.send))  # type: ignore[arg-type]
    assert [message["body"] for message in wire.sent[1:]] == [b"a", b"b", b"c" * 1000]
    # The application gets the message that was received ahead.
    assert messages == [request, {"type": "http.disconnect"}]
    assert statuses[-1] == 499
    assert bucket.peek(CLIENT).retry_after <= 3600


def test_body_that_the_application_reads_late_is_whole() -> None:
    parts = [{"type": "http.request", "body": bytes([i]), "more_body": i < 9} for i in range(10)]
    bucket = TokenBucket(Store.private(keys=10), "fast", "1 kB/second", burst=1)
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in parts:
            await send({"type": "http.response.body", "body": b"xx", "more_body": True})
            got.append(await receive())

    wire = Wire(*parts)
    asyncio.run(ASGIMiddleware(app, [ByteRate(bucket)])(asgi_scope(), wire.receive, wire.send))  # type: ignore[arg-type]
    assert got == parts


def test_application_that_receives_meanwhile_gets_each_message_once() -> None:
    bucket = hourly()
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def listen() -> None:
            while not got or got[-1]["type"] != "http.disconnect":
                got.append(await receive())

        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"xx", "more_body": False})

        tasks = [listen(), respond()] if scope["path"] == "/listens" else [respond(), listen()]
        await asyncio.gather(*tasks)

    for path in ("/listens", "/responds"):
        got.clear()
        messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
        left, is_receiving = iter(messages), False
        overlaps: list[bool] = []

        async def receive(left: Any = left, overlaps: list[bool] = overlaps) -> Any:
            nonlocal is_receiving
            overlaps.append(is_receiving)
            is_receiving = True
            for _ in range(20):
                await asyncio.sleep(0)
            is_receiving = False
            return next(left)

        wire = Wire()
        site = ASGIMiddleware(app, [ByteRate(bucket, most_wait="9 hours")])
        asyncio.run(site(asgi_scope(path), receive, wire.send))  # type: ignore[arg-type]
        assert got == messages
        assert not any(overlaps), "the server is asked by one call at a time"


def test_failed_receive_is_raised_by_the_applications_own_call() -> None:
    bucket = hourly()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting = asyncio.create_task(send({"type": "http.response.body", "body": b"xx"}))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            await receive()
        waiting.cancel()
        await asyncio.wait([waiting])

    async def receive() -> Any:
        raise ConnectionError

    wire = Wire()
    site = ASGIMiddleware(app, [ByteRate(bucket, most_wait="9 hours")])
    asyncio.run(site(asgi_scope(), receive, wire.send))  # type: ignore[arg-type]
    assert bucket.peek(CLIENT).retry_after <= 3600


def test_cancelled_response_gives_its_booking_back() -> None:
    bucket = hourly()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"xx"})

    async def run() -> None:
        wire = Wire()
        site = ASGIMiddleware(app, [ByteRate(bucket, most_wait="9 hours")])
        task = asyncio.create_task(site(asgi_scope(), wire.receive, wire.send))  # type: ignore[arg-type]
        while bucket.peek(CLIENT).retry_after <= 3600:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(wire.sent) == 2

    asyncio.run(run())
    assert bucket.peek(CLIENT).retry_after <= 3600


def test_interrupted_thread_gives_all_its_bookings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, other = hourly(), TokenBucket(Store.private(keys=10), "other", "5 B/hour", burst=5)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return iter([b"xx"])

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=sleep))
    site = WSGIMiddleware(app, [ByteRate(other, most_wait="9 hours"), ByteRate(bucket, most_wait="9 hours")])
    response = site(wsgi_environ(), lambda *_: print)
    with pytest.raises(KeyboardInterrupt):
        list(response)
    response.close()  # type: ignore[attr-defined]
    assert bucket.peek(CLIENT).retry_after <= 3600
    assert other.peek(CLIENT).remaining == 4


def test_failed_second_booking_gives_the_first_back(store: Store, slow: TokenBucket, clock: ManualClock) -> None:
    total = TokenBucket(store, "total", "10 B/hour", burst=10)
    site = Download("wsgi", clock, [ByteRate(slow, after=1), ByteRate(total, most_wait=1, after=9)])
    total.hit(CLIENT, 5)
    with pytest.raises(TimeoutError, match=r"cut off by <TokenBucket 'total' .*: too many bytes of its key wait"):
        site(b"x" * 20)
    # The one that waited for its turn at both; the rate of an hour has pieces of one byte.
    assert slow.peek(CLIENT).remaining == 1


def test_bytes_that_would_wait_too_long_are_denied_before_the_handler_runs(
    download: MakeDownload, slow: TokenBucket, clock: ManualClock
) -> None:
    denials: list[Denial] = []
    got = download(ByteRate(slow, most_wait="3s"), on_denied=lambda request, denial: denials.append(denial))
    for _ in range(4):
        slow.reserve(CLIENT, 10)
    [(body, _)] = got(b"x")
    assert (got.got_status, got.handled) == (429, 0)
    assert b"The bytes of this service's bodies are limited, and too many of them wait: ask again in 4 seconds." in body
    fields = {name.lower(): value for name, value in got.fields}
    assert (fields["retry-after"], denials[0].violated) == ("4", ("slow",))
    clock.advance(1)
    assert whole(got(b"x")) == b"x"


def test_body_whose_bytes_would_wait_too_long_is_cut_off(
    download: MakeDownload, slow: TokenBucket, caplog: pytest.LogCaptureFixture
) -> None:
    got = download(ByteRate(slow, most_wait="3s", after=5, key=everyone))

    def book() -> None:
        for _ in range(5):
            slow.reserve("everyone", 10)

    inner: Any = got.app.app
    if got.kind == "wsgi":

        def app(environ: Any, start_response: Any) -> Any:
            book()
            return inner(environ, start_response)

        got.app.app = app
    else:

        async def async_app(scope: Any, receive: Any, send: Any) -> None:
            book()
            await inner(scope, receive, send)

        got.app.app = async_app
    with pytest.raises(TimeoutError, match="the next ones for"):
        got(b"x" * 6)
    assert "requests are cut off" in caplog.text


def test_only_so_many_bodies_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = ByteRate(hourly(), most_wait="9 hours", most_held=1)
    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=lambda seconds: None))

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return iter([b"xx"])

    site = WSGIMiddleware(app, [rate])
    first, second = (site(wsgi_environ(), lambda *_: print) for _ in range(2))
    assert b"".join(first) == b"xx"
    assert b"".join(second) == b"xx"  # it was admitted before
    answer = call_wsgi(site)
    assert (answer.status, answer["retry-after"]) == (503, "1")
    for response in (second, first):
        response.close()  # type: ignore[attr-defined]
    assert not rate.held_back.is_full
    assert call_wsgi(site).status == 200


# Failures


def test_failing_store_denies_or_cuts_off_unless_bytes_may_go_unmetered(
    download: MakeDownload, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def made(**options: Any) -> tuple[Store, Download]:
        store = Store.private(keys=10, clock=clock)
        return store, download(ByteRate(TokenBucket(store, "slow", "10 B/second"), after=5), **options)

    for options, status in (({}, 503), ({"when_unavailable": "429"}, 429), ({"when_unavailable": "allow"}, 200)):
        store, got = made(**options)
        store.close()
        got(b"x" * 100)
        assert (got.got_status, got.handled) == (status, status == 200)
    for options, is_cut in (({}, True), ({"when_unavailable": "allow"}, False)):
        store, got = made(**options)
        got.parts = [b"x" * 100]
        inner: Any = got.app.app

        def closing(*arguments: Any, inner: Any = inner, store: Any = store) -> Any:
            store.close()
            return inner(*arguments)

        got.app.app = closing
        if is_cut:
            with pytest.raises(StoreClosed):
                got(b"x" * 100)
        else:
            assert whole(got(b"x" * 100)) == b"x" * 100
    assert "requests are admitted without a byte rate" in caplog.text


def test_client_without_an_address_is_answered_by_500(download: MakeDownload, slow: TokenBucket) -> None:
    got = download(ByteRate(slow))
    got(b"x", client=None)
    assert (got.got_status, got.handled) == (500, 0)


def test_failing_application_ends_the_meters(slow: TokenBucket) -> None:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        environ["wsgi.input"].read()
        assert rate.held_back.is_full
        raise RuntimeError("broken")

    rate = ByteRate(slow, bodies="requests", most_held=1)
    with pytest.raises(RuntimeError, match="broken"):
        call_wsgi(WSGIMiddleware(app, [rate]), method="POST", body=b"x" * 30)
    assert not rate.held_back.is_full


def test_application_that_returns_no_body_ends_the_meters(slow: TokenBucket) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        environ["wsgi.input"].read()
        assert rate.held_back.is_full

    rate = ByteRate(slow, bodies="requests", most_held=1)
    with pytest.raises(TypeError, match="not iterable"):
        call_wsgi(WSGIMiddleware(app, [rate]), method="POST", body=b"x" * 30)
    assert not rate.held_back.is_full


# With other rules


def test_permit_is_held_until_the_last_bytes_have_had_their_turn(
    download: MakeDownload, store: Store, slow: TokenBucket
) -> None:
    jobs = Concurrency(store, "jobs", 1, lease="2 minutes")
    got = download(ByteRate(slow), Rule(jobs))
    got.on_part = lambda: left.append(jobs.peek(CLIENT, 0).remaining)
    left: list[int] = []
    assert [len(part) for part, _ in got(b"x" * 30) if part] == [10, 10, 10]
    assert left[:2] == [0, 0]
    assert left[-1] == jobs.peek(CLIENT, 0).remaining == 1


def test_refused_request_is_charged_by_no_rule(download: MakeDownload, store: Store, slow: TokenBucket) -> None:
    window = FixedWindow(store, "x", "5/hour")
    got = download(ByteRate(slow, most_wait=0), Rule(window), BodyLimit(5))
    slow.hit(CLIENT, 10)
    got(b"x")
    assert (got.got_status, window.peek(CLIENT).remaining) == (429, 5)


def test_async_client_without_an_address_is_answered_by_500(slow: TokenBucket, clock: ManualClock) -> None:
    async def client(request: Request) -> Any:
        return ClientAddress()(request)

    got = Download("asgi", clock, [ByteRate(slow)], client=client)
    got(b"x", client=None)
    assert (got.got_status, got.handled) == (500, 0)


def test_functions_may_be_async_in_an_event_loop(slow: TokenBucket, clock: ManualClock) -> None:
    async def key(request: Request) -> str:
        return request.header("X-User") or "nobody"

    async def exempt(request: Request) -> bool:
        return request.path == "/free"

    got = Download("asgi", clock, [ByteRate(slow, key=key, exempt=exempt)])
    got(b"x" * 20, fields=[("X-User", "ada")])
    got(b"x" * 20, path="/free")
    got(b"x" * 20, fields=[("X-User", "bob")])
    assert clock.now() == 2.0
    with pytest.raises(InvalidLimiter, match="has to be awaited, and this application has no event loop"):
        WSGIMiddleware(lambda *_: [], [ByteRate(slow, key=key)])


# At start


def test_wrong_arguments_are_refused(store: Store, slow: TokenBucket) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bodies": "both"}, 'bodies is "responses" or "requests", not \'both\''),
        ({"after": "10 Mb"}, 'after is a number of bytes such as "10 MiB" or 65536, not .10 Mb.; sizes have one of'),
        ({"after": -1}, "after is a number of bytes"),
        ({"after": True}, "after is a number of bytes"),
        ({"after": 1.5}, "after is a number of bytes"),
        ({"most_wait": -1}, "most_wait is a length of time of at least 0"),
        ({"most_held": 0}, "most_held is a whole number of at least 1, not 0"),
        ({"most_held": True}, "most_held is a whole number of at least 1"),
        ({"key": "address"}, "key is a callable"),
        ({"tiers": {"pro": None}}, "has only one of tiers and tier"),
        ({"path": "files"}, "path"),
    ]
    for options, message in wrong:
        with pytest.raises((InvalidLimiter, InvalidRate), match=message):
            ByteRate(slow, **options)
    others: list[Any] = [
        MinInterval(store, "gap", "1s"),
        Concurrency(store, "jobs", 1),
        TokenBucket(store, "at once", "10/minute", refill="interval"),
        TokenBucket(store, "new", "10/minute", initial=1),
        TokenBucket(RedisStore("redis://127.0.0.1:1"), "over Redis", "10/minute"),
        "1 MiB/second",
        Rule(slow),
    ]
    for limiter in others:
        with pytest.raises(InvalidLimiter, match=r"can't meter bytes|a rule is for one limiter"):
            ByteRate(limiter)
        with pytest.raises(InvalidLimiter):
            ByteRate(slow, tiers={"pro": limiter}, tier=lambda request: "pro")
    assert repr(ByteRate(slow, after="1 kB")).startswith(
        "ByteRate(limiter=<TokenBucket 'slow' 10 per second, burst=10>"
    )


def test_switched_off_limits_meter_nothing(slow: TokenBucket, clock: ManualClock, download: MakeDownload) -> None:
    with warnings.catch_warnings():
        # Only the first of a process warns.
        warnings.simplefilter("ignore", LimitsDisabledWarning)
        got = download(ByteRate(slow), enabled=False)
    got(b"x" * 100)
    assert clock.now() == 0.0
