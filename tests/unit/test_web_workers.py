"""The number of workers beside a process, from its server's command line and environment."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from starlette.applications import Starlette

import forebay.contrib.aiohttp
import forebay.contrib.fastapi
import forebay.contrib.flask
from forebay import CountsPerWorkerWarning, FixedWindow, Store, UnknownClientsWarning
from forebay.seldom import Seldom
from forebay.web import ASGIMiddleware, ClientAddress, Gate, Rule, WSGIMiddleware, everyone

# With the pure-Python fallback no processes share a store.
REMEDY = 'Store("shop", keys=10)' if forebay.native else "start one worker"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start the process as a child that a server spawned, with the server's command line."""

    def start(command: str, *, is_child: bool = True, environment: str = "") -> None:
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_child else None)
        monkeypatch.setattr(sys, "argv", command.split())
        monkeypatch.setenv("WEB_CONCURRENCY", environment)

    return start


def warned(store: Store) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Gate([Rule(FixedWindow(store, "api", "1/minute"))])
    assert all(warning.category is CountsPerWorkerWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("command", "environment", "count"),
    [
        ("/bin/uvicorn app:app --workers 4", "", 4),
        ("/bin/uvicorn app:app --workers=4", "", 4),
        ("/lib/uvicorn/__main__.py app:app --workers 4", "", 4),
        ("/bin/hypercorn -w 3 app:app", "", 3),
        ("/bin/granian --workers 2 app:app", "", 2),
        ("/bin/fastapi run --workers 5", "", 5),
        ("/bin/uvicorn app:app", "6", 6),
        ("/bin/uvicorn app:app --workers 4", "6", 4),
        ("/bin/uvicorn app:app --workers 1", "6", 1),
        ("/bin/uvicorn app:app", "", 1),
        ("/bin/uvicorn app:app --workers", "", 1),
        ("/bin/uvicorn app:app --workers many", "", 1),
        ("/bin/uvicorn app:app", "auto", 1),
        ("/bin/pytest --workers 4", "6", 1),
        ("manage.py runworker -w 4", "6", 1),
    ],
)
def test_worker_count_is_read_from_the_command_line(started: Any, command: str, environment: str, count: int) -> None:
    started(command, environment=environment)
    messages = warned(Store.private(keys=10))
    assert len(messages) == (count > 1)
    for message in messages:
        assert f"one of {count} workers" in message
        assert f"{count} times the limit" in message
        assert "limiter 'api'" in message
        assert REMEDY in message


def test_process_without_a_parent_is_not_a_worker(started: Any) -> None:
    started("/bin/uvicorn app:app --workers 4", is_child=False)
    assert warned(Store.private(keys=10)) == []


def test_named_store_causes_no_warning(started: Any, store_name: str) -> None:
    started("/bin/uvicorn app:app --workers 4")
    with Store(store_name, keys=10) as store:
        assert warned(store) == []


def test_store_from_before_a_fork_causes_no_warning(started: Any, in_child: Any) -> None:
    started("/bin/uvicorn app:app --workers 4")
    store = Store.private(keys=10)
    assert in_child(lambda: warned(store)) == []
    assert len(in_child(lambda: warned(Store.private(keys=10)))) == 1


@pytest.mark.parametrize(("worker", "count"), [(0, 0), (1, 1)])
def test_uwsgi_worker_causes_a_warning_but_its_master_does_not(
    monkeypatch: pytest.MonkeyPatch, worker: int, count: int
) -> None:
    """uWSGI loads the application in the master before it forks, or in each worker."""
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(numproc=4, worker_id=lambda: worker))  # type: ignore[arg-type]
    assert len(warned(Store.private(keys=10))) == count


def test_gate_without_rules_causes_no_warning(started: Any) -> None:
    started("/bin/uvicorn app:app --workers 4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gate([])


@pytest.mark.parametrize(
    "make",
    [
        lambda limiter: Gate([Rule(limiter)]),
        lambda limiter: WSGIMiddleware(lambda environ, start: [], [Rule(limiter)]),
        lambda limiter: ASGIMiddleware(lambda scope, receive, send: None, [Rule(limiter)]),  # type: ignore[arg-type, return-value]
        lambda limiter: forebay.contrib.flask.Limits(rules=[Rule(limiter)]),
        lambda limiter: forebay.contrib.flask.Limits().limit(limiter)(lambda: ""),
        lambda limiter: forebay.contrib.aiohttp.limited(limiter)(web.View),
        lambda limiter: forebay.contrib.fastapi.limited(limiter),
        lambda limiter: forebay.contrib.fastapi.setup(Starlette(), [Rule(limiter)]),
    ],
)
def test_warning_names_the_line_that_made_the_limits(started: Any, make: Callable[[FixedWindow], object]) -> None:
    started("/bin/uvicorn app:app --workers 4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(FixedWindow(Store.private(keys=10), "api", "1/minute"))
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, make.__code__.co_firstlineno)]


def test_warning_comes_once_per_store(started: Any) -> None:
    started("/bin/uvicorn app:app --workers 4")
    limits = forebay.contrib.flask.Limits()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            store = Store.private(keys=10)
            one, other = (FixedWindow(store, name, "1/minute") for name in ("one", "other"))
            limits.limit(one)(limits.limit(other)(lambda: ""))
            Gate([Rule(one)])
    assert len(caught) == 2


ADDRESS = 'ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")'


class TestUnixSockets:
    """If a server listens only on a Unix socket, no client has an address."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forebay.web.workers._socket_warning", Seldom())
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)

    def warned(self, limiter: FixedWindow, rules: Any = None, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Gate([Rule(limiter)] if rules is None else rules, **options)
        assert all(warning.category is UnknownClientsWarning for warning in caught)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    @pytest.fixture
    def limiter(self) -> FixedWindow:
        return FixedWindow(Store.private(keys=10), "api", "1/minute")

    @pytest.mark.parametrize(
        ("command", "socket"),
        [
            ("/bin/uvicorn --uds /run/app.sock app:app", "/run/app.sock"),
            ("/bin/uvicorn --uds=/run/app.sock app:app", "/run/app.sock"),
            ("/lib/uvicorn/__main__.py --uds /run/app.sock app:app", "/run/app.sock"),
            ("/bin/uvicorn --uds /run/app.sock app:app --forwarded-allow-ips 10.0.0.1", "/run/app.sock"),
            ("/bin/uvicorn --uds /run/app.sock app:app --forwarded-allow-ips *", None),
            ("/bin/hypercorn --bind unix:/run/app.sock app:app", "unix:/run/app.sock"),
            ("/bin/hypercorn --bind unix:/run/app.sock -b 0.0.0.0:80 app:app", None),
            ("/bin/hypercorn app:app", None),
            ("/bin/granian --uds /run/app.sock app:app", "/run/app.sock"),
            ("/bin/uvicorn app:app", None),
            ("/bin/pytest --uds /run/app.sock", None),
        ],
    )
    def test_unix_socket_is_read_from_the_command_line(
        self, started: Any, limiter: FixedWindow, command: str, socket: str | None
    ) -> None:
        started(command, is_child=False)
        messages = self.warned(limiter)
        assert len(messages) == (socket is not None)
        for message in messages:
            assert f"Unix socket {socket}, where no client has an address" in message
            assert ADDRESS in message
        # The warning comes once for all gates.
        assert self.warned(limiter) == []

    def test_server_that_trusts_all_peers_causes_no_warning(
        self, started: Any, limiter: FixedWindow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started("/bin/uvicorn --uds /run/app.sock app:app", is_child=False)
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
        assert self.warned(limiter) == []

    def test_keys_without_an_address_cause_no_warning(self, started: Any, limiter: FixedWindow) -> None:
        started("/bin/uvicorn --uds /run/app.sock app:app", is_child=False)
        proxied = ClientAddress(trusted_proxies=["unix"], header="X-Forwarded-For")
        assert self.warned(limiter, client=proxied) == []
        assert self.warned(limiter, [Rule(limiter, key=everyone)]) == []
        assert self.warned(limiter, []) == []
        # A view's limit takes the client function of its application.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forebay.contrib.flask.Limits(client=proxied).limit(limiter)(lambda: "")
        assert len(self.warned(limiter, [Rule(limiter, key=ClientAddress())], client=proxied)) == 1
