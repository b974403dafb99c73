"""What limits look at of a request: the same for WSGI and ASGI, so that a key function works under both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Protocol, TypeAlias

__all__ = ["ASGIRequest", "Request", "WSGIRequest"]

Environ: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]


class Request(Protocol):
    """A request, before its handler has run.

    ``method`` is in capitals; of a WebSocket's handshake ``"WEBSOCKET"`` under ASGI, else ``"GET"``. ``path`` is
    decoded, from the root of the server. ``peer`` is the address at the other end of the connection, None where there
    is none (a Unix socket): behind a proxy that is the proxy's, see ``ClientAddress``. ``user`` is whom an outer layer
    has let in, or None. ``native`` is the WSGI environment or the ASGI scope.
    """

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def peer(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def native(self) -> Mapping[str, Any]: ...

    def header(self, name: str) -> str | None:
        """The value of a field, several joined by commas in the order in which they came; None if there is none."""
        ...


# Of CGI: the only two fields that are called otherwise.
_WITHOUT_PREFIX: Final = frozenset({"CONTENT_LENGTH", "CONTENT_TYPE"})


class WSGIRequest:
    """The request of a WSGI environment."""

    __slots__ = ("native",)

    def __init__(self, environ: Environ) -> None:
        self.native = environ

    @property
    def method(self) -> str:
        # Some servers leave it as it was sent, and frameworks take post for POST.
        method: str = self.native["REQUEST_METHOD"].upper()
        return method

    @property
    def path(self) -> str:
        path: str = self.native.get("SCRIPT_NAME", "") + self.native.get("PATH_INFO", "")
        # The bytes of the path, each as a character.
        return path if path.isascii() else path.encode("latin-1", "replace").decode("utf-8", "replace")

    @property
    def peer(self) -> str | None:
        return self.native.get("REMOTE_ADDR") or None

    @property
    def user(self) -> str | None:
        return self.native.get("REMOTE_USER") or None

    @property
    def content_length(self) -> str | None:
        return self.native.get("CONTENT_LENGTH") or None

    def header(self, name: str) -> str | None:
        variable = name.upper().replace("-", "_")
        return self.native.get(variable if variable in _WITHOUT_PREFIX else "HTTP_" + variable) or None


class ASGIRequest:
    """The request of an ASGI scope."""

    __slots__ = ("native",)

    def __init__(self, scope: Scope) -> None:
        self.native = scope

    @property
    def method(self) -> str:
        return self.native["method"].upper() if self.native["type"] == "http" else "WEBSOCKET"

    @property
    def path(self) -> str:
        path: str = self.native["path"]
        return path

    @property
    def peer(self) -> str | None:
        client = self.native.get("client")
        return client[0] if client else None

    @property
    def user(self) -> str | None:
        """As Starlette's ``AuthenticationMiddleware`` leaves it, or text."""
        user = self.native.get("user")
        if user is None or isinstance(user, str):
            return user or None
        if not getattr(user, "is_authenticated", True):
            return None
        for attribute in ("identity", "display_name"):
            # Starlette's own users have a name only; the identity is there, and not implemented.
            with contextlib.suppress(AttributeError, NotImplementedError):
                if name := getattr(user, attribute):
                    return str(name)
        return None

    @property
    def content_length(self) -> str | None:
        return self.header("content-length")

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode("latin-1")
        values = [value for key, value in self.native["headers"] if key == wanted]
        return b",".join(values).decode("latin-1") if values else None


KeyFunction: TypeAlias = Callable[[Request], Any]
