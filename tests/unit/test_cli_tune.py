"""The installed command ``forebay tune``."""

from __future__ import annotations

import datetime as dt
import html
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.tuning.candidates import ALGORITHMS

COMMAND = Path(sys.executable).parent / "forebay"
GENERATED = ("--traffic", "poisson", "--requests", "20000", "--users", "50", "--rate", "70/minute")


def run(*arguments: str | Path, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [COMMAND, "tune", *arguments],
        capture_output=True,
        input=stdin,
        env={**os.environ, "COLUMNS": "80", **environment},
        check=False,
    )
    return subprocess.CompletedProcess(result.args, result.returncode, result.stdout.decode(), result.stderr.decode())


def log_lines(count: int, key: str = "192.0.2.1") -> str:
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    times = (start + dt.timedelta(seconds=number) for number in range(count))
    return "".join(f'{key} - - [{time:%d/%b/%Y:%H:%M:%S %z}] "GET / HTTP/1.1" 200 1\n' for time in times)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "access.log"
    path.write_text(log_lines(100) + log_lines(3, "2001:db8::1") + "what is this\n")
    return path


def test_tune_compares_all_algorithms(log: Path) -> None:
    result = run(log, "--limit", "60/minute", "--limit", "30/minute", "--deny-at-most", "50%")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{log}: 103 requests of 2 users" in result.stdout
    assert "from 2026-01-01T00:00:00.000Z to 2026-01-01T00:01:39.000Z" in result.stdout
    assert "1 lines (0.96%) are unreadable and left out: line 104: no address and" in result.stdout
    for algorithm in ALGORITHMS:
        assert len(re.findall(rf"^{algorithm} .*%.* MB", result.stdout, re.MULTILINE)) == 3
    assert "to deny requests to at most 50% of the users: 3 per minute (an exact log hits 1 of 2)" in result.stdout


def test_json_is_stable_and_has_the_figures(log: Path) -> None:
    def parsed() -> dict[str, Any]:
        result = run(log, "--limit", "50/minute", "--json")
        assert (result.returncode, result.stderr) == (0, "")
        document: dict[str, Any] = json.loads(result.stdout)
        assert all(candidate.pop("decision_ns") > 0 for candidate in document["candidates"])
        return document

    document = parsed()
    assert document == parsed()
    assert document["version"] == 1
    assert document["source"] == {
        "name": str(log),
        "format": "combined",
        "lines": 104,
        "unreadable": 1,
        "unreadable_examples": [
            {"line": 104, "why": "no address and [10/Oct/2000:13:55:36 -0700] in 'what is this'"},
        ],
        "warning": None,
        "reordered": 1,
        "late": 0,
        "requests": 103,
        "users": 2,
        "first": "2026-01-01T00:00:00.000Z",
        "last": "2026-01-01T00:01:39.000Z",
    }
    (exact,) = (candidate for candidate in document["candidates"] if candidate["algorithm"] == "sliding-log")
    assert exact.pop("memory_bytes") > 50 * 8
    assert sum(exact.pop("denied_by_bin")) == 10
    assert exact == {
        "algorithm": "sliding-log",
        "limit": 50,
        "period_ns": 60 * 10**9,
        "burst": None,
        "admitted": 93,
        "denied": 10,
        "denied_share": 10 / 103,
        "users_hit": 1,
        "users_hit_share": 0.5,
        "largest": 50,
        "differing": 0,
        "differing_share": 0.0,
        "wrongly_allowed": 0,
        "wrongly_denied": 0,
        "evicted": 0,
        "most_denied": [{"key": "192.0.2.1", "denied": 10}],
    }
    assert document["demand"][0]["points"][0] == {"limit": 1, "users_above": 2}
    assert document["demand"][0]["points"][-1] == {"limit": 60, "users_above": 0}
    assert sum(document["timeline"]["requests"]) == 103


def test_a_log_that_names_the_server_first_is_warned_of(tmp_path: Path) -> None:
    log, report = tmp_path / "access.log", tmp_path / "report.html"
    log.write_text(log_lines(10, "www.example:443 192.0.2.1"))
    result = run(log, "--limit", "5/minute", "--html", report)
    assert (result.returncode, result.stderr) == (0, "")
    warning = "the first line begins with 'www.example:443', which is no address"
    assert f"warning: {warning}" in result.stdout
    assert f"<strong>Warning:</strong> {html.escape(warning)}" in report.read_text()


def test_generated_traffic_is_replayed() -> None:
    result = run(*GENERATED, "--limit", "60/minute", "--json")
    document = json.loads(result.stdout)
    assert document["source"]["name"] == "poisson, 50 users of 70 per minute each, seed 1"
    assert document["source"]["requests"] == 20_000
    assert {candidate["algorithm"] for candidate in document["candidates"] if candidate["denied"]} >= {"sliding-window"}


def test_standard_input_is_read(log: Path) -> None:
    by_path = run(log, "--limit", "50/minute", "--algorithm", "fixed-window").stdout.splitlines()
    piped = run("-", "--limit", "50/minute", "--algorithm", "fixed-window", stdin=log.read_bytes()).stdout.splitlines()
    assert piped[0] == "standard input: 103 requests of 2 users"
    assert piped[1] == by_path[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.log"], "Missing option '--limit'"),
        (["--limit", "5/minute"], "give a LOG or --traffic KIND"),
        (["x.log", "--traffic", "zipf", "--limit", "5/minute"], "give a LOG or --traffic KIND"),
        (["x.log", "--limit", "5 a minute"], "'5 a minute' is not a rate"),
        (["x.log", "--limit", "5/minute", "--deny-at-most", "lots"], "'lots' is no share of the users such as 1%"),
        (["x.log", "--limit", "5/minute", "--deny-at-most", "100%"], "'100%' is no share of the users"),
        (["x.log", "--limit", "5/minute", "--memory", "much"], "'much' is no number of bytes such as 500MB"),
        (["x.log", "--limit", "5/minute", "--algorithm", "luck"], "'luck' is not one of"),
        (["missing.log", "--limit", "5/minute"], "No such file or directory: 'missing.log'"),
        (["/", "--limit", "5/minute"], "Is a directory: '/'"),
        (["/dev/null", "--limit", "5/minute"], "/dev/null: it has no requests"),
        (["--traffic", "zipf", "--requests", "9", "--limit", "5/minute", "--html", "/dev/full"], "No space left"),
        (["--traffic", "zipf", "--requests", "9", "--limit", "5/minute", "--html", "/nowhere/x"], "No such file"),
    ],
)
def test_tune_refuses_with_a_reason(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_text_of_a_log_is_printed_literally(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(log_lines(20) + "\x1b[31m[red]:smile:\n")
    result = run(path, "--limit", "5/minute", "--html", tmp_path / "x.html")
    assert result.returncode == 0
    assert "[red]:smile:" in result.stdout
    assert "\x1b" not in result.stdout


def test_progress_is_shown_on_a_terminal_only(log: Path) -> None:
    main, terminal = pty.openpty()
    result = subprocess.run(
        [COMMAND, "tune", log, "--limit", "50/minute", "--json"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
        check=True,
    )
    os.close(terminal)
    shown = os.read(main, 65536).decode()
    os.close(main)
    assert "replaying" in shown
    json.loads(result.stdout)
