"""Requests to an application behind the middleware, without a server, the same for WSGI and ASGI."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from forebay.web import ASGIMiddleware, WSGIMiddleware

CLIENT = "192.0.2.1"
Kind = Literal["wsgi", "asgi"]


@dataclass(frozen=True)
class Answered:
    """A whole response. Field names are in lower case, in the order of the response."""

    status: int
    fields: list[tuple[str, str]]
    body: bytes

    def __getitem__(self, name: str) -> str:
        values = self.all(name)
        assert len(values) == 1, f"{name}: {values} in {self.fields}"
        return values[0]

    def __contains__(self, name: str) -> bool:
        return bool(self.all(name))

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Site:
    """An application behind the middleware; it answers with the status that `handle` returns."""

    kind: Kind
    rules: Any
    options: dict[str, Any] = field(default_factory=dict)
    handle: Callable[[], int] = lambda: 200
    handled: int = 0

    def __post_init__(self) -> None:
        if self.kind == "wsgi":
            # Validators outside and inside the middleware: the server and the application both see valid WSGI.
            self.app: Any = validator(WSGIMiddleware(validator(self._wsgi), self.rules, **self.options))  # type: ignore[arg-type]
        else:
            self.app = ASGIMiddleware(self._asgi, self.rules, **self.options)

    def request(self, path: str = "/", method: str = "GET", **options: Any) -> Answered:
        return (call_wsgi if self.kind == "wsgi" else call_asgi)(self.app, path, method, **options)

    def _handle(self) -> int:
        self.handled += 1
        return self.handle()

    def _wsgi(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        status = self._handle()
        start_response(f"{status} ResolvedRequest", [("Content-Type", "text/plain")])
        return [b"done"]

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        status = self._handle()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"done"})


def wsgi_environ(
    path: str = "/",
    method: str = "GET",
    *,
    client: str | None = CLIENT,
    fields: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    chunked: bool = False,
    user: str | None = None,
) -> dict[str, Any]:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ |= {"PATH_INFO": path, "REQUEST_METHOD": method, "QUERY_STRING": "", "wsgi.input": io.BytesIO(body)}
    if client is not None:
        environ["REMOTE_ADDR"] = client
    if user is not None:
        environ["REMOTE_USER"] = user
    for name, value in fields:
        key = "HTTP_" + name.upper().replace("-", "_")
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    if chunked:
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    elif body:
        environ["CONTENT_LENGTH"] = str(len(body))
    return environ


def call_wsgi(app: Any, path: str = "/", method: str = "GET", **options: Any) -> Answered:
    """Call `app` as a server does: iterate to the end, then close."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, fields: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if started and exc_info is None:
            raise AssertionError("start_response was called twice")
        started[:] = [(status, fields)]
        return written.append

    answer = app(wsgi_environ(path, method, **options), start_response)
    try:
        written.extend(answer)
    finally:
        if hasattr(answer, "close"):
            answer.close()
    status, fields = started[0]
    return Answered(int(status[:3]), [(name.lower(), value) for name, value in fields], b"".join(written))


def asgi_scope(
    path: str = "/",
    method: str = "GET",
    *,
    client: str | None = CLIENT,
    fields: Sequence[tuple[str, str]] = (),
    user: Any = None,
    **scope: Any,
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields],
        "client": None if client is None else (client, 4711),
        **({} if user is None else {"user": user}),
        **scope,
    }


class Wire:
    """Both ends of an ASGI connection: the messages that the application receives, and those that it has sent.

    Without messages left, `receive` waits for the end of the response, and then reports a disconnect, as servers do.
    """

    def __init__(self, *messages: Mapping[str, Any]) -> None:
        self.messages = [dict(message) for message in messages]
        self.sent: list[dict[str, Any]] = []
        self.received = 0
        self._has_ended = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await self._has_ended.wait()
            return {"type": "http.disconnect"}
        self.received += 1
        return self.messages.pop(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(dict(message))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._has_ended.set()

    def answered(self) -> Answered:
        starts = [message for message in self.sent if message["type"].endswith("response.start")]
        assert len(starts) == 1, self.sent
        return Answered(
            starts[0]["status"],
            [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in starts[0]["headers"]],
            b"".join(m.get("body", b"") for m in self.sent if m["type"].endswith("response.body")),
        )


def call_asgi(
    app: Any, path: str = "/", method: str = "GET", *, body: bytes = b"", chunked: bool = False, **options: Any
) -> Answered:
    parts = [body[at : at + 7] for at in range(0, len(body), 7)] or [b""]
    fields = [*options.pop("fields", ())]
    fields += [("Transfer-Encoding", "chunked")] if chunked else [("Content-Length", str(len(body)))] if body else []
    wire = Wire(
        *[{"type": "http.request", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)]
    )
    asyncio.run(app(asgi_scope(path, method, fields=fields, **options), wire.receive, wire.send))
    return wire.answered()


class HeldRequests:
    """An ASGI application in an event loop, and the requests that wait in it."""

    def __init__(self, rules: Any) -> None:
        self._limited = ASGIMiddleware(self._app, rules)
        self._waiting: list[asyncio.Task[Any]] = []

    async def ask(self, tier: bytes = b"") -> int | None:
        """The status; None: the request waits for its turn."""
        statuses: list[int] = []

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        fields = [(b"tier", tier)]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": fields, "client": (CLIENT, 1)}
        task = asyncio.ensure_future(self._limited(scope, self._receive, send))
        for _ in range(3):
            await asyncio.sleep(0)
        if task.done():
            return statuses[0]
        self._waiting.append(task)
        return None

    async def cancel(self, count: int = 1) -> None:
        """The clients of so many of them leave, of the latest first."""
        for _ in range(count):
            task = self._waiting.pop()
            task.cancel()
            await asyncio.wait([task])

    async def _receive(self) -> Any: ...

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
