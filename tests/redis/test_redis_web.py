"""The web middlewares with limits over Redis: W27, and that nobody stops an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import django
import flask
import pytest
import redis
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from fastapi import Depends, FastAPI
from proxy import proxy
from redis_server import RedisServer, redis_server
from web_requests import Answered, Site, Wire, asgi_scope, wsgi_environ

import penstock.contrib.aiohttp
import penstock.contrib.fastapi
import penstock.contrib.flask
from penstock import Concurrency, FixedWindow, InvalidLimiter, LeakyBucket, SlidingWindow, Store, TokenBucket
from penstock.redis import AsyncRedisStore, RedisStore
from penstock.web import Answer, ASGIMiddleware, Rule, WSGIMiddleware, everyone

APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
if not settings.configured:
    settings.configure(SECRET_KEY="known to everybody", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, INSTALLED_APPS=APPS)
django.setup()

from rest_framework.views import APIView  # noqa: E402

from penstock.contrib.django import limited  # noqa: E402
from penstock.contrib.rest_framework import SimpleRateThrottle  # noqa: E402

PATIENT_S = 30.0
LIMITS = "penstock.contrib.django.LimitsMiddleware"


@pytest.fixture
def gone() -> str:
    """The URL of a server that isn't there."""
    with redis_server() as server:
        return server.url


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    opened = asyncio.new_event_loop()
    yield opened
    opened.close()


@pytest.fixture
def async_store(server: RedisServer, loop: asyncio.AbstractEventLoop) -> Iterator[AsyncRedisStore]:
    store = AsyncRedisStore(server.url, timeout=PATIENT_S)
    yield store
    loop.run_until_complete(store.close())


Ask = Callable[..., Answered]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., tuple[Any, Ask]]]:
    """Makes a store and, of the rules that a function makes over it, a way to ask an application that has them."""
    stores: list[Any] = []

    def make(url: str, rules_of: Callable[[Any], Any], **options: Any) -> tuple[Any, Ask]:
        kind: Any = RedisStore if request.param == "wsgi" else AsyncRedisStore
        stores.append(kind(url, timeout=PATIENT_S, **options))
        application = Site(request.param, rules_of(stores[-1]))

        def ask(path: str = "/") -> Answered:
            if request.param == "wsgi":
                return application.ask(path)
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            loop.run_until_complete(application.app(asgi_scope(path, "GET"), wire.receive, wire.send))
            return wire.answered()

        return application, ask

    yield make
    for store in stores:
        closing = store.close()
        if closing is not None:
            loop.run_until_complete(closing)


def check_unavailable(answer: Answered) -> None:
    """W27: 503, never 429."""
    assert answer.status == 503
    assert answer["retry-after"] == "1"
    assert answer["content-type"] == "application/problem+json"
    assert answer.json["status"] == 503
    assert answer["cache-control"] == "no-store"
    assert "ratelimit" not in answer


def test_limits_over_redis(site: Callable[..., tuple[Any, Ask]], server: RedisServer) -> None:
    _, ask = site(server.url, lambda store: [Rule(TokenBucket(store, "api", "2/hour"), key=everyone)])
    answers = [ask() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[0]["ratelimit-policy"] == '"api";q=2;w=3600'
    assert answers[0]["ratelimit"].startswith('"api";r=1')
    assert int(answers[2]["retry-after"]) > 1700
    assert answers[2].json["violated-policies"] == ["api"]


def test_several_limits_over_redis_are_asked_as_one(site: Callable[..., tuple[Any, Ask]], server: RedisServer) -> None:
    def rules(store: Any) -> list[Rule]:
        return [
            Rule(SlidingWindow(store, "wide", "3/hour"), key=everyone),
            Rule(LeakyBucket(store, "queue", "1/hour", capacity=9), key=everyone, cost=3, path="/dear"),
            Rule(FixedWindow(store, "hidden", "100/hour"), answer=Answer(200)),
        ]

    _, ask = site(server.url, rules)
    assert [ask(path).status for path in ("/dear", "/", "/dear", "/")] == [200, 200, 200, 429]
    assert ask("/dear").json["violated-policies"] == ["wide"]


def test_w27_redis_is_gone(site: Callable[..., tuple[Any, Ask]], gone: str) -> None:
    def rules(store: Any) -> list[Rule]:
        shadow = Answer(200, body=b"done")
        return [
            Rule(TokenBucket(store, "api", "2/hour"), path="/one"),
            Rule(TokenBucket(store, "a", "2/hour"), path="/two"),
            Rule(TokenBucket(store, "b", "2/hour"), path="/two", answer=shadow),
            Rule(TokenBucket(store, "c", "2/hour"), path="/shadow", answer=shadow),
        ]

    application, ask = site(gone, rules)
    for at in ("/one", "/two", "/shadow", "/one", "/two", "/shadow"):
        check_unavailable(ask(at))
    assert application.handled == 0
    assert ask("/free").status == 200

    application, ask = site(gone, rules, when_unavailable="allow")
    assert [ask("/one").status for _ in range(5)] == [200] * 5
    assert ask("/two")["ratelimit"].startswith('"a";r=2')

    with Store.private(keys=1000) as host:
        application, ask = site(gone, rules, when_unavailable="local", host=host, hosts=2)
        answers = [ask("/one") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 429, 429]
        assert answers[0]["ratelimit"].startswith('"api";r=0')


def test_what_is_held_and_what_is_given_back(server: RedisServer) -> None:
    with proxy(server.port) as through, RedisStore(through.url, timeout=PATIENT_S) as store:
        held = Concurrency(store, "held", 1, lease="1 hour")
        failures = TokenBucket(store, "failures", "2/hour")
        wide = TokenBucket(store, "wide", "100/hour")
        rules = [
            Rule(held, key=everyone, path="/held"),
            Rule(failures, key=everyone, path="/login", charge_on={401}),
            Rule(wide, key=everyone),
        ]
        site = Site("wsgi", rules)
        assert [site.ask("/held").status for _ in range(3)] == [200] * 3
        with held.acquire("everyone"):
            assert site.ask("/held").status == 503
        assert [site.ask("/login").status for _ in range(5)] == [200] * 5
        site.handle = lambda: 401
        assert [site.ask("/login").status for _ in range(3)] == [401, 401, 429]
        assert wide.peek("everyone").remaining == 100 - 3 - 5 - 2

        # Redis goes away between the request and the end of its answer: that is sent all the same.
        def lose() -> int:
            through.server_port = 1
            through.cut()
            return 200

        site.handle = lose
        assert site.ask("/held").status == 200
        assert store.status().failures > 0


def test_not_every_part_of_a_long_answer_waits_for_redis(server: RedisServer, client: redis.Redis) -> None:
    def calls() -> int:
        statistics = client.info("commandstats")
        return int(statistics.get("cmdstat_evalsha", {}).get("calls", 0))

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        return iter([b"part"] * 500)

    with RedisStore(server.url, timeout=PATIENT_S) as store:
        held = Concurrency(store, "held", 1, lease="1 hour")
        site = Site("wsgi", [Rule(held, key=everyone)])
        assert site.ask("/").status == 200
        before = calls()
        limited = WSGIMiddleware(app, [Rule(held, key=everyone)])
        body: Any = limited(wsgi_environ("/", "GET"), lambda *_: None)
        assert len(list(body)) == 500
        body.close()
        assert calls() - before < 10
        assert held.peek("everyone").remaining == 1


def test_an_event_loop_is_never_stopped(server: RedisServer, redis_store: RedisStore, async_store: Any) -> None:
    sync = Rule(TokenBucket(redis_store, "api", "2/hour"))
    awaited = Rule(TokenBucket(async_store, "api", "2/hour"))
    for make in (
        lambda: ASGIMiddleware(lambda *_: None, [sync]),  # type: ignore[arg-type, return-value]
        lambda: penstock.contrib.fastapi.setup(FastAPI(), [sync]),
        lambda: penstock.contrib.aiohttp.setup(web.Application(), [sync]),
        lambda: penstock.contrib.fastapi.limited(sync),
        lambda: penstock.contrib.aiohttp.limited(sync),
    ):
        with pytest.raises(InvalidLimiter, match="AsyncRedisStore"):
            make()
    for make in (
        lambda: WSGIMiddleware(lambda *_: [], [awaited]),
        lambda: penstock.contrib.flask.Limits(flask.Flask("shop"), [awaited]),
        lambda: penstock.contrib.flask.Limits(flask.Flask("shop")).limit(awaited),
    ):
        with pytest.raises(InvalidLimiter, match="over a RedisStore"):
            make()
    for rule in (
        Rule(Concurrency(async_store, "held", 1)),
        Rule(TokenBucket(async_store, "api", "2/hour"), charge_on={401}),
    ):
        with pytest.raises(InvalidLimiter, match="give permits back"):
            ASGIMiddleware(lambda *_: None, [rule])  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidLimiter, match="partition_keys"):
        WSGIMiddleware(lambda *_: [], [sync], partition_keys=True)
    with Store.private(keys=10) as other, pytest.raises(InvalidLimiter, match="one store"):
        WSGIMiddleware(lambda *_: [], [sync, Rule(TokenBucket(other, "api", "2/hour"))])


def test_flask(redis_store: RedisStore, gone: str) -> None:
    with RedisStore(gone, timeout=PATIENT_S) as away:
        for store, statuses in ((redis_store, [200, 200, 429]), (away, [503] * 3)):
            app = flask.Flask("shop")
            limits = penstock.contrib.flask.Limits(app)

            @app.route("/")
            @limits.limit(TokenBucket(store, "api", "2/hour"))
            def home() -> str:
                return "done"

            answers = [app.test_client().get("/") for _ in range(3)]
            assert [answer.status_code for answer in answers] == statuses
            assert "Retry-After" in answers[2].headers
            assert answers[2].content_type == "application/problem+json"


urlpatterns: list[Any] = []


def test_django_and_rest_framework(redis_store: RedisStore, gone: str) -> None:
    class ByAll(SimpleRateThrottle):
        scope = "all"
        rate = "2/hour"

        def get_cache_key(self, request: Any, view: Any) -> str:
            return "all"

    class Throttled(APIView):
        throttle_classes = [ByAll]  # noqa: RUF012  # as REST framework has it
        authentication_classes = ()
        permission_classes = ()

        def get(self, request: Any) -> HttpResponse:
            return HttpResponse("done")

    def home(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    with RedisStore(gone, timeout=PATIENT_S) as away:
        for store, statuses in ((redis_store, [200, 200, 429]), (away, [503] * 3)):
            view = limited(TokenBucket(store, "view", "2/hour"))(home)
            urlpatterns[:] = [path("", home), path("view", view), path("throttled", Throttled.as_view())]
            rules = [Rule(TokenBucket(store, "api", "2/hour"), path="/")]
            with override_settings(
                ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], PENSTOCK={"RULES": rules, "STORE": store}
            ):
                django.urls.clear_url_caches()
                for at in ("/", "/view", "/throttled"):
                    answers = [Client().get(at) for _ in range(3)]
                    assert [answer.status_code for answer in answers] == statuses, at
                    assert "Retry-After" in answers[2].headers


def test_django_in_an_event_loop(redis_store: RedisStore, async_store: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def home(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    with pytest.raises(InvalidLimiter, match="AsyncRedisStore"):
        limited(TokenBucket(redis_store, "view", "2/hour"))(home)
    view = limited(TokenBucket(async_store, "view", "2/hour"))(home)
    urlpatterns[:] = [path("", home), path("view", view)]

    async def ask() -> list[int]:
        return [(await AsyncClient().get(at)).status_code for at in ["/"] * 3 + ["/view"] * 3]

    rules = [Rule(TokenBucket(async_store, "api", "2/hour"), path="/")]
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], PENSTOCK={"RULES": rules}):
        django.urls.clear_url_caches()
        assert loop.run_until_complete(ask()) == [200, 200, 429] * 2


def in_loop(url: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with AsyncRedisStore(url, timeout=PATIENT_S) as store:
            return await work(store)

    return asyncio.run(run())


def test_aiohttp(server: RedisServer, gone: str) -> None:
    async def ask(store: Any) -> list[int]:
        app = web.Application()
        penstock.contrib.aiohttp.setup(app, [Rule(TokenBucket(store, "api", "3/hour"), key=everyone)])

        @penstock.contrib.aiohttp.limited(TokenBucket(store, "view", "2/hour"), key=everyone)
        async def home(request: web.Request) -> web.StreamResponse:
            return web.Response(text="done")

        app.router.add_get("/", home)
        async with TestClient(TestServer(app)) as client:
            statuses = []
            for _ in range(4):
                answer = await client.get("/")
                statuses.append(answer.status)
                assert answer.status == 200 or "Retry-After" in answer.headers
            return statuses

    assert in_loop(server.url, ask) == [200, 200, 429, 429]
    assert in_loop(gone, ask) == [503] * 4


def test_fastapi(server: RedisServer, gone: str) -> None:
    async def ask(store: Any) -> list[int]:
        app = FastAPI()
        penstock.contrib.fastapi.setup(app, [Rule(TokenBucket(store, "api", "3/hour"), key=everyone)])
        view = penstock.contrib.fastapi.limited(TokenBucket(store, "view", "2/hour"), key=everyone)

        @app.get("/", dependencies=[Depends(view)])
        async def home() -> str:
            return "done"

        statuses = []
        for _ in range(4):
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            await app(asgi_scope("/", "GET") | {"query_string": b""}, wire.receive, wire.send)
            statuses.append(wire.answered().status)
            assert statuses[-1] == 200 or "retry-after" in wire.answered()
        return statuses

    assert in_loop(server.url, ask) == [200, 200, 429, 429]
    assert in_loop(gone, ask) == [503] * 4


def test_a_web_socket(server: RedisServer, gone: str, loop: asyncio.AbstractEventLoop) -> None:
    async def ask(store: Any) -> str:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})

        limited = ASGIMiddleware(app, [Rule(TokenBucket(store, "sockets", "1/hour"), key=everyone)])
        wire = Wire({"type": "websocket.connect"})
        scope = asgi_scope("/", "GET") | {"type": "websocket"}
        with contextlib.suppress(KeyError):
            del scope["method"]
        await limited(scope, wire.receive, wire.send)
        return " ".join(str(wire.sent[0].get(name, "")) for name in ("type", "reason")).strip()

    assert in_loop(server.url, ask) == "websocket.accept"
    assert in_loop(server.url, ask) == "websocket.close Too Many Requests"
    assert in_loop(gone, ask) == "websocket.close Service Unavailable"
