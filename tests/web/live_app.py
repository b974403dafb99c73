"""An application with live rules, for a real gunicorn: ``LIVE_STORE`` is the store's path, ``LIVE_RULES`` the file."""

from __future__ import annotations

import os
from typing import Any

from forebay import Store
from forebay.rules import FileSource, LiveRules
from forebay.web import ASGIMiddleware, WSGIMiddleware

store = Store("live", keys=1000, path=os.environ["LIVE_STORE"])
rules = LiveRules(FileSource(os.environ["LIVE_RULES"]), store=store, interval="50 ms")


def hello(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


async def async_hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        return await send({"type": "lifespan.shutdown.complete"})
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    return await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


app = WSGIMiddleware(hello, rules)
async_app = ASGIMiddleware(async_hello, rules)
