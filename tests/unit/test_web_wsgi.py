"""The WSGI middleware: how streamed responses end, bodies over the limit, and conformance to WSGI."""

from __future__ import annotations

import gc
import io
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.validate import validator

import pytest
from web_requests import CLIENT, Answered, call_asgi, call_wsgi, wsgi_environ

from forebay import Concurrency, FixedWindow, Store
from forebay.testing import ManualClock
from forebay.web import DISCONNECTED, ASGIMiddleware, BodyLimit, Gate, Rule, WSGIMiddleware

TEXT = [("Content-Type", "text/plain")]


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=100, clock=clock)


class Ending:
    """Rules that record a request's end: the statuses that `charge_on` received, and whether the permit is back."""

    def __init__(self, store: Store, keep: Callable[[int], bool] = lambda status: status < 400) -> None:
        self.statuses: list[int] = []
        self.booked, self.held = FixedWindow(store, "booked", "100/hour"), Concurrency(store, "held", 2, "9s")

        def charge_on(status: int) -> bool:
            self.statuses.append(status)
            return keep(status)

        self.rules = [Rule(self.booked, charge_on=charge_on), Rule(self.held)]

    @property
    def is_held(self) -> bool:
        return self.held.peek(CLIENT, 0).remaining == 1

    def check(self, status: int) -> None:
        """Assert that the request ended once, with `status`."""
        assert self.statuses[-1:] == [status]
        assert not self.is_held
        assert self.booked.peek(CLIENT, 0).remaining == 100 - (status < 400)


@pytest.fixture
def ending(store: Store) -> Ending:
    return Ending(store)


class Stream:
    """A response in three parts that can fail before a part and records that it was closed."""

    def __init__(self, fail_before: int = 9) -> None:
        self.parts, self.fail_before, self.closed = 0, fail_before, 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self.parts == self.fail_before:
            raise LookupError
        self.parts += 1
        if self.parts > 3:
            raise StopIteration
        return b"part"

    def close(self) -> None:
        self.closed += 1

    def __call__(self, environ: Any, start_response: Any) -> Stream:
        start_response("200 OK", TEXT)
        return self


def start(app: Any) -> Any:
    return app(wsgi_environ(), lambda status, fields, exc_info=None: lambda part: None)


class TestEnds:
    def test_permit_is_held_until_the_stream_is_closed(self, ending: Ending) -> None:
        stream = Stream()
        answer = start(WSGIMiddleware(stream, ending.rules))
        for part in answer:
            assert (part, ending.is_held) == (b"part", True)
        assert ending.is_held
        answer.close()
        assert stream.closed == 1
        ending.check(200)
        answer.close()
        ending.check(200)

    @pytest.mark.parametrize("parts", [0, 1, 3])
    def test_response_closed_early_is_a_disconnect(self, ending: Ending, parts: int) -> None:
        stream = Stream()
        answer = start(WSGIMiddleware(stream, ending.rules))
        for _ in range(parts):
            next(answer)
        answer.close()
        assert stream.closed == 1
        ending.check(DISCONNECTED)

    @pytest.mark.parametrize("part", [0, 1, 2])
    def test_error_of_the_stream_is_500(self, ending: Ending, part: int) -> None:
        stream = Stream(fail_before=part)
        with pytest.raises(LookupError):
            call_wsgi(WSGIMiddleware(stream, ending.rules))
        assert stream.closed == 1
        ending.check(500)

    @pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, GeneratorExit, SystemExit])
    @pytest.mark.parametrize("has_begun", [True, False])
    def test_error_of_the_handler_is_500(self, ending: Ending, has_begun: bool, error: type[BaseException]) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            if has_begun:
                start_response("200 OK", TEXT)
            raise error

        with pytest.raises(error):
            start(WSGIMiddleware(app, ending.rules))
        ending.check(500)

    def test_response_that_cannot_be_iterated_is_500(self, ending: Ending) -> None:
        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", TEXT)
            return 5

        with pytest.raises(TypeError):
            start(WSGIMiddleware(app, ending.rules))
        ending.check(500)

    def test_error_of_close_ends_the_request(self, ending: Ending) -> None:
        class Failing(Stream):
            def close(self) -> None:
                raise LookupError

        answer = start(WSGIMiddleware(Failing(), ending.rules))
        assert list(answer) == [b"part"] * 3
        with pytest.raises(LookupError):
            answer.close()
        ending.check(200)

    def test_generator_starts_its_response_at_the_first_part(self, ending: Ending) -> None:
        """A generator calls `start_response` when the server iterates to its first part."""

        def app(environ: Any, start_response: Any) -> Iterator[bytes]:
            start_response("204 No Content", [])
            yield b""

        assert call_wsgi(WSGIMiddleware(app, ending.rules)).status == 204
        ending.check(204)

    def test_generator_that_is_never_started_ends_the_request(self, ending: Ending) -> None:
        def app(environ: Any, start_response: Any) -> Iterator[bytes]:
            raise AssertionError
            yield

        start(WSGIMiddleware(app, ending.rules)).close()
        ending.check(DISCONNECTED)

    def test_replaced_status_ends_the_request(self, ending: Ending) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            start_response("200 OK", TEXT)
            try:
                raise LookupError
            except LookupError:
                start_response("502 Bad Gateway", TEXT, sys.exc_info())
            return [b"sorry"]

        answer = call_wsgi(WSGIMiddleware(app, ending.rules))
        assert answer.status == 502
        assert len(answer.all("ratelimit")) == 1
        ending.check(502)

    def test_write_callable_sends_the_response(self, ending: Ending) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            start_response("200 OK", TEXT)(b"written, ")
            return [b"returned"]

        assert call_wsgi(WSGIMiddleware(app, ending.rules)).body == b"written, returned"
        ending.check(200)

    def test_long_stream_renews_its_lease(self, ending: Ending, clock: ManualClock) -> None:
        answer = start(WSGIMiddleware(Stream(), ending.rules))
        for _ in range(3):
            next(answer)
            clock.advance(8)
            assert ending.is_held
        answer.close()
        ending.check(DISCONNECTED)

    def test_each_thread_ends_its_own_request(self, store: Store) -> None:
        held = Concurrency(store, "held", 8)
        app = WSGIMiddleware(Stream(), [Rule(held)])

        def send_requests() -> None:
            for _ in range(50):
                app(wsgi_environ(), lambda *started: lambda part: None).close()  # type: ignore[attr-defined]

        threads = [threading.Thread(target=send_requests) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held.peek(CLIENT, 0).remaining == 8


class TestFields:
    @pytest.mark.parametrize("charge_on", [None, {200}])
    def test_header_fields_come_once_after_the_applications(self, store: Store, charge_on: Any) -> None:
        own = [*TEXT, ("X-Own", "1")]

        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            start_response("200 OK", own)
            return [b""]

        limits = WSGIMiddleware(app, [Rule(FixedWindow(store, "x", "9/hour"), charge_on=charge_on)])
        for _ in range(2):
            answer = call_wsgi(limits)
            assert [name for name, _ in answer.fields] == ["content-type", "x-own", "ratelimit-policy", "ratelimit"]
        assert len(own) == 2

    def test_response_of_the_application_is_unchanged(self, store: Store) -> None:
        """A server computes the length of a list, and sends a file with its own file wrapper."""
        parts = [b"a", b"b"]

        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            start_response("200 OK", TEXT)
            return parts

        limits = WSGIMiddleware(app, [Rule(FixedWindow(store, "x", "9/hour"))])
        assert limits(wsgi_environ(), lambda *started: lambda part: None) is parts


LIMIT = 1000


def read_all(body: Any) -> bytes:
    found: bytes = body.read()
    return found


def read_in_parts(body: Any) -> bytes:
    return b"".join(iter(lambda: body.read(64), b""))


def read_at_once(body: Any) -> bytes:
    return bytes(body.read(10**9))


def read_lines(body: Any) -> bytes:
    return b"".join(iter(body.readline, b""))


def read_parts_of_lines(body: Any) -> bytes:
    return b"".join(iter(lambda: body.readline(10), b""))


def read_list_of_lines(body: Any) -> bytes:
    return b"".join(body.readlines())


def iterate(body: Any) -> bytes:
    return b"".join(body)


READERS = [read_all, read_in_parts, read_at_once, read_lines, read_parts_of_lines, read_list_of_lines, iterate]


def body_of(size: int) -> bytes:
    return (b"x" * 99 + b"\n") * (size // 100) + b"y" * (size % 100)


class TestBodies:
    @pytest.mark.parametrize("reader", READERS)
    @pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
    def test_body_within_the_limit_is_read(self, reader: Callable[[Any], bytes], size: int) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            start_response("200 OK", TEXT)
            return [reader(environ["wsgi.input"])]

        answer = call_wsgi(WSGIMiddleware(app, BodyLimit(LIMIT)), "/", "POST", body=body_of(size), chunked=True)  # type: ignore[arg-type]
        assert (answer.status, answer.body) == (200, body_of(size))

    @pytest.mark.parametrize("reader", READERS)
    @pytest.mark.parametrize("size", [LIMIT + 1, LIMIT + 50, 10 * LIMIT, 300_000])
    @pytest.mark.parametrize(
        "shape", ["plain", "swallows", "wraps", "lazy", "started", "swallows lazily", "reads again"]
    )
    def test_body_over_the_limit_is_413(self, store: Store, reader: Any, size: int, shape: str) -> None:
        statuses: list[int] = []

        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            body = environ["wsgi.input"]
            if shape == "started":
                start_response("200 OK", TEXT)
            try:
                reader(body)
            except OSError as error:
                if shape == "wraps":
                    raise LookupError from error
                if shape == "reads again":
                    reader(body)
                if "swallows" not in shape:
                    raise
            start_response("400 Bad Request", TEXT)
            return [b"what?"]

        def lazy_app(environ: Any, start_response: Any) -> Iterator[bytes]:
            yield from app(environ, start_response)

        inner: Any = lazy_app if "laz" in shape else app

        def charge_on(status: int) -> bool:
            statuses.append(status)
            return True

        rules = [BodyLimit(LIMIT), Rule(FixedWindow(store, "x", "9/hour"), charge_on=charge_on)]
        stream = io.BytesIO(body_of(size))
        answer = call_wsgi(_with_input(WSGIMiddleware(inner, rules), stream), "/", "POST", chunked=True)
        assert (answer.status, answer.json["status"]) == (413, 413)
        assert str(LIMIT) in answer.json["detail"]
        assert stream.tell() == LIMIT + 1, "no more is read than tells that it is too large"
        assert statuses[-1:] == [413]

    @pytest.mark.parametrize(("declared", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (10**30, 413)])
    def test_declared_length_over_the_limit_is_413(self, store: Store, declared: int, status: int) -> None:
        limit = FixedWindow(store, "x", "9/hour")
        app = _with_length(WSGIMiddleware(_hello, [BodyLimit(LIMIT), Rule(limit)]), str(declared))
        assert call_wsgi(app, "/", "POST").status == status

    @pytest.mark.parametrize("declared", ["-1", "+9999", "0x9999", "9999,9999", "1e9", "\xb2", ""])
    def test_body_with_an_invalid_length_is_counted_while_it_is_read(self, declared: str) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            environ["wsgi.input"].read()
            return _hello(environ, start_response)

        limited = _with_length(WSGIMiddleware(app, [BodyLimit(LIMIT)]), declared)
        assert call_wsgi(limited, "/", "POST", body=body_of(LIMIT + 1), chunked=True).status == 413

    def test_body_limit_applies_to_its_paths_and_methods(self) -> None:
        rules = [BodyLimit(10, path="/small/*"), BodyLimit(100), BodyLimit(0, methods="GET")]
        app = WSGIMiddleware(_hello, rules)
        sizes = [
            ("/", "POST", 100),
            ("/", "POST", 101),
            ("/small/a", "POST", 10),
            ("/small", "POST", 11),
            ("/", "GET", 1),
        ]
        assert [call_wsgi(app, path, method, body=b"x" * size).status for path, method, size in sizes] == [
            200,
            413,
            200,
            413,
            413,
        ]

    def test_middleware_conforms_to_wsgi(self) -> None:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            body = environ["wsgi.input"]
            body.read(3), body.readline(), body.readlines(), list(body)
            return _hello(environ, start_response)

        limited: Any = validator(WSGIMiddleware(validator(app), [BodyLimit(LIMIT)]))  # type: ignore[arg-type]
        assert call_wsgi(limited, "/", "POST", body=b"abc", chunked=True).status == 200
        assert call_wsgi(limited, "/", "POST", body=body_of(LIMIT + 1), chunked=True).status == 413
        assert call_wsgi(limited, "/", "POST", body=body_of(LIMIT + 1)).status == 413


def _hello(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", TEXT)
    return [b"hello"]


def _with_input(app: Any, stream: Any) -> Any:
    return lambda environ, start_response: app(environ | {"wsgi.input": stream}, start_response)


def _with_length(app: Any, declared: str) -> Any:
    return lambda environ, start_response: app(environ | {"CONTENT_LENGTH": declared}, start_response)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *message: object) -> None: ...


@pytest.mark.parametrize(("size", "status"), [(10, 200), (LIMIT + 1, 413)])
def test_wsgiref_server_accepts_the_responses(store: Store, size: int, status: int) -> None:
    """wsgiref asserts more than other servers: an application must send no connection-level field."""
    rules = [
        BodyLimit(LIMIT),
        Rule(FixedWindow(store, "x", "1/hour"), charge_on={200}),
        Rule(Concurrency(store, "y", 1)),
    ]
    app: Any = WSGIMiddleware(_hello, rules)
    with make_server("127.0.0.1", 0, app, _Server, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            answers = []
            for _ in range(2):
                connection = HTTPConnection("127.0.0.1", server.server_port)
                with suppress(ConnectionError):
                    connection.request("POST", "/", body=b"x" * size)
                answer = connection.getresponse()
                answers.append(Answered(answer.status, answer.getheaders(), answer.read()))
                connection.close()
        finally:
            server.shutdown()
            thread.join()
    assert [answer.status for answer in answers] == ([200, 429] if status == 200 else [413, 413])


class TestBeforeTheNextRequest:
    """Permits and refunds are back before the server sends the last part of the response."""

    @pytest.mark.parametrize(
        "body", [[b"one part"], [b"two ", b"parts"], (part for part in [b"of known", b" lengths"])], ids=repr
    )
    def test_permit_is_released_before_the_last_part(self, ending: Ending, body: Any) -> None:
        length = [("Content-Length", "16")] if not isinstance(body, list) else []

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", length)
            return body

        was_held = [ending.is_held for _ in start(WSGIMiddleware(app, ending.rules))]
        assert was_held[-1] is False
        assert all(was_held[:-1])

    def test_refund_for_every_end_comes_when_the_response_starts(self, store: Store) -> None:
        limit = FixedWindow(store, "wrong", "5/hour")

        def app(environ: Any, start_response: Any) -> Any:
            start_response("200 OK", [])
            assert limit.peek(CLIENT, 0).remaining == 5
            return [b"welcome"]

        assert list(start(WSGIMiddleware(app, [Rule(limit, charge_on={401})]))) == [b"welcome"]
        assert limit.peek(CLIENT, 0).remaining == 5


def test_refused_login_is_charged_although_the_client_disconnects(store: Store) -> None:
    """Otherwise a client that disconnects after the status could guess passwords without a charge."""
    wrong = FixedWindow(store, "wrong", "3/hour")

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("401 Unauthorized", [])
        yield b"no"
        yield b"no"

    answer = start(WSGIMiddleware(app, [Rule(wrong, charge_on={401})]))
    next(iter(answer))
    answer.close()
    assert wrong.peek(CLIENT, 0).remaining == 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["charged", "ended", "bounded"])
def test_application_can_pass_exc_info_to_start_response(store: Store, fails: bool, how: str) -> None:
    started: list[Any] = []
    sent: list[bytes] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        try:
            if fails:
                raise RuntimeError("the application fails")
            exc_info = None
        except RuntimeError:
            exc_info = sys.exc_info()
        write = start_response("200 OK", iter(TEXT), exc_info=exc_info)
        write(b"part")
        return []

    def start_response(*arguments: Any) -> Callable[[bytes], object]:
        started.append(arguments)
        return sent.append

    limiter = FixedWindow(store, "x", "5/hour")
    rules = [Rule(limiter, charge_on={200} if how == "ended" else None), *([BodyLimit(9)] * (how == "bounded"))]
    list(WSGIMiddleware(app, rules)(wsgi_environ(), start_response))
    [(status, fields, *exc_info)] = started
    assert (status, fields[0]) == ("200 OK", TEXT[0])
    assert [name for name, _ in fields[1:]] == ["RateLimit-Policy", "RateLimit"]
    assert [error[0] for error in exc_info] == [RuntimeError] * fails
    assert sent == [b"part"]


def test_application_and_gate_can_be_replaced(store: Store) -> None:
    def answers_with(text: bytes) -> Any:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            start_response("200 OK", TEXT)
            return [text]

        return app

    one, other = FixedWindow(store, "one", "5/hour"), FixedWindow(store, "other", "1/hour")
    limited = WSGIMiddleware(answers_with(b"one"), [Rule(one)])
    limited.app, limited.gate = answers_with(b"other"), Gate([Rule(other)])
    answers = [call_wsgi(limited) for _ in range(2)]
    assert [(answer.status, answer.body == b"other") for answer in answers] == [(200, True), (429, False)]
    assert one.peek(CLIENT).remaining == 5


def hello_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", TEXT)
    return [b"hello"]


async def hello_asgi(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("middleware", [WSGIMiddleware, ASGIMiddleware])
def test_object_of_another_type_is_refused_as_a_gate(store: Store, middleware: Any) -> None:
    class AlmostAGate:
        body_limits = ()
        has_ends = True

    limited = middleware(hello_wsgi, [Rule(FixedWindow(store, "one", "5/hour"))])
    gate = limited.gate
    with pytest.raises(AttributeError):
        limited.gate = AlmostAGate()
    assert limited.gate is gate


def test_refused_gate_leaves_the_current_one(store: Store) -> None:
    limited = WSGIMiddleware(hello_wsgi, [Rule(FixedWindow(store, "one", "1/hour"))])
    with pytest.raises(AttributeError):
        limited.gate = object()
    assert [call_wsgi(limited).status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("middleware", "hello", "call"), [(WSGIMiddleware, hello_wsgi, call_wsgi), (ASGIMiddleware, hello_asgi, call_asgi)]
)
def test_gate_can_be_replaced_during_a_decision(
    store: Store, in_child: Callable[[Callable[[], object]], object], middleware: Any, hello: Any, call: Any
) -> None:
    """A configuration reload replaces the gate; a request's own gate stays alive until its response."""
    old, new = FixedWindow(store, "old", "5/hour"), FixedWindow(store, "new", "1/hour")
    gates = [Gate([Rule(new)], headers=())]

    def key(request: object) -> str:
        limited.gate = gates[0]
        gc.collect()
        # New objects reuse the freed memory.
        gates.extend(Gate([Rule(new)]) for _ in range(1000))
        return "k"

    limited = middleware(hello, [Rule(old, key=key)], headers=())
    del key

    def decide() -> list[int]:
        statuses = [call(limited).status for _ in range(3)]
        return [*statuses, old.peek("k").remaining, new.peek(CLIENT).remaining]

    assert in_child(decide) == [200, 200, 429, 4, 0]
