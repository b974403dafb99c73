"""The ASGI middleware (ASGI 3): HTTP and WebSocket."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, TypeAlias, Unpack

from forebay.web.answers import body_too_large, encoded, reason_of
from forebay.web.cleanup import LeaseRenewal, RequestCleanup
from forebay.web.fastpath import ASGIFastPath, SendWithFields, with_fields
from forebay.web.gate import Gate
from forebay.web.live_gate import VersionedRules, limit_path
from forebay.web.metered_asgi import metered
from forebay.web.native_requests import ASGIRequest
from forebay.web.options import GateOptions, GivenRules
from forebay.web.request import BodyTooLarge, Scope, declares_more_than
from forebay.web.response_limits import with_asgi_limit
from forebay.web.rules import DISCONNECTED, Answer, Denial, outcome
from forebay.web.sent_files import FILES

__all__ = ["ASGIMiddleware"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

TRY_AGAIN_LATER: Final = 1013
STARTS: Final = frozenset({"http.response.start", "websocket.accept"})


class ASGIMiddleware(ASGIFastPath):
    """Limits around an ASGI application: ``app = ASGIMiddleware(app, [Rule(limiter)])``.

    With Starlette or FastAPI: ``app.add_middleware(ASGIMiddleware, rules=[Rule(limiter)])``. See ``Gate`` for the
    arguments. In shared memory it never waits and starts no thread: a decision takes less time than a switch to one.
    Over an ``AsyncRedisStore`` it awaits decisions. A WebSocket is charged once, when it is opened, and holds its
    ``Concurrency`` until it is closed.
    """

    gate: Gate

    def __init__(
        self,
        app: Application,
        rules: GivenRules | VersionedRules,
        **options: Unpack[GateOptions],
    ) -> None:
        self.app = app
        limit_path(self, rules, **options, encoded=True, in_loop=True)
        # Servers and frameworks inspect ``__call__``, and a compiled method shows neither that it is a coroutine
        # function nor its parameters. They call the middleware itself.
        self.__dict__.update(__call__=self._call, __signature__=inspect.signature(self._call))

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        return await self(scope, receive, send)

    async def _respond_unusual(self, request: ASGIRequest, receive: Receive, send: Send) -> None:
        """A request that may have a body limit or a cleanup, or whose decision is awaited."""
        app, gate = self.app, self.gate
        if gate.body_limits and request.native["type"] == "http":
            max_bytes, max_sent = gate.max_body_bytes(request), gate.max_response_bytes(request)
            if max_bytes is not None and declares_more_than(max_bytes, request):
                return await send_answer(body_too_large(max_bytes), request.native, receive, send)
            if max_sent is not None:
                app = with_asgi_limit(app, max_sent)
            meters = await gate.byte_rates.admit_async(request) if gate.byte_rates else None
            if isinstance(meters, Denial):
                return await self._deny(request, meters, receive, send)
            if meters is not None:
                app = metered(app, meters)
            if max_bytes is not None:
                app = _with_body_limit(app, max_bytes)
        passage = await gate.enter_unguarded(request) if gate.is_awaited else gate.enter(request)
        if passage is None:
            return await app(request.native, receive, send)
        if isinstance(passage, Denial):
            return await self._deny(request, passage, receive, send)
        if passage.cleanup is not None:
            await passage.cleanup.wait_turn_async()
            return await TrackedResponse(passage.fields, passage.cleanup, receive, send).run(app, request.native)
        return await app(request.native, receive, SendWithFields(send, passage.fields))

    async def _deny(self, request: ASGIRequest, denial: Denial, receive: Receive, send: Send) -> None:
        return await send_answer(self.gate.answer(request, denial), request.native, receive, send)


async def send_answer(answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        if "websocket.http.response" not in (scope.get("extensions") or ()):
            # The server answers by 403.
            return await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason_of(answer.status)})
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": answer.status, "headers": encoded(answer.fields)})
    return await send({"type": f"{kind}.body", "body": answer.body})


class TrackedResponse:
    """The response to a request with a cleanup: it adds header fields and observes how the response ends.

    The permits are back before the last part of the response is sent, so before the client can ask again.
    """

    def __init__(self, fields: Sequence[Any], cleanup: RequestCleanup, receive: Receive, send: Send) -> None:
        self.fields, self.cleanup = fields, cleanup
        self.renewal = LeaseRenewal(cleanup)
        self._receive, self._send = receive, send
        # Until the application sends another one.
        self._status = 500
        self._is_started = self._is_complete = self._is_disconnected = False

    async def run(self, app: Application, scope: Scope) -> None:
        is_cancelled = False
        try:
            self.renewal.start()
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._is_disconnected and not self._is_complete:
                self._status, self._is_complete = 500, True
            raise
        except BaseException:
            # A cancelled request does not wait for its releases.
            self._is_disconnected = is_cancelled = True
            raise
        finally:
            self.renewal.stop()
            is_disconnected = self._is_disconnected and not self._is_complete
            is_unanswered = is_disconnected and not self._is_started
            self.cleanup.end(DISCONNECTED if is_unanswered else outcome(self._status, is_disconnected))
            if not is_cancelled:
                await self.cleanup.wait()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] in {"http.disconnect", "websocket.disconnect"} and not self._is_complete:
            self._is_disconnected = True
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in STARTS:
            message = with_fields(message, self.fields)
            self._status, self._is_started = message.get("status", 101), True
            self.cleanup.begin(self._status)
            await self.cleanup.wait()
        elif kind == "websocket.http.response.start":
            self._status = message["status"]
        elif kind == "websocket.close" and self._status == 500:
            # Closed before it was accepted: the server answers by 403.
            self._status = 403
        is_part = kind == "http.response.body" or kind in FILES
        if is_part and not message.get("more_body", False) and not self._is_disconnected:
            self._is_complete = True
            self.renewal.stop()
            self.cleanup.end(self._status)
            await self.cleanup.wait()
        try:
            await self._send(message)
        except OSError:
            self._is_disconnected = True
            raise
        if kind == "websocket.accept":
            # An accepted WebSocket has had its response, whichever side closes it.
            self._is_complete = True


def _with_body_limit(app: Application, max_bytes: int) -> Application:
    """An application that fails when it reads more of a request's body; the response is then 413."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        body = _LimitedBody(max_bytes, receive, send)
        try:
            await app(scope, body.receive, body.send)
        except Exception:
            # Also another exception than BodyTooLarge, which the application may have caught.
            if body.is_started or not body.is_exceeded:
                raise
        if body.is_exceeded and not body.is_started:
            await send_answer(body_too_large(max_bytes), scope, receive, send)

    return limited


class _LimitedBody:
    def __init__(self, max_bytes: int, receive: Receive, send: Send) -> None:
        self._left, self._receive, self._send = max_bytes, receive, send
        self.is_exceeded = self.is_started = False

    async def receive(self) -> Message:
        if not self.is_exceeded:
            message = await self._receive()
            self._left -= len(message.get("body", b""))
            if self._left >= 0:
                return message
        self.is_exceeded = True
        raise BodyTooLarge(f"the body is larger than its limit, by {-self._left} bytes or more")

    async def send(self, message: Message) -> None:
        if self.is_exceeded and not self.is_started:
            return
        self.is_started = True
        await self._send(message)
