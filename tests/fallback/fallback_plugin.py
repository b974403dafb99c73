"""Runs the tests on the pure-Python fallback: a pytest plugin for ``ci/fallback``.

What can't hold without the compiled core is named here, each with its reason, and listed at the end of a run. A pattern
that matches no test fails the run, and so does a skipped test. Everything else runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

import forebay

# By reason: files, not even imported, and patterns of tests' ids.
FILES: Final = {
    "the C API, which only the compiled core has": (
        *("unit/test_c_api.py", "unit/test_c_api_all.py", "unit/test_c_api_leases.py", "unit/test_native_headers.py"),
        *("unit/test_native_threads.py", "unit/test_stopped_threads.py"),
    ),
    "forebay tune, which runs the compiled core": (
        *("unit/test_cli_tune.py", "unit/test_tune_json.py", "unit/test_tune_readers.py", "unit/test_tune_replay.py"),
    ),
    "segments: their files, bytes and checks": (
        *("unit/test_cli_verify.py", "unit/test_counter_lines.py", "unit/test_free_space.py", "unit/test_removal.py"),
        *("unit/test_layout_generator.py", "unit/test_process_identity.py", "unit/test_verification.py"),
        "unit/test_store_objects.py",
    ),
    "the compiled modules' machine code and threads": (
        *("unit/test_compiled_modules.py", "unit/test_threads.py", "unit/test_threads_model.py"),
    ),
    "the fallback beside the compiled core": ("unit/test_fallback.py", "property/test_fallback_agrees.py"),
}
TESTS: Final[dict[str, tuple[str, ...]]] = {
    "leased and synced limits need a host's shared memory": ("*[[]leased*", "*[[]synced*"),
}
TESTS_FOLDER: Final = Path(__file__).resolve().parents[1]

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    if forebay.native:
        raise pytest.UsageError("these tests are for the fallback: set FOREBAY_FALLBACK=1")
    config.stash[LEFT_OUT] = {}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    try:
        name = collection_path.resolve().relative_to(TESTS_FOLDER).as_posix()
    except ValueError:
        return None
    for reason, names in FILES.items():
        if name in names:
            config.stash[LEFT_OUT][f"{name}: {reason}"] = 0
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        found = next(matching(item.nodeid), None)
        if found is None:
            kept.append(item)
            continue
        left_out.append(item)
        config.stash[LEFT_OUT][found] = config.stash[LEFT_OUT].get(found, 0) + 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    unused = [entry for entry in entries() if entry not in config.stash[LEFT_OUT]]
    if unused and not config.option.keyword and not config.getoption("file_or_dir_given", None):
        config.stash[UNUSED] = unused


UNUSED = pytest.StashKey[list[str]]()


def entries() -> Iterable[str]:
    yield from (f"{name}: {reason}" for reason, names in FILES.items() for name in names)
    yield from (f"{pattern}: {reason}" for reason, patterns in TESTS.items() for pattern in patterns)


def matching(node_id: str) -> Iterable[str]:
    """The entries that leave a test out."""
    for reason, patterns in TESTS.items():
        for pattern in patterns:
            if fnmatchcase(node_id.removeprefix("tests/"), pattern):
                yield f"{pattern}: {reason}"
