"""Byte rates under ASGI: the task that receives or sends a body waits for its turns, and no longer than its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from forebay.web.byte_rates import Meters
from forebay.web.metering import Meter
from forebay.web.renewals import Renewals, renewals_of
from forebay.web.request import Scope
from forebay.web.sent_files import hide_files, refuse_file

__all__ = ["metered"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def metered(app: Application, meters: Meters) -> Application:
    """An application with the meters of one request."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        incoming = _Incoming(receive)
        reading, sending = meters
        # A timer renews most leases. Here are those of applications that have none while they send a body.
        renewals = renewals_of(scope)
        try:
            receive = incoming.receive if reading is None else _MeteredReceive(incoming, reading, renewals)
            if sending is not None:
                hide_files(scope)
                send = _MeteredSend(incoming, sending, renewals, send)
            await app(scope, receive, send)
        finally:
            incoming.end()
            for meter in (reading, sending):
                if meter is not None:
                    meter.end()

    return run


class _MeteredReceive:
    def __init__(self, incoming: _Incoming, meter: Meter, renewals: Renewals) -> None:
        self._incoming, self._meter, self._renewals = incoming, meter, renewals
        self._unread: deque[tuple[Message, memoryview]] = deque()
        """Messages of cancelled calls, and their bytes whose turn hasn't come: for the calls that follow."""

    async def __call__(self) -> Message:
        if self._unread:
            message, left = self._unread.popleft()
        else:
            message = await self._incoming.receive()
            left = memoryview(message.get("body", b""))
        try:
            async for piece in self._meter.pieces_async(left, self._renewals, self._incoming.pause):
                left = left[len(piece) :]
        except asyncio.CancelledError:
            self._unread.appendleft((message, left))
            raise
        return message


class _MeteredSend:
    def __init__(self, incoming: _Incoming, meter: Meter, renewals: Renewals, send: Send) -> None:
        self._incoming, self._meter, self._renewals, self._send = incoming, meter, renewals, send

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._meter.begin(message["status"])
        refuse_file(kind)
        if kind != "http.response.body":
            return await self._send(message)
        body = message.get("body", b"")
        is_last = not message.get("more_body", False)
        left = len(body)
        async for piece in self._meter.pieces_async(body, self._renewals, self._incoming.pause):
            left -= len(piece)
            if left or not is_last:
                await self._send({**message, "body": piece, "more_body": True})
            else:
                await self._send({**message, "body": piece})
        if not body:
            await self._send(message)
        return None


class _Incoming:
    """The messages from the server. While a body waits for its turn, it learns that the client has gone.

    To that end it receives ahead: what the application hasn't read yet of a request's body, by one message at most. It
    never receives while the application does.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._ahead: asyncio.Task[None] | None = None
        self._is_receiving = False
        self._news, self._gone = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Message:
        while not self._kept and self._is_ahead():
            self._news.clear()
            await self._news.wait()
        if self._kept:
            return self._kept.popleft()
        self._is_receiving = True
        try:
            return self._noticed(await self._receive())
        finally:
            self._is_receiving = False

    async def pause(self, seconds: float) -> bool:
        """Sleep. Returns True at once when the client has gone."""
        if not self._kept and not self._is_receiving and not self._is_ahead():
            self._ahead = asyncio.create_task(self._receive_ahead())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        return self._gone.is_set()

    def end(self) -> None:
        """The application has ended."""
        if self._ahead is not None:
            self._ahead.cancel()

    def _is_ahead(self) -> bool:
        return self._ahead is not None and not self._ahead.done()

    async def _receive_ahead(self) -> None:
        try:
            # The last message of the body, if it hasn't come yet, and the disconnect behind it.
            for _ in range(2):
                message = self._noticed(await self._receive())
                self._kept.append(message)
                self._news.set()
                if message.get("more_body", False) or self._gone.is_set():
                    break
        except Exception:
            # The application's own call raises it again.
            return
        finally:
            self._news.set()

    def _noticed(self, message: Message) -> Message:
        if message["type"] == "http.disconnect":
            self._gone.set()
        return message
