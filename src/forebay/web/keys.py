"""Key functions: for whom a request counts. Any callable that takes a ``Request`` and returns a key can be one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter, short_repr
from forebay.web.functions import check_function, has_to_be_awaited
from forebay.web.request import KeyFunction, Request

__all__ = ["CellKey", "everyone", "header", "user"]


class CellKey(ABC):
    """A key function that says where a client counts, as limits of live rules may move to other cells."""

    client_key: KeyFunction
    """Says who the client is."""

    @abstractmethod
    def __call__(self, request: Request) -> Any: ...


def everyone(request: Request) -> Key:
    """One key for all requests: a limit of the whole application on this host."""
    return "everyone"


def header(name: str, *, otherwise: KeyFunction) -> KeyFunction:
    """The value of a field, such as an API key; for requests without the field, the key of `otherwise`.

    A client that sends another value with each request has a new limit each time: unless an outer layer checks the
    field, limit the client's address as well.
    """
    if not isinstance(name, str) or not name:
        raise InvalidLimiter(f"the name of a header field is text, not {short_repr(name)}")

    field = name.lower()

    def value_of(request: Request) -> Key | None:
        value = request.header(field)
        # A tuple never equals a text: so no value is the key of a client without the field.
        return ("header", field, value) if value else None

    return _or_else(value_of, otherwise)


def user(*, otherwise: KeyFunction) -> KeyFunction:
    """The user whom an outer layer authenticated (``REMOTE_USER``, ``scope["user"]``); else the key of `otherwise`."""

    def user_of(request: Request) -> Key | None:
        name = request.user
        return ("user", name) if name else None

    return _or_else(user_of, otherwise)


def _or_else(first: Callable[[Request], Key | None], otherwise: KeyFunction) -> KeyFunction:
    check_function("otherwise is a key function, a callable that takes a request", otherwise)

    def key(request: Request) -> Any:
        found = first(request)
        return otherwise(request) if found is None else found

    async def key_async(request: Request) -> Any:
        found = first(request)
        return await otherwise(request) if found is None else found

    chosen = key_async if has_to_be_awaited(otherwise) else key
    # Django's checks recognize `user` by it.
    chosen.__qualname__ = first.__qualname__
    return chosen
