"""Key functions: for whom a request counts. Any callable that takes a ``Request`` and returns a key is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter, shown
from forebay.web.functions import check_function, has_to_be_awaited
from forebay.web.request import KeyFunction, Request

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

    def told(request: Request) -> Key | None:
        value = request.header(field)
        # A tuple is never equal to a text, so nobody can pass for somebody without the field.
        return ("header", field, value) if value else None

    return _or_else(told, otherwise)


def user(*, otherwise: KeyFunction) -> KeyFunction:
    """Whom an outer layer has let in (``REMOTE_USER``, ``scope["user"]``); for strangers, what `otherwise` says."""

    def user_of(request: Request) -> Key | None:
        name = request.user
        return ("user", name) if name else None

    return _or_else(user_of, otherwise)


def _or_else(first: Callable[[Request], Key | None], otherwise: KeyFunction) -> KeyFunction:
    check_function("otherwise is a key function, a callable that takes a request", otherwise)

    def key(request: Request) -> Any:
        told = first(request)
        return otherwise(request) if told is None else told

    async def key_async(request: Request) -> Any:
        told = first(request)
        return await otherwise(request) if told is None else told

    chosen = key_async if has_to_be_awaited(otherwise) else key
    # By which the checks of frameworks know what it goes by.
    chosen.__qualname__ = first.__qualname__
    return chosen
