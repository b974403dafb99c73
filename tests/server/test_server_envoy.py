"""Envoy itself in front of an application, with the filters of docs/server.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decision_server import DecisionServer
from envoy_proxy import Envoy, parts_of_page

Serve = Callable[..., DecisionServer]

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "2/hour"
align = "first"
[limits.keys]
algorithm = "fixed-window"
rate = "4/hour"
align = "first"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
[[rules]]
name = "keys"
limits = ["keys"]
key = "header:x-api-key | address"
"""
FILTERS = {
    ("ratelimit" if "ratelimit" in one["name"] else "http" if "http_service" in one["typed_config"] else "grpc"): one
    for [one] in parts_of_page("http_filters")
}


@pytest.fixture(params=["http", "grpc", "ratelimit"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _filter(kind: str) -> Any:
    """A copy, which a proxy may change."""
    return json.loads(json.dumps(FILTERS[kind]))


def test_envoy_passes_on_what_is_allowed_and_denies_the_rest(serve: Serve, app: int, tmp_path: Path, kind: str) -> None:
    with Envoy(tmp_path, _filter(kind), serve(RULES).port, app) as front:
        for left in (1, 0):
            status, fields, body = front.get("/api/x?a=1", {"X-Original-URI": "/harmless"})
            assert (status, body) == (200, b"/api/x?a=1")
            if kind != "http":
                assert f'"api";r={left};t=' in fields["ratelimit"]
        for path in ("/api/x", "/%61pi/x", "//api/x"):
            status, fields, body = front.get(path)
            assert (status, json.loads(body)["violated-policies"]) == (429, ["api"])
            assert fields["content-type"] == "application/problem+json"
            assert int(fields["retry-after"]) > 3000
        assert front.get("/other")[0] == 200


def test_envoy_sends_a_descriptor_for_each_action(serve: Serve, app: int, tmp_path: Path) -> None:
    with Envoy(tmp_path, _filter("ratelimit"), serve(RULES).port, app) as front:
        assert [front.get("/", {"X-API-Key": "a"})[0] for _ in range(5)] == [200] * 4 + [429]
        assert front.get("/", {"X-API-Key": "b"})[0] == 200
        assert [front.get("/api/x", {"X-API-Key": "b"})[0] for _ in range(3)] == [200, 200, 429]
        # The key wasn't charged by the denied request.
        assert [front.get("/", {"X-API-Key": "b"})[0] for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("name", ["X-Forwarded-For", "X-Real-IP"])
def test_a_client_of_envoy_names_no_other(serve: Serve, app: int, tmp_path: Path, kind: str, name: str) -> None:
    rules = RULES.replace('name = "api"\n', 'name = "api"\nexcept_address = ["203.0.113.7"]\n')
    # The addresses of clients and of Envoy differ for the server, as they do if clients are elsewhere.
    head = 'version = 1\nclient = { trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }\n'
    with Envoy(tmp_path, _filter(kind), serve(rules, head=head).port, app, source="127.0.0.9") as front:
        assert [front.get("/api/x", {name: "203.0.113.7"})[0] for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("opens", [False, True])
def test_the_site_is_closed_or_open_while_the_server_is_away(
    serve: Serve, app: int, tmp_path: Path, kind: str, opens: bool
) -> None:
    server, one = serve(RULES), _filter(kind)
    config = one["typed_config"]
    if opens:
        config.update({"failure_mode_deny": False} if kind == "ratelimit" else {"failure_mode_allow": True})
    with Envoy(tmp_path, one, server.port, app) as front:
        assert front.get("/api/x")[0] == 200
        server.kill()
        closed = 500 if kind == "ratelimit" else 403
        assert [front.get("/api/x")[0] for _ in range(3)] == [200 if opens else closed] * 3
