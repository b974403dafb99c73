"""The limiters of a store as a command can address them, and a key's state in each.

A segment has its limiters' names and algorithms, but not their limits. ``TokenBucket``, ``LeakyBucket`` and
``MinInterval`` keep a time, from which the key is as if it had never been seen; it can be read without their rate. The
key of a window contains its period, so a window can be found only by the limit in a rule file. ``Credits`` have no
parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.core.kinds import Credits, LeakyBucket, MinInterval, TokenBucket
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, InvalidLimiter, LimiterNameWarning, SegmentSizeWarning
from forebay.segment import layout
from forebay.segment.limiter_list import ALGORITHM_NAMES, encode_limiter_name
from forebay.store import Store

__all__ = ["Addressed", "KeyState", "Rules", "addressed", "read_rules", "state_of"]

# Any rate and burst will do: a key's time doesn't depend on them.
_BY_NAME: Final[Mapping[str, Any]] = {
    "TokenBucket": lambda store, name: TokenBucket(store, name, "1/second"),
    "LeakyBucket": lambda store, name: LeakyBucket(store, name, "1/second", capacity=1),
    "MinInterval": lambda store, name: MinInterval(store, name, "1 second"),
}
_PREPAID: Final = ALGORITHM_NAMES[layout.ALGORITHM_CREDITS]
_WITHOUT_KEYS: Final = ALGORITHM_NAMES[layout.ALGORITHM_SHEDDER]


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of a rule file, by name, and its client."""

    limits: Mapping[str, Any]
    client: Any
    """The ``ClientAddress`` by which it reduces addresses."""


def read_rules(file: Path) -> Rules:
    """Raises ``InvalidRuleFile``, ``OSError``, and ``ImportError`` without the extra ``forebay[rules]``."""
    from forebay.rules.building import client_of
    from forebay.rules.keys import Functions
    from forebay.rules.loading import check

    spec, _, _ = check(str(file), file.read_bytes(), Functions(lambda request: "", lambda request: None))
    return Rules(spec.limits, client_of(spec))


@dataclass(frozen=True, slots=True)
class Addressed:
    """A limiter of the store."""

    name: str
    algorithm: str
    limiter: Any
    """An object that finds its keys; None if there is none."""
    is_exact: bool
    """Whether the object has the limiter's limit. Else only the time in a key's state is right."""
    reason: str
    """Why there is no object, or what it doesn't find; may be empty."""

    @property
    def can_be_reset(self) -> bool:
        return self.limiter is not None and self.algorithm != _PREPAID


def addressed(store: Store, rules: Rules | None, names: Sequence[str]) -> list[Addressed]:
    """The limiters of a store, all or those of these names. Raises ``InvalidLimiter`` for an unknown name."""
    listed = [one for one in store.attachment.limiters().values() if one[1] != _WITHOUT_KEYS]
    wanted = {encode_limiter_name(name).decode() for name in names}
    unknown = wanted - {name for name, _ in listed}
    if unknown:
        known = ", ".join(repr(name) for name, _ in listed) or "none"
        raise InvalidLimiter(f"{store.path} has no limiter {min(unknown)!r}; its limiters: {known}")
    with warnings.catch_warnings():
        # The names are those that the processes have chosen, and memory keeps its size.
        warnings.simplefilter("ignore", LimiterNameWarning)
        warnings.simplefilter("ignore", SegmentSizeWarning)
        return [_addressed(store, rules, *one) for one in listed if not wanted or one[0] in wanted]


def _addressed(store: Store, rules: Rules | None, name: str, algorithm: str) -> Addressed:
    for limit_name, limit in (rules.limits if rules else {}).items():
        kind = type(limit).__name__.removesuffix("Limit")
        if kind == algorithm and encode_limiter_name(limit_name).decode() == name:
            return _by_limit(store, limit_name, algorithm, limit)
    if algorithm == _PREPAID:
        return Addressed(name, algorithm, Credits(store, name), True, "")
    if algorithm in _BY_NAME:
        reason = (
            'not found if made with initial= or refill="interval": give --rules FILE'
            if algorithm == "TokenBucket"
            else ""
        )
        return Addressed(name, algorithm, _BY_NAME[algorithm](store, name), False, reason)
    if algorithm.startswith(("leased", "synced")):
        return Addressed(name, algorithm, None, False, "its limit is kept in Redis")
    reason = "the rule file has no such limit" if rules else "give its limit in a rule file: --rules FILE"
    return Addressed(name, algorithm, None, False, reason)


def _by_limit(store: Store, name: str, algorithm: str, limit: Any) -> Addressed:
    from forebay.rules.building import make_limiter, parameters_of

    try:
        return Addressed(
            name, algorithm, make_limiter(store, name, limit, parameters_of(limit, is_check=False)), True, ""
        )
    except ForebayError as error:
        return Addressed(name, algorithm, None, False, str(error))


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key's state in one limiter. Unknown values are None."""

    limiter: str
    algorithm: str
    limit: int | None = None
    remaining: int | None = None
    retry_after: float | None = None
    """Seconds until one more permit may be had; 0.0 if one is there."""
    reset_after: float | None = None
    """Seconds until the key is as if it had never been seen."""
    note: str = ""

    def texts(self) -> Iterator[str]:
        """The cells of a table, from `limit` on."""
        yield "" if self.limit is None else f"{self.limit:,}"
        yield "" if self.remaining is None else f"{self.remaining:,}"
        yield "" if self.retry_after is None else seconds_text(self.retry_after) if self.retry_after else "now"
        yield "" if self.reset_after is None else seconds_text(self.reset_after) if self.reset_after else "fresh"


def seconds_text(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 0.1 else f"{seconds:.2g} s"


def state_of(one: Addressed, key: Key) -> KeyState:
    """Look at a key. Charges and counts nothing. Raises ``InvalidKey`` and ``SegmentError``."""
    if one.limiter is None:
        return KeyState(one.name, one.algorithm, note=one.reason)
    decision = one.limiter.peek(key)
    if one.algorithm == _PREPAID:
        # No time brings more, or takes what is there.
        retry_after = 0.0 if decision.allowed else None
        return KeyState(one.name, one.algorithm, decision.limit, decision.remaining, retry_after, note="prepaid")
    if one.is_exact:
        return KeyState(
            one.name, one.algorithm, decision.limit, decision.remaining, decision.retry_after, decision.reset_after
        )
    if decision.remaining > decision.limit:
        return KeyState(
            one.name, one.algorithm, note=f"{decision.remaining - decision.limit:,} permits above its burst"
        )
    reset_after: float = decision.reset_after
    # The next request of a minimum interval may come when the key is fresh again, and not before.
    retry_after = reset_after if one.algorithm == "MinInterval" else None
    note = one.reason if reset_after == 0 else ""
    return KeyState(one.name, one.algorithm, retry_after=retry_after, reset_after=reset_after, note=note)
