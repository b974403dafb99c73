"""Header fields for limits: ``RateLimit`` and ``RateLimit-Policy`` of draft-ietf-httpapi-ratelimit-headers-10, those of
-06, or ``X-RateLimit``.

A field reports the decision: a client that waits for the seconds in it is not denied for being too early.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.credits import Credits
from forebay.core.decision import Decision
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import NS, Rate
from forebay.web.fastpath import RateLimitFields
from forebay.web.rules import kind_of

__all__ = ["Policy", "header_writer", "rate_of"]

Fields: TypeAlias = list[Any]
Pair: TypeAlias = Callable[[str, str], tuple[Any, Any]]
Writer: TypeAlias = Callable[[Sequence[Decision], Sequence[str]], Fields]


def rate_of(limiter: Any) -> Rate | None:
    """None for a ``Concurrency`` and for ``Credits``."""
    return getattr(limiter, "rate", None)


def allowance(limiter: Any, noun: str = "request") -> str:
    """The limit, as text for people. `noun`: a permit is for one."""
    if kind_of(limiter) is Credits:
        return f"as many {noun}s as were paid for"
    rate = rate_of(limiter)
    count = limiter.limit if kind_of(limiter) is Concurrency else rate.limit if rate else 1
    requests = f"{count} {noun}{'s' * (count != 1)}"
    if rate is None:
        return f"{requests} at a time"
    burst = getattr(limiter, "burst", count)
    at_once = "" if burst == count else f", and {burst} at once"
    return f"{requests} per {str(rate).partition(' per ')[2]}{at_once}"


class Policy:
    """One limiter's items of the fields."""

    __slots__ = ("has_no_times", "is_prepaid", "name", "policy_item", "prefix", "quota", "window_s")

    has_no_times: bool
    """Whether it is unknown when a permit comes, or none ever does by itself."""
    is_prepaid: bool
    """Whether it has no quota: of ``Credits``, only what remains can be reported."""

    def __init__(self, limiter: Any) -> None:
        rate = rate_of(limiter)
        # A string in a field is ASCII without control characters.
        self.name = "".join(
            c if c.isprintable() else "?" for c in limiter.name.encode("ascii", "backslashreplace").decode()
        )
        name = '"' + self.name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        self.is_prepaid = kind_of(limiter) is Credits
        self.has_no_times = self.is_prepaid or kind_of(limiter) is Concurrency
        self.prefix = f"{name};r="
        self.quota: int = limiter.limit if kind_of(limiter) is Concurrency else rate.limit if rate else 1
        self.window_s = 0
        if self.is_prepaid:
            self.policy_item = ""
            return
        if kind_of(limiter) is Concurrency:
            self.policy_item = f'{name};q={self.quota};qu="concurrent-requests"'
            return
        assert rate is not None
        whole_s, rest_ns = divmod(rate.period_ns, NS)
        if rest_ns == 0:
            self.window_s = whole_s
            self.policy_item = f"{name};q={self.quota};w={whole_s}"
        elif NS % rate.period_ns == 0:
            self.window_s = 1
            self.quota *= NS // rate.period_ns
            self.policy_item = f"{name};q={self.quota};w=1"
        else:
            self.policy_item = f"{name};q={self.quota}"

    def wait_s(self, decision: Decision) -> int:
        """Whole seconds until more remains than now; 0 if that can't be, or if it is unknown."""
        return 0 if self.has_no_times else -(-decision.next_after_ns // NS)


def header_writer(
    styles: Iterable[str], policies: Sequence[Policy], all_policies: Sequence[Policy], encoded: bool
) -> Writer:
    """A function that turns the decisions of `policies`, in their order, into fields; with `encoded` into bytes.

    It takes the decisions, and a text for each that names its partition (`partition_text`), or no texts. `all_policies`
    are those of all limits of the request: if it is denied, only the limits that denied it report a decision.
    """
    if not all_policies:
        return _no_fields
    writers = [_WRITERS[style](policies, all_policies, _encoded if encoded else _plain) for style in styles]
    if len(writers) == 1:
        return writers[0]
    return lambda decisions, partitions: [field for writer in writers for field in writer(decisions, partitions)]


def _no_fields(decisions: Sequence[Decision], partitions: Sequence[str]) -> Fields:
    return []


def _plain(name: str, value: str) -> tuple[str, str]:
    return name, value


def _encoded(name: str, value: str) -> tuple[bytes, bytes]:
    return _ENCODED_NAMES[name], value.encode("ascii")


def checked_styles(styles: str | Iterable[str]) -> tuple[str, ...]:
    names = (styles,) if isinstance(styles, str) else tuple(styles) if isinstance(styles, Iterable) else (styles,)
    if isinstance(styles, Mapping):
        raise InvalidLimiter(f"headers is the name of a style or several, not {short_repr(styles)}; () for none")
    for name in names:
        if not isinstance(name, str) or name not in _WRITERS:
            raise InvalidLimiter(
                f"the styles of headers are {', '.join(_WRITERS)}, not {short_repr(name)}; () for none"
            )
    if len(set(names)) < len(names):
        raise InvalidLimiter(f"headers has {short_repr(names)}, so fields would be sent twice: name each style once")
    if {"draft-10", "draft-06"} <= set(names):
        raise InvalidLimiter("draft-10 and draft-06 each have a RateLimit-Policy of their own: choose one of them")
    return names


def partition_text(secret: bytes, limiter: Any, key: object) -> str:
    """The parameter ``pk``: the same for the same key, which it doesn't reveal."""
    digest = hashlib.blake2b(repr((limiter.name, key)).encode("utf-8", "surrogatepass"), key=secret, digest_size=9)
    return f";pk=:{base64.b64encode(digest.digest()).decode()}:"


def _draft_10(policies: Sequence[Policy], all_policies: Sequence[Policy], pair: Pair) -> Writer:
    items = [policy.policy_item for policy in all_policies if not policy.is_prepaid]
    policy_field = pair("RateLimit-Policy", ", ".join(items))
    name, _ = pair("RateLimit", "")
    fields = RateLimitFields(
        policy_field, name, pair is _encoded, [policy.prefix for policy in policies], [p.has_no_times for p in policies]
    )
    # The field has at least one item (draft-10, section 3).
    return fields if items else lambda decisions, partitions: fields(decisions, partitions)[1:]


def _tightest(policies: Sequence[Policy], decisions: Sequence[Decision]) -> tuple[Policy, Decision]:
    """The limit with the fewest permits left; of those that deny, the one with the longest wait."""
    return min(
        zip(policies, decisions, strict=True),
        key=lambda pair: (pair[1].allowed, pair[1].remaining if pair[1].allowed else -pair[1].retry_after_ns),
    )


def _draft_06(policies: Sequence[Policy], all_policies: Sequence[Policy], pair: Pair) -> Writer:
    quotas = [(p.quota, p.window_s) for p in all_policies if not p.is_prepaid]
    policy_text = ", ".join(f"{quota};w={window_s}" if window_s else f"{quota}" for quota, window_s in quotas)
    policy_fields = [pair("RateLimit-Policy", policy_text)] if quotas else []

    def write(decisions: Sequence[Decision], partitions: Sequence[str]) -> Fields:
        if not policies:
            return policy_fields[:]
        policy, decision = _tightest(policies, decisions)
        remaining = pair("RateLimit-Remaining", str(decision.remaining))
        if policy.is_prepaid:
            return [remaining, *policy_fields]
        return [
            pair("RateLimit-Limit", str(policy.quota)),
            remaining,
            pair("RateLimit-Reset", str(policy.wait_s(decision))),
            *policy_fields,
        ]

    return write


def _x_ratelimit(policies: Sequence[Policy], all_policies: Sequence[Policy], pair: Pair) -> Writer:
    def write(decisions: Sequence[Decision], partitions: Sequence[str]) -> Fields:
        if not policies:
            return []
        policy, decision = _tightest(policies, decisions)
        remaining = pair("X-RateLimit-Remaining", str(decision.remaining))
        if policy.is_prepaid:
            return [remaining]
        return [
            pair("X-RateLimit-Limit", str(policy.quota)),
            remaining,
            # A second of the wall clock, as GitHub and Flask-Limiter send it.
            pair("X-RateLimit-Reset", str(math.ceil(time.time()) + policy.wait_s(decision))),
        ]

    return write


_WRITERS: Final[dict[str, Callable[[Sequence[Policy], Sequence[Policy], Pair], Writer]]] = {
    "draft-10": _draft_10,
    "draft-06": _draft_06,
    "x-ratelimit": _x_ratelimit,
}
_ENCODED_NAMES: Final = {
    name: name.lower().encode()
    for name in [
        *("RateLimit", "RateLimit-Policy"),
        *("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"),
        *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
    ]
}
