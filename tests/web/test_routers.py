"""A rule for a view counts each request that the framework routes to that view, for any spelling of the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from routers import ROUTERS, ROUTES, Send
from web_requests import Answered

from forebay import FixedWindow, Store
from forebay.web import Rule

NAMES = {route: f"route-{i}" for i, route in enumerate(ROUTES)}
NAMES_BELOW = {route: f"below-{i}" for i, route in enumerate(ROUTES)}
"""The names of the rule for each route, and of the rule for the route and all paths below it."""
Draw = Callable[[Any], Any]


@pytest.fixture(params=sorted(ROUTERS), scope="module")
def router(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def send(router: str) -> Iterator[Send]:
    with Store.private(keys=1000) as store:
        named = {name: route for route, name in NAMES.items()}
        named |= {name: route.rstrip("/") + "/*" for route, name in NAMES_BELOW.items()}
        send = ROUTERS[router](
            [Rule(FixedWindow(store, name, "1000000/day"), path=path) for name, path in named.items()]
        )
        yield send
        if hasattr(send, "close"):
            send.close()


def handled(answered: Answered) -> str | None:
    """The route whose view responded."""
    route = answered.body.decode(errors="replace")
    return route if answered.status == 200 and route in NAMES else None


def check(send: Send, target: str, root: str = "") -> str | None:
    answered = send(target, root)
    route = handled(answered)
    if route is not None:
        for name in (NAMES[route], NAMES_BELOW[route]):
            assert f'"{name}"' in answered["ratelimit"], (
                f"{target} was handled by {route}, and rule {name} didn't count it"
            )
    return route


def texts(*several: str) -> Any:
    return st.sampled_from([text for texts in several for text in texts.split(" ")])


# Two adjacent spaces give the empty text.
starts = texts(
    "/ / // // /// /%2F /./ /x/../ /../ /%2e%2e/ /;/ /;a/ /@@ /a//../  %2F /.",
    "http://localhost/ /v1/ /v1 /x/v1/ /v2/ /outer/ /index/ /%0A x/ x%2F x// %20/ /v1/../",
)
between = texts("/ / / // %2F %252F /./ /x/../ /x//../ ;a/ /;a/ /@@ %5C")
ends = texts(
    "      / // %0A %0A /%0A %0D%0A %250A /index /index/ /. /x/.. /.. ;a /;a %00 %20 %FF /x /@@ %E2%80%A8 %3F %23a",
)
names = texts("5 a.b .. %2e%2e a%2Fb a;b ;b %0A %FF @@x %25 -  v1 %5C")
rests = texts("a a/b  a//b ../a a/.. %0A / a%252Fb")


@st.composite
def targets(draw: Draw) -> str:
    """The target of a request for one of the routes, in one of its spellings."""
    written = []
    for segment in draw(st.sampled_from(ROUTES)).split("/")[1:]:
        if segment == "{rest:path}":
            written.append(draw(rests))
            continue
        name = draw(names) if segment.startswith("{id}") else ""
        rest = segment.removeprefix("{id}")
        written.append(name + "".join([draw(st.sampled_from(spellings(character))) for character in rest]))
    target: str = draw(starts) + written[0]
    for segment in written[1:]:
        target += draw(between) + segment
    # A request's target is never empty; Quart raises an IndexError on an empty path.
    return target + draw(ends) or "/"


def spellings(character: str) -> list[str]:
    code = f"%{ord(character):02X}"
    ways = [character] * 120 + [code, quote(code), character.upper(), character + "%FF"]
    return ways + (["-", "%25", "."] * 20 if character == "_" else [])


@settings(max_examples=80)
@given(target=targets(), root=st.sampled_from(["", "", "/v1", "/v1/v2"]))
def test_request_that_a_view_handles_is_charged(router: str, send: Send, target: str, root: str) -> None:
    # docs/web.md excepts these: Litestar removes a root wherever it is in a path.
    assume(router != "around a Litestar mount" or not root or root.lstrip("/") not in target)
    check(send, target, root)


NOT_IN_FRONT = ["//login", "///login", "/%2Flogin", "//users/5"]
MERGED = [*NOT_IN_FRONT, "/api//orders", "/login/", "//login//"]
WITHOUT_SLASH = [*NOT_IN_FRONT, "x/login", "x%2Flogin", "%2F/login", "x//login", "x/", "x/users/5", "http://login"]
LINE_ENDED = ["/login%0A", "/users/%0A", "/files//", "/files/a%0A"]
# In the middle of a path, too.
IN_FALCON = [*NOT_IN_FRONT, "/users//posts", "//users//posts", "/files/", "/a.json%0A/posts"]
ROOT_WITHIN = ["/users/v1", "/users/v1.0", "/users/v1/posts", "/files/v1/a", "/files/a/v1", "/v1/users/v1"]
IN_DJANGO = ["/users/%2e%2e", "/users/;a", "/users/a%2525", "/files//a//b"]
DOTS_BENEATH = [
    *("/../login", "/../../login", "/x/../../login", "/login/../../login", "/x/../../../@@login", "/x/../../login/."),
    *("/././login", "/./@@login", "//../login", "/%2e%2e/login", "/.%2e/login", "/;a/../../login", "/./../login"),
    "/../",
]
ACCEPTED = {
    "around Flask": NOT_IN_FRONT,
    "in Flask": NOT_IN_FRONT,
    "around a dispatcher": WITHOUT_SLASH,
    "around a dispatcher beneath a root": WITHOUT_SLASH,
    "around Quart": [*NOT_IN_FRONT, "http://localhost/login", "http://localhost/login%23a"],
    "around Quart under hypercorn": NOT_IN_FRONT,
    "around Django": IN_DJANGO,
    "around Django, ASGI": IN_DJANGO,
    "in Django": IN_DJANGO,
    "in Django beneath a root": IN_DJANGO,
    "in Django, ASGI, beneath a root": IN_DJANGO,
    "in Django under hypercorn": IN_DJANGO,
    "in Django under hypercorn, beneath a root": [*IN_DJANGO, *ROOT_WITHIN],
    "around Starlette": LINE_ENDED,
    "in a Starlette mount": ["/files//", "/users/;a", "/users/%2e%2e"],
    # The line's end keeps the mount's name in the inner application's path: the "{id}" is "outer".
    "around a Starlette mount": ["/orders%0A", "//login%0A", "/files//"],
    "in FastAPI": LINE_ENDED,
    "in FastAPI under hypercorn": LINE_ENDED,
    "in FastAPI under hypercorn, beneath a root": [*LINE_ENDED, *ROOT_WITHIN],
    "around Falcon": IN_FALCON,
    "around Falcon, ASGI": IN_FALCON,
    "around Litestar": MERGED,
    "in a Litestar mount": ["login", "//login", "api//orders", "/login/"],
    "around a Litestar mount": ["login", "//login", "api//orders", "/login/"],
    "around Pyramid": ["/login%0A", "//login", "/./login", "/x/../login", "/@@login", "/%2e%2e//x/%2e%2e/@@login/."],
    "around Pyramid beneath a root": ["/login%0A", "//login", "/./login", "/x/../login", "/../login", "/../../login"],
    "around a Pyramid hybrid route": DOTS_BENEATH,
    "around a Pyramid hybrid route at dots": DOTS_BENEATH,
    "around a mounted traversal": DOTS_BENEATH,
    "around CherryPy": [*MERGED[:3], *MERGED[4:], "/log-in", "/log.in/", "/log%25in", "/index", "//index/"],
    "in aiohttp": ["/users/%2e%2e%2f", "/users/a%252Fb", "/users/;a"],
    "in an aiohttp sub-application": ["/users/%2e%2e%2f", "/users/a%252Fb", "/users/;a"],
}


def test_router_accepts_its_spellings_and_the_rule_counts_them(router: str, send: Send) -> None:
    for target in ["/", *ACCEPTED[router]]:
        assert check(send, target) is not None, f"{router} doesn't accept {target}"


def test_request_beneath_a_root_path_is_charged(router: str, send: Send) -> None:
    if router == "around Quart under hypercorn":
        # This router needs the root in the path.
        for target in ("/v1/login", "http://localhost/v1/login", "http://v1/v1/login"):
            assert check(send, target, "/v1") == "/login"
    elif router != "around Falcon, ASGI":
        # Falcon under ASGI needs the root in its routes.
        assert check(send, "/login", "/v1") == "/login"
    check(send, "/v1/login", "/v1")
    check(send, "//v1//login", "/v1")
    # A client can send a host with the root's name.
    check(send, "http://v1/v1/login", "/v1")
