"""The health of the server by gRPC, and what isn't gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from decision_server import DecisionServer
from grpc_client import Client
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from http2_frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, call_block, connected, frame, until_closed
from process_helpers import wait_until

Serve = Callable[..., DecisionServer]
Status = HealthCheckResponse.ServingStatus

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "3/hour"
[[rules]]
name = "api"
limits = ["api"]
"""
SERVICES = [
    "",
    "envoy.service.ratelimit.v3.RateLimitService",
    "envoy.service.auth.v3.Authorization",
    "grpc.health.v1.Health",
]


def test_each_service_is_serving(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for service in SERVICES:
            assert client.health.Check(HealthCheckRequest(service=service), timeout=60).status == Status.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            client.health.Check(HealthCheckRequest(service="other"), timeout=60)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_watch_gets_the_status_and_the_end(serve: Serve) -> None:
    # Longer than the time of an idle connection.
    server = serve(RULES, "--idle", "0.2", "--drain", "60")
    with Client(server) as client, Client(server) as other:
        known = client.health.Watch(HealthCheckRequest(), timeout=120)
        unknown = other.health.Watch(HealthCheckRequest(service="other"), timeout=120)
        assert next(known).status == Status.SERVING
        assert next(unknown).status == Status.SERVICE_UNKNOWN
        # A call without a message is no request: by the end of its connection, theirs would have been closed, too.
        begun = frame(HEADERS, END_HEADERS, 1, call_block(b"/grpc.health.v1.Health/Check"))
        with connected(server) as idle:
            idle.sendall(PREFACE + frame(SETTINGS, 0, 0) + begun)
            until_closed(idle)
        assert (known.is_active(), unknown.is_active()) == (True, True)
        server.process.terminate()
        assert [one.status for one in known] == [Status.NOT_SERVING]
        assert list(unknown) == []
        assert server.process.wait(60) == 0


def test_a_client_whose_host_is_gone_is_noticed(serve: Serve) -> None:
    server = serve(RULES)
    with Client(server) as client:
        watch = client.health.Watch(HealthCheckRequest(), timeout=120)
        assert next(watch).status == Status.SERVING
        # Until the client has acknowledged what it got, another timer runs.
        wait_until(lambda: _timers(server.port) == {"02"}, "the timer that asks whether the client is there")


def _timers(port: int) -> set[str]:
    """The kinds of timers of the established connections of this port. 02 asks by TCP whether the client is there."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[5].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"}


def test_a_server_without_proxies_has_health_only(serve: Serve) -> None:
    with Client(serve(RULES, "--no-proxies")) as client:
        assert client.health.Check(HealthCheckRequest(), timeout=60).status == Status.SERVING
        for call in (lambda: client.should_rate_limit([("user", "a")]), lambda: client.check("/api/x")):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_unix_socket_serves_grpc(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "forebay.sock"
    serve(RULES, listen=(f"unix:{path}",))
    with Client(f"unix:{path}") as client:
        assert client.health.Check(HealthCheckRequest(), timeout=60).status == Status.SERVING


def test_another_method_is_unimplemented(serve: Serve) -> None:
    with Client(serve(RULES)) as client:
        for path in ("/", "/grpc.health.v1.Health/Other", "/other.Service/Check", "/a/b/c"):
            with pytest.raises(grpc.RpcError) as caught:
                client.channel.unary_unary(path)(b"", timeout=60)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


MESSAGES: list[tuple[dict[str, str], bytes, str]] = [
    ({"grpc-encoding": "gzip"}, b"\1\0\0\0\0", "12"),
    ({}, b"\1\0\0\0\0", "13"),
    ({}, b"\7\0\0\0\0", "13"),
    ({}, b"", "13"),
    ({}, b"\0\0\0", "13"),
    ({}, b"\0\0\0\0\7abc", "13"),
    ({}, b"\0\xff\xff\xff\xff", "13"),
    ({}, b"\0\0\0\0\3abc", "3"),
    ({}, b"\0\0\0\0\0", "0"),
]


def test_a_broken_message_has_a_status(serve: Serve) -> None:
    server = serve(RULES)
    with httpx.Client(http1=False, http2=True, timeout=60) as client:
        for fields, data, status in MESSAGES:
            response = client.post(
                f"http://127.0.0.1:{server.port}/grpc.health.v1.Health/Check",
                headers={"content-type": "application/grpc", "te": "trailers", **fields},
                content=data,
            )
            # The client knows no trailers, where the status 0 is.
            found = response.headers.get("grpc-status", "0")
            assert (response.status_code, found) == (200, status), data


def test_http_1_is_no_grpc(serve: Serve) -> None:
    fields = {"Content-Type": "application/grpc"}
    assert serve(RULES).get("/grpc.health.v1.Health/Check", fields, "POST", b"\0\0\0\0\0")[0] == 404


def test_messages_of_another_kind_are_refused(serve: Serve) -> None:
    url = f"http://127.0.0.1:{serve(RULES).port}/grpc.health.v1.Health/Check"
    with httpx.Client(http1=False, http2=True, timeout=60) as client:
        for kind in ("application/grpc+json", "application/grpc-web", "application/grpcs"):
            assert client.post(url, content=bytes(5), headers={"content-type": kind}).status_code == 404
        for kind in ("application/grpc+proto", "application/grpc; charset=utf-8"):
            assert client.post(url, content=bytes(5), headers={"content-type": kind}).status_code == 200
        compressed = {"content-type": "application/grpc", "grpc-encoding": "gzip"}
        fields = client.post(url, content=b"\1\0\0\0\0", headers=compressed).headers
        assert (fields["grpc-status"], fields["grpc-accept-encoding"]) == ("12", "identity")
