"""Limits as text, ``"5/minute; 100/hour"``: limiters of one endpoint, in the store of the application.

A decorator or a dependency is made before its application has a store, so it keeps a `TextLimit`. `TextLimits` makes
the limiters when the endpoint has its first request. They are named by the endpoint and the rate, so all processes
count together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.errors import ForebayError, InvalidLimiter, InvalidRate, short_repr
from forebay.rate import Rate, as_rate
from forebay.segment.limiter_list import encode_limiter_name
from forebay.store import Store
from forebay.web.rules import Deny, Rule

__all__ = [
    "ANYWHERE",
    "Endpoint",
    "NotInstalled",
    "Rules",
    "TextLimit",
    "TextLimits",
    "checked_store",
    "endpoint_of",
    "text_limits",
]

_NAME_REMEDY: Final = "give it a name of its own, name=..."


class NotInstalled(ForebayError, RuntimeError):
    """A view is limited, but the extension's middleware isn't around the application, or has no store."""


class Endpoint(NamedTuple):
    """The owner of limits as text."""

    name: str
    """The same in all processes."""
    identity: Any = None
    """An object that tells it from another endpoint of that name; None if the framework has one of each name only."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TextLimit:
    """One rate of a text, whose limiter is made when its store and its endpoint are known."""

    rate: Rate
    name: str | None
    """Instead of the endpoint's."""
    rule: Rule
    """With the options of the limit, and a limiter that decides nothing: its store is closed."""

    def over(self, store: Any, name: str) -> Rule:
        return dataclasses.replace(self.rule, limiter=TokenBucket(store, name, self.rate))


Rules: TypeAlias = tuple[Rule | Deny | TextLimit, ...]


def text_limits(text: str, name: str | None, options: Mapping[str, Any]) -> list[TextLimit]:
    """One for each rate of a text. Raises ``InvalidRate``, and ``InvalidLimiter`` for the `name` and the options."""
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidLimiter(f"name is text, not {short_repr(name)}")
    rates: list[Rate] = []
    for part in text.split(";"):
        try:
            rate = as_rate(part)
        except InvalidRate as error:
            example = "limits as text are such as '5/minute; 100/hour'"
            raise InvalidRate(f"{example}, not {short_repr(text)}: {error}") from None
        if rate in rates:
            raise InvalidRate(f"{short_repr(text)} has the limit {rate} twice: leave one out")
        rates.append(rate)
    with Store.private(keys=64) as scratch:
        return [TextLimit(rate, name, Rule(TokenBucket(scratch, str(rate), rate), **options)) for rate in rates]


def checked_store(store: Any, in_loop: bool | None) -> Any:
    """The store of an application's limits as text, or None. `in_loop`: as of ``Gate``. Raises ``InvalidLimiter``."""
    if store is None or isinstance(store, Store):
        return store
    if not hasattr(store, "make_limiter"):
        raise InvalidLimiter(f"store is a store, as forebay.connect(url) returns one, not {short_repr(store)}")
    is_awaited = getattr(store, "is_awaited", in_loop)
    if in_loop is not None and is_awaited is not in_loop:
        kind = type(store).__name__
        raise InvalidLimiter(
            f"{kind} would stop the event loop for each round trip to Redis: take an Async{kind}"
            if in_loop
            else f"{kind} has to be awaited, and this application has no event loop: take a {kind[len('Async') :]}"
        )
    return store


def endpoint_of(view: Any) -> Endpoint:
    """The endpoint of a function, of an object that can be called, or of a class of views."""
    while isinstance(view, functools.partial):
        view = view.func
    # Django's and REST framework's views have their classes. Each route has another function for one class.
    classes = [getattr(view, name, None) for name in ("view_class", "cls")]
    view = next((found for found in classes if isinstance(found, type)), view)
    named = view if hasattr(view, "__qualname__") else type(view)
    return Endpoint(f"{named.__module__}.{named.__qualname__}", view)


ANYWHERE: Final = Endpoint("")
"""The endpoint of rules that need none."""


class TextLimits:
    """The rules of an application's limits as text, in its `store`.

    *Threads*: safe. Limiters of one name share their state, so two threads may make the same at once.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._owners: dict[str, tuple[Any, Rules]] = {}
        """By the limiters' names: the endpoint whose limiter it is, and the limits that it belongs to."""

    def rules_at(self, endpoint: Endpoint, rules: Rules) -> list[Rule | Deny]:
        """`rules` with limiters instead of text: those of an endpoint, unless the text has a name.

        Raises ``NotInstalled`` without a store, ``InvalidLimiter`` if another endpoint has the name, and what the
        store raises.
        """
        made: list[Rule | Deny] = []
        names: list[str] = []
        for limit in rules:
            if not isinstance(limit, TextLimit):
                made.append(limit)
                continue
            if self._store is None:
                raise NotInstalled(
                    f"the view {endpoint.name} is limited by text, {limit.rate}, but its application has no store: "
                    'write store=, as in setup(app, store=store) or FOREBAY = {"STORE": "shop.limits.store"}'
                )
            name = f"{limit.name or endpoint.name} {limit.rate}"
            names.append(name)
            if names.count(name) > 1:
                # Two decorators with one rate, and a key each.
                name += f" ({names.count(name)})"
            if limit.name is None and endpoint.identity is not None:
                self._own(name, endpoint, rules)
            # Redis takes no longer names, and so statistics have the names of header fields.
            made.append(limit.over(self._store, encode_limiter_name(name).decode()))
        return made

    def _own(self, name: str, endpoint: Endpoint, rules: Rules) -> None:
        identity, owner = self._owners.setdefault(name, (endpoint.identity, rules))
        if identity is not endpoint.identity:
            raise InvalidLimiter(
                f"{short_repr(identity)} and {short_repr(endpoint.identity)} are both named {endpoint.name!r}, so "
                f"their limits would count together: {_NAME_REMEDY}"
            )
        if owner is not rules:
            raise InvalidLimiter(
                f"two limits of {endpoint.name!r} would be the limiter {name!r}, and charge a request twice: leave one "
                f"out, or {_NAME_REMEDY}"
            )
