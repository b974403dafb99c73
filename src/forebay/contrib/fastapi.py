"""Limits in a FastAPI or Starlette application: for all requests and for single routes. See docs/frameworks.md.

``setup(app, [Rule(limiter)])`` and ``Depends(limited(limiter))``. Needs ``forebay[fastapi]``, or Starlette alone.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, Unpack

from forebay.extras import Needs

with Needs("fastapi", __name__):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.exceptions import ExceptionMiddleware
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

from forebay.contrib.endpoints import Endpoint, checked_store, endpoint_of
from forebay.contrib.views import AppGates, AsyncVisit, Limit, NotInstalled, RuleOptions, check_loop_of, rules_of
from forebay.errors import InvalidLimiter, short_repr
from forebay.web import Answer, ASGIMiddleware, Denial, Passage
from forebay.web.answers import body_too_large, encoded, reason_of
from forebay.web.asgi import TRY_AGAIN_LATER, Application, Receive, Send, TrackedResponse, send_answer
from forebay.web.live_gate import VersionedRules, at_start, gate_of
from forebay.web.native_requests import ASGIRequest
from forebay.web.options import GateOptions, GivenRules
from forebay.web.request import Scope, declares_more_than

__all__ = ["LimitDenied", "LimitsMiddleware", "limited", "setup"]

GATES: Final = "forebay.gates"
VISIT: Final = "forebay.visit"
DEPENDENCIES: Final = ("key", "cost", "tier", "exempt")
"""The options of ``limited`` that may be dependencies."""
KEYWORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY


class LimitDenied(HTTPException):
    """Raised for a request that a dependency or a rule of ``setup`` denies.

    ``setup`` installs a handler that sends the problem report, or the rule's own answer, unless the application has one
    for this class. An exception handler of your own, for this class or for 429, finds here: ``denial`` (why),
    ``answer`` (the response that would be sent), ``headers`` (the fields to send along).
    """

    def __init__(self, denial: Denial, answer: Answer) -> None:
        headers = {name: value for name, value in answer.headers if name.lower() != "content-type"}
        super().__init__(answer.status, reason_of(answer.status), headers)
        self.denial, self.answer = denial, answer


def setup(
    app: Starlette,
    rules: GivenRules | VersionedRules = (),
    *,
    store: Any = None,
    **options: Unpack[GateOptions],
) -> None:
    """Charge `rules` for every request of `app`, and install the limits of its routes.

    `store` has the limits that routes give as text. See ``Gate`` for the other arguments. Middleware that is added
    later runs outside the limits: add the middleware that authenticates users later. A ``CORSMiddleware`` that is there
    already is moved outside, so that a browser may read denials.
    """
    # Wrong arguments fail here, and not at the first request, when Starlette makes its middleware.
    gate = gate_of(rules, **options, in_loop=True)
    given = rules if isinstance(rules, VersionedRules) else gate.given
    app.add_middleware(LimitsMiddleware, rules=given, store=checked_store(store, in_loop=True), **options)
    # From the last to the first: they stay in order.
    known: list[Any] = app.user_middleware
    for middleware in [one for one in known if one.cls is CORSMiddleware][::-1]:
        app.user_middleware.remove(middleware)
        app.user_middleware.insert(0, middleware)
    if LimitDenied not in app.exception_handlers:
        app.add_exception_handler(LimitDenied, _send_denial)  # type: ignore[arg-type]  # for both kinds of connection


def limited(
    *limits: Limit, name: str | None = None, **options: Unpack[RuleOptions]
) -> Callable[[HTTPConnection], Awaitable[None]]:
    """A dependency, ``Depends(limited(limiter))``, of a route or a router; the options are those of ``Rule``.

    A limit is a limiter, a ``Rule``, a ``Deny``, or text such as ``"5/minute; 100/hour"``: token buckets of each
    endpoint, or of `name`, in the `store` of ``setup``. Several limits of one dependency are charged as one, all or
    none. ``key``, ``cost``, ``tier`` and ``exempt`` may be dependencies, too: ``key=Depends(current_user_id)`` counts
    for its result. Works for a WebSocket's route, too. Needs ``setup``.
    """
    given: dict[str, Any] = dict(options)
    dependencies = {what: value for what, value in given.items() if what in DEPENDENCIES and _is_dependency(value)}
    # Beside other limits' in the scope of a request.
    place = f"forebay.results.{id(dependencies)}"
    given |= {what: _result(place, what) for what in dependencies}
    rules = rules_of(limits, given, name)  # type: ignore[arg-type]
    check_loop_of(rules, in_loop=True)

    async def decide(connection: HTTPConnection, **results: Any) -> None:
        scope = connection.scope
        visit: _Visit | None = scope.get(VISIT)
        if visit is None:
            raise NotInstalled("a route is limited, but its application isn't set up: call setup(app)")
        gates: AppGates = scope[GATES]
        if dependencies:
            scope[place] = results
        answer = await gates.decide_async(ASGIRequest(scope), visit, rules, scope)
        if answer is not None:
            assert visit.denial is not None
            raise LimitDenied(visit.denial, answer)

    # FastAPI reads it.
    signature = inspect.signature(decide, eval_str=True)
    parameters = [signature.parameters["connection"]]
    parameters += [inspect.Parameter(what, KEYWORD_ONLY, default=value) for what, value in dependencies.items()]
    return _Dependency(decide, signature.replace(parameters=parameters))


class _Dependency:
    """What ``limited`` returns: as `decide`, but it refuses to be a decorator, by which no request would be limited."""

    def __init__(self, decide: Callable[..., Awaitable[None]], signature: inspect.Signature) -> None:
        self._decide = decide
        # FastAPI inspects them, and calls the dependency itself.
        self.__dict__.update(__call__=decide, __signature__=signature)

    def __call__(self, connection: HTTPConnection, **results: Any) -> Awaitable[None]:
        if not isinstance(connection, HTTPConnection):
            raise InvalidLimiter(
                f"limited(...) is a dependency, and limits nothing as a decorator of {short_repr(connection)}: write "
                'dependencies=[Depends(limited(...))] into the decorator of the route, as in @app.get("/", '
                "dependencies=[...])"
            )
        # In a thread, nobody would await the result.
        asyncio.get_running_loop()
        return self._decide(connection, **results)


def _is_dependency(value: object) -> bool:
    """Whether it is a ``Depends`` of FastAPI, without which there is none."""
    params: Any = sys.modules.get("fastapi.params")
    return params is not None and isinstance(value, params.Depends)


def _result(place: str, what: str) -> Callable[[Any], Any]:
    """The function for an option of ``Rule`` that returns the result of a dependency."""
    return lambda request: request.native[place][what]


def _endpoint(scope: Scope) -> Endpoint:
    if "endpoint" not in scope:
        raise InvalidLimiter("a limit as text is of an endpoint, and this request has none: write name=...")
    return endpoint_of(scope["endpoint"])


class LimitsMiddleware:
    """The middleware that ``setup`` adds: an ``ASGIMiddleware`` that supports ``limited`` routes."""

    def __init__(
        self,
        app: Application,
        rules: GivenRules | VersionedRules = (),
        *,
        store: Any = None,
        **options: Unpack[GateOptions],
    ) -> None:
        self.app = app
        self.gate = gate_of(rules, **options, encoded=True, in_loop=True)
        self.gates = AppGates(self.gate, _endpoint, store, **options, encoded=True, in_loop=True)
        limits = at_start(self.gate).body_limits
        # Inside: a request ends with the status that is sent, and with the turn of its last bytes.
        self._inner = ASGIMiddleware(app, limits, **options) if limits else app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return await (self._visit if scope["type"] in ("http", "websocket") else self.app)(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ASGIRequest(scope)
        if self._inner is not self.app and scope["type"] == "http":
            max_bytes = self.gate.max_body_bytes(request)
            if max_bytes is not None and declares_more_than(max_bytes, request):
                return await send_answer(body_too_large(max_bytes), scope, receive, send)
        passage = await self.gate.enter_unguarded(request) if self.gate.is_awaited else self.gate.enter(request)
        if isinstance(passage, Passage) and passage.cleanup is not None:
            await passage.cleanup.wait_turn_async()
        if isinstance(passage, Denial):
            return await self._deny(passage, self.gate.answer(request, passage), scope, receive, send)
        visit = _Visit(passage, receive, send)
        scope[VISIT], scope[GATES] = visit, self.gates
        return await visit.response.run(self._inner, scope)

    async def _deny(self, denial: Denial, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send_answer(answer, scope, receive, send)

        async def raise_it(scope: Scope, receive: Receive, send: Send) -> None:
            raise LimitDenied(denial, answer)

        # The application's own exception middleware is further inside, behind the other middleware.
        handlers = {LimitDenied: _send_denial, **(scope["app"].exception_handlers if "app" in scope else {})}
        for key in (500, Exception):
            handlers.pop(key, None)
        return await ExceptionMiddleware(raise_it, handlers)(scope, receive, send)


class _Visit(AsyncVisit):
    """A visit whose response gets the fields, and ends it."""

    __slots__ = ("response",)

    def __init__(self, passage: Passage | None, receive: Receive, send: Send) -> None:
        super().__init__(passage)
        self.response = TrackedResponse(list(self.fields.items()), self.cleanup, receive, send)
        self.renewal = self.response.renewal

    def add(self, passage: Passage) -> None:
        super().add(passage)
        self.response.fields = list(self.fields.items())

    def deny(self, denial: Denial) -> None:
        super().deny(denial)
        self.response.fields = list(self.fields.items())


async def _send_denial(connection: Request | WebSocket, error: Exception) -> Response | None:
    assert isinstance(error, LimitDenied)
    answer = error.answer
    response = Response(answer.body, answer.status)
    response.raw_headers = encoded(answer.fields)
    if isinstance(connection, Request):
        return response
    if "websocket.http.response" in connection.scope.get("extensions", ()):
        await connection.send_denial_response(response)
    else:
        # The server answers by 403.
        await connection.close(TRY_AGAIN_LATER, reason_of(answer.status))
    return None
