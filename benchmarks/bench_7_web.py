"""The cost that limits add to a request in the web stack, beside the same application without limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Measure, must, statement, time_per_call
from pytest_benchmark.fixture import BenchmarkFixture
from web_apps import fastapi_app, flask_app, plain_asgi, plain_wsgi, rules_of, three_of_fifty_rules

from forebay import Store, UnseenPathsWarning
from forebay.web import ASGIMiddleware, WSGIMiddleware
from forebay.web.patterns import SEARCHED_REQUESTS

SECTION = "In the web stack: what a request costs more"
WITHOUT = "without"
ADDED_US = {1: 6, 3: 9}
ADDED_OF_FIFTY_US = 5
REQUESTS_AT_ONCE = 100


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=10_000) as store:
        yield store


# WSGI

ENVIRON = {
    "REQUEST_METHOD": "GET",
    "SCRIPT_NAME": "",
    "PATH_INFO": "/",
    "QUERY_STRING": "",
    "SERVER_NAME": "localhost",
    "SERVER_PORT": "8000",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "REMOTE_ADDR": "203.0.113.7",
    "HTTP_HOST": "localhost:8000",
    "HTTP_USER_AGENT": "wrk",
    "HTTP_ACCEPT": "*/*",
    "wsgi.version": (1, 0),
    "wsgi.url_scheme": "http",
    "wsgi.multithread": False,
    "wsgi.multiprocess": True,
    "wsgi.run_once": False,
}


def wsgi_request(app: Callable[..., Any]) -> Callable[[], list[tuple[str, str]]]:
    """One request as a server makes it; returns the response's fields."""

    def request() -> list[tuple[str, str]]:
        fields: list[tuple[str, str]] = []

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
            fields[:] = headers

        answer = app(dict(ENVIRON), start_response)
        for _ in answer:
            pass
        close = getattr(answer, "close", None)
        if close is not None:
            close()
        return fields

    return request


def measure_wsgi(measure: Measure, title: str, app: Any, plain: Any, calls: int, **facts: Any) -> None:
    request, without = wsgi_request(app), statement("request()", request=wsgi_request(plain))
    must(any("ratelimit" in name.lower() for name, _ in request()))
    measure(
        title,
        statement("request()", request=request),
        calls=calls,
        rounds=31,
        beside={WITHOUT: lambda: time_per_call(without, calls)},
        section=SECTION,
        added=True,
        **facts,
    )


@pytest.mark.parametrize("count", [1, 3])
def bench_wsgi(measure: Measure, store: Store, count: int) -> None:
    title = f"WSGI, bare: forebay, {count} limit{'s' * (count > 1)} and headers"
    app = WSGIMiddleware(plain_wsgi, rules_of(store, count))
    measure_wsgi(measure, title, app, plain_wsgi, 10_000, bar_us=ADDED_US[count])


def bench_wsgi_of_fifty(measure: Measure, store: Store) -> None:
    app = WSGIMiddleware(plain_wsgi, three_of_fifty_rules(store))
    request = wsgi_request(app)
    with warnings.catch_warnings():
        # After so many requests, the gate no longer looks for paths that none has.
        warnings.simplefilter("ignore", UnseenPathsWarning)
        for _ in range(SEARCHED_REQUESTS + 1):
            request()
    title = "WSGI, bare: forebay, 3 rules of 50, and headers"
    measure_wsgi(measure, title, app, plain_wsgi, 10_000, bar_us=ADDED_OF_FIFTY_US)


@pytest.mark.parametrize("count", [1, 3])
def bench_flask(measure: Measure, store: Store, count: int) -> None:
    title = f"Flask: forebay around it, {count} limit{'s' * (count > 1)} and headers"
    app = WSGIMiddleware(flask_app(), rules_of(store, count))
    measure_wsgi(measure, title, app, flask_app(), 2_000, bar_us=ADDED_US[count])


@pytest.mark.parametrize("where", ["memory", "Redis"])
def bench_flask_limiter(measure: Measure, redis_port: int, where: str) -> None:
    uri = "memory://" if where == "memory" else f"redis://127.0.0.1:{redis_port}/3"
    calls = 1_000 if where == "memory" else 200
    measure_wsgi(measure, f"Flask: Flask-Limiter on {where}, 1 limit and headers", flask_app(uri), flask_app(), calls)


# ASGI


def asgi_requests(app: Callable[..., Awaitable[None]], loop: asyncio.AbstractEventLoop) -> Callable[[], set[bytes]]:
    """Some consecutive requests as a server makes them; returns the names of the last response's fields."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def requests() -> set[bytes]:
        fields: set[bytes] = set()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                fields.update(name for name, _ in message["headers"])

        for _ in range(REQUESTS_AT_ONCE):
            scope = {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": "1.1",
                "method": "GET",
                "scheme": "http",
                "path": "/",
                "raw_path": b"/",
                "query_string": b"",
                "root_path": "",
                "headers": [(b"host", b"localhost:8000"), (b"user-agent", b"wrk"), (b"accept", b"*/*")],
                "client": ("203.0.113.7", 50000),
                "server": ("127.0.0.1", 8000),
                "state": {},
            }
            await app(scope, receive, send)
        return fields

    return lambda: loop.run_until_complete(requests())


def measure_asgi(measure: Measure, title: str, app: Any, plain: Any, calls: int, **facts: Any) -> None:
    loop = asyncio.new_event_loop()
    try:
        requests = asgi_requests(app, loop)
        without = statement("requests()", requests=asgi_requests(plain, loop))
        must(any(b"ratelimit" in name for name in requests()))
        measure(
            title,
            statement("requests()", requests=requests),
            calls=calls,
            operations_per_call=REQUESTS_AT_ONCE,
            rounds=31,
            beside={WITHOUT: lambda: time_per_call(without, calls, REQUESTS_AT_ONCE)},
            section=SECTION,
            added=True,
            **facts,
        )
    finally:
        loop.close()


@pytest.mark.parametrize("count", [1, 3])
def bench_asgi(measure: Measure, store: Store, count: int) -> None:
    title = f"ASGI, bare: forebay, {count} limit{'s' * (count > 1)} and headers"
    app = ASGIMiddleware(plain_asgi, rules_of(store, count))
    measure_asgi(measure, title, app, plain_asgi, 100, bar_us=ADDED_US[count])


def bench_asgi_of_fifty(measure: Measure, store: Store) -> None:
    app = ASGIMiddleware(plain_asgi, three_of_fifty_rules(store))
    with warnings.catch_warnings(), asyncio.Runner() as runner:
        warnings.simplefilter("ignore", UnseenPathsWarning)
        requests = asgi_requests(app, runner.get_loop())
        for _ in range(SEARCHED_REQUESTS // REQUESTS_AT_ONCE + 1):
            requests()
    title = "ASGI, bare: forebay, 3 rules of 50, and headers"
    measure_asgi(measure, title, app, plain_asgi, 100, bar_us=ADDED_OF_FIFTY_US)


@pytest.mark.parametrize("count", [1, 3])
def bench_fastapi(measure: Measure, store: Store, count: int) -> None:
    title = f"FastAPI: forebay around it, {count} limit{'s' * (count > 1)} and headers"
    app = ASGIMiddleware(fastapi_app(), rules_of(store, count))
    measure_asgi(measure, title, app, fastapi_app(), 20, bar_us=ADDED_US[count])


@pytest.mark.parametrize("where", ["memory", "Redis"])
def bench_slowapi(measure: Measure, redis_port: int, where: str) -> None:
    uri = "memory://" if where == "memory" else f"redis://127.0.0.1:{redis_port}/4"
    with warnings.catch_warnings():
        # slowapi detects coroutine functions by a function that Python deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        app = fastapi_app(uri)
        title = f"FastAPI: slowapi on {where}, 1 limit and headers"
        measure_asgi(measure, title, app, fastapi_app(), 10 if where == "memory" else 2)


# Servers under load

WRK = re.compile(r"Requests/sec:\s+([\d.]+)")
CORES = 2  # the cores of the server, which has one worker for each, and as many for the load
# An asyncio server on sockets that it has not made itself (uvicorn's own workers) waits for the client's
# acknowledgement between header and body. gunicorn's sockets have no such delay.
SERVERS = {
    "gunicorn, WSGI": ("wsgi", "sync"),
    "gunicorn, Flask": ("flask", "sync"),
    "gunicorn with uvicorn's workers, ASGI": ("asgi", "uvicorn_worker.UvicornWorker"),
    "gunicorn with uvicorn's workers, FastAPI": ("fastapi", "uvicorn_worker.UvicornWorker"),
}


@contextlib.contextmanager
def served(apps: list[str], worker_class: str, store_name: str, cores: list[int]) -> Iterator[dict[str, int]]:
    """Starts a server of each application on a free loopback port."""
    processes, ports = [], {}
    try:
        for app in apps:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports[app] = probe.getsockname()[1]
            processes.append(
                subprocess.Popen(
                    [
                        *(str(Path(sys.executable).with_name("gunicorn")), "--workers", str(CORES)),
                        *("--worker-class", worker_class, "--bind", f"127.0.0.1:{ports[app]}"),
                        *("--log-level", "warning", "--no-control-socket", "web_apps:served"),
                    ],
                    cwd=Path(__file__).parent,
                    env=os.environ | {"BENCH_APP": app, "BENCH_STORE": store_name},
                    start_new_session=True,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=lambda: os.sched_setaffinity(0, cores),
                )
            )
        for port, process in zip(ports.values(), processes, strict=True):
            for _ in range(400):
                with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                    break
                must(process.poll() is None)
                time.sleep(0.05)
        yield ports
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(20)


def requests_per_second(port: int, seconds: int, cores: list[int]) -> float:
    answer = subprocess.run(
        ["wrk", "-t2", "-c32", f"-d{seconds}s", f"http://127.0.0.1:{port}/"],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout
    must("Non-2xx" not in answer)
    found = WRK.search(answer)
    must(found is not None)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("server", SERVERS)
def bench_server(
    benchmark: BenchmarkFixture,
    say: Callable[[str], None],
    store_name: str,
    all_cores: list[int],
    quick: bool,
    server: str,
) -> None:
    """The share of the requests per second that remains with one or three limits, round by round.

    Part of the loss with header fields is that the response has two more lines: `fields` is the application that sends
    such lines itself, `silent` has one limit that sends none.
    """
    app, worker_class = SERVERS[server]
    server_cores, load_cores = all_cores[:CORES], all_cores[-CORES:]
    # One process of an application may be some per cent slower than another for its whole life.
    launches, rounds = (1, 1) if quick else (5, 3)
    apps = [f"{app}+{kind}" for kind in ("0", "fields", "silent", "1", "3")]
    taken: list[dict[str, float]] = []

    def one_launch() -> None:
        with served(apps, worker_class, store_name, server_cores) as ports:
            for port in ports.values():
                requests_per_second(port, 1, load_cores)
            for _ in range(rounds):
                # A machine's speed changes from second to second, so the order changes, too.
                apps.append(apps.pop(0))
                taken.append({app.partition("+")[2]: requests_per_second(ports[app], 1, load_cores) for app in apps})

    benchmark.pedantic(one_launch, rounds=launches)
    share = statistics.median(rates["1"] / rates["0"] for rates in taken)
    benchmark.extra_info.update(
        title=f"{server}, {CORES} workers, under wrk", section=SECTION, requests=taken, bar=0.97
    )
    say(f"{share:12.1%}")
