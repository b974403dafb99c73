"""Fixtures of the tests with real processes."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import process_helpers
import pytest


@pytest.fixture
def crew(name: str) -> Iterator[process_helpers.Crew]:
    """Processes that end with the test, before the store is removed that they may be about to create."""
    crew = process_helpers.Crew()
    yield crew
    crew.end()


@pytest.fixture
def name() -> Iterator[str]:
    """A store name that nobody else uses; what was made under it is removed."""
    name = f"process-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    for file in process_helpers.files_of(name):
        Path(file).unlink(missing_ok=True)


@pytest.fixture
def as_root() -> None:
    """For tests of users and mounts."""
    if os.geteuid() != 0:
        pytest.fail("this test changes users or mounts a file system: run it as root, as CI does")


@pytest.fixture
def small_disk(as_root: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", directory], check=True)
    yield directory
    # Lazily: a store that is closed but not collected yet has the segment mapped.
    subprocess.run(["umount", "--lazy", directory], check=True)
