"""Overrides: what holds for single keys of a rule until a time, instead of its limits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from forebay.rules.conditions import Condition
from forebay.rules.keys import RuleKey
from forebay.rules.model import FileDeny, FileRule, Override, Shedder
from forebay.web import Answer, Denial, Request
from forebay.web.answers import quota_exceeded, retry_after
from forebay.web.canaries import Chosen
from forebay.web.client import UnknownPeer
from forebay.web.defaults import Concerned
from forebay.web.functions import result_of
from forebay.web.rules import check_answer

__all__ = [
    "DENIED",
    "DENY",
    "Effect",
    "Overrides",
    "Unless",
    "denied_answer",
    "effect_of",
    "response_of",
    "response_options",
]

Effect: TypeAlias = tuple[str, ...] | Literal["deny"] | None
DENY: Final = "deny"
DENIED: Final = 403
"""The status of a request that an override denies, unless the rule has a response."""


class Overrides:
    """The overrides of a rule by key, and its canary."""

    def __init__(self, key: RuleKey, by_key: Mapping[Any, Override], rule: FileRule) -> None:
        self._key, self.by_key = key, by_key
        self._until_s = {each: override.until.timestamp() for each, override in by_key.items()}
        self._canary = tuple(rule.canary.limits) if rule.canary else ()
        self.chosen = Chosen(rule.canary.percent, rule.name) if rule.canary else None

    def effect(self, request: Request) -> Effect:
        """The effect on the request's key: an override, the limits of the canary, or the rule's own. O(1)."""
        override = self.active(request)
        if override is not None or self.chosen is None:
            return effect_of(override)
        try:
            return self._canary if self._key(request) in self.chosen else None
        except UnknownPeer:
            # The rule answers it.
            return None

    def active(self, request: Request) -> Override | None:
        """The override of the request's key, unless its time is over. O(1)."""
        if not self.by_key:
            return None
        try:
            key = self._key(request)
        except UnknownPeer:
            # The rule answers it.
            return None
        override = self.by_key.get(key)
        return override if override is not None and time.time() < self._until_s[key] else None


def effect_of(override: Override | None) -> Effect:
    """The effect of an override on the request of its key; None: the rule's own limits hold."""
    if override is None:
        return None
    return DENY if override.deny else tuple(override.limits or ())


@dataclass(frozen=True, eq=False, slots=True)
class Unless(Concerned):
    """Whether a rule is not for a request: the function for the `exempt` of a ``Rule``.

    It is for a request if all `conditions` hold, and the override of the request's key has this `effect`. The tiers of
    the ``Rule`` are conditions of a rule of the file, too: it isn't for those that are `lifted`.
    """

    conditions: Sequence[Condition]
    overrides: Overrides
    effect: Effect
    tier: Any = None
    lifted: frozenset[str] = frozenset()

    def __call__(self, request: Request) -> bool:
        # A generator would take as long as the conditions.
        for condition in self.conditions:
            if not condition.holds(request):
                return True
        return self.overrides.effect(request) != self.effect

    def concerns(self, request: Request) -> bool:
        """Whether all conditions hold, whatever the override of the key is."""
        return all(condition.holds(request) for condition in self.conditions) and (
            not self.lifted or result_of(self.tier, request) not in self.lifted
        )


def response_of(rule: FileRule | FileDeny | Shedder, status: int = 429) -> Answer | None:
    """The response of the file, without the fields that a denial adds. `status`: if the file has none."""
    if not rule.response:
        return None
    response = rule.response
    headers = dict(response.headers or {})
    if response.body and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "text/plain; charset=utf-8"
    return Answer(response.status or status, tuple(headers.items()), (response.body or "").encode())


def response_options(rule: FileRule | FileDeny | Shedder, status: int = 429) -> dict[str, Any]:
    """`answer` and `status` of a ``Rule``, ``Deny`` or ``Shed``, for the response of the file.

    Raises ``InvalidLimiter``.
    """
    response = response_of(rule, status)
    if response is None:
        return {}
    check_answer(response)
    has_text = bool(response.body or response.headers or response.status < 400)
    return {"status": response.status, **({"answer": answer_with_fields(response)} if has_text else {})}


def answer_with_fields(response: Answer) -> Any:
    """The `answer` of a ``Rule``: the response, and the fields that say when to ask again.

    A response that looks like success has none.
    """
    if response.status < 400:
        return response

    def answer(request: Request, denial: Denial) -> Answer:
        fields = (*response.headers, *denial.fields, *retry_after(denial.retry_after_s))
        return Answer(response.status, fields, response.body)

    return answer


def denied_answer(response: Answer | None, overrides: Overrides) -> Any:
    """As ``answer_with_fields``, for keys that an override denies until a time."""
    if response is not None and response.status < 400:
        return response

    def answer(request: Request, denial: Denial) -> Answer:
        override = overrides.active(request)
        if override is None:
            # Its time has ended since the decision.
            wait_s, when = 1, "for a moment"
        else:
            wait_s = max(1, math.ceil(override.until.timestamp() - time.time()))
            when = f"until {override.until.isoformat()}"
        if response is None:
            return quota_exceeded(DENIED, f"Requests of this client are denied {when}.", wait_s)
        return Answer(response.status, (*response.headers, *retry_after(wait_s)), response.body)

    return answer
