"""The installed command ``forebay verify``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_helpers import path_of

from forebay import SlidingLog, Store, TokenBucket
from forebay.segment import layout

COMMAND = Path(sys.executable).parent / "forebay"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100", **environment}
    )


@pytest.fixture
def used(name: str) -> str:
    with Store(name, keys=1000) as store:
        assert TokenBucket(store, "api", "100/hour").allow("user:42")
        assert SlidingLog(store, "[export]", "5/hour", keys=3).allow("user:42")
    return name


def test_verify_reports_a_sound_segment(used: str) -> None:
    result = run("verify", used)
    assert (result.returncode, result.stderr) == (0, "")
    assert "sound (2 limiters)" in result.stdout
    assert path_of(used) in result.stdout
    assert "[export]" in result.stdout
    assert "SlidingLog" in result.stdout


def test_verify_accepts_a_path(used: str) -> None:
    assert run("verify", path_of(used)).returncode == 0


def test_verify_prints_json(used: str) -> None:
    file = Path(path_of(used))
    result = run("verify", file.name.removeprefix("forebay-"), "--directory", str(file.parent), "--json")
    found = json.loads(result.stdout)
    assert (result.returncode, found["version"], found["sound"], found["findings"]) == (0, 1, True, [])
    assert (found["path"], len(found["parts"])) == (str(file), 2)


def test_verify_reports_damage(used: str) -> None:
    with open(path_of(used), "r+b") as file:
        file.seek(layout.TABLE_OFFSET)
        file.write(b"\x05" * layout.CELL.size * 200)
    result = run("verify", used)
    assert result.returncode == 1
    assert "damage: cell 0 of the table: found kind 5" in result.stdout
    assert "... and 150 more" in result.stdout
    assert "damaged: 200 findings (2 limiters)" in result.stdout


def test_verify_prints_notes_and_exits_with_0(used: str) -> None:
    size = os.stat(path_of(used)).st_size
    os.truncate(path_of(used), size + 8192)
    result = run("verify", used)
    assert result.returncode == 0
    assert "note: the file: found 8192 bytes behind extent 0, limiter '[export]' that are in no list" in result.stdout
    assert "sound (2 limiters)" in result.stdout


def test_verify_prints_names_literally(name: str, tmp_path: Path) -> None:
    """Names are printed without emoji, markup or control characters."""
    path = tmp_path / ":x:[red]"
    with Store(name, keys=1000, path=path) as store:
        for limiter in (":x:", "[red]red[/red]", "esc\x1b[31m\x07", "line\nfeed", "\u202eright"):
            assert SlidingLog(store, limiter, "5/hour", keys=3).allow("user:42")
    size = os.stat(path).st_size
    os.truncate(path, size + 8192)
    result = run("verify", str(path), COLUMNS="200")
    assert (result.returncode, result.stderr) == (0, "")
    for text in (f"{path}: ", " :x: ", "[red]red[/red]", r"esc\x1b[31m\x07", r"line\nfeed", r"\u202eright"):
        assert text in result.stdout
    assert not {char for char in result.stdout if not char.isprintable()} - {"\n"}
    missing = run("verify", f"{path}:x:\x1b")
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"{path}:x:\\x1b: found no such file")


def test_verify_refuses_a_missing_segment(name: str) -> None:
    result = run("verify", name)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"{path_of(name)}: found no such file, expected a segment")
    assert len(result.stderr.splitlines()) == 1
    assert not Path(path_of(name)).exists()


@pytest.mark.parametrize(
    "arguments", [["verify"], ["verify", "/a", "--directory", "b"], ["verify", "a b"], ["nothing"]]
)
def test_verify_refuses_wrong_arguments(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_help_names_the_commands() -> None:
    assert "verify" in run("--help").stdout
    assert "Exits with 0 if the segment is sound" in " ".join(run("verify", "--help").stdout.split())


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_command_without_its_extra_prints_how_to_install_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from forebay.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", program, "verify", "x"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == 'the forebay command needs more packages: pip install "forebay[cli]"\n'


def test_verify_reports_system_errors_as_refusals(used: str) -> None:
    """An error of the operating system exits with 2; damage exits with 1."""
    result = run("verify", "/proc/self/mem")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "verify", used], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
