"""Limits in an aiohttp server: for all requests and for single handlers. See docs/frameworks.md.

``setup(app, [Rule(limiter)])`` and ``@limited(limiter)``. Needs ``forebay[aiohttp]``. For clients see
``forebay.contrib.aiohttp_client``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from types import NoneType
from typing import Any, Final, Protocol, TypeVar, Unpack
from urllib.parse import unquote

from forebay.extras import Needs

with Needs("aiohttp", __name__):
    from aiohttp import web
    from aiohttp.abc import AbstractView

from forebay.contrib.endpoints import Endpoint, endpoint_of
from forebay.contrib.views import (
    AppGates,
    AsyncVisit,
    Limit,
    NotInstalled,
    RuleOptions,
    Rules,
    Visit,
    check_loop_of,
    remember_rules,
    rules_of,
    unstacked,
    without_body_limits,
)
from forebay.errors import InvalidLimiter, short_repr
from forebay.web import DISCONNECTED
from forebay.web.functions import has_to_be_awaited
from forebay.web.live_gate import VersionedRules, gate_of
from forebay.web.native_requests import methods, readings
from forebay.web.options import GateOptions, GivenRules
from forebay.web.rules import outcome

__all__ = ["limited", "middleware", "setup"]

# aiohttp 3.14 warns of keys that are text.
GATES: Final[Any] = web.RequestKey("forebay.gates", AppGates) if hasattr(web, "RequestKey") else "forebay.gates"
VISIT: Final[Any] = web.RequestKey("forebay.visit", AsyncVisit) if hasattr(web, "RequestKey") else "forebay.visit"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Middleware(Protocol):
    def __call__(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]: ...


AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Awaitable[web.StreamResponse]])


class AiohttpRequest:
    """The request that key functions receive: `native` is aiohttp's."""

    __slots__ = ("native",)

    def __init__(self, request: web.Request) -> None:
        self.native = request

    @property
    def method(self) -> str:
        """A WebSocket's is ``GET``: aiohttp gives every request to its handler, whatever its ``Upgrade`` field."""
        return self.native.method

    @property
    def methods(self) -> tuple[str, ...]:
        return methods(self.method, self.header)

    @property
    def path(self) -> str:
        """The path that aiohttp routes: an encoded slash doesn't end a segment."""
        segments = self.native.rel_url.raw_path.split("/")
        return "/".join([unquote(segment).replace("/", "%2F") for segment in segments])

    @property
    def paths(self) -> tuple[str, ...]:
        """Also the path of the resource: aiohttp has found it by now, however the request's path was written."""
        match = self.native.match_info
        resource = match.route.resource
        paths = [self.path] if resource is None else [self.path, resource.canonical]
        root = _root_of(match)
        return readings(*paths, *[path.removeprefix(root) for path in paths if root])

    @property
    def peer(self) -> str | None:
        return self.native.remote or None

    @property
    def user(self) -> str | None:
        """``request["user"]``, which an outer middleware sets."""
        user = self.native.get("user")
        return None if user is None else str(user)

    def header(self, name: str) -> str | None:
        values = self.native.headers.getall(name, [])
        return ",".join(values) if values else None


def _root_of(match: web.UrlMappingMatchInfo) -> str:
    """The path of the current application, if it is another one's sub-application."""
    place = match.apps.index(match.current_app)
    if place == 0:
        return ""
    infos = [resource.get_info() for resource in match.apps[place - 1].router.resources()]
    return next((unquote(info.get("prefix", "")) for info in infos if info.get("app") is match.current_app), "")


def setup(
    app: web.Application,
    rules: GivenRules | VersionedRules = (),
    *,
    store: Any = None,
    **options: Unpack[GateOptions],
) -> None:
    """Charge `rules` for every request of `app` and its sub-applications, and install the limits of their handlers.

    `store` has the limits that handlers give as text. See ``Gate`` for the other arguments.
    """
    app.middlewares.append(middleware(rules, store=store, **options))
    app.on_response_prepare.append(_begin)


def middleware(
    rules: GivenRules | VersionedRules = (),
    *,
    store: Any = None,
    **options: Unpack[GateOptions],
) -> Middleware:
    """The middleware that ``setup`` installs, for ``web.Application(middlewares=[...])``.

    By itself it comes too late for the fields of a response that its handler starts to send, such as a WebSocket's.
    """
    remedy = "say web.Application(client_max_size=...), which is for requests"
    for_rates = (
        "aiohttp reads and sends bodies by itself, so limit the rate in a proxy, or serve those paths by WSGI or ASGI"
    )
    gate = without_body_limits(gate_of(rules, **options, in_loop=True), remedy, for_rates)
    gates = AppGates(gate, _endpoint, store, **options, in_loop=True)

    @web.middleware
    async def limits(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[GATES] = gates
        visit = request[VISIT] = AsyncVisit()
        status: int | None = None
        is_whole = True
        try:
            denied = await _decide(request, visit)
            response = await handler(request) if denied is None else denied
            status, is_whole = response.status, _is_whole(response)
            if not response.prepared:
                response.headers.update(visit.fields)
            return response
        except web.HTTPException as error:
            status = error.status
            error.headers.update(visit.fields)
            raise
        except asyncio.CancelledError:
            status, is_whole = DISCONNECTED, False
            raise
        finally:
            if visit.cleanup and is_whole and visit.cleanup.background is not None:
                # A release takes a round trip: it ends before the client has its response and can ask again.
                _end(request, visit, status)
                await visit.cleanup.wait()
            elif visit.cleanup:
                _end_later(request, visit, status)

    return limits


def limited(
    *limits: Limit, name: str | None = None, **options: Unpack[RuleOptions]
) -> Callable[[AnyHandler], AnyHandler]:
    """A decorator for handlers and for the methods of a ``web.View``; the options are those of ``Rule``.

    A limit is a limiter, a ``Rule``, a ``Deny``, or text such as ``"5/minute; 100/hour"``: token buckets of this
    handler, or of `name`, in the `store` of ``setup``. Several limits, and decorators directly above each other, are
    charged as one, all or none. Raises ``InvalidLimiter`` for a handler that isn't async.
    """
    rules = rules_of(limits, options, name)
    check_loop_of(rules, in_loop=True)

    def decorate(handler: AnyHandler) -> AnyHandler:
        is_view = isinstance(handler, type) and issubclass(handler, AbstractView)
        if not is_view and not has_to_be_awaited(handler):
            raise InvalidLimiter(
                f"limited(...) is for async handlers, and {short_repr(handler)} isn't one: write async def"
            )
        inner, all_rules = unstacked(handler, rules)

        @wraps(inner)
        async def decide_first(*arguments: Any) -> web.StreamResponse:
            # A view's method has no request, but its view has.
            request = arguments[-1].request if isinstance(arguments[-1], web.View) else arguments[-1]
            visit = request.get(VISIT)
            if visit is None:
                raise NotInstalled("a handler is limited, but its application isn't set up: call setup(app)")
            denied = await _decide(request, visit, all_rules, (arguments[0], inner))
            return await inner(*arguments) if denied is None else denied

        remember_rules(decide_first, inner, all_rules)
        return decide_first  # type: ignore[return-value]

    return decorate


def _endpoint(source: tuple[Any, Any]) -> Endpoint:
    """The endpoint of a handler, or of a view and its method, which the view's class may have inherited."""
    view, handler = source
    if not isinstance(view, AbstractView):
        return endpoint_of(handler)
    return Endpoint(f"{endpoint_of(type(view)).name}.{handler.__name__}", type(view))


async def _decide(
    request: web.Request, visit: Visit, rules: Rules | None = None, source: tuple[Any, Any] | None = None
) -> web.StreamResponse | None:
    answer = await request[GATES].decide_async(AiohttpRequest(request), visit, rules, source)
    if answer is None:
        return None
    return web.Response(body=answer.body, status=answer.status, headers=answer.headers)


def _is_whole(response: web.StreamResponse) -> bool:
    """Whether its handler has produced all of it."""
    return response.prepared or (
        isinstance(response, web.Response) and isinstance(response.body, (bytes, bytearray, NoneType))
    )


def _end(request: web.Request, visit: AsyncVisit, status: int | None) -> None:
    """`status` None: there is no response."""
    is_gone = request.transport is None
    visit.end(DISCONNECTED if is_gone and status is None else outcome(status or 500, is_gone))


def _end_later(request: web.Request, visit: AsyncVisit, status: int | None) -> None:
    """End the visit when the response has been sent: the request's task then ends."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: _end(request, visit, status))


async def _begin(request: web.Request, response: web.StreamResponse) -> None:
    visit = request.get(VISIT)
    if visit is not None:
        response.headers.update(visit.fields)
        if visit.cleanup.background is not None:
            visit.cleanup.begin(response.status)
            await visit.cleanup.wait()
