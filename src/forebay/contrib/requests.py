"""requests with a limit: an adapter that waits for a permit before each request and honours ``Retry-After``.

``session.mount("https://", LimitedAdapter(limiter))``. For the guarantees see docs/outbound.md. Needs
``forebay[requests]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Unpack
from urllib.parse import urlsplit

from forebay.extras import Needs

with Needs("requests", __name__):
    import requests
    from requests.adapters import DEFAULT_POOLBLOCK, DEFAULT_POOLSIZE, DEFAULT_RETRIES, HTTPAdapter

from forebay.contrib import outbound
from forebay.contrib.outbound import Options, OutboundLimiter, release

if TYPE_CHECKING:
    from urllib3.util.retry import Retry

    from forebay.core.algorithms.concurrency import Lease
    from forebay.core.all_of import AllOf
    from forebay.core.limiter import Limiter

__all__ = ["LimitedAdapter", "WaitTimeout"]


class WaitTimeout(outbound.WaitTimeout, requests.exceptions.Timeout):
    """A request was not sent, because it would have waited for longer than its timeout: one of requests' timeouts."""


def _origin(request: requests.PreparedRequest) -> tuple[str, str, int]:
    url = urlsplit(request.url or "")
    return outbound.origin(url.scheme, url.hostname, url.port)


class LimitedAdapter(HTTPAdapter):
    """Sends each request as soon as `limiter` has a permit for it.

    Options: see ``forebay.contrib.outbound.Options``; the others are ``HTTPAdapter``'s. Retries by `max_retries` take
    no further permit: use them for connections only. With a ``Concurrency`` the permit is held until the response has
    been read; with ``stream=True`` until it is closed. Raises ``WaitTimeout`` and what the limiter's ``wait`` raises.
    """

    def __init__(
        self,
        limiter: Limiter | AllOf,
        *,
        pool_connections: int = DEFAULT_POOLSIZE,
        pool_maxsize: int = DEFAULT_POOLSIZE,
        max_retries: int | Retry = DEFAULT_RETRIES,
        pool_block: bool = DEFAULT_POOLBLOCK,
        **options: Unpack[Options[requests.PreparedRequest]],
    ) -> None:
        self._limiter: OutboundLimiter[requests.PreparedRequest] = OutboundLimiter(
            limiter, _origin, WaitTimeout, options
        )
        super().__init__(pool_connections, pool_maxsize, max_retries, pool_block)

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **kwargs: Any
    ) -> requests.Response:
        outgoing = self._limiter.request(request)
        while True:
            try:
                leases = outgoing.admit()
            except WaitTimeout as error:
                error.request = request
                raise
            try:
                response = super().send(request, stream, *args, **kwargs)
                if leases and not stream:
                    # The session would read it next anyway; here the permit is still held.
                    _ = response.content
            except BaseException:
                release(leases)
                raise
            if leases and stream:
                _release_on_close(response, leases)
            else:
                release(leases)
            if not outgoing.is_resent(
                request.method or "",
                response.status_code,
                response.headers.get("Retry-After"),
                response.headers.get("Date"),
                replayable=request.body is None or isinstance(request.body, (bytes, str)),
            ):
                return response
            response.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied: make one with a limiter of the same store and name"
        )


def _release_on_close(response: requests.Response, leases: list[Lease]) -> None:
    close = response.close

    def close_and_release() -> None:
        try:
            close()
        finally:
            release(leases)

    response.close = close_and_release  # type: ignore[method-assign]
