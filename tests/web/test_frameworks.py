"""The frameworks' extensions under real servers with several workers: shared tests first, then each framework's."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_limits import AT_ONCE, FAILURES, LIMIT, WIDE, key_of
from framework_server import Answer, Served, running, send_request, served, workers_of
from shop_server import EXAMPLE, UVICORN, wait_until

SERVERS = {
    "flask": ("framework_flask", "gthread", "app"),
    "flask gevent": ("framework_flask", "gevent", "app"),
    "django": ("framework_django", "gthread", "app"),
    "django async": ("framework_django", UVICORN, "asgi"),
    "fastapi": ("framework_fastapi", UVICORN, "app"),
    "aiohttp": ("framework_aiohttp", "aiohttp.GunicornWebWorker", "app"),
}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, store_name: str, tmp_path: Path) -> Iterator[Served]:
    module, worker_class, app = SERVERS[request.param]
    with served(module, worker_class, store_name, tmp_path, app) as server:
        yield server


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", names, indirect=True)


def statuses(answers: list[Answer]) -> dict[int, int]:
    return dict(Counter(answer.status for answer in answers))


def test_every_worker_counts_the_same_limits(server: Served) -> None:
    limits = server.limits

    # A view's limit is exact over all workers, and over sync and async views together.
    workers: set[int] = set()
    customers = 0

    def every_worker_admitted() -> bool:
        nonlocal customers
        customers += 1
        answers = server.send_requests(LIMIT, "/orders", X_Customer=str(customers))
        answers += server.send_requests(LIMIT, "/orders/other", X_Customer=str(customers))
        assert statuses(answers) == {200: LIMIT, 429: LIMIT}
        workers.update(workers_of(answers))
        return len(workers) > 1

    wait_until(every_worker_admitted, "more than one worker has admitted")

    # An admitted response states the remaining permits; a denial states when to retry.
    first = server.request("/orders", X_Customer="ada")
    assert first.headers["ratelimit-policy"] == f'"orders";q={LIMIT};w=86400'
    assert re.fullmatch(rf'"orders";r={LIMIT - 1};t=\d+', first.headers["ratelimit"])
    denied = server.request("/orders", X_Customer="1")
    assert denied.status == 429
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.headers["content-length"] == str(len(denied.body))
    assert denied.report["status"] == 429
    assert denied.report["violated-policies"] == ["orders"]
    assert 0 < int(denied.headers["retry-after"]) <= 86400 / LIMIT
    assert denied.headers["ratelimit"] == f'"orders";r=0;t={denied.headers["retry-after"]}'

    # The two limits of one view are both charged, or neither is.
    answers = server.send_requests(LIMIT + 20, "/both", X_Customer="ada")
    assert statuses(answers) == {200: LIMIT, 429: 20}
    assert limits.ample.peek(key_of("ada"), 0).remaining == LIMIT
    assert {answer.headers["ratelimit-policy"] for answer in answers if answer.status == 200} == {
        f'"ample";q={2 * LIMIT};w=86400, "narrow";q={LIMIT};w=86400'
    }

    # The application's rule applies to its paths and clients only.
    answers = server.send_requests(WIDE + 20, "/wide/1", X_Customer="ada")
    assert statuses(answers) == {200: WIDE, 429: 20}
    assert server.request("/wide/2", X_Customer="ada").status == 429
    assert server.request("/wide/1", X_Customer="ada", X_Internal="yes").status == 200
    assert "ratelimit" not in server.request("/worker").headers
    missing = server.request("/wide/2/missing", X_Customer="bob")
    assert missing.status == 404
    assert missing.headers["ratelimit-policy"] == f'"wide";q={WIDE};w=86400'

    # Only failures are charged, up to the limit.
    for _ in range(FAILURES):
        assert server.request("/login?status=200", "POST", X_Customer="ada").status == 200
    wait_until(lambda: limits.failures.peek(key_of("ada"), 0).remaining == FAILURES, "successes are refunded")
    for attempt in range(FAILURES):
        assert server.request(f"/login?status={401 + 2 * (attempt % 2)}", "POST", X_Customer="ada").status in (401, 403)
    assert server.request("/login?status=200", "POST", X_Customer="ada").status == 429
    assert limits.failures.peek(key_of("ada"), 0).remaining == 0

    # Server errors are not charged.
    for status in (500, 503, 0):
        assert server.request(f"/fragile?status={status}", X_Customer="ada").status == (status or 500)
    wait_until(lambda: limits.handled.peek(key_of("ada"), 0).remaining == LIMIT, "errors are refunded")
    assert server.request("/fragile?status=404", X_Customer="ada").status == 404
    assert limits.handled.peek(key_of("ada"), 0).remaining == LIMIT - 1


def test_held_permits_are_released(server: Served) -> None:
    held, sent = server.limits.held, server.limits.sent
    key = key_of("ada")

    with server.started_stream("/held", X_Customer="ada") as one, server.started_stream("/held", X_Customer="ada"):
        assert held.peek(key, 0).remaining == 0
        denied = server.request("/held", X_Customer="ada")
        assert denied.status == 429
        assert denied.headers["retry-after"] == "1"

        # One client disconnects.
        one.close()
        wait_until(lambda: held.peek(key, 0).remaining == 1, "its permit is back")
        wait_until(lambda: sent.peek(key, 0).remaining == LIMIT - 1, "the unsent response is not charged")

        # The other client gets its whole response.
        server.open()
        wait_until(lambda: held.peek(key, 0).remaining == AT_ONCE, "all permits are back")
    assert sent.peek(key, 0).remaining == LIMIT - 1
    assert server.request("/held", X_Customer="ada").body.rstrip().endswith(b"second")


@only("fastapi", "aiohttp")
def test_websocket_is_limited(server: Served) -> None:
    held, key = server.limits.held, key_of("ada")
    with open_websocket(server.port) as first, open_websocket(server.port) as second:
        for connection in first, second:
            assert b" 101 " in head_of(connection)
        with open_websocket(server.port) as third:
            assert b" 429 " in head_of(third)
    wait_until(lambda: held.peek(key, 0).remaining == AT_ONCE, "all permits are back")


def open_websocket(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        b"GET /socket HTTP/1.1\r\nHost: shop\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Customer: ada\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    return connection


def head_of(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    return received.partition(b"\r\n\r\n")[0]


@only("django", "django async")
def test_django_limits_each_user(server: Served) -> None:
    cookies = [server.request(f"/enter?user={user}").headers["set-cookie"].partition(";")[0] for user in (1, 2)]
    # All workers share the limit, in sync and async views.
    answers = server.send_requests(LIMIT, "/account", Cookie=cookies[0])
    answers += server.send_requests(10, "/account/other", Cookie=cookies[0])
    assert statuses(answers) == {200: LIMIT, 429: 10}
    assert server.request("/account/other", Cookie=cookies[1]).status == 200
    assert server.limits.users.peek(("user", "1"), 0).remaining == 0
    assert server.limits.users.peek(("user", "2"), 0).remaining == LIMIT - 1
    assert server.limits.users.peek("nobody", 0).remaining == LIMIT


@only("django")
def test_rest_framework_throttles_limit_addresses_users_and_scopes(server: Served) -> None:
    cookies = [server.request(f"/enter?user={user}").headers["set-cookie"].partition(";")[0] for user in (1, 2)]

    # Anonymous clients count by address; a forged field changes nothing.
    answers = server.send_requests(30, "/api")
    answers += server.send_requests(30, "/api", X_Forwarded_For="192.0.2.1")
    assert statuses(answers) == {200: 40, 429: 20}
    denied = server.request("/api")
    assert 0 < int(denied.headers["retry-after"]) <= 86400
    assert f"{denied.headers['retry-after']} second" in denied.report["detail"]
    # REST framework calls all throttles, and the user throttle counts anonymous clients as well.
    policies = denied.headers["ratelimit-policy"]
    assert policies == '"throttle anon 40/86400s";q=40;w=86400, "throttle user 60/86400s";q=60;w=86400'
    assert denied.headers["ratelimit"].startswith(f'"throttle anon 40/86400s";r=0;t={denied.headers["retry-after"]}, ')

    # Each user has its own limit.
    assert statuses(server.send_requests(70, "/api", Cookie=cookies[0])) == {200: 60, 429: 10}
    # Each scope has its own limit.
    assert statuses(server.send_requests(15, "/api/uploads", Cookie=cookies[1])) == {200: 10, 429: 5}
    assert server.request("/api", Cookie=cookies[1]).status == 200


@only("flask")
def test_flask_error_handler_answers_denials(server: Served) -> None:
    assert statuses(server.send_requests(LIMIT + 5, "/handled", X_Customer="ada")) == {200: LIMIT, 429: 5}
    denied = server.request("/handled", X_Customer="ada")
    assert denied.report == {"violated": ["orders"]}
    assert 0 < int(denied.headers["retry-after"]) <= 86400 / LIMIT
    assert denied.headers["ratelimit"] == f'"orders";r=0;t={denied.headers["retry-after"]}'

    # An exempt view is not charged by the application's rules.
    assert statuses(server.send_requests(WIDE + 1, "/wide/1", X_Customer="ada")) == {200: WIDE, 429: 1}
    assert statuses(server.send_requests(WIDE + 1, "/wide/exempt", X_Customer="ada")) == {200: WIDE + 1}
    assert "ratelimit" not in server.request("/wide/exempt", X_Customer="ada").headers


EXAMPLES = {
    "flask": ("app:app", "sync"),
    "django": ("shop:application", "sync"),
    "fastapi": ("app:app", UVICORN),
    "starlette": ("app:app", UVICORN),
    "aiohttp": ("app:app", "aiohttp.GunicornWebWorker"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_admits_exactly_its_limit(name: str, store_name: str, tmp_path: Path) -> None:
    app, worker_class = EXAMPLES[name]
    with running(app, worker_class, EXAMPLE.parent / name, tmp_path / "log", SHOP_STORE=store_name) as port:
        began_s = time.monotonic()
        answers = [send_request(port, "/orders", "POST")]
        while answers[-1].status == 200:
            answers.append(send_request(port, "/orders", "POST"))
        # One permit refills every twelve seconds.
        assert 5 <= statuses(answers)[200] <= 5 + (time.monotonic() - began_s) / 12
        denied = answers[-1]
        assert denied.report["violated-policies"] == ["orders"]
        assert '"everything";r=' in answers[0].headers["ratelimit"]
