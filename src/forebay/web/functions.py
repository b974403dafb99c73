"""The functions that rules are made of: what is refused of them at start, and of what they return.

Coroutine functions are awaited before a plan asks its limits: the plan finds what they have said beside the request.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from forebay.errors import InvalidCost, InvalidKey, InvalidLimiter, shown

__all__ = [
    "Told",
    "check_function",
    "check_statuses",
    "checked_cost",
    "checked_key",
    "given",
    "has_to_be_awaited",
    "is_cost",
    "is_key",
    "said",
    "yes_or_no",
]

STATUSES: Final = range(100, 600)


def has_to_be_awaited(function: Any) -> bool:
    """Whether it is a coroutine function, or an object that is called like one."""
    called = inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def check_function(told: str, function: Any, arguments: int = 1) -> None:
    """What can't be called with so many fails here, and not at the first request; `told` says what it is to be."""
    if not callable(function):
        raise InvalidLimiter(f"{told}, not {shown(function)}")
    if isinstance(function, type):
        raise InvalidLimiter(f"{told}, and {shown(function)} is a class: make an object of it, or write a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Of some that are compiled nobody knows.
        return
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        raise InvalidLimiter(f"{told}, and {shown(function)} can't be called so: {error}") from None


def check_statuses(what: str, statuses: Any) -> None:
    """A set that no status is in would never charge anybody."""
    if isinstance(statuses, (str, bytes, Mapping)) or not hasattr(statuses, "__contains__"):
        raise InvalidLimiter(f"{what} is a set of statuses such as {{401, 403}} or a function, not {shown(statuses)}")
    if isinstance(statuses, Iterable) and not isinstance(statuses, range):
        for status in statuses:
            if not _is_status(status):
                raise InvalidLimiter(
                    f"{what} has {shown(status)}, which is no status: those are whole numbers from 100 to 599"
                )
    if not any(status in statuses for status in STATUSES):
        raise InvalidLimiter(f"{what} is {shown(statuses)}: no status is in it, so nobody would ever be charged")


def _is_status(status: Any) -> bool:
    try:
        return not isinstance(status, bool) and operator.index(status) in STATUSES
    except TypeError:
        return False


def yes_or_no(rule: Any, what: str, value: Any) -> bool:
    """What a function has said that is to say True or False. Anything else may mean the one or the other."""
    if value is True or value is False:
        return bool(value)
    raise InvalidLimiter(f"{_whose(rule, what)} gave {given(value)}, not True or False")


def is_key(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, (str, bytes, int)) and not isinstance(part, bool) for part in parts)


def is_cost(value: Any) -> bool:
    try:
        # As of numpy, too.
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def checked_key(rule: Any, value: Any) -> Any:
    if is_key(value):
        return value
    raise InvalidKey(f"{_whose(rule, 'key')} gave {given(value)}, which is no key: str, bytes, int or a tuple of them")


def checked_cost(rule: Any, value: Any) -> int:
    if is_cost(value):
        return operator.index(value)
    raise InvalidCost(f"{_whose(rule, 'cost')} gave {given(value)}, which is no cost: a whole number of at least 0")


def _whose(rule: Any, what: str) -> str:
    return f"{what} of the rule of limiter {rule.limiter.name!r}"


def given(value: Any) -> str:
    """What a function has returned that it may not, for a message."""
    if not inspect.isawaitable(value):
        return shown(value)
    if hasattr(value, "close"):
        # Or Python would warn that nobody has awaited it.
        value.close()
    return "an awaitable (only async def functions are awaited, and only in async applications)"


class Told:
    """A request, with what coroutine functions have said of it."""

    __slots__ = ("request", "told")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.told: dict[int, Any] = {}

    async def ask(self, functions: Iterable[Callable[[Any], Any]]) -> None:
        """Each once, one after the other."""
        for function in functions:
            if id(function) not in self.told:
                self.told[id(function)] = await function(self.request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def said(function: Callable[[Any], Any], request: Any) -> Any:
    """What a function says of a request, or has said."""
    if type(request) is not Told:
        return function(request)
    if id(function) in request.told:
        return request.told[id(function)]
    return function(request.request)
