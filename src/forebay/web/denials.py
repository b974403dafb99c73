"""Denials: which rule is the binding one, how long the client has to wait, and which header fields describe it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, StoreUnavailable, short_repr
from forebay.rate import NS, is_never
from forebay.seldom import Seldom
from forebay.web.answers import FULL, UNAVAILABLE, UNKNOWN
from forebay.web.bans import Ban
from forebay.web.client import TRUST_REMEDY, ClientAddress, UnknownPeer
from forebay.web.header_fields import Policy, Writer, header_writer
from forebay.web.request import Request
from forebay.web.rules import Denial, Deny, Rule
from forebay.web.store_errors import WhenUnavailable

__all__ = [
    "HOLDER_WAIT_S",
    "STORE_WAIT_S",
    "Denials",
    "by_ban",
    "by_list",
    "log",
    "log_denial",
    "log_for_operator",
    "wait_s_of",
    "whole_seconds_up",
]

HOLDER_WAIT_S: Final = 1
"""``Retry-After`` while all permits are held: a holder may be done at any time."""
STORE_WAIT_S: Final = 1
"""``Retry-After`` while the store is unavailable."""

LOG_EVERY_S: Final = 60
log: Final = logging.getLogger("forebay.web")
_denied_log: Final = logging.getLogger("forebay.web.denied")
_log_turns: Final = Seldom(LOG_EVERY_S)


def log_for_operator(outcome: str, error: Exception) -> None:
    """Log the remedy of an error that every request would repeat: once a minute for each outcome."""
    if _log_turns.is_due(outcome):
        log.error("requests are %s: %s", outcome, error)


def log_denial(request: Request, denial: Denial, is_shadow: bool = False) -> None:
    """One line for a denied request, of level INFO, with its values as attributes of the record.

    It has no key: a key may be a person's address. `is_shadow`: a rule in the shadow denies it, so it is handled.
    """
    if not _denied_log.isEnabledFor(logging.INFO):
        return
    limiter = "" if isinstance(denial.rule, Deny) else denial.rule.limiter.name
    status = denial.rule.denial_status
    by = ", ".join(denial.violated) or limiter or "a Deny"
    _denied_log.info(
        "%s%d for %s %s by %s",
        "in the shadow, " if is_shadow else "",
        *(status, short_repr(request.method), short_repr(request.path), by),
        extra={
            "forebay_limiter": limiter,
            "forebay_violated": denial.violated,
            "forebay_status": status,
            "forebay_retry_after_s": denial.retry_after_s,
            "forebay_is_unavailable": denial.is_unavailable,
            "forebay_is_ban": denial.is_ban,
            "forebay_is_shadow": is_shadow,
            "http_method": request.method,
            "http_path": request.path,
        },
    )


def whole_seconds_up(duration_ns: int) -> int:
    """Whole seconds, rounded up: a client that waits for so long is not too early."""
    return -(-duration_ns // NS)


def wait_s_of(decision: Decision) -> int | None:
    """How long a denied client has to wait, in whole seconds. None: no time brings what it lacks."""
    return None if is_never(decision.retry_after_ns) else max(1, whole_seconds_up(decision.retry_after_ns))


def by_ban(rule: Rule, ban: Ban, decision: Decision) -> Denial:
    """The denial of a request whose key is banned."""
    wait_s = max(1, whole_seconds_up(decision.retry_after_ns))
    return Denial(rule, (ban.name,), decision, wait_s, (), is_ban=True)


def by_list(deny: Deny, request: Request, client: ClientAddress) -> Denial | None:
    """The refusal of a client whose address is in the list; None for other clients."""
    address = client.address_of(request)
    if address is None and client.needs_peer and request.peer is None:
        unknown = dataclasses.replace(deny, status=500, answer=None)
        error = UnknownPeer(f"a Deny needs the client's address, which the server hides: {TRUST_REMEDY}")
        log_for_operator("answered by 500", error)
        return Denial(unknown, (), None, None, (), cause=UNKNOWN)
    left_s = deny.addresses.left_s(address)
    if left_s is None:
        return None
    return Denial(deny, (), None, None if math.isinf(left_s) else math.ceil(left_s), (), is_ban=True)


class Denials:
    """The denials of one plan. `policies` are those of all its rules that aren't hidden."""

    def __init__(
        self,
        rules: Sequence[Rule],
        first_rule: Rule,
        policies: Sequence[Policy],
        styles: Sequence[str],
        partitions_of: Callable[[Request, Sequence[Rule]], Sequence[str]],
        when_unavailable: WhenUnavailable,
    ) -> None:
        self._rules, self._policies, self._styles, self._partitions_of = rules, policies, styles, partitions_of
        self._admits_unchecked = when_unavailable == "allow"
        # Where the limits could not be checked, a rule's own status and answer don't apply.
        status = 429 if when_unavailable == "429" else 503
        self._unavailable_rule = dataclasses.replace(first_rule, status=status, answer=None)
        self._full_rule = dataclasses.replace(first_rule, status=503, answer=None)
        self._unknown_rule = dataclasses.replace(first_rule, status=500, answer=None)
        self._writers: dict[tuple[int, ...], Writer] = {}

    def by_decisions(self, request: Request, rules: Sequence[Rule], decisions: Sequence[Decision]) -> Denial:
        """By the decisions of these rules."""
        pairs = list(zip(rules, decisions, strict=True))
        # If all allow by now, a permit has come back since the denial. A store without room denies alone: it is asked
        # for room once all limits allow.
        denied = [pair for pair in pairs if not pair[1].allowed] or pairs
        rule, decision = max(denied, key=lambda pair: pair[1].retry_after_ns)
        if decision.reason == "no room":
            return self.full(decision.retry_after_ns)
        wait_s = HOLDER_WAIT_S if rule.is_held else wait_s_of(decision)
        # A shadow ban has the fields of success.
        visible = [pair for pair in (pairs if rule.is_hidden else denied) if not pair[0].is_hidden]
        visible_rules = [rule for rule, _ in visible]
        fields = self._writer(visible_rules)(
            [decision for _, decision in visible], self._partitions_of(request, visible_rules)
        )
        denied_by = tuple(rule for rule, _ in denied)
        violated = tuple(Policy(rule.limiter).name for rule in denied_by)
        return Denial(rule, violated, decision, wait_s, tuple(fields), denied_by)

    def for_error(self, error: Exception, request: Request) -> Denial | None:
        """For one of `DENYING_ERRORS`. None: the request is admitted although its limits could not be checked."""
        if isinstance(error, CostExceedsLimit):
            return self._never(error, request)
        if isinstance(error, UnknownPeer):
            log_for_operator(f"answered by {self._unknown_rule.denial_status}", error)
            return Denial(self._unknown_rule, (), None, None, (), cause=UNKNOWN)
        if self._admits_unchecked:
            log_for_operator("admitted without a limit", error)
            return None
        if not isinstance(error, StoreUnavailable):
            # Redis logs its own outages.
            log_for_operator(f"answered by {self._unavailable_rule.denial_status}", error)
        return Denial(self._unavailable_rule, (), None, STORE_WAIT_S, (), cause=UNAVAILABLE)

    def full(self, wait_ns: int) -> Denial:
        """The store has no room for another key, and denies new ones."""
        return Denial(self._full_rule, (), None, whole_seconds_up(wait_ns), (), cause=FULL)

    def _never(self, error: CostExceedsLimit, request: Request) -> Denial:
        named = [rule for rule in self._rules if rule.limiter.name == error.limiter]
        if not named:
            # The error of another limiter, which a key function called.
            raise error
        # Limiters of several stores may have one name.
        rule = next((rule for rule in named if len(named) > 1 and _raises(rule, error, request)), named[0])
        return Denial(rule, (Policy(rule.limiter).name,), None, None, (), (rule,))

    def _writer(self, rules: Sequence[Rule]) -> Writer:
        identities = tuple(map(id, rules))
        if identities not in self._writers:
            policies = [Policy(rule.limiter) for rule in rules]
            self._writers[identities] = header_writer(self._styles, policies, self._policies, False)
        return self._writers[identities]


def _raises(rule: Rule, error: CostExceedsLimit, request: Request) -> bool:
    """Whether the limiter of a rule refuses this request with such an error."""
    limiter: Any = rule.limiter
    if rule.cost_of(request) != error.cost:
        return False
    if rule.is_remote:
        return bool(limiter.limit == error.limit)
    try:
        limiter.peek("", error.cost)
    except CostExceedsLimit as own:
        return own.limit == error.limit
    return False
