"""The pure-Python fallback: how it is chosen, what it says, and that it needs nothing of Linux.

Each test runs a program of its own, because a process imports forebay once. ci/fallback runs this file, and other tests
on the fallback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forebay

EVERY_KIND = (Path(__file__).parent / "every_kind.py").read_text()

ELSEWHERE = """
    import sys

    # The standard library chooses its own modules by the platform, too: those that are used come first.
    import asyncio, concurrent.futures, email, http, json, logging, multiprocessing, random, secrets, selectors, socket
    import sqlite3, ssl, subprocess, tempfile, threading, time, urllib.request, uuid, zoneinfo
    import os

    import redis.asyncio.cluster, redis.cluster, redis.sentinel

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "_posixshmem", "posix"}
    sys.meta_path.insert(0, Missing())
    for name in MODULES:
        sys.modules.pop(name, None)
    NAMES = ["sched_getaffinity", "memfd_create", "pwrite", "posix_fallocate"]
    if PLATFORM == "win32":
        NAMES += ["fork", "register_at_fork", "getegid", "geteuid", "getuid", "O_DIRECTORY", "O_CLOEXEC"]
        del time.clock_gettime, time.clock_gettime_ns, time.CLOCK_MONOTONIC
    for name in NAMES:
        delattr(os, name)
    sys.platform = PLATFORM
"""


def run(program: str, *options: str, fallback: str | None = "1") -> subprocess.CompletedProcess[str]:
    """Run a program that has the tests' forebay, as a file would: warnings are shown where it imports forebay."""
    package = str(Path(forebay.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    environment.pop("FOREBAY_FALLBACK", None)
    if fallback is not None:
        environment["FOREBAY_FALLBACK"] = fallback
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def succeed(program: str, *options: str, fallback: str | None = "1") -> str:
    """Returns what the program writes to standard error."""
    result = run(program, *options, fallback=fallback)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_fallback_is_used_where_it_is_asked_for() -> None:
    succeed("import forebay; assert forebay.native is False", "-W", "ignore")


@pytest.mark.parametrize("asked", ["yes", "true", "2"])
def test_other_values_of_the_variable_are_refused(asked: str) -> None:
    result = run("import forebay", fallback=asked)
    assert result.returncode == 1
    assert f"FOREBAY_FALLBACK is 1 for forebay's pure-Python fallback, or 0, not '{asked}'" in result.stderr


def test_import_warns_once_where_the_program_imports_forebay() -> None:
    shown = succeed("import forebay\nimport forebay.web\nfrom forebay import Store")
    assert shown.count("FallbackWarning") == 1
    assert shown.startswith("<string>:1: FallbackWarning: forebay runs without its compiled core")
    for part in ("every process counts alone", "several workers", "for development", "64-bit Linux"):
        assert part in shown


def test_every_kind_decides() -> None:
    succeed(EVERY_KIND, "-W", "ignore")


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_fallback_needs_nothing_of_linux(platform: str) -> None:
    rest = """
        import forebay.redis, forebay.testing, forebay.web
        from forebay.contrib import outbound

        assert not forebay.native
        assert forebay.Store.private(keys=1).now_ns() >= 0
    """
    parts = [f"PLATFORM = {platform!r}", *map(textwrap.dedent, (ELSEWHERE, EVERY_KIND, rest))]
    succeed("\n".join(parts), "-W", "ignore")


def test_linux_without_the_compiled_core_is_refused(tmp_path: Path) -> None:
    """pip has chosen the wheel for other systems: for a new Python, or an unknown processor."""
    for source in Path(forebay.__file__).parent.rglob("*.py"):
        copy = tmp_path / source.relative_to(Path(forebay.__file__).parents[1])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import forebay; print(forebay.__file__)"
    result = run(program, fallback=None)
    assert result.returncode == 1
    for part in ("ImportError", "no compiled core", "--no-binary forebay forebay", "FOREBAY_FALLBACK=1"):
        assert part in result.stderr
    assert str(tmp_path) in run(program, "-W", "ignore").stdout
    elsewhere = "import sys; sys.platform = 'darwin'; " + program
    assert str(tmp_path) in run(elsewhere, "-W", "ignore", fallback=None).stdout


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        ("forebay.get_include()", "build native code on Linux"),
        ("import forebay.core; forebay.core._C_API", "the C API needs"),
        ("forebay.Store.attach('shop')", "each process has stores of its own"),
        ("import forebay.limits", "memory://"),
        ("import forebay.verification", "forebay verify needs"),
        ("from forebay.tuning import comparison", "forebay tune needs"),
        ("from forebay.redis import *; LeasedStore(RedisStore('redis://localhost'), 1)", "over the RedisStore itself"),
        ("from forebay.redis import *; SyncedStore(RedisStore('redis://localhost'), 1, keys=1)", "over the RedisStore"),
    ],
)
def test_what_needs_shared_memory_is_refused(program: str, remedy: str) -> None:
    result = run(f"import forebay\n{program}", "-W", "ignore")
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("forebay.errors.NeedsCompiledCore: ")
    assert remedy in error


def test_command_line_is_refused() -> None:
    result = run("from forebay.cli import main; main()", "-W", "ignore")
    assert result.returncode == 2
    assert result.stderr.startswith("the forebay command reads shared memory")


def test_several_workers_are_warned() -> None:
    """Also of a store with a name, which processes share where there is a compiled core."""
    shown = succeed(
        """
        import warnings

        from forebay import Store, TokenBucket
        from forebay.web import workers

        workers.worker_count = lambda: 4
        workers.warn_if_each_counts_alone([TokenBucket(Store("shop", keys=10), "api", "5/minute")])
        """,
        "-W",
        "ignore::UserWarning:__main__:2",
    )
    assert "CountsPerWorkerWarning: limiter 'api'" in shown
    assert "together they allow 4 times the limit" in shown
    assert "start one worker, or run it on Linux" in shown


def test_stores_of_one_name_share_their_state_in_one_process() -> None:
    succeed(
        """
        from forebay import Store, TokenBucket

        one, two = Store("shop", keys=10), Store("shop", keys=10)
        assert TokenBucket(one, "api", "1/hour").allow("k")
        assert not TokenBucket(two, "api", "1/hour").allow("k")
        Store.unlink("shop")
        assert TokenBucket(Store("shop", keys=10), "api", "1/hour").allow("k")
        """,
        "-W",
        "ignore",
    )


def test_forked_child_counts_apart_and_takes_no_held_lock() -> None:
    succeed(
        """
        import os, threading

        from forebay import Store, TokenBucket

        store = Store.private(keys=10)
        limiter = TokenBucket(store, "api", "2/hour")
        limiter.allow("k")
        booked = limiter.reserve("other")
        held, done = threading.Event(), threading.Event()

        def hold():
            with store.segment.lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            booked.cancel()
            os._exit(0 if limiter.allow("k") and not limiter.allow("k") and limiter.peek("other").remaining == 1 else 1)
        done.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert limiter.allow("k")
        """,
        "-W",
        "ignore",
    )


def test_decision_within_another_breaks_no_search_for_room() -> None:
    """A callback of the garbage collector or a signal handler may decide while another decision reads all keys."""
    succeed(
        """
        from forebay import Store, TokenBucket
        from forebay.fallback.gcra import Gcra

        store = Store.private(keys=1, on_full="evict")
        limiter = TokenBucket(store, "api", "1/hour")
        within, usual = [], Gcra.expiry_ns

        def decide(self, state):
            if not within:
                within.append(True)
                # Makes room and inserts, while the other one looks for room.
                assert limiter.allow(object_key())
                within.clear()
            return usual(self, state)

        def object_key(numbers=iter(range(10**6))):
            return f"within {next(numbers)}"

        Gcra.expiry_ns = decide
        for number in range(5000):
            assert limiter.allow(number)
            if store.stats().total.evicted > 500:
                break
        else:
            raise AssertionError("nothing was evicted")
        """,
        "-W",
        "ignore",
    )
