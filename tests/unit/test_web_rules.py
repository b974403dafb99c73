"""Rules: the requests that a rule matches, their cost, and all-or-none charges over several limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from typing import Any, ClassVar

import pytest
from limiter_kinds import KINDS
from web_requests import CLIENT, Kind, Site, asgi_scope, wsgi_environ

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
    UnseenPathsWarning,
)
from forebay.testing import ManualClock
from forebay.web import Answer, BodyLimit, ClientAddress, Gate, Rule, everyone, header
from forebay.web.native_requests import ASGIRequest, WSGIRequest, readings

MakeSite = Callable[..., Site]


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> MakeSite:
    kind: Kind = request.param

    def make(rules: Any, handle: Callable[[], int] = lambda: 200, **options: Any) -> Site:
        return Site(kind, rules, options, handle)

    return make


@pytest.fixture
def store(clock: ManualClock) -> Store:
    return Store.private(keys=1000, clock=clock)


@pytest.fixture
def limit(store: Store) -> FixedWindow:
    return FixedWindow(store, "limit", "3/hour")


def left(limiter: Any, key: Any = CLIENT) -> int:
    remaining: int = limiter.peek(key, 0).remaining
    return remaining


class TestMatching:
    @pytest.mark.parametrize(
        ("path", "matches", "others"),
        [
            (
                "/login",
                ["/login", "/login/"],
                ["/", "/login2", "/login/x", "/a/login", "/Login", "/login\nx"],
            ),
            ("/login/", ["/login", "/login/", "/login//"], ["/loginx", "/login/x"]),
            ("/", ["/", "", "//"], ["/a"]),
            ("/*", ["/", "", "/a", "/a/b/"], []),
            (
                "/api/*",
                ["/api", "/api/", "/api/a", "/api/a/b", "/api\n", "/api/\n"],
                ["/apis", "/", "/b/api", "/api\nx"],
            ),
            ("/users/{id}/*", ["/users/1", "/users/1/", "/users/1/2", "/users//", "/users//2"], ["/users", "/users/"]),
            ("/api*", ["/api", "/apis", "/api/a"], ["/ap"]),
            ("/users/{id}", ["/users/1", "/users/a.b", "/users/1/"], ["/users", "/users/", "/users/1/2"]),
            ("/users/{id}/posts/{post}", ["/users/1/posts/2"], ["/users/1/posts", "/users/1/2/posts/3"]),
            ("/a/*/z", ["/a/b/z", "/a/b/c/z", "/a//z"], ["/a/z", "/a/b/zz"]),
            ("/a.b(c)+^$!", ["/a.b(c)+^$!"], ["/aXb(c)+^$!"]),
            ("/Products(1,2)/$value", ["/Products(1,2)/$value"], ["/Products1/$value"]),
            ("/v1/books:batch", ["/v1/books:batch"], ["/v1/books"]),
            ("/app.*", ["/app.js", "/app."], ["/app"]),
            # A refused character, written as in a URL.
            ("/a%24", ["/a$", "/a%24"], ["/a"]),
            ("/a%7Cb%5Cc", ["/a|b\\c", "/a%7Cb%5Cc"], ["/a"]),
            ("/%3Aid/%5Bid%5D", ["/:id/[id]", "/%3Aid/%5Bid%5D"], ["/5/6"]),
            ("/.{name}", ["/.git", "/.*"], ["/git"]),
            ("/caf\xe9", ["/caf\xe9"], ["/cafe"]),
            ("/files/{rest:path}", ["/files/a", "/files/a/b"], ["/file"]),
            ("/users/{id:int}", ["/users/1"], ["/users/1/2"]),
            ("/users/{id|int}", ["/users/1"], ["/users/1/2"]),
            ("/users/{id:int(min=1)}", ["/users/1"], ["/users/1/2"]),
            (["/a", "/b/*"], ["/a", "/b", "/b/c"], ["/c"]),
        ],
    )
    def test_path_pattern_matches_its_paths(
        self, limit: FixedWindow, path: Any, matches: list[str], others: list[str]
    ) -> None:
        where = Rule(limit, path=path).where
        assert [path for path in matches if not where.matches(("GET",), readings(path))] == []
        assert [path for path in others if where.matches(("GET",), readings(path))] == []

    @pytest.mark.parametrize(
        ("path", "spellings"),
        [
            ("/login", ["//login", "///login", "login", "/login//", "/login\n", "/login/\n", "/%2flogin", "/%6cogin"]),
            ("/login", ["/@@login", "/%40%40login", "//@@login"]),
            ("/login", ["/login;x", "/;x/login;y", "/lo\ufffdgin", "/login/index", "http://host/login;x?y#z"]),
            ("/login", ["x/login", "x%2Flogin", "x//login", "http:/login", "\ufffd/login", "%2F/login"]),
            ("/", ["x", "x/", "x%2F"]),
            ("/api/orders", ["//api//orders", "/api///orders//", "/api/@@orders"]),
            ("/users/{id}", ["/users/...", "/users/;x", "/users/%", "//users/.a", "/users/\ufffd", "/users/@@x"]),
            ("/users/{id}/x", ["/users//x", "//users//x", "/users/..a/x", "/users/;a/x"]),
            ("/log_in", ["/log-in", "/log.in", "/log%in"]),
            ("/v1.0/log-in", ["/v1_0/log_in"]),
            ("/files/{rest:path}", ["/files/", "/files//", "/files/..a", "/files/a//b"]),
            # Patterns are normalized in the same way.
            ("//a//c", ["/a/c", "//a//c"]),
            ("/caf%C3%A9", ["/caf\xe9"]),
            ("/a%2Fb", ["/a/b", "/a%2Fb"]),
        ],
    )
    def test_all_spellings_of_a_path_match(self, limit: FixedWindow, path: str, spellings: list[str]) -> None:
        where = Rule(limit, path=path).where
        assert [path for path in spellings if not where.matches(("GET",), readings(path))] == []

    @pytest.mark.parametrize("path", ["//login", "/%6Cogin", "x/login", "x%2Flogin", "/%2Flogin"])
    def test_path_beneath_a_root_has_readings_with_the_root(self, limit: FixedWindow, path: str) -> None:
        for wanted in ("/login", "/v1/login"):
            where = Rule(limit, path=wanted).where
            assert where.matches(("GET",), WSGIRequest(wsgi_environ(path) | {"SCRIPT_NAME": "/v1"}).paths)
            for sent in (path, "/v1" + path):
                assert where.matches(("GET",), ASGIRequest(asgi_scope(sent, root_path="/v1")).paths)
            assert not where.matches(("GET",), WSGIRequest(wsgi_environ(path + "s") | {"SCRIPT_NAME": "/v1"}).paths)

    @pytest.mark.parametrize("root", ["/v1", "/v1/", "v1", "/v1.0", "/caf\xe9/v1"])
    @pytest.mark.parametrize("path", ["/users{}", "/users/{}", "/users{}.0", "/users{}/users{}", "{}s/users{}"])
    def test_path_with_the_root_within_has_readings_with_the_root_in_front(
        self, limit: FixedWindow, root: str, path: str
    ) -> None:
        """Hypercorn's ``--root-path`` leaves the root out of the path, and a client chooses the path."""
        sent = path.replace("{}", root.rstrip("/"))
        where = Rule(limit, path="/" + root.strip("/") + "/" + sent.lstrip("/")).where
        assert where.matches(("GET",), ASGIRequest(asgi_scope(sent, root_path=root)).paths)

    def test_path_that_begins_with_a_root_that_ends_with_a_slash_has_readings_with_the_root_in_front(
        self, limit: FixedWindow
    ) -> None:
        """Starlette removes such a root only if another slash is behind it."""
        where = Rule(limit, path="/v1/{id}/orders").where
        assert where.matches(("GET",), ASGIRequest(asgi_scope("/v1/orders", root_path="/v1/")).paths)

    @pytest.mark.parametrize("path", ["/m/lo\xff gin", "/m/lo\xffgin/\xe9", "/m/login/\xe9\xff"])
    def test_text_that_is_decoded_again_beneath_a_mount_has_a_reading(self, limit: FixedWindow, path: str) -> None:
        """Bottle decodes a path beneath each mount, and omits what isn't UTF-8."""
        once = path.encode().decode("latin-1")
        twice = once.encode().decode("latin-1")
        where = Rule(limit, path=["/m/login", "/m/lo gin"]).where
        for sent in (path, once, twice):
            assert where.matches(("GET",), WSGIRequest(wsgi_environ(sent)).paths)
        assert not where.matches(("GET",), WSGIRequest(wsgi_environ("/m/lo\u20acgin".encode().decode("latin-1"))).paths)

    @pytest.mark.parametrize("dots", ["..", ".", "%2e%2E", ".%2e", "%2e.", "..;a", "%2e%2e%3Ba", ".\ufffd."])
    @pytest.mark.parametrize("start", ["/v1/", "/", "//", "/;a/", "", "x/", "http://host/v1/", "/v1%2F", "/a/b/c/"])
    @pytest.mark.parametrize("end", ["/login", "//login", "%2Flogin", "", "\n"])
    def test_path_with_a_segment_of_dots_matches_every_rule(
        self, limit: FixedWindow, start: str, dots: str, end: str
    ) -> None:
        """A router beneath a mount may resolve them beneath it."""
        path = start + dots + end
        where = Rule(limit, path="/v1/login", methods="POST").where
        assert where.matches(("POST",), readings(path))
        assert not where.matches(("GET",), readings(path))
        for root in ("", "/v1"):
            assert ASGIRequest(asgi_scope(path, root_path=root)).paths == ()
            assert ASGIRequest(asgi_scope("/v1/x/" + path, root_path="/v1")).paths == ()
            sent = wsgi_environ("/") | {"SCRIPT_NAME": root, "PATH_INFO": path.encode().decode("latin-1")}
            assert WSGIRequest(sent).paths == ()

    @pytest.mark.parametrize("path", ["/login\n", "/a.json\n/posts", "/a%0A", "/a%0a/b", "/%0A", "/a\n;b", "\n", "x\n"])
    def test_path_with_a_line_feed_at_the_end_of_a_segment_matches_every_rule(
        self, limit: FixedWindow, path: str
    ) -> None:
        where = Rule(limit, path="/{id}.json/posts", methods="POST").where
        assert where.matches(("POST",), readings(path))
        assert not where.matches(("GET",), readings(path))
        for root in ("", "/v1"):
            assert ASGIRequest(asgi_scope(path, root_path=root)).paths == ()
            assert WSGIRequest(wsgi_environ("/") | {"SCRIPT_NAME": root, "PATH_INFO": path}).paths == ()
        assert not where.matches(("POST",), readings(path.replace("\n", "\nx").replace("0", "1")))

    @pytest.mark.parametrize("path", ["/a..b/c", "/.../c", "/.well-known/x", "/a./b", "/..a/b", "/a/.b;..", "/@@../a"])
    def test_dots_within_a_segment_are_text(self, limit: FixedWindow, path: str) -> None:
        assert Rule(limit, path=path).where.matches(("GET",), readings(path))
        assert not Rule(limit, path="/login").where.matches(("GET",), readings(path))

    @pytest.mark.parametrize("path", ["/a/../b", "/./b", "/b/.", "/a/%2e%2e/b", "/..;/b", "/*/../b", "/b%0A", "/b\n/c"])
    def test_pattern_with_a_segment_of_dots_is_refused(self, limit: FixedWindow, path: str) -> None:
        with pytest.raises(InvalidLimiter, match=r"dots or .* line feed: write the path to which it leads"):
            Rule(limit, path=path)

    def test_path_too_long_to_normalize_matches_every_rule(self, limit: FixedWindow) -> None:
        where = Rule(limit, path="/login").where
        assert not where.matches(("GET",), readings("/" + "a" * 10_000))
        assert where.matches(("GET",), readings("/" + "a//" * 1_000))
        assert readings("/" + "a//" * 300) != ()

    def test_plain_path_has_one_reading_for_each_root(self) -> None:
        for path in ("/", "/a/b.c/", "/caf\xe9", "/a-b_c@d", "/" + "a" * 10_000):
            assert readings(path) == (path,)
        assert WSGIRequest(wsgi_environ("/a") | {"SCRIPT_NAME": "/v1"}).paths == ("/v1/a", "/a")
        assert ASGIRequest(asgi_scope("/v1/a", root_path="/v1")).paths == ("/v1/a", "/a")
        assert len(readings("/a/..b;b//%2e.c/\ufffd@@/@@c")) > 9

    @pytest.mark.parametrize("start", ["/", "", "http://", "x/"])
    def test_readings_of_a_path_are_hundreds_at_most(self, start: str) -> None:
        """As docs/web.md states."""
        path = start + "%;ahttp://v1%3A\ufffd:v1http:///%2F/v1/" + "/%2e%2ea/x//@@a;b" * 50
        assert 0 < len(readings(path)) <= 90
        for odd in ("\xff", "\xff\xc3\x83\xc2\xbf"):
            sent = {"SCRIPT_NAME": "/v1", "PATH_INFO": path.replace("\ufffd", odd)}
            assert 0 < len(WSGIRequest(wsgi_environ("/") | sent).paths) <= 500
        for roots in ({"root_path": "/v1"}, {"root_path": "/v1/v2", "app_root_path": "/v1"}):
            assert 0 < len(ASGIRequest(asgi_scope(path) | roots).paths) <= 500

    def test_pattern_matches_in_linear_time(self, limit: FixedWindow) -> None:
        """A client controls the path. A matcher that backtracks over the stars takes exponential time."""
        for path in (
            "/a/*/b/*/c",
            "/a/*/b/*/c/*",
            "/*/{id}/*/c",
            "/{a:path}/b/{c:path}/d",
            "/**/a",
            "/a*b*c",
            "/{a}{b}",
        ):
            with pytest.raises(InvalidLimiter, match="pattern"):
                Rule(limit, path=path)
        for path in ("/a/*/b", "/a/*/b/*", "/a/{b}/*/c/*", "/a*b/*"):
            assert not Rule(limit, path=path).where.matches(("GET",), readings("/a" + "/bz/cz" * 100_000))

    @pytest.mark.parametrize(
        "path",
        [
            *("", "login", "*", 5, b"/a", [5], [""], "/a/{id", "/a/id}", "/a{b/{id}", "/a}b/{id}", []),
            # A query or a fragment, and regular expressions of aiohttp and Pyramid that can span segments.
            *("/a?b=1", "/a#b", "/a/{rest:.*}", "/a/{rest:.+}/b", r"/a/{rest:[\w/]+}"),
        ],
    )
    def test_invalid_pattern_is_refused(self, limit: FixedWindow, path: Any) -> None:
        with pytest.raises(InvalidLimiter, match="path"):
            Rule(limit, path=path)

    @pytest.mark.parametrize(
        ("path", "part", "remedy"),
        [
            ("/login$", "$", "%24"),
            ("/login/$", "$", "%24"),
            ("/api/.*", ".*", "* for anything"),
            ("/.*/x", ".*", "* for anything"),
            ("/.+", ".+", "* for anything"),
            ("/api/(.*)", ".*", "* for anything"),
            ("/users/:id", ":id", "{name}"),
            ("/users/:id.json/posts", ":id.json", "{name}"),
            ("/users/[id]", "[id]", "{name}"),
            ("/users/[0-9]+", "[0-9]+", "{name}"),
            ("/users/([0-9]+)x", "[0-9]+", "{name}"),
            ("/users/[^/]+", "[^/]+", "{name}"),
            (r"/users/(\d+)", "\\", "%5C"),
            (r"/a\.b", "\\", "%5C"),
            (r"/users/(?P<id>\d+)", "(?", "{name}"),
            ("/users/{id?}", "?}", "optional"),
            ("/users/{id}?", "}?", "optional"),
            ("/users/{id}?/posts", "}?", "optional"),
            ("/api/(.*?)", "*?", "{name}"),
            ("/a|/login", "|", "several patterns"),
            ("/(login|logout)", "|", "several patterns"),
            ("/a,/login", ",/", "several patterns"),
            ("/a, /login", ", /", "several patterns"),
        ],
    )
    def test_pattern_of_another_syntax_is_refused(self, limit: FixedWindow, path: str, part: str, remedy: str) -> None:
        """It would match no request of those that its author means."""
        for make in (lambda: Rule(limit, path=["/", path]), lambda: BodyLimit(5, path=path)):
            with pytest.raises(InvalidLimiter) as raised:
                make()
            message = str(raised.value)
            assert repr(path) in message
            assert f" has {part}: " in message
            assert remedy in message

    @pytest.mark.parametrize("path", ["/a?b=1", "/users/{id}?b=1", "/api/*?b=1", "/a#b"])
    def test_pattern_with_a_query_is_refused_as_such(self, limit: FixedWindow, path: str) -> None:
        with pytest.raises(InvalidLimiter, match="more than a path: look at a query in exempt or cost"):
            Rule(limit, path=path)

    def test_too_long_pattern_is_refused(self, limit: FixedWindow) -> None:
        with pytest.raises(InvalidLimiter, match="10001 characters"):
            Rule(limit, path="/" + "a//b/" * 2000)

    def test_ignore_case_matches_any_case(self, limit: FixedWindow) -> None:
        assert Rule(limit, path="/login", ignore_case=True).where.matches(("GET",), readings("//LogIn"))
        assert BodyLimit(5, path="/login", ignore_case=True).where.matches(("GET",), readings("/LogIn"))
        assert not Rule(limit, path="/login").where.matches(("GET",), readings("/LogIn"))
        with pytest.raises(InvalidLimiter, match="ignore_case"):
            Rule(limit, path="/login", ignore_case="no")  # type: ignore[arg-type]

    def test_placeholder_of_another_framework_is_refused(self, limit: FixedWindow) -> None:
        with pytest.raises(InvalidLimiter, match="/users/<int:id>"):
            Rule(limit, path="/users/<int:id>")

    @pytest.mark.parametrize(
        ("methods", "matches", "others"),
        [
            ("POST", ["POST"], ["GET", "HEAD", "WEBSOCKET"]),
            ("get", ["GET", "HEAD"], ["POST"]),
            ({"POST", "PUT"}, ["POST", "PUT"], ["GET"]),
            (["HEAD"], ["HEAD"], ["GET"]),
            ("WEBSOCKET", ["WEBSOCKET"], ["GET"]),
            ((), ["GET", "POST", "WEBSOCKET", "BREW"], []),
            ("M-SEARCH", ["M-SEARCH"], ["SEARCH"]),
        ],
    )
    def test_rule_matches_its_methods(
        self, limit: FixedWindow, methods: Any, matches: list[str], others: list[str]
    ) -> None:
        where = Rule(limit, methods=methods).where
        assert all(where.matches((method,), ("/",)) for method in matches)
        assert not any(where.matches((method,), ("/",)) for method in others)

    @pytest.mark.parametrize(
        "methods", ["", 5, [5], ["GET POST"], "GET,POST", b"GET", "*", "ANY", ["all"], "GET|POST", "GET+POST"]
    )
    def test_invalid_method_is_refused(self, limit: FixedWindow, methods: Any) -> None:
        with pytest.raises(InvalidLimiter, match="method"):
            Rule(limit, methods=methods)

    def test_requests_without_a_rule_are_unchanged(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, path="/login", methods="POST")])
        for _ in range(5):
            assert limited.request("/").status == limited.request("/login").status == 200
            assert "ratelimit" not in limited.request("/")
        assert [limited.request("/login/", "POST").status for _ in range(4)] == [200, 200, 200, 429]
        assert limited.handled == 18

    def test_lower_case_method_matches(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, methods="POST", cost=3)])
        assert limited.request(method="POST").status == 200
        with pytest.warns() if limited.kind == "wsgi" else nullcontext():
            assert limited.request(method="post").status == 429

    @pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
    def test_overridden_method_matches(self, site: MakeSite, limit: FixedWindow, name: str) -> None:
        """The application inside may honour such a field."""
        limited = site([Rule(limit, path="/login", methods="POST")])
        for method in ("POST", "post", " Post", "PUT, POST"):
            answered = limited.request("/login", "GET", fields=[(name, method)])
        assert (answered.status, left(limit)) == (429, 0)
        assert limited.request("/login", "GET", fields=[(name, "PUT")]).status == 200
        # An application may ignore the override and handle a POST, so the rule still matches.
        assert limited.request("/login", "POST", fields=[(name, "PUT")]).status == 429

    @pytest.mark.parametrize("name", [b"x_http_method_override", b"x-http_method-override", b"x_http_method"])
    @pytest.mark.parametrize("method", ["POST", "po\u017ft"])
    def test_method_that_is_overridden_by_another_spelling_matches(
        self, limit: FixedWindow, name: bytes, method: str
    ) -> None:
        """A WSGI application within has one name for both, and one that reads UTF-8 has another small letter S."""
        scope = asgi_scope("/") | {"headers": [(b"x-a", b"PUT"), (b"accept", b"PUT"), (name, method.encode())]}
        assert ASGIRequest(scope).methods == ("GET", "POST")

    def test_gate_without_rules_adds_no_fields(self, site: MakeSite) -> None:
        assert site([]).request().fields == [("content-type", "text/plain")]

    def test_single_rule_needs_no_list(self, site: MakeSite, limit: FixedWindow) -> None:
        assert site(Rule(limit)).request()["ratelimit"].startswith('"limit";r=2;t=')


class TestUnseenPaths:
    def request(self, gate: Gate, count: int, path: str = "/v1/api/orders", method: str = "GET") -> None:
        for _ in range(count):
            request = WSGIRequest(wsgi_environ(path, method))
            gate.max_body_bytes(request)
            gate.enter(request)

    def test_warning_comes_after_a_thousand_requests(self, limit: FixedWindow) -> None:
        gate = Gate([Rule(limit, path="/api/*", methods="POST"), Rule(limit, path=["/a", "/b"]), Rule(limit, cost=0)])
        self.request(gate, 1000)
        with pytest.warns(UnseenPathsWarning, match=r"'/api/\*', \['/a', '/b'\], .*was for '/v1/api/orders'") as warned:
            self.request(gate, 1)
        self.request(gate, 10_001)
        assert len(warned) == 1

    def test_path_too_long_to_normalize_is_not_a_match(self, limit: FixedWindow) -> None:
        gate = Gate([Rule(limit, path="/api/*")])
        self.request(gate, 1, "/" + "a//" * 1000)
        self.request(gate, 1000)
        with pytest.warns(UnseenPathsWarning):
            self.request(gate, 1)

    def test_matched_path_causes_no_warning(self, limit: FixedWindow) -> None:
        gate = Gate([Rule(limit, path="/api/*", methods="POST"), Rule(limit, path="/b")])
        self.request(gate, 1, "/b")
        self.request(gate, 1001)
        self.request(gate, 1, "/api/orders")
        self.request(gate, 10_001)

    def test_one_unseen_path_of_several_is_found_later(self, limit: FixedWindow) -> None:
        gate = Gate([Rule(limit, path=path) for path in ("/login", "/a", "/logout")])
        self.request(gate, 1, "/a")
        self.request(gate, 9999)
        with pytest.warns(UnseenPathsWarning, match="'/login', '/logout' .*'/v1/api/orders': .* are rare") as warned:
            self.request(gate, 1)
        self.request(gate, 10_001)
        assert len(warned) == 1

    def test_only_requests_that_could_match_count(self, limit: FixedWindow) -> None:
        gate = Gate([Rule(limit, path="/a"), Rule(limit, path="/b", methods="POST"), Rule(limit, path="/c")])
        self.request(gate, 1, "/a")
        self.request(gate, 999, method="POST")
        self.request(gate, 9000)
        with pytest.warns(UnseenPathsWarning, match="matched '/c' in"):
            self.request(gate, 1)

    def test_unseen_path_of_a_body_limit_is_found(self, limit: FixedWindow) -> None:
        gate = Gate([BodyLimit(5, path="/upload"), BodyLimit(9), Rule(limit)])
        self.request(gate, 1000)
        with pytest.warns(UnseenPathsWarning, match="no body limit's path, '/upload', has"):
            self.request(gate, 1)

    @pytest.mark.filterwarnings("error")
    def test_warning_as_an_error_fails_no_request(
        self, site: MakeSite, limit: FixedWindow, caplog: pytest.LogCaptureFixture
    ) -> None:
        limited = site([Rule(limit, path="/login"), BodyLimit(5, path="/upload")])
        assert {limited.request("/").status for _ in range(1002)} == {200}
        assert [record.getMessage()[:18] for record in caplog.records] == ["no body limit's pa", "no rule's path, '/"]

    def test_rules_without_a_path_cause_no_warning(self, limit: FixedWindow) -> None:
        self.request(Gate([Rule(limit, methods="POST"), BodyLimit(5)]), 10_001)


class TestKeysAndCosts:
    def test_each_client_has_its_own_limit(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=3)])
        assert [limited.request(client=c).status for c in ("1.1.1.1", "1.1.1.2", "1.1.1.1")] == [200, 200, 429]

    def test_everyone_gives_all_clients_one_limit(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, key=everyone)])
        assert [limited.request(client=f"1.1.1.{i}").status for i in range(4)] == [200, 200, 200, 429]

    def test_header_field_is_the_key(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, key=header("X-API-Key", otherwise=everyone), cost=3)])
        assert limited.request(fields=[("X-API-Key", "a")]).status == 200
        assert limited.request(fields=[("X-API-Key", "a")]).status == 429
        assert limited.request(fields=[("x-api-key", "b")]).status == 200
        assert limited.request().status == 200
        assert limited.request(client="1.1.1.1").status == 429

    def test_client_of_the_gate_is_the_default_key(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=3)], client=ClientAddress(trusted_proxies=[CLIENT], header="X-Forwarded-For"))
        assert limited.request(fields=[("X-Forwarded-For", "1.1.1.1")]).status == 200
        assert limited.request(fields=[("X-Forwarded-For", "2.2.2.2, 1.1.1.1")]).status == 429
        assert limited.request(fields=[("X-Forwarded-For", "2.2.2.2")]).status == 200

    def test_cost_depends_on_the_request(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=lambda request: int(request.header("X-Cost") or 1))])
        assert limited.request(fields=[("X-Cost", "2")])["ratelimit"].startswith('"limit";r=1')
        assert limited.request(fields=[("X-Cost", "2")]).status == 429
        assert limited.request().status == 200
        assert limited.request(fields=[("X-Cost", "0")]).status == 200

    def test_cost_above_the_limit_never_fits(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=4)])
        answer = limited.request()
        assert answer.status == 429
        assert "retry-after" not in answer
        assert "never" in answer.json["detail"]
        assert limited.handled == 0

    def test_exempt_requests_are_not_charged(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=3, exempt=lambda request: request.header("X-Health") == "yes")])
        assert limited.request().status == 200
        assert limited.request().status == 429
        answer = limited.request(fields=[("X-Health", "yes")])
        assert answer.status == 200
        assert "ratelimit" not in answer
        assert left(limit) == 0

    def test_request_exempt_from_one_rule_is_charged_to_the_others(
        self, site: MakeSite, store: Store, limit: FixedWindow
    ) -> None:
        other = FixedWindow(store, "other", "10/hour")
        limited = site([Rule(limit, exempt=lambda request: True), Rule(other)])
        assert limited.request()["ratelimit"].startswith('"other";r=9;')
        assert left(limit) == 3

    @pytest.mark.parametrize("options", [{"cost": lambda request: -1}, {"cost": lambda request: "1"}])
    def test_invalid_cost_is_an_error(self, site: MakeSite, limit: FixedWindow, options: Any) -> None:
        with pytest.raises(InvalidCost):
            site([Rule(limit, **options)]).request()

    def test_invalid_key_is_an_error(self, site: MakeSite, limit: FixedWindow) -> None:
        with pytest.raises(InvalidKey):
            site([Rule(limit, key=lambda request: None)]).request()

    @pytest.mark.parametrize("what", ["key", "cost", "exempt"])
    def test_error_of_a_function_charges_no_limit(self, site: MakeSite, store: Store, what: str) -> None:
        def fail(request: Any) -> Any:
            raise LookupError(what)

        booked, charged = FixedWindow(store, "booked", "3/hour"), FixedWindow(store, "charged", "3/hour")
        held = Concurrency(store, "held", 1)
        last = Rule(FixedWindow(store, "last", "3/hour"), **{what: fail})
        with pytest.raises(LookupError):
            site([Rule(booked, charge_on={200}), Rule(charged), Rule(held), last]).request()
        assert left(booked) == left(charged) == 3
        assert held.acquire(CLIENT)


class TestSeveralLimits:
    LIMITERS: ClassVar[dict[str, Callable[[Store, str], Any]]] = {
        **{
            name: lambda store, label, kind=kind: kind.make(store, label, kind.limit and min(kind.limit, 3), 3_600_000)
            for name, kind in KINDS.items()
        },
        "concurrency": lambda store, label: Concurrency(store, label, 3),
    }

    @pytest.mark.parametrize("charge_on", [None, {200}], ids=["charged", "booked"])
    @pytest.mark.parametrize("denies_first", [True, False])
    @pytest.mark.parametrize("kind", LIMITERS)
    def test_no_limit_is_charged_if_one_denies(
        self, site: MakeSite, store: Store, kind: str, denies_first: bool, charge_on: Any
    ) -> None:
        """For every kind of limiter, with and without `charge_on`: three limits have room, and one denies."""
        others = [self.LIMITERS[kind](store, f"other {i}") for i in range(2)]
        before = [left(other) for other in others]
        rules = [Rule(other, charge_on=None if isinstance(other, Concurrency) else charge_on) for other in others]
        full = FixedWindow(store, "full", "1/hour")
        full.allow(CLIENT)
        limited = site([Rule(full), *rules] if denies_first else [*rules, Rule(full)])
        answers = [limited.request() for _ in range(5)]
        assert {answer.status for answer in answers} == {429}
        assert limited.handled == 0
        assert [left(other) for other in others] == before
        assert all(answer.json["violated-policies"] == ["full"] for answer in answers)

    @pytest.mark.parametrize("denied", ["charged", "booked", "held"])
    def test_each_kind_of_rule_denies_without_charging_the_others(
        self, site: MakeSite, store: Store, denied: str
    ) -> None:
        charged, booked = FixedWindow(store, "charged", "3/hour"), TokenBucket(store, "booked", "3/hour")
        held = Concurrency(store, "held", 3)
        limiters: dict[str, Any] = {"charged": charged, "booked": booked, "held": held}
        rules = [Rule(charged), Rule(booked, charge_on={200}), Rule(held)]
        full = limiters.pop(denied)
        leases = [full.acquire(CLIENT) for _ in range(3)] if denied == "held" else [full.hit(CLIENT, 3)]
        assert all(leases)
        for order in permutations(rules):
            limited = site(order)
            answer = limited.request()
            assert (answer.status, limited.handled) == (429, 0)
            assert answer.json["violated-policies"] == [denied]
            assert [left(limiter) for limiter in limiters.values()] == [3, 3]

    def test_all_denying_rules_are_named(self, site: MakeSite, store: Store) -> None:
        slow, fast = FixedWindow(store, "slow", "1/day"), FixedWindow(store, "fast", "1/minute")
        limited = site([Rule(fast), Rule(FixedWindow(store, "free", "9/day")), Rule(slow)])
        limited.request()
        answer = limited.request()
        assert answer.json["violated-policies"] == ["fast", "slow"]
        assert answer.json["detail"].startswith("The limit is 1 request per day:")
        assert int(answer["retry-after"]) > 60

    def test_each_rule_has_its_own_key_and_cost(self, site: MakeSite, store: Store) -> None:
        mine, ours = FixedWindow(store, "mine", "2/day"), FixedWindow(store, "ours", "10/day")
        limited = site([Rule(mine), Rule(ours, key=everyone, cost=3)])
        assert [limited.request(client=f"1.1.1.{i}").status for i in (1, 1, 1, 2, 3)] == [200, 200, 429, 200, 429]
        assert left(ours, "everyone") == 1
        assert left(mine, "1.1.1.3") == 2

    def test_limiter_in_two_rules_is_charged_by_both(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit), Rule(limit, path="/dear")])
        assert limited.request("/dear").status == 200
        assert left(limit) == 1
        assert limited.request("/dear").status == 429
        assert left(limit) == 1
        assert limited.request("/").status == 200

    def test_each_of_many_paths_has_its_own_rule(self, site: MakeSite, store: Store) -> None:
        limits = [FixedWindow(store, f"limit {i}", "1/hour") for i in range(40)]
        limited = site([Rule(limit, path=f"/{i}") for i, limit in enumerate(limits)])
        assert [limited.request(f"/{i}").status for i in range(40)] == [200] * 40
        assert [limited.request(f"/{i}").status for i in range(40)] == [429] * 40

    def test_each_request_is_charged_to_its_matching_rules(self, site: MakeSite, store: Store) -> None:
        limits = [FixedWindow(store, f"limit {i}", "100/hour") for i in range(6)]
        limited = site(
            [Rule(limit, exempt=lambda request, i=i: str(i) not in request.path) for i, limit in enumerate(limits)]
        )
        for number in range(64):
            wanted = [i for i in range(6) if number >> i & 1]
            answer = limited.request("/" + "".join(map(str, wanted)))
            assert (
                [item.split(";")[0] for item in answer["ratelimit"].split(", ")] == [f'"limit {i}"' for i in wanted]
                if wanted
                else "ratelimit" not in answer
            )
        assert [left(limit) for limit in limits] == [100 - 32] * 6

    def test_limiters_without_refunds_are_charged_last(self, site: MakeSite, store: Store) -> None:
        for kind in (LeakyBucket, BucketedWindow):
            last = (
                LeakyBucket(store, "queue", "3/hour", 3)
                if kind is LeakyBucket
                else BucketedWindow(store, "buckets", "3/hour", 8, keys=10)
            )
            first = FixedWindow(store, f"before {kind.__name__}", "1/hour")
            limited = site([Rule(last), Rule(first)])
            assert [limited.request().status for _ in range(3)] == [200, 429, 429]
            assert left(last) == 2


class TestChargeOn:
    STATUSES = (200, 201, 302, 401, 404, 500, 503)

    @pytest.mark.parametrize("charge_on", [{401, 404}, range(400, 500), lambda status: 400 <= status < 500, [401, 404]])
    @pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].limit > 1])
    def test_only_statuses_in_charge_on_stay_charged(
        self, site: MakeSite, store: Store, kind: str, charge_on: Any
    ) -> None:
        limiter = KINDS[kind].make(store, "limit", 10, 3_600_000)
        status = 0
        limited = site([Rule(limiter, charge_on=charge_on)], lambda: status)
        expected = 10
        for status in self.STATUSES:
            assert limited.request().status == status
            expected -= 400 <= status < 500
            assert left(limiter) == expected

    def test_only_failed_logins_are_charged(self, site: MakeSite, clock: ManualClock, limit: FixedWindow) -> None:
        status = 401
        limited = site([Rule(limit, path="/login", methods="POST", charge_on={401, 403})], lambda: status)
        assert [limited.request("/login", "POST").status for _ in range(4)] == [401, 401, 401, 429]
        clock.advance(3600)
        status = 200
        assert [limited.request("/login", "POST").status for _ in range(9)] == [200] * 9
        status = 403
        assert [limited.request("/login", "POST").status for _ in range(4)] == [403, 403, 403, 429]

    def test_permit_is_taken_before_the_handler_runs(self, site: MakeSite, limit: FixedWindow) -> None:
        seen = []

        def handle() -> int:
            seen.append(left(limit))
            return 200

        limited = site([Rule(limit, charge_on={401})], handle)
        limited.request()
        assert (seen, left(limit)) == ([2], 3)

    def test_exception_of_the_handler_counts_as_500(self, site: MakeSite, limit: FixedWindow) -> None:
        statuses: list[int] = []

        def charge_on(status: int) -> bool:
            statuses.append(status)
            return status < 500

        def handle() -> int:
            raise LookupError

        limited = site([Rule(limit, charge_on=charge_on)], handle)
        with pytest.raises(LookupError):
            limited.request()
        assert (statuses[-1:], left(limit)) == ([500], 3)

    def test_whole_cost_is_refunded(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, cost=2, charge_on={401})])
        assert [limited.request().status for _ in range(5)] == [200] * 5
        assert left(limit) == 3

    def test_cost_above_the_limit_never_fits(self, site: MakeSite, store: Store, limit: FixedWindow) -> None:
        other = FixedWindow(store, "other", "9/hour")
        limited = site([Rule(other, charge_on={401}), Rule(limit, cost=4, charge_on={401})])
        answer = limited.request()
        assert answer.status == 429
        assert "retry-after" not in answer
        assert answer.json["violated-policies"] == ["limit"]
        assert left(other) == 9

    def test_header_fields_count_the_reserved_permit(self, site: MakeSite, limit: FixedWindow) -> None:
        limited = site([Rule(limit, charge_on={401})], lambda: 401)
        assert [limited.request()["ratelimit"][:11] for _ in range(3)] == ['"limit";r=2', '"limit";r=1', '"limit";r=0']

    def test_error_of_one_charge_on_refunds_the_other_rules(self, site: MakeSite, store: Store) -> None:
        def fail(status: int) -> bool:
            raise LookupError

        limits = [FixedWindow(store, f"limit {i}", "3/hour") for i in range(3)]
        held = Concurrency(store, "held", 1)
        rules = [Rule(limits[0], charge_on={401}), Rule(limits[1], charge_on=fail), Rule(limits[2], charge_on={401})]
        with pytest.raises(LookupError):
            site([*rules, Rule(held)]).request()
        assert [left(limits[0]), left(limits[2])] == [3, 3]
        assert held.acquire(CLIENT)


class TestConcurrency:
    def test_permit_is_held_while_the_handler_runs(self, site: MakeSite, store: Store) -> None:
        held = Concurrency(store, "held", 2)
        seen = []

        def handle() -> int:
            seen.append(left(held))
            return 200

        limited = site([Rule(held)], handle)
        for _ in range(3):
            assert limited.request().status == 200
        assert seen == [1, 1, 1]
        assert left(held) == 2

    def test_denial_has_a_retry_after(self, site: MakeSite, store: Store) -> None:
        held = Concurrency(store, "held", 1)
        with held.acquire(CLIENT):
            answer = site([Rule(held)]).request()
        assert (answer.status, answer["retry-after"]) == (429, "1")
        assert answer.json["detail"].startswith("The limit is 1 request at a time:")

    def test_load_shedding_answers_503(self, site: MakeSite, store: Store) -> None:
        held = Concurrency(store, "workers", 1)
        limited = site([Rule(held, key=everyone)])
        with held.acquire("everyone"):
            answer = limited.request()
        assert (answer.status, answer["retry-after"]) == (503, "1")
        assert answer.json["type"] == "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
        assert answer.json["status"] == 503
        assert limited.request().status == 200

    def test_permit_is_released_after_an_exception(self, site: MakeSite, store: Store) -> None:
        def handle() -> int:
            raise LookupError

        held = Concurrency(store, "held", 1)
        limited = site([Rule(held)], handle)
        for _ in range(3):
            with pytest.raises(LookupError):
                limited.request()
        assert left(held) == 1

    def test_denied_requests_hold_no_permits(self, site: MakeSite, store: Store, limit: FixedWindow) -> None:
        held = Concurrency(store, "held", 1)
        limited = site([Rule(held), Rule(limit)])
        limit.hit(CLIENT, 3)
        before = store.stats().limiters["held"]
        assert {limited.request().status for _ in range(20)} == {429}
        assert store.stats().limiters["held"] == before

    @pytest.mark.parametrize("readings", range(1, 8))
    def test_permit_released_during_a_decision_charges_no_denied_request(
        self, site: MakeSite, monkeypatch: pytest.MonkeyPatch, readings: int
    ) -> None:
        """A request that is denied in the end is charged nothing, whichever permits its checks saw."""
        with Store.private(keys=10, clock="time") as store:
            held, limiter = Concurrency(store, "held", 1, "9 hours"), TokenBucket(store, "limit", "1/hour", 1)
            now, read = time.time(), 0
            assert limiter.allow(CLIENT)
            lease = held.acquire(CLIENT)

            def later() -> float:
                nonlocal read
                read += 1
                return now + 7200 * (read > readings)

            limited = site([Rule(held), Rule(limiter)])
            with monkeypatch.context() as patched:
                patched.setattr(time, "time", later)
                assert limited.request().status == 429
            monkeypatch.setattr(time, "time", lambda: now + 7200)
            assert lease
            assert (left(held), left(limiter), limited.handled) == (0, 1, 0)

    def test_several_concurrencies_hold_each_cost(self, site: MakeSite, store: Store) -> None:
        one, other = Concurrency(store, "one", 4), Concurrency(store, "other", 4)
        seen = []

        def handle() -> int:
            seen.append((left(one), left(other, "everyone")))
            return 200

        limited = site([Rule(one, cost=3), Rule(other, key=everyone)], handle)
        assert limited.request().status == 200
        with other.acquire("everyone", 4):
            assert limited.request().status == 503
        assert left(one) == 4
        with one.acquire(CLIENT, 2):
            assert limited.request().status == 429
        assert left(other, "everyone") == 4
        assert seen == [(1, 3)]

    def test_cost_above_the_limit_never_fits(self, site: MakeSite, store: Store) -> None:
        answer = site([Rule(Concurrency(store, "held", 2), cost=3)]).request()
        assert (answer.status, "retry-after" in answer) == (429, False)


class TestRefusals:
    @pytest.mark.parametrize("rules", [None, 5, "rules", [5], [None], [[]]])
    def test_invalid_rules_are_refused(self, site: MakeSite, rules: Any) -> None:
        with pytest.raises(InvalidLimiter, match=r"Rule\(limiter\)"):
            site(rules)

    def test_limiter_without_a_rule_is_refused(self, site: MakeSite, limit: FixedWindow) -> None:
        with pytest.raises(InvalidLimiter, match=r"write Rule\(limiter\)"):
            site([limit])

    @pytest.mark.parametrize("limiter", [None, 5, "api", FixedWindow])
    def test_invalid_limiter_is_refused(self, limiter: Any) -> None:
        with pytest.raises(InvalidLimiter, match="a rule is for one limiter"):
            Rule(limiter)

    def test_all_of_is_refused_as_a_limiter(self, limit: FixedWindow) -> None:
        with pytest.raises(InvalidLimiter, match="several rules that match a request are charged as one"):
            Rule(AllOf(limit))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"key": 5}, "key is a callable"),
            ({"key": "user"}, "key is a callable"),
            ({"exempt": True}, "exempt is a callable"),
            ({"cost": -1}, "cost is a whole number"),
            ({"cost": 1.0}, "cost is a whole number"),
            ({"cost": True}, "cost is a whole number"),
            ({"cost": "1"}, "cost is a whole number"),
            ({"cost": None}, "cost is a whole number"),
            ({"charge_on": 401}, "charge_on is a set"),
            ({"charge_on": "4xx"}, "charge_on is a set"),
            ({"charge_on": b"401"}, "charge_on is a set"),
            ({"status": 0}, "status is an HTTP status"),
            ({"status": 199}, "status is an HTTP status"),
            ({"status": 600}, "status is an HTTP status"),
            ({"status": "429"}, "status is an HTTP status"),
            ({"status": 429.0}, "status is an HTTP status"),
            ({"answer": "denied"}, "answer is an Answer"),
            ({"answer": 200}, "answer is an Answer"),
            ({"answer": (200, (), b"")}, "answer is an Answer"),
        ],
    )
    def test_invalid_arguments_are_refused(self, limit: FixedWindow, options: Any, what: str) -> None:
        with pytest.raises(InvalidLimiter, match=what):
            Rule(limit, **options)

    def test_charge_on_of_a_concurrency_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidLimiter, match="charge_on has no effect on it"):
            Rule(Concurrency(store, "held", 1), charge_on={401})

    @pytest.mark.parametrize("max_bytes", [-1, 1.0, True, "1 MB", None])
    def test_invalid_body_limit_is_refused(self, max_bytes: Any) -> None:
        with pytest.raises(InvalidLimiter, match="max_bytes is a whole number of bytes"):
            BodyLimit(max_bytes)

    @pytest.mark.parametrize("client", [5, "127.0.0.1", ["10.0.0.0/8"]])
    def test_invalid_client_is_refused(self, site: MakeSite, client: Any) -> None:
        with pytest.raises(InvalidLimiter, match="client is a ClientAddress or another key function"):
            site([], client=client)

    @pytest.mark.parametrize(
        ("method", "meant"), [("GETT", "GET"), ("pots", "POST"), ("DELET", "DELETE"), ("OPTION", "OPTIONS")]
    )
    def test_misspelt_method_is_refused(self, limit: FixedWindow, method: str, meant: str) -> None:
        with pytest.raises(InvalidLimiter, match=f"no request has the method '{method}': did you mean '{meant}'"):
            Rule(limit, methods=["GET", method])

    @pytest.mark.parametrize("method", ["PROPFIND", "PROPPATCH", "MKCOL", "COPY", "LOCK", "REPORT", "PURGE", "SEARCH"])
    def test_other_methods_are_accepted(self, limit: FixedWindow, method: str) -> None:
        assert Rule(limit, methods=method).where.methods == {method}

    @pytest.mark.parametrize("headers", [5, "draft-11", ["draft-10", "x"], None, [[]], b"draft-10"])
    def test_invalid_styles_are_refused(self, site: MakeSite, headers: Any) -> None:
        with pytest.raises(InvalidLimiter, match="draft-10, draft-06, x-ratelimit"):
            site([], headers=headers)

    def test_every_kind_of_limiter_is_accepted(self, site: MakeSite, store: Store) -> None:
        limiters = [
            TokenBucket(store, "1", "9/hour"),
            SlidingWindow(store, "2", "9/hour"),
            SlidingLog(store, "3", "9/hour", keys=10),
            Concurrency(store, "4", 3),
        ]
        assert site([Rule(limiter) for limiter in limiters]).request().status == 200

    def test_rule_keeps_its_answer(self, limit: FixedWindow) -> None:
        assert Rule(limit, answer=Answer(418)).answer == Answer(418)
