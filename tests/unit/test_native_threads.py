"""The C headers by which threads count without the GIL, compiled without the extension: one step of them at a time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from process_helpers import DEADLINE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("native") / "native_threads"
    subprocess.run(
        [
            os.environ.get("CC", "cc"), "-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
            "-pthread", f"-I{ROOT / 'native' / 'include'}", "-o", str(program),
            str(Path(__file__).with_name("native_threads.c")),
        ],
        check=True,
    )  # fmt: skip
    return program


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("barrier", [[], ["fences"]], ids=["membarrier", "without membarrier"])
def test_a_closed_lines_next_owner_loses_no_count(program: Path, barrier: list[str]) -> None:
    run(program, "close", *barrier)


def test_threads_lose_no_count_in_a_shared_line(program: Path) -> None:
    run(program, "shared")


def test_a_close_waits_for_a_thread_that_is_stopped_while_it_counts(program: Path) -> None:
    run(program, "wait")


def test_a_slot_has_one_owner_and_each_owner_a_generation(program: Path) -> None:
    run(program, "slots")


def test_the_child_of_a_fork_has_one_slot_and_waits_for_no_thread_of_its_parent(program: Path) -> None:
    run(program, "fork")
