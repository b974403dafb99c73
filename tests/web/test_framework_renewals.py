"""Leases that are renewed while a request waits in a framework, or in a layer around it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import flask
import pytest
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from held_permits import Held, WatchedClock
from web_requests import Wire, asgi_scope, call_wsgi, wsgi_environ

from forebay import Concurrency, MinInterval, Store, TokenBucket
from forebay.contrib.flask import Limits
from forebay.web import ASGIMiddleware, ByteRate, Rule, WSGIMiddleware, everyone

if not settings.configured:
    settings.configure(
        SECRET_KEY="known to everybody",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"],
    )

import forebay.contrib.django as in_django

LEASE_S = 3
urlpatterns: list[Any] = []


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def store(clock: WatchedClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


@pytest.fixture
def held(clock: WatchedClock, store: Store) -> Held:
    limiter = Concurrency(store, "held", 1, lease=LEASE_S)
    return Held(clock, limiter, Rule(limiter, key=everyone))


@pytest.fixture
def slow(store: Store) -> TokenBucket:
    """A byte each ten seconds: far longer than the lease."""
    return TokenBucket(store, "slow", "6 B/minute", burst=1)


@pytest.mark.parametrize("of_view", [False, True])
def test_flask_renews_while_a_piece_waits(held: Held, slow: TokenBucket, of_view: bool) -> None:
    app = flask.Flask(__name__)
    limits = Limits(app, [ByteRate(slow), *([] if of_view else [held.rule])])

    def view() -> Iterator[str]:
        held.watch()
        return iter(["abc"])

    app.get("/")(limits.limit(held.rule)(view) if of_view else view)
    assert call_wsgi(app).body == b"abc"
    assert held.ended()


@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("metered", [False, True])
def test_flask_renews_while_it_reads(
    held: Held, store: Store, clock: WatchedClock, metered: bool, of_view: bool
) -> None:
    uploads = ByteRate(TokenBucket(store, "uploads", "1 kB/second", burst=1000), bodies="requests", most_wait="1 hour")
    app = flask.Flask(__name__)
    limits = Limits(app, [*([uploads] if metered else []), *([] if of_view else [held.rule])])

    def view() -> str:
        held.watch()
        return str(len(flask.request.get_data()))

    app.post("/")(limits.limit(held.rule)(view) if of_view else view)

    class SlowBody(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            part = super().read(size)
            clock.advance(LEASE_S / 2 * len(part) / 4096)
            return part

    environ = {**wsgi_environ(method="POST", body=b"x" * 40_000), "wsgi.input": SlowBody(b"x" * 40_000)}
    response = app(environ, lambda *_: lambda part: None)
    assert b"".join(response) == b"40000"
    response.close()  # type: ignore[attr-defined]
    assert held.ended()


def test_flask_renews_while_a_view_delays(held: Held, store: Store) -> None:
    gap = MinInterval(store, "gap", "1 minute")
    gap.reserve("everyone")
    app = flask.Flask(__name__)
    limits = Limits(app, [held.rule])
    # After the rules for all requests have been decided.
    app.before_request(held.watch)
    app.get("/")(limits.limit(Rule(gap, key=everyone, delay="1 hour"))(lambda: "abc"))
    assert call_wsgi(app).body == b"abc"
    assert held.ended()


def test_leases_of_django_are_renewed_while_a_piece_waits(
    held: Held, slow: TokenBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "FOREBAY", {"RULES": [held.rule]}, raising=False)
    in_django._gates.cache_clear()

    def view(request: HttpRequest) -> StreamingHttpResponse:
        held.watch()
        return StreamingHttpResponse(iter([b"a", b"bc"]))

    async def async_view(request: HttpRequest) -> StreamingHttpResponse:
        async def parts() -> AsyncIterator[bytes]:
            for part in (b"a", b"bc"):
                yield part

        held.watch()
        return StreamingHttpResponse(parts())

    def wsgi(environ: Any, start_response: Any) -> Iterable[bytes]:
        response = in_django.LimitsMiddleware(view)(WSGIRequest(environ))
        start_response(f"{response.status_code} OK", list(response.items()))
        return response  # type: ignore[no-any-return]

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        response = await in_django.LimitsMiddleware(async_view)(ASGIRequest(scope, io.BytesIO()))
        await send({"type": "http.response.start", "status": response.status_code, "headers": []})
        async for part in response:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        response.close()
        await send({"type": "http.response.body", "body": b""})

    assert call_wsgi(WSGIMiddleware(wsgi, [ByteRate(slow)])).body == b"abc"
    assert held.ended()
    wire = Wire({"type": "http.request", "body": b"", "more_body": False})
    scope = asgi_scope(query_string=b"")
    asyncio.run(ASGIMiddleware(asgi, [ByteRate(slow)])(scope, wire.receive, wire.send))
    assert wire.answered().body == b"abc"
    assert held.ended()
    in_django._gates.cache_clear()
