"""Fixtures of the tests with real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


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
