"""Explains the effect of the rules of a file on one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from forebay.errors import short_repr
from forebay.rules.building import Built, BuiltPriority, BuiltRule
from forebay.rules.keys import in_words
from forebay.rules.overrides import DENY
from forebay.rules.refusals import BuiltDeny
from forebay.rules.shedders import BuiltShedder
from forebay.web import ByteRate, Request, Rule
from forebay.web.defaults import owns_requests
from forebay.web.header_fields import allowance
from forebay.web.patterns import RequestPattern

__all__ = ["Explanation", "LimitUse", "explain"]


_SLOTS: Final = {
    "ReservedSlots": "{} slots",
    "BusyWorkers": "{} workers",
    "AdaptiveLimit": "at most {} requests at a time",
}


@dataclass(frozen=True, slots=True)
class LimitUse:
    """A limit that a request is charged to."""

    name: str
    algorithm: str
    allowance: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effect of one rule on a request."""

    rule: str
    applies: bool
    reasons: tuple[str, ...]
    """Why the rule is not for the request; empty if it is."""
    key: tuple[str, ...]
    cost: int
    limits: tuple[LimitUse, ...]
    """Empty if an override exempts or denies the key, or a deny list the client's address."""
    override: str
    """``exempt``, ``deny`` or ``limits`` for a key with an override, ``canary`` for a chosen key, else empty."""
    until: datetime | None
    shadow: bool
    bytes: str = ""
    """The bodies whose bytes are charged; empty for a rule that charges requests."""
    is_list: bool = False
    """Whether it is a deny list: a request that one is for is refused, whatever the rules do."""
    ban: str | None = None
    """The name of the ban of its key, after too many denials."""
    key_words: str = ""
    """The key, for a person."""
    retries: str = ""
    """The requests that are charged once, in words; empty if each is charged."""
    is_shedder: bool = False
    """Whether it is a shedder: one that is for a request may deny it by the load."""
    priority: str | None = None
    """The priority that a shedder uses for the request, or that a rule gives it."""


def explain(built: Sequence[Built], request: Request) -> list[Explanation]:
    """One for each deny list of the file, then one for each shedder, then one for each rule, in their order."""
    owner = next((one.spec.name for one in built if isinstance(one, BuiltRule) and _owns(one, request)), None)
    return [_explanation_of(rule, request, owner) for rule in built]


def _owns(built: BuiltRule, request: Request) -> bool:
    """Whether a rule owns a request, so that no default is for it. See ``forebay.web.defaults``."""
    rules = [rule for rule in built.rules[None] if isinstance(rule, Rule) and owns_requests(rule)]
    is_certain = bool(rules) and rules[0].where.is_certain(request.methods, request.paths)
    return is_certain and all(condition.holds(request) for condition in built.conditions)


def _explanation_of(built: Built, request: Request, owner: str | None) -> Explanation:
    if isinstance(built, BuiltDeny):
        return _explanation_of_list(built, request)
    if isinstance(built, BuiltShedder):
        return _explanation_of_shedder(built, request)
    return _explanation(built, request, owner)


def _explanation_of_shedder(built: BuiltShedder, request: Request) -> Explanation:
    reasons = tuple(_reasons(built, request))
    [shed] = built.rules[None]
    shedder: Any = shed.shedder
    kind = type(shedder).__name__
    limits = () if reasons else (LimitUse(built.name, kind, _SLOTS[kind].format(shedder.slots)),)
    priority: Any = None if reasons or shed.priority is None else shed.priority(request)
    return Explanation(
        built.name, not reasons, reasons, (), 0, limits, "", None, False, is_shedder=True, priority=priority
    )


def _explanation_of_list(built: BuiltDeny, request: Request) -> Explanation:
    spec = built.spec
    reasons = _reasons(built, request)
    until = spec.until or None
    if until is not None and until <= datetime.now(UTC):
        reasons.append(f"it has ended, at {until.isoformat()}")
    applies = not reasons
    return Explanation(
        spec.name, applies, tuple(reasons), (), 0, (), "", until if applies else None, False, is_list=True
    )


def _explanation(built: BuiltRule | BuiltPriority, request: Request, owner: str | None) -> Explanation:
    spec = built.spec
    reasons = tuple(_reasons(built, request))
    if spec.otherwise and owner is not None:
        reasons = (*reasons, f"the rule {short_repr(owner)} is")
    priority = spec.priority or None
    if isinstance(built, BuiltPriority):
        return Explanation(spec.name, not reasons, reasons, (), 0, (), "", None, False, priority=priority)
    if reasons:
        return Explanation(
            spec.name, False, reasons, (), spec.cost, (), "", None, spec.shadow, spec.bytes or "", priority=priority
        )
    override = built.overrides.active(request)
    effect = built.overrides.effect(request)
    limits = () if effect == DENY else tuple(_use(rule) for rule in built.rules.get(effect, ()))
    what = "" if effect is None else "deny" if effect == DENY else "limits" if effect else "exempt"
    what = "canary" if effect is not None and override is None else what
    key: Any = built.key(request)
    texts = (key,) if isinstance(key, str) else tuple(key)
    until = None if override is None else override.until
    ban = None if effect == DENY else spec.ban or None
    return Explanation(
        *(spec.name, True, (), texts, spec.cost, limits, what, until, spec.shadow, spec.bytes or ""),
        ban=ban,
        key_words=in_words(key),
        retries=_retries(built),
        priority=priority,
    )


def _retries(built: BuiltRule) -> str:
    [rule, *_] = built.rules[None]
    ids = rule.request_id if isinstance(rule, Rule) else None
    if ids is None:
        return ""
    times = f"{ids.retries} times" if ids.retries > 1 else "once"
    lasts = "" if not isinstance(ids.lasts, str) else f" within {ids.lasts}"
    return f"a retry with the same {ids.field} is not charged again, up to {times}{lasts}"


def _reasons(built: Built, request: Request) -> list[str]:
    spec, methods, paths = built.spec, request.methods, request.paths
    reasons = []
    if spec.methods and not RequestPattern.of(None, spec.methods, False).matches(methods, paths):
        reasons.append(f"the method {' or '.join(methods)} is not {_either(spec.methods)}")
    if spec.path and not RequestPattern.of(spec.path, (), bool(spec.ignore_case)).matches(methods, paths):
        reasons.append(f"the path {short_repr(request.path)} does not match {_either(spec.path)}")
    return reasons + [one.why_not(request) for one in built.conditions if not one.holds(request)]


def _either(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else " or ".join(names)


def _use(rule: Rule | ByteRate) -> LimitUse:
    limiter: Any = rule.limiter
    kind = getattr(limiter, "kind", type(limiter))
    noun = "byte" if isinstance(rule, ByteRate) else "request"
    return LimitUse(limiter.name, kind.__name__, allowance(limiter, noun))
