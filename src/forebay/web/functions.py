"""The functions that rules are made of: checks at start, and checks of their results.

Coroutine functions are awaited before a plan charges its limiters: a `ResolvedRequest` carries their results.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from forebay.errors import InvalidCost, InvalidKey, InvalidLimiter, short_repr

__all__ = [
    "ResolvedRequest",
    "check_function",
    "check_statuses",
    "checked_bool",
    "checked_cost",
    "checked_key",
    "checked_tier",
    "described",
    "has_to_be_awaited",
    "is_cost",
    "is_key",
    "result_of",
]

STATUSES: Final = range(100, 600)


def has_to_be_awaited(function: Any) -> bool:
    """Whether it is a coroutine function, an object whose ``__call__`` is one, or a ``functools.partial`` of either."""
    while isinstance(function, functools.partial):
        function = function.func
    called = inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def check_function(expectation: str, function: Any, arguments: int = 1) -> None:
    """Refuse at start what can't be called with so many arguments. `expectation` begins the message."""
    if not callable(function):
        raise InvalidLimiter(f"{expectation}, not {short_repr(function)}")
    if isinstance(function, type):
        raise InvalidLimiter(
            f"{expectation}, and {short_repr(function)} is a class: make an object of it, or write a function"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some compiled functions have no signature.
        return
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        raise InvalidLimiter(f"{expectation}, and {short_repr(function)} can't be called so: {error}") from None


def check_statuses(what: str, statuses: Any) -> None:
    """Refuse a set without any status: it would never charge a request."""
    if isinstance(statuses, (str, bytes, Mapping)) or not hasattr(statuses, "__contains__"):
        raise InvalidLimiter(
            f"{what} is a set of statuses such as {{401, 403}} or a function, not {short_repr(statuses)}"
        )
    if isinstance(statuses, Iterable) and not isinstance(statuses, range):
        for status in statuses:
            if not _is_status(status):
                raise InvalidLimiter(
                    f"{what} has {short_repr(status)}, which is no status: those are whole numbers from 100 to 599"
                )
    if not any(status in statuses for status in STATUSES):
        raise InvalidLimiter(
            f"{what} is {short_repr(statuses)}: no status is in it, so no request would ever be charged"
        )


def _is_status(status: Any) -> bool:
    try:
        return not isinstance(status, bool) and operator.index(status) in STATUSES
    except TypeError:
        return False


def checked_bool(rule: Any, what: str, value: Any) -> bool:
    """The result of a function that must return True or False. Any other value is ambiguous."""
    if value is True or value is False:
        return bool(value)
    raise InvalidLimiter(f"{_name_of(rule, what)} returned {described(value)}, not True or False")


def is_key(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, (str, bytes, int)) and not isinstance(part, bool) for part in parts)


def is_cost(value: Any) -> bool:
    try:
        # Integers of numpy are costs, too.
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def checked_key(rule: Any, value: Any) -> Any:
    if is_key(value):
        return value
    raise InvalidKey(
        f"{_name_of(rule, 'key')} returned {described(value)}, which is no key: str, bytes, int or a tuple of them"
    )


def checked_cost(rule: Any, value: Any) -> int:
    if is_cost(value):
        return operator.index(value)
    raise InvalidCost(
        f"{_name_of(rule, 'cost')} returned {described(value)}, which is no cost: a whole number of at least 0"
    )


def checked_tier(rule: Any, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise InvalidLimiter(f"{_name_of(rule, 'tier')} returned {described(value)}, which is no tier: those are text")


def _name_of(rule: Any, what: str) -> str:
    return f"{what} of the rule of limiter {rule.limiter.name!r}"


def described(value: Any) -> str:
    """A function's unusable result, for a message."""
    if not inspect.isawaitable(value):
        return short_repr(value)
    if hasattr(value, "close"):
        # Otherwise Python warns that it was never awaited.
        value.close()
    return "an awaitable (only async def functions are awaited, and only in async applications)"


class ResolvedRequest:
    """A request with the results of coroutine functions, by function."""

    __slots__ = ("request", "results")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.results: dict[int, Any] = {}

    async def resolve(self, functions: Iterable[Callable[[Any], Any]]) -> None:
        """Await each function once, one after the other."""
        for function in functions:
            if id(function) not in self.results:
                self.results[id(function)] = await function(self.request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def result_of(function: Callable[[Any], Any], request: Any) -> Any:
    """The result of a plain function, or of a coroutine function that was awaited before."""
    if type(request) is not ResolvedRequest:
        return function(request)
    if id(function) in request.results:
        return request.results[id(function)]
    return function(request.request)
