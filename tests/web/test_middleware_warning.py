"""Warnings at a server's start: each worker counts in a store of its own, or no client has an address."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from middleware_server import UVICORN, WORKERS, MiddlewareServer

WARNING = "CountsPerWorkerWarning"


@pytest.mark.parametrize("when", ["import", "late"])
@pytest.mark.parametrize("server", ["sync", UVICORN, "uvicorn"])
def test_private_store_in_each_worker_causes_a_warning(server: str, when: str, tmp_path: Path) -> None:
    with MiddlewareServer(tmp_path, server, when=when) as site:
        _let_all_make(site, server, when)
        log = site.log
        assert log.count(f"{WARNING}: ") == len(list(site.made.iterdir())) >= 1
        assert f"one of {WORKERS} workers" in log
        assert 'Store("shop", keys=1000)' in log


@pytest.mark.parametrize("when", ["import", "late"])
@pytest.mark.parametrize("server", ["sync", UVICORN])
def test_private_store_made_before_the_fork_causes_no_warning(server: str, when: str, tmp_path: Path) -> None:
    """All workers share the store, even if each makes its middleware late."""
    with MiddlewareServer(tmp_path, server, when=when, preload=True) as site:
        answers = site.send_requests("/", 50)
        site.wait_made(1)
        assert WARNING not in site.log
        assert {answer.ratelimit.split(";")[1] for answer in answers} == {f"r={199 - i}" for i in range(50)}


@pytest.mark.parametrize("server", ["sync", UVICORN, "uvicorn"])
def test_named_store_causes_no_warning(server: str, store_name: str, tmp_path: Path) -> None:
    with MiddlewareServer(tmp_path, server, store_name=store_name) as site:
        site.wait_made(site.workers)
        assert WARNING not in site.log


@pytest.mark.parametrize("server", ["sync", UVICORN, "uvicorn"])
def test_single_worker_causes_no_warning(server: str, tmp_path: Path) -> None:
    with MiddlewareServer(tmp_path, server, workers=1) as site:
        site.send_requests("/")
        site.wait_made(1)
        assert WARNING not in site.log


@pytest.mark.parametrize("server", ["sync", UVICORN, "uvicorn"])
def test_worker_count_of_the_environment_is_in_the_warning(server: str, tmp_path: Path) -> None:
    with MiddlewareServer(tmp_path, server, environment={"WEB_CONCURRENCY": "3"}) as site:
        site.wait_made(3)
        assert "one of 3 workers" in site.log


def _let_all_make(site: MiddlewareServer, server: str, when: str) -> None:
    if when == "import" or server != "sync":
        # Each worker starts the lifespan of an ASGI application.
        site.wait_made(site.workers)
    else:
        site.send_requests("/", 50)
        site.wait_made(1)


def test_unix_socket_without_trusted_proxies_causes_a_warning(tmp_path: Path) -> None:
    """gunicorn loads the application, as in a worker or before the fork."""
    (tmp_path / "behind.py").write_text(
        "from forebay import Store, TokenBucket\n"
        "from forebay.web import Rule, WSGIMiddleware\n"
        "store = Store.private(keys=10)\n"
        "app = WSGIMiddleware(lambda environ, start: [], [Rule(TokenBucket(store, 'api', '5/hour'))])\n"
    )
    for bind, is_warned in ((f"unix:{tmp_path}/app.sock", True), ("127.0.0.1:0", False)):
        options = ["--check-config", "--chdir", str(tmp_path), "-b", bind]
        result = subprocess.run(
            [sys.executable, "-m", "gunicorn", *options, "behind:app"], capture_output=True, text=True, check=True
        )
        assert ("UnknownClientsWarning: the server listens at the Unix socket" in result.stderr) is is_warned
        assert ("behind.py:4" in result.stderr) is is_warned
