"""The common part of the frameworks' extensions: limits of single views, beneath those of the whole application.

The extension's middleware opens a `Visit` for each request and ends it. The views' decorators and dependencies charge
their own limits, and add header fields and permits to the visit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypedDict

from forebay.contrib.endpoints import (
    ANYWHERE,
    Endpoint,
    NotInstalled,
    Rules,
    TextLimit,
    TextLimits,
    checked_store,
    endpoint_of,
    text_limits,
)
from forebay.core.limiter import Limiter
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration
from forebay.web import (
    AddressList,
    Answer,
    Ban,
    BodyLimit,
    ByteRate,
    ClientAddress,
    Denial,
    Deny,
    Gate,
    Passage,
    Request,
    Rule,
    Shed,
)
from forebay.web.cleanup import LeaseRenewal, RequestCleanup
from forebay.web.live_gate import VersionedRules, at_start
from forebay.web.renewals import RENEWALS, renewals_of
from forebay.web.request import KeyFunction
from forebay.web.request_ids import RequestId
from forebay.web.rules import check_event_loop

__all__ = [
    "LIMITED",
    "AppGates",
    "AsyncVisit",
    "Limit",
    "NotInstalled",
    "RuleOptions",
    "Rules",
    "Visit",
    "check_loop_of",
    "remember_rules",
    "rules_of",
    "unstacked",
    "without_body_limits",
]

Limit: TypeAlias = Limiter | Rule | Deny | str
"""A limit of a view, as its decorator takes it."""

# Their values are lists, which several limits extend; of other fields the last value counts.
LIST_FIELDS: Final = frozenset({"RateLimit", "RateLimit-Policy", b"ratelimit", b"ratelimit-policy"})
LIMITED: Final = "_forebay_limited"
"""The attribute of a decorated view: its wrapper, the undecorated view, and its rules."""
# For a gate that only checks rules: it needs no peer, so it warns of none.
_ANY_CLIENT: Final = ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")


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
    request_id: RequestId | None
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
    """The gates of one application: one for all requests, and one for each limited view.

    `endpoint_of` names the endpoint of a request, for limits as text, which are in `store`. `options`: of ``Gate``.
    """

    def __init__(
        self, gate: Gate, endpoint_of: Callable[[Any], Endpoint] = endpoint_of, store: Any = None, **options: Any
    ) -> None:
        self.gate = gate
        self._endpoint_of = endpoint_of
        self._options = options | {"client": at_start(gate).client}
        self._texts = TextLimits(checked_store(store, options.get("in_loop")))
        # By identity: rules may be unhashable, as their statuses may be a set.
        self._gates: dict[int, tuple[Rules, Gate]] = {}
        self._gates_of_texts: dict[tuple[int, str, int], tuple[Rules, Endpoint, Gate]] = {}

    def gate_of(self, rules: Rules, source: Any = None, in_loop: bool | None = None) -> Gate:
        """The gate of a view's rules. `source` is for `endpoint_of`, and `in_loop` says where the view decides.

        Raises ``InvalidLimiter`` and ``NotInstalled`` for limits that can't be made here.
        """
        found = self._gates.get(id(rules))
        if found is not None:
            return found[1]
        if any(isinstance(rule, TextLimit) and rule.name is None for rule in rules):
            return self._gate_at(self._endpoint_of(source), rules, in_loop)
        gate = self._gate_of(ANYWHERE, rules, in_loop)
        self._gates[id(rules)] = rules, gate
        return gate

    def _gate_at(self, endpoint: Endpoint, rules: Rules, in_loop: bool | None) -> Gate:
        place = id(rules), endpoint.name, id(endpoint.identity)
        if place not in self._gates_of_texts:
            self._gates_of_texts[place] = rules, endpoint, self._gate_of(endpoint, rules, in_loop)
        return self._gates_of_texts[place][2]

    def _gate_of(self, endpoint: Endpoint, rules: Rules, in_loop: bool | None) -> Gate:
        made = self._texts.rules_at(endpoint, rules)
        # Django has views of both kinds, and one store for the texts of all.
        check_event_loop(made, in_loop)
        return Gate(made, **self._options)

    def decide(self, request: Request, visit: Visit, rules: Rules | None = None, source: Any = None) -> Answer | None:
        """Charge a view's `rules`, or those for all requests. Returns the response if the request is denied."""
        gate = self.gate if rules is None else self.gate_of(rules, source, in_loop=False)
        passage = gate.admit(request)
        native: Any = request.native
        if isinstance(passage, Passage) and passage.cleanup is not None and passage.cleanup.turns:
            passage.cleanup.wait_turn(native.get(RENEWALS))
            visit.cleanup.begin_work()
        answer = self._answer(gate, request, visit, passage)
        if visit.cleanup.has_renewals:
            renewals_of(native).add(visit.cleanup)
        return answer

    def decide_exempt(self, request: Request, visit: Visit) -> Answer | None:
        """As ``decide``, for a view that is exempt from the rules for all requests: each ``Deny`` applies to it."""
        return self._answer(self.gate, request, visit, self.gate.refused(request))

    async def decide_async(
        self,
        request: Request,
        visit: Visit,
        rules: Rules | None = None,
        source: Any = None,
        fetch_user: Callable[[], Awaitable[None]] | None = None,
    ) -> Answer | None:
        """As ``decide``, in an event loop.

        `fetch_user` is awaited where a function that reads the user can't fail and be called again: once a shadow
        rule's decides, limits have been charged, and once a denial's is called, bans have counted.
        """
        gate = self.gate if rules is None else self.gate_of(rules, source, in_loop=True)
        if fetch_user is not None and gate.has_shadows:
            await fetch_user()
        passage = await gate.enter_unguarded(request) if gate.is_awaited else gate.admit(request)
        if isinstance(passage, Passage) and passage.cleanup is not None and passage.cleanup.turns:
            await passage.cleanup.wait_turn_async()
            visit.cleanup.begin_work()
        if fetch_user is not None and isinstance(passage, Denial) and gate.calls_to_answer(passage):
            await fetch_user()
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


def rules_of(limits: Iterable[Limit], options: RuleOptions, name: str | None = None) -> Rules:
    """A rule for each limiter and each rate of a text, with these options; a ``Rule`` and a ``Deny`` have their own.

    `name`: of limits as text, instead of the endpoint's. Raises ``InvalidLimiter`` and ``InvalidRate``.
    """
    rules: list[Rule | Deny | TextLimit] = []
    has_text = is_several = False
    for limit in limits:
        is_several = bool(rules)
        if isinstance(limit, str):
            texts = text_limits(limit, name, options)
            has_text, is_several = True, is_several or len(texts) > 1
            rules += texts
        elif isinstance(limit, (Rule, Deny)):
            if options:
                kind = type(limit).__name__
                raise InvalidLimiter(
                    f"{', '.join(options)}: beside a {kind}, an option belongs into it, {kind}(limiter, ...)"
                )
            if isinstance(limit, Rule) and limit.otherwise:
                raise InvalidLimiter(
                    f"the rule of {limit.limiter!r} is a default, for an application and not for a view: give it with "
                    "the application's rules, or leave otherwise out"
                )
            rules.append(limit)
        elif isinstance(limit, (Shed, BodyLimit, ByteRate, VersionedRules)):
            kind = type(limit).__name__
            raise InvalidLimiter(f"{kind} is for an application, not for a view: give it with the application's rules")
        else:
            rules.append(Rule(limit, **options))
    if not rules:
        raise InvalidLimiter("no limiter is given: write limited(TokenBucket(store, 'orders', '5/second'))")
    if is_several and options.get("tiers"):
        raise InvalidLimiter(
            "tiers are those of one limiter, and each of several would charge them: write Rule(limiter, tiers=...)"
        )
    if name is not None and not has_text:
        raise InvalidLimiter(f"name={name!r} is for limits as text: a limiter has a name")
    _check_together(rules)
    return tuple(rules)


def _check_together(rules: Iterable[Rule | Deny | TextLimit]) -> None:
    """Rules that can't be charged together fail here, where they are written."""
    Gate([rule for rule in rules if not isinstance(rule, TextLimit)], client=_ANY_CLIENT)


def check_loop_of(rules: Rules, in_loop: bool) -> None:
    """As ``check_event_loop``, for the limits of a view."""
    known = [limit.rule if isinstance(limit, TextLimit) else limit for limit in rules]
    check_event_loop([rule for rule in known if isinstance(rule, Rule)], in_loop)


def without_body_limits(gate: Gate, for_size: str, for_rate: str) -> Gate:
    """The gate. Raises ``InvalidLimiter``, with one of these remedies, if it limits the size or the rate of bodies."""
    for limit in at_start(gate).given_body_limits:
        remedy = for_size if isinstance(limit, BodyLimit) else for_rate
        raise InvalidLimiter(f"{short_repr(limit)} comes too late here: {remedy}")
    return gate


_stacked: Final[dict[tuple[int, int], tuple[Rules, Rules, Rules]]] = {}
"""The rules of two decorators, and of both together: Django decorates a class's method anew for each request."""


def unstacked(view: Callable[..., Any], rules: Rules) -> tuple[Any, Rules]:
    """The undecorated view and all its rules: decorators directly above each other are charged as one, all or none."""
    wrapper, inner, inner_rules = getattr(view, LIMITED, (None, view, ()))
    # functools.wraps copies the attribute to another package's decorator between ours: its wrapper is another one.
    if wrapper is not view:
        return view, rules
    place = id(rules), id(inner_rules)
    if place not in _stacked:
        together = (*rules, *inner_rules)
        _check_together(together)
        _stacked[place] = rules, inner_rules, together
    return inner, _stacked[place][2]


def remember_rules(wrapper: Callable[..., Any], view: Callable[..., Any], rules: Rules) -> None:
    """For `unstacked`."""
    setattr(wrapper, LIMITED, (wrapper, view, rules))
