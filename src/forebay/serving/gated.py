"""The gate of rules whose limits aren't in the memory of a host: `forebay_server` asks it about each request.

It is the gate of the middlewares, so limits over Redis, leased and synced ones are decided as there. The server has
matched nothing: it reads the request, and hands over all readings of its path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from forebay.rules.building import Built, BuiltRule
from forebay.rules.keys import AMBIGUOUS, Alternative, Value
from forebay.web.gate import Gate
from forebay.web.request import Request
from forebay.web.rules import Denial

__all__ = ["Ask", "GatePlan", "gate_plan"]

_THREADS: Final = 8
"""Threads that ask the gate. While one waits for Redis, others use the processor."""
_PATIENCE_S: Final = 0.5
"""In addition to the deadlines of a question: of the one before it in its thread, and its own."""

Fields: TypeAlias = Sequence[tuple[str, str]]
Ask: TypeAlias = Callable[
    [tuple[str, ...], tuple[str, ...], list[str], list[str], Mapping[str, str], str | None],
    tuple[Fields, tuple[int, str, int | None] | None],
]
"""Decides a request: by its methods, the first in capitals; the readings of its path, all, those of the path as it was
sent, and those of the decoded path; its fields, by their names in small letters; and the address of its peer.

It returns header fields, and for a denied request the status, the body, and the seconds to wait.
"""


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What `forebay_server` decides by, where Python decides."""

    client: str
    """JSON."""
    ask: Ask
    within_s: float
    """A question that has waited so long has no answer."""
    store: Any
    trusts_unix: bool
    """Whether a peer behind a Unix socket may name a client. True if no rule needs one."""

    def compiled(self, server: Any) -> Any:
        """As the module `forebay_server` takes it."""
        return server.Gate(self.client, self.ask, threads=_THREADS, within_s=self.within_s)


def gate_plan(built: Iterable[Built], store: Any, client: dict[str, Any] | None) -> GatePlan:
    """The plan of rules over this store. Raises what ``Gate`` raises."""
    built = list(built)
    for one in built:
        if isinstance(one, BuiltRule):
            one.key.parts = [[_served(alternative) for alternative in part] for part in one.key.parts]
    gate = Gate([rule for one in built for rules in one.rules.values() for rule in rules], in_loop=False)
    redis_store = getattr(store, "redis_store", store)
    within_s = 2 * redis_store.executor.timeout_s + _PATIENCE_S
    return GatePlan(json.dumps(client), _Asked(gate), within_s, store, client is None or client["trusts_unix"])


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
