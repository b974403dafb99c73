"""Byte rates: bodies that are sent or read no faster than a limiter of bytes allows, over all workers of a host.

A request is refused before its handler runs if too many bodies wait already; `metering` slows each body down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, as_byte_count, as_delay_ns
from forebay.web.addresses import AddressList
from forebay.web.answers import again, quota_exceeded
from forebay.web.client import UnknownPeer
from forebay.web.denials import Denials
from forebay.web.functions import ResolvedRequest, checked_key, has_to_be_awaited, result_of
from forebay.web.metering import Meter, Place
from forebay.web.patterns import RequestPattern, UnseenPaths
from forebay.web.request import KeyFunction, Request
from forebay.web.rules import Answer, Denial, Rule, kind_of, with_tiers
from forebay.web.store_errors import DENYING_ERRORS, WhenUnavailable
from forebay.web.turns import HeldBack

if TYPE_CHECKING:
    from forebay.core.decision import Decision

__all__ = ["ByteRate", "ByteRates", "Meters"]

Bodies: TypeAlias = Literal["responses", "requests"]
HELD_WAIT_S: Final = 1
"""``Retry-After`` while as many bodies are held as may be: one may end at any time."""


@dataclass(frozen=True)
class ByteRate:
    """A rate of the bytes of bodies, among the rules: ``ByteRate(TokenBucket(store, "files", "1 MiB/second"))``.

    * `limiter`: a ``TokenBucket`` of a ``Store``, whose permits are bytes. Bodies of one key share it, in all workers
      of the host; its `burst` is how many bytes may go at once after a pause.
    * `bodies`: ``"responses"``, which are sent at the rate, or ``"requests"``, which the application reads at the rate.
    * `after`: the first bytes of each body that are free, as in ``"10 MiB"``; a number or text.
    * `path`, `methods`, `ignore_case`, `key`, `tiers`, `tier`, `exempt`: those of ``Rule``.
    * `most_wait`: the longest wait for a part of a body, as when many bodies share a key. A request whose first bytes
      would wait for longer is denied by 429, and a body whose next part would is cut off: its connection ends.
    * `most_held`: how many bodies of one process may have been slowed down and not have ended, by default 4 in threads
      and 1,000 in an event loop. Requests beyond are denied by 503.

    The thread or the task that sends or reads the body waits. WebSockets are not metered. Raises ``InvalidLimiter`` and
    ``InvalidRate``. Thread-safe, fork-safe; one decision for each 64 KiB, or for each second of the rate.
    """

    limiter: Any
    _: KW_ONLY
    bodies: Bodies = "responses"
    after: str | int = 0
    path: str | Iterable[str] | None = None
    methods: str | Iterable[str] = ()
    ignore_case: bool = False
    key: KeyFunction | None = None
    tiers: Mapping[str, Any] | None = None
    tier: Callable[[Request], str | Awaitable[str]] | None = None
    exempt: AddressList | Callable[[Request], bool | Awaitable[bool]] | None = None
    most_wait: Duration = "30s"
    most_held: int | None = None
    rule: Rule = field(init=False, repr=False)
    """It matches requests, and has their keys and tiers."""
    after_bytes: int = field(init=False, repr=False)
    most_wait_ns: int = field(init=False, repr=False)
    held_back: HeldBack = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bodies not in get_args(Bodies):
            raise InvalidLimiter(f'bodies is "responses" or "requests", not {short_repr(self.bodies)}')
        most: Any = self.most_held
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InvalidLimiter(f"most_held is a whole number of at least 1, not {short_repr(most)}")
        rule = Rule(
            self.limiter,
            path=self.path,
            methods=self.methods,
            ignore_case=self.ignore_case,
            key=self.key,
            tiers=self.tiers,
            tier=self.tier,
            exempt=self.exempt,
            answer=_too_slow,
        )
        for each in with_tiers([rule]):
            _check_limiter(each)
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "after_bytes", as_byte_count(self.after, "after is"))
        object.__setattr__(self, "most_wait_ns", as_delay_ns(self.most_wait, "most_wait is"))
        object.__setattr__(self, "held_back", HeldBack(most))

    @property
    def where(self) -> RequestPattern:
        return self.rule.where


def _check_limiter(rule: Rule) -> None:
    limiter: Any = rule.limiter
    if kind_of(limiter) is not TokenBucket or rule.is_remote:
        raise InvalidLimiter(
            f"{limiter!r} can't meter bytes: a ByteRate is for a TokenBucket of a Store, which books turns without a "
            'round trip: write TokenBucket(store, "files", "1 MiB/second")'
        )
    if limiter.refill != "continuous" or limiter.initial is not None:
        raise InvalidLimiter(f"{limiter!r} can't meter bytes: leave refill and initial out, so that it books turns")


def _too_slow(request: Request, denial: Denial) -> Answer:
    wait_s = denial.retry_after_s
    assert wait_s is not None
    detail = f"The bytes of this service's bodies are limited, and too many of them wait: {again(wait_s)}."
    return quota_exceeded(denial.rule.denial_status, detail, wait_s, (), {"violated-policies": list(denial.violated)})


class Meters(NamedTuple):
    """The meters of one request's body and of its response's; None: that body is not metered."""

    request: Meter | None
    response: Meter | None


class ByteRates:
    """The byte rates of one gate. Thread-safe, fork-safe."""

    def __init__(self, rates: Sequence[ByteRate], client: KeyFunction, when_unavailable: WhenUnavailable) -> None:
        self._rates, self._client, self._when_unavailable = rates, client, when_unavailable
        self._denials = {id(rate): _denials(rate, when_unavailable) for rate in rates}
        self._unseen = UnseenPaths("byte rate", rates)
        functions = [client, *[one for rate in rates for one in rate.rule.functions_to_await]] if rates else []
        self._functions_to_await = [one for one in functions if has_to_be_awaited(one)]

    def __bool__(self) -> bool:
        return bool(self._rates)

    async def admit_async(self, request: Request) -> Meters | Denial | None:
        """As ``admit``, also with functions that have to be awaited."""
        resolved: Any = ResolvedRequest(request)
        if self._functions_to_await and (matching := self._matching(request)):
            try:
                await resolved.resolve(self._functions_to_await)
            except UnknownPeer as error:
                return self._denials[id(matching[0])].for_error(error, request)
        return self.admit(resolved)

    def admit(self, request: Request) -> Meters | Denial | None:
        """The meters of a request, or why it is refused. None: no byte rate is for it."""
        places: dict[Bodies, list[Place]] = {"requests": [], "responses": []}
        for rate in self._matching(request):
            place = self._place(rate, request)
            if isinstance(place, Denial):
                return place
            if place is not None:
                places[rate.bodies].append(place)
        if not any(places.values()):
            return None
        admits_unchecked = self._when_unavailable == "allow"
        reading, sending = (Meter(one, admits_unchecked) if one else None for one in places.values())
        return Meters(reading, sending)

    def _matching(self, request: Request) -> list[ByteRate]:
        methods, paths = request.methods, request.paths
        if self._unseen.unseen:
            self._unseen.observe(methods, paths)
        # The response to a HEAD request has no body.
        is_head = request.method == "HEAD"
        return [
            rate
            for rate in self._rates
            if not (is_head and rate.bodies == "responses") and rate.where.matches(methods, paths)
        ]

    def _place(self, rate: ByteRate, request: Request) -> Place | Denial | None:
        rule = rate.rule
        denials = self._denials[id(rate)]
        try:
            if rule.exempts(request, self._client):
                return None
            tier = rule.tier_of(request)
            if tier is not None and tier in rule.by_tier:
                of_tier = rule.by_tier[tier]
                if of_tier is None:
                    return None
                rule = of_tier
            key = checked_key(rule, result_of(rule.key or self._client, request))
            if rate.held_back.is_full:
                busy = dataclasses.replace(rule, status=503)
                return Denial(busy, (rule.limiter.name,), None, HELD_WAIT_S, ())
            place = Place(rule.limiter, key, rate.after_bytes, rate.held_back, rate.most_wait_ns)
            decision: Decision = place.limiter.peek(key, place.most_at_once)
        except DENYING_ERRORS as error:
            return denials.for_error(error, request)
        if decision.retry_after_ns > rate.most_wait_ns or decision.reason == "no room":
            return denials.by_decisions(request, [rule], [decision])
        return place


def _denials(rate: ByteRate, when_unavailable: WhenUnavailable) -> Denials:
    rules = with_tiers([rate.rule])
    return Denials(rules, rate.rule, (), (), lambda request, rules: (), when_unavailable)
