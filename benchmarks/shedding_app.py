"""The application and its backend for shedding_gunicorn.py: both by sockets of this host.

The WSGI application asks the backend for each request. The environment names the shedder (``SHEDDER``), its store
(``SHEDDING_STORE``) and the backend's socket (``SHEDDING_BACKEND``).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from forebay import Store
from forebay.shedding import AIMD, AdaptiveLimit, Gradient2, Shedder
from forebay.web import Shed, WSGIMiddleware

SERVERS, SERVICE_S = 5, 0.1

SHEDDERS: dict[str, Callable[[Store], Shedder | None]] = {
    "nothing": lambda store: None,
    "Gradient2": lambda store: AdaptiveLimit(store, "backend", Gradient2(), window="500ms"),
    "AIMD": lambda store: AdaptiveLimit(store, "backend", AIMD(timeout="300ms"), window="500ms"),
}


def ask_backend(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    with socket.socket(socket.AF_UNIX) as backend:
        backend.connect(os.environ["SHEDDING_BACKEND"])
        answer = backend.recv(16)
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(answer)))])
    return [answer]


def make_app() -> Any:
    """The application, with the shedder that the environment names."""
    shedder = SHEDDERS[os.environ["SHEDDER"]](Store(os.environ["SHEDDING_STORE"], keys=100))
    return WSGIMiddleware(ask_backend, [] if shedder is None else [Shed(shedder)])


async def serve_backend(path: str) -> None:
    """Handle `SERVERS` requests at one time, each for `SERVICE_S`; queue the others."""
    servers = asyncio.Semaphore(SERVERS)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with servers:
            await asyncio.sleep(SERVICE_S)
        writer.write(b"answer\n")
        writer.close()

    server = await asyncio.start_unix_server(handle, path, backlog=1000)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_backend(sys.argv[1]))
