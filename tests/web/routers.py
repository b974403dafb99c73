"""One application for each framework. Each view responds with its route, one of ``ROUTES``."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import warnings
from collections.abc import Callable
from contextlib import closing
from types import ModuleType
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import django
import falcon
import falcon.asgi
import fastapi
import flask
import litestar
import litestar.types
from aiohttp import web
from aiohttp.test_utils import TestServer
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import path as django_path
from fastapi.responses import PlainTextResponse
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from web_requests import Answered, call_asgi, call_wsgi
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from forebay.contrib import aiohttp as aiohttp_limits
from forebay.contrib import fastapi as fastapi_limits
from forebay.contrib import flask as flask_limits
from forebay.web import ASGIMiddleware, Rule, WSGIMiddleware

with warnings.catch_warnings():
    # The standard library warns about modules that they import.
    warnings.simplefilter("ignore")
    import cherrypy
    import quart
    from pyramid.config import Configurator
    from pyramid.exceptions import URLDecodeError
    from pyramid.response import Response as PyramidResponse

APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
if not settings.configured:
    settings.configure(SECRET_KEY="known to everybody", ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, INSTALLED_APPS=APPS)
django.setup()

urlpatterns: list[Any] = []
ROUTES = (
    *("/", "/login", "/api/orders", "/log_in", "/users/{id}", "/users/{id}/posts", "/files/{rest:path}"),
    *("/{id}/orders", "/{id}.json/posts"),
)
"""The routes, written as a rule's patterns."""

Send = Callable[[str, str], Answered]
"""Takes the target of a request, and the path that the server uses as the application's root."""


def _in_angles(route: str) -> str:
    return route.replace("{rest:path}", "<path:rest>").replace("{id}", "<id>")


def _wsgi(app: Any) -> Send:
    """Call `app` with the environment that gunicorn builds."""

    def send(target: str, root: str) -> Answered:
        path = unquote_to_bytes(target).decode("latin-1")
        return call_wsgi(lambda environ, start: app(environ | {"SCRIPT_NAME": root}, start), path)

    return send


def _asgi(app: Any, has_root_in_path: bool = True) -> Send:
    """Call `app` with the scope of uvicorn with ``--root-path``, or of hypercorn, which leaves the path unchanged."""

    def send(target: str, root: str) -> Answered:
        path = root + unquote(target) if has_root_in_path else unquote(target)
        host = [("host", "localhost")]
        return call_asgi(
            app, path, fields=host, root_path=root, query_string=b"", scheme="http", server=("localhost", 80)
        )

    return send


def around_flask(rules: list[Rule]) -> Send:
    return _wsgi(WSGIMiddleware(_flask(), rules))


def in_flask(rules: list[Rule]) -> Send:
    app = _flask()
    flask_limits.Limits(app, rules)
    return _wsgi(app)


def around_a_dispatcher(rules: list[Rule]) -> Send:
    """The dispatcher removes the first segment of a path that begins without a slash."""
    return _wsgi(WSGIMiddleware(DispatcherMiddleware(_flask(), {"/outer": flask.Flask("outer")}), rules))


def _flask() -> flask.Flask:
    app = flask.Flask(__name__)
    for route in ROUTES:
        app.add_url_rule(_in_angles(route), route.replace(".", ""), lambda route=route, **_: route)
    return app


def around_quart(rules: list[Rule], has_root_in_path: bool = True) -> Send:
    app = quart.Quart(__name__)

    def view(route: str) -> Any:
        async def respond(**_: Any) -> str:
            return route

        return respond

    for route in ROUTES:
        app.add_url_rule(_in_angles(route), route.replace(".", ""), view(route))
    return _asgi(ASGIMiddleware(app, rules), has_root_in_path)


def around_quart_under_hypercorn(rules: list[Rule]) -> Send:
    return around_quart(rules, has_root_in_path=False)


def _django_urls() -> ModuleType:
    def view(route: str) -> Any:
        def respond(request: HttpRequest, **_: Any) -> HttpResponse:
            return HttpResponse(route)

        return respond

    module = ModuleType("urls")
    module.urlpatterns = [django_path(_in_angles(route)[1:], view(route)) for route in ROUTES]  # type: ignore[attr-defined]
    return module


def _django(send: Send, **changed: Any) -> Send:
    def send_with_settings(target: str, root: str) -> Answered:
        with override_settings(**changed):
            return send(target, root)

    return send_with_settings


def around_django(rules: list[Rule]) -> Send:
    changed = {"ROOT_URLCONF": _django_urls(), "MIDDLEWARE": []}
    with override_settings(**changed):
        return _django(_wsgi(WSGIMiddleware(get_wsgi_application(), rules)), **changed)


def around_django_asgi(rules: list[Rule]) -> Send:
    changed = {"ROOT_URLCONF": _django_urls(), "MIDDLEWARE": []}
    with override_settings(**changed):
        return _django(_asgi(ASGIMiddleware(get_asgi_application(), rules)), **changed)


def in_django(rules: list[Rule]) -> Send:
    return _in_django(rules, lambda: _wsgi(get_wsgi_application()))


def in_django_asgi(rules: list[Rule]) -> Send:
    return _in_django(rules, lambda: _asgi(get_asgi_application()))


def in_django_under_hypercorn(rules: list[Rule]) -> Send:
    return _in_django(rules, lambda: _asgi(get_asgi_application(), has_root_in_path=False))


def _in_django(rules: list[Rule], make: Callable[[], Send]) -> Send:
    changed: dict[str, Any] = {
        "ROOT_URLCONF": _django_urls(),
        "MIDDLEWARE": ["forebay.contrib.django.LimitsMiddleware"],
        "FOREBAY": {"RULES": rules},
    }
    with override_settings(**changed):
        return _django(make(), **changed)


def _plain(route: str) -> Any:
    async def respond(request: Any) -> PlainTextResponse:
        return PlainTextResponse(route)

    return respond


def around_starlette(rules: list[Rule]) -> Send:
    return _asgi(ASGIMiddleware(Starlette(routes=[Route(route, _plain(route)) for route in ROUTES]), rules))


def in_a_mount(rules: list[Rule]) -> Send:
    """The application and its rules, mounted at a path of another application."""
    inner = ASGIMiddleware(Starlette(routes=[Route(route, _plain(route)) for route in ROUTES]), rules)
    send = _asgi(Starlette(routes=[Mount("/outer", inner)]))
    return _beneath("/outer", send)


def around_a_mount(rules: list[Rule]) -> Send:
    mount = Mount("/outer", routes=[Route(route, _plain(route)) for route in ROUTES])
    return _beneath("/outer", _asgi(ASGIMiddleware(Starlette(routes=[mount]), _with_prefix("/outer", rules))))


def in_fastapi(rules: list[Rule], has_root_in_path: bool = True) -> Send:
    app = fastapi.FastAPI(openapi_url=None)
    for route in ROUTES:
        app.add_api_route(route, lambda route=route: PlainTextResponse(route))
    fastapi_limits.setup(app, rules)
    return _asgi(app, has_root_in_path)


def in_fastapi_under_hypercorn(rules: list[Rule]) -> Send:
    return in_fastapi(rules, has_root_in_path=False)


class _Falcon:
    def __init__(self, route: str) -> None:
        self.route = route

    def on_get(self, request: Any, response: Any, **_: Any) -> None:
        response.text = self.route


class _AsyncFalcon(_Falcon):
    async def on_get(self, request: Any, response: Any, **_: Any) -> None:  # type: ignore[override]
        response.text = self.route


def around_falcon(rules: list[Rule]) -> Send:
    app = falcon.App()
    for route in ROUTES:
        app.add_route(route, _Falcon(route))
    return _wsgi(WSGIMiddleware(app, rules))


def around_falcon_asgi(rules: list[Rule]) -> Send:
    app = falcon.asgi.App()
    for route in ROUTES:
        app.add_route(route, _AsyncFalcon(route))
    return _asgi(ASGIMiddleware(app, rules))


def around_litestar(rules: list[Rule]) -> Send:
    return _asgi(ASGIMiddleware(_litestar(), rules))


def in_a_litestar_mount(rules: list[Rule]) -> Send:
    send = _asgi(_litestar_mount(ASGIMiddleware(_litestar(), rules)))
    return _beneath("/outer", send)


def around_a_litestar_mount(rules: list[Rule]) -> Send:
    """The mount also accepts a path without a slash behind its prefix."""
    rules = [dataclasses.replace(rule, path=[f"/outer{rule.path}", f"/outer{str(rule.path)[1:]}"]) for rule in rules]
    send = _asgi(ASGIMiddleware(_litestar_mount(_litestar()), rules))
    return _beneath("/outer", send)


def _litestar() -> litestar.Litestar:
    def handler(route: str) -> Any:
        async def respond() -> str:
            return route

        return litestar.get(re.sub(r"\{id\}", "{id:str}", route), media_type="text/plain")(respond)

    # A placeholder is a whole segment there.
    return litestar.Litestar([handler(route) for route in ROUTES if "." not in route], openapi_config=None)


def _litestar_mount(inner: Any) -> litestar.Litestar:
    async def mounted(scope: litestar.types.Scope, receive: litestar.types.Receive, send: litestar.types.Send) -> None:
        await inner(scope, receive, send)

    return litestar.Litestar([litestar.asgi("/outer", is_mount=True, copy_scope=True)(mounted)], openapi_config=None)


def around_pyramid(rules: list[Rule]) -> Send:
    """Dispatch by routes, and by traversal for paths of one segment."""
    config = Configurator()
    for route in ROUTES:
        config.add_route(route, route.replace("{rest:path}", "{rest:.*}"))
        config.add_view(lambda request, route=route: PyramidResponse(route), route_name=route)
        if re.fullmatch(r"/\w+", route):
            config.add_view(_without_subpath(route), name=route[1:])
    # Pyramid leaves the response to a path that is not UTF-8 to the server.
    config.add_view(lambda request: PyramidResponse(status=400), context=URLDecodeError)
    return _wsgi(WSGIMiddleware(config.make_wsgi_app(), rules))


def _without_subpath(route: str) -> Any:
    """A view that responds 404 below its path: a view that accepts a subpath needs a rule that matches it."""
    return lambda request: PyramidResponse(route, status=404 if request.subpath else 200)


def around_a_pyramid_hybrid(rules: list[Rule]) -> Send:
    """A route at whose prefix a traversal begins: it resolves dots beneath the prefix, never above."""
    return _beneath("/outer", _wsgi(WSGIMiddleware(_hybrid("/outer/*traverse"), _with_prefix("/outer", rules))))


def around_a_pyramid_hybrid_at_dots(rules: list[Rule]) -> Send:
    """To the route's placeholder, dots are a segment as any other."""
    return _beneath("/..", _wsgi(WSGIMiddleware(_hybrid("/{x}/*traverse"), _with_prefix("/{x}", rules))))


def _hybrid(pattern: str) -> Any:
    config = Configurator()
    config.add_route("outer", pattern)
    _add_traversal_views(config, route_name="outer")
    return config.make_wsgi_app()


def around_a_mounted_traversal(rules: list[Rule]) -> Send:
    config = Configurator()
    _add_traversal_views(config)
    app = DispatcherMiddleware(flask.Flask("outer"), {"/outer": config.make_wsgi_app()})
    return _beneath("/outer", _wsgi(WSGIMiddleware(app, _with_prefix("/outer", rules))))


def _add_traversal_views(config: Any, **options: Any) -> None:
    for route in ROUTES:
        if re.fullmatch(r"/\w*", route):
            config.add_view(_without_subpath(route), name=route[1:], **options)
    config.add_view(lambda request: PyramidResponse(status=400), context=URLDecodeError)


def _with_prefix(prefix: str, rules: list[Rule]) -> list[Rule]:
    return [dataclasses.replace(rule, path=f"{prefix}{rule.path}") for rule in rules]


def _beneath(prefix: str, send: Send) -> Send:
    return lambda target, root: send(prefix + target, root)


def around_cherrypy(rules: list[Rule]) -> Send:
    """CherryPy's dispatcher has no placeholders."""

    def page(route: str) -> Any:
        return cherrypy.expose(lambda self: route)

    api = type("Api", (), {"orders": page("/api/orders")})()
    root = type("Root", (), {"index": page("/"), "login": page("/login"), "log_in": page("/log_in"), "api": api})()
    cherrypy.config.update({"environment": "embedded", "log.screen": False})
    return _wsgi(WSGIMiddleware(cherrypy.Application(root, script_name=None), rules))


def _with_root_in_rules(make: Callable[[list[Rule]], Send]) -> Callable[[list[Rule]], Send]:
    """The application beneath `/v1`, and rules whose paths are written from the root of the server."""

    def make_with_root(rules: list[Rule]) -> Send:
        send = make(_with_prefix("/v1", rules))
        return lambda target, root: send(target, "/v1")

    return make_with_root


class in_aiohttp:  # noqa: N801  # named like the functions above
    """A server: aiohttp routes requests only in a server."""

    def __init__(self, rules: list[Rule]) -> None:
        self.runner = asyncio.Runner()
        self.prefix = ""
        self.server = TestServer(self.app(rules))
        self.runner.run(self.server.start_server())

    def app(self, rules: list[Rule]) -> web.Application:
        def handler(route: str) -> Any:
            async def respond(request: web.Request) -> web.Response:
                return web.Response(text=route)

            return respond

        app = web.Application()
        for route in ROUTES:
            app.router.add_get(route.replace("{rest:path}", "{rest:.*}"), handler(route))
        aiohttp_limits.setup(app, rules)
        return app

    def __call__(self, target: str, root: str) -> Answered:
        return self.runner.run(self._send(self.prefix + target))

    async def _send(self, target: str) -> Answered:
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        with closing(writer):
            writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").split("\r\n")
            fields = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
            return Answered(int(status.split()[1]), fields, body)

    def close(self) -> None:
        self.runner.run(self.server.close())
        self.runner.close()


class in_an_aiohttp_subapp(in_aiohttp):  # noqa: N801
    def app(self, rules: list[Rule]) -> web.Application:
        outer = web.Application()
        self.prefix = "/outer"
        outer.add_subapp(self.prefix, super().app(rules))
        return outer


ROUTERS: dict[str, Callable[[list[Rule]], Send]] = {
    "around Flask": around_flask,
    "in Flask": in_flask,
    "around a dispatcher": around_a_dispatcher,
    "around a dispatcher beneath a root": _with_root_in_rules(around_a_dispatcher),
    "around Quart": around_quart,
    "around Quart under hypercorn": around_quart_under_hypercorn,
    "around Django": around_django,
    "around Django, ASGI": around_django_asgi,
    "in Django": in_django,
    "in Django beneath a root": _with_root_in_rules(in_django),
    "in Django, ASGI, beneath a root": _with_root_in_rules(in_django_asgi),
    "in Django under hypercorn": in_django_under_hypercorn,
    "in Django under hypercorn, beneath a root": _with_root_in_rules(in_django_under_hypercorn),
    "around Starlette": around_starlette,
    "in a Starlette mount": in_a_mount,
    "around a Starlette mount": around_a_mount,
    "in FastAPI": in_fastapi,
    "in FastAPI under hypercorn": in_fastapi_under_hypercorn,
    "in FastAPI under hypercorn, beneath a root": _with_root_in_rules(in_fastapi_under_hypercorn),
    "around Falcon": around_falcon,
    "around Falcon, ASGI": around_falcon_asgi,
    "around Litestar": around_litestar,
    "in a Litestar mount": in_a_litestar_mount,
    "around a Litestar mount": around_a_litestar_mount,
    "around Pyramid": around_pyramid,
    "around Pyramid beneath a root": _with_root_in_rules(around_pyramid),
    "around a Pyramid hybrid route": around_a_pyramid_hybrid,
    "around a Pyramid hybrid route at dots": around_a_pyramid_hybrid_at_dots,
    "around a mounted traversal": around_a_mounted_traversal,
    "around CherryPy": around_cherrypy,
    "in aiohttp": in_aiohttp,
    "in an aiohttp sub-application": in_an_aiohttp_subapp,
}
