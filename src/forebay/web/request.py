"""What limits look at of a request: the same for WSGI and ASGI, so that a key function works under both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias

from forebay.web.native_requests import ASGIRequest, WSGIRequest

__all__ = ["ASGIRequest", "Request", "WSGIRequest"]

Environ: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]


class Request(Protocol):
    """A request, before its handler has run.

    ``method`` is in capitals; of a WebSocket's handshake ``"WEBSOCKET"`` under ASGI, else ``"GET"``. ``methods`` are it
    and those of an ``X-HTTP-Method-Override`` that the application may go by: what rules are matched with. ``path`` is
    decoded, from the root of the server. ``paths`` are what the application's router may take it for, from that root
    or from the application's own, and matched likewise. None of them: it may be any path. ``peer`` is the
    address at the other end of the connection, None where there is none (a Unix socket): behind a proxy that is the
    proxy's, see ``ClientAddress``. ``user`` is whom an outer layer has let in, or None. ``native`` is the WSGI
    environment or the ASGI scope.
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
