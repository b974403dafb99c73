"""Envoy's external authorization by gRPC: whole requests, decided as by the other proxies' ways."""

from __future__ import annotations

import json
from collections.abc import Callable

import grpc
import pytest
from decision_server import HEAD, DecisionServer
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.auth.v3.external_auth_pb2 import CheckRequest
from google.rpc.code_pb2 import OK, PERMISSION_DENIED
from grpc_client import Client, fields_of

Serve = Callable[..., DecisionServer]

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "3/hour"
align = "first"
[limits.keys]
algorithm = "fixed-window"
rate = "1/hour"
align = "first"
[[deny]]
name = "listed"
address = ["198.51.100.0/24"]
response = { status = 451, body = "No.", headers = { X-Why = "law", Content-Length = "99" } }
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
[[rules]]
name = "keys"
limits = ["keys"]
path = "/keys"
methods = "POST"
key = "header:x-api-key | address"
"""


def test_a_request_is_admitted_and_then_denied(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for left in (2, 1, 0):
            response = client.check("/api/x?a=1")
            assert (response.status.code, response.HasField("denied_response")) == (OK, False)
            fields = fields_of(one.header for one in response.ok_response.response_headers_to_add)
            assert fields["ratelimit"].startswith(f'"api";r={left};t=')
        response = client.check("/%61pi/x", "PUT")
        assert (response.status.code, response.denied_response.status.code) == (PERMISSION_DENIED, 429)
        fields = fields_of(one.header for one in response.denied_response.headers)
        assert 3000 < int(fields["retry-after"]) <= 3600
        assert json.loads(response.denied_response.body)["violated-policies"] == ["api"]
        assert client.check("/other").status.code == OK


def test_a_list_has_its_response(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        denied = client.check("/", source="198.51.100.9").denied_response
        fields = fields_of(one.header for one in denied.headers)
        assert (denied.status.code, denied.body, fields["x-why"]) == (451, "No.", "law")
        assert "content-length" not in fields


def test_methods_and_fields_are_those_of_the_request(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        ask = [
            ("GET", {}, OK),
            ("POST", {"x-api-key": "a"}, OK),
            ("POST", {"x-api-key": "a"}, PERMISSION_DENIED),
            ("GET", {"x-api-key": "a", "x-http-method-override": "POST"}, PERMISSION_DENIED),
            ("POST", {"x-api-key": "b"}, OK),
            ("POST", {}, OK),
            ("POST", {}, PERMISSION_DENIED),
        ]
        for method, fields, code in ask:
            assert client.check("/keys", method, fields).status.code == code


def test_raw_fields_are_read(serve: Serve) -> None:
    request = CheckRequest()
    request.attributes.source.address.socket_address.address = "192.0.2.7"
    request.attributes.request.http.method = "POST"
    request.attributes.request.http.path = "/keys"
    pairs = [HeaderValue(key=":path", value="/"), HeaderValue(key="x-api-key", raw_value=b"\xff")]
    request.attributes.request.http.header_map.CopyFrom(HeaderMap(headers=pairs))
    with Client(serve(RULES)) as client:
        assert [client.authorization.Check(request, timeout=60).status.code for _ in range(2)] == [
            OK,
            PERMISSION_DENIED,
        ]
        # As the middleware of an application reads it.
        assert client.check("/keys", "POST", {"x-api-key": "c"}).status.code == OK


def test_the_client_is_the_source_or_the_one_whom_a_trusted_source_names(serve: Serve) -> None:
    # 10.0.0.0/8 has trusted proxies.
    with Client(serve(RULES.replace("3/hour", "1/hour"))) as client:
        fields = {"x-forwarded-for": "192.0.2.8"}
        assert client.check("/api/x", source="192.0.2.8").status.code == OK
        assert client.check("/api/x", fields=fields, source="10.0.0.1").status.code == PERMISSION_DENIED
        # A client names nobody.
        assert client.check("/api/x", fields=fields, source="192.0.2.9").status.code == OK
        assert client.check("/api/x", fields=fields, source="192.0.2.9").status.code == PERMISSION_DENIED
        assert client.check("/api/x", source="::ffff:192.0.2.9").status.code == PERMISSION_DENIED


def test_a_source_behind_a_pipe_is_a_trusted_proxy_or_unknown(serve: Serve) -> None:
    request = CheckRequest()
    request.attributes.source.address.pipe.path = "/run/envoy.sock"
    request.attributes.request.http.method = "GET"
    request.attributes.request.http.path = "/api/x"
    request.attributes.request.http.headers["x-forwarded-for"] = "192.0.2.8"
    with Client(serve(RULES)) as client:
        assert client.authorization.Check(request, timeout=60).status.code == OK
    with Client(serve(RULES, head=HEAD.replace(', "unix"', ""))) as client:
        response = client.authorization.Check(request, timeout=60)
        assert response.denied_response.status.code == 500


def _without(part: str) -> CheckRequest:
    request = CheckRequest()
    if part != "source":
        request.attributes.source.address.socket_address.address = "x" if part == "address" else "192.0.2.7"
    http = request.attributes.request.http if part != "http" else CheckRequest().attributes.request.http
    http.method = "" if part == "method" else "GET"
    http.path = "" if part == "path" else "/api/x"
    return request


def test_a_request_without_its_parts_is_no_permission(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for part in ("source", "address", "http", "method", "path"):
            with pytest.raises(grpc.RpcError) as caught:
                client.authorization.Check(_without(part), timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_peer_that_is_no_proxy_gets_no_permission(serve: Serve) -> None:
    with Client(serve(RULES, head=HEAD.replace('"127.0.0.1", ', ""))) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.check("/api/x")
        assert (caught.value.code(), "127.0.0.1" in caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, True)


def test_the_json_api_and_grpc_share_a_limit(serve: Serve) -> None:
    server = serve(RULES)
    with Client(server) as client:
        client.check("/api/x")
    assert server.ask("decide", uri="/api/x", client="192.0.2.7")["limits"][0]["remaining"] == 1
