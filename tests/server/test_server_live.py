"""Rules that change while the server runs, beside a worker that follows the same file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from decision_server import CLIENT, TIER, DecisionServer

from forebay import FixedWindow, connect
from forebay.rules import FileSource, LiveRules
from forebay.web.live_gate import gate_of
from forebay.web.native_requests import WSGIRequest

NAME = "192.0.2.7"
FIELDS = {"X-Forwarded-Uri": "/api/x", "X-Forwarded-Method": "GET", "X-Forwarded-For": NAME}


def rules(limit: str, more: str = "") -> str:
    return f"""version = 1
{CLIENT}
[limits.api]
{limit}
[[rules]]
name = "api"
limits = ["api"]
path = "/api/*"
{more}
"""


TEN = 'algorithm = "fixed-window"\nrate = "10/day"\nalign = "first"'


class Host:
    """A server, and a worker of the same host in this process."""

    def __init__(self, file: Path, url: str, text: str, started: ExitStack) -> None:
        self._file = file
        self.write(text)
        self.server = started.enter_context(
            DecisionServer(file, "--live", "--store", url, "--tier-header", TIER, "--idle", "60")
        )
        store: Any = started.enter_context(connect(url))
        self.rules = started.enter_context(
            LiveRules(
                FileSource(file),
                store=store,
                interval="10 ms",
                tier=lambda request: request.header(TIER) or "",
                host=getattr(store, "host", None),
            )
        )
        self._gate = gate_of(self.rules)
        self.ask_worker("/")  # starts its thread

    def write(self, text: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._file)

    def publish(self, text: str) -> None:
        """Write the file, and wait for its publication."""
        before = self.rules.status().published
        self.write(text)
        while self.rules.status().published == before:
            time.sleep(0.01)

    def ask_server(self) -> tuple[int, str]:
        status, fields, _ = self.server.get("/auth/traefik", FIELDS)
        return status, _left(dict(fields)["ratelimit"])

    def ask_worker(self, path: str = "/api/x") -> Any:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_FOR": NAME}
        passage: Any = self._gate.enter(WSGIRequest(environ))
        return None if passage is None else _left(dict(passage.fields)["RateLimit"])


def _left(field: str) -> str:
    return field.partition(";")[2].partition(";")[0]


@pytest.fixture
def host(tmp_path: Path, store_name: str) -> Iterator[Callable[[str], Host]]:
    with ExitStack() as started:
        yield lambda text: Host(tmp_path / "live.toml", f"shm:///{store_name}?keys=10000", text, started)


def test_the_next_request_is_decided_by_the_rules_that_were_published(host: Callable[[str], Host]) -> None:
    pair = host(rules(TEN))
    assert pair.ask_server() == (200, "r=9")
    assert pair.ask_worker() == "r=8"
    # Of 10 requests, 2 were made: 4 of 20, of which there are then 5, so 1 of 3, and then 2, so 7 of 10.
    for rate, left in (("20/day", "r=15"), ("3/day", "r=1"), ("10/day", "r=2")):
        pair.publish(rules(TEN.replace("10/day", rate)))
        assert (rate, *pair.ask_server()) == (rate, 200, left)
    assert f"forebay_server_rules_version {pair.rules.status().published}" in pair.server.get("/metrics")[2].decode()


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_key_brings_its_share_to_another_limit_once(host: Callable[[str], Host], asks_first: bool) -> None:
    pair = host(rules(TEN))
    for _ in range(5):
        pair.ask_server()
    pair.publish(rules('algorithm = "token-bucket"\nrate = "100/day"\nburst = 100\non_change = "share"'))
    # Half of it is used.
    if asks_first:
        assert pair.ask_worker() == "r=49"
        assert pair.ask_server() == (200, "r=48")
    else:
        assert pair.ask_server() == (200, "r=49")
        assert pair.ask_worker() == "r=48"
    pair.publish(rules('algorithm = "fixed-window"\nrate = "10/day"\nalign = "first"\non_change = "share"'))
    first, second = (pair.ask_worker(), pair.ask_server()[1]) if asks_first else (
        pair.ask_server()[1], pair.ask_worker())  # fmt: skip
    assert (first, second) == ("r=3", "r=2")


def test_a_full_store_without_room_for_a_share_denies_the_key(tmp_path: Path, store_name: str) -> None:
    url = f"shm:///{store_name}?keys=1"
    with ExitStack() as started:
        pair = Host(tmp_path / "live.toml", url, rules(TEN.replace("10", "2")), started)
        assert pair.ask_server() == (200, "r=1")
        pair.publish(rules(TEN.replace("10", "1") + '\non_change = "share"'))
        others = FixedWindow(started.enter_context(connect(url)), "others", "1/year")
        others.allow_many(range(20_000))
        assert pair.server.get("/auth/traefik", FIELDS)[0] == 503


def test_a_limit_that_is_reset_counts_anew(host: Callable[[str], Host]) -> None:
    pair = host(rules(TEN))
    assert pair.ask_server() == (200, "r=9")
    pair.publish(rules(TEN.replace("10/day", "20/day") + '\non_change = "reset"'))
    assert pair.ask_server() == (200, "r=19")
    assert pair.ask_worker() == "r=18"


def test_rules_that_the_server_cannot_decide_leave_the_last_good_ones(host: Callable[[str], Host]) -> None:
    pair = host(rules(TEN))
    assert pair.ask_server() == (200, "r=9")
    pair.publish(rules(TEN.replace("10/day", "30/day"), "charge_on = [401]"))
    assert pair.ask_server() == (200, "r=8")
    pair.publish(rules(TEN.replace("10/day", "40/day")))
    assert pair.ask_server() == (200, "r=31")
    pair.server.process.terminate()
    errors = pair.server.process.communicate()[1]
    assert "rules[0].charge_on: the server sees no response" in errors
    assert "this process keeps the rules that it has" in errors


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--live"], "write --store"),
        (["--live", "--store", "redis://127.0.0.1:1/0"], "add the option host=shm:///NAME?keys=1000"),
        (["--live", "--store", "shm:///x?keys=100", "--no-proxies"], "leave --live or --no-proxies out"),
    ],
)
def test_live_rules_that_cannot_be_followed_are_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    file = tmp_path / "live.toml"
    file.write_text(rules(TEN))
    command = [sys.executable, "-m", "forebay", "serve", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
