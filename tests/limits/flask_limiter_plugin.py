"""Runs Flask-Limiter's own tests on the forebay storage: a pytest plugin for ``ci/limits``.

The plugin replaces each storage of those tests, in memory or on a server, by a forebay storage over a new store. The
store's clock follows Python's, because the tests move that clock. Inapplicable tests are deselected and listed with a
reason. A skipped test fails the run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import Mock

import flask_limiter._extension
import limits.storage
import pytest

import forebay.limits
from forebay import Store

STORAGES: Final = ("memory://", "redis://localhost:46379", "memcached://localhost:31211", "mongodb://localhost:47017")
REDIS_OUTAGE: Final = "makes the Redis client fail, then flushes the server through it"
INAPPLICABLE: Final = {
    "test_error_handling.py::test_fallback_to_memory": REDIS_OUTAGE,
    "test_error_handling.py::test_fallback_to_memory_backoff_check": REDIS_OUTAGE,
    "test_error_handling.py::test_fallback_to_memory_with_global_override": REDIS_OUTAGE,
    "test_flask_ext.py::test_reset_unsupported": "expects that memcached cannot be reset; the forebay storage can",
    "test_views.py::test_flask_restx_resource": "is marked by Flask-Limiter as an expected failure on any storage",
}

DESELECTED = pytest.StashKey[dict[str, str]]()
ON_FOREBAY = pytest.StashKey[list[str]]()
numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = {}
    config.stash[ON_FOREBAY] = []
    # Some tests search for text in one line of a table.
    os.environ["COLUMNS"] = "200"
    # Some tests use or patch the class. The extension imports the library's own as its fallback.
    limits.storage.MemoryStorage = forebay.limits.ForebayStorage  # type: ignore[misc, assignment]


@pytest.fixture(autouse=True)
def storages_of_forebay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names: list[str] = []

    def opened(uri: str, **options: Any) -> Any:
        if uri not in STORAGES:
            return limits.storage.storage_from_string(uri, **options)
        names.append(f"flask-limiter-tests-{os.getpid()}-{next(numbers)}")
        uri = f"forebay:///{names[-1]}?keys=1000&moving_window_keys=10&clock=time"
        return limits.storage.storage_from_string(uri, **options)

    monkeypatch.setattr(flask_limiter._extension, "storage_from_string", opened)
    yield
    for name in names:
        Store.unlink(name)
    if names:
        request.config.stash[ON_FOREBAY].append(request.node.nodeid)


@pytest.fixture
def docker_services(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replaces the fixture that starts servers and connects to them; no test here sends them a request."""
    for client in ("redis.from_url", "pymemcache.Client", "pymongo.MongoClient"):
        monkeypatch.setattr(client, Mock())
    return Mock()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselected = config.stash[DESELECTED]
    kept = []
    for item in items:
        test = f"{item.path.name}::{item.name}"
        if test in INAPPLICABLE:
            deselected[test] = INAPPLICABLE[test]
        else:
            kept.append(item)
    if unknown := INAPPLICABLE.keys() - deselected.keys():
        raise pytest.UsageError(f"there is no test {', '.join(sorted(unknown))}")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    not_passed = [len(reporter.stats.get(outcome, ())) for outcome in ("skipped", "xfailed", "xpassed", "rerun")]
    if session.exitstatus == 0 and (any(not_passed) or not session.config.stash[ON_FOREBAY]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("deselected")
    for test, reason in config.stash[DESELECTED].items():
        terminalreporter.line(f"{test}: {reason}")
    count = len(config.stash[ON_FOREBAY])
    terminalreporter.section(f"Flask-Limiter {version('flask-limiter')} on forebay: {count} tests")
