"""Limits in a FastAPI or Starlette application: of all requests and of single routes. See docs/frameworks.md.

``setup(app, [Rule(limiter)])`` and ``Depends(limited(limiter))``. Needs ``forebay[fastapi]``, or Starlette alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
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

from forebay.contrib.views import Asker, AsyncVisit, NotInstalled, RuleOptions, rules_of
from forebay.core.limiter import Limiter
from forebay.web import Answer, ASGIMiddleware, BodyLimit, Denial, Gate, Passage, Rule
from forebay.web.answers import reason_of
from forebay.web.asgi import TRY_AGAIN_LATER, Application, Receive, Send, TrackedResponse, send_answer
from forebay.web.native_requests import ASGIRequest
from forebay.web.request import KeyFunction, Scope
from forebay.web.rules import check_event_loop

__all__ = ["LimitDenied", "LimitsMiddleware", "limited", "setup"]

ASKER: Final = "forebay.asker"
VISIT: Final = "forebay.visit"


class LimitDenied(HTTPException):
    """Raised for a request that is denied, by a dependency or the rules of ``setup``.

    ``setup`` has it answered by the problem report, or by what the rule says. An exception handler of your own for it,
    or for 429, finds here: ``denial`` (why), ``answer`` (what would be sent), ``headers`` (the fields to send along).
    """

    def __init__(self, denial: Denial, answer: Answer) -> None:
        headers = {name: value for name, value in answer.headers if name.lower() != "content-type"}
        super().__init__(answer.status, reason_of(answer.status), headers)
        self.denial, self.answer = denial, answer


def setup(
    app: Starlette,
    rules: Iterable[Rule | BodyLimit] = (),
    *,
    client: KeyFunction | None = None,
    headers: str | Iterable[str] = "draft-10",
    partition_keys: bool = False,
) -> None:
    """Ask `rules` about every request of `app`, and see to the limits of its routes.

    See ``Gate`` for the arguments. Middleware that is added later stands outside: of its kind should be what finds out
    who is asking. A ``CORSMiddleware`` that is there already is moved outside, so that a browser may read denials.
    """
    # What is wrong with them is said here, and not when Starlette makes its middleware, at the first request.
    gate = Gate(rules, client=client, headers=headers, partition_keys=partition_keys, in_loop=True)
    rules = [*gate.rules, *gate.body_limits]
    app.add_middleware(LimitsMiddleware, rules=rules, client=client, headers=headers, partition_keys=partition_keys)
    # In turn, so that they stay in order.
    known: list[Any] = app.user_middleware
    for middleware in [one for one in known if one.cls is CORSMiddleware][::-1]:
        app.user_middleware.remove(middleware)
        app.user_middleware.insert(0, middleware)
    app.add_exception_handler(LimitDenied, _answer)  # type: ignore[arg-type]  # one for both kinds of connection


def limited(*limits: Limiter | Rule, **options: Unpack[RuleOptions]) -> Callable[[HTTPConnection], Awaitable[None]]:
    """A dependency, ``Depends(limited(limiter))``, of a route or a router; the options are those of ``Rule``.

    Several limiters in one are asked as one, all or none. For a WebSocket's route, too. Needs ``setup``.
    """
    rules = rules_of(limits, options)
    check_event_loop(rules, in_loop=True)

    async def ask(connection: HTTPConnection) -> None:
        scope = connection.scope
        visit: _Visit | None = scope.get(VISIT)
        if visit is None:
            raise NotInstalled("a route is limited, but its application isn't set up: setup(app)")
        asker: Asker = scope[ASKER]
        answer = await asker.ask_async(ASGIRequest(scope), visit, rules)
        if answer is not None:
            assert visit.denial is not None
            raise LimitDenied(visit.denial, answer)

    return ask


class LimitsMiddleware:
    """What ``setup`` adds: an ``ASGIMiddleware`` that sees to ``limited`` routes, too."""

    def __init__(
        self,
        app: Application,
        rules: Iterable[Rule | BodyLimit] = (),
        *,
        client: KeyFunction | None = None,
        headers: str | Iterable[str] = "draft-10",
        partition_keys: bool = False,
    ) -> None:
        self.app = app
        told = {"headers": headers, "partition_keys": partition_keys, "encoded": True, "in_loop": True}
        self.gate = Gate(rules, client=client, **told)  # type: ignore[arg-type]  # as the parameters are
        self.asker = Asker(self.gate, **told)
        body_limits = self.gate.body_limits
        self.visited = ASGIMiddleware(self._visit, body_limits) if body_limits else self._visit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return await (self.visited if scope["type"] in ("http", "websocket") else self.app)(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ASGIRequest(scope)
        passage = await self.gate.enter_async(request) if self.gate.is_awaited else self.gate.enter(request)
        if isinstance(passage, Denial):
            return await self._deny(passage, self.gate.answer(request, passage), scope, receive, send)
        visit = _Visit(passage, receive, send)
        scope[VISIT], scope[ASKER] = visit, self.asker
        return await visit.ended.run(self.app, scope)

    async def _deny(self, denial: Denial, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send_answer(answer, scope, receive, send)

        async def raise_it(scope: Scope, receive: Receive, send: Send) -> None:
            raise LimitDenied(denial, answer)

        # The application's own stand further inside, behind the rest of the middleware.
        handlers = {LimitDenied: _answer, **(scope["app"].exception_handlers if "app" in scope else {})}
        for key in (500, Exception):
            handlers.pop(key, None)
        return await ExceptionMiddleware(raise_it, handlers)(scope, receive, send)


class _Visit(AsyncVisit):
    """A visit whose response gets the fields, and whose end is told."""

    __slots__ = ("ended",)

    def __init__(self, passage: Passage | None, receive: Receive, send: Send) -> None:
        super().__init__(passage)
        self.ended = TrackedResponse(list(self.fields.items()), self.cleanup, receive, send)
        self.renewal = self.ended.renewal

    def add(self, passage: Passage) -> None:
        super().add(passage)
        self.ended.fields = list(self.fields.items())

    def deny(self, denial: Denial) -> None:
        super().deny(denial)
        self.ended.fields = list(self.fields.items())


async def _answer(connection: Request | WebSocket, error: Exception) -> Response | None:
    assert isinstance(error, LimitDenied)
    answer = error.answer
    response = Response(answer.body, answer.status)
    response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.fields]
    if isinstance(connection, Request):
        return response
    if "websocket.http.response" in connection.scope.get("extensions", ()):
        await connection.send_denial_response(response)
    else:
        # The server makes a 403 of it.
        await connection.close(TRY_AGAIN_LATER, reason_of(answer.status))
    return None
