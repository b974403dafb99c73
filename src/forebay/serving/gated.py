"""The gate of rules whose limits aren't in the memory of a host: `forebay_server` asks it about each request.

It is the gate of the middlewares, so limits over Redis, leased and synced ones are decided as there. The server has
matched nothing: it reads the request, and hands over all readings of its path.

Descriptors of Envoy are matched by the server itself: it asks only to charge limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from forebay.core.all_of import AllOf
from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, StoreUnavailable
from forebay.rules.building import Built, BuiltRule
from forebay.rules.keys import AMBIGUOUS, Alternative, Value
from forebay.web.denials import log_for_operator
from forebay.web.gate import Gate
from forebay.web.request import Request
from forebay.web.rules import Denial
from forebay.web.store_errors import STORE_ERRORS

__all__ = ["Ask", "Charge", "GatePlan", "gate_plan"]

_THREADS: Final = 8
"""Threads that ask the gate. While one waits for Redis, others use the processor."""
_PATIENCE_S: Final = 0.5
"""In addition to the deadlines of a question: of the one before it in its thread, and its own."""
_MOST_COMBINATIONS: Final = 4096
"""Of limits that are charged as one, and are remembered."""

Fields: TypeAlias = Sequence[tuple[str, str]]
Ask: TypeAlias = Callable[
    [tuple[str, ...], tuple[str, ...], list[str], list[str], Mapping[str, str], str | None],
    tuple[Fields, tuple[int, str, int | None] | None],
]
"""Decides a request: by its methods, the first in capitals; the readings of its path, all, those of the path as it was
sent, and those of the decoded path; its fields, by their names in small letters; and the address of its peer.

It returns header fields, and for a denied request the status, the body, and the seconds to wait.
"""
Use: TypeAlias = tuple[int, str | tuple[str, ...], int]
"""The number of a limiter, a key, and a cost."""
Numbers: TypeAlias = tuple[bool, int, int, int, int, bool]
"""A decision: whether it allows, its limit, what remains, when to ask again and when the key is as fresh, in
nanoseconds, and whether the store has no room.
"""
Charge: TypeAlias = Callable[[list[Use]], list[Numbers | None] | None]
"""Charges at most 16 uses, all or none, and returns their decisions: of a denied request, at least those that deny it.

A denial by a limit that is below the cost is for good. None: the store can't be asked.
"""


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What `forebay_server` decides by, where Python decides."""

    document: str
    """The rules, as in a ``Plan``."""
    of_bans: tuple[Any, ...]
    """The limiters of its first limits, which are in the memory of the host."""
    ask: Ask
    charge: Charge
    within_s: float
    """A question that has waited so long has no answer."""
    store: Any
    trusts_unix: bool
    """Whether a peer behind a Unix socket may name a client. True if no rule needs one."""

    def compiled(self, server: Any) -> Any:
        """As the module `forebay_server` takes it."""
        return server.Gate(self.document, self.of_bans, self.ask, self.charge, threads=_THREADS, within_s=self.within_s)


def gate_plan(
    built: Iterable[Built],
    store: Any,
    document: str,
    of_bans: tuple[Any, ...],
    limiters: Sequence[Any],
    trusts_unix: bool,
) -> GatePlan:
    """The plan of rules over this store. `document`: as of a ``Plan`` with these `limiters`, of which those `of_bans`
    come first. Raises what ``Gate`` raises.
    """
    built = list(built)
    for one in built:
        if isinstance(one, BuiltRule):
            one.key.parts = [[_served(alternative) for alternative in part] for part in one.key.parts]
    gate = Gate([rule for one in built for rules in one.rules.values() for rule in rules], in_loop=False)
    redis_store = getattr(store, "redis_store", store)
    within_s = 2 * redis_store.executor.timeout_s + _PATIENCE_S
    charging = _Charging(limiters, store)
    return GatePlan(document, of_bans, _Asked(gate), charging, within_s, store, trusts_unix)


class _ServedPathParameter(Alternative):
    """A path parameter, in the readings of the server. The values in a path as it was sent are encoded."""

    is_always_there = True

    def __init__(self, own: Alternative) -> None:
        self._own = own
        self.word, self.patterns = own.word, own.patterns

    def of(self, request: Any) -> Value:
        decoded = {value for path in request.decoded for value in self._values(path)}
        values = decoded.union(unquote(value) for path in request.sent for value in self._values(path))
        [_, name] = self.word.split(":", 1)
        return "path", name, values.pop() if len(values) == 1 else AMBIGUOUS

    def named(self, text: str) -> Value:
        return self._own.named(text)

    def _values(self, path: str) -> list[str]:
        found = (pattern.fullmatch(path) for pattern in self.patterns)
        return [match[1] for match in found if match]


def _served(alternative: Alternative) -> Alternative:
    return _ServedPathParameter(alternative) if alternative.word.startswith("path:") else alternative


class _ServedRequest:
    """A request that a proxy or a service asks about."""

    __slots__ = ("_fields", "decoded", "methods", "paths", "peer", "sent")

    def __init__(
        self,
        methods: tuple[str, ...],
        paths: tuple[str, ...],
        sent: list[str],
        decoded: list[str],
        fields: Mapping[str, str],
        peer: str | None,
    ) -> None:
        self.methods, self.paths, self.sent, self.decoded = methods, paths, sent, decoded
        self._fields, self.peer = fields, peer

    @property
    def method(self) -> str:
        return self.methods[0]

    @property
    def path(self) -> str:
        return self.decoded[0] if self.decoded else ""

    @property
    def user(self) -> None:
        return None

    @property
    def native(self) -> Mapping[str, Any]:
        return {}

    def header(self, name: str) -> str | None:
        return self._fields.get(name.lower()) or None


class _Asked:
    """An `Ask`. *Threads*: safe."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(
        self,
        methods: tuple[str, ...],
        paths: tuple[str, ...],
        sent: list[str],
        decoded: list[str],
        fields: Mapping[str, str],
        peer: str | None,
    ) -> tuple[Fields, tuple[int, str, int | None] | None]:
        request: Request = _ServedRequest(methods, paths, sent, decoded, fields, peer)
        passage = self._gate.admit(request)
        if passage is None:
            return (), None
        if isinstance(passage, Denial):
            answer = self._gate.answer(request, passage)
            return answer.headers, (answer.status, answer.body.decode(), passage.retry_after_s)
        return passage.fields, None


class _Charging:
    """A `Charge`. *Threads*: safe."""

    def __init__(self, limiters: Sequence[Any], store: Any) -> None:
        self._limiters = limiters
        self._redis_store = store if hasattr(store, "together") else None
        """If Redis decides each request, by one script."""
        self._combined: dict[tuple[int, ...], Any] = {}

    def __call__(self, uses: list[Use]) -> list[Numbers | None] | None:
        try:
            return [_numbers(decision) for decision in self._decided(uses)]
        except CostExceedsLimit as error:
            return [self._never(use, error) for use in uses]
        except STORE_ERRORS as error:
            # Redis logs its own outages.
            if not isinstance(error, StoreUnavailable):
                log_for_operator("charged to no limit", error)
            return None

    def _decided(self, uses: list[Use]) -> list[Decision]:
        if len(uses) == 1:
            [(number, key, cost)] = uses
            return [self._limiters[number].hit(key, cost)]
        all_of = self._all_of(tuple(number for number, _, _ in uses))
        keys, costs = [key for _, key, _ in uses], [cost for _, _, cost in uses]
        if self._redis_store is None:
            return all_of.hit_each(keys, costs)  # type: ignore[no-any-return]
        return all_of.hit_each_within(self._redis_store.executor.patience(), keys, costs)  # type: ignore[no-any-return]

    def _never(self, use: Use, error: CostExceedsLimit) -> Numbers | None:
        """The denial by the limit that can never allow so much; None of another limit."""
        number, _, cost = use
        if self._limiters[number].name != error.limiter or cost <= error.limit:
            return None
        return False, error.limit, 0, 0, 0, False

    def _all_of(self, numbers: tuple[int, ...]) -> Any:
        found = self._combined.get(numbers)
        if found is None:
            found = AllOf(*[self._limiters[number] for number in numbers])
            # Clients may choose the descriptors.
            if len(self._combined) >= _MOST_COMBINATIONS:
                self._combined.clear()
            self._combined[numbers] = found
        return found


def _numbers(decision: Decision) -> Numbers:
    return (
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_after_ns,
        decision.reset_after_ns,
        decision.full,
    )
