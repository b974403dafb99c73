"""Live rules under a real gunicorn: they change while a load runs, and no request sees parts of two versions."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from shop_server import PATIENCE_S, UVICORN, wait_until

WORKERS = 4
LISTENING = re.compile(r"Listening at: http://127\.0\.0\.1:(\d+)")
# Limits a second that no load reaches: a version has one of them.
VERSIONS = range(1_000_000, 1_000_007)
POLICY = re.compile(r'"(?P<name>\w+)";q=(?P<limit>\d+)')


def rules(limit: int) -> str:
    """Two rules that are equal in every version."""
    limits = "".join(
        f'[limits.{name}]\nalgorithm = "token-bucket"\nrate = "{limit}/second"\n' for name in ("first", "second")
    )
    each = "".join(
        f'[[rules]]\nname = "{name}"\nlimits = ["{name}"]\nkey = "everyone"\n' for name in ("first", "second")
    )
    return f"version = 1\n{limits}{each}"


class Server:
    """A gunicorn whose processes are one session; leaving the context ends them."""

    def __init__(self, folder: Path, worker_class: str, preload: bool) -> None:
        self.rules, self._log = folder / "limits.toml", folder / "log"
        self.rules.write_text(rules(VERSIONS[0]))
        command = [
            str(Path(sys.executable).with_name("gunicorn")),
            *("--chdir", str(Path(__file__).parent), "--bind", "127.0.0.1:0", "--worker-class", worker_class),
            *("--workers", str(WORKERS), "--graceful-timeout", "1", *(["--preload"] if preload else [])),
            *(["--threads", "4"] if worker_class == "gthread" else []),
            "live_app:async_app" if worker_class == UVICORN else "live_app:app",
        ]
        variables = os.environ | {"LIVE_STORE": str(folder / "segment"), "LIVE_RULES": str(self.rules)}
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Server:
        try:
            wait_until(lambda: bool(LISTENING.search(self._log.read_text())), "gunicorn listens")
        except BaseException:
            self.__exit__()
            raise
        found = LISTENING.search(self._log.read_text())
        assert found is not None
        self.port = int(found[1])
        return self

    def __exit__(self, *exception: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(PATIENCE_S)
        finally:
            for process in self.processes():
                process.kill()
            self._popen.wait()
            print(self._log.read_text())

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._popen.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def limits(self) -> tuple[dict[str, int], int]:
        """The limits that a response shows, and the process that sent it. Raises ``OSError`` if that was killed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/")
            response = connection.getresponse()
            assert response.status == 200
            body = response.read()
            found = {each["name"]: int(each["limit"]) for each in POLICY.finditer(response.headers["RateLimit-Policy"])}
            return found, int(body)
        finally:
            connection.close()

    def publish(self, limit: int) -> None:
        new = self.rules.with_suffix(".new")
        new.write_text(rules(limit))
        new.rename(self.rules)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda worker_class, preload: stack.enter_context(Server(tmp_path, worker_class, preload))


@pytest.mark.parametrize(
    ("worker_class", "preload"), [("sync", True), ("gthread", False), ("gevent", True), (UVICORN, False)]
)
def test_no_request_sees_parts_of_two_versions(serve: Callable[..., Server], worker_class: str, preload: bool) -> None:
    server = serve(worker_class, preload)
    ended = threading.Event()
    seen: set[int] = set()
    mixed: list[dict[str, int]] = []
    newest: dict[int, int] = {}

    def load() -> None:
        while not ended.is_set():
            try:
                found, worker = server.limits()
            except (OSError, http.client.HTTPException):
                # Its worker was killed.
                continue
            if len(found) != 2 or len(set(found.values())) != 1:
                mixed.append(found)
            seen.add(found["first"])
            newest[worker] = max(newest.get(worker, 0), found["first"])

    def load_failed() -> bool:
        """False. Raises what a load raised."""
        return any(one.result() is not None for one in loads if one.done())

    with ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(load) for _ in range(6)]
        try:
            for limit in VERSIONS:
                server.publish(limit)
                wait_until(lambda limit=limit: limit in seen or load_failed(), f"a limit of {limit}")
                if limit == VERSIONS[3]:
                    # The process that loads is among them.
                    victims = [process for process in server.processes() if process.pid in newest][:2]
                    for process in victims:
                        process.send_signal(signal.SIGKILL)
            workers = {process.pid for process in server.processes()} & set(newest)
            wait_until(
                lambda: all(newest[pid] == VERSIONS[-1] for pid in workers) or load_failed(),
                "every worker has the newest rules",
            )
        finally:
            ended.set()
        for one in loads:
            one.result()
    assert not mixed
    assert seen == set(VERSIONS)
