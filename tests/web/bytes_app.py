"""An application with byte rates, for real servers. The environment selects its behaviour, as of ``middleware_app``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bytes_app_limits import AFTER, BURST, KEYS, RATE, SIZE

from forebay import Store, TokenBucket
from forebay.web import ASGIMiddleware, ByteRate, WSGIMiddleware, everyone

store = Store(os.environ["MIDDLEWARE_STORE"], keys=KEYS)
bucket = TokenBucket(store, "bytes", f"{RATE} B/second", BURST)
stuck = TokenBucket(store, "stuck", "1 kB/hour")
RULES = [
    ByteRate(bucket, path=["/body", "/file"], after=AFTER, key=everyone),
    ByteRate(bucket, bodies="requests", path="/upload", after=AFTER, key=everyone),
    ByteRate(stuck, path="/stuck", most_wait="1 day", most_held=1, key=everyone),
]


def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    path = environ["PATH_INFO"]
    count = len(environ["wsgi.input"].read()) if path == "/upload" else SIZE
    fields = [("X-Worker", str(os.getpid())), ("X-Read", str(count))]
    if path == "/upload":
        start_response("200 OK", [*fields, ("Content-Length", "0")])
        return []
    start_response("200 OK", [*fields, ("Content-Length", str(SIZE))])
    if path != "/file":
        return [b"x" * SIZE]
    file = TemporaryFile()  # noqa: SIM115  # the server closes it
    file.write(b"x" * SIZE)
    file.seek(0)
    files: Iterable[bytes] = environ["wsgi.file_wrapper"](file, 65536)
    return files


async def serve_async(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        return await send({"type": "lifespan.shutdown.complete"})
    count, message = 0, {"more_body": scope["path"] == "/upload"}
    while message.get("more_body"):
        message = await receive()
        count += len(message.get("body", b""))
    body = b"" if scope["path"] == "/upload" else b"x" * SIZE
    fields = [(b"content-length", str(len(body)).encode()), (b"x-worker", str(os.getpid()).encode())]
    fields.append((b"x-read", str(count or SIZE).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    return await send({"type": "http.response.body", "body": body})


is_asgi = os.environ["MIDDLEWARE_KIND"] == "asgi"
app: Any = ASGIMiddleware(serve_async, RULES) if is_asgi else WSGIMiddleware(serve, RULES)
Path(os.environ["MIDDLEWARE_MADE"], str(os.getpid())).touch()
