"""Several limits at once: one call of one script, which judges all before it charges any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.core.decision import Decision, _decision
from penstock.core.keys import Key
from penstock.errors import InvalidCost, InvalidKey
from penstock.redis.algorithms import Draw, Seen, seconds_us
from penstock.redis.asking import HIT, PEEK, Asked, Asking, Booked, Talk, costs_of, keys_of
from penstock.redis.held import AskingHeld
from penstock.redis.scripts import script

__all__ = ["AskingAll", "Costs", "Keys"]

T = TypeVar("T")

Keys = Key | list[Key] | list[str] | list[bytes] | list[int]
Costs = int | list[int]


class Part(NamedTuple):
    limiter: Asking
    key: bytes
    draw: Draw


class AskingAll:
    """What both kinds of ``AllOf`` are."""

    def __init__(self, limiters: Sequence[Asking]) -> None:
        self._limiters = tuple(limiters)
        self._store = limiters[0]._store
        self._script = script("decide", *sorted({limiter._algorithm.script for limiter in limiters}))
        self._size = 2 + sum(1 + limiter._algorithm.told for limiter in limiters)

    # Nothing is made of it; but it says that it isn't over shared memory.
    _make_limiter = None

    @property
    def name(self) -> str:
        return " + ".join(limiter.name for limiter in self._limiters)

    @property
    def may_free_early(self) -> bool:
        return any(limiter.may_free_early for limiter in self._limiters)

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(repr, self._limiters))})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same limiters")

    def _each(self, key: Keys, cost: Costs) -> list[tuple[Asking, Key, int]]:
        """The limiters with their own keys and costs."""
        count = len(self._limiters)
        keys = key if isinstance(key, list) else [key] * count
        costs = cost if isinstance(cost, list) else [cost] * count
        if len(keys) != count:
            raise InvalidKey(f"{count} limiters need one key for all or {count} keys, not {len(keys)}")
        if len(costs) != count:
            raise InvalidCost(f"{count} limiters need one cost for all or {count} costs, not {len(costs)}")
        return list(zip(self._limiters, keys, costs, strict=True))

    def _parts(self, key: Keys, cost: Costs) -> list[Part]:
        return [
            Part(limiter, limiter._key(its_key), limiter._draw(its_key, its_cost))
            for limiter, its_key, its_cost in self._each(key, cost)
        ]

    def _asked(self, what: bytes, parts: Sequence[Part], size: int, read: Callable[[list[int]], T]) -> Asked[T]:
        arguments: list[Any] = [what, 0]
        for limiter, _, draw in parts:
            arguments += (limiter._algorithm.script, *draw.arguments)
        return Asked(self._script, [part.key for part in parts], arguments, size, read)

    def _ask(self, what: bytes, parts: Sequence[Part], made: Callable[[bool, list[Seen]], T]) -> Asked[T]:
        """`made` gets whether all allow the request, and what was seen of each."""

        def read(reply: list[int]) -> T:
            allowed, at, seen = reply[0] != 0, 2, []
            for limiter, _, _ in parts:
                end = at + 1 + limiter._algorithm.told
                seen.append(Seen(reply[at] != 0, reply[1], reply[at + 1 : end]))
                at = end
            if allowed and what is HIT:
                for (limiter, key, draw), its_seen in zip(parts, seen, strict=True):
                    limiter._took(key, draw, its_seen)
            return made(allowed, seen)

        return self._asked(what, parts, self._size, read)

    def _ask_allow(self, key: Keys, cost: Costs = 1) -> Asked[bool]:
        return self._ask(HIT, self._parts(key, cost), lambda allowed, _: allowed)

    def _ask_decisions(self, what: bytes, key: Keys, cost: Costs) -> Asked[list[Decision]]:
        parts = self._parts(key, cost)
        return self._ask(what, parts, lambda allowed, seen: decisions(parts, seen))

    def _ask_hit_each(self, key: Keys, cost: Costs) -> Asked[list[Decision]]:
        return self._ask_decisions(HIT, key, cost)

    def _ask_hit(self, key: Keys, cost: Costs) -> Asked[Decision]:
        parts = self._parts(key, cost)
        return self._ask(HIT, parts, lambda allowed, seen: binding(decisions(parts, seen)))

    def _ask_peek(self, key: Keys, cost: Costs) -> Asked[Decision]:
        parts = self._parts(key, cost)
        return self._ask(PEEK, parts, lambda allowed, seen: binding(decisions(parts, seen)))

    def _ask_reserve(self, key: Keys, cost: Costs, max_delay: float | None) -> Asked[Booked]:
        seconds_us(max_delay, "max_delay")
        parts = self._parts(key, cost)

        def made(allowed: bool, seen: list[Seen]) -> Booked:
            if allowed:
                return Booked.now(True, 0, self._cancel(parts, seen))
            return Booked.now(False, binding(decisions(parts, seen)).retry_after_ns // 1000, None)

        return self._ask(HIT, parts, made)

    def _cancel(self, parts: Sequence[Part], seen: Sequence[Seen]) -> Talk[None]:
        charged = [(part, its) for part, its in zip(parts, seen, strict=True) if part.draw.cost]
        counted = [
            Part(part.limiter, part.key, part.limiter._algorithm.cancellation(part.draw, its))
            for part, its in charged
            if not isinstance(part.limiter, AskingHeld)
        ]
        if counted:
            yield self._asked(b"cancel", counted, 2, _nothing)
        for part, its in charged:
            if isinstance(part.limiter, AskingHeld):
                yield from part.limiter._cancel(part.key, part.draw, its)

    def _refund(self, key: Keys, cost: Costs) -> Talk[None]:
        # Whatever is wrong with the arguments is found before anything is given back.
        parts = self._parts(key, cost)
        counted = [part for part in parts if not isinstance(part.limiter, AskingHeld)]
        if counted:
            yield self._asked(b"refund", counted, 2, _nothing)
        for limiter, its_key, its_cost in self._each(key, cost):
            if isinstance(limiter, AskingHeld):
                yield from limiter._refund(its_key, its_cost)

    def _ask_reset(self, key: Keys) -> Asked[None]:
        return self._asked(b"reset", self._parts(key, 1), 2, _nothing)

    def _ask_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None) -> list[Asked[bool]]:
        listed = keys_of(keys)
        return [self._ask_allow(key, cost) for key, cost in zip(listed, costs_of(costs, len(listed)), strict=True)]


def decisions(parts: Sequence[Part], seen: Sequence[Seen]) -> list[Decision]:
    return [
        limiter._algorithm.decision(limiter.name, draw, its)
        for (limiter, _, draw), its in zip(parts, seen, strict=True)
    ]


def binding(each: Sequence[Decision]) -> Decision:
    """The decision of the limit that bound the request, with what all of them have left together.

    Of those that deny it is the one that does so longest, else the one with the fewest remaining.
    """
    denying = [decision for decision in each if not decision.allowed]
    if denying:
        bound = max(denying, key=lambda decision: decision.retry_after_ns)
    else:
        bound = min(each, key=lambda decision: decision.remaining)
    return _decision(
        bound.limiter,
        bound.allowed,
        bound.limit,
        min(decision.remaining for decision in each),
        1,
        1,
        bound.retry_after_ns,
        max(decision.reset_after_ns for decision in each),
    )


def _nothing(reply: list[int]) -> None:
    return None
