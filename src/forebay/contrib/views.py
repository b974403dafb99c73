"""The common part of the frameworks' extensions: limits of single views, beneath those of the whole application.

The extension's middleware opens a `Visit` for each request and ends it. The views' decorators and dependencies charge
their own limits, and add header fields and permits to the visit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypedDict

from forebay.core.limiter import Limiter
from forebay.errors import ForebayError, InvalidLimiter, short_repr
from forebay.rate import Duration
from forebay.web import AddressList, Answer, Ban, ClientAddress, Denial, Gate, Passage, Request, Rule
from forebay.web.cleanup import LeaseRenewal, RequestCleanup
from forebay.web.request import KeyFunction

__all__ = [
    "AppGates",
    "AsyncVisit",
    "NotInstalled",
    "RuleOptions",
    "Rules",
    "Visit",
    "remember_rules",
    "rules_of",
    "unstacked",
    "without_body_limits",
]

Rules: TypeAlias = tuple[Rule, ...]

# Their values are lists, which several limits extend; of other fields the last value counts.
LIST_FIELDS: Final = frozenset({"RateLimit", "RateLimit-Policy", b"ratelimit", b"ratelimit-policy"})
LIMITED: Final = "_forebay_limited"
# For a gate that only checks rules: it needs no peer, so it warns of none.
_ANY_CLIENT: Final = ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")


class NotInstalled(ForebayError, RuntimeError):
    """A view is limited, but the extension's middleware isn't around the application."""


class RuleOptions(TypedDict, total=False):
    """The options of ``Rule``."""

    path: str | Iterable[str] | None
    methods: str | Iterable[str]
    ignore_case: bool
    key: KeyFunction | None
    cost: int | Callable[[Request], int | Awaitable[int]]
    tiers: Mapping[str, Any] | None
    tier: Callable[[Request], str | Awaitable[str]] | None
    delay: Duration | None
    most_delayed: int | None
    exempt: AddressList | Callable[[Request], bool | Awaitable[bool]] | None
    ban: Ban | None
    charge_on: Container[int] | Callable[[int], bool | Awaitable[bool]] | None
    status: int | None
    answer: Answer | Callable[[Request, Denial], Answer] | None


class Visit:
    """A request's passages so far: their header fields and their cleanups, merged."""

    __slots__ = ("cleanup", "denial", "fields")

    def __init__(self, passage: Passage | None = None) -> None:
        self.cleanup = RequestCleanup() if passage is None or passage.cleanup is None else passage.cleanup
        self.fields: dict[Any, Any] = dict(passage.fields) if passage is not None else {}
        self.denial: Denial | None = None

    def add(self, passage: Passage) -> None:
        for name, value in passage.fields:
            if name in LIST_FIELDS and name in self.fields:
                value = self.fields[name] + (", " if isinstance(value, str) else b", ") + value
            self.fields[name] = value
        if passage.cleanup is not None:
            self.cleanup.merge(passage.cleanup)

    def deny(self, denial: Denial) -> None:
        """The request isn't handled after all: release and refund what its passages took."""
        self.cleanup.roll_back()
        if not denial.rule.is_hidden:
            # A shadow ban keeps the fields of success.
            self.fields.clear()
        self.denial = denial


class AsyncVisit(Visit):
    """A visit whose leases the event loop renews until it ends."""

    __slots__ = ("loop", "renewal")

    def __init__(self, passage: Passage | None = None) -> None:
        super().__init__(passage)
        self.loop = asyncio.get_running_loop()
        self.renewal = LeaseRenewal(self.cleanup)

    def add(self, passage: Passage) -> None:
        super().add(passage)
        if self.cleanup.has_renewals:
            # A sync view runs in another thread than the loop's.
            self.loop.call_soon_threadsafe(self.renewal.start)

    def end(self, status: int) -> None:
        self.renewal.stop()
        self.cleanup.end(status)


class AppGates:
    """The gates of one application: one for all requests, and one for each limited view."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        self.gate = gate
        self._options = options | {"client": gate.client}
        # By identity: rules may be unhashable, as their statuses may be a set.
        self._gates: dict[int, tuple[Rules, Gate]] = {}

    def gate_of(self, rules: Rules) -> Gate:
        if id(rules) not in self._gates:
            self._gates[id(rules)] = rules, Gate(rules, **self._options)
        return self._gates[id(rules)][1]

    def decide(self, request: Request, visit: Visit, rules: Rules | None = None) -> Answer | None:
        """Charge a view's `rules`, or those for all requests. Returns the response if the request is denied."""
        gate = self.gate if rules is None else self.gate_of(rules)
        passage = gate.admit(request)
        if isinstance(passage, Passage) and passage.cleanup is not None:
            passage.cleanup.wait_turn()
        return self._answer(gate, request, visit, passage)

    def decide_exempt(self, request: Request, visit: Visit) -> Answer | None:
        """As ``decide``, for a view that is exempt from the rules for all requests: each ``Deny`` applies to it."""
        return self._answer(self.gate, request, visit, self.gate.refused(request))

    async def decide_async(self, request: Request, visit: Visit, rules: Rules | None = None) -> Answer | None:
        """As ``decide``, in an event loop."""
        gate = self.gate if rules is None else self.gate_of(rules)
        passage = await gate.enter_unguarded(request) if gate.is_awaited else gate.admit(request)
        if isinstance(passage, Passage) and passage.cleanup is not None:
            await passage.cleanup.wait_turn_async()
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
    """A rule for each limiter, with these options; a ``Rule`` has its own. Raises ``InvalidLimiter``."""
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
        raise InvalidLimiter("no limiter is given: write limited(TokenBucket(store, 'orders', '5/second'))")
    # Rules that can't be charged together fail here, where they are written.
    Gate(rules, client=_ANY_CLIENT)
    return tuple(rules)


def without_body_limits(gate: Gate, remedy: str) -> Gate:
    if gate.body_limits:
        raise InvalidLimiter(f"{short_repr(gate.body_limits[0])} comes too late here: {remedy}")
    return gate


def unstacked(view: Callable[..., Any], rules: Rules) -> tuple[Any, Rules]:
    """The undecorated view and all its rules: decorators directly above each other are charged as one, all or none."""
    wrapper, inner, inner_rules = getattr(view, LIMITED, (None, view, ()))
    # functools.wraps copies the attribute to another package's decorator between ours: its wrapper is another one.
    return (inner, rules_of((*rules, *inner_rules), {})) if wrapper is view else (view, rules)


def remember_rules(wrapper: Callable[..., Any], view: Callable[..., Any], rules: Rules) -> None:
    """For `unstacked`."""
    setattr(wrapper, LIMITED, (wrapper, view, rules))
