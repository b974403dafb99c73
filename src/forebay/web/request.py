"""A request as limits and key functions see it: the same for WSGI and ASGI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias

__all__ = ["BodyTooLarge", "Environ", "KeyFunction", "Request", "Scope", "declares_more_than", "is_preflight"]

Environ: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]


class Request(Protocol):
    """A request, before its handler runs.

    ``method`` is in capitals; for a WebSocket's handshake it is ``"WEBSOCKET"`` under ASGI, else ``"GET"``.
    ``methods`` has it and the methods of an ``X-HTTP-Method-Override``, which the application may follow: rules are
    matched with all of them. ``path`` is decoded, from the root of the server. ``paths`` has every path that the
    application's router may read, from that root or from the application's own: rules are matched with all of them.
    Empty: it may be any path. ``peer`` is the address at the other end of the connection, None where there is none
    (a Unix socket); behind a proxy it is the proxy's, see ``ClientAddress``. ``user`` is the user whom an outer layer
    has authenticated, or None. ``native`` is the WSGI environment or the ASGI scope.
    """

    @property
    def method(self) -> str: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    @property
    def path(self) -> str: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def peer(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def native(self) -> Mapping[str, Any]: ...

    def header(self, name: str) -> str | None:
        """The value of a field, several joined by commas in the order in which they came; None if there is none."""
        ...


KeyFunction: TypeAlias = Callable[[Request], Any]


class BodyTooLarge(OSError):
    """The application has read more of a request's body than its limit."""


class _HasLength(Protocol):
    @property
    def content_length(self) -> str | None: ...


def declares_more_than(max_bytes: int, request: _HasLength) -> bool:
    """Whether ``Content-Length`` exceeds `max_bytes`. A server lets an application read no more than it declares."""
    length = request.content_length
    return length is not None and length.isdecimal() and int(length[:20]) > max_bytes


def is_preflight(request: Request) -> bool:
    """Whether a browser may have sent it before a request of another origin, and no field overrides its method."""
    return (
        request.method == "OPTIONS"
        and len(request.methods) == 1
        and bool(request.header("origin"))
        and bool(request.header("access-control-request-method"))
    )
