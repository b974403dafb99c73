"""Key functions: for whom a request counts. Any callable that takes a ``Request`` and returns a key is one."""

from __future__ import annotations

from penstock.core.keys import Key
from penstock.errors import InvalidLimiter, shown
from penstock.web.request import KeyFunction, Request

__all__ = ["everyone", "header", "user"]


def everyone(request: Request) -> Key:
    """One key for all requests: a limit of the whole application on this host."""
    return "everyone"


def header(name: str, *, otherwise: KeyFunction) -> KeyFunction:
    """The value of a field, such as an API key's; for requests without it, what `otherwise` says.

    Whoever makes up another value at each request has as many limits: where nothing has checked the field before,
    limit the client's address as well.
    """
    if not isinstance(name, str) or not name:
        raise InvalidLimiter(f"the name of a header field is text, not {shown(name)}")

    field = name.lower()

    def key(request: Request) -> Key:
        value = request.header(field)
        # A tuple is never equal to a text, so nobody can pass for somebody without the field.
        return ("header", field, value) if value else otherwise(request)

    return key


def user(*, otherwise: KeyFunction) -> KeyFunction:
    """Whom an outer layer has let in (``REMOTE_USER``, ``scope["user"]``); for strangers, what `otherwise` says."""

    def key(request: Request) -> Key:
        name = request.user
        return ("user", name) if name else otherwise(request)

    return key
