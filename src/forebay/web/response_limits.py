"""Limits of the size of responses: a larger one is replaced by a 500 before it is sent, or else is cut.

A response that states its length is replaced. One that doesn't is counted while it is sent. When it exceeds its limit,
an exception ends it, so the server closes the connection, and the client sees that the response is incomplete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any, Final

from forebay.errors import ForebayError, short_repr
from forebay.web.answers import encoded, response_too_large, status_line
from forebay.web.denials import log
from forebay.web.request import Environ, Scope
from forebay.web.sent_files import hide_files, refuse_file

__all__ = ["ResponseTooLarge", "with_asgi_limit", "with_wsgi_limit"]

StartResponse = Callable[..., Callable[[bytes], object]]
WSGIApplication = Callable[[Environ, StartResponse], Iterable[bytes]]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
ASGIApplication = Callable[[Scope, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

WITHOUT_BODY: Final = (204, 304)
MOST_DIGITS: Final = 20


class ResponseTooLarge(ForebayError, RuntimeError):
    """A response has more bytes than its limit, of which some may have been sent."""


class _Size:
    """How many bytes of one response may still be sent. Nothing of a response to HEAD counts."""

    def __init__(self, max_bytes: int, method: str, path: str) -> None:
        self._left, self._max_bytes, self._method, self._path = max_bytes, max_bytes, method, path
        self._is_exceeded = False

    def has_room(self, count: int) -> bool:
        """Whether so many bytes may be sent. Logs it if not."""
        if self._method == "HEAD" or count <= self._left:
            return True
        log.error(
            "the response to %s %s has more than %d bytes, the limit of its BodyLimit",
            *(short_repr(self._method), short_repr(self._path), self._max_bytes),
        )
        return False

    def take(self, count: int) -> bool:
        """Count bytes that are sent; False if they may not be. From then on none may, nor may the response end."""
        if self._is_exceeded or not self.has_room(count):
            self._is_exceeded = True
            return False
        self._left -= count
        return True

    def error(self) -> ResponseTooLarge:
        return ResponseTooLarge(f"the response has more than {self._max_bytes} bytes, the limit of its BodyLimit")


def _stated_bytes(status: int, length: Any) -> int | None:
    """How many bytes a response of that ``Content-Length`` has, or None if it doesn't say."""
    if length is None or not (length.isascii() and length.isdigit()):
        return None
    if status in WITHOUT_BODY:
        return 0
    return int(length) if len(length) <= MOST_DIGITS else 10**MOST_DIGITS


def with_wsgi_limit(app: WSGIApplication, max_bytes: int) -> WSGIApplication:
    """`app`, whose responses have at most so many bytes."""

    def limited(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        size = _Size(max_bytes, environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""))
        response = _WSGIResponse(app, environ, start_response, size)
        return response.body if response.is_checked else response

    return limited


class _WSGIResponse:
    def __init__(self, app: WSGIApplication, environ: Environ, start_response: StartResponse, size: _Size) -> None:
        self._start_response, self._size = start_response, size
        self._has_fitting_length = False
        self._is_sent = False
        """Whether the server has a part of the application's response."""
        self._instead: Iterator[bytes] | None = None
        self.body = app(environ, self._start)
        self._parts: Iterator[bytes] = iter(self.body)
        is_whole = self._instead is None and isinstance(self.body, (list, tuple))
        if is_whole and not self._is_sent and not size.has_room(sum(map(len, self.body))):
            self._replace((ResponseTooLarge, size.error(), None))
        # A server may send a file in its own way. Some send more of other bodies than they state.
        is_file = self._has_fitting_length and _is_file(self.body, environ.get("wsgi.file_wrapper"))
        self.is_checked = self._instead is None and not self._is_sent and (is_whole or is_file)
        """Whether the server may have the body as it is."""

    def _start(self, status: str, headers: list[tuple[str, str]], *error: Any) -> Callable[[bytes], object]:
        length = next((value.strip() for name, value in headers if name.lower() == "content-length"), None)
        count = _stated_bytes(int(status[:3]), length)
        if not self._size.has_room(count or 0):
            self._replace(*error)
            return lambda data: None
        self._has_fitting_length = count is not None
        self._instead = None
        write = self._start_response(status, headers, *error)

        def write_counted(data: bytes) -> object:
            if not self._size.take(len(data)):
                raise self._size.error()
            self._is_sent = self._is_sent or bool(data)
            return write(data)

        return write_counted

    def _replace(self, *error: Any) -> None:
        instead = response_too_large()
        self._instead = iter([instead.body])
        self._start_response(status_line(instead.status), instead.fields, *error)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._instead is None:
            part = next(self._parts, None)
            if self._instead is None:
                if self._size.take(len(part or b"")):
                    if part is None:
                        raise StopIteration
                    self._is_sent = self._is_sent or bool(part)
                    return part
                if self._is_sent:
                    raise self._size.error()
                # The response has been started, and none of it is sent yet.
                self._replace((ResponseTooLarge, self._size.error(), None))
        assert self._instead is not None
        return next(self._instead)

    def close(self) -> None:
        close = getattr(self.body, "close", None)
        if close is not None:
            close()


def _is_file(body: Any, wrapper: Any) -> bool:
    """Whether a server sends it in its own way. uWSGI's wrapper is a function that returns the file itself."""
    return (isinstance(wrapper, type) and isinstance(body, wrapper)) or hasattr(body, "read")


def with_asgi_limit(app: ASGIApplication, max_bytes: int) -> ASGIApplication:
    """`app`, whose responses have at most so many bytes."""

    async def limited(scope: Scope, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        size = _Size(max_bytes, scope["method"], scope["path"])
        hide_files(scope)
        await app(scope, receive, _ASGIResponse(send, size).send)

    return limited


class _ASGIResponse:
    def __init__(self, send: Send, size: _Size) -> None:
        self._send, self._size = send, size
        self._is_replaced = False

    async def send(self, message: Message) -> None:
        if self._is_replaced:
            return
        refuse_file(message["type"])
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            length = next((value for name, value in headers if name.lower() == b"content-length"), None)
            if not self._size.has_room(_stated_bytes(message["status"], length) or 0):
                self._is_replaced = True
                await self._send_instead()
                return
        elif message["type"] == "http.response.body" and not self._size.take(len(message.get("body", b""))):
            raise self._size.error()
        await self._send(message)

    async def _send_instead(self) -> None:
        instead = response_too_large()
        start = {"type": "http.response.start", "status": instead.status, "headers": encoded(instead.fields)}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": instead.body})
