"""The gate remembers which rules are for a path: its choice is that of each rule, and it remembers few paths."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_requests import asgi_scope

from forebay import FixedWindow, Store
from forebay.testing import ManualClock
from forebay.web import Gate, Passage, Rule, gate
from forebay.web.native_requests import ASGIRequest, readings
from forebay.web.patterns import PatternSet, RequestPattern


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


def policies(decided: object) -> str:
    """The limits that a request was charged to, by the header field."""
    assert decided is None or isinstance(decided, Passage)
    return "" if decided is None else decided.fields[0][1]


@pytest.mark.parametrize("most", [1, 3, 4096])
def test_choice_is_that_of_each_rule(store: Store, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(gate, "MOST_REMEMBERED", most)
    exempt = {"b": False}
    rules = [
        Rule(FixedWindow(store, "a", "999/hour"), path="/a"),
        Rule(FixedWindow(store, "ab", "999/hour"), path=["/a", "/b"], methods="POST"),
        Rule(FixedWindow(store, "b", "999/hour"), path="/b/*", exempt=lambda request: exempt["b"]),
    ]
    limited = Gate(rules)
    requests = [ASGIRequest(asgi_scope(*one)) for one in product(["/a", "/b", "/c", "/a/", "/x/../a"], ["GET", "POST"])]
    for exempt["b"] in (False, True, False):
        for request in [*requests, *reversed(requests), *requests]:
            names = [
                rule.limiter.name
                for rule in rules
                if rule.where.matches(request.methods, request.paths) and not rule.exempts(request, limited.client)
            ]
            found = policies(limited.enter(request))
            assert [name for name in ("a", "ab", "b") if f'"{name}"' in found] == names


@pytest.mark.parametrize(("length", "most"), [(100, 10), (1000, 4096)])
def test_paths_that_clients_choose_take_no_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch, length: int, most: int
) -> None:
    monkeypatch.setattr(gate, "MOST_REMEMBERED", most)
    limited = Gate([Rule(FixedWindow(store, "a", "999/hour"), path="/a/*")])
    limited.enter(ASGIRequest(asgi_scope("/b")))
    tracemalloc.start()
    try:
        for number in range(2000):
            limited.enter(ASGIRequest(asgi_scope(f"/b/{number:0{length}}")))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


PATTERNS = [None, "/a", "/a/*", "/{x}/b", "/a*", "/*/c", "/A", ["/b", "/c/{x:path}"], "/log_in", "/a.b", "/"]
PATHS = [
    "/",
    "/a",
    "/A",
    "/a/b",
    "/a/b/",
    "/b",
    "/c/d/e",
    "/log-in",
    "/axb",
    "/a\n",
    "",
    "/x/../a",
    "//a",
    "/%61",
    "/c",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(PATTERNS), st.sampled_from([(), "GET", "POST", ("PUT", "GET")]), st.booleans()),
        max_size=8,
    ),
    st.sampled_from(PATHS),
    st.sampled_from([("GET",), ("POST",), ("HEAD",), ("GET", "PUT"), ("DELETE",)]),
)
def test_patterns_together_match_as_each_alone(
    given_patterns: list[tuple[Any, Any, bool]], path: str, methods: tuple[str, ...]
) -> None:
    patterns = [RequestPattern.of(*one) for one in given_patterns]
    paths = readings(path)
    alone = [number for number, one in enumerate(patterns) if one.matches(methods, paths)]
    assert PatternSet(patterns).matching(methods, paths) == alone
