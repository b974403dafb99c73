"""aiohttp's client with a limit: a middleware that waits for a permit before each request and honours ``Retry-After``.

``aiohttp.ClientSession(middlewares=[LimitedMiddleware(limiter)])``. For the guarantees see docs/outbound.md. Needs
``forebay[aiohttp]``, with aiohttp 3.12 or later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from forebay.extras import Needs

with Needs("aiohttp", __name__):
    import aiohttp

from forebay.contrib import outbound
from forebay.contrib.outbound import Options, OutboundLimiter, release

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType

    from forebay.core.all_of import AllOf
    from forebay.core.limiter import Limiter

__all__ = ["LimitedMiddleware", "WaitTimeout"]


class WaitTimeout(outbound.WaitTimeout, aiohttp.ClientError, TimeoutError):
    """A request was not sent, because it would have waited for longer than its timeout: one of aiohttp's errors."""


def _origin(request: aiohttp.ClientRequest) -> tuple[str, str, int]:
    return outbound.origin(request.url.scheme, request.url.host, request.url.port)


class LimitedMiddleware:
    """Sends each request as soon as `limiter` has a permit for it.

    Options: see ``forebay.contrib.outbound.Options``. aiohttp's total timeout includes the wait. With a
    ``Concurrency`` the middleware reads the whole response, and then releases the permit. Raises ``WaitTimeout`` and
    what the limiter's ``wait`` raises. A request that is cancelled while it waits charges nothing.
    """

    def __init__(self, limiter: Limiter | AllOf, **options: Unpack[Options[aiohttp.ClientRequest]]) -> None:
        self._limiter: OutboundLimiter[aiohttp.ClientRequest] = OutboundLimiter(limiter, _origin, WaitTimeout, options)

    async def __call__(self, request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        outgoing = self._limiter.request(request)
        while True:
            leases = await outgoing.admit_async()
            try:
                response = await handler(request)
                if leases:
                    await response.read()
            finally:
                release(leases)
            if not outgoing.is_resent(
                request.method,
                response.status,
                response.headers.get("Retry-After"),
                response.headers.get("Date"),
                # Any other body may be readable once only.
                replayable=isinstance(request.body, (bytes, aiohttp.BytesPayload)),
            ):
                return response
            response.close()
