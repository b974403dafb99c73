"""The limits of a CherryPy method: they count each request that the dispatcher passes to it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from web_requests import CLIENT, call_wsgi

from forebay import FixedWindow, Store

with warnings.catch_warnings():
    # The standard library warns about modules that it imports.
    warnings.simplefilter("ignore")
    import cherrypy

# The dispatcher treats each punctuation character as an underscore, and follows every attribute.
DETOURS = ["/__init__/__self__", "/--init--/--self--", "/..init../..self..", "/++init++//@@self@@", "/login/--self--"]


class Limited:
    """A site whose login is limited in the method, and by a tool that decorates it."""

    def __init__(self, limit: FixedWindow) -> None:
        self.limit = limit

    def check(self) -> None:
        if not self.limit.allow(cherrypy.request.remote.ip):
            raise cherrypy.HTTPError(429)

    def by_method(self) -> Any:
        @cherrypy.expose
        def login(page: Any) -> str:
            self.check()
            return "LOGIN"

        return login

    def by_tool(self) -> Any:
        cherrypy.tools.login_limit = cherrypy.Tool("before_handler", self.check)

        @cherrypy.expose
        @cherrypy.tools.login_limit()
        def login(page: Any) -> str:
            return "LOGIN"

        return login


@pytest.mark.parametrize("how", ["by_method", "by_tool"])
def test_method_that_is_limited_counts_every_path_to_it(how: str) -> None:
    with Store.private(keys=100) as store:
        limit = FixedWindow(store, "login", "1000/day")
        login = getattr(Limited(limit), how)()
        cherrypy.config.update({"environment": "embedded", "log.screen": False})
        app = cherrypy.Application(type("Root", (), {"login": login})(), script_name=None)
        paths = [detour + "/login" for detour in ["", *DETOURS]]
        for count, path in enumerate(paths, 1):
            assert call_wsgi(app, path).body == b"LOGIN"
            assert limit.peek(CLIENT, 0).remaining == 1000 - count, path
        limit.hit(CLIENT, 1000 - len(paths))
        assert [call_wsgi(app, path).status for path in paths] == [429] * len(paths)
