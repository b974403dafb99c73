"""Applications behind the middleware, for real servers. The environment selects their behaviour.

``MIDDLEWARE_STORE``: a store's name; empty: a private store.
``MIDDLEWARE_WHEN``: ``import``, or ``late`` for a middleware that is made in the worker, as frameworks do it.
``MIDDLEWARE_KIND``: ``wsgi`` or ``asgi``.
``MIDDLEWARE_MADE``: a directory with one file for each process that made its middleware.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from middleware_app_limits import KEYS, LIMIT

from forebay import Concurrency, FixedWindow, Store, TokenBucket
from forebay.web import ASGIMiddleware, Rule, WSGIMiddleware, everyone

name = os.environ.get("MIDDLEWARE_STORE")
store = Store(name, keys=KEYS) if name else Store.private(keys=KEYS)
RULES = [
    Rule(TokenBucket(store, "limit", f"{LIMIT}/year", LIMIT), path="/", key=everyone),
    Rule(TokenBucket(store, "kept", "100/year", 100), path="/stream", key=everyone, charge_on=range(200, 300)),
    Rule(Concurrency(store, "held", 3, "10 minutes"), path="/stream", key=everyone),
    Rule(FixedWindow(store, "denied", "1/year"), path="/denied", key=everyone, cost=2),
]
PART = b"x" * 65536


def hello(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return _parts() if environ["PATH_INFO"] == "/stream" else [str(os.getpid()).encode()]


def _parts() -> Iterator[bytes]:
    """An endless body: only a disconnect ends it."""
    while True:
        yield PART
        time.sleep(0.001)


async def async_hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        return await send({"type": "lifespan.shutdown.complete"})
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
    await send(start)
    if scope["path"] == "/stream":
        gone = asyncio.ensure_future(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            await asyncio.sleep(0.001)
        return None
    return await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Late:
    """Makes its middleware at the first call: under ASGI, the lifespan scope."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.made = make, None

    def __call__(self, *arguments: Any) -> Any:
        if self.made is None:
            self.made = self.make()
        return self.made(*arguments)


class LateASGI(Late):
    # Some servers check that the application is a coroutine function.
    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        return await super().__call__(scope, receive, send)


def make() -> Any:
    made: Any = ASGIMiddleware(async_hello, RULES) if is_asgi else WSGIMiddleware(hello, RULES)
    Path(os.environ["MIDDLEWARE_MADE"], str(os.getpid())).touch()
    return made


is_asgi = os.environ["MIDDLEWARE_KIND"] == "asgi"
is_late = os.environ["MIDDLEWARE_WHEN"] == "late"
app: Any = (LateASGI if is_asgi else Late)(make) if is_late else make()
