"""A store that fails while the server runs: each question is answered, and none is admitted."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from decision_server import HEAD, MILD
from grpc_client import Client

# `forebay serve`, with a thread that closes the store once it is asked to.
SERVER = """
import sys, threading
import forebay_server
from forebay.serving.plan import plan_of

plan = plan_of(sys.argv[1])
server = forebay_server.Server(
    forebay_server.Plan(plan.document, plan.limiters), ["127.0.0.1:0"], threads=1, connections=10, idle_s=60.0,
    drain_s=1.0, reuse_port=False, token=None, proxies=True, live=None, tls=None,
)
def close():
    sys.stdin.readline()
    plan.store.close()
    print("closed", flush=True)

threading.Thread(target=close, daemon=True).start()
server.run(lambda: print(server.addresses[0], flush=True))
"""


@pytest.fixture
def failing(store_name: str, tmp_path: Path) -> Iterator[str]:
    """The address of a server whose store has failed."""
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=1000"\n{HEAD}{MILD}')
    command = [sys.executable, "-c", SERVER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            with Client(address) as client:
                assert client.codes(1, [("remote_address", "192.0.2.7")]) == ["OK"]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
            yield address
        finally:
            process.terminate()
        assert process.wait() == 0


def status_of(url: str, fields: dict[str, str], body: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_rate_limits_are_unavailable_while_the_store_fails(failing: str) -> None:
    with Client(failing) as client:
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                client.should_rate_limit([("remote_address", "192.0.2.7")])
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the limits can't be checked"
        # A descriptor without a rule asks no store.
        assert client.codes(1, [("nobody", "a")]) == ["OK"]


def test_no_request_is_admitted_while_the_store_fails(failing: str) -> None:
    with Client(failing) as client:
        response = client.check("/api/x")
        assert response.denied_response.status.code == 503
    fields = {"X-Forwarded-Uri": "/", "X-Forwarded-Method": "GET", "X-Forwarded-For": "192.0.2.7"}
    assert status_of(f"http://{failing}/auth/traefik", fields)[0] == 503
    question = json.dumps({"uri": "/", "client": "192.0.2.7"}).encode()
    status, body = status_of(f"http://{failing}/v1/decide", {"Content-Type": "application/json"}, question)
    reply = json.loads(body)
    assert (status, reply["allowed"], reply["status"]) == (200, False, 503)
