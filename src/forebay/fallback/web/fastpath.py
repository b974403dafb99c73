"""The usual path of a request: its rules are charged, and its response gets header fields. See web/fastpath.pyx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from forebay.errors import InvalidCost, InvalidKey
from forebay.fallback.decision import Decision
from forebay.fallback.web.native_requests import is_options
from forebay.web.native_requests import ASGIRequest, WSGIRequest
from forebay.web.store_errors import DENYING_ERRORS

__all__ = [
    "ASGIFastPath",
    "FastCharge",
    "Passage",
    "RateLimitFields",
    "RulesWatch",
    "Sampling",
    "SendWithFields",
    "StartWithFields",
    "WSGIFastPath",
    "with_fields",
]

NS: Final = 1_000_000_000


class Passage:
    """Permission for one request. `fields` are header fields for its response.

    If there is a `cleanup`, call its ``begin`` and ``end`` with the response's status: ``end`` before the last part of
    the response is sent, or the client's next request may come before the permits are back.
    """

    __slots__ = ("cleanup", "fields")

    def __init__(self, fields: Sequence[tuple[Any, Any]], cleanup: Any = None) -> None:
        self.fields = fields
        self.cleanup = cleanup


class RateLimitFields:
    """The fields of draft-ietf-httpapi-ratelimit-headers-10: a fixed ``RateLimit-Policy``, and ``RateLimit``.

    `prefixes`: for each limit the beginning of its item (``"name";r=``). `held`: whether its permits are held, so that
    the time of the next one is unknown. See `header_writer` for the arguments of a call.
    """

    def __init__(
        self, policy_field: Any, name: Any, encoded: bool, prefixes: Iterable[str], held: Iterable[bool]
    ) -> None:
        self._policy_field, self._name, self._encoded = policy_field, name, encoded
        self._prefixes, self._held = list(prefixes), list(held)
        if not all(isinstance(prefix, str) for prefix in self._prefixes):
            raise TypeError("a prefix is text")
        if len(self._held) != len(self._prefixes):
            raise ValueError(f"{len(self._held)} are held or not, of {len(self._prefixes)} limits")

    def __call__(self, decisions: Sequence[Decision], partitions: Sequence[str]) -> list[Any]:
        if not self._prefixes:
            return [self._policy_field]
        if len(decisions) != len(self._prefixes):
            raise ValueError(f"{len(decisions)} decisions for {len(self._prefixes)} limits")
        if partitions and len(partitions) != len(self._prefixes):
            raise ValueError(f"{len(partitions)} partitions for {len(self._prefixes)} limits")
        parts = zip(self._prefixes, self._held, decisions, partitions or [""] * len(decisions), strict=True)
        value = ", ".join(self._item(*part) for part in parts)
        return [self._policy_field, (self._name, value.encode("ascii") if self._encoded else value)]

    @staticmethod
    def _item(prefix: str, held: bool, decision: Decision, partition: str) -> str:
        if not isinstance(decision, Decision):
            raise TypeError(f"a decision, not {decision!r}")
        # Whole seconds until more remains than now.
        wait_s = 0 if held else -(-decision.next_after_ns // NS)
        return f"{prefix}{decision.remaining}{f';t={wait_s}' if wait_s else ''}{partition}"


class Sampling:
    """Times no decision: only shared memory has histograms of latencies."""

    def __init__(self, segment: Any) -> None: ...

    def begin(self) -> int:
        """No time."""
        return 0

    def end(self, begun_ns: int) -> None:
        """Do nothing."""


class FastCharge:
    """Charges the rules of a plan without reserved or held permits: the usual case.

    `hit`: the limiter's method for one rule, or ``AllOf.hit_each`` for several. `key_of` and `cost_of` take a request.
    `admit_any` takes one that may be a CORS preflight.
    """

    def __init__(
        self,
        plan: Any,
        hit: Callable[..., Any],
        admit_any: Callable[[Any], Any],
        key_of: Any,
        cost_of: Any,
        cost: Any,
        is_one: bool,
    ) -> None:
        self._hit, self._admit_any, self._key_of = hit, admit_any, key_of
        self._cost_of, self._cost, self._is_one = cost_of, cost, is_one
        self._write = plan.write
        self._partitions = plan.partitions if plan.secret else None
        self._denial, self._denial_for, self._explained = plan.denial, plan.denials.for_error, plan.explained

    def __call__(self, request: Any) -> Any:
        charged = self.charge(request)
        return Passage(charged) if type(charged) is list else charged

    def charge(self, request: Any) -> Any:
        """A list of header fields for an admitted request, or a denial."""
        key, cost = "", 1
        if is_options(request):
            passage = self._admit_any(request)
            return list(passage.fields) if isinstance(passage, Passage) else passage
        try:
            key = self._key_of(request)
            cost = self._cost if self._cost_of is None else self._cost_of(request)
            decided = self._hit(key, cost)
        except DENYING_ERRORS as error:
            denial = self._denial_for(error, request)
            return [] if denial is None else denial
        except (InvalidKey, InvalidCost) as error:
            if not self._is_one:
                raise
            raise self._explained(error, key, cost) from None
        decisions = [decided] if self._is_one else decided
        if not all(decision.allowed for decision in decisions):
            return self._denial(request, decisions)
        partitions = () if self._partitions is None else self._partitions(request)
        return list(self._write(decisions, partitions))


class RulesWatch:
    """Tells whether a store has other live rules than those that the holder of this object follows."""

    def __init__(self, segment: Any) -> None:
        self._segment = segment
        self._followed: int | None = None

    def has_news(self) -> bool:
        """Whether the version in force isn't the one that is followed."""
        return bool(self._segment.rules_version() != self._followed)

    def follow(self, version: int) -> None:
        """The rules of that version are in use."""
        self._followed = version

    def forget(self) -> None:
        """No version is followed, so there is news."""
        self._followed = None


class FastPath:
    """An application, `app`, behind a `gate`.

    Where the rules are live, `live` is the ``LiveGate``, which sets the gate of each version: ``follow_rules`` begins
    that.
    """

    app: Any
    live: Any = None
    _gate: Any

    def follow_rules(self, live: Any) -> None:
        """Take the gates of `live` from now on."""
        self.live = live
        live.attach(self)

    def follow_news(self) -> None:
        """Take the gate of the version in force."""
        if self.live is not None and self.live.watch.has_news():
            self.live.lead()

    @property
    def gate(self) -> Any:
        return self._gate

    @gate.setter
    def gate(self, gate: Any) -> None:
        # All attributes are read first: an object that is no gate changes nothing. One assignment changes all.
        self._admission = gate.admit, bool(gate.body_limits), gate.has_cleanups or gate.is_awaited
        self._gate = gate

    def enter(self, admit: Any, request: Any) -> Any:
        """A list of fields, a passage with a cleanup, a denial, or None if no rule matches."""
        passage = admit(request)
        if type(passage) is Passage and passage.cleanup is None:
            return list(passage.fields)
        return passage


class StartWithFields:
    """A ``start_response`` that adds header fields."""

    def __init__(self, start_response: Callable[..., Any], fields: list[Any]) -> None:
        self._start_response, self._fields = start_response, fields

    def __call__(self, status: str, headers: Iterable[Any], exc_info: Any = None) -> Any:
        together = [*headers, *self._fields]
        if exc_info is None:
            return self._start_response(status, together)
        return self._start_response(status, together, exc_info)


class WSGIFastPath(FastPath):
    """A limited WSGI application. A subclass has ``_respond_bounded`` and ``_respond_unusual``."""

    _respond_bounded: Callable[..., Any]
    _respond_unusual: Callable[..., Any]

    def __call__(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        request = WSGIRequest(environ)
        self.follow_news()
        admit, has_body_limits, _ = self._admission
        if has_body_limits:
            return self._respond_bounded(request, start_response)
        return self._respond_by(admit, self.app, request, start_response)

    def _respond(
        self, gate: Any, app: Callable[..., Any], request: WSGIRequest, start_response: Callable[..., Any]
    ) -> Any:
        """The response of `app`, if `gate` admits the request."""
        if not isinstance(request, WSGIRequest):
            raise TypeError(f"a WSGIRequest, not {request!r}")
        return self._respond_by(gate.admit, app, request, start_response)

    def _respond_by(
        self, admit: Any, app: Callable[..., Any], request: WSGIRequest, start_response: Callable[..., Any]
    ) -> Any:
        passage = self.enter(admit, request)
        if passage is None:
            return app(request.native, start_response)
        if type(passage) is not list:
            return self._respond_unusual(app, request, passage, start_response)
        return app(request.native, StartWithFields(start_response, passage) if passage else start_response)


class SendWithFields:
    """An ASGI ``send`` that adds header fields to the message that starts a response."""

    def __init__(self, send: Callable[..., Any], fields: Iterable[Any]) -> None:
        self._send, self._fields = send, fields

    def __call__(self, message: Any) -> Any:
        if message["type"] in ("http.response.start", "websocket.accept"):
            message = with_fields(message, self._fields)
        return self._send(message)


class ASGIFastPath(FastPath):
    """A limited ASGI application. A subclass has ``_respond_unusual`` and ``_deny``.

    The coroutine returned here is never awaited if its task is cancelled before it starts. The charge stays, then.
    Requests with a cleanup go to ``_respond_unusual``, which charges only once it runs.
    """

    _respond_unusual: Callable[..., Any]
    _deny: Callable[..., Any]

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] not in ("http", "websocket"):
            return self.app(scope, receive, send)
        request = ASGIRequest(scope)
        self.follow_news()
        admit, has_body_limits, is_unusual = self._admission
        if has_body_limits or is_unusual:
            return self._respond_unusual(request, receive, send)
        passage = self.enter(admit, request)
        if passage is None:
            return self.app(scope, receive, send)
        if type(passage) is not list:
            return self._deny(request, passage, receive, send)
        return self.app(scope, receive, SendWithFields(send, passage) if passage else send)


def with_fields(message: Any, fields: Iterable[Any]) -> dict[str, Any]:
    """A copy of a message that starts a response, with more header fields."""
    return {**message, "headers": [*message.get("headers", ()), *fields]}
