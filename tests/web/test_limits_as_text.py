"""Limits as text, by a view's decorator or dependency: in every framework, in one process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import django
import flask
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import include
from django.urls import path as django_path
from django.utils.decorators import method_decorator
from django.views import View
from fastapi import APIRouter, Depends, FastAPI
from web_requests import CLIENT, Answered, call_asgi, call_wsgi

from forebay import InvalidLimiter, InvalidRate, Store, TokenBucket
from forebay.contrib.endpoints import NotInstalled, endpoint_of
from forebay.redis import AsyncRedisStore, RedisStore
from forebay.testing import ManualClock
from forebay.web import AddressList, Deny, RequestId, Rule, everyone, header

APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
if not settings.configured:
    settings.configure(SECRET_KEY="known to everybody", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, INSTALLED_APPS=APPS)
django.setup()

import forebay.contrib.aiohttp as in_aiohttp  # noqa: E402
import forebay.contrib.django as in_django  # noqa: E402
import forebay.contrib.fastapi as in_fastapi  # noqa: E402
from forebay.contrib.django.checks import check_settings  # noqa: E402
from forebay.contrib.flask import Limits  # noqa: E402

urlpatterns: list[Any] = []
LIMITS = "forebay.contrib.django.LimitsMiddleware"
FRAMEWORKS = ["flask", "django", "async django", "fastapi", "aiohttp"]

Ask = Callable[..., tuple[int, dict[str, str]]]
"""Sends a request for a path, with header fields, and returns the status and the fields of its response."""


def call_fastapi(app: FastAPI, path: str, **scope: Any) -> Answered:
    return call_asgi(app, path, **{"query_string": b"", **scope})


class Served:
    """An application with the views `/one` and `/two`, whose limits are given, in a framework."""

    def __init__(self, store: Any, clock: ManualClock) -> None:
        self.store, self.clock = store, clock

    def ask(self, framework: str, one: Any, two: Any = (), **options: Any) -> Ask:
        """`one` and `two`: the arguments of `limited` of each view."""
        build = {"flask": self._flask, "fastapi": self._fastapi, "aiohttp": self._aiohttp}
        if framework in build:
            return build[framework](one, two, **options)
        return self._django(one, two, is_async=framework == "async django", **options)

    def _flask(self, one: Any, two: Any, **options: Any) -> Ask:
        app = flask.Flask("shop")
        app.testing = True
        limits = Limits(app, store=self.store)

        def one_view() -> str:
            return "one"

        def two_view() -> str:
            return "two"

        app.get("/one")(limits.limit(*one, **options)(one_view))
        app.get("/two")(limits.limit(*(two or one), **options)(two_view))

        def ask(path: str, **fields: str) -> tuple[int, dict[str, str]]:
            answer = call_wsgi(app, path, fields=list(fields.items()))
            return answer.status, dict(answer.fields)

        return ask

    def _fastapi(self, one: Any, two: Any, **options: Any) -> Ask:
        app = FastAPI()
        in_fastapi.setup(app, store=self.store)

        @app.get("/one", dependencies=[Depends(in_fastapi.limited(*one, **options))])
        async def one_view() -> str:
            return "one"

        @app.get("/two", dependencies=[Depends(in_fastapi.limited(*(two or one), **options))])
        def two_view() -> str:
            return "two"

        def ask(path: str, **fields: str) -> tuple[int, dict[str, str]]:
            answer = call_fastapi(app, path, fields=list(fields.items()))
            return answer.status, dict(answer.fields)

        return ask

    def _aiohttp(self, one: Any, two: Any, **options: Any) -> Ask:
        @in_aiohttp.limited(*one, **options)
        async def one_view(request: web.Request) -> web.Response:
            return web.Response()

        class TwoView(web.View):
            @in_aiohttp.limited(*(two or one), **options)
            async def get(self) -> web.Response:
                return web.Response()

        def ask(path: str, **fields: str) -> tuple[int, dict[str, str]]:
            async def send() -> tuple[int, dict[str, str]]:
                app = web.Application(middlewares=[peer])
                app.middlewares.append(middleware)
                app.router.add_get("/one", one_view)
                app.router.add_view("/two", TwoView)
                async with TestClient(TestServer(app)) as client, client.get(path, headers=fields) as response:
                    return response.status, {name.lower(): value for name, value in response.headers.items()}

            return asyncio.run(send())

        @web.middleware
        async def peer(request: web.Request, handler: Any) -> Any:
            return await handler(request.clone(remote=CLIENT))

        middleware = in_aiohttp.middleware(store=self.store)
        return ask

    def _django(self, one: Any, two: Any, is_async: bool, **options: Any) -> Ask:
        two_view: Any
        if is_async:

            @in_django.limited(*one, **options)
            async def one_view(request: HttpRequest) -> HttpResponse:
                return HttpResponse()

            @in_django.limited(*(two or one), **options)
            async def two_view(request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        else:

            @in_django.limited(*one, **options)
            def one_view(request: HttpRequest) -> HttpResponse:
                return HttpResponse()

            class TwoView(View):
                @method_decorator(in_django.limited(*(two or one), **options))
                def get(self, request: HttpRequest) -> HttpResponse:
                    return HttpResponse()

            two_view = TwoView.as_view()

        urls = (django_path("one", one_view), django_path("two", two_view))

        def ask(path: str, **fields: str) -> tuple[int, dict[str, str]]:
            with self.django(urls):
                if is_async:
                    response = asyncio.run(AsyncClient().get(path, headers=fields))
                else:
                    response = Client(REMOTE_ADDR=CLIENT).get(path, headers=fields)
            return response.status_code, {name.lower(): value for name, value in response.headers.items()}

        return ask

    def django(self, urls: Any) -> Any:
        return override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[LIMITS], FOREBAY={"STORE": self.store})

    def names(self) -> set[str]:
        return set(self.store.stats().limiters)


@pytest.fixture
def served(clock: ManualClock) -> Iterator[Served]:
    with Store.private(keys=100, clock=clock) as store:
        yield Served(store, clock)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_endpoint_has_a_limit_of_its_own(framework: str, served: Served) -> None:
    ask = served.ask(framework, ["2/minute; 3/hour"])
    answers = [ask("/one") for _ in range(3)]
    assert [status for status, _ in answers] == [200, 200, 429]
    assert answers[0][1]["ratelimit"].count("r=") == 2
    # All or none: the denial took nothing of the hour.
    served.clock.advance(60)
    assert [ask("/one")[0] for _ in range(2)] == [200, 429]
    assert [ask("/two")[0] for _ in range(3)] == [200, 200, 429]
    # Named by the endpoint, so the same in another process, and in an application that is made anew.
    assert len(served.names()) == 4
    again = served.ask(framework, ["2/minute; 3/hour"])
    assert again("/two")[0] == 429
    assert len(served.names()) == 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_with_a_name_is_one_limit_of_all_its_endpoints(framework: str, served: Served) -> None:
    ask = served.ask(framework, ["3/minute"], name="orders")
    assert [ask(path)[0] for path in ("/one", "/two", "/one", "/two")] == [200, 200, 200, 429]
    assert served.names() == {"orders 3 per minute"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_stands_beside_limiters_and_takes_options(framework: str, served: Served) -> None:
    shared = TokenBucket(served.store, "shared", "3/day")
    customer = header("X-Customer", otherwise=everyone)
    ask = served.ask(framework, ["2/minute", shared], key=customer)
    assert [ask("/one", **{"X-Customer": "ada"})[0] for _ in range(3)] == [200, 200, 429]
    assert ask("/one", **{"X-Customer": "bob"})[0] == 200
    assert [ask("/two", **{"X-Customer": "ada"})[0] for _ in range(2)] == [200, 429]
    assert shared.peek(("header", "x-customer", "ada"), 0).remaining == 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_views_refuse_clients_by_their_address(framework: str, served: Served) -> None:
    listed, others = AddressList(["192.0.2.0/24", "127.0.0.0/8"]), AddressList("203.0.113.0/24")
    ask = served.ask(framework, [Deny(listed), "1/minute"], [Deny(others), "1/minute"])
    status, fields = ask("/one")
    assert (status, "ratelimit" in fields, fields["content-type"]) == (403, False, "application/problem+json")
    assert [ask("/two")[0] for _ in range(2)] == [200, 429]
    # A refused request is charged by no rule.
    for name in served.names():
        if "one" in name:
            assert served.store.stats().limiters[name].allowed == 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_view_that_only_refuses_has_no_fields(framework: str, served: Served) -> None:
    ask = served.ask(framework, [Deny(AddressList("203.0.113.0/24"))])
    status, fields = ask("/one")
    assert (status, "ratelimit" in fields) == (200, False)


@pytest.mark.parametrize("framework", ["django", "async django", "fastapi", "aiohttp"])
def test_a_text_needs_a_store(framework: str, clock: ManualClock) -> None:
    ask = Served(None, clock).ask(framework, ["2/minute"])
    if framework == "aiohttp":
        assert ask("/one")[0] == 500
        return
    with pytest.raises(NotInstalled, match="is limited by text, 2 per minute, but its application has no store"):
        ask("/one")


def test_flask_refuses_a_text_without_a_store() -> None:
    limits = Limits(flask.Flask("shop"))
    with pytest.raises(InvalidLimiter, match=r"'5/minute' are kept in a store: write Limits\(app, store=store\)"):
        limits.limit("5/minute")


@pytest.mark.parametrize("text", ["", "5/minute; ", "5/minute, 100/hour", "often", "0/minute"])
def test_a_text_without_limits_is_refused(text: str) -> None:
    with pytest.raises(InvalidRate, match=f"limits as text are such as '5/minute; 100/hour', not '{text}'"):
        in_fastapi.limited(text)


def test_mistakes_are_found_where_they_are_written(served: Served) -> None:
    limited = in_fastapi.limited
    with pytest.raises(InvalidRate, match="has the limit 5 per minute twice"):
        limited("5/minute; 5 per minute")
    with pytest.raises(InvalidLimiter, match="cost is a whole number"):
        limited("5/minute", cost=-1)
    with pytest.raises(InvalidLimiter, match="name='orders' is for limits as text: a limiter has a name"):
        limited(TokenBucket(served.store, "bucket", "1/day"), name="orders")
    with pytest.raises(InvalidLimiter, match="name is text, not ''"):
        limited("5/minute", name="")
    with pytest.raises(InvalidLimiter, match=r"beside a Deny, an option belongs into it"):
        limited(Deny(AddressList("192.0.2.0/24")), cost=1)
    tiers = {"pro": TokenBucket(served.store, "pro", "1/day")}
    with pytest.raises(InvalidLimiter, match="tiers are those of one limiter"):
        limited("5/minute; 100/hour", tiers=tiers, tier=lambda request: "pro")

    async def key(request: Any) -> str:
        return "async"

    with pytest.raises(InvalidLimiter, match="has to be awaited, and this application has no event loop"):
        Limits(store=served.store).limit("5/minute", key=key)


def test_a_store_that_the_application_cannot_use_is_refused() -> None:
    with pytest.raises(InvalidLimiter, match=r"store is a store, as forebay.connect"):
        in_fastapi.setup(FastAPI(), store="shm:///shop")
    with RedisStore("redis://127.0.0.1:1") as store:
        with pytest.raises(InvalidLimiter, match=r"RedisStore would stop the event loop .* take an AsyncRedisStore"):
            in_fastapi.setup(FastAPI(), store=store)
        with pytest.raises(InvalidLimiter, match="RedisStore would stop the event loop"):
            in_aiohttp.setup(web.Application(), store=store)
        Limits(store=store)
    with pytest.raises(InvalidLimiter, match=r"AsyncRedisStore has to be awaited.*: take a RedisStore"):
        Limits(store=AsyncRedisStore("redis://127.0.0.1:1"))


@pytest.mark.parametrize("name", [None, "shared"])
def test_a_view_refuses_a_store_that_it_cannot_use(clock: ManualClock, name: str | None) -> None:
    options = {} if name is None else {"name": name}
    with pytest.raises(InvalidLimiter, match="has to be awaited: make it over a RedisStore"):
        Served(AsyncRedisStore("redis://127.0.0.1:1"), clock).ask("django", ["5/minute"], **options)("/one")
    with (
        RedisStore("redis://127.0.0.1:1") as store,
        pytest.raises(InvalidLimiter, match=r"would stop the event loop .*: make it over an AsyncRedisStore"),
    ):
        Served(store, clock).ask("async django", ["5/minute"], **options)("/one")


@pytest.mark.parametrize("framework", ["fastapi", "aiohttp", "async django"])
def test_a_text_takes_async_functions(framework: str, served: Served) -> None:
    async def key(request: Any) -> str:
        return "ada"

    async def cost(request: Any) -> int:
        return 2

    async def is_exempt(request: Any) -> bool:
        return request.header("X-Internal") == "yes"

    ask = served.ask(framework, ["5/minute"], key=key, cost=cost, exempt=is_exempt)
    assert [ask("/one")[0] for _ in range(3)] == [200, 200, 429]
    assert ask("/one", **{"X-Internal": "yes"})[0] == 200


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_takes_ids_of_requests(framework: str, served: Served) -> None:
    ask = served.ask(framework, ["2/minute; 9/hour"], request_id=RequestId(retries=2))
    one, two = {"Idempotency-Key": "one"}, {"Idempotency-Key": "two"}
    assert [ask("/one", **fields)[0] for fields in (one, one, two, {}, one, one)] == [200, 200, 200, 429, 200, 429]


# Names


def test_two_endpoints_of_one_name_are_refused(served: Served) -> None:
    app = FastAPI()
    in_fastapi.setup(app, store=served.store)

    def add(path: str) -> None:
        @app.get(path, dependencies=[Depends(in_fastapi.limited("2/minute"))])
        async def view() -> str:
            return path

    add("/first")
    add("/second")
    assert call_fastapi(app, "/first").status == 200
    with pytest.raises(InvalidLimiter, match=r"are both named .*add.<locals>.view'.*: give it a name of its own"):
        call_fastapi(app, "/second")
    assert call_fastapi(app, "/first").status == 200


def test_one_endpoint_at_several_paths_has_one_limit(served: Served) -> None:
    app = FastAPI()
    in_fastapi.setup(app, store=served.store)

    @app.get("/first", dependencies=[Depends(in_fastapi.limited("2/minute", name="either"))])
    @app.get("/second", dependencies=[Depends(in_fastapi.limited("2/minute", name="either"))])
    async def view() -> str:
        return "there"

    assert [call_fastapi(app, path).status for path in ("/first", "/second", "/first")] == [200, 200, 429]


def test_two_limits_of_one_endpoint_and_rate_are_refused(served: Served) -> None:
    router = APIRouter(dependencies=[Depends(in_fastapi.limited("2/minute"))])

    @router.get("/", dependencies=[Depends(in_fastapi.limited("2/minute", key=everyone))])
    async def view() -> str:
        return "there"

    app = FastAPI()
    in_fastapi.setup(app, store=served.store)
    app.include_router(router)
    with pytest.raises(InvalidLimiter, match=r"would be the limiter .* 2 per minute', and charge a request twice"):
        call_fastapi(app, "/")


def test_endpoints_are_named_by_functions_and_classes() -> None:
    class Called:
        def __call__(self) -> None: ...

        def method(self) -> None: ...

    def view(which: str) -> None: ...

    here = f"{__name__}.test_endpoints_are_named_by_functions_and_classes.<locals>"
    assert endpoint_of(view) == (f"{here}.view", view)
    assert endpoint_of(functools.partial(functools.partial(view, "one"))) == (f"{here}.view", view)
    assert endpoint_of(one := Called()) == (f"{here}.Called", one)
    assert endpoint_of(Called().method).name == f"{here}.Called.method"
    assert endpoint_of(View.as_view()) == ("django.views.generic.base.View", View)
    view.cls = "no class"  # type: ignore[attr-defined]
    assert endpoint_of(view).identity is view


def test_a_name_that_is_too_long_is_shortened(served: Served) -> None:
    """Over Redis a limiter's name has at most 100 bytes."""
    name = "orders of " + "very " * 30 + "long names"
    ask = served.ask("flask", ["1/minute; 9/hour"], name=name)
    answers = [ask("/one") for _ in range(2)]
    assert [status for status, _ in answers] == [200, 429]
    assert len(served.names()) == 2
    assert all(len(shown) <= 48 and f'"{shown}"' in answers[0][1]["ratelimit"] for shown in served.names())


def test_a_router_gives_each_endpoint_a_limit(served: Served) -> None:
    router = APIRouter(dependencies=[Depends(in_fastapi.limited("1/minute"))])

    @router.get("/first")
    async def first() -> None: ...

    @router.get("/second")
    async def second() -> None: ...

    app = FastAPI()
    in_fastapi.setup(app, store=served.store)
    app.include_router(router)
    assert [call_fastapi(app, path).status for path in ("/first", "/second", "/first")] == [200, 200, 429]


def test_a_limit_of_a_flask_blueprint_is_another_than_its_views(served: Served) -> None:
    app = flask.Flask("shop")
    limits = Limits(app, store=served.store)
    blueprint = flask.Blueprint("orders", "shop")

    @blueprint.get("/first")
    @limits.limit("2/minute")
    def first() -> str:
        return "first"

    @blueprint.get("/second")
    def second() -> str:
        return "second"

    limits.limit("3/minute; 2/minute")(blueprint)
    app.register_blueprint(blueprint)
    answers = [call_wsgi(app, path) for path in ("/first", "/first", "/first", "/second")]
    assert [answer.status for answer in answers] == [200, 200, 429, 200]
    assert "shop.orders.first 2 per minute" in served.names()
    assert "shop.orders.first in orders 2 per minute" in served.names()


def test_stacked_decorators_of_one_rate_have_a_limiter_each(served: Served) -> None:
    app = flask.Flask("shop")
    limits = Limits(app, store=served.store)

    @app.get("/")
    @limits.limit("2/minute", key=everyone)
    @limits.limit("2/minute")
    @limits.limit("2/minute", key=lambda request: "everyone")
    def view() -> str:
        return "there"

    answers = [call_wsgi(app, "/") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert served.names() == {f"shop.view 2 per minute{number}" for number in ("", " (2)", " (3)")}


def test_django_counts_a_class_once_whatever_its_routes(served: Served) -> None:
    class Orders(View):
        @method_decorator([in_django.limited("2/minute"), in_django.limited("9/hour")])
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        @method_decorator(in_django.limited("2/minute"))
        def post(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    class Others(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    others = method_decorator(in_django.limited("1/minute"), name="dispatch")(Others)
    more = method_decorator(in_django.limited("1/minute"), name="dispatch")(type("More", (Others.__base__,), {}))
    more.get = lambda self, request: HttpResponse()  # type: ignore[attr-defined]
    urls = [("orders", Orders), ("orders/all", Orders), ("others", others), ("more", more)]
    with served.django(tuple(django_path(at, view.as_view()) for at, view in urls)):
        client = Client()
        assert [client.get(at).status_code for at in ("/orders", "/orders/all", "/orders")] == [200, 200, 429]
        assert [client.post("/orders").status_code for _ in range(3)] == [200, 200, 429]
        assert [client.get(at).status_code for at in ("/others", "/more", "/others")] == [200, 200, 429]


def test_django_checks_that_texts_have_a_store(served: Served) -> None:
    view = in_django.limited("2/minute")(lambda request: HttpResponse())
    urls = (django_path("inner/", include([django_path("view", view)])),)
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[LIMITS], FOREBAY={}):
        assert [(found.id, "has a limit as text" in found.msg) for found in check_settings()] == [
            ("forebay.E006", True)
        ]
    with served.django(urls):
        assert check_settings() == []


# Dependencies of FastAPI


@pytest.mark.parametrize("is_async", [False, True])
def test_a_dependency_is_the_key(served: Served, is_async: bool) -> None:
    asked: list[str] = []

    def plain(user: str | None = None) -> str | None:
        asked.append(user or "nobody")
        return user

    async def awaited(user: str | None = None) -> str | None:
        return plain(user)

    current: Any = awaited if is_async else plain
    bucket = TokenBucket(served.store, "bucket", "1/day")
    app = FastAPI()
    in_fastapi.setup(app)

    @app.get("/", dependencies=[Depends(in_fastapi.limited(bucket, key=Depends(current)))])
    async def view(user: str = Depends(current)) -> str:
        return user

    def ask(user: str) -> int:
        return call_fastapi(app, "/", query_string=f"user={user}".encode()).status

    assert [ask(user) for user in ("ada", "ada", "bob")] == [200, 429, 200]
    # Its result is shared with the endpoint, as FastAPI's dependencies are.
    assert asked == ["ada", "ada", "bob"]
    assert bucket.peek("ada", 0).remaining == 0
    with pytest.raises(Exception, match="key of the rule of limiter 'bucket' returned None, which is no key"):
        call_fastapi(app, "/")
    schema = app.openapi()["paths"]["/"]["get"]["parameters"]
    assert [parameter["name"] for parameter in schema] == ["user"]


def test_dependencies_are_cost_exemption_and_tier(served: Served) -> None:
    def number(name: str) -> Callable[..., int]:
        def of(count: int = 1) -> int:
            return count

        return of

    def is_free(free: bool = False) -> bool:
        return free

    def plan(plan: str = "free") -> str:
        return plan

    bucket, pro = TokenBucket(served.store, "bucket", "3/day"), TokenBucket(served.store, "pro", "9/day")
    options: Any = {"cost": Depends(number("count")), "exempt": Depends(is_free), "tier": Depends(plan)}
    dependency = in_fastapi.limited(bucket, key=everyone, tiers={"pro": pro}, **options)
    app = FastAPI(dependencies=[Depends(dependency)])
    in_fastapi.setup(app)
    app.get("/")(lambda: "there")
    queries = ["count=2", "count=2", "count=2&free=true", "count=4&plan=pro"]
    assert [call_fastapi(app, "/", query_string=query.encode()).status for query in queries] == [200, 429, 200, 200]
    assert (bucket.peek("everyone", 0).remaining, pro.peek("everyone", 0).remaining) == (1, 5)


def test_a_dependency_that_refuses_comes_before_the_charge(served: Served) -> None:
    def nobody() -> str:
        from fastapi import HTTPException

        raise HTTPException(401)

    bucket = TokenBucket(served.store, "bucket", "1/day")
    app = FastAPI()
    in_fastapi.setup(app)
    app.get("/", dependencies=[Depends(in_fastapi.limited(bucket, key=Depends(nobody)))])(lambda: "there")
    assert call_fastapi(app, "/").status == 401
    assert served.store.stats().limiters["bucket"].allowed == 0


def test_dependencies_are_for_dependencies_only(served: Served) -> None:
    bucket = TokenBucket(served.store, "bucket", "1/day")
    with pytest.raises(InvalidLimiter, match="key is a callable that takes a request, not Depends"):
        in_fastapi.setup(FastAPI(), [Rule(bucket, key=Depends(lambda: "ada"))])
    with pytest.raises(InvalidLimiter, match="charge_on is a set of statuses"):
        in_fastapi.limited(bucket, charge_on=Depends(lambda: "ada"))


def test_a_text_has_the_options_that_need_a_limiter(served: Served) -> None:
    ask = served.ask("fastapi", ["1/second"], key=everyone, delay="5s")
    assert [ask("/one")[0] for _ in range(3)] == [200] * 3
    assert served.clock.now() == 1002
