"""aiohttp's client with a limit: a middleware that waits for a permit before each request and honours ``Retry-After``.

``aiohttp.ClientSession(middlewares=[LimitedMiddleware(limiter)])``. docs/outbound.md says what is guaranteed. Needs
``forebay[aiohttp]``, with aiohttp 3.12 or later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from forebay.extras import Needs

with Needs("aiohttp", __name__):
    import aiohttp

from forebay.contrib import outbound
from forebay.contrib.outbound import Options, WayOut, give_back

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType

    from forebay.core.all_of import AllOf
    from forebay.core.limiter import Limiter

__all__ = ["LimitedMiddleware", "WaitTimeout"]


class WaitTimeout(outbound.WaitTimeout, aiohttp.ClientError, TimeoutError):
    """A request was not sent, because it would have had to wait for longer than it may: one of aiohttp's errors."""


def _origin(request: aiohttp.ClientRequest) -> tuple[str, str, int]:
    return outbound.origin(request.url.scheme, request.url.host, request.url.port)


class LimitedMiddleware:
    """Sends each request as soon as `limiter` has a permit for it.

    Options: see ``forebay.contrib.outbound.Options``. aiohttp's own total timeout goes on while a request waits. With
    a ``Concurrency`` the whole response is read here, so that its permit can be given back. Raises ``WaitTimeout`` and
    what the limiter's ``wait`` raises. A request that is cancelled while it waits charges nothing.
    """

    def __init__(self, limiter: Limiter | AllOf, **options: Unpack[Options[aiohttp.ClientRequest]]) -> None:
        self._way_out: WayOut[aiohttp.ClientRequest] = WayOut(limiter, _origin, WaitTimeout, options)

    async def __call__(self, request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        sending = self._way_out.sending(request)
        while True:
            leases = await sending.admit_async()
            try:
                response = await handler(request)
                if leases:
                    await response.read()
            finally:
                give_back(leases)
            if not sending.is_sent_again(
                request.method,
                response.status,
                response.headers.get("Retry-After"),
                response.headers.get("Date"),
                # Of any other body nobody knows whether it can be read twice.
                replayable=isinstance(request.body, (bytes, aiohttp.BytesPayload)),
            ):
                return response
            response.close()
