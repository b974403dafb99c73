"""The WSGI middleware (PEP 3333)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

from forebay.web.answers import body_too_large, status_line
from forebay.web.cleanup import RequestCleanup
from forebay.web.fastpath import Passage, WSGIFastPath
from forebay.web.gate import Gate
from forebay.web.inputs import READ_AT_ONCE, PiecewiseInput
from forebay.web.live_gate import VersionedRules, limit_path
from forebay.web.metered_wsgi import MeteredApplication
from forebay.web.native_requests import WSGIRequest
from forebay.web.options import GateOptions, GivenRules
from forebay.web.renewals import RENEWALS, renew_while_reading, renewals_of
from forebay.web.request import BodyTooLarge, Environ, declares_more_than
from forebay.web.response_limits import with_wsgi_limit
from forebay.web.rules import DISCONNECTED, Answer, Denial, outcome

__all__ = ["WSGIMiddleware"]

StartResponse = Callable[..., Callable[[bytes], object]]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class WSGIMiddleware(WSGIFastPath):
    """Limits around a WSGI application: ``app = WSGIMiddleware(app, [Rule(limiter)])``.

    See ``Gate`` for the arguments. Works in threads, under gevent, and in processes, whether they were forked before it
    was made or after. It waits for nothing, except for Redis over a ``RedisStore``, and for the turns of a `delay` or a
    ``ByteRate``.
    """

    gate: Gate

    def __init__(
        self,
        app: Application,
        rules: GivenRules | VersionedRules,
        **options: Unpack[GateOptions],
    ) -> None:
        self.app = app
        limit_path(self, rules, **options, in_loop=False)

    def _respond_bounded(self, request: WSGIRequest, start_response: StartResponse) -> Iterable[bytes]:
        """A request whose body or response may have limits of its own."""
        app, gate = self.app, self.gate
        max_bytes, max_sent = gate.max_body_bytes(request), gate.max_response_bytes(request)
        if max_bytes is not None and declares_more_than(max_bytes, request):
            return _send(body_too_large(max_bytes), request, start_response)
        if max_sent is not None:
            app = with_wsgi_limit(app, max_sent)
        meters = gate.byte_rates.admit(request) if gate.byte_rates else None
        if isinstance(meters, Denial):
            return _send(gate.answer(request, meters), request, start_response)
        if request.method == "HEAD" and (gate.byte_rates or max_sent is not None):
            # Some servers would send the body, which neither counts nor is metered.
            app = functools.partial(_WithoutBody, app)
        if meters is not None:
            app = MeteredApplication(app, meters)
        if max_bytes is not None:
            app = _WithBodyLimit(app, max_bytes)
        return self._respond(gate, app, request, start_response)

    def _respond_unusual(
        self, app: Application, request: WSGIRequest, passage: Passage | Denial, start_response: StartResponse
    ) -> Iterable[bytes]:
        """A request that is denied, or has a cleanup."""
        if isinstance(passage, Denial):
            return _send(self.gate.answer(request, passage), request, start_response)
        assert passage.cleanup is not None
        passage.cleanup.wait_turn(request.native.get(RENEWALS))
        if passage.cleanup.has_renewals:
            renewals = renewals_of(request.native)
            renewals.add(passage.cleanup)
            renew_while_reading(request.native, renewals)
        return TrackedResponse(app, request.native, start_response, passage.fields, passage.cleanup)


def _send(answer: Answer, request: WSGIRequest, start_response: StartResponse) -> Iterable[bytes]:
    start_response(status_line(answer.status), answer.fields)
    # Some servers send the body although the method is HEAD.
    return [] if request.method == "HEAD" else [answer.body]


def start(
    start_response: StartResponse, status: str, headers: list[tuple[str, str]], exc_info: Any
) -> Callable[[bytes], object]:
    """Call `start_response`: with two arguments if there is no error, as some servers take no None for the third."""
    return start_response(status, headers) if exc_info is None else start_response(status, headers, exc_info)


class TrackedResponse:
    """The response to a request with a cleanup: it adds header fields and observes how the response ends.

    If a header field or the body itself says the length, the permits are back before the last part is sent, so before
    the client can ask again. Otherwise they are back when the server closes the response, after it has been sent.
    """

    def __init__(
        self,
        app: Application,
        environ: Environ,
        start_response: StartResponse,
        fields: Sequence[Any],
        cleanup: RequestCleanup,
    ) -> None:
        self.fields, self.cleanup = fields, cleanup
        # Until the application starts a response.
        self.status = 500
        self.is_started = False
        self._start_response = start_response
        self._is_complete = False
        self._left_bytes: int | None = None
        try:
            self.body = app(environ, self.start)
            self._parts = iter(self.body)
            if self._left_bytes is None and isinstance(self.body, (list, tuple)):
                self._left_bytes = sum(map(len, self.body))
        except BaseException:
            cleanup.end(500)
            raise

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        self.status, self.is_started = int(status[:3]), True
        headers = [*headers, *self.fields]
        if self.cleanup:
            for name, value in headers:
                if name.lower() == "content-length" and value.isdecimal():
                    self._left_bytes = int(value)
            self.cleanup.begin(self.status)
        write = start(self._start_response, status, headers, exc_info)
        if not self.cleanup.has_renewals:
            return write

        def write_and_renew(part: bytes) -> object:
            self.cleanup.renew_if_due()
            written = write(part)
            self.cleanup.renew_if_due()
            return written

        return write_and_renew

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            part = next(self._parts)
        except StopIteration:
            self._is_complete = True
            raise
        except BaseException:
            self.status, self._is_complete = 500, True
            raise
        if self._left_bytes is not None:
            self._left_bytes -= len(part)
            if self._left_bytes <= 0:
                self._is_complete = True
                self.cleanup.end(self.status)
        self.cleanup.renew_if_due()
        return part

    def close(self) -> None:
        try:
            close = getattr(self.body, "close", None)
            if close is not None:
                close()
        finally:
            is_unanswered = not self.is_started and not self._is_complete
            self.cleanup.end(DISCONNECTED if is_unanswered else outcome(self.status, not self._is_complete))


class _WithoutBody:
    """The application's response to a HEAD request, of which no byte of a body goes on to the server."""

    def __init__(self, app: Application, environ: Environ, start_response: StartResponse) -> None:
        self._start_response = start_response
        self._is_sent = False
        self._body = app(environ, self._start)
        self._parts = iter(self._body)

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        start(self._start_response, status, headers, exc_info)
        return lambda part: None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        # With its first part that isn't empty the response has started. The others aren't made.
        if self._is_sent:
            raise StopIteration
        self._is_sent = bool(next(self._parts))
        return b""

    def close(self) -> None:
        close = getattr(self._body, "close", None)
        if close is not None:
            close()


class _WithBodyLimit:
    """An application that fails when it reads more of a request's body; the response is then 413."""

    def __init__(self, app: Application, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if (given := environ.get("wsgi.input")) is None:
            return self.app(environ, start_response)
        body = environ["wsgi.input"] = _LimitedBody(given, self.max_bytes)
        return _ResponseOrTooLarge(self.app, environ, start_response, body, body_too_large(self.max_bytes))


class _ResponseOrTooLarge:
    """The application's response; or a 413, if it has read too much before the first part of its response.

    Also if the application handles the failed read by itself, and if it reads only when the server asks for the first
    part.
    """

    def __init__(
        self, app: Application, environ: Environ, start_response: StartResponse, body: _LimitedBody, too_large: Answer
    ) -> None:
        self._start_response, self._request_body, self._too_large = start_response, body, too_large
        self._is_started = False
        self._body: Iterable[bytes] = ()
        self._parts: Iterator[bytes] = iter(())
        try:
            self._body = app(environ, self.start)
            self._parts = iter(self._body)
        except Exception:
            if not body.is_exceeded:
                raise

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        if self._request_body.is_exceeded and not self._is_started:
            raise BodyTooLarge("the body was larger than its limit")
        return start(self._start_response, status, headers, exc_info)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._is_started:
            return next(self._parts)
        part = b""
        failure: BaseException | None = None
        try:
            part = next(self._parts)
        except (StopIteration, Exception) as error:
            failure = error
        self._is_started = True
        if self._request_body.is_exceeded:
            self._parts = iter(())
            # With exc_info: the application may have started its response already, of which nothing has been sent.
            exc_info = (BodyTooLarge, BodyTooLarge("the body was larger than its limit"), None)
            self._start_response(status_line(self._too_large.status), self._too_large.fields, exc_info)
            return self._too_large.body
        if failure is not None:
            raise failure
        return part

    def close(self) -> None:
        close = getattr(self._body, "close", None)
        if close is not None:
            close()


class _LimitedBody(PiecewiseInput):
    """A request's body that can't be read beyond its limit."""

    def __init__(self, body: Any, max_bytes: int) -> None:
        super().__init__(body)
        self._left = max_bytes
        self.is_exceeded = False

    def _most_at_once(self) -> int:
        self._check()
        # One byte more than the limit shows that there is more.
        return min(self._left + 1, READ_AT_ONCE)

    def _came(self, piece: bytes) -> None:
        self._left -= len(piece)
        self._check()

    def _check(self) -> None:
        if self._left < 0:
            self.is_exceeded = True
            raise BodyTooLarge(f"the body is larger than its limit, by {-self._left} bytes or more")
