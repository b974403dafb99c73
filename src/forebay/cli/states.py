"""The limiters of a store as a command can address them, and a key's state in each.

A segment has its limiters' names and algorithms, but not their limits. ``TokenBucket``, ``LeakyBucket`` and
``MinInterval`` keep a time, from which the key is as if it had never been seen; it can be read without their rate. The
key of a window contains its period, so a window can be found only by its limit: that of live rules, or of a rule file.
``Credits`` have no parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from forebay.core.kinds import Credits, LeakyBucket, MinInterval, TokenBucket
from forebay.core.limiter import hot_name_of
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, InvalidLimiter, LimiterNameWarning, SegmentSizeWarning
from forebay.segment import layout
from forebay.segment.hot_keys import hot_digest
from forebay.segment.limiter_list import ALGORITHM_NAMES, encode_limiter_name
from forebay.store import Store

if TYPE_CHECKING:
    from forebay.core.decision import Decision
    from forebay.rules.live.standing import Standing
    from forebay.rules.model import Limit

__all__ = ["Addressed", "KeyState", "Rules", "addressed", "live_rules", "read_rules", "state_of"]

# Any rate and burst will do: a key's time doesn't depend on them.
_BY_NAME: Final[Mapping[str, Any]] = {
    "TokenBucket": lambda store, name: TokenBucket(store, name, "1/second"),
    "LeakyBucket": lambda store, name: LeakyBucket(store, name, "1/second", capacity=1),
    "MinInterval": lambda store, name: MinInterval(store, name, "1 second"),
}
SHARE: Final = "the share of its former limit is charged by its next request"
_PREPAID: Final = ALGORITHM_NAMES[layout.ALGORITHM_CREDITS]
_WITHOUT_KEYS: Final = {ALGORITHM_NAMES[one] for one in (layout.ALGORITHM_SHEDDER, layout.ALGORITHM_HOT_KEYS)}


Listed: TypeAlias = tuple[str, str]
"""A limiter as the segment lists it: its name, which may be cut, and its algorithm."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of a document, and its client."""

    limits: Mapping[Listed, tuple[str, Limit]]
    """Each with its whole name."""
    client: Any
    """The ``ClientAddress`` by which it reduces addresses."""
    standings: Mapping[str, Standing] = field(default_factory=dict)
    """Where limits of live rules count, by whole name."""


def read_rules(file: Path) -> Rules:
    """Raises ``InvalidRuleFile``, ``OSError``, and ``ImportError`` without the extra ``forebay[rules]``."""
    return _rules(str(file), file.read_bytes(), {})


def live_rules(store: Store) -> Rules | None:
    """The live rules of a store, if it has any. Raises ``UnreadableRules``, and as ``read_rules``."""
    if not store.segment.rules_version():
        return None
    from forebay.rules.live.publication import Board

    board = Board(store)
    published = board.read(board.version)
    return _rules(published.name, published.document, published.limits)


def _rules(name: str, document: bytes, standings: Mapping[str, Standing]) -> Rules:
    from forebay.rules.building import client_of
    from forebay.rules.keys import Functions
    from forebay.rules.loading import check

    spec, _, _ = check(name, document, Functions(lambda request: "", lambda request: None))
    # A former limit of another algorithm is listed beside the one of now.
    former = [(each, one.limit) for each, standing in standings.items() for one in standing.former]
    limits = {_listed(each, limit): (each, limit) for each, limit in (*former, *spec.limits.items())}
    return Rules(limits, client_of(spec), standings)


def _listed(name: str, limit: Limit) -> Listed:
    return encode_limiter_name(name).decode(), type(limit).__name__.removesuffix("Limit")


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
    generation: int = 0
    """That of the keys' cells: see ``forebay.rules.live.standing``."""
    former: Sequence[tuple[Any, int]] = ()
    """The limiters of before whose keys bring their shares, and their generations."""

    def peek(self, key: Key) -> Decision:
        return _peek(self.limiter, key, self.generation)

    def has_use_of_before(self, key: Key) -> bool:
        """Whether the key has used a part of a former limit."""
        found = [_peek(limiter, key, generation) for limiter, generation in self.former]
        return any(decision.remaining < decision.limit for decision in found)

    def reset(self, key: Key) -> None:
        for limiter, generation in (*self.former, (self.limiter, self.generation)):
            limiter.reset(_counted(key, generation))

    def record_digests(self, key: Key) -> Iterator[str]:
        """The digests that the key may have in the record of hot keys."""
        for limiter, generation in (*self.former, (self.limiter, self.generation)):
            if limiter is not None:
                yield hot_digest(hot_name_of(limiter, _counted(key, generation)))

    @property
    def can_be_reset(self) -> bool:
        return self.limiter is not None and self.algorithm != _PREPAID


def _peek(limiter: Any, key: Key, generation: int) -> Decision:
    decision: Decision = limiter.peek(_counted(key, generation))
    return decision


def _counted(key: Key, generation: int) -> Any:
    if not generation:
        return key
    from forebay.rules.live.carrying import counted

    return counted(key, generation)


def addressed(store: Store, rules: Rules | None, live: Rules | None, names: Sequence[str]) -> list[Addressed]:
    """The limiters of a store, all or those of these names. Raises ``InvalidLimiter`` for an unknown name.

    `rules` has their limits. `live` are the live rules of the store, which say where limits count.
    """
    listed = [one for one in store.attachment.limiters().values() if one[1] not in _WITHOUT_KEYS]
    wanted = {encode_limiter_name(name).decode() for name in names}
    unknown = wanted - {name for name, _ in listed}
    if unknown:
        known = ", ".join(repr(name) for name, _ in listed) or "none"
        raise InvalidLimiter(f"{store.path} has no limiter {min(unknown)!r}; its limiters: {known}")
    with warnings.catch_warnings():
        # The names are those that the processes have chosen, and memory keeps its size.
        warnings.simplefilter("ignore", LimiterNameWarning)
        warnings.simplefilter("ignore", SegmentSizeWarning)
        found = [_addressed(store, rules, *one) for one in listed if not wanted or one[0] in wanted]
        return _placed(store, live, found) if live else found


def _placed(store: Store, live: Rules, found: Iterable[Addressed]) -> list[Addressed]:
    """The limiters, with the cells in which their keys are by live rules, and without the one that has marks only."""
    from forebay.rules.live.carrying import MARKS

    return [_in_cells(store, live, one) for one in found if one.name != MARKS]


def _in_cells(store: Store, live: Rules, one: Addressed) -> Addressed:
    if one.limiter is None or (one.name, one.algorithm) not in live.limits:
        return one
    name, limit = live.limits[one.name, one.algorithm]
    standing = live.standings.get(name)
    if standing is None:
        return one
    for each in standing.former:
        if each.limit is limit:
            return replace(one, generation=each.generation)
    former = [(_limiter(store, name, each.limit), each.generation) for each in standing.former]
    return replace(one, generation=standing.generation, former=former)


def _addressed(store: Store, rules: Rules | None, name: str, algorithm: str) -> Addressed:
    if rules and (name, algorithm) in rules.limits:
        return _by_limit(store, *rules.limits[name, algorithm], algorithm)
    if algorithm == _PREPAID:
        reason = "they were paid for: Credits.take_up_to takes them"
        return Addressed(name, algorithm, Credits(store, name), True, reason)
    if algorithm in _BY_NAME:
        reason = (
            'a bucket made with initial= or refill="interval" is only found with --rules FILE'
            if algorithm == "TokenBucket"
            else ""
        )
        return Addressed(name, algorithm, _BY_NAME[algorithm](store, name), False, reason)
    if algorithm.startswith(("leased", "synced")):
        return Addressed(name, algorithm, None, False, "its limit is kept in Redis")
    reason = "the rule file has no such limit" if rules else "give its limit in a rule file: --rules FILE"
    return Addressed(name, algorithm, None, False, reason)


def _by_limit(store: Store, name: str, limit: Limit, algorithm: str) -> Addressed:
    try:
        return Addressed(name, algorithm, _limiter(store, name, limit), True, "")
    except ForebayError as error:
        return Addressed(name, algorithm, None, False, str(error))


def _limiter(store: Store, name: str, limit: Limit) -> Any:
    from forebay.rules.building import make_limiter, parameters_of

    return make_limiter(store, name, limit, parameters_of(limit, is_check=False))


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
    decision = one.peek(key)
    if one.algorithm == _PREPAID:
        # No time brings more, or takes what is there.
        retry_after = 0.0 if decision.allowed else None
        return KeyState(one.name, one.algorithm, decision.limit, decision.remaining, retry_after, note="prepaid")
    if one.is_exact:
        times = decision.retry_after, decision.reset_after
        note = SHARE if decision.remaining == decision.limit and one.has_use_of_before(key) else ""
        return KeyState(one.name, one.algorithm, decision.limit, decision.remaining, *times, note)
    if decision.remaining > decision.limit:
        return KeyState(
            one.name, one.algorithm, note=f"{decision.remaining - decision.limit:,} permits above its burst"
        )
    reset_after: float = decision.reset_after
    # The next request of a minimum interval may come when the key is fresh again, and not before.
    retry_after = reset_after if one.algorithm == "MinInterval" else None
    note = one.reason if reset_after == 0 else ""
    return KeyState(one.name, one.algorithm, retry_after=retry_after, reset_after=reset_after, note=note)
