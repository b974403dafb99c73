"""The installed command ``forebay bench``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.benchmarking.limiters import ALLOWING, DENYING

COMMAND = Path(sys.executable).parent / "forebay"
QUICK = ("--quick", "--keys", "1000")
CORES = min(len(os.sched_getaffinity(0)), 64)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([COMMAND, "bench", *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the files of one run."""
    folder = tmp_path_factory.mktemp("bench")
    result = run(*QUICK, "--json", folder / "run.json", "--html", folder / "run.html")
    assert (result.returncode, result.stderr) == (0, "")
    (folder / "printed").write_text(result.stdout)
    return folder


@pytest.fixture
def document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return document


def figures(document: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in document["figures"] if one["group"] == group}


def test_json_has_every_algorithm_with_all_passes(document: dict[str, Any]) -> None:
    assert (document["version"], document["kind"], document["keys"], document["is_quick"]) == (
        *(1, "forebay bench"),
        *(1000, True),
    )
    measured = figures(document, "limiters, one hot key")
    for name in ALLOWING:
        assert {f"{name}: allow", f"{name}: hit"} <= measured.keys()
    for name in DENYING:
        assert f"{name}: allow, denied" in measured
    assert document["left_out"] == []
    assert {len(one["passes_ns"]) for one in document["figures"]} == {3}
    assert all(value > 0 for one in document["figures"] for value in one["passes_ns"])
    assert set(figures(document, "floors")) == {"one turn of an empty loop", "time.monotonic_ns()"}


def test_json_has_the_machine(document: dict[str, Any]) -> None:
    machine = document["machine"]
    assert machine["kernel"].startswith(f"Linux {os.uname().release}")
    assert sys.version.split()[0].rstrip("+") in machine["Python"]
    assert {"processor", "clock source", "GIL", "huge pages in shared memory, setting"} <= machine.keys()
    assert machine["stores in huge pages"].endswith("%")


def test_workers_decide_on_up_to_every_core(document: dict[str, Any]) -> None:
    measured = figures(document, "processes at the same time")
    for task in ("100 own keys each", "one denied key", "one allowed key"):
        assert measured[f"{task}: {CORES}"]["workers"] == CORES
        assert f"{task}: 1" in measured
    with_threads = bool(figures(document, "threads at the same time"))
    assert with_threads is (document["machine"]["GIL"] == "off")


def test_a_crowded_store_evicts_and_the_advice_says_so(document: dict[str, Any], folder: Path) -> None:
    assert 0 < document["crowded_evictions"] < 1
    (advice,) = (text for text in document["advice"] if "Give keys= at least" in text)
    assert advice in (folder / "printed").read_text()


def test_report_loads_nothing(folder: Path, document: dict[str, Any]) -> None:
    page = (folder / "run.html").read_text()
    assert page.count("<svg") >= 2
    assert "http" not in page
    assert "sliding log, limit 10: allow" in page
    assert document["machine"]["kernel"] in page


def test_a_run_does_not_differ_from_itself(folder: Path) -> None:
    result = run("--compare", folder / "run.json", folder / "run.json")
    assert (result.returncode, result.stderr) == (0, "")
    assert "0 slower, 0 faster" in result.stdout
    assert "differs" not in result.stdout


def changed(document: dict[str, Any], path: Path, factor: float, noise: float = 0.0) -> tuple[Path, Path]:
    """The document with one quiet figure, and the same with that figure times `factor`."""
    for name, scale in (("a", 1.0), ("b", factor)):
        one = document["figures"][2]
        one["passes_ns"] = [100 * scale * (1 + noise * share) for share in (-0.5, 0, 0.5)]
        (path / name).write_text(json.dumps(document))
    return path / "a", path / "b"


def test_compare_exits_with_1_if_a_figure_is_slower(document: dict[str, Any], tmp_path: Path) -> None:
    before, after = changed(document, tmp_path, 1.3, noise=0.1)
    result = run("--compare", before, after)
    assert result.returncode == 1
    assert "1 slower, 0 faster" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.endswith("slower"))
    assert line.startswith("token bucket: allow ")
    assert "+30.0%" in line
    result = run("--compare", after, before)
    assert result.returncode == 0
    assert "0 slower, 1 faster" in result.stdout


def test_a_difference_within_the_noise_of_both_is_none(document: dict[str, Any], tmp_path: Path) -> None:
    result = run("--compare", *changed(document, tmp_path, 1.3, noise=0.2))
    assert result.returncode == 0
    assert "0 slower, 0 faster" in result.stdout


def test_compare_names_what_differs(document: dict[str, Any], tmp_path: Path) -> None:
    before, after = changed(document, tmp_path, 1.0)
    document["machine"]["kernel"] = "Linux [red] \x1b[31m"
    document["figures"][2]["name"] = "another"
    after.write_text(json.dumps(document))
    result = run("--compare", before, after)
    assert "then Linux [red] \\x1b[31m" in result.stdout
    assert "only in one run: limiters, one hot key: token bucket: allow" in result.stdout
    assert "only in one run: limiters, one hot key: another" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keys", "9"], "9 is not in the range 10<=x<=10000000"),
        (["--redis", "nonsense"], "not with 'nonsense'"),
        (["--redis", "redis+cluster://127.0.0.1:1"], "one Redis server, not a cluster"),
        (["--redis", "redis://127.0.0.1:1"], "no Redis that answers at the URL of --redis"),
        (["--json", "/nowhere/x"], "/nowhere/x can't be written"),
        (["--html", "/"], "'/' is a directory"),
        (["--compare", "a"], "requires 2 arguments"),
        (["--compare", "/nowhere/x", "/nowhere/x"], "No such file or directory: '/nowhere/x'"),
        (["--compare", "/dev/null", "/dev/null"], "/dev/null is not what `forebay bench --json` writes"),
        (["--compare", "a", "b", "--quick"], "--compare measures nothing, so it takes no other option"),
    ],
)
def test_bench_refuses_with_a_reason(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"kind": "x"}, {"figures": [{}]}, {"figures": 5}, {"keys": None}, {"machine": []}],
    ids=str,
)
def test_compare_refuses_another_document(change: dict[str, Any], document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other").write_text(json.dumps({**document, **change}))
    result = run("--compare", tmp_path / "other", tmp_path / "other")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{tmp_path}/other is " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_bench_refuses_stores_that_do_not_fit() -> None:
    result = subprocess.run(
        ["bash", "-c", f"ulimit -f 5000; exec {COMMAND} bench --quick --keys 1000000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "expected 21" in result.stderr
    assert "ask for fewer keys" in result.stderr


def ignores_interrupts(pid: str) -> bool:
    ignored = re.search(r"\nSigIgn:\t(\w+)", status(int(pid)))
    return ignored is not None and bool(int(ignored[1], 16) & 1 << signal.SIGINT - 1)


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A run, and its workers, which have begun."""
    process = subprocess.Popen(
        [COMMAND, "bench", "--quick"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while len(workers := children.read_text().split()) < CORES or not all(map(ignores_interrupts, workers)):
            assert process.poll() is None
            time.sleep(0.01)
        yield process, [int(worker) for worker in workers]
    finally:
        process.kill()
        process.communicate()


def wait_for_the_end_of(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in status(pid) for pid in pids):
        time.sleep(0.01)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ"


def test_an_interrupt_ends_the_run_and_its_workers() -> None:
    with running() as (process, workers):
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (130, b"", b"")
        wait_for_the_end_of(workers)


def test_workers_end_after_their_parent_was_killed() -> None:
    with running() as (process, workers):
        process.kill()
        process.wait()
        wait_for_the_end_of(workers)
