from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from typing import Any, TypeAlias, final

from typing_extensions import disjoint_base

from forebay.core.decision import Decision
from forebay.web.cleanup import RequestCleanup
from forebay.web.native_requests import WSGIRequest
from forebay.web.request import Environ, KeyFunction, Request, Scope
from forebay.web.rules import Denial

_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

@final
class Passage:
    """Permission for one request. `fields` are header fields for its response.

    If there is a `cleanup`, call its ``begin`` and ``end`` with the response's status: ``end`` before the last part of
    the response is sent, or the client's next request may come before the permits are back.
    """
    @property
    def fields(self) -> Sequence[tuple[Any, Any]]: ...
    @property
    def cleanup(self) -> RequestCleanup | None: ...
    def __init__(self, fields: Sequence[tuple[Any, Any]], cleanup: RequestCleanup | None = None) -> None: ...

@final
class RateLimitFields:
    def __new__(
        cls, policy_field: Any, name: Any, encoded: bool, prefixes: Iterable[str], held: Iterable[bool]
    ) -> RateLimitFields: ...
    def __call__(self, decisions: Sequence[Decision], partitions: Sequence[str]) -> list[Any]: ...

@final
class Sampling:
    """Times one of 128 decisions of this process, for the host's histogram in `segment`; with None, no decision.

    ``begin`` before a decision, and ``end`` with its result once it is made. *Threads*: safe; of several that decide at
    once, some may not be counted as one of the 128. *Fork*: safe.
    """
    def __new__(cls, segment: Any) -> Sampling: ...
    def begin(self) -> int:
        """The time; 0 if it isn't the turn of this decision."""
    def end(self, begun_ns: int) -> None:
        """The decision is made that has begun at that time, or has no turn."""

@final
class FastCharge:
    def __new__(
        cls,
        plan: Any,
        hit: Callable[..., Any],
        admit_any: Callable[[Request], Passage | Denial],
        key_of: KeyFunction,
        cost_of: Callable[[Request], Any] | None,
        cost: Any,
        is_one: bool,
    ) -> FastCharge: ...
    def __call__(self, request: Request) -> Passage | Denial: ...

@final
class StartWithFields:
    def __call__(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]: ...

@final
class RulesWatch:
    """Tells whether a segment has other live rules than those that the holder of this object follows.

    *Threads*: safe. *Fork*: safe. One load of the segment, and a comparison.
    """
    def __new__(cls, segment: Any) -> RulesWatch: ...
    def has_news(self) -> bool:
        """Whether the version in force isn't the one that is followed."""
    def follow(self, version: int) -> None:
        """The rules of that version are in use."""
    def forget(self) -> None:
        """No version is followed, so there is news."""

@disjoint_base
class FastPath:
    """An application, `app`, behind a `gate`.

    Where the rules are live, `live` is the ``LiveGate``, which sets the gate of each version: ``follow_rules`` begins
    that.
    """

    app: Any
    @property
    def live(self) -> Any: ...
    def follow_rules(self, live: Any) -> None:
        """Take the gates of `live` from now on."""
    @property
    def gate(self) -> Any: ...
    @gate.setter
    def gate(self, gate: Any) -> None: ...

class WSGIFastPath(FastPath):
    """A limited WSGI application. A subclass has ``_respond_bounded`` and ``_respond_unusual``."""

    app: Callable[..., Iterable[bytes]]
    def __call__(
        self, environ: Environ, start_response: Callable[..., Callable[[bytes], object]]
    ) -> Iterable[bytes]: ...
    def _respond(
        self,
        gate: Any,
        app: Callable[..., Iterable[bytes]],
        request: WSGIRequest,
        start_response: Callable[..., Callable[[bytes], object]],
    ) -> Iterable[bytes]: ...

@final
class SendWithFields:
    def __init__(self, send: _Send, fields: Iterable[Any]) -> None: ...
    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]: ...

class ASGIFastPath(FastPath):
    """A limited ASGI application. A subclass has ``_respond_unusual`` and ``_deny``.

    The coroutine returned here is never awaited if its task is cancelled before it starts. The charge stays, then.
    Requests with a cleanup go to ``_respond_unusual``, which charges only once it runs.
    """

    app: Callable[[Scope, _Receive, _Send], Awaitable[None]]
    def __call__(self, scope: Scope, receive: _Receive, send: _Send) -> Coroutine[Any, Any, None]: ...

def with_fields(message: MutableMapping[str, Any], fields: Iterable[Any]) -> dict[str, Any]: ...
