"""httpx with a limit: transports that wait for a permit before each request and honour ``Retry-After``.

``httpx.Client(transport=LimitedTransport(limiter))``, ``httpx.AsyncClient(transport=AsyncLimitedTransport(limiter))``.
For the guarantees see docs/outbound.md. Needs ``forebay[httpx]``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Unpack

from forebay.extras import Needs

with Needs("httpx", __name__):
    import httpx

from forebay.contrib import outbound
from forebay.contrib.outbound import Options, OutboundLimiter, OutboundRequest, release

if TYPE_CHECKING:
    from forebay.core.algorithms.concurrency import Lease
    from forebay.core.all_of import AllOf
    from forebay.core.limiter import Limiter

__all__ = ["AsyncLimitedTransport", "LimitedTransport", "WaitTimeout"]


class WaitTimeout(outbound.WaitTimeout, httpx.TimeoutException):
    """A request was not sent, because it would have waited for longer than its timeout: one of httpx's timeouts."""


def _outbound_limiter(limiter: Limiter | AllOf, options: Options[httpx.Request]) -> OutboundLimiter[httpx.Request]:
    return OutboundLimiter(limiter, _origin, WaitTimeout, options)


def _origin(request: httpx.Request) -> tuple[str, str, int]:
    return outbound.origin(request.url.scheme, request.url.host, request.url.port)


def _is_resent(outgoing: OutboundRequest, request: httpx.Request, response: httpx.Response) -> bool:
    return outgoing.is_resent(
        request.method,
        response.status_code,
        response.headers.get("retry-after"),
        response.headers.get("date"),
        # Any other stream may be readable once only.
        replayable=isinstance(request.stream, httpx.ByteStream),
    )


class LimitedTransport(httpx.BaseTransport):
    """Sends each request by `transport` (default: httpx's own) as soon as `limiter` has a permit for it.

    Options: see ``forebay.contrib.outbound.Options``. With a ``Concurrency`` the permit is held until the response is
    closed; httpx closes a response that has been read. Raises ``WaitTimeout`` and what the limiter's ``wait`` raises.
    """

    def __init__(
        self,
        limiter: Limiter | AllOf,
        *,
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[Options[httpx.Request]],
    ) -> None:
        self._limiter = _outbound_limiter(limiter, options)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        outgoing = self._limiter.request(request)
        while True:
            leases = outgoing.admit()
            try:
                response = self._transport.handle_request(request)
            except BaseException:
                release(leases)
                raise
            if leases:
                assert isinstance(response.stream, httpx.SyncByteStream)
                response.stream = _HeldStream(response.stream, leases)
            if not _is_resent(outgoing, request, response):
                return response
            response.close()

    def close(self) -> None:
        self._transport.close()


class AsyncLimitedTransport(httpx.AsyncBaseTransport):
    """``LimitedTransport`` for ``httpx.AsyncClient`` and asyncio.

    A request that is cancelled while it waits charges nothing.
    """

    def __init__(
        self,
        limiter: Limiter | AllOf,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[Options[httpx.Request]],
    ) -> None:
        self._limiter = _outbound_limiter(limiter, options)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        outgoing = self._limiter.request(request)
        while True:
            leases = await outgoing.admit_async()
            try:
                response = await self._transport.handle_async_request(request)
            except BaseException:
                release(leases)
                raise
            if leases:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                response.stream = _AsyncHeldStream(response.stream, leases)
            if not _is_resent(outgoing, request, response):
                return response
            await response.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


class _HeldStream(httpx.SyncByteStream):
    """The body of a response that holds permits until it is closed."""

    def __init__(self, stream: httpx.SyncByteStream, leases: list[Lease]) -> None:
        self._stream, self._leases = stream, leases

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            release(self._leases)


class _AsyncHeldStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, leases: list[Lease]) -> None:
        self._stream, self._leases = stream, leases

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            release(self._leases)
