"""The ASGI middleware (ASGI 3): HTTP and WebSocket."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeAlias

from forebay.web.answers import Denial, body_too_large, reason_of
from forebay.web.body import BodyTooLarge, is_told_longer
from forebay.web.gate import Gate, OnEnd
from forebay.web.passing import ASGIPassing, SendWithFields, with_fields
from forebay.web.renewal import Renewal
from forebay.web.request import ASGIRequest, KeyFunction, Scope
from forebay.web.rules import DISCONNECTED, Answer, BodyLimit, Rule, outcome

__all__ = ["ASGIMiddleware"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

TRY_AGAIN_LATER = 1013


class ASGIMiddleware(ASGIPassing):
    """Limits around an ASGI application: ``app = ASGIMiddleware(app, [Rule(limiter)])``.

    With Starlette or FastAPI: ``app.add_middleware(ASGIMiddleware, rules=[Rule(limiter)])``. See ``Gate`` for the
    arguments. It never waits and starts no thread; a decision takes less time than handing it to one. Over an
    ``AsyncRedisStore`` decisions are awaited. A WebSocket is asked about once, when it is opened, and holds its
    ``Concurrency`` until it is closed.
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
        self.gate = Gate(
            rules, client=client, headers=headers, partition_keys=partition_keys, encoded=True, in_loop=True
        )
        # Servers and frameworks look at what ``__call__`` is and takes, which what is compiled doesn't show, and then
        # call the application itself.
        self.__dict__.update(__call__=self._call, __signature__=inspect.signature(self._call))

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        return await self(scope, receive, send)

    async def _in_steps(self, request: ASGIRequest, receive: Receive, send: Send) -> None:
        """A request whose body may have a limit, whose end has to be told, or whose answer is Redis's."""
        app = self.app
        if self.gate.body_limits and request.native["type"] == "http":
            most_bytes = self.gate.max_body_bytes(request)
            if most_bytes is not None:
                if is_told_longer(request, most_bytes):
                    return await send_answer(body_too_large(most_bytes), request.native, receive, send)
                app = _within(app, most_bytes)
        passage = await self.gate.enter_async(request) if self.gate.is_awaited else self.gate.enter(request)
        if passage is None:
            return await app(request.native, receive, send)
        if isinstance(passage, Denial):
            return await self._denied(request, passage, receive, send)
        if passage.on_end is not None:
            return await Ended(passage.fields, passage.on_end, receive, send).run(app, request.native)
        return await app(request.native, receive, SendWithFields(send, passage.fields))

    async def _denied(self, request: ASGIRequest, denial: Denial, receive: Receive, send: Send) -> None:
        return await send_answer(self.gate.answer(request, denial), request.native, receive, send)


STARTS = frozenset({"http.response.start", "websocket.accept"})


def encoded(fields: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]


async def send_answer(answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()  # the client's wish to connect
        if "websocket.http.response" not in (scope.get("extensions") or ()):
            # The server makes a 403 of it.
            return await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason_of(answer.status)})
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": answer.status, "headers": encoded(answer.fields)})
    return await send({"type": f"{kind}.body", "body": answer.body})


class Ended:
    """A request whose end is told: what it was answered, or that the client has gone."""

    def __init__(self, fields: Sequence[Any], on_end: OnEnd, receive: Receive, send: Send) -> None:
        self.fields, self.on_end, self.receive_next, self.send_on = fields, on_end, receive, send
        # Until the application has said something else.
        self.status = 500
        self.is_begun = self.is_sent = self.is_gone = False
        self.renewal = Renewal(on_end)

    async def run(self, app: Application, scope: Scope) -> None:
        is_cancelled = False
        try:
            self.renewal.start()
            await app(scope, self.receive, self.send)
        except Exception:
            if not self.is_gone and not self.is_sent:
                self.status, self.is_sent = 500, True
            raise
        except BaseException:
            # Cancelled: nobody waits any more for what is given back.
            self.is_gone = is_cancelled = True
            raise
        finally:
            self.renewal.stop()
            is_gone = self.is_gone and not self.is_sent
            is_unanswered = is_gone and not self.is_begun
            self.on_end.end(DISCONNECTED if is_unanswered else outcome(self.status, is_gone))
            if not is_cancelled:
                await self.on_end.settled()

    async def receive(self) -> Message:
        message = await self.receive_next()
        if message["type"] in {"http.disconnect", "websocket.disconnect"} and not self.is_sent:
            self.is_gone = True
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in STARTS:
            message = with_fields(message, self.fields)
            self.status, self.is_begun = message.get("status", 101), True
            self.on_end.begin(self.status)
            await self.on_end.settled()
        elif kind == "websocket.http.response.start":
            self.status = message["status"]
        elif kind == "websocket.close" and self.status == 500:
            # Closed before it was accepted: the server makes a 403 of it.
            self.status = 403
        if kind == "http.response.body" and not message.get("more_body", False) and not self.is_gone:
            # Before the client has its whole answer and can ask again.
            self.is_sent = True
            self.renewal.stop()
            self.on_end.end(self.status)
            await self.on_end.settled()
        try:
            await self.send_on(message)
        except OSError:
            self.is_gone = True
            raise
        if kind == "websocket.accept":
            # One that was opened has had its answer, whoever closes it.
            self.is_sent = True


def _within(app: Application, most_bytes: int) -> Application:
    """An application whose requests' bodies are limited: what comes beyond is an error, and answered by 413."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        body = _LimitedBody(most_bytes, receive, send)
        try:
            await app(scope, body.receive, body.send)
        except Exception:
            # Whatever the application makes of its failure to read.
            if body.is_started or not body.is_exceeded:
                raise
        if body.is_exceeded and not body.is_started:
            await send_answer(body_too_large(most_bytes), scope, receive, send)

    return limited


class _LimitedBody:
    def __init__(self, most_bytes: int, receive: Receive, send: Send) -> None:
        self.left, self.receive_next, self.send_on = most_bytes, receive, send
        self.is_exceeded = self.is_started = False

    async def receive(self) -> Message:
        if not self.is_exceeded:
            message = await self.receive_next()
            self.left -= len(message.get("body", b""))
            if self.left >= 0:
                return message
        self.is_exceeded = True
        raise BodyTooLarge(f"the body is larger than its limit, by {-self.left} bytes or more")

    async def send(self, message: Message) -> None:
        if self.is_exceeded and not self.is_started:
            return
        self.is_started = True
        await self.send_on(message)
