"""Web middlewares with limits over Redis: W27, and no blocked event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import django
import flask
import pytest
import redis
import redis.asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from asgiref.sync import sync_to_async
from blocking import in_event_loop
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from fastapi import Depends, FastAPI, Response
from held_permits import Held, WatchedClock
from proxy import proxy
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis_server import RedisServer, redis_server
from scripts_clock import ServerClock
from web_requests import Answered, Site, Wire, asgi_scope, wsgi_environ

import forebay.contrib.aiohttp
import forebay.contrib.fastapi
import forebay.contrib.flask
from forebay import (
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.redis import AsyncRedisStore, LeasedStore, RedisStore, SyncedStore
from forebay.redis.transport.deadline import Patience
from forebay.testing import ManualClock
from forebay.web import (
    DISCONNECTED,
    Answer,
    ASGIMiddleware,
    Ban,
    ByteRate,
    Rule,
    WSGIMiddleware,
    cleanup,
    everyone,
)
from forebay.web.cleanup import BackgroundRelease

APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
if not settings.configured:
    settings.configure(SECRET_KEY="known to everybody", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, INSTALLED_APPS=APPS)
django.setup()

from rest_framework.views import APIView  # noqa: E402

from forebay.contrib.django import limited  # noqa: E402
from forebay.contrib.rest_framework import SimpleRateThrottle  # noqa: E402

PATIENT_S = 30.0
LIMITS = "forebay.contrib.django.LimitsMiddleware"


@pytest.fixture
def gone() -> str:
    """The URL of a server that does not exist."""
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
Hook = Callable[[Any], Awaitable[None]]


async def at_once(calls: Any) -> None:
    pass


def held_up(store: Any, patch: pytest.MonkeyPatch, *, before: Hook = at_once, after: Hook = at_once) -> None:
    """Around each of a store's round trips: one call, or a batch of them."""
    execute, execute_many = store.executor.execute_command, store.executor.client.execute_many

    async def one(*call: Any) -> Any:
        await before([call])
        answer = await execute(*call)
        await after([call])
        return answer

    async def many(calls: Any) -> Any:
        await before(calls)
        answers = await execute_many(calls)
        await after(calls)
        return answers

    patch.setattr(store.executor, "execute_command", one)
    patch.setattr(store.executor.client, "execute_many", many)


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., tuple[Any, Ask]]]:
    """Makes a store, and a function that sends requests to an application with rules over that store."""
    stores: list[Any] = []

    def make(url: str, rules_of: Callable[[Any], Any], **options: Any) -> tuple[Any, Ask]:
        kind: Any = RedisStore if request.param == "wsgi" else AsyncRedisStore
        stores.append(kind(url, timeout=PATIENT_S, **options))
        application = Site(request.param, rules_of(stores[-1]))

        def ask(path: str = "/", method: str = "GET", **options: Any) -> Answered:
            if request.param == "wsgi":
                return application.request(path, method, **options)
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            loop.run_until_complete(application.app(asgi_scope(path, method, **options), wire.receive, wire.send))
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


def test_rules_over_redis_limit_requests(site: Callable[..., tuple[Any, Ask]], server: RedisServer) -> None:
    _, ask = site(server.url, lambda store: [Rule(TokenBucket(store, "api", "2/hour"), key=everyone)])
    answers = [ask() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[0]["ratelimit-policy"] == '"api";q=2;w=3600'
    assert answers[0]["ratelimit"].startswith('"api";r=1')
    assert int(answers[2]["retry-after"]) > 1700
    assert answers[2].json["violated-policies"] == ["api"]


def test_several_rules_over_redis_take_one_call(site: Callable[..., tuple[Any, Ask]], server: RedisServer) -> None:
    def rules(store: Any) -> list[Rule]:
        return [
            Rule(SlidingWindow(store, "wide", "3/year"), key=everyone),
            Rule(LeakyBucket(store, "queue", "1/hour", capacity=9), key=everyone, cost=3, path="/dear"),
            Rule(FixedWindow(store, "hidden", "100/year"), answer=Answer(200)),
        ]

    _, ask = site(server.url, rules)
    assert [ask(path).status for path in ("/dear", "/", "/dear", "/")] == [200, 200, 200, 429]
    assert ask("/dear").json["violated-policies"] == ["wide"]


@pytest.mark.parametrize("more", [[], [Concurrency]])
def test_preflights_have_permits_of_their_own(
    site: Callable[..., tuple[Any, Ask]], server: RedisServer, more: list[Any]
) -> None:
    def rules(store: Any) -> list[Rule]:
        limiters = [TokenBucket(store, "a", "2/hour"), *[kind(store, "b", 1) for kind in more]]
        return [Rule(limiter, key=everyone) for limiter in limiters]

    _, ask = site(server.url, rules)
    fields = [("Origin", "https://shop.example"), ("Access-Control-Request-Method", "POST")]
    assert [ask(method="OPTIONS", fields=fields).status for _ in range(3)] == [200, 200, 429]
    assert [ask().status for _ in range(3)] == [200, 200, 429]


def test_rules_over_redis_ban_on_this_host(site: Callable[..., tuple[Any, Ask]]) -> None:
    """A banned key needs no round trip, and an unavailable Redis bans nobody."""
    with Store.private(keys=100, clock=ManualClock()) as host:
        ban = Ban(host, "guessers", "2/hour", lasts="10 minutes")
        with redis_server() as server:
            application, ask = site(
                server.url, lambda store: [Rule(TokenBucket(store, "api", "1/hour"), key=everyone, ban=ban)]
            )
            assert [ask().status for _ in range(3)] == [200, 429, 429]
        answer = ask()
        assert (answer.status, answer["retry-after"]) == (429, "600")
        assert answer.json["violated-policies"] == ["guessers"]
        ban.lift("everyone")
        assert [ask().status for _ in range(4)] == [503] * 4
        assert ban.peek("everyone")
        assert application.handled == 1


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


def test_a_full_host_store_while_redis_is_gone(site: Callable[..., tuple[Any, Ask]], gone: str) -> None:
    """The answer is 503, or 429 if another rule denies by its limit."""

    def rules(store: Any) -> list[Rule]:
        limit, spent = FixedWindow(store, "limit", "10/hour"), FixedWindow(store, "spent", "2/hour")
        return [
            Rule(limit, key=lambda request: request.path, charge_on={200}),
            Rule(spent, key=everyone, path="/spent/*", charge_on={200}),
        ]

    with Store.private(keys=1, on_full="deny", clock=ManualClock(1000)) as host:
        _, ask = site(gone, rules, when_unavailable="local", host=host, hosts=2)
        assert ask("/spent/first").status == 200
        FixedWindow(host, "crowd", "1/hour").allow_many(list(range(5000)))
        answers = [ask(f"/{number}") for number in range(100)]
        assert {answer.status for answer in answers} <= {200, 503}
        full = next(answer for answer in answers if answer.status == 503)
        assert "no room to count another client" in full.json["detail"]
        assert full["Retry-After"] == "2600"
        for number in range(100):
            denied = ask(f"/spent/{number}")
            assert (denied.status, denied.json["violated-policies"]) == (429, ["spent"])


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_held_and_refunded_permits(kind: Any, server: RedisServer, loop: asyncio.AbstractEventLoop) -> None:
    def run(answer: Any) -> Any:
        return loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    with proxy(server.port) as through:
        store: Any = (RedisStore if kind == "wsgi" else AsyncRedisStore)(through.url, timeout=PATIENT_S)
        held = Concurrency(store, "held", 1, lease="1 hour")
        failures = TokenBucket(store, "failures", "2/hour")
        wide = TokenBucket(store, "wide", "100/hour")
        rules = [
            Rule(held, key=everyone, path="/held"),
            Rule(failures, key=everyone, path="/login", charge_on={401}),
            Rule(wide, key=everyone),
        ]
        site = Site(kind, rules)

        def ask(path: str) -> int:
            if kind == "wsgi":
                return site.request(path).status
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            run(site.app(asgi_scope(path, "GET"), wire.receive, wire.send))
            return wire.answered().status

        assert [ask("/held") for _ in range(3)] == [200] * 3
        lease = run(held.acquire("everyone"))
        assert ask("/held") == 503
        assert run(lease.release())
        assert [ask("/login") for _ in range(5)] == [200] * 5
        site.handle = lambda: 401
        assert [ask("/login") for _ in range(3)] == [401, 401, 429]
        assert run(wide.peek("everyone")).remaining == 100 - 3 - 5 - 2

        # Redis goes away between the request and the end of its answer: that is sent all the same.
        def lose() -> int:
            through.server_port = 1
            through.cut()
            return 200

        site.handle = lose
        assert ask("/held") == 200
        assert store.status().failures > 0
        run(store.close())


def test_permits_are_back_before_the_client_can_send_again(server: RedisServer) -> None:
    async def ask(store: Any) -> None:
        held, free = Concurrency(store, "held", 1, lease="1 hour"), TokenBucket(store, "free", "1/hour")
        left: list[tuple[str, int, int]] = []

        async def send(message: Any) -> None:
            key = "everyone"
            left.append((message["type"], (await held.peek(key)).remaining, (await free.peek(key)).remaining))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"do", "more_body": True})
            await send({"type": "http.response.body", "body": b"ne"})

        by_status = Rule(free, key=everyone, charge_on={401, DISCONNECTED})
        by_end = Rule(free, key=everyone, charge_on={401})
        for rule, at_start in ((by_end, 1), (by_status, 0)):
            left.clear()
            limited = ASGIMiddleware(app, [Rule(held, key=everyone), rule])
            await limited(asgi_scope("/", "GET"), Wire().receive, send)
            start, body = "http.response.start", "http.response.body"
            assert left == [(start, 0, at_start), (body, 0, at_start), (body, 1, 1)]

    in_event_loop(server.url, ask, timeout=PATIENT_S)


@pytest.mark.parametrize("how", ["cancelled", "gone", "failed", "web socket"])
def test_every_end_of_a_request_gives_back(how: str, server: RedisServer) -> None:
    async def ask(store: Any) -> None:
        held = Concurrency(store, "held", 3, lease="1 hour")
        guesses = TokenBucket(store, "guesses", "3/hour")
        wide = TokenBucket(store, "wide", "100/week")
        rules = [
            Rule(held, key=everyone),
            Rule(guesses, key=everyone, charge_on={401}),
            Rule(wide, key=everyone),
        ]
        inside = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if how == "web socket":
                await send({"type": "websocket.accept"})
            assert (await held.peek("everyone")).remaining == 2
            inside.set()
            if how == "failed":
                raise ValueError("the application's own")
            while how != "cancelled" and not (await receive())["type"].endswith("disconnect"):
                pass
            await (asyncio.Event().wait() if how == "cancelled" else asyncio.sleep(0))

        kind = "websocket" if how == "web socket" else "http"
        limited = ASGIMiddleware(app, rules)
        wire = Wire({"type": f"{kind}.request"}, {"type": f"{kind}.disconnect"})
        task = asyncio.ensure_future(limited(asgi_scope("/", "GET") | {"type": kind}, wire.receive, wire.send))
        await inside.wait()
        if how == "cancelled":
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ValueError):
            await task
        async with asyncio.timeout(PATIENT_S):
            # The limiters give no sign: a cancelled request doesn't wait for the release.
            while (await held.peek("everyone")).remaining < 3 or (await guesses.peek("everyone")).remaining < 3:
                assert how == "cancelled"
                await asyncio.sleep(0.005)
        assert (await wide.peek("everyone")).remaining == 99

    in_event_loop(server.url, ask, timeout=PATIENT_S)


def test_a_request_that_is_cancelled_at_any_call_holds_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled while the reply to its first call is on its way, or to its second, and so on to the last."""

    async def ask(store: Any) -> None:
        held, guesses = Concurrency(store, "held", 3, lease="1 hour"), TokenBucket(store, "guesses", "100/hour")
        wide = TokenBucket(store, "wide", "100/hour")
        limited = ASGIMiddleware(
            app, [Rule(held, key=everyone), Rule(guesses, key=everyone, charge_on={401}), Rule(wide, key=everyone)]
        )
        for number in range(1, 20):
            count, under_way, may_come = itertools.count(1), asyncio.Event(), asyncio.Event()

            async def late(
                calls: Any,
                number: int = number,
                count: Iterator[int] = count,
                under_way: asyncio.Event = under_way,
                may_come: asyncio.Event = may_come,
            ) -> None:
                if next(count) == number:
                    under_way.set()
                    await may_come.wait()

            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            with monkeypatch.context() as patch:
                held_up(store, patch, after=late)
                task = asyncio.ensure_future(limited(asgi_scope("/", "GET"), wire.receive, wire.send))
                waiting = asyncio.ensure_future(under_way.wait())
                await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                is_over = task.done()
                task.cancel()
                may_come.set()
                await asyncio.wait([task])
            async with asyncio.timeout(PATIENT_S):
                while (await held.peek("everyone")).remaining < 3:
                    await asyncio.sleep(0.005)
                while (await guesses.peek("everyone")).remaining < 100:
                    await asyncio.sleep(0.005)
            if is_over:
                break
        # Whether it may be handled, its answer's beginning, and its end.
        assert number == 4

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    in_event_loop(server.url, ask, timeout=PATIENT_S)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_request_that_is_cancelled_just_when_it_is_admitted_holds_nothing(
    is_own: bool, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply has arrived, and each task that it passes through may be the last one that has it."""

    async def cancelled_after(turns: int, store: Any, limited: ASGIMiddleware) -> None:
        answered = asyncio.Event()

        async def tell(calls: Any) -> None:
            answered.set()

        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        with monkeypatch.context() as patch:
            held_up(store, patch, after=tell)
            task = asyncio.ensure_future(limited(asgi_scope("/", "GET"), wire.receive, wire.send))
            await answered.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async def ask() -> None:
        options: Any = {"socket_timeout": PATIENT_S, "socket_connect_timeout": PATIENT_S}
        client = redis.asyncio.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0), **options)
        async with AsyncRedisStore(client) if is_own else AsyncRedisStore(server.url, timeout=PATIENT_S) as store:
            held, guesses = Concurrency(store, "held", 3, lease="1 hour"), TokenBucket(store, "guesses", "100/hour")
            rules = [Rule(held, key=everyone), Rule(guesses, key=everyone, charge_on={401})]
            for turns in range(8):
                await cancelled_after(turns, store, ASGIMiddleware(app, rules))
                async with asyncio.timeout(PATIENT_S):
                    while (await held.peek("everyone")).remaining < 3:
                        await asyncio.sleep(0.005)
                    while (await guesses.peek("everyone")).remaining < 100:
                        await asyncio.sleep(0.005)
        await client.aclose()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # It is still there when it is cancelled.
        await asyncio.Event().wait()

    asyncio.run(ask())


def test_held_permits_are_renewed_in_the_event_loop(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock
) -> None:
    async def ask(store: Any) -> None:
        held = Concurrency(store, "held", 3, lease="1 second")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            (name,) = client.keys("*held*")
            # Far beyond the lease that it was given. Only the test moves the server's time, so no pause ends the lease.
            for _ in range(4):
                ((_, end),) = client.zrange(name, 0, 0, withscores=True)
                server_clock.advance(0.5)
                async with asyncio.timeout(PATIENT_S):
                    while client.zrange(name, 0, 0, withscores=True)[0][1] < end + 500_000:
                        await asyncio.sleep(0.01)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

        limited = ASGIMiddleware(app, [Rule(held, key=everyone)])
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        await limited(asgi_scope("/", "GET"), wire.receive, wire.send)
        assert wire.answered().status == 200
        assert (await held.peek("everyone")).remaining == 3

    in_event_loop(server.url, ask, timeout=PATIENT_S)


def test_held_permits_are_renewed_while_a_thread_waits(
    server: RedisServer, server_clock: ServerClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of the clock after another, as time passes at the server, too: each third of the lease once."""
    clock = WatchedClock()
    begin_s = server_clock.now()
    monkeypatch.setattr(cleanup, "time", SimpleNamespace(monotonic=clock.now))
    with RedisStore(server.url, timeout=PATIENT_S) as there, Store.private(keys=9, clock=clock) as here:
        limiter = Concurrency(there, "held", 1, lease="3 seconds")
        held = Held(clock, limiter, Rule(limiter, key=everyone))
        check = held.check

        def time_passes() -> None:
            server_clock.set(begin_s + clock.now())
            check()

        held.check = time_passes  # type: ignore[method-assign]
        renewals: list[float] = []
        renew = cleanup.RequestCleanup.renew

        def counted(of: Any) -> None:
            renewals.append(clock.now())
            renew(of)

        monkeypatch.setattr(cleanup.RequestCleanup, "renew", counted)

        def app(environ: Any, start_response: Any) -> list[bytes]:
            assert len(environ["wsgi.input"].read()) == 100_000
            start_response("200 OK", [("Content-Type", "text/plain")])(b"a" * 3)
            return [b"a"]

        held.watch()
        gap = MinInterval(here, "gap", "10s")
        gap.reserve("everyone")
        # A byte each five seconds, of which one may go at once.
        slow = ByteRate(TokenBucket(here, "slow", "12 B/minute", burst=1), key=everyone)
        rules = [held.rule, Rule(gap, key=everyone, delay="1 hour"), slow]
        environ = wsgi_environ("/", "POST", body=b"x" * 100_000)
        answer: Any = WSGIMiddleware(app, rules)(environ, lambda *_: lambda part: None)
        assert list(answer) == [b"a"]
        answer.close()
        assert renewals == [*range(1, 26)]
        assert held.ended()


def test_parts_of_a_long_response_do_not_wait_for_redis(server: RedisServer, client: redis.Redis) -> None:
    def calls() -> int:
        statistics = client.info("commandstats")
        return int(statistics.get("cmdstat_evalsha", {}).get("calls", 0))

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        return iter([b"part"] * 500)

    with RedisStore(server.url, timeout=PATIENT_S) as store:
        held = Concurrency(store, "held", 1, lease="1 hour")
        site = Site("wsgi", [Rule(held, key=everyone)])
        assert site.request("/").status == 200
        before = calls()
        limited = WSGIMiddleware(app, [Rule(held, key=everyone)])
        body: Any = limited(wsgi_environ("/", "GET"), lambda *_: None)
        assert len(list(body)) == 500
        body.close()
        assert calls() - before < 10
        assert held.peek("everyone").remaining == 1


def test_no_call_blocks_the_event_loop(server: RedisServer, redis_store: RedisStore, async_store: Any) -> None:
    sync = Rule(TokenBucket(redis_store, "api", "2/hour"))
    awaited = Rule(TokenBucket(async_store, "api", "2/hour"))
    for make in (
        lambda: ASGIMiddleware(lambda *_: None, [sync]),  # type: ignore[arg-type, return-value]
        lambda: forebay.contrib.fastapi.setup(FastAPI(), [sync]),
        lambda: forebay.contrib.aiohttp.setup(web.Application(), [sync]),
        lambda: forebay.contrib.fastapi.limited(sync),
        lambda: forebay.contrib.aiohttp.limited(sync),
    ):
        with pytest.raises(InvalidLimiter, match="AsyncRedisStore"):
            make()
    for make in (
        lambda: WSGIMiddleware(lambda *_: [], [awaited]),
        lambda: forebay.contrib.flask.Limits(flask.Flask("shop"), [awaited]),
        lambda: forebay.contrib.flask.Limits(flask.Flask("shop")).limit(awaited),
    ):
        with pytest.raises(InvalidLimiter, match="over a RedisStore"):
            make()
    with pytest.raises(InvalidLimiter, match="partition_keys"):
        WSGIMiddleware(lambda *_: [], [sync], partition_keys=True)


def test_flask(redis_store: RedisStore, gone: str) -> None:
    with RedisStore(gone, timeout=PATIENT_S) as away:
        for store, statuses in ((redis_store, [200, 200, 429]), (away, [503] * 3)):
            app = flask.Flask("shop")
            limits = forebay.contrib.flask.Limits(app)

            @app.route("/")
            @limits.limit(TokenBucket(store, "api", "2/hour"))
            def home() -> str:
                return "done"

            answers = [app.test_client().get("/") for _ in range(3)]
            assert [answer.status_code for answer in answers] == statuses
            assert "Retry-After" in answers[2].headers
            assert answers[2].content_type == "application/problem+json"


urlpatterns: list[Any] = []


@pytest.mark.parametrize("options", [{}, {"interval": "1 minute", "keys": 100}], ids=["leased", "synced"])
def test_throttles_of_small_limits_count_where_no_log_can_be(redis_store: RedisStore, options: Any) -> None:
    class ByAll(SimpleRateThrottle):
        scope = "all"
        rate = "2/hour"

        def get_cache_key(self, request: Any, view: Any) -> str:
            return "all"

    request: Any = SimpleNamespace(_request=HttpRequest())
    view: Any = None
    kind: Any = SyncedStore if options else LeasedStore
    with (
        Store.private(keys=100) as host,
        kind(redis_store, host, **options) as store,
        override_settings(FOREBAY={"STORE": store}),
    ):
        assert [ByAll().allow_request(request, view) for _ in range(3)] == [True, True, False]


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
                ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], FOREBAY={"RULES": rules, "STORE": store}
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
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], FOREBAY={"RULES": rules}):
        django.urls.clear_url_caches()
        assert loop.run_until_complete(ask()) == [200, 200, 429] * 2


def test_aiohttp(server: RedisServer, gone: str) -> None:
    async def ask(store: Any) -> list[int]:
        app = web.Application()
        forebay.contrib.aiohttp.setup(app, [Rule(TokenBucket(store, "api", "3/hour"), key=everyone)])

        @forebay.contrib.aiohttp.limited(TokenBucket(store, "view", "2/hour"), key=everyone)
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

    assert in_event_loop(server.url, ask, timeout=PATIENT_S) == [200, 200, 429, 429]
    assert in_event_loop(gone, ask, timeout=PATIENT_S) == [503] * 4


def test_fastapi(server: RedisServer, gone: str) -> None:
    async def ask(store: Any) -> list[int]:
        app = FastAPI()
        forebay.contrib.fastapi.setup(app, [Rule(TokenBucket(store, "api", "3/hour"), key=everyone)])
        view = forebay.contrib.fastapi.limited(TokenBucket(store, "view", "2/hour"), key=everyone)

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

    assert in_event_loop(server.url, ask, timeout=PATIENT_S) == [200, 200, 429, 429]
    assert in_event_loop(gone, ask, timeout=PATIENT_S) == [503] * 4


def rules_with_ends(store: Any) -> list[Any]:
    return [
        Rule(Concurrency(store, "held", 1, lease="1 hour"), key=everyone),
        Rule(TokenBucket(store, "guesses", "2/hour"), key=everyone, charge_on={401}),
    ]


async def check_ends(store: Any, ask: Callable[[int], Awaitable[int]]) -> None:
    """Check an application that responds with the requested status."""
    held = Concurrency(store, "held", 1, lease="1 hour")
    for status, answer in ((200, 200), (401, 401), (200, 200), (500, 500), (401, 401), (401, 429), (200, 429)):
        assert await ask(status) == answer
        async with asyncio.timeout(PATIENT_S):
            # A stream of Django is closed in a thread, and what it held comes back later.
            while (await held.peek("everyone")).remaining < 1:
                await asyncio.sleep(0.005)
    await held.refund("everyone")


@pytest.mark.parametrize("where", ["all", "view"])
def test_fastapi_gives_back(where: str, server: RedisServer) -> None:
    async def ask(store: Any) -> None:
        rules = rules_with_ends(store)
        app = FastAPI()
        forebay.contrib.fastapi.setup(app, rules if where == "all" else [])
        depends = [Depends(forebay.contrib.fastapi.limited(*rules))] if where == "view" else []

        @app.get("/{status}", dependencies=depends)
        async def home(status: int) -> Response:
            return Response("done", status)

        async def get(status: int) -> int:
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            await app(asgi_scope(f"/{status}", "GET") | {"query_string": b""}, wire.receive, wire.send)
            return wire.answered().status

        await check_ends(store, get)

    in_event_loop(server.url, ask, timeout=PATIENT_S)


@pytest.mark.parametrize("where", ["all", "view"])
def test_aiohttp_gives_back(where: str, server: RedisServer) -> None:
    async def ask(store: Any) -> None:
        rules = rules_with_ends(store)
        app = web.Application()
        forebay.contrib.aiohttp.setup(app, rules if where == "all" else [])

        async def home(request: web.Request) -> web.StreamResponse:
            return web.Response(status=int(request.match_info["status"]))

        limited = forebay.contrib.aiohttp.limited(*rules)
        app.router.add_get("/{status}", limited(home) if where == "view" else home)
        async with TestClient(TestServer(app)) as client:

            async def get(status: int) -> int:
                return (await client.get(f"/{status}")).status

            await check_ends(store, get)

    in_event_loop(server.url, ask, timeout=PATIENT_S)


@pytest.mark.parametrize("where", ["all", "view", "stream"])
def test_django_gives_back(where: str, server: RedisServer) -> None:
    async def ask(store: Any) -> None:
        rules = rules_with_ends(store)

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"part"

        async def home(request: HttpRequest, status: int) -> Any:
            return StreamingHttpResponse(parts(), status=status) if where == "stream" else HttpResponse(status=status)

        urlpatterns[:] = [path("<int:status>", limited(*rules)(home) if where == "view" else home)]
        every = [] if where == "view" else rules
        with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], FOREBAY={"RULES": every}):
            django.urls.clear_url_caches()

            async def get(status: int) -> int:
                response = await AsyncClient().get(f"/{status}")
                if response.streaming:
                    assert len([part async for part in response.streaming_content]) == 50
                await sync_to_async(response.close)()
                return int(response.status_code)

            await check_ends(store, get)

    in_event_loop(server.url, ask, timeout=PATIENT_S)


@pytest.mark.parametrize("how", ["gone before the answer", "fails"])
def test_a_stream_of_django_that_never_ends_holds_nothing(
    how: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(store: Any) -> None:
        is_late = asyncio.Event()

        async def late(calls: Any) -> None:
            if any(call[4] == b"cancel" for call in calls) and how != "fails":
                # The client goes while this is given back.
                is_late.set()
                await asyncio.sleep(0.05)

        held_up(store, monkeypatch, before=late)

        async def parts() -> AsyncIterator[bytes]:
            yield b"part"
            raise RuntimeError("it broke")

        async def home(request: Any) -> Any:
            # Django leaves it open when parts fail.
            opened.callback(request._stream.close)
            return StreamingHttpResponse(parts())

        urlpatterns[:] = [path("", home)]
        held = Concurrency(store, "held", 1, lease="1 hour")
        rules = [
            Rule(held, key=everyone),
            Rule(TokenBucket(store, "guesses", "1/hour"), key=everyone, charge_on=lambda status: False),
        ]
        request = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            for message in request:
                return message
            await is_late.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        settings_of_it = override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[LIMITS], FOREBAY={"RULES": rules})
        with settings_of_it, contextlib.ExitStack() as opened:
            django.urls.clear_url_caches()
            with contextlib.suppress(RuntimeError):
                await get_asgi_application()(asgi_scope("/", "GET") | {"query_string": b""}, receive, send)
        async with asyncio.timeout(PATIENT_S):
            while (await held.peek("everyone")).remaining < 1:
                await asyncio.sleep(0.005)

    in_event_loop(server.url, ask, timeout=PATIENT_S)


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

    assert in_event_loop(server.url, ask, timeout=PATIENT_S) == "websocket.accept"
    assert in_event_loop(server.url, ask, timeout=PATIENT_S) == "websocket.close Too Many Requests"
    assert in_event_loop(gone, ask, timeout=PATIENT_S) == "websocket.close Service Unavailable"


def gives_back(call: tuple[Any, ...]) -> bool:
    """Of EVALSHA, its script's hash, and one key."""
    return call[4] in (b"release", b"cancel")


@pytest.mark.parametrize("how", ["whole", "part", "raised", "failed", "file", "ended"])
def test_aiohttp_gives_back_before_its_response(
    how: str, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("done")

    async def home(request: web.Request) -> web.StreamResponse:
        if how == "whole":
            return web.Response(text="done", status=500)
        if how == "raised":
            raise web.HTTPConflict
        if how == "failed":
            raise RuntimeError("for the log")
        if how == "file":
            return web.FileResponse(tmp_path / "file")
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"part")
        if how == "ended":
            await response.write_eof()
        return response

    async def ask(store: Any) -> None:
        async def late(calls: Any) -> None:
            if any(map(gives_back, calls)):
                await asyncio.sleep(0.05)

        held_up(store, monkeypatch, before=late)
        app = web.Application()
        rules = [Rule(TokenBucket(store, "guesses", "1/hour"), key=everyone, charge_on={401})]
        if how not in ("file", "ended"):
            # Of these the last part goes to the client while it is still held.
            rules.append(Rule(Concurrency(store, "held", 1, lease="1 hour"), key=everyone))
        forebay.contrib.aiohttp.setup(app, rules)
        app.router.add_get("/", home)
        async with TestClient(TestServer(app)) as client:
            for _ in range(3):
                answer = await client.get("/")
                assert answer.status == {"raised": 409, "whole": 500, "failed": 500}.get(how, 200)
                await answer.read()

    in_event_loop(server.url, ask, timeout=PATIENT_S)


def test_a_response_waits_for_one_deadline_of_an_unavailable_store(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
        assert b"release" not in missed

    async def ask() -> None:
        async with AsyncRedisStore(server.url, timeout=2) as store:

            async def silent(calls: Any) -> None:
                if any(map(gives_back, calls)):
                    try:
                        await asyncio.get_running_loop().create_future()
                    finally:
                        missed.extend(call[4] for call in calls)

            held_up(store, monkeypatch, before=silent)
            rules = [
                Rule(TokenBucket(store, "guesses", "1/hour"), key=everyone, charge_on={401}),
                Rule(Concurrency(store, "held", 1, lease="1 hour"), key=everyone),
            ]
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            await ASGIMiddleware(app, rules)(asgi_scope("/", "GET"), wire.receive, wire.send)
            assert wire.answered().status == 200
            async with asyncio.timeout(PATIENT_S):
                # It went on.
                while sorted(missed) != [b"cancel", b"release"]:
                    await asyncio.sleep(0.005)

    asyncio.run(ask())


@pytest.fixture(params=["wsgi", "asgi"])
def asking(
    request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop
) -> Iterator[Callable[..., tuple[Any, Site, Callable[[Any], Any], Callable[..., int]]]]:
    """Makes, from a URL and a function for rules: a store, its site, a function that awaits if needed, and one that
    requests a path.
    """
    stores: list[Any] = []

    def run(answer: Any) -> Any:
        return loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    def make(url: str, rules_of: Callable[[Any], Any], timeout: float = PATIENT_S, **options: Any) -> Any:
        kind: Any = RedisStore if request.param == "wsgi" else AsyncRedisStore
        store = kind(url, timeout=timeout, **options)
        stores.append(store)
        site = Site(request.param, rules_of(store))

        def ask(path: str = "/") -> int:
            if request.param == "wsgi":
                return site.request(path).status
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            run(site.app(asgi_scope(path, "GET"), wire.receive, wire.send))
            return wire.answered().status

        return store, site, run, ask

    yield make
    for store in stores:
        run(store.close())


def test_all_calls_of_a_request_share_one_deadline(asking: Any, server: RedisServer) -> None:
    """Each call alone is answered in time. The breaker counts such a slow server as failing."""

    def rules(store: Any) -> list[Rule]:
        return [
            Rule(TokenBucket(store, "wide", "100/hour"), key=everyone),
            Rule(Concurrency(store, "held", 10, lease="1 hour"), key=everyone),
        ]

    def failures(least: int) -> int:
        async def work_done() -> None:
            while store.status().failures < least:
                await asyncio.sleep(0.005)

        # The work that goes on in the event loop, after the response.
        if isinstance(store, AsyncRedisStore):
            run(asyncio.wait_for(work_done(), PATIENT_S))
        return int(store.status().failures)

    with proxy(server.port) as through:
        store, site, run, ask = asking(through.url, rules, timeout=1.0)
        assert ask() == 200
        assert store.status().failures == 0
        through.delay_s = 0.6
        assert ask() == 200
        assert failures(1) == 1
        for _ in range(2):
            ask()
        assert failures(3) == 3
        assert store.status().state == "open"
        handled = site.handled
        assert ask() == 503
        assert site.handled == handled
        through.delay_s = 0


def test_a_request_is_one_round_trip_and_its_end_another(
    asking: Any, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rules(store: Any) -> list[Rule]:
        return [
            Rule(TokenBucket(store, "wide", "100/hour"), key=everyone),
            Rule(TokenBucket(store, "hidden", "100/hour"), key=everyone, answer=Answer(200)),
            Rule(TokenBucket(store, "guesses", "3/hour"), key=everyone, charge_on={401, DISCONNECTED}),
            Rule(LeakyBucket(store, "queue", "3/hour", capacity=3), key=everyone, charge_on={401, DISCONNECTED}),
            Rule(Concurrency(store, "held", 10, lease="1 hour"), key=everyone),
            Rule(Concurrency(store, "one more", 10, lease="1 hour"), key=everyone),
        ]

    store, site, _, ask = asking(server.url, rules)
    sent: list[list[bytes]] = []
    for owner, name in ((store.executor, "execute_command"), (store.executor.client, "execute_many")):
        send = getattr(owner, name)

        def counted(*calls: Any, send: Any = send, name: str = name) -> Any:
            sent.append([call[4 + int(call[2]) - 1] for call in (calls[0] if name == "execute_many" else [calls])])
            return send(*calls)

        monkeypatch.setattr(owner, name, counted)
    assert ask() == 200
    # The first ones bring their scripts along.
    sent.clear()
    for _ in range(3):
        assert ask() == 200
    assert list(map(sorted, sent)) == [[b"hit"], [b"cancel", b"cancel", b"release", b"release"]] * 3
    site.handle = lambda: 401
    assert [ask() for _ in range(5)] == [401, 401, 401, 429, 429]


@pytest.mark.parametrize("policy", ["allow", "local"])
def test_held_and_refunded_permits_without_redis(asking: Any, gone: str, policy: str) -> None:
    def rules(store: Any) -> list[Rule]:
        return [
            Rule(Concurrency(store, "held", 2, lease="1 hour"), key=everyone),
            Rule(TokenBucket(store, "guesses", "4/hour"), key=everyone, charge_on={401}),
            Rule(LeakyBucket(store, "queue", "40/hour", capacity=40), key=everyone, charge_on={401}),
            Rule(TokenBucket(store, "wide", "100/hour"), key=everyone, path="/some"),
        ]

    with Store.private(keys=1000) as host:
        options = {"host": host, "hosts": 2} if policy == "local" else {}
        _, site, run, ask = asking(gone, rules, when_unavailable=policy, **options)
        assert [ask("/some") for _ in range(5)] == [200] * 5
        held = site.rules[0].limiter
        lease = run(held.acquire("everyone"))
        assert ask() == (200 if policy == "allow" else 503)
        run(lease.release())
        assert ask() == 200
        site.handle = lambda: 401
        assert [ask() for _ in range(3)] == [401, 401, 401 if policy == "allow" else 429]


def test_permits_are_given_back_without_any_time_left(server: RedisServer, redis_store: RedisStore) -> None:
    held = Concurrency(redis_store, "held", 3, lease="1 hour")
    # So that the server knows the script.
    assert held.acquire("everyone").release()
    leases, patience = [held.acquire("everyone") for _ in range(3)], redis_store.executor.patience()
    patience.left_s = 0.0
    with server.stopped():
        redis_store.executor.give_back(leases, patience)
        assert redis_store.status().failures == 1
    for _ in range(3000):
        if held.peek("everyone").remaining == 3:
            break
        time.sleep(0.01)
    assert held.peek("everyone").remaining == 3


def test_permit_is_released_by_a_redis_too_slow_for_the_refund_before(server: RedisServer) -> None:
    """A refund that times out closes its connection: the release after it has no time left to open another one."""
    with proxy(server.port) as through, RedisStore(through.url, timeout=1.0) as store:
        held = Concurrency(store, "held", 1, lease="1 hour")
        guesses = TokenBucket(store, "guesses", "100/hour")
        site = Site("wsgi", [Rule(guesses, key=everyone, charge_on={401}), Rule(held, key=everyone)])
        # The server then knows the scripts.
        assert site.request("/").status == 200
        through.delay_s = 0.6
        assert site.request("/").status == 200
        through.delay_s = 0
        for _ in range(500):
            if held.peek("everyone").remaining == 1:
                break
            time.sleep(0.01)
        assert held.peek("everyone").remaining == 1
        assert guesses.peek("everyone").remaining == 100


def test_a_client_of_the_callers_has_one_deadline_for_a_request(server: RedisServer) -> None:
    """Each of its calls has a deadline of its own."""

    async def ask() -> None:
        options: Any = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "retry": Retry(NoBackoff(), 0)}
        client = redis.asyncio.Redis(host="127.0.0.1", port=through.port, **options)
        async with AsyncRedisStore(client) as store:
            held = Concurrency(store, "held", 1, lease="1 hour")
            limited = ASGIMiddleware(nothing_to_do, [Rule(held, key=everyone)])
            assert (await held.peek("everyone")).remaining == 1
            with server.client() as other:
                other.script_flush()
            # It doesn't have the script, and gets another call with its text.
            through.delay_s = 0.6
            wire = Wire({"type": "http.request", "body": b"", "more_body": False})
            await limited(asgi_scope("/", "GET"), wire.receive, wire.send)
            assert wire.answered().status == 503
            assert store.status().failures == 1
            through.delay_s = 0
            async with asyncio.timeout(PATIENT_S):
                # The permits that were taken after that have come back.
                while store.executor.going_on or (await held.peek("everyone")).remaining < 1:
                    await asyncio.sleep(0.005)
        await client.aclose()

    async def nothing_to_do(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was let in")

    with proxy(server.port) as through:
        asyncio.run(ask())


def test_a_request_that_ends_after_its_event_loop_is_no_error() -> None:
    """As when a response is closed in a thread while the server stops: held permits lapse by themselves."""

    async def begun() -> BackgroundRelease:
        return BackgroundRelease(Patience(1.0))

    async def give_back() -> None:
        raise AssertionError("there is no loop for it")

    asyncio.run(begun()).start(give_back())
