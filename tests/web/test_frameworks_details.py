"""The frameworks' extensions in one process: errors and rare cases."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flask
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import FileResponse, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from fastapi import Depends, FastAPI
from flask.views import MethodView
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import forebay.contrib.aiohttp
import forebay.contrib.fastapi
from forebay import Concurrency, InvalidLimiter, LimitsDisabledWarning, MinInterval, Store, TokenBucket
from forebay.contrib.aiohttp import AiohttpRequest
from forebay.contrib.flask import Limits
from forebay.contrib.views import NotInstalled, Visit
from forebay.redis import RedisStore
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import (
    AddressList,
    Answer,
    Ban,
    BodyLimit,
    ByteRate,
    ClientAddress,
    Deny,
    Passage,
    Rule,
    everyone,
    options,
)

if not settings.configured:
    settings.configure(
        SECRET_KEY="known to everybody",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"],
    )

import forebay.contrib.django as in_django

urlpatterns: list[Any] = []


class Its:
    """The limits of a test."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000)
        self.store = Store.private(keys=100, clock=self.clock)
        self.two = TokenBucket(self.store, "two", "2/day")
        self.three = TokenBucket(self.store, "three", "3/day")
        self.held = Concurrency(self.store, "held", 1, lease="0.3s")
        self.rules: list[Any] = [Rule(self.three, key=everyone)]

    def left(self) -> tuple[int, int, int]:
        two, three, held = (limiter.peek("everyone", 0).remaining for limiter in (self.two, self.three, self.held))
        return two, three, held

    async def outlast_the_lease(self) -> None:
        for _ in range(4):
            self.clock.advance(0.2)
            # The event loop renews the lease every 0.1 s of its clock, so before this sleep ends, even if it runs late.
            await asyncio.sleep(0.15)
            assert self.left()[2] == 0


@pytest.fixture
def its() -> Iterator[Its]:
    its = Its()
    with its.store:
        yield its


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a third party."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


# All frameworks


def test_method_override_fields_are_read() -> None:
    fields = {"X-HTTP-Method-Override": "delete", "X-HTTP-Method": "PUT, POST"}
    ours: list[Any] = [in_django.DjangoRequest(RequestFactory().get("/", headers=fields))]
    ours.append(AiohttpRequest(make_mocked_request("GET", "/", fields)))
    for request in ours:
        assert request.methods == ("GET", "DELETE", "PUT", "POST")


def test_invalid_limits_of_a_view_are_refused(its: Its) -> None:
    limited = forebay.contrib.fastapi.limited
    with pytest.raises(InvalidLimiter, match="no limiter is given"):
        limited()
    with pytest.raises(InvalidLimiter, match=r"cost: beside a Rule, an option belongs into it, Rule\(limiter, ...\)"):
        limited(its.rules[0], cost=2)
    with pytest.raises(InvalidLimiter, match="charge_on has no effect on it"):
        limited(its.held, charge_on={500})
    with RedisStore("redis://127.0.0.1:1") as one, RedisStore("redis://127.0.0.1:1") as another:
        one_limit, other_limit = TokenBucket(one, "one", "1/day"), TokenBucket(another, "other", "1/day")
        with pytest.raises(InvalidLimiter, match="belong to one store"):
            limited(one_limit, other_limit)
        limited_view = in_django.limited(one_limit)(lambda request: HttpResponse())
        with pytest.raises(InvalidLimiter, match="belong to one store"):
            in_django.limited(other_limit)(limited_view)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        limited(its.two, rate="1/day")  # type: ignore[call-arg]


@pytest.mark.parametrize("encode", [str, str.encode])
def test_visit_joins_list_fields_and_replaces_others(encode: Callable[[str], Any]) -> None:
    names = [encode(name) for name in ("RateLimit", "X-RateLimit-Limit")]
    if encode is str.encode:
        names = [name.lower() for name in names]
    visit = Visit(Passage([(names[0], encode('"a";r=1')), (names[1], encode("1"))]))
    visit.add(Passage([(names[0], encode('"b";r=2')), (names[1], encode("2"))]))
    assert visit.fields == {names[0]: encode('"a";r=1, "b";r=2'), names[1]: encode("2")}


@pytest.mark.parametrize("framework", ["flask", "starlette", "aiohttp"])
def test_every_extension_switches_off_and_observes(framework: str, its: Its, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of views, too."""
    monkeypatch.setattr(options, "_warning", Seldom())
    seen: list[str] = []
    given = {"on_denied": lambda request, denial: seen.append(denial.rule.limiter.name)}
    for more, statuses in (({"enabled": False}, [200] * 4), ({}, [200, 200, 429, 429])):
        with pytest.warns(LimitsDisabledWarning) if more else contextlib.nullcontext():
            assert _statuses(framework, its, {**given, **more}, key=everyone) == statuses
    assert seen == ["two", "three"]


@pytest.mark.parametrize("framework", ["flask", "starlette", "aiohttp"])
@pytest.mark.parametrize("place", ["application", "view"])
def test_every_extension_holds_requests_back(framework: str, place: str, its: Its) -> None:
    gap = Rule(MinInterval(its.store, "gap", "5s"), key=everyone, delay="1 minute")
    its.rules = [gap] if place == "application" else []
    its.two = gap if place == "view" else TokenBucket(its.store, "enough", "9/day")  # type: ignore[assignment]
    options = {"key": everyone} if place == "application" else {}
    assert _statuses(framework, its, {}, **options) == [200] * 4
    assert its.clock.now() == 1015


@pytest.mark.parametrize("framework", ["flask", "starlette", "aiohttp"])
def test_every_extension_refuses_exempts_and_bans(framework: str, its: Its) -> None:
    anywhere = AddressList(["0.0.0.0/1", "128.0.0.0/1"])
    its.rules.append(Deny(anywhere))
    assert _statuses(framework, its, {}, key=everyone) == [403] * 4
    its.rules = []
    assert _statuses(framework, its, {}, exempt=anywhere) == [200] * 4
    ban = Ban(its.store, "guessers", "2/day", lasts="1 hour")
    assert _statuses(framework, its, {}, key=everyone, ban=ban) == [200, 200, 429, 429]
    its.clock.advance(3599)
    its.two.reset("everyone")
    assert _statuses(framework, its, {}, key=everyone, ban=ban) == [429] * 4
    its.clock.advance(1)
    assert _statuses(framework, its, {}, key=everyone, ban=ban) == [200, 200, 429, 429]


@pytest.mark.parametrize("framework", ["flask", "starlette"])
def test_extensions_meter_bytes_and_hold_permits_meanwhile(framework: str, its: Its) -> None:
    slow = TokenBucket(its.store, "slow", "10 B/second")
    client = ClientAddress(trusted_proxies=["127.0.0.1"], header="X-Forwarded-For")
    rules = [Rule(its.held, key=everyone), ByteRate(slow, path="/slow")]
    fields = {"X-Forwarded-For": "192.0.2.7"}
    begin = its.clock.now()
    if framework == "flask":
        app = flask.Flask(__name__)
        Limits(app, rules, client=client)
        app.get("/slow")(lambda: iter(["x" * 15, "y" * 15]))
        response = app.test_client().get("/slow", headers=fields, buffered=False)
        parts = [(len(part), its.left()[2]) for part in response.response]
        assert response.status_code == 200
        response.close()
    else:
        fast = FastAPI()
        fast.get("/slow")(lambda: PlainTextResponse("x" * 30))
        forebay.contrib.fastapi.setup(fast, rules, client=client)
        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        sent = call_asgi(fast, "/slow", client=("127.0.0.1", 1), headers=headers)
        parts = [(len(message["body"]), 0) for message in sent[1:]]
    assert sum(length for length, _ in parts) == 30
    assert [left for _, left in parts[:2]] == [0, 0]
    assert its.clock.now() == begin + 2
    assert slow.peek("192.0.2.7").remaining == 0
    assert its.left()[2] == 1


def _statuses(framework: str, its: Its, options: Any, **of_view: Any) -> list[int]:
    """Of four requests to a view that allows two, of an application that allows three."""
    if framework == "flask":
        flasks, limits = flask_app(its, **options)
        flasks.get("/")(limits.limit(its.two, **of_view)(lambda: "there"))
        return [flasks.test_client().get("/").status_code for _ in range(4)]
    if framework == "starlette":
        app = FastAPI(dependencies=[Depends(forebay.contrib.fastapi.limited(its.two, **of_view))])
        forebay.contrib.fastapi.setup(app, its.rules, **options)
        app.get("/")(lambda: "there")
        return [call_asgi(app, client=("127.0.0.1", 4711))[0]["status"] for _ in range(4)]

    @forebay.contrib.aiohttp.limited(its.two, **of_view)
    async def handle(request: web.Request) -> web.Response:
        return web.Response()

    server = web.Application()
    server.router.add_get("/", handle)
    forebay.contrib.aiohttp.setup(server, its.rules, **options)
    return [status for status, _ in call_aiohttp(server, 4)]


# Flask


def flask_app(its: Its, *more: Rule | Deny | BodyLimit | ByteRate, **options: Any) -> tuple[flask.Flask, Limits]:
    app = flask.Flask(__name__)
    limits = Limits(app, [*its.rules, *more], **options)
    return app, limits


def test_flask_needs_the_extension(its: Its) -> None:
    for has_another in False, True:
        app = flask.Flask(__name__)
        app.testing = True
        app.get("/")(Limits().limit(its.two, key=everyone)(lambda: "there"))
        if has_another:
            limits = Limits(app)
            with pytest.raises(InvalidLimiter, match="has Limits already"):
                limits.init_app(app)
        with pytest.raises(NotInstalled, match=r"Limits\(app\)"):
            app.test_client().get("/")
    assert its.left() == (2, 3, 1)


def test_flask_charges_stacked_decorators_as_one(its: Its) -> None:
    app = flask.Flask(__name__)
    limits = Limits(app)
    one = limits.limit(its.two, key=everyone)
    other = limits.limit(its.three, key=everyone)
    app.get("/stacked", endpoint="stacked")(other(one(lambda: "there")))
    app.get("/between", endpoint="between")(other(unwrapped(one(lambda: "there"))))
    client = app.test_client()
    assert [client.get("/stacked").status_code for _ in range(3)] == [200, 200, 429]
    assert its.left() == (0, 1, 1)
    # The outer decorator admits the request before the inner one runs.
    assert client.get("/between").status_code == 429
    assert its.left() == (0, 0, 1)


def test_flask_releases_permits_when_a_view_raises(its: Its) -> None:
    app, limits = flask_app(its)
    app.testing = True

    @app.get("/")
    @limits.limit(its.held, its.two, key=everyone)
    @limits.limit(its.three, key=everyone, charge_on=range(500))
    def view() -> str:
        assert its.left() == (1, 1, 0)
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        app.test_client().get("/")
    assert its.left() == (1, 2, 1)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_flask_holds_permits_while_it_sends_a_file(its: Its, method: str) -> None:
    app, limits = flask_app(its)
    app.get("/")(limits.limit(its.held, key=everyone)(lambda: flask.send_file(Path(__file__))))
    response = app.test_client().open("/", method=method)
    assert its.left()[2] == 0
    response.close()
    assert its.left()[2] == 1


def test_flask_limits_async_views(its: Its) -> None:
    app, limits = flask_app(its)

    @app.get("/")
    @limits.limit(its.two, key=everyone)
    async def view() -> str:
        return "there"

    assert [app.test_client().get("/").status_code for _ in range(3)] == [200, 200, 429]


def test_flask_exempts_blueprints_and_limits_bodies(its: Its) -> None:
    app, limits = flask_app(its, BodyLimit(4), headers="x-ratelimit")
    free = flask.Blueprint("free", __name__)
    free.post("/free")(lambda: "there")
    app.register_blueprint(limits.exempt(free))
    app.post("/")(lambda: "there")
    client = app.test_client()
    assert client.post("/", data=b"12345").status_code == 413
    assert client.post("/", data=b"1234").headers["X-RateLimit-Remaining"] == "2"
    assert [client.post("/free").status_code for _ in range(5)] == [200] * 5
    assert its.left()[1] == 2


def test_flask_denies_by_list_without_rules_and_on_exempt_views(its: Its) -> None:
    denied = Deny(AddressList("127.0.0.1"))
    its.rules = []
    alone, _ = flask_app(its, denied)
    assert alone.test_client().get("/nowhere").status_code == 403
    app, limits = flask_app(its, Rule(its.two), denied)
    app.get("/")(limits.exempt(lambda: "there"))
    assert [app.test_client().get("/").status_code for _ in range(3)] == [403] * 3
    elsewhere = {"REMOTE_ADDR": "192.0.2.1"}
    assert [app.test_client().get("/", environ_overrides=elsewhere).status_code for _ in range(3)] == [200] * 3


def test_flask_refuses_an_object_that_is_not_a_view(its: Its) -> None:
    _, limits = flask_app(its)
    for decorate in (limits.exempt, limits.limit(its.two)):
        for neither in ("view", MethodView):
            with pytest.raises(InvalidLimiter, match=r"is for views and blueprints, .* is neither: for a class say "):
                decorate(neither)  # type: ignore[type-var]


def test_flask_sends_a_shadow_ban_as_a_success(its: Its) -> None:
    app, limits = flask_app(its)
    banned = Answer(200, (("Content-Type", "text/plain"),), b"there")
    app.get("/")(limits.limit(its.two, key=everyone, answer=banned)(lambda: ("there", {"Content-Type": "text/plain"})))
    app.errorhandler(429)(lambda error: ("no", 429))
    responses = [app.test_client().get("/") for _ in range(3)]
    assert {(response.status_code, response.data) for response in responses} == {(200, b"there")}
    # Its header fields do not reveal the limit.
    assert [sorted(response.headers.keys()) for response in responses] == [sorted(responses[0].headers.keys())] * 3
    assert responses[2].headers["RateLimit"].startswith('"three";r=0')
    assert its.left() == (0, 0, 1)


def test_flask_keeps_the_header_fields_of_a_denial_after_hooks(its: Its) -> None:
    app, limits = flask_app(its)
    app.get("/")(limits.limit(its.two, key=everyone)(lambda: "there"))

    @app.after_request
    def wrapped(response: flask.Response) -> flask.Response:
        envelope = flask.jsonify(data=response.get_data(as_text=True))
        envelope.status_code = response.status_code
        envelope.headers["RateLimit"] = "mine"
        return envelope

    for status, remaining in ((200, 1), (200, 0), (429, 0)):
        response = app.test_client().get("/")
        assert response.status_code == status
        if status == 200:
            assert f'"two";r={remaining}' in response.headers["RateLimit"]
    assert response.headers["RateLimit"] == "mine"
    assert response.headers["Retry-After"] == "43200"


def test_flask_error_handler_can_send_a_nested_request(its: Its) -> None:
    app, limits = flask_app(its)
    app.add_url_rule("/kept", "kept", lambda: "kept")
    app.add_url_rule("/", "fresh", limits.limit(its.two, key=everyone, cost=2)(lambda: "fresh"))

    @app.errorhandler(429)
    def otherwise(error: Exception) -> Any:
        flask.request.environ["PATH_INFO"] = "/kept"
        return b"".join(app.wsgi_app(flask.request.environ, lambda *begun: None)), 429  # type: ignore[arg-type,return-value]

    answers = [app.test_client().get("/") for _ in range(2)]
    assert [(answer.status_code, answer.data) for answer in answers] == [(200, b"fresh"), (429, b"kept")]
    assert answers[1].headers["Retry-After"] == "86400"


def test_flask_holds_permits_if_outer_middleware_starts_late(its: Its) -> None:
    app = flask.Flask("late")
    inner = app.wsgi_app
    app.wsgi_app = lambda environ, start_response: (yield from inner(environ, start_response))  # type: ignore[method-assign,misc]
    Limits(app, [Rule(its.held, key=everyone), Rule(its.three, key=everyone, charge_on={401})])
    app.get("/")(lambda: "there")
    assert [app.test_client().get("/").status_code for _ in range(4)] == [200] * 4
    assert its.left() == (2, 3, 1)


def test_flask_releases_permits_taken_during_the_body_at_once(its: Its) -> None:
    app, limits = flask_app(its)
    part = limits.limit(its.held, key=everyone)(lambda: "there")

    @app.get("/")
    def stream() -> flask.Response:
        return flask.Response(flask.stream_with_context(part() for _ in range(3)))

    assert app.test_client().get("/").data == b"there" * 3
    assert its.left()[2] == 1


# Starlette


def call_asgi(app: Any, path: str = "/", kind: str = "http", body: bytes = b"", **scope: Any) -> list[dict[str, Any]]:
    """Call an ASGI application; return the messages that it sends."""
    sent: list[dict[str, Any]] = []
    headers = [(b"content-length", str(len(body)).encode())] if body else []
    base_scope = {"type": kind, "method": "GET", "path": path, "query_string": b"", "headers": headers, "client": None}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body} if kind == "http" else {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(base_scope | scope, receive, send))
    return sent


def starlette_app(its: Its, *dependencies: Callable[[HTTPConnection], Any]) -> Starlette:
    app = Starlette()

    async def endpoint(connection: HTTPConnection) -> None:
        for depend in dependencies:
            await depend(connection)

    async def http(scope: Any, receive: Any, send: Any) -> None:
        await endpoint(HTTPConnection(scope))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    app.mount("/", http)
    return app


def test_dependency_of_fastapi_refuses_to_be_a_decorator(its: Its) -> None:
    """In the first order FastAPI fails by itself; in the second the route would have no limit."""
    for dependency in (
        forebay.contrib.fastapi.limited(its.two, key=everyone),
        forebay.contrib.fastapi.limited("5/minute", cost=Depends(lambda: 1)),
    ):
        app: Any = FastAPI()
        with pytest.raises(
            InvalidLimiter, match=r"limits nothing as a decorator of <function .*dependencies=\[Depends"
        ):
            app.get("/")(dependency(lambda: "there"))
        with pytest.raises(InvalidLimiter, match="limits nothing as a decorator"):
            dependency(app.get("/")(lambda: "there"))


def test_dependency_of_fastapi_fails_where_nobody_awaits_it(its: Its) -> None:
    dependency = forebay.contrib.fastapi.limited(its.two, key=everyone)
    with pytest.raises(RuntimeError, match="no running event loop"):
        dependency(HTTPConnection({"type": "http"}))


def test_starlette_needs_the_middleware(its: Its) -> None:
    app = starlette_app(its, forebay.contrib.fastapi.limited(its.two, key=everyone))
    with pytest.raises(NotInstalled, match=r"setup\(app\)"):
        call_asgi(app)


def test_denying_dependency_refunds_the_others(its: Its) -> None:
    limited = forebay.contrib.fastapi.limited
    app = starlette_app(
        its,
        limited(its.held, key=everyone),
        limited(its.three, key=everyone, charge_on=range(600)),
        limited(its.two, key=everyone),
    )
    forebay.contrib.fastapi.setup(app)
    assert [call_asgi(app)[0]["status"] for _ in range(3)] == [200, 200, 429]
    assert its.left() == (0, 1, 1)
    denied = call_asgi(app)[0]
    fields = [name for name, _ in denied["headers"]]
    assert sorted(fields) == sorted(set(fields))
    assert dict(denied["headers"])[b"ratelimit"].startswith(b'"two";r=0;')


def test_exception_handlers_get_a_denial_by_the_rules(its: Its) -> None:
    for kind in (forebay.contrib.fastapi.LimitDenied, 429):
        app = starlette_app(its)
        forebay.contrib.fastapi.setup(app, its.rules)

        async def answer(request: Any, error: Any) -> PlainTextResponse:
            return PlainTextResponse(" ".join(error.denial.violated), 418, error.headers)

        app.add_exception_handler(kind, answer)
        assert its.left()[1] == 3
        assert [call_asgi(app)[0]["status"] for _ in range(3)] == [200, 200, 200]
        start, body = call_asgi(app)
        assert (start["status"], body["body"]) == (418, b"three")
        assert b"retry-after" in dict(start["headers"])
        its.clock.advance(86400)


@pytest.mark.parametrize("place", ["before setup", "after setup", "in the constructor"])
@pytest.mark.parametrize("is_by_rule", [True, False])
def test_setup_keeps_the_handler_of_a_denial(its: Its, place: str, is_by_rule: bool) -> None:
    async def answer(request: Any, error: Any) -> PlainTextResponse:
        return PlainTextResponse("mine", 418)

    denied = forebay.contrib.fastapi.LimitDenied
    app = FastAPI(exception_handlers={denied: answer} if place == "in the constructor" else None)
    if place == "before setup":
        app.exception_handler(denied)(answer)
    rule = Rule(its.two, key=everyone)
    forebay.contrib.fastapi.setup(app, [rule] if is_by_rule else [])
    if place == "after setup":
        app.exception_handler(denied)(answer)
    dependencies = [] if is_by_rule else [Depends(forebay.contrib.fastapi.limited(rule))]
    app.add_api_route("/", lambda: "ok", dependencies=dependencies)
    assert [call_asgi(app)[0]["status"] for _ in range(3)] == [200, 200, 418]


def test_catch_all_handler_gets_no_denial(its: Its) -> None:
    app = starlette_app(its)
    forebay.contrib.fastapi.setup(app, its.rules)
    app.add_exception_handler(Exception, lambda request, error: PlainTextResponse("it broke", 500))
    assert [call_asgi(app)[0]["status"] for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize("is_first", [True, False])
def test_browser_can_read_denials_and_send_preflights(its: Its, is_first: bool) -> None:
    app = starlette_app(its)
    if not is_first:
        forebay.contrib.fastapi.setup(app, its.rules)
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop"], allow_headers=["X-A"])
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop"], expose_headers=["RateLimit"])
    if is_first:
        forebay.contrib.fastapi.setup(app, its.rules)
    origin = (b"origin", b"https://shop")
    assert [call_asgi(app, headers=[origin])[0]["status"] for _ in range(4)] == [200, 200, 200, 429]
    denied = dict(call_asgi(app, headers=[origin])[0]["headers"])
    assert denied[b"access-control-allow-origin"] == b"https://shop"
    # The order of the middleware is unchanged: the last one is the outermost.
    assert denied[b"access-control-expose-headers"] == b"RateLimit"
    preflight = [origin, (b"access-control-request-method", b"GET")]
    assert call_asgi(app, method="OPTIONS", headers=preflight)[0]["status"] == 200


def test_websocket_that_the_rules_deny_is_closed(its: Its) -> None:
    app = starlette_app(its)
    forebay.contrib.fastapi.setup(app, [Rule(its.three, key=everyone, cost=3)])
    assert call_asgi(app)[0]["status"] == 200
    assert [message["type"] for message in call_asgi(app, kind="websocket")] == ["websocket.close"]


def test_starlette_limits_bodies_and_passes_the_lifespan(its: Its) -> None:
    app = starlette_app(its)
    forebay.contrib.fastapi.setup(app, [*its.rules, BodyLimit(4)])
    assert call_asgi(app, body=b"12345")[0]["status"] == 413
    assert call_asgi(app, body=b"1234")[0]["status"] == 200
    assert its.left()[1] == 2
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any: ...

    around = forebay.contrib.fastapi.LimitsMiddleware(inner, its.rules)
    asyncio.run(around({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]


@pytest.mark.parametrize(("limit", "status"), [(BodyLimit(4), 413), (BodyLimit(4, responses=True), 500)])
def test_starlette_charges_by_the_status_of_a_body_that_is_too_large(its: Its, limit: BodyLimit, status: int) -> None:
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    app = Starlette(routes=[Route("/", echo)])
    rule = Rule(its.three, key=everyone, charge_on=lambda seen: seen == status)
    forebay.contrib.fastapi.setup(app, [rule, limit])
    # Without a length the body is limited while it is read.
    assert call_asgi(app, body=b"12345", headers=[])[0]["status"] == status
    assert its.left()[1] == 2


def test_starlette_renews_the_lease_while_the_handler_runs(its: Its) -> None:
    async def endpoint(connection: HTTPConnection) -> None:
        await its.outlast_the_lease()

    app = starlette_app(its, forebay.contrib.fastapi.limited(its.held, key=everyone), endpoint)
    forebay.contrib.fastapi.setup(app)
    assert call_asgi(app)[0]["status"] == 200
    assert its.left()[2] == 1


# aiohttp


def call_aiohttp(app: web.Application, count: int, path: str = "/", **options: Any) -> list[tuple[int, dict[str, str]]]:
    async def send_requests() -> list[tuple[int, dict[str, str]]]:
        async with TestClient(TestServer(app)) as client:
            answers = []
            for _ in range(count):
                async with client.get(path, **options) as response:
                    await response.read()
                    answers.append((response.status, dict(response.headers)))
            return answers

    return asyncio.run(send_requests())


def test_aiohttp_limits_only_async_handlers(its: Its) -> None:
    """aiohttp accepts a plain function with a warning, but a decorator cannot await it."""
    decorate = forebay.contrib.aiohttp.limited(its.two, key=everyone)

    def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    class View(web.View):
        async def get(self) -> web.StreamResponse:
            return web.Response()

    for plain in (handler, lambda view: handler(view.request), partial(handler)):
        with pytest.raises(InvalidLimiter, match=r"limited\(\.\.\.\) is for async handlers.* write async def"):
            decorate(plain)  # type: ignore[arg-type]

    async def async_handler(prefix: str, request: web.Request) -> web.StreamResponse:
        return web.Response()

    class Handler:
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            return web.Response()

    for handled in (partial(async_handler, ""), View, Handler(), partial(Handler())):
        app = web.Application()
        forebay.contrib.aiohttp.setup(app)
        app.router.add_get("/", decorate(handled))
        assert [status for status, _ in call_aiohttp(app, 3)] == [200, 200, 429]
        its.two.reset("everyone")


def test_aiohttp_needs_the_middleware(its: Its) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", forebay.contrib.aiohttp.limited(its.two, key=everyone)(handler))
    assert call_aiohttp(app, 1)[0][0] == 500


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.filterwarnings("ignore::forebay.LimitsDisabledWarning")
def test_aiohttp_refuses_body_limits(its: Its, enabled: bool) -> None:
    with pytest.raises(InvalidLimiter, match=r"comes too late here: say web.Application\(client_max_size=...\)"):
        forebay.contrib.aiohttp.setup(web.Application(), [BodyLimit(10)], enabled=enabled)
    with pytest.raises(InvalidLimiter, match="comes too late here: aiohttp reads and sends bodies by itself"):
        forebay.contrib.aiohttp.setup(web.Application(), [ByteRate(its.two)], enabled=enabled)


@pytest.mark.parametrize("whole", [True, False])
def test_aiohttp_sets_header_fields_of_streams_after_setup(its: Its, whole: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write_eof()
        return response

    app = web.Application(middlewares=[] if whole else [forebay.contrib.aiohttp.middleware(its.rules)])
    if whole:
        forebay.contrib.aiohttp.setup(app, its.rules)
    app.router.add_get("/", handler)
    answers = call_aiohttp(app, 4)
    assert [status for status, _ in answers] == [200, 200, 200, 429]
    assert ["RateLimit" in headers for _, headers in answers] == [whole, whole, whole, True]


def test_aiohttp_holds_permits_until_it_has_sent_a_file(its: Its, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    left: list[int] = []

    class Response(web.FileResponse):
        async def prepare(self, request: web.BaseRequest) -> Any:
            left.append(its.left()[2])
            return await super().prepare(request)

    @forebay.contrib.aiohttp.limited(its.held, key=everyone)
    async def handler(request: web.Request) -> web.StreamResponse:
        return Response(tmp_path / "file")

    app = web.Application()
    forebay.contrib.aiohttp.setup(app)
    app.router.add_get("/", handler)
    assert [status for status, _ in call_aiohttp(app, 2)] == [200, 200]
    assert left == [0, 0]
    assert its.left()[2] == 1


def test_aiohttp_renews_the_lease_while_the_handler_runs(its: Its) -> None:
    @forebay.contrib.aiohttp.limited(its.held, key=everyone)
    async def handler(request: web.Request) -> web.StreamResponse:
        await its.outlast_the_lease()
        return web.Response()

    app = web.Application()
    forebay.contrib.aiohttp.setup(app)
    app.router.add_get("/", handler)
    assert call_aiohttp(app, 1)[0][0] == 200
    assert its.left()[2] == 1


# Django


class DjangoSettings:
    """Sets ``settings.FOREBAY`` for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, value: Any) -> None:
        self._monkeypatch.setattr(settings, "FOREBAY", value, raising=False)
        in_django._gates.cache_clear()


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[DjangoSettings]:
    yield DjangoSettings(monkeypatch)
    in_django._gates.cache_clear()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["shop.rules"], r"FOREBAY is a dict such as .*, not \['shop.rules'\]"),
        (
            {"RULE": ()},
            "FOREBAY has no 'RULE': there are RULES, CLIENT, HEADERS, PARTITION_KEYS, ENABLED, ON_DENIED, "
            "WHEN_UNAVAILABLE, STORE",
        ),
        ({"RULES": "shop.rules"}, r'FOREBAY\["RULES"\] is the dotted path of nothing: No module named'),
        ({"RULES": f"{__name__}.nothing"}, "does not define a"),
    ],
)
def test_django_refuses_invalid_settings(configure: DjangoSettings, value: Any, message: str) -> None:
    configure(value)
    with pytest.raises(ImproperlyConfigured, match=message):
        in_django.LimitsMiddleware(lambda request: HttpResponse())


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.filterwarnings("ignore::forebay.LimitsDisabledWarning")
def test_django_refuses_body_limits(configure: DjangoSettings, enabled: bool) -> None:
    store = Store.private(keys=10)
    for limit in (BodyLimit(10), ByteRate(TokenBucket(store, "bytes", "1 MiB/second"))):
        configure({"RULES": [limit], "ENABLED": enabled})
        with pytest.raises(InvalidLimiter, match=r"comes too late here: put WSGIMiddleware or ASGIMiddleware .* wsgi"):
            in_django.LimitsMiddleware(lambda request: HttpResponse())


def test_django_needs_the_middleware(its: Its) -> None:
    view = in_django.limited(its.two, key=everyone)(lambda request: HttpResponse())
    with pytest.raises(NotInstalled, match="isn't in MIDDLEWARE"):
        view(RequestFactory().get("/"))


def test_django_holds_permits_while_it_sends_a_file(its: Its, configure: DjangoSettings) -> None:
    configure({"RULES": its.rules, "HEADERS": ["draft-10", "x-ratelimit"]})

    @in_django.limited(its.held, key=everyone)
    @in_django.limited(its.two, key=everyone)
    def view(request: HttpRequest) -> HttpResponseBase:
        return FileResponse(Path(__file__).open("rb"))

    handle = in_django.LimitsMiddleware(view)
    response = handle(RequestFactory().get("/"))
    assert its.left() == (1, 2, 0)
    assert response["RateLimit-Policy"].count("q=") == 3
    assert response["X-RateLimit-Remaining"] == "1"
    assert b"".join(response) == Path(__file__).read_bytes()
    assert its.left() == (1, 2, 0)
    response.close()
    assert its.left() == (1, 2, 1)

    # A denial by a view lists the view's limits only.
    handle(RequestFactory().get("/")).close()
    denied = handle(RequestFactory().get("/"))
    assert denied["RateLimit-Policy"] == '"two";q=2;w=86400, "held";q=1;qu="concurrent-requests"'

    # An error that the view raises through the middleware releases the permit.
    its.three.reset("everyone")
    broken = in_django.LimitsMiddleware(unwrapped(in_django.limited(its.held, key=everyone)(lambda request: 1 / 0)))
    with pytest.raises(ZeroDivisionError):
        broken(RequestFactory().get("/"))
    assert its.left() == (0, 2, 1)


def test_cancelled_async_django_request_releases_permits(its: Its, configure: DjangoSettings) -> None:
    configure({"RULES": [*its.rules, Rule(its.two, key=everyone, charge_on=range(499))]})

    @in_django.limited(its.held, key=everyone)
    async def view(request: HttpRequest) -> HttpResponse:
        assert its.left() == (1, 2, 0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send_requests() -> None:
        task = asyncio.ensure_future(in_django.LimitsMiddleware(view)(AsyncRequestFactory().get("/")))
        while its.left()[2]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(send_requests())
    assert its.left() == (2, 2, 1)


def test_async_django_renews_the_lease_while_the_view_runs(its: Its, configure: DjangoSettings) -> None:
    configure({})

    @in_django.limited(its.held, key=everyone)
    async def view(request: HttpRequest) -> HttpResponse:
        await its.outlast_the_lease()
        assert its.left()[2] == 0
        return HttpResponse()

    asyncio.run(in_django.LimitsMiddleware(view)(AsyncRequestFactory().get("/")))
    # Released before the client has the response and can send its next request.
    assert its.left()[2] == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_django_releases_permits_if_another_response_is_sent(
    its: Its, configure: DjangoSettings, is_stream: bool
) -> None:
    """Outer middleware replaces the response, for a missing slash or a 304, and never closes the first one."""
    configure({"RULES": [Rule(its.held, key=everyone)]})
    first = StreamingHttpResponse([b"a"]) if is_stream else HttpResponse(b"a")
    request = RequestFactory().get("/")
    in_django.LimitsMiddleware(lambda _: first)(request)
    # Django closes every request at its end.
    request.close()
    assert its.left()[2] == 1


def test_aiohttp_routes_and_rules_see_the_same_path() -> None:
    request = make_mocked_request("POST", "/users/1%2F2/%41", headers={"Upgrade": "websocket"})
    seen = forebay.contrib.aiohttp.AiohttpRequest(request)
    assert (seen.method, seen.path) == ("POST", "/users/1%2F2/A")


# Full stores


@pytest.fixture
def crowded() -> Iterator[tuple[TokenBucket, str]]:
    """A limiter, and an address that its full store cannot count."""
    with Store.private(keys=1, on_full="deny", clock=ManualClock(1000)) as store:
        bucket = TokenBucket(store, "crowded", "2/day")
        addresses = [f"10.0.{n // 256}.{n % 256}" for n in range(5000)]
        yield bucket, addresses[bucket.allow_many(addresses).index(False)]


NO_ROOM = b"no room to count another client"


@pytest.mark.parametrize("of_view", [False, True])
def test_flask_answers_503_if_the_store_is_full(crowded: tuple[TokenBucket, str], of_view: bool) -> None:
    bucket, address = crowded
    app = flask.Flask(__name__)
    limits = Limits(app, [] if of_view else [Rule(bucket)])
    app.route("/")(limits.limit(bucket)(lambda: "") if of_view else (lambda: ""))
    answer = app.test_client().get("/", environ_base={"REMOTE_ADDR": address})
    assert (answer.status_code, NO_ROOM in answer.data) == (503, True)
    assert int(answer.headers["Retry-After"]) > 0


def test_starlette_answers_503_if_the_store_is_full(its: Its, crowded: tuple[TokenBucket, str]) -> None:
    bucket, address = crowded
    app = starlette_app(its, forebay.contrib.fastapi.limited(bucket, key=lambda request: address))
    forebay.contrib.fastapi.setup(app)
    start, body = call_asgi(app)
    assert (start["status"], NO_ROOM in body["body"]) == (503, True)
    app = starlette_app(its)
    forebay.contrib.fastapi.setup(app, [Rule(bucket, key=lambda request: address)])
    assert call_asgi(app)[0]["status"] == 503


@pytest.mark.parametrize("of_view", [False, True])
def test_aiohttp_answers_503_if_the_store_is_full(crowded: tuple[TokenBucket, str], of_view: bool) -> None:
    bucket, address = crowded
    rule = Rule(bucket, key=lambda request: address)

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    forebay.contrib.aiohttp.setup(app, [] if of_view else [rule])
    app.router.add_get("/", forebay.contrib.aiohttp.limited(rule)(handler) if of_view else handler)
    [(status, fields)] = call_aiohttp(app, 1)
    assert status == 503
    assert int(fields["Retry-After"]) > 0


@pytest.mark.parametrize("of_view", [False, True])
def test_django_answers_503_if_the_store_is_full(
    crowded: tuple[TokenBucket, str], configure: DjangoSettings, of_view: bool
) -> None:
    bucket, address = crowded
    configure({} if of_view else {"RULES": [Rule(bucket)]})
    view: Any = lambda request: HttpResponse()  # noqa: E731
    middleware = in_django.LimitsMiddleware(in_django.limited(bucket)(view) if of_view else view)
    response = middleware(RequestFactory().get("/", REMOTE_ADDR=address))
    assert (response.status_code, NO_ROOM in response.content) == (503, True)


# Async functions of rules


async def exempt_none(request: Any) -> bool:
    await asyncio.sleep(0)
    return False


async def async_key(request: Any) -> str:
    await asyncio.sleep(0)
    return "ada"


def test_coroutine_functions_are_refused_without_an_event_loop(its: Its, configure: DjangoSettings) -> None:
    with pytest.raises(InvalidLimiter, match="has to be awaited"):
        Limits(flask.Flask(__name__), [Rule(its.two, exempt=exempt_none)])
    with pytest.raises(InvalidLimiter, match="has to be awaited"):
        Limits().limit(its.two, key=async_key)
    with pytest.raises(InvalidLimiter, match="has to be awaited"):
        in_django.limited(its.two, key=async_key)(lambda request: HttpResponse())
    for value in ({"RULES": [Rule(its.two, key=async_key)]}, {"CLIENT": async_key}):
        configure(value)
        with pytest.raises(InvalidLimiter, match="has to be awaited"):
            in_django.LimitsMiddleware(lambda request: HttpResponse())


@pytest.mark.parametrize("options", [{"key": async_key}, {"key": async_key, "exempt": exempt_none}])
def test_functions_of_rules_are_awaited(its: Its, configure: DjangoSettings, options: Any) -> None:
    limited = forebay.contrib.fastapi.limited
    app = starlette_app(its, limited(its.two, **options))
    forebay.contrib.fastapi.setup(app)
    assert [call_asgi(app)[0]["status"] for _ in range(3)] == [200, 200, 429]
    its.two.reset("ada")

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    site = web.Application()
    forebay.contrib.aiohttp.setup(site)
    site.router.add_get("/", forebay.contrib.aiohttp.limited(its.two, **options)(handler))
    assert [status for status, _ in call_aiohttp(site, 3)] == [200, 200, 429]
    its.two.reset("ada")

    async def view(request: HttpRequest) -> HttpResponseBase:
        return HttpResponse()

    configure({"RULES": [Rule(its.two, **options)]})
    middleware = in_django.LimitsMiddleware(view)

    async def send_requests() -> list[int]:
        return [(await middleware(AsyncRequestFactory().get("/"))).status_code for _ in range(3)]

    assert asyncio.run(send_requests()) == [200, 200, 429]
