"""Limits of the size of responses."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper

import flask
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from web_requests import Answered, Kind, Wire, asgi_scope, call_asgi, call_wsgi, wsgi_environ

import forebay.contrib.fastapi
from forebay import Concurrency, FixedWindow, InvalidLimiter, Store
from forebay.contrib.flask import Limits
from forebay.web import ASGIMiddleware, BodyLimit, Rule, WSGIMiddleware, everyone
from forebay.web.response_limits import ResponseTooLarge

LIMIT = BodyLimit(10, responses=True)


def wsgi(parts: Callable[[], Iterable[bytes]], *headers: tuple[str, str], status: str = "200 OK") -> Any:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response(status, list(headers))
        return parts()

    return app


def asgi(parts: Iterable[bytes], *headers: tuple[bytes, bytes], status: int = 200) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return app


def answered(kind: Kind, parts: list[bytes], length: int | None, method: str = "GET", *more: Any) -> Answered:
    """The response of an application that streams these parts."""
    if kind == "wsgi":
        fields = [] if length is None else [("Content-Length", str(length))]
        return call_wsgi(WSGIMiddleware(wsgi(lambda: iter(parts), *fields), [LIMIT, *more]), "/", method)
    encoded = [] if length is None else [(b"content-length", str(length).encode())]
    return call_asgi(ASGIMiddleware(asgi(parts, *encoded), [LIMIT, *more]), "/", method)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize("length", [None, 10])
def test_a_response_up_to_its_limit_is_sent(kind: Kind, length: int | None) -> None:
    answer = answered(kind, [b"12345", b"", b"67890"], length)
    assert (answer.status, answer.body) == (200, b"1234567890")


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_response_that_states_more_is_replaced(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    answer = answered(kind, [b"12345", b"678901"], 11)
    assert (answer.status, answer["content-type"]) == (500, "application/problem+json")
    assert answer.json["detail"] == "The response to this request is larger than this service sends."
    assert int(answer["content-length"]) == len(answer.body)
    assert [record.getMessage() for record in caplog.records] == [
        "the response to 'GET' '/' has more than 10 bytes, the limit of its BodyLimit"
    ]
    assert caplog.records[0].levelno == logging.ERROR


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_response_that_states_nothing_is_cut(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ResponseTooLarge, match="the response has more than 10 bytes"):
        answered(kind, [b"12345", b"67890", b"1"], None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 304)])
def test_the_length_of_a_response_without_a_body_is_no_size(kind: Kind, method: str, status: int) -> None:
    if kind == "wsgi":
        app: Any = WSGIMiddleware(wsgi(list, ("Content-Length", "99"), status=f"{status} OK"), [LIMIT])
        answer = call_wsgi(app, "/", method)
    else:
        app = ASGIMiddleware(asgi([], (b"content-length", b"99"), status=status), [LIMIT])
        answer = call_asgi(app, "/", method)
    assert (answer.status, answer["content-length"]) == (status, "99")


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_the_least_limit_of_a_path_holds_beside_those_of_requests(kind: Kind) -> None:
    more = [BodyLimit(5, path="/other", responses=True), BodyLimit(3, methods="POST")]
    assert answered(kind, [b"12345678"], 8, "GET", *more).status == 200
    assert answered(kind, [b"12345678"], 8, "GET", BodyLimit(5, path="/", responses=True)).status == 500
    app: Any = (
        WSGIMiddleware(wsgi(lambda: [b"1"]), [LIMIT, *more])
        if kind == "wsgi"
        else ASGIMiddleware(asgi([b"1"]), [LIMIT, *more])
    )
    call: Any = call_wsgi if kind == "wsgi" else call_asgi
    assert call(app, "/", "POST", body=b"1234").status == 413
    assert call(app, "/", "POST", body=b"123").status == 200


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_replaced_response_is_charged_as_an_error(kind: Kind, store: Store) -> None:
    limit, held = FixedWindow(store, "limit", "5/hour"), Concurrency(store, "held", 1)
    rules = [Rule(limit, key=everyone, charge_on={499, 500}), Rule(held, key=everyone)]
    assert answered(kind, [b"12345"], 5, "GET", *rules).status == 200
    assert limit.peek("everyone", 0).remaining == 5
    assert answered(kind, [b"x" * 11], 11, "GET", *rules).status == 500
    with pytest.raises(ResponseTooLarge):
        answered(kind, [b"x" * 10, b"x"], None, "GET", *rules)
    assert limit.peek("everyone", 0).remaining == 3
    assert held.peek("everyone", 0).remaining == 1


# WSGI


@pytest.mark.parametrize("parts", [[b"x" * 11], [b"x" * 6, b"x" * 5], (b"", b"x" * 11)])
def test_a_wsgi_response_of_which_nothing_is_sent_is_replaced(parts: Any) -> None:
    assert call_wsgi(WSGIMiddleware(wsgi(lambda: parts), [LIMIT])).status == 500
    answer = call_wsgi(WSGIMiddleware(wsgi(lambda: iter([b"", b"x" * 11])), [LIMIT]))
    assert (answer.status, answer["content-type"]) == (500, "application/problem+json")


def test_a_wsgi_application_that_starts_late_is_limited() -> None:
    def late(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "11")])
        if environ["PATH_INFO"] == "/parts":
            yield b"x" * 11

    for path in ("/", "/parts"):
        answer = call_wsgi(WSGIMiddleware(late, [LIMIT]), path)
        assert (answer.status, answer["content-type"]) == (500, "application/problem+json")


def test_a_wsgi_body_of_fitting_length_is_the_servers() -> None:
    """So that a server may send a file in its own way."""
    body = [b"1234"]
    app = WSGIMiddleware(wsgi(lambda: body, ("Content-Length", "4")), [LIMIT])
    assert app(wsgi_environ(), lambda *arguments: None) is body


@pytest.mark.parametrize("wrapper", [FileWrapper, lambda file: file])
def test_a_file_of_fitting_length_is_the_servers(wrapper: Any) -> None:
    file = wrapper(io.BytesIO(b"1234"))
    app = WSGIMiddleware(wsgi(lambda: file, ("Content-Length", "4")), [LIMIT])
    assert app(wsgi_environ() | {"wsgi.file_wrapper": wrapper}, lambda *arguments: None) is file


@pytest.mark.parametrize("parts", [[b"x" * 11], [b"x" * 6, b"x" * 5]])
def test_a_wsgi_response_may_have_more_than_it_states(parts: list[bytes]) -> None:
    """Not every server ends it at its length."""
    assert call_wsgi(WSGIMiddleware(wsgi(lambda: parts, ("Content-Length", "4")), [LIMIT])).status == 500
    app = WSGIMiddleware(wsgi(lambda: iter([b"1", *parts]), ("Content-Length", "4")), [LIMIT])
    with pytest.raises(ResponseTooLarge):
        call_wsgi(app)


@pytest.mark.parametrize("length", ["²", "-1", "1e3", "", " "])
def test_a_wsgi_length_that_is_no_number_fits_nothing(length: str) -> None:
    app: Any = WSGIMiddleware(wsgi(lambda: iter([b"x" * 10, b"x"]), ("Content-Length", length)), [LIMIT])
    with pytest.raises(ResponseTooLarge):
        call_wsgi(app)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize("length", ["0" * 30 + "11", "9" * 400])
def test_a_length_of_many_digits_is_too_large(kind: Kind, length: str) -> None:
    app: Any = wsgi(list, ("Content-Length", length))
    if kind == "asgi":
        assert call_asgi(ASGIMiddleware(asgi([], (b"content-length", length.encode())), [LIMIT])).status == 500
    else:
        assert call_wsgi(WSGIMiddleware(app, [LIMIT])).status == 500


def test_a_wsgi_application_may_start_another_response_instead() -> None:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", "11")])
        error = (ValueError, ValueError("it broke"), None)
        start_response("503 Service Unavailable", [("Content-Length", "4")], error)
        return [b"soon"]

    answer = call_wsgi(WSGIMiddleware(app, [LIMIT]))
    assert (answer.status, answer.body) == (503, b"soon")


def test_written_bytes_count() -> None:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"x" * 6)
        return [b"x" * int(environ["PATH_INFO"][1:])]

    assert call_wsgi(WSGIMiddleware(app, [LIMIT]), "/4").body == b"x" * 10
    with pytest.raises(ResponseTooLarge):
        call_wsgi(WSGIMiddleware(app, [LIMIT]), "/5")


def test_a_wsgi_application_that_goes_on_sends_no_more() -> None:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"x" * 8)
        with contextlib.suppress(ResponseTooLarge):
            write(b"x" * 8)
        return iter([])

    with pytest.raises(ResponseTooLarge):
        call_wsgi(WSGIMiddleware(app, [LIMIT]))


def test_a_replaced_wsgi_body_is_closed() -> None:
    closed: list[bool] = []

    class Body:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"x"])

        def close(self) -> None:
            closed.append(True)

    app: Any = wsgi(Body, ("Content-Length", "11"))  # type: ignore[arg-type]
    assert call_wsgi(WSGIMiddleware(app, [LIMIT])).status == 500
    assert closed == [True]


# ASGI


def test_an_asgi_application_is_not_offered_to_send_files() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["extensions"])
        await asgi([b"1"])(scope, receive, send)

    extensions = {"http.response.pathsend": {}, "http.response.trailers": {}}
    call_asgi(ASGIMiddleware(app, [LIMIT]), extensions=extensions)
    assert seen == [{"http.response.trailers": {}}]


def test_an_asgi_application_that_sends_a_file_all_the_same_fails() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/etc/hostname"})

    with pytest.raises(RuntimeError, match=r"bytes of this response are limited, and http.response.pathsend would"):
        call_asgi(ASGIMiddleware(app, [LIMIT]))


def test_outer_asgi_middleware_sees_what_the_application_adds_to_its_scope() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = "found"
        await asgi([b"1"])(scope, receive, send)

    wire = Wire({"type": "http.request"})
    scope = asgi_scope(extensions={"http.response.pathsend": {}})
    asyncio.run(ASGIMiddleware(app, [LIMIT])(scope, wire.receive, wire.send))
    assert scope["route"] == "found"


def test_an_asgi_application_that_goes_on_sends_no_more() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"x" * 8, b"x" * 8, b"y"):
            with contextlib.suppress(ResponseTooLarge):
                await send({"type": "http.response.body", "body": part, "more_body": part != b"y"})

    wire = Wire({"type": "http.request"})
    asyncio.run(ASGIMiddleware(app, [LIMIT])(asgi_scope(), wire.receive, wire.send))
    # No last part: the server closes the connection.
    assert [message.get("more_body") for message in wire.sent] == [None, True]


def test_a_websocket_has_no_response_limit() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "x" * 99})

    wire = Wire({"type": "websocket.connect"})
    asyncio.run(ASGIMiddleware(app, [LIMIT])(asgi_scope(type="websocket"), wire.receive, wire.send))
    assert len(wire.sent) == 2


# Frameworks


def test_flask_limits_responses() -> None:
    app = flask.Flask(__name__)
    Limits(app, [LIMIT])
    app.get("/<int:count>", endpoint="whole")(lambda count: "x" * count)
    app.get("/stream/<int:count>", endpoint="stream")(lambda count: (bytes(5) for _ in range(count)))
    assert [call_wsgi(app, path).status for path in ("/10", "/11", "/stream/2")] == [200, 500, 200]
    with pytest.raises(ResponseTooLarge):
        call_wsgi(app, "/stream/3")


def test_fastapi_limits_responses() -> None:
    app = FastAPI()
    forebay.contrib.fastapi.setup(app, [LIMIT])

    @app.get("/{count}")
    async def view(count: int) -> str:
        return "x" * count

    @app.get("/stream/{count}")
    async def stream(count: int) -> StreamingResponse:
        return StreamingResponse(bytes(5) for _ in range(count))

    # JSON has two quotes.
    statuses = [call_asgi(app, path, query_string=b"").status for path in ("/8", "/9", "/stream/2")]
    assert statuses == [200, 500, 200]
    with pytest.raises(ResponseTooLarge):
        call_asgi(app, "/stream/3", query_string=b"")


def test_responses_is_a_switch() -> None:
    with pytest.raises(InvalidLimiter, match="responses is True or False, not 'yes'"):
        BodyLimit(1, responses="yes")  # type: ignore[arg-type]
