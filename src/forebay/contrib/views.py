"""What the frameworks' extensions have in common: limits of single views, beneath those of the whole application.

An outer layer, the extension's middleware, opens a `Visit` for each request and sees to its end. The views' decorators
and dependencies ask for themselves and leave with the visit what is to be told and given back then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Any, Final, TypeAlias, TypedDict

from forebay.core.limiter import Limiter
from forebay.errors import ForebayError, InvalidLimiter, shown
from forebay.web import Answer, Denial, Gate, Passage, Request, Rule, everyone
from forebay.web.cleanup import LeaseRenewal, RequestCleanup
from forebay.web.request import KeyFunction

__all__ = [
    "Asker",
    "AsyncVisit",
    "NotInstalled",
    "RuleOptions",
    "Rules",
    "Visit",
    "mark",
    "rules_of",
    "stacked",
    "without_body_limits",
]

Rules: TypeAlias = tuple[Rule, ...]

# A response may have more of their items; of other fields the last one counts.
LISTS: Final = frozenset({"RateLimit", "RateLimit-Policy", b"ratelimit", b"ratelimit-policy"})
MARK: Final = "_forebay_limited"


class NotInstalled(ForebayError, RuntimeError):
    """A view is limited, but the layer that answers for it isn't around the application."""


class RuleOptions(TypedDict, total=False):
    """What ``Rule`` can be told."""

    path: str | Iterable[str] | None
    methods: str | Iterable[str]
    ignore_case: bool
    key: KeyFunction | None
    cost: int | Callable[[Request], int | Awaitable[int]]
    exempt: Callable[[Request], bool | Awaitable[bool]] | None
    charge_on: Container[int] | Callable[[int], bool | Awaitable[bool]] | None
    status: int | None
    answer: Answer | Callable[[Request, Denial], Answer] | None


class Visit:
    """What a request has been let in with so far."""

    __slots__ = ("cleanup", "denial", "fields")

    def __init__(self, passage: Passage | None = None) -> None:
        self.cleanup = RequestCleanup() if passage is None or passage.cleanup is None else passage.cleanup
        self.fields: dict[Any, Any] = dict(passage.fields) if passage is not None else {}
        self.denial: Denial | None = None

    def add(self, passage: Passage) -> None:
        for name, value in passage.fields:
            if name in LISTS and name in self.fields:
                value = self.fields[name] + (", " if isinstance(value, str) else b", ") + value
            self.fields[name] = value
        if passage.cleanup is not None:
            self.cleanup.merge(passage.cleanup)

    def deny(self, denial: Denial) -> None:
        """The request isn't handled after all: what can be undone of what it was let in with, is."""
        self.cleanup.roll_back()
        if not denial.rule.is_hidden:
            # What looks like success has the fields of success.
            self.fields.clear()
        self.denial = denial


class AsyncVisit(Visit):
    """Of a request that a coroutine handles: until it ends, the event loop renews what is held."""

    __slots__ = ("loop", "renewal")

    def __init__(self, passage: Passage | None = None) -> None:
        super().__init__(passage)
        self.loop = asyncio.get_running_loop()
        self.renewal = LeaseRenewal(self.cleanup)

    def add(self, passage: Passage) -> None:
        super().add(passage)
        if self.cleanup.leases:
            # Sync views are in threads of their own.
            self.loop.call_soon_threadsafe(self.renewal.start)

    def end(self, status: int) -> None:
        self.renewal.stop()
        self.cleanup.end(status)


class Asker:
    """The gates of one application: of what is for all requests, and of each limited view."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        self.gate = gate
        self._options = options | {"client": gate.client}
        # By identity: a rule's statuses may be in a set.
        self._gates: dict[int, tuple[Rules, Gate]] = {}

    def gate_of(self, rules: Rules) -> Gate:
        if id(rules) not in self._gates:
            self._gates[id(rules)] = rules, Gate(rules, **self._options)
        return self._gates[id(rules)][1]

    def ask(self, request: Request, visit: Visit, rules: Rules | None = None) -> Answer | None:
        """The answer to a request that is denied, by the view's `rules` or by those for all requests."""
        gate = self.gate if rules is None else self.gate_of(rules)
        return self._answer(gate, request, visit, gate.enter(request))

    async def ask_async(self, request: Request, visit: Visit, rules: Rules | None = None) -> Answer | None:
        """As ``ask``, in an event loop."""
        gate = self.gate if rules is None else self.gate_of(rules)
        passage = await gate.enter_async(request) if gate.is_awaited else gate.enter(request)
        answer = self._answer(gate, request, visit, passage)
        if answer is not None:
            await visit.cleanup.wait()
        return answer

    def _answer(self, gate: Gate, request: Request, visit: Visit, passage: Passage | Denial | None) -> Answer | None:
        if isinstance(passage, Denial):
            visit.deny(passage)
            return gate.answer(request, passage)
        if passage is not None:
            visit.add(passage)
        return None


def rules_of(limits: Iterable[Limiter | Rule], options: RuleOptions) -> Rules:
    """Limiters get the options, rules have their own. Raises ``InvalidLimiter``."""
    rules = []
    for limit in limits:
        if isinstance(limit, Rule):
            if options:
                raise InvalidLimiter(
                    f"{', '.join(options)}: beside a Rule, an option belongs into it, Rule(limiter, ...)"
                )
            rules.append(limit)
        else:
            rules.append(Rule(limit, **options))
    if not rules:
        raise InvalidLimiter("which limiter? Say limited(TokenBucket(store, 'orders', '5/second'))")
    # What can't be asked together is refused where it is written.
    Gate(rules, client=everyone)
    return tuple(rules)


def without_body_limits(gate: Gate, instead: str) -> Gate:
    if gate.body_limits:
        raise InvalidLimiter(f"{shown(gate.body_limits[0])} comes too late here: {instead}")
    return gate


def stacked(view: Callable[..., Any], rules: Rules) -> tuple[Any, Rules]:
    """What is limited, and by which rules: decorators that stand one upon the other are asked as one, all or none."""
    wrapper, inner, inner_rules = getattr(view, MARK, (None, view, ()))
    # functools.wraps copies the mark to other people's decorators, which have something to do between ours.
    return (inner, rules_of((*rules, *inner_rules), {})) if wrapper is view else (view, rules)


def mark(wrapper: Callable[..., Any], view: Callable[..., Any], rules: Rules) -> None:
    setattr(wrapper, MARK, (wrapper, view, rules))
