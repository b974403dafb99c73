"""Runs the `limits` library's own tests on the forebay storage: a pytest plugin for ``ci/limits``.

The plugin replaces the library's memory storage by a forebay storage with an empty store for each test, as the tests
flush Redis. Tests that need a server are deselected and listed. A skipped test, or a rerun of a flaky one, fails the
run.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import limits.aio.storage
import limits.storage
import pytest
from pytest_lazy_fixtures import lf

from forebay import Store
from forebay.limits import AsyncForebayStorage, ForebayStorage

NAME: Final = f"limits-tests-{os.getpid()}"
URIS: Final = {"memory://": f"forebay:///{NAME}", "async+memory://": f"async+forebay:///{NAME}"}
STORAGES: Final[dict[Any, type]] = {
    limits.storage.MemoryStorage: ForebayStorage,
    limits.aio.storage.MemoryStorage: AsyncForebayStorage,
}
SERVERS: Final = (
    *("redis", "redis_sentinel", "redis_cluster", "memcached", "mongodb"),
    *("valkey", "valkey_cluster"),
)
# A million entries take 8 MB per key.
FEW_KEYS: Final = {"test_moving_window_huge_cost": {"moving_window_keys": 2}}
LONGEST_SLEEP_S: Final = 4

DESELECTED = pytest.StashKey[dict[str, list[str]]]()
ON_FOREBAY = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("flaky: not here", "benchmark: not here"):
        config.addinivalue_line("markers", marker)
    # The tests leave storages open, and the next test removes their segment.
    config.addinivalue_line("filterwarnings", "ignore::forebay.errors.SegmentRemovedWarning")
    config.stash[DESELECTED] = cast(dict[str, list[str]], defaultdict(list))
    config.stash[ON_FOREBAY] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize = metafunc.parametrize

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return URIS.get(value, value)
        return STORAGES.get(value, value) if isinstance(value, type) else value

    def on_forebay(names: Any, values: Any, **options: Any) -> None:
        sets = []
        for given in values:
            if isinstance(getattr(given, "values", None), tuple) and given.values[0] in URIS:
                given_values = [replaced(value) for value in given.values]
                given_values[1] = FEW_KEYS.get(metafunc.function.__name__, {})
                given_values[-1] = lf("empty_store")
                given = pytest.param(*given_values, marks=given.marks, id="forebay")
            sets.append(given)
        parametrize(names, sets, **options)

    metafunc.parametrize = on_forebay  # type: ignore[assignment]


@pytest.fixture
def empty_store() -> Iterator[None]:
    Store.unlink(NAME, missing_ok=True)
    yield
    Store.unlink(NAME, missing_ok=True)


@pytest.fixture(autouse=True)
def start_early_in_the_minute() -> None:
    """Some tests sleep for seconds between requests and expect one window; windows end with each clock minute."""
    left_s = 60 - time.time() % 60
    if left_s < LONGEST_SLEEP_S:
        time.sleep(left_s)


@pytest.fixture(autouse=True)
def memory_storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the class in the tests of the memory storage, which construct it directly."""
    if Path(request.path).name == "test_memory.py":
        request.getfixturevalue("empty_store")
        kind = STORAGES[request.module.MemoryStorage]
        uri = URIS["async+memory://" if kind is AsyncForebayStorage else "memory://"]
        monkeypatch.setattr(request.module, "MemoryStorage", lambda: kind(uri))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name == "benchmarks":
        config.stash[DESELECTED]["tests/benchmarks: benchmarks that need servers"] = []
        return True
    return None


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        servers = [name for name in SERVERS if item.get_closest_marker(name)]
        (deselected if servers else kept).append(item)
        test, _, parameters = item.nodeid.partition("[")
        if servers:
            config.stash[DESELECTED][f"{test} needs a server, with"].append(parameters.removesuffix("]"))
        elif "forebay" in parameters or item.path.name == "test_memory.py":
            part = "/".join(item.path.parts[item.path.parts.index("tests") + 1 :])
            config.stash[ON_FOREBAY][part] = config.stash[ON_FOREBAY].get(part, 0) + 1
        elif parameters_of(item).get("uri") in URIS:
            raise pytest.UsageError(f"{item.nodeid} would run on the memory storage")
    config.hook.pytest_deselected(items=deselected)
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    not_passed = [len(reporter.stats.get(outcome, ())) for outcome in ("skipped", "xfailed", "xpassed", "rerun")]
    if session.exitstatus == 0 and (any(not_passed) or not session.config.stash[ON_FOREBAY]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("deselected")
    for reason, parameters in config.stash[DESELECTED].items():
        terminalreporter.line(f"{reason} {', '.join(parameters)}".rstrip())
    counts = config.stash[ON_FOREBAY]
    terminalreporter.section(f"limits {version('limits')} on forebay: {sum(counts.values())} tests")
    for part, count in counts.items():
        terminalreporter.line(f"{part}: {count}")
