"""``forebay ls``, ``stat``, ``rm`` and ``completion``, and the ways to run the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from process_helpers import Crew, SharedNumbers, path_of, wait_until

from forebay import Concurrency, Store, TokenBucket
from forebay.cli.commands import forebay
from forebay.segment import layout
from forebay.testing import ManualClock

COMMAND = Path(sys.executable).parent / "forebay"


def run(*arguments: str | Path, answer: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(
        forebay, list(map(str, arguments)), input=answer, env={"COLUMNS": "200", **environment}, prog_name="forebay"
    )


def document(*arguments: str | Path) -> Any:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert found["version"] == 1
    return found


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A directory of a store "shop", that no process has attached."""
    with Store("shop", keys=1000, directory=tmp_path) as store:
        bucket = TokenBucket(store, "api", "100/hour")
        assert bucket.hit("key", 100)
        assert not bucket.allow("key")
        assert Concurrency(store, "held", 2, keys=10).hit("job")
    return tmp_path


# ls


def test_ls_lists_the_stores_of_a_directory(used: Path) -> None:
    file = used / "forebay-shop"
    before = file.stat()
    (store,) = [one for one in document("ls", "--directory", used)["stores"] if one["path"] == str(file)]
    assert store["name"] == str(file)
    assert (store["keys"], store["live_keys"], store["limiters"]) == (1000, 1, 2)
    assert (store["clock"], store["mode"], store["layout_version"]) == ("monotonic", "0600", layout.LAYOUT_VERSION)
    assert (store["uid"], store["gid"], store["bytes"]) == (os.geteuid(), before.st_gid, before.st_size)
    assert (store["attached"], store["pids"], store["stale"], store["problem"]) == (0, [], False, "")
    result = run("ls", "--directory", used)
    (row,) = [line for line in result.stdout.splitlines() if str(file) in line]
    assert row.split()[2:6] == ["1", "1,000", "2", "0"]
    assert (before.st_ino, before.st_mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)


@pytest.mark.parametrize(
    "variables",
    [{"COLUMNS": None}, *({"COLUMNS": "20", variable: "1"} for variable in ("LINES", "FORCE_COLOR", "TTY_COMPATIBLE"))],
    ids=str,
)
def test_ls_cuts_nothing_that_a_program_reads(used: Path, variables: dict[str, str | None]) -> None:
    result = CliRunner().invoke(forebay, ["ls", "--directory", str(used)], env=variables)
    assert "\x1b" not in result.stdout
    (row,) = [line for line in result.stdout.splitlines() if str(used / "forebay-shop") in line]
    assert row.split()[-1] == str(layout.LAYOUT_VERSION)


def test_ls_shows_who_has_a_store_attached(name: str) -> None:
    with Store(name, keys=1000):
        (store,) = [one for one in document("ls")["stores"] if one["name"] == name]
        assert (store["attached"], store["pids"]) == (1, [os.getpid()])
    (store,) = [one for one in document("ls")["stores"] if one["name"] == name]
    assert store["attached"] == 0


def test_ls_looks_into_the_users_runtime_directory(used: Path, tmp_path: Path) -> None:
    result = run("ls", "--json", XDG_RUNTIME_DIR=str(used))
    assert str(used / "forebay-shop") in [one["path"] for one in json.loads(result.stdout)["stores"]]
    assert run("ls", XDG_RUNTIME_DIR=str(tmp_path / "none")).exit_code == 0


def test_ls_shows_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "forebay-empty").touch()
    (tmp_path / "forebay-other\x1b[31m:x:").write_bytes(b"another program's" * 1000)
    (tmp_path / "forebay-folder").mkdir()
    (tmp_path / "forebay-link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "forebay-pipe")
    (tmp_path / "else").touch()
    (tmp_path / "forebay-shop.rules-0123abcd.1").touch()  # live rules
    result = run("ls", "--directory", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("being created", "another", "no regular file", "a symbolic link", r"forebay-other\x1b[31m:x:"):
        assert text in result.stdout, text
    assert "\x1b" not in result.stdout
    found = [one for one in document("ls", "--directory", tmp_path)["stores"] if one["path"].startswith(str(tmp_path))]
    assert [bool(one["problem"]) for one in found] == [True] * 5


def test_ls_of_a_missing_directory_is_refused(tmp_path: Path) -> None:
    result = run("ls", "--directory", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such file or directory" in result.stderr
    assert not (tmp_path / "none").exists()


# stat


def test_stat_shows_what_stats_returns(used: Path) -> None:
    found = document("stat", "shop", "--directory", used)
    assert found["path"] == str(used / "forebay-shop")
    with Store("shop", keys=1000, directory=used) as store:
        stats = store.stats()
    assert (found["keys"], found["live_keys"], found["bytes"]) == (stats.keys, stats.live_keys, stats.bytes)
    assert set(found["limiter_counts"]) == set(stats.limiters)
    for name, limiter in stats.limiters.items():
        for field, value in found["limiter_counts"][name].items():
            assert value == getattr(limiter, field), (name, field)
    (memory,) = found["memories"]
    assert (memory["limiter"], memory["algorithm"], memory["keys"]) == ("held", "Concurrency", 10)
    assert (memory["live_keys"], memory["held"]) == (1, 1)


def test_stat_prints_tables(used: Path) -> None:
    result = run("stat", used / "forebay-shop")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.startswith(("api", "held"))}
    assert rows["api"][1:] == ["(TokenBucket)", "1", "1", "1", "0", "0", "0"]
    assert rows["held"][1:5] == ["(Concurrency)", "1", "10", "1"]
    assert "1 of 1,000 keys live" in result.stdout


def test_stat_prints_names_literally(tmp_path: Path) -> None:
    with Store("shop", keys=1000, directory=tmp_path) as store:
        for limiter in (":x:", "[red]red[/red]", "esc\x1b[31m\x07", "line\nfeed"):
            assert TokenBucket(store, limiter, "5/hour").allow("user:42")
    result = run("stat", "shop", "--directory", tmp_path)
    for text in (":x: (", "[red]red[/red] (", r"esc\x1b[31m\x07 (", r"line\nfeed ("):
        assert text in result.stdout
    assert not {char for char in result.stdout if not char.isprintable()} - {"\n"}


@pytest.mark.parametrize("command", ["stat", "rm", "doctor", "show", "reset", "unban"])
def test_missing_store_is_refused_and_not_made(name: str, command: str) -> None:
    more = ["--yes"] if command == "rm" else ["key"] if command in ("show", "reset", "unban") else []
    result = run(command, name, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{path_of(name)}: found no such file, expected a segment")
    assert not Path(path_of(name)).exists()


def test_wrong_names_are_refused(used: Path) -> None:
    for arguments in (["stat", "a b"], ["stat", ""], ["stat", "/a/b", "--directory", used], ["stat", "\0/"]):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert "Traceback" not in result.stderr


# rm


def test_rm_asks_and_removes(used: Path) -> None:
    file = used / "forebay-shop"
    result = run("rm", "shop", "--directory", used, answer="n\n")
    assert result.exit_code == 1
    assert file.exists()
    assert run("rm", "shop", "--directory", used, answer="").exit_code == 1
    assert file.exists()
    result = run("rm", "shop", "--directory", used, answer="y\n")
    assert (result.exit_code, f"removed {file}" in result.stdout) == (0, True)
    assert not file.exists()


def test_rm_refuses_a_store_in_use(used: Path) -> None:
    file = used / "forebay-shop"
    with Store("shop", keys=1000, directory=used):
        result = run("rm", file, "--yes")
        assert result.exit_code == 1
        assert f"in use by 1 process ({os.getpid()})" in result.stderr
        assert file.exists()
        found = run("rm", file, "--yes", "--json")
        assert json.loads(found.stdout) | {"path": ""} == {
            "version": 1,
            "path": "",
            "removed": False,
            "attached": 1,
            "pids": [os.getpid()],
        }
        assert run("rm", file, "--force", answer="n\n").exit_code == 1
        assert file.exists()
        assert run("rm", file, "--force", "--yes").exit_code == 0
        assert not file.exists()


def _attach_and_stay(name: str, ready: SharedNumbers) -> None:
    with Store(name, keys=1000):
        os.closerange(3, 1000)  # as a daemon does; the mapping stays
        ready[0] = 1
        wait_until(lambda: ready[0] == 2, "the end")


def test_rm_sees_a_daemon_that_closed_its_files(crew: Crew, name: str) -> None:
    ready = SharedNumbers(1)
    daemon = crew.start(_attach_and_stay, name, ready)
    wait_until(lambda: ready[0], "the daemon")
    result = run("rm", name, "--yes")
    assert (result.exit_code, f"({daemon.pid})" in result.stderr) == (1, True), result.output
    assert Path(path_of(name)).exists()
    daemon.kill()
    assert run("rm", name, "--yes").exit_code == 0


def test_rm_leaves_files_of_other_programs(tmp_path: Path) -> None:
    for file in (tmp_path / "forebay-shop", tmp_path / "notes.txt"):
        file.write_text("a file of another program" * 1000)
        result = run("rm", file, "--yes")
        assert result.exit_code == 2
        assert "nothing was removed" in result.stderr
        assert file.exists()


# The command itself


def test_every_command_has_help_and_json() -> None:
    for name, command in forebay.commands.items():
        result = run(name, "--help")
        assert result.exit_code == 0
        if name not in ("bench", "completion", "rules", "serve", "verify"):
            assert "--json" in [option for parameter in command.params for option in parameter.opts], name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    result = run("completion", shell)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "_FOREBAY_COMPLETE" in result.stdout


def test_shell_completes_commands_and_stores(name: str) -> None:
    environment = {**os.environ, "_FOREBAY_COMPLETE": "bash_complete"}
    words = {"forebay st": "stat", f"forebay stat {name[:-1]}": name}
    with Store(name, keys=1000):
        for line, wanted in words.items():
            done = subprocess.run(
                [COMMAND],
                capture_output=True,
                text=True,
                check=False,
                env={**environment, "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)},
            )
            assert f"plain,{wanted}" in done.stdout.splitlines(), done


def test_shell_completes_no_text_that_it_would_run(tmp_path: Path) -> None:
    for name in ("a$(touch made)", "a;touch made", "a b", "a\nplain,c", "a*", "\x1b[31m"):
        (tmp_path / f"forebay-{name}").touch()
    words = {"COMP_WORDS": f"forebay stat {tmp_path}/", "COMP_CWORD": "2", "XDG_RUNTIME_DIR": str(tmp_path)}
    environment = {**os.environ, **words, "_FOREBAY_COMPLETE": "bash_complete"}
    (tmp_path / "forebay-shop").touch()
    done = subprocess.run([COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"plain,{tmp_path}/forebay-shop\n"


@pytest.mark.parametrize("arguments", [["stat"], ["show", "key"]])
def test_names_are_printed_in_every_encoding(tmp_path: Path, arguments: list[str]) -> None:
    with Store("shop", keys=1000, directory=tmp_path) as store:
        TokenBucket(store, "日本 \x1b[2J", "5/hour").allow("key")
    command, *key = arguments
    result = subprocess.run(
        [COMMAND, command, tmp_path / "forebay-shop", *key],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert rb"\u65e5\u672c \x1b[2J" in result.stdout


@pytest.mark.parametrize("command", ["ls --json", "metrics shop", "top shop"])
def test_a_closed_output_is_a_refusal(command: str) -> None:
    result = subprocess.run(["sh", "-c", f'"{COMMAND}" {command} >&-'], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "standard output is closed\n")


def test_rm_without_an_input_removes_nothing(used: Path) -> None:
    file = used / "forebay-shop"
    result = subprocess.run(["sh", "-c", f'"{COMMAND}" rm "{file}" <&-'], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert file.exists()


def test_module_runs_as_the_command(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "forebay", "stat", name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found no such file" in done.stderr
    shown = subprocess.run([sys.executable, "-m", "forebay", "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Usage: forebay ")


def test_output_that_takes_nothing_is_a_refusal(used: Path) -> None:
    with open("/dev/full", "w") as full:
        for arguments in (["ls", "--directory", str(used)], ["stat", str(used / "forebay-shop"), "--json"]):
            done = subprocess.run([COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 2
            assert "Traceback" not in done.stderr


def test_clock_of_a_test_is_shown(name: str) -> None:
    with Store(name, keys=1000, clock=ManualClock(5)):
        assert document("stat", name)["clock"] == "manual"
