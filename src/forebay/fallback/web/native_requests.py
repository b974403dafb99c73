"""The requests of WSGI and ASGI, and keys of their peers. See web/native_requests.pyx for the reasons."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, Final, Self

from forebay.web.paths import odd_readings, with_slash

__all__ = ["ASGIRequest", "PeerKey", "WSGIRequest", "is_options", "methods", "readings"]

MOST_REMEMBERED: Final = 4096
LONGEST_REMEMBERED: Final = 200
MOST_MOUNTS: Final = 2
OVERRIDES: Final = (b"x-http-method-override", b"x-http-method", b"x-method-override")
# A path that every router reads as it is has none of these, apart from a slash or a line's end after it.
_ODD: Final = re.compile("[%;\n\ufffd]|/[/.@]")


def is_plain(path: str) -> bool:
    return path.startswith("/") and not _ODD.search(path)


def readings(*paths: str) -> tuple[str, ...]:
    """Every path that a router may read in one of these, each once; empty if it may be any path."""
    found: dict[str, None] = {}
    for path in paths:
        read = [path] if is_plain(path) else odd_readings(path)
        if not read:
            return ()
        found.update(dict.fromkeys(read))
    return tuple(found)


def readings_beneath(root: str, whole: tuple[str, ...], inside: tuple[str, ...]) -> tuple[str, ...]:
    """The readings of whole paths, those inside of an application's root, and these with the root in front."""
    if not whole or not inside:
        return ()
    beneath = [start + path for start in with_slash(root.rstrip("/")) for path in inside]
    return tuple(dict.fromkeys([*whole, *inside, *beneath]))


def methods(method: str, header: Callable[[str], str | None]) -> tuple[str, ...]:
    """The method of a request, and those in its fields that override it. `header` returns a field's value."""
    values = [header(name.decode()) for name in OVERRIDES]
    return with_overrides(method, [value for value in values if value])


def with_overrides(method: str, values: list[str]) -> tuple[str, ...]:
    return (method, *[name.strip().upper() for value in values for name in value.split(",")])


def decoded(path: str) -> str:
    """The text of a path in which each byte is a character."""
    return path if path.isascii() else path.encode("latin-1", "replace").decode("utf-8", "replace")


def texts_of(path: str) -> list[str]:
    """The text of such a path; some routers read bytes that aren't UTF-8 as Latin-1.

    Bottle omits them, and decodes the path again beneath each of its mounts.
    """
    text = decoded(path)
    if text.isascii():
        return [text]
    texts = [text, path] if "\ufffd" in text else [text]
    with contextlib.suppress(UnicodeEncodeError):
        again = path.encode("latin-1").decode("utf-8", "ignore")
        for _ in range(MOST_MOUNTS):
            again = again.encode("latin-1").decode("utf-8", "ignore")
            texts.append(again)
    return texts


def joined(root: str, path: str) -> str:
    return root + path if not root or not path or path.startswith("/") else root + "/" + path


class WSGIRequest:
    """The request of a WSGI environment."""

    __slots__ = ("_route", "native")

    def __init__(self, environ: Any, route: str | None = None) -> None:
        self.native = environ
        self._route = route

    @property
    def method(self) -> str:
        # Some servers report it as it was sent, and frameworks read post as POST.
        return str(self.native["REQUEST_METHOD"].upper())

    @property
    def methods(self) -> tuple[str, ...]:
        names = ["HTTP_X_HTTP_METHOD_OVERRIDE", "HTTP_X_HTTP_METHOD", "HTTP_X_METHOD_OVERRIDE"]
        return with_overrides(self.method, [value for name in names if (value := self.native.get(name))])

    @property
    def path(self) -> str:
        return decoded(joined(self.native.get("SCRIPT_NAME", ""), self.native.get("PATH_INFO", "")))

    @property
    def paths(self) -> tuple[str, ...]:
        root: str = self.native.get("SCRIPT_NAME", "")
        inside: str = self.native.get("PATH_INFO", "")
        if self._route is None and inside.isascii() and is_plain(inside):
            if not root:
                return (inside,)
            if root.isascii() and is_plain(root + inside):
                return root + inside, inside
        texts = texts_of(inside)
        if self._route is not None:
            texts.append(self._route)
        if not root:
            return readings(*texts)
        return readings_beneath(decoded(root), readings(*texts_of(joined(root, inside))), readings(*texts))

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
        # CGI: the only two fields without the prefix HTTP_.
        if variable not in ("CONTENT_LENGTH", "CONTENT_TYPE"):
            variable = "HTTP_" + variable
        return self.native.get(variable) or None


class ASGIRequest:
    """The request of an ASGI scope."""

    __slots__ = ("native",)

    def __init__(self, scope: Any) -> None:
        self.native = scope

    @property
    def method(self) -> str:
        return str(self.native["method"].upper()) if self.native["type"] == "http" else "WEBSOCKET"

    @property
    def methods(self) -> tuple[str, ...]:
        values = []
        for name, value in self.native["headers"]:
            # A WSGI application within reads ``X_HTTP_Method`` as ``X-HTTP-Method``.
            if bytes(name).replace(b"_", b"-") in OVERRIDES:
                # Some read it as UTF-8, in which "\u017f" is a small letter of "S".
                values.append(value.decode("utf-8", "replace"))
        return with_overrides(self.method, values)

    @property
    def path(self) -> str:
        path: str = self.native["path"]
        return path

    @property
    def paths(self) -> tuple[str, ...]:
        path = self.path
        roots = [root for root in (self.native.get("root_path"), self.native.get("app_root_path")) if root]
        if not roots:
            return readings(path)
        if len(roots) == 1 and is_plain(path) and path.startswith(roots[0]):
            beneath = path[len(roots[0]) :]
            if is_plain(beneath) and roots[0] not in beneath:
                return path, beneath
        # Some servers report the root in front of the path, too, others only separately. Routers remove it only from
        # the front; /users/v1 is a user to them.
        found = readings(path, *[joined(root, path) for root in roots if not (path + "/").startswith(root + "/")])
        # Quart removes the host of a whole URL before the root.
        sent = [path] if path.startswith("/") else [path, *with_slash(path)]
        for root in roots:
            parts = [known.partition(root) for known in sent]
            inside = [after if present else before for before, present, after in parts]
            # Litestar removes the root again in a mounted application.
            inside += [known.replace(root, "") for known in sent if known.count(root) > 1]
            found = readings_beneath(root, found, readings(*inside))
        return found

    @property
    def peer(self) -> str | None:
        client = self.native.get("client")
        return client[0] if client else None

    @property
    def user(self) -> str | None:
        """The user of Starlette's ``AuthenticationMiddleware``, or text."""
        user = self.native.get("user")
        if user is None or isinstance(user, str):
            return user or None
        if not getattr(user, "is_authenticated", True):
            return None
        for attribute in ("identity", "display_name"):
            # Starlette's own users have a name only; their identity raises NotImplementedError.
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


def is_options(request: Any) -> bool:
    """Whether the method is ``OPTIONS``, in capitals or not."""
    if isinstance(request, WSGIRequest):
        method = request.native.get("REQUEST_METHOD")
    elif isinstance(request, ASGIRequest):
        method = request.native.get("method")
    else:
        method = request.method
    return isinstance(method, str) and method.upper() == "OPTIONS"


class PeerKey:
    """A key function of a request's peer and perhaps one of its fields. It caches the keys.

    A subclass computes ``key_of(peer, field)``; ``PeerKey(None)`` reads no field. Thread-safe.
    """

    def __init__(self, field_name: str | None) -> None:
        self._field_name = field_name
        self._known: dict[Any, str] = {}

    def __call__(self, request: Any) -> str:
        peer = request.peer
        field = None if self._field_name is None else request.header(self._field_name)
        if field is not None and len(field) > LONGEST_REMEMBERED:
            return self.key_of(peer, field)
        key = self._known.get((peer, field))
        if key is None:
            key = self.key_of(peer, field)
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[peer, field] = key
        return key

    def key_of(self, peer: str | None, field: str | None) -> str:
        """The key of a request's peer and field: a subclass has it."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
