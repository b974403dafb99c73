"""requests with a limit: an adapter that waits for a permit before each request and honours ``Retry-After``.

``session.mount("https://", LimitedAdapter(limiter))``. docs/outbound.md says what is guaranteed. Needs
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
from forebay.contrib.outbound import Options, WayOut, give_back

if TYPE_CHECKING:
    from urllib3.util.retry import Retry

    from forebay.core.algorithms.concurrency import Lease
    from forebay.core.all_of import AllOf
    from forebay.core.limiter import Limiter

__all__ = ["LimitedAdapter", "WaitTimeout"]


class WaitTimeout(outbound.WaitTimeout, requests.exceptions.Timeout):
    """A request was not sent, because it would have had to wait for longer than it may: one of requests' timeouts."""


def _origin(request: requests.PreparedRequest) -> tuple[str, str, int]:
    url = urlsplit(request.url or "")
    return outbound.origin(url.scheme, url.hostname, url.port)


class LimitedAdapter(HTTPAdapter):
    """Sends each request as soon as `limiter` has a permit for it.

    Options: see ``forebay.contrib.outbound.Options``; the others are ``HTTPAdapter``'s. What `max_retries` sends again
    takes no further permit: leave it to connections. With a ``Concurrency`` the permit is held until the response has
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
        self._way_out: WayOut[requests.PreparedRequest] = WayOut(limiter, _origin, WaitTimeout, options)
        super().__init__(pool_connections, pool_maxsize, max_retries, pool_block)

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **kwargs: Any
    ) -> requests.Response:
        sending = self._way_out.sending(request)
        while True:
            try:
                leases = sending.admit()
            except WaitTimeout as error:
                error.request = request
                raise
            try:
                response = super().send(request, stream, *args, **kwargs)
                if leases and not stream:
                    # What the session would do next, but the permit is held meanwhile.
                    _ = response.content
            except BaseException:
                give_back(leases)
                raise
            if leases and stream:
                _hold(response, leases)
            else:
                give_back(leases)
            if not sending.is_sent_again(
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


def _hold(response: requests.Response, leases: list[Lease]) -> None:
    """Until the response is closed."""
    close = response.close

    def close_and_give_back() -> None:
        try:
            close()
        finally:
            give_back(leases)

    response.close = close_and_give_back  # type: ignore[method-assign]
