"""The WSGI middleware (PEP 3333)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from forebay.web.answers import Denial, body_too_large, status_line
from forebay.web.body import BodyTooLarge, is_told_longer
from forebay.web.gate import Gate, OnEnd
from forebay.web.passing import Passage, WSGIPassing
from forebay.web.request import Environ, KeyFunction, WSGIRequest
from forebay.web.rules import DISCONNECTED, Answer, BodyLimit, Rule, outcome

__all__ = ["WSGIMiddleware"]

StartResponse = Callable[..., Callable[[bytes], object]]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class WSGIMiddleware(WSGIPassing):
    """Limits around a WSGI application: ``app = WSGIMiddleware(app, [Rule(limiter)])``.

    See ``Gate`` for the arguments. Works in threads, in processes, forked after it was made or before, and under
    gevent; never waits, but over a ``RedisStore`` for Redis.
    """

    def __init__(
        self,
        app: Application,
        rules: Iterable[Rule | BodyLimit],
        *,
        client: KeyFunction | None = None,
        headers: str | Iterable[str] = "draft-10",
        partition_keys: bool = False,
    ) -> None:
        self.app = app
        self.gate = Gate(rules, client=client, headers=headers, partition_keys=partition_keys, in_loop=False)

    def _bounded(self, request: WSGIRequest, start_response: StartResponse) -> Iterable[bytes]:
        """A request whose body may have a limit."""
        most_bytes = self.gate.max_body_bytes(request)
        if most_bytes is None:
            return self._pass_on(self.app, request, start_response)
        if is_told_longer(request, most_bytes):
            return _send(body_too_large(most_bytes), request, start_response)
        return self._pass_on(_Within(self.app, most_bytes), request, start_response)

    def _otherwise(
        self, app: Application, request: WSGIRequest, passage: Passage | Denial, start_response: StartResponse
    ) -> Iterable[bytes]:
        """A request that is denied, or whose end has to be told."""
        if isinstance(passage, Denial):
            return _send(self.gate.answer(request, passage), request, start_response)
        assert passage.on_end is not None
        return Ended(app, request.native, start_response, passage.fields, passage.on_end)


def _send(answer: Answer, request: WSGIRequest, start_response: StartResponse) -> Iterable[bytes]:
    start_response(status_line(answer.status), answer.fields)
    # Not every server leaves it out by itself.
    return [] if request.method == "HEAD" else [answer.body]


def begin(
    start_response: StartResponse, status: str, headers: list[tuple[str, str]], exc_info: Any
) -> Callable[[bytes], object]:
    """Not every server takes None for an error."""
    return start_response(status, headers) if exc_info is None else start_response(status, headers, exc_info)


class Ended:
    """An answer whose end is told: when its last part is sent, or when the server closes it.

    What comes back then is there before the client has its whole answer and can ask again: where the length is told by
    a field or by the body itself. A server closes the others after they have been sent.
    """

    def __init__(
        self, app: Application, environ: Environ, start_response: StartResponse, fields: Sequence[Any], on_end: OnEnd
    ) -> None:
        self.start_response = start_response
        self.fields, self.on_end = fields, on_end
        # Until the application has said something else.
        self.status = 500
        self.is_begun = self.is_sent = False
        self.left: int | None = None
        try:
            self.body = app(environ, self.start)
            self.parts = iter(self.body)
            if self.left is None and isinstance(self.body, (list, tuple)):
                self.left = sum(map(len, self.body))
        except BaseException:
            on_end.end(500)
            raise

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        self.status, self.is_begun = int(status[:3]), True
        headers = [*headers, *self.fields]
        if self.on_end:
            for name, value in headers:
                if name.lower() == "content-length" and value.isdecimal():
                    self.left = int(value)
            self.on_end.begin(self.status)
        return begin(self.start_response, status, headers, exc_info)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            part = next(self.parts)
        except StopIteration:
            self.is_sent = True
            raise
        except BaseException:
            self.status, self.is_sent = 500, True
            raise
        if self.left is not None:
            self.left -= len(part)
            if self.left <= 0:
                self.is_sent = True
                self.on_end.end(self.status)
        self.on_end.renew_with_part()
        return part

    def close(self) -> None:
        try:
            close = getattr(self.body, "close", None)
            if close is not None:
                close()
        finally:
            is_unanswered = not self.is_begun and not self.is_sent
            self.on_end.end(DISCONNECTED if is_unanswered else outcome(self.status, not self.is_sent))


class _Within:
    """An application whose requests' bodies are limited: what it reads beyond is an error, and answered by 413."""

    def __init__(self, app: Application, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"] = _LimitedBody(environ["wsgi.input"], self.most_bytes)
        return _AnswerOrTooLarge(self.app, environ, start_response, body, body_too_large(self.most_bytes))


class _AnswerOrTooLarge:
    """What the application answers; or, if it has read too much before the first part of that, that it has.

    Whatever it makes of its failure to read, and also if it reads only when the server asks for the first part.
    """

    def __init__(
        self, app: Application, environ: Environ, start_response: StartResponse, read: _LimitedBody, otherwise: Answer
    ) -> None:
        self.start_response, self.read, self.otherwise = start_response, read, otherwise
        self.is_begun = False
        self.body: Iterable[bytes] = ()
        self.parts: Iterator[bytes] = iter(())
        try:
            self.body = app(environ, self.start)
            self.parts = iter(self.body)
        except Exception:
            if not read.is_exceeded:
                raise

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        if self.read.is_exceeded and not self.is_begun:
            raise BodyTooLarge("the body was larger than its limit")
        return begin(self.start_response, status, headers, exc_info)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self.is_begun:
            return next(self.parts)
        part = b""
        ends: BaseException | None = None
        try:
            part = next(self.parts)
        except (StopIteration, Exception) as error:
            ends = error
        self.is_begun = True
        if self.read.is_exceeded:
            self.parts = iter(())
            # The application may have started its answer already, and nothing of it has been sent.
            failure = BodyTooLarge("the body was larger than its limit")
            exc_info = (BodyTooLarge, failure, None)
            self.start_response(status_line(self.otherwise.status), self.otherwise.fields, exc_info)
            return self.otherwise.body
        if ends is not None:
            raise ends
        return part

    def close(self) -> None:
        close = getattr(self.body, "close", None)
        if close is not None:
            close()


class _LimitedBody:
    """A request's body that can't be read further than its limit."""

    def __init__(self, body: Any, most_bytes: int) -> None:
        self.body = body
        self.left = most_bytes
        self.is_exceeded = False

    def _counted(self, part: bytes) -> bytes:
        self.left -= len(part)
        if self.left < 0:
            self.is_exceeded = True
            raise BodyTooLarge(f"the body is larger than its limit, by {-self.left} bytes or more")
        return part

    def _most(self, size: int | None) -> int:
        """One byte more than is left tells that there is more."""
        return self.left + 1 if size is None or size < 0 else min(size, self.left + 1)

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size >= 0:
            return self._counted(self.body.read(self._most(size)))
        parts = []
        while part := self._counted(self.body.read(min(self.left + 1, 65536))):
            parts.append(part)
        return b"".join(parts)

    def readline(self, size: int | None = -1) -> bytes:
        return self._counted(self.body.readline(self._most(size)))

    def readlines(self, hint: int | None = None) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line
