"""Default rules, `otherwise`: for the requests that no rule with a path of its own is for.

A rule *owns* a request if it has a `path`, is enforced (no `shadow`) and no default itself, and is for the request
however a router reads it: see ``RequestPattern.is_certain``. Rules without a path are for the whole application, so
they own nothing. A rule also owns a request that its `exempt`, a tier without a limit or an override lets pass: it has
decided that this request isn't limited.

So a request that a view handles is counted by a rule of its own, or exempted by one, or counted by the default. If a
router may read a path in several ways, and a rule matches only some of them, that rule and the default count both:
otherwise a client could choose the more generous one by its spelling. A path that no route has is counted by the
default, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from forebay.web.request import KeyFunction, Request
from forebay.web.rules import Rule

__all__ = ["Concerned", "owns_requests", "with_defaults"]

Choice: TypeAlias = tuple[Any, int, dict[str | None, int]]
"""A rule, its bit in a plan, and those of its tiers."""


class Concerned(ABC):
    """A function for `exempt` that also says whether the rule is for a request at all."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, request: Request) -> bool: ...

    @abstractmethod
    def concerns(self, request: Request) -> bool:
        """Whether the rule is for a request whose path and methods match, although the request may be exempt."""


def owns_requests(rule: Rule) -> bool:
    """Whether a rule may own requests."""
    return rule.path is not None and not rule.shadow and not rule.otherwise


def with_defaults(choices: Sequence[Choice], methods: tuple[str, ...], paths: tuple[str, ...]) -> list[Choice]:
    """The choices of rules that match a request, without defaults if a rule owns it.

    If that depends on more than its methods and its path, the defaults look at each request themselves.
    """
    owners = [rule for rule, _, _ in choices if owns_requests(rule) and rule.where.is_certain(methods, paths)]
    conditions = [owner.exempt.concerns for owner in owners if isinstance(owner.exempt, Concerned)]
    if len(conditions) < len(owners):
        return [choice for choice in choices if not choice[0].otherwise]
    if not conditions:
        return list(choices)
    return [
        (_Default(rule, conditions), bit, bits) if rule.otherwise else (rule, bit, bits) for rule, bit, bits in choices
    ]


class _Default:
    """A default rule that is for a request unless one of these conditions holds."""

    __slots__ = ("_conditions", "_rule", "shadow")

    def __init__(self, rule: Rule, conditions: Sequence[Callable[[Request], bool]]) -> None:
        self.shadow = rule.shadow
        self._rule, self._conditions = rule, conditions

    def exempts(self, request: Request, client: KeyFunction) -> bool:
        return any(concerns(request) for concerns in self._conditions) or self._rule.exempts(request, client)

    def tier_of(self, request: Request) -> str | None:
        return self._rule.tier_of(request)
