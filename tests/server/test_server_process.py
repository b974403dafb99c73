"""A server process: its protocols, its bounds and its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from decision_server import HEAD, DecisionServer

from forebay import Store

Serve = Callable[..., DecisionServer]

RULES = """
[limits.api]
algorithm = "fixed-window"
rate = "3/hour"
align = "first"
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
"""
CLIENT = {"X-Forwarded-For": "192.0.2.7"}
NGINX = {"X-Original-URI": "/api/x?a=1", "X-Original-Method": "GET", **CLIENT}
TRAEFIK = {"X-Forwarded-Uri": "/api/x?a=1", "X-Forwarded-Method": "GET", **CLIENT}


def test_a_proxy_gets_permissions_and_then_the_response_for_its_client(serve: Serve) -> None:
    server = serve(RULES)
    for left in (2, 1, 0):
        status, fields, body = server.get("/auth/traefik", TRAEFIK)
        assert (status, body) == (200, b"")
        assert dict(fields)["ratelimit"].startswith(f'"api";r={left};t=')
    status, fields, body = server.get("/auth/caddy", TRAEFIK)
    assert status == 429
    assert int(dict(fields)["retry-after"]) > 3000
    assert json.loads(body)["violated-policies"] == ["api"]


def test_envoy_asks_by_the_request_itself(serve: Serve) -> None:
    server = serve(RULES)
    admitted = (server.get("/auth/envoy/other?x=1", CLIENT, "POST"), server.get("/auth/envoy/", CLIENT))
    # The times may differ.
    assert [[name for name, _ in fields] for _, fields, _ in admitted] == [["content-length", "date"]] * 2
    for _ in range(3):
        status, fields, _ = server.get("/auth/envoy/api/x?a=1", {**CLIENT, "X-Original-URI": "/other"}, "POST")
        assert (status, "ratelimit" in dict(fields)) == (200, True)
    for path in ("/auth/envoy/%61pi/x", "/auth/envoy//api/x", "/auth/envoy/a/../b"):
        assert server.get(path, CLIENT)[0] == 429
    assert server.get("/auth/envoy", CLIENT)[0] == 404
    assert server.get("/auth/envoy/api/x")[0] == 500


def test_nginx_gets_403_and_the_status_in_a_field(serve: Serve) -> None:
    server = serve(RULES)
    for _ in range(3):
        assert server.get("/auth/nginx", NGINX)[0] == 200
    status, fields, _ = server.get("/auth/nginx", NGINX)
    assert (status, dict(fields)["x-forebay-status"]) == (403, "429")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"X-Original-URI": "/api/x"},
        # The fields of another proxy, which a client may send.
        {"X-Forwarded-Uri": "/api/x", "X-Forwarded-Method": "GET"},
    ],
)
def test_a_question_without_its_fields_is_no_permission(patient: DecisionServer, fields: dict[str, str]) -> None:
    status, _, body = patient.get("/auth/nginx", {**CLIENT, **fields})
    assert status == 500
    assert "x-original-uri" in json.loads(body)["error"]


def test_a_proxy_that_names_no_client_gets_no_permission(patient: DecisionServer) -> None:
    status, _, body = patient.get("/auth/caddy", {"X-Forwarded-Uri": "/api/x", "X-Forwarded-Method": "GET"})
    assert status == 500
    assert "x-forwarded-for" in json.loads(body)["error"]


def test_a_field_that_comes_twice_is_no_permission(patient: DecisionServer) -> None:
    with contextlib.closing(patient.connect()) as connection:
        connection.putrequest("GET", "/auth/nginx")
        for name, value in [*NGINX.items(), ("X-Original-URI", "/harmless")]:
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 500


def test_a_peer_that_is_no_proxy_names_no_client(serve: Serve) -> None:
    status, _, body = serve(RULES, head=HEAD.replace('"127.0.0.1", ', "")).get("/auth/traefik", TRAEFIK)
    assert status == 500
    assert "127.0.0.1" in json.loads(body)["error"]


def test_a_unix_socket_serves_a_trusted_proxy(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "forebay.sock"
    # One that an earlier server has left behind.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = serve(RULES, listen=(f"unix:{path}",))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
        answers = [client.get("http://forebay/auth/traefik", headers=TRAEFIK).status_code for _ in range(4)]
    assert answers == [200, 200, 200, 429]
    assert server.stop() == 0
    assert not path.exists()


def test_a_unix_socket_without_a_trusted_proxy_is_refused(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{RULES}'.replace(', "unix"', ""))
    command = [sys.executable, "-m", "forebay", "serve", str(file), "--listen", f"unix:{tmp_path}/s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'write "unix" among the trusted_proxies' in done.stderr


def test_services_name_their_clients_to_a_server_without_proxies(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "forebay.sock"
    server = serve(RULES, "--no-proxies", head="version = 1\n", listen=("127.0.0.1:0", f"unix:{path}"))
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
        assert client.post("http://forebay/v1/decide", json=question).json()["limits"][0]["remaining"] == 2
    assert server.ask("decide", **question)["limits"][0]["remaining"] == 1
    assert "client" in server.ask("decide", uri="/api/x")["error"]


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("unix:", "write a path of 1 to 107 bytes"),
        (f"unix:/{'a' * 107}", "write a path of 1 to 107 bytes"),
        ("unix:{file}", "another file, has this path: write another one"),
        ("nowhere", "is no address such as 127.0.0.1:7464"),
        ("127.0.0.1:99999", "is no address such as 127.0.0.1:7464"),
        ("127.0.0.1:{used}", "Write another port, or start both servers with --reuse-port"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(store_name: str, tmp_path: Path, address: str, remedy: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{RULES}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = address.format(file=file, used=listener.getsockname()[1])
        command = [sys.executable, "-m", "forebay", "serve", str(file), "--listen", address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert f"{address} " in told or f"{address}:" in told or f'"{address}"' in told
    assert remedy in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--idle", "nan"), "'--idle': nan is no number of seconds"),
        (("--drain", "nan"), "'--drain': nan is no number of seconds"),
        (("--token-file", "/nowhere"), "Write the path of a file with one"),
    ],
)
def test_an_option_without_a_meaning_is_refused(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    command = [sys.executable, "-m", "forebay", "serve", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


def test_a_directory_is_no_rule_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay", "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no rule file" in " ".join(done.stderr.split())


def test_a_warning_names_no_line_of_code(serve: Serve, store_name: str) -> None:
    with Store(store_name, keys=100):
        server = serve(RULES)
    assert server.stop() == 0
    assert server.process.stderr is not None
    [line] = server.process.stderr.read().splitlines()
    assert line.startswith("forebay: ")
    assert "keys=100" in line or "100 keys" in line
    assert ".py" not in line


def test_a_hangup_ends_no_server(serve: Serve) -> None:
    server = serve(RULES)
    server.process.send_signal(signal.SIGHUP)
    assert server.get("/healthz")[0] == 200
    assert server.stop() == 0


def test_the_end_of_its_terminal_ends_a_server(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{RULES}')
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "forebay", "serve", str(file), "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        for end in (ours, its):
            stack.callback(os.close, end)
        server = stack.enter_context(
            subprocess.Popen(command, stdin=its, stdout=subprocess.PIPE, start_new_session=True)
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline().startswith(b"listening on")
        server.send_signal(signal.SIGHUP)
        assert server.wait(60) == -signal.SIGHUP


def test_a_server_starts_although_nobody_takes_its_warnings(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=10000"\n{HEAD}{RULES}')
    command = [sys.executable, "-m", "forebay", "serve", str(file), "--listen", "127.0.0.1:0"]
    with (
        Store(store_name, keys=100),
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline().startswith(b"listening on")
        server.terminate()
        assert server.wait(60) == 0


def test_a_proxy_that_is_configured_wrongly_is_reported(serve: Serve) -> None:
    server = serve(RULES)
    assert [server.get("/auth/nginx", CLIENT)[0] for _ in range(3)] == [500] * 3
    assert server.stop() == 0
    assert server.process.stderr is not None
    [line] = server.process.stderr.read().splitlines()
    assert (
        line == "forebay: a proxy's question was refused: a proxy sends x-original-uri and x-original-method, each once"
    )


def test_a_server_may_open_a_file_for_each_connection(serve: Serve, tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))

    server = serve(RULES, "--connections", "300", preexec=lower)
    soft, _ = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft > 300
    command = [sys.executable, "-m", "forebay", "serve", str(tmp_path / "limits.toml"), "--connections", "500"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lower)
    assert done.returncode == 2
    assert "this process may have 512" in done.stderr


def test_http_2_serves_many_questions_in_one_connection(serve: Serve) -> None:
    server = serve(RULES.replace("3/hour", "100/hour"))
    with httpx.Client(http1=False, http2=True, timeout=60) as client:
        answers = [client.get(f"http://127.0.0.1:{server.port}/auth/caddy", headers=TRAEFIK) for _ in range(101)]
    assert [answer.status_code for answer in answers] == [200] * 100 + [429]
    assert {answer.http_version for answer in answers} == {"HTTP/2"}


def test_the_json_api_decides_and_peeks(serve: Serve) -> None:
    server = serve(RULES)
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    seen = server.ask("peek", **question)
    assert (seen["allowed"], seen["limits"][0]["remaining"]) == (True, 3)
    for left in (2, 1, 0):
        reply = server.ask("decide", method="POST", headers={"X-A": "b"}, **question)
        assert (reply["allowed"], reply["status"], reply["limits"][0]["remaining"]) == (True, 200, left)
    for call in ("peek", "decide"):
        reply = server.ask(call, **question)
        assert (reply["http"], reply["allowed"], reply["status"], reply["limits"][0]["name"]) == (
            200,
            False,
            429,
            "api",
        )
        assert reply["retry_after"] >= reply["limits"][0]["retry_after"] > 3000
        assert json.loads(reply["body"])["status"] == 429
    assert server.ask("decide", uri="/other", client="192.0.2.7") == {
        "http": 200, "allowed": True, "status": 200, "retry_after": None, "headers": [], "body": "", "limits": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"uri": "/api/x"}, "need the client's address"),
        ({"uri": "/api/x", "client": "nobody"}, "is no address"),
        ({"uri": "/api/x", "client": "192.0.2.7", "cost": 3}, "unknown field `cost`"),
        ({"client": "192.0.2.7"}, "missing field `uri`"),
        ({"uri": "/", "client": "192.0.2.7", "headers": {"a b": "c"}}, "is no name of a field"),
        ({"uri": "/", "client": "192.0.2.7", "headers": {"a": "\n"}}, "can't have the value"),
    ],
)
def test_a_question_that_cannot_be_read_is_refused(
    patient: DecisionServer, question: dict[str, object], reason: str
) -> None:
    reply = patient.ask("decide", **question)
    assert reply["http"] == 422
    assert reason in reply["error"]


TOKEN = "0123456789abcdef-token"


def test_a_server_with_a_token_changes_state_for_those_who_send_it(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    server = serve(RULES, "--token-file", str(file))
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    for fields in ({}, {"Authorization": "Bearer no"}, {"Authorization": TOKEN}):
        assert server.ask("decide", fields, **question)["http"] == 401
    assert dict(server.get("/v1/decide", method="POST")[1])["www-authenticate"] == "Bearer"
    reply = server.ask("decide", {"Authorization": f"Bearer {TOKEN}", "Origin": "https://a.example"}, **question)
    assert reply["limits"][0]["remaining"] == 2
    assert server.ask("peek", **question)["limits"][0]["remaining"] == 2
    # A proxy sends no token: the file's trusted_proxies are for those.
    assert server.get("/auth/traefik", TRAEFIK)[0] == 200


@pytest.mark.parametrize("text", ["", "short", "with spaces in it, of any length", "\u00e9" * 20])
def test_a_file_without_a_token_is_refused(store_name: str, tmp_path: Path, text: str) -> None:
    rules, file = tmp_path / "limits.toml", tmp_path / "token"
    rules.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{RULES}')
    file.write_text(text)
    command = [sys.executable, "-m", "forebay", "serve", str(rules), "--token-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no token" in done.stderr


def test_a_page_in_a_browser_of_the_host_changes_no_state(serve: Serve) -> None:
    server = serve(RULES)
    question = {"uri": "/api/x", "client": "192.0.2.7"}
    reply = server.ask("decide", {"Origin": "https://a.example"}, **question)
    assert reply["http"] == 403
    assert "--token-file" in reply["error"]
    assert server.ask("peek", **question)["limits"][0]["remaining"] == 3


def test_other_paths_and_methods_are_refused(serve: Serve) -> None:
    server = serve(RULES)
    assert server.get("/auth", NGINX)[0] == 404
    assert server.get("/")[0] == 404
    status, fields, _ = server.get("/v1/decide")
    assert (status, dict(fields)["allow"]) == (405, "POST")
    assert server.get("/healthz", method="DELETE")[0] == 405
    assert [server.get(path)[0] for path in ("/healthz", "/readyz", "/openapi.json")] == [200] * 3


def test_metrics_count_questions_of_all_threads(serve: Serve) -> None:
    server = serve(RULES)
    for _ in range(5):
        server.get("/auth/traefik", TRAEFIK)
    server.get("/auth/nginx", NGINX)
    server.get("/auth/caddy")
    server.ask("peek", uri="/api/x", client="192.0.2.7")
    server.ask("decide", uri="/other", client="192.0.2.7")
    server.ask("decide")
    lines: list[str] = []
    # The server may not have seen yet that the others are closed.
    while "forebay_server_connections 1" not in lines:
        lines = server.get("/metrics")[2].decode().splitlines()
    counted = {line.partition("{")[2].partition("}")[0]: int(line.rpartition(" ")[2]) for line in lines if "{" in line}
    assert {name: count for name, count in counted.items() if count} == {
        'asked_by="traefik",result="allowed"': 3, 'asked_by="traefik",result="denied"': 2,
        'asked_by="nginx",result="denied"': 1, 'asked_by="caddy",result="refused"': 1,
        'asked_by="peek",result="denied"': 1, 'asked_by="decide",result="allowed"': 1,
        'asked_by="decide",result="refused"': 1,
    }  # fmt: skip
    assert "forebay_server_connections_limit 1024" in lines


def test_two_servers_share_a_port_and_the_limits(serve: Serve, tmp_path: Path) -> None:
    first = serve(RULES, "--reuse-port")
    file = tmp_path / "limits.toml"
    with DecisionServer(file, "--reuse-port", listen=(first.addresses[0],)) as second:
        assert second.port == first.port
        answers = [first.get("/auth/traefik", TRAEFIK)[0] for _ in range(8)]
    assert answers == [200] * 3 + [429] * 5


def test_a_port_in_use_is_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve(RULES)
    command = [sys.executable, "-m", "forebay", "serve", str(tmp_path / "limits.toml"), "--listen", server.addresses[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"can't listen to {server.addresses[0]}" in done.stderr


def test_a_file_with_problems_is_refused_with_their_places(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=100"\n{HEAD}{RULES}charge_on = [401]\n')
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "serve", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{file}:13:1: rules[0].charge_on: the server sees no response" in done.stderr


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay", "serve", str(tmp_path / "limts.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"there is no rule file {tmp_path / 'limts.toml'}: write the path of one" in done.stderr


def test_limits_that_are_switched_off_are_told_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ENABLED", "false")
    server = serve(RULES)
    assert server.get("/healthz")[0] == 200  # from here on, a signal finds its handler
    assert server.stop() == 0
    assert server.process.communicate()[1].count("switched off") == 1


def test_a_store_beside_the_file(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f"{HEAD}{RULES}")
    with DecisionServer(file, "--store", f"shm:///{store_name}?keys=100") as server:
        assert server.get("/auth/traefik", TRAEFIK)[0] == 200
    command = [sys.executable, "-m", "forebay", "serve", str(file)]
    live = [*command, "--store", "redis://127.0.0.1:1/0", "--live"]
    done = subprocess.run(live, capture_output=True, text=True, check=False)
    assert (done.returncode, "or start the server without --live" in done.stderr) == (2, True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "or start the server with --store" in done.stderr) == (1, True)


def test_python_and_the_server_share_a_limit(serve: Serve, store_name: str) -> None:
    server = serve(RULES)
    assert server.get("/auth/traefik", TRAEFIK)[0] == 200
    with Store.attach(store_name) as store:
        counts = store.stats().limiters["api"]
        assert (counts.allowed, counts.denied) == (1, 0)


READY = """
import os, signal, sys
import forebay_server
from forebay.serving.plan import plan_of

plan = plan_of(sys.argv[1])
server = forebay_server.Server(
    plan.compiled(forebay_server), ["127.0.0.1:0"], threads=1, connections=10, idle_s=60.0, drain_s=1.0,
    reuse_port=False, token=None, proxies=True, live=None, tls=None,
)
server.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
"""


def test_a_server_that_says_it_listens_ends_by_sigterm_as_it_should(store_name: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "shm:///{store_name}?keys=1000"\n{HEAD}{RULES}')
    done = subprocess.run([sys.executable, "-c", READY, str(file)], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_sigterm_lets_a_request_that_is_under_way_end(serve: Serve) -> None:
    server = serve(RULES)
    body = json.dumps({"uri": "/api/x", "client": "192.0.2.7"}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = b"POST /v1/decide HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.process.terminate()
        while is_accepted(server.port):
            pass
        client.sendall(body)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert (response.status, json.loads(response.read())["allowed"]) == (200, True)
        assert client.recv(1) == b""
    assert server.process.wait(60) == 0


def is_accepted(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return bool(client.recv(1))
    except OSError:
        return False
