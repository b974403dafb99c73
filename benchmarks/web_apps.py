"""The applications of `bench_7_web.py`, with limits and without; its servers import this module."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import fastapi
import flask
import flask_limiter.util
import slowapi.util
from fastapi.responses import PlainTextResponse

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.web import ASGIMiddleware, Rule, WSGIMiddleware

# Never reached.
PEERS_LIMIT = "1000000000/hour"


def rules_of(store: Store, count: int) -> list[Rule]:
    """One limit, or three."""
    limiters = [
        TokenBucket(store, "api", "1000/second", burst=2_000_000_000),
        FixedWindow(store, "day", "1000000000/day"),
        SlidingWindow(store, "week", "20000000/week"),
    ]
    return [Rule(limiter) for limiter in limiters[:count]]


def three_of_fifty_rules(store: Store) -> list[Rule]:
    """Three rules are for the path "/", and 47 for other paths."""
    paths: list[str | None] = [None, "/*", "/", *(f"/api/resource{number}/{{id}}" for number in range(47))]
    limiters = [TokenBucket(store, f"limit{number}", "1000/second", burst=2_000_000_000) for number in range(50)]
    return [Rule(limiter, path=path) for limiter, path in zip(limiters, paths, strict=True)]


def plain_wsgi(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"Hello\n"]


# Header fields like those of one limit.
FIELDS = [("RateLimit-Policy", '"api";q=1000;w=1'), ("RateLimit", '"api";r=1999999999;t=1')]


def wsgi_with_fields(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6"), *FIELDS])
    return [b"Hello\n"]


async def asgi_with_fields(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    if scope["type"] != "http":
        return
    fields = [(name.lower().encode(), value.encode()) for name, value in FIELDS]
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"6"), *fields]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"Hello\n"})


async def plain_asgi(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    if scope["type"] != "http":
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"6")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"Hello\n"})


def flask_app(storage_uri: str | None = None, *, sends_fields: bool = False) -> Any:
    """With Flask-Limiter, if a storage is given."""
    app = flask.Flask(__name__)

    def hello() -> Any:
        return ("Hello\n", FIELDS) if sends_fields else "Hello\n"

    if storage_uri is not None:
        limiter = flask_limiter.Limiter(
            flask_limiter.util.get_remote_address, app=app, storage_uri=storage_uri, headers_enabled=True
        )
        hello = limiter.limit(PEERS_LIMIT)(hello)
    app.add_url_rule("/", view_func=hello)
    return app


def fastapi_app(storage_uri: str | None = None, *, sends_fields: bool = False) -> Any:
    """With slowapi, if a storage is given."""
    app = fastapi.FastAPI(openapi_url=None)

    async def hello(request: fastapi.Request, response: fastapi.Response) -> PlainTextResponse:
        return PlainTextResponse("Hello\n", headers=dict(FIELDS) if sends_fields else None)

    if storage_uri is not None:
        app.state.limiter = slowapi.Limiter(
            slowapi.util.get_remote_address, storage_uri=storage_uri, headers_enabled=True
        )
        hello = app.state.limiter.limit(PEERS_LIMIT)(hello)
    app.add_api_route("/", hello)
    return app


# A server serves "web_apps:served", of this kind and with this many limits, all in one store; or "fields": the
# application sends a limit's fields itself; or "silent": one limit that sends no fields.
def _served() -> Any:
    kind, limits = os.environ["BENCH_APP"].split("+")
    sends_fields = limits == "fields"
    app: Any
    if kind in {"flask", "fastapi"}:
        app = {"flask": flask_app, "fastapi": fastapi_app}[kind](sends_fields=sends_fields)
    else:
        app = {"wsgi": (plain_wsgi, wsgi_with_fields), "asgi": (plain_asgi, asgi_with_fields)}[kind][sends_fields]
    if limits in {"0", "fields"}:
        return app
    rules = rules_of(Store(os.environ["BENCH_STORE"], keys=10_000), 1 if limits == "silent" else int(limits))
    middleware = WSGIMiddleware if kind in {"wsgi", "flask"} else ASGIMiddleware
    return middleware(app, rules, headers=()) if limits == "silent" else middleware(app, rules)


if "BENCH_APP" in os.environ:
    served = _served()
