"""The gate: finds the rules that match a request; their plan decides whether it may be handled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from forebay.awaited import Awaited
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.errors import InvalidLimiter, short_repr
from forebay.seldom import Seldom
from forebay.web.addresses import AddressList
from forebay.web.answers import answer_to
from forebay.web.ban_plan import BanPlan
from forebay.web.byte_rates import ByteRate, ByteRates
from forebay.web.charging_once import check_together
from forebay.web.client import PEERS, client_address
from forebay.web.defaults import owns_requests, with_defaults
from forebay.web.denials import by_list, log, log_denial
from forebay.web.fastpath import Passage
from forebay.web.functions import ResolvedRequest, check_function, has_to_be_awaited
from forebay.web.header_fields import checked_styles
from forebay.web.options import GivenRules, OnDenied, checked_on_denied, is_enabled
from forebay.web.patterns import PatternSet, UnseenPaths
from forebay.web.plan import LeasedPlan, LocalPlan, Plan, RedisPlan, segment_of
from forebay.web.request import KeyFunction, Request
from forebay.web.rules import Answer, BodyLimit, Denial, Deny, Rule, Shed, check_event_loop, kind_of, with_tiers
from forebay.web.shadow import FailureLog, ShadowedPlan
from forebay.web.sheds import Sheds
from forebay.web.store_errors import WhenUnavailable, checked_when_unavailable
from forebay.web.workers import warn_if_clients_have_no_address, warn_if_each_counts_alone

__all__ = ["Gate", "Passage"]

MOST_REMEMBERED: Final = 4096
LONGEST_REMEMBERED: Final = 200
"""Characters of a request's methods and of the readings of its path."""

_Choice: TypeAlias = tuple[Any, int, dict[str | None, int]]
_Plan: TypeAlias = Plan | BanPlan | ShadowedPlan


class Gate:
    """Decides whether a request may be handled; the middlewares and the frameworks' extensions call it.

    `rules` are ``Rule``, ``Deny``, ``Shed``, ``BodyLimit`` and ``ByteRate``. Each ``Deny`` is checked first, then each
    ``Shed``, in their order, and then the rules. Limiters may be in several ``Store``s and in one ``RedisStore``, or
    leased. The host's limits decide first, and give back what they took if Redis denies. `client` is the key function
    of rules without a `key`. `headers` names the fields of responses: ``"draft-10"`` (``RateLimit-Policy`` and
    ``RateLimit``), ``"draft-06"``, ``"x-ratelimit"``, several of them, or none. With `partition_keys`, ``RateLimit``
    identifies the key by a keyed hash. `enabled` False, or ``FOREBAY_ENABLED=false`` in the environment, switches all
    limits off, with a ``LimitsDisabledWarning``. `on_denied` is called with the request and the ``Denial`` of each
    denied request; what it raises is logged. `when_unavailable` says what requests are answered while a store fails:
    ``"503"``, ``"429"``, or ``"allow"``, which handles them without that store's limits. With `encoded`, a passage's
    fields are bytes with names in small letters, as ASGI has them. `in_loop`: whether ``enter`` is called in an event
    loop, which it must not block; None: unknown.

    Over a ``RedisStore``, ``enter`` waits for the answer of Redis; together with the releases at the request's end it
    waits no longer than the store's deadline. Over a ``LeasedStore`` it waits as its limiters do. Over an
    ``AsyncRedisStore`` or an ``AsyncLeasedStore`` ``is_awaited`` is True, and only ``enter_async`` may be called. If
    a store fails, `when_unavailable` decides.

    Raises ``InvalidLimiter``. Thread-safe, fork-safe; in shared memory it never waits. O(rules), and one decision of
    the rules that match.
    """

    admit: Callable[[Request], Passage | Denial | None]
    """As ``enter``: the plan's own function where every request has the same plan, which saves a step."""

    has_cleanups: bool
    """Whether there are passages with a cleanup."""

    def __init__(
        self,
        rules: GivenRules,
        *,
        client: KeyFunction | None = None,
        headers: str | Iterable[str] = "draft-10",
        partition_keys: bool = False,
        enabled: bool = True,
        on_denied: OnDenied | None = None,
        when_unavailable: WhenUnavailable = "503",
        encoded: bool = False,
        in_loop: bool | None = None,
    ) -> None:
        self.given = _listed(rules)
        """As they were given."""
        self.rules = with_tiers(self._given)
        """With a rule for each tier."""
        self.body_limits = tuple(limit for limit in self.given if isinstance(limit, (BodyLimit, ByteRate)))
        """Limits of bodies: of their size, and of their bytes' rate."""
        self.given_body_limits = self.body_limits
        """Also if limits are switched off."""
        self._denies = tuple(deny for deny in self.given if isinstance(deny, Deny))
        self._failures = FailureLog()
        self.client = PEERS if client is None else client
        if client is not None:
            check_function("client is a ClientAddress or another key function", client)
        for what, value in (("partition_keys", partition_keys), ("encoded", encoded)):
            if not isinstance(value, bool):
                raise InvalidLimiter(f"{what} is True or False, not {short_repr(value)}")
        metered = [limit.rule for limit in self.body_limits if isinstance(limit, ByteRate)]
        check_event_loop([*self.given, *metered], in_loop, self.client)
        _check_stores(self.rules)
        check_together(self.rules)
        for rule in (*self.rules, *metered):
            if isinstance(rule.exempt, AddressList):
                client_address(rule.key, self.client)
        takes_client = any(deny.client is None for deny in self._denies)
        self._denied_client = client_address(None, self.client) if takes_client else PEERS
        """The client for each ``Deny`` without its own."""
        self._on_denied = checked_on_denied(on_denied)
        self._secret = _partition_secret(self.rules) if partition_keys else b""
        if not is_enabled(enabled):
            self.given = self.rules = self.body_limits = self._denies = ()
            metered = []
        self._when_unavailable = checked_when_unavailable(when_unavailable)
        self._sizes = tuple(limit for limit in self.body_limits if isinstance(limit, BodyLimit))
        rates = [limit for limit in self.body_limits if isinstance(limit, ByteRate)]
        self.byte_rates = ByteRates(rates, self.client, self._when_unavailable)
        """They decide before the rules, so a request that they refuse is charged by none."""
        sheds = [shed for shed in self.given if isinstance(shed, Shed)]
        self._sheds = Sheds(sheds, self._when_unavailable) if sheds else None
        self.is_awaited = (
            has_to_be_awaited(self.client)
            or any(shed.functions_to_await for shed in sheds)
            or any(rule.is_awaited or rule.functions_to_await for rule in self.rules)
        )
        self.has_cleanups = bool(sheds) or any(rule.is_reserved or rule.is_held for rule in self.rules)
        self.has_shadows = any(rule.shadow for rule in self.rules)
        """Whether there are rules that decide after others have been charged."""
        self._styles = checked_styles(headers)
        self._encoded = encoded
        native: list[Any] = [rule.limiter for rule in (*self.rules, *with_tiers(metered)) if not rule.is_remote]
        bans = [ban for rule in self.rules if rule.ban for ban in rule.ban.limiters]
        slots = [limiter for shed in sheds for limiter in shed.shedder.limiters]
        warn_if_each_counts_alone([*native, *bans, *slots])
        for rule in self.rules:
            if kind_of(rule.limiter) is LeakyBucket and rule.delay_ns is None:
                _tell_of_no_spacing(rule.limiter)
        keys = [rule.key or self.client for rule in (*self.rules, *metered)]
        warn_if_clients_have_no_address([*keys, *[deny.client or self.client for deny in self._denies]])
        self._has_defaults = any(map(owns_requests, self._given)) and any(rule.otherwise for rule in self._given)
        self._always, self._conditional = self._choices()
        self._patterns = PatternSet(rule.where for rule, _, _ in self._conditional)
        self._remembered: dict[tuple[tuple[str, ...], tuple[str, ...]], list[_Choice]] = {}
        self._awaited_first = [
            (rule, function)
            for rule, _, _ in self._conditional
            for function in (rule.exempt, rule.tier)
            if has_to_be_awaited(function)
        ]
        self._unseen = UnseenPaths("rule", self.rules)
        self._limits_responses = any(limit.responses for limit in self._sizes)
        self._unseen_by_limits = UnseenPaths("body limit", self._sizes)
        self._unseen_by_denies = UnseenPaths("Deny", self._denies)
        self._plans: dict[int, _Plan | None] = {0: None}
        # Rules that can't be charged together fail here if they match every request.
        plan = self._plan_of(self._always) if self._always else None
        self.admit = self.enter if self._conditional or self._denies or sheds or plan is None else plan.admit

    def enter(self, request: Request) -> Passage | Denial | None:
        """Whether this request may be handled; None: no rule is for it."""
        if self._denies and (denial := self.refused(request)) is not None:
            return denial
        if self._sheds is not None:
            return self._sheds.enter(request, self._plan_for)
        plan = self._plan_for(request)
        return None if plan is None else plan.admit(request)

    def enter_async(self, request: Request) -> Awaited[Passage | Denial | None]:
        """As ``enter``, for a gate that ``is_awaited``.

        Without the ``await``, ``bool`` of the result raises ``NotAwaited``. Nothing else detects a forgotten
        ``await``: ``isinstance`` returns False then, so such code admits the request.
        """
        coroutine: Any = self.enter_unguarded(request)
        coroutine.__qualname__ = "Gate.enter_async"  # as ``NotAwaited`` names it
        return Awaited(coroutine)

    async def enter_unguarded(self, request: Request) -> Passage | Denial | None:
        """As ``enter_async``, but faster: for the middlewares, which await it at once.

        Its result is true before it is awaited, so a forgotten ``await`` could admit a request.
        """
        if self._denies and (denial := self.refused(request)) is not None:
            return denial
        resolved: Any = ResolvedRequest(request)
        if self._sheds is not None:
            return await self._sheds.enter_async(resolved, self._resolve, self._plan_for)
        if self._awaited_first:
            await self._resolve(resolved)
        plan = self._plan_for(resolved)
        return None if plan is None else await plan.admit_async(resolved)

    async def _resolve(self, resolved: Any) -> None:
        """Await what chooses the rules."""
        methods, paths = resolved.methods, resolved.paths
        for rule, function in self._awaited_first:
            if rule.where.matches(methods, paths):
                try:
                    await resolved.resolve([function])
                except Exception:
                    # Without its result the rule is left out.
                    if not rule.shadow:
                        raise
                    self._failures.log(rule)

    def max_body_bytes(self, request: Request) -> int | None:
        if not self._sizes:
            return None
        if self._unseen_by_limits.unseen:
            self._unseen_by_limits.observe(request.methods, request.paths)
        return self._least_max_bytes(request, responses=False)

    def max_response_bytes(self, request: Request) -> int | None:
        """As ``max_body_bytes``, of the response."""
        return self._least_max_bytes(request, responses=True) if self._limits_responses else None

    def _least_max_bytes(self, request: Request, *, responses: bool) -> int | None:
        methods, paths = request.methods, request.paths
        limits = [limit for limit in self._sizes if limit.responses is responses]
        return min((limit.max_bytes for limit in limits if limit.where.matches(methods, paths)), default=None)

    def answer(self, request: Request, denial: Denial) -> Answer:
        """The response to a denied request. Call it once for each: it logs the denial, and calls `on_denied`."""
        log_denial(request, denial)
        if self._on_denied is not None:
            try:
                self._on_denied(request, denial)
            except Exception:
                log.exception("on_denied has failed; the request is denied all the same")
        return answer_to(request, denial)

    def calls_to_answer(self, denial: Denial) -> bool:
        """Whether ``answer`` calls functions of the application."""
        return self._on_denied is not None or callable(denial.rule.answer)

    @property
    def _given(self) -> list[Rule]:
        return [rule for rule in self.given if isinstance(rule, Rule)]

    def refused(self, request: Request) -> Denial | None:
        """The denial by a ``Deny``, which is for a request that is exempt from the rules, too."""
        methods, paths = request.methods, request.paths
        if self._unseen_by_denies.unseen:
            self._unseen_by_denies.observe(methods, paths)
        for deny in self._denies:
            client = deny.client or self._denied_client
            if deny.where.matches(methods, paths) and (denial := by_list(deny, request, client)):
                return denial
        return None

    def _plan_for(self, request: Request) -> _Plan | None:
        """The plan of the rules that match a request."""
        matching = self._always
        if self._conditional:
            methods, paths = request.methods, request.paths
            if self._unseen.unseen:
                self._unseen.observe(methods, paths)
            for rule, bit, bits in self._matching(methods, paths):
                try:
                    if not rule.exempts(request, self.client):
                        matching |= bits.get(rule.tier_of(request), bit) if bits else bit
                except Exception:
                    if not rule.shadow:
                        raise
                    self._failures.log(rule)
        return self._plans[matching] if matching in self._plans else self._plan_of(matching)

    def _matching(self, methods: tuple[str, ...], paths: tuple[str, ...]) -> list[_Choice]:
        """The conditional rules that are for these methods and paths; remembered, as a match of each takes long."""
        found = self._remembered.get((methods, paths))
        if found is None:
            found = [self._conditional[number] for number in self._patterns.matching(methods, paths)]
            if self._has_defaults:
                found = with_defaults(found, methods, paths)
            # Clients choose the paths.
            if sum(map(len, (*methods, *paths))) <= LONGEST_REMEMBERED:
                if len(self._remembered) >= MOST_REMEMBERED:
                    self._remembered.clear()
                self._remembered[methods, paths] = found
        return found

    def _choices(self) -> tuple[int, list[_Choice]]:
        """The set of rules that are for every request, and the others: each with its bit, and those of its tiers.

        A set of rules is a number with a bit for each of ``rules``.
        """
        always, conditional, place = 0, [], 0
        for rule in self._given:
            bit = 1 << place
            bits: dict[str | None, int] = {}
            place += 1
            for tier, of_tier in rule.by_tier.items():
                bits[tier] = 0 if of_tier is None else 1 << place
                place += of_tier is not None
            is_default = rule.otherwise and self._has_defaults
            if rule.exempt or rule.tier or is_default or not rule.where.is_everywhere:
                conditional.append((rule, bit, bits))
            else:
                always |= bit
        return always, conditional

    def _plan_of(self, matching: int) -> _Plan | None:
        rules = [rule for i, rule in enumerate(self.rules) if matching >> i & 1]
        shadows = [self._plan_with([rule]) for rule in rules if rule.shadow]
        enforced = [rule for rule in rules if not rule.shadow]
        plan = self._plan_with(enforced) if enforced else None
        self._plans[matching] = found = ShadowedPlan(plan, shadows, self._failures) if shadows else plan
        return found

    def _plan_with(self, rules: list[Rule]) -> Plan | BanPlan:
        kind: type[Plan] = LocalPlan
        if any(rule.is_leased for rule in rules):
            kind = LeasedPlan
        elif any(rule.is_remote for rule in rules):
            kind = RedisPlan
        charging = kind(rules, self.client, self._styles, self._encoded, self._secret, self._when_unavailable)
        return BanPlan(charging, rules) if any(rule.ban for rule in rules) else charging


_spacing_log: Final = Seldom()


def _tell_of_no_spacing(limiter: Any) -> None:
    if _spacing_log.is_due(limiter.name):
        log.warning(
            "the rule of %r admits up to %d requests at once, and spaces none: give the rule a delay, or take a "
            "TokenBucket, which does the same",
            limiter,
            limiter.capacity,
        )


def _listed(rules: Any) -> tuple[Rule | Deny | Shed | BodyLimit | ByteRate, ...]:
    """Raises ``InvalidLimiter`` for anything else."""
    kinds = "Rule, Deny, Shed, BodyLimit and ByteRate"
    if isinstance(rules, (str, bytes, Mapping)):
        # An empty one would limit nothing.
        raise InvalidLimiter(f"rules are of {kinds}, in a list, not {short_repr(rules)}: write [Rule(limiter)]")
    is_one = isinstance(rules, (Rule, Deny, Shed, BodyLimit, ByteRate)) or not isinstance(rules, Iterable)
    listed = (rules,) if is_one else tuple(rules)
    for rule in listed:
        if not isinstance(rule, (Rule, Deny, Shed, BodyLimit, ByteRate)):
            raise InvalidLimiter(f"rules are of {kinds}, not {short_repr(rule)}: write Rule(limiter)")
    return listed


def _partition_secret(rules: tuple[Rule, ...]) -> bytes:
    """A secret of the first limiter that has a ``Store``."""
    if not rules:
        return b""
    segment = segment_of(rules)
    if segment is None:
        raise InvalidLimiter(f"partition_keys takes a secret of the limiters' Store, and {rules[0].limiter!r} has none")
    secret: bytes = segment.secret(b"partitions")
    return secret


def _check_stores(rules: tuple[Rule, ...]) -> None:
    """Raises ``InvalidLimiter`` unless the limiters of these rules can decide together."""
    over_redis = [rule for rule in rules if rule.is_remote and not rule.is_leased]
    if not over_redis:
        return
    limiter, *_ = limiters = [rule.limiter for rule in over_redis]
    for rule in rules:
        if rule.is_leased:
            raise InvalidLimiter(
                f"{limiter!r} can't stand beside leased limiters, because Redis decides each of its requests: "
                "make all of them over its store, or put one middleware around another"
            )
    for other in limiters:
        if other.store is not limiter.store:
            raise InvalidLimiter(
                f"the rules' limiters over Redis belong to one store, but {other!r} is in another than {limiter!r}: "
                "make both over the same one, or put one middleware around another"
            )
