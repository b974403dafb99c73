"""``forebay top``: its table, its lines of JSON, and the live view in a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest
from click.testing import CliRunner, Result
from process_helpers import DEADLINE_S

from forebay import Concurrency, FixedWindow, Store, TokenBucket
from forebay.cli.commands import forebay
from forebay.cli.rates import Row, Watch
from forebay.cli.table import ORDERS, ordered, sparkline
from forebay.metrics.readings import COUNTERS, Memory

COMMAND = str(Path(sys.executable).parent / "forebay")
LEAVES_THE_OTHER_SCREEN = b"\x1b[?1049l"
SHOWS_THE_CURSOR = b"\x1b[?25h"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(forebay, ["top", *arguments], prog_name="forebay", env={"COLUMNS": "80"})


@pytest.fixture
def used(store_name: str) -> Iterator[Store]:
    """A store in which a thread decides all the time."""
    with Store(store_name, keys=1000) as store:
        bucket, window = TokenBucket(store, "api", "1000000/second"), FixedWindow(store, "login \x1b[31m日本", "5/year")
        lease = Concurrency(store, "held", 4, lease="1 hour", keys=10).acquire("job")
        assert lease
        TokenBucket(store, "idle", "5/hour")
        ended = threading.Event()

        def decide() -> None:
            while not ended.wait(0.001):
                bucket.allow("key")
                window.allow("key")

        thread = threading.Thread(target=decide)
        thread.start()
        yield store
        ended.set()
        thread.join()


# Once, and lines


def test_once_prints_rates_of_an_interval(used: Store) -> None:
    result = run(used.name, "--once", "--interval", "0.2")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{used.name}: ")
    assert "of 1,000 keys live" in lines[0]
    assert "1 process" in lines[0]
    assert "/s denied" in lines[1]
    rows = {line.split(" (")[0]: line.split(")")[1].split() for line in lines[3:]}
    assert rows.keys() == {"api", r"login \x1b[31m日本", "held", "idle"}
    assert float(rows["api"][0].replace(",", "")) > 0
    assert rows["held"][-2:] == ["10%", "1"]
    assert not {char for char in result.stdout if not char.isprintable()} - {"\n"}


def test_once_filters_and_sorts(used: Store) -> None:
    result = run(used.name, "--once", "--interval", "0.1", "--filter", "LOGIN", "--sort", "share")
    (row,) = result.stdout.splitlines()[3:]
    assert row.startswith("login")
    assert row.split()[-1].endswith("%")
    assert "*denied" in result.stdout


def test_json_has_an_object_in_a_line(used: Store) -> None:
    result = run(used.name, "--once", "--json", "--interval", "0.1")
    found = json.loads(result.stdout)
    assert (found["version"], found["store"], found["keys"], found["removed"]) == (1, used.name, 1000, False)
    assert found["processes"] == 1
    limiters = {one["name"]: one for one in found["limiters"]}
    assert limiters["api"]["per_second"]["allowed"] > 0
    assert limiters["api"]["per_second"]["denied"] == limiters["api"]["counts"]["denied"] == 0
    assert limiters["login \x1b[31m日本"]["per_second"]["denied"] > 0
    memory = limiters["held"]["memory"]
    assert (memory["live_keys"], memory["keys"], memory["held"]) == (1, 10, 1)
    assert limiters["api"]["memory"] is None


@pytest.mark.parametrize("ending", ["SIGINT", "a reader that ends"])
def test_lines_go_on_until_they_are_ended(used: Store, ending: str) -> None:
    program = [COMMAND, "top", used.name, "--json", "--interval", "0.02"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert second["time"] > first["time"]
        if ending == "SIGINT":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("interval", ["0", "-1", "0.019", "nan", "inf", "1e10", "1e300"])
def test_intervals_that_cannot_be_are_refused(store_name: str, interval: str) -> None:
    result = run(store_name, "--once", "--interval", interval)
    assert result.exit_code == 2
    assert "an interval is 0.02 s or more" in result.stderr


def test_what_is_no_terminal_is_refused(used: Store) -> None:
    result = run(used.name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give --once or --json" in result.stderr


def test_an_input_that_is_no_terminal_is_refused(used: Store) -> None:
    # No key would end the view, and the end of the input would keep it busy.
    master, terminal = pty.openpty()
    try:
        result = subprocess.run(
            [COMMAND, "top", used.name],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_S,
            text=True,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(master)
    assert result.returncode == 2
    assert "standard input is no terminal: give --once or --json" in result.stderr


def test_a_missing_store_is_refused_and_not_made(store_name: str) -> None:
    result = run(store_name, "--once")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no such file" in result.stderr
    assert not Path(f"/dev/shm/forebay-{store_name}").exists()


# Rows


def row(name: str, memory: Memory | None = None, **rates: float) -> Row:
    return Row(name, "TokenBucket", {}, {**dict.fromkeys(COUNTERS, 0.0), **rates}, memory)


def test_every_column_sorts() -> None:
    memory = Memory("m", "Concurrency", 10, 5, 3, 100)
    rows = [
        row("allowed", allowed=100.0),
        row("denied", denied=90.0, allowed=1.0, evicted=1.0),
        row("share", denied=1.0),
        row("full", full=1.0),
        row("retries", cas_retries=1.0),
        row("memory", memory=memory),
    ]
    first = {order: ordered(rows, order, "")[0].name for order in ORDERS}
    assert first == {
        "decided": "allowed",
        "denied": "denied",
        "share": "share",
        "evicted": "denied",
        "full": "full",
        "retries": "retries",
        "occupancy": "memory",
        "held": "memory",
    }
    assert [one.name for one in ordered(rows, "decided", "A")] == ["allowed", "share"]
    assert ordered(rows, "decided", "", is_reversed=True)[-1].name == "allowed"


def test_sparkline_shows_each_decision() -> None:
    assert sparkline([0, 1, 1000, 500], is_plain=False) == " ▁█▄"
    assert sparkline([0, 1, 8], is_plain=True) == " .#"
    assert sparkline([], is_plain=False) == sparkline([0.0], is_plain=False).strip() == ""


def test_watch_says_that_a_store_was_replaced_by_what_it_cannot_read(tmp_path: Path) -> None:
    with Store("shop", keys=1000, directory=tmp_path):
        watch = Watch(str(tmp_path / "forebay-shop"))
    (tmp_path / "other").write_text("not a segment")
    (tmp_path / "other").rename(tmp_path / "forebay-shop")
    assert watch.look().removed
    watch.close()


def test_watch_follows_a_store_that_is_made_again(tmp_path: Path) -> None:
    path = str(tmp_path / "forebay-shop")
    with Store("shop", keys=1000, directory=tmp_path) as store:
        TokenBucket(store, "old", "5/hour").allow("key")
    watch = Watch(path)
    assert [one.name for one in watch.look().limiters] == ["old"]
    assert not watch.look().removed
    Store.unlink("shop", directory=tmp_path)
    frame = watch.look()
    assert ([one.name for one in frame.limiters], frame.removed) == (["old"], True)
    with Store("shop", keys=2000, directory=tmp_path) as store:
        TokenBucket(store, "new", "5/hour").allow("key")
        frame = watch.look()
        assert ([one.name for one in frame.limiters], frame.removed, frame.keys) == (["new"], False, 2000)
        # An extent that is made while it is watched.
        assert Concurrency(store, "held", 4, keys=10).acquire("job")
        assert {one.name for one in watch.look().limiters} == {"new", "held"}
    watch.close()


# In a terminal


class Screen(pyte.Screen):
    """With the two sequences for lines that scroll, which pyte doesn't know."""

    def scroll_up(self, count: int = 1) -> None:
        self._scroll(self.index, count, (self.margins or pyte.screens.Margins(0, self.lines - 1)).bottom)

    def scroll_down(self, count: int = 1) -> None:
        self._scroll(self.reverse_index, count, (self.margins or pyte.screens.Margins(0, self.lines - 1)).top)

    def _scroll(self, by_one: Callable[[], None], count: int, y: int) -> None:
        before, self.cursor.y = self.cursor.y, y
        for _ in range(count or 1):
            by_one()
        self.cursor.y = before


class Stream(pyte.ByteStream):
    csi = {**pyte.ByteStream.csi, "S": "scroll_up", "T": "scroll_down"}  # noqa: RUF012
    events = pyte.ByteStream.events | {"scroll_up", "scroll_down"}


class Terminal:
    """A program in a terminal of its own, and what its screen shows."""

    def __init__(self, *arguments: str, columns: int = 150, lines: int = 20, **environment: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(
                COMMAND, ["forebay", *arguments], {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment}
            )
        self.before = termios.tcgetattr(self._fd)
        self.screen = Screen(columns, lines)
        self._stream = Stream(self.screen)
        self.written = b""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read(self, timeout_s: float) -> bool:
        """Read what there is. False at the end."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            written = os.read(self._fd, 65536)
        except OSError:  # the program has ended
            return False
        self.written += written
        self._stream.feed(written)
        return bool(written)

    def wait_until(self, is_there: Callable[[list[str]], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not is_there(self.display):
            assert self.read(1), self.text
            assert time.monotonic() < end, self.text

    def wait(self) -> int:
        """The exit status. The terminal must be as before."""
        end = time.monotonic() + DEADLINE_S
        while self.read(1):
            assert time.monotonic() < end, self.text
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self._fd)

    @property
    def display(self) -> list[str]:
        """The lines. pyte's own fail while half of a wide character is overwritten, whose other half has no data."""
        lines, columns = range(self.screen.lines), range(self.screen.columns)
        return ["".join(self.screen.buffer[y][x].data for x in columns) for y in lines]

    @property
    def text(self) -> str:
        return "\n".join(self.display)

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)


@contextmanager
def terminal(*arguments: str, **options: Any) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **options)
    try:
        yield opened
    finally:
        opened.close()


def row_of(display: list[str], name: str) -> str:
    return next((line for line in display if line.startswith(name)), "")


def test_view_shows_rates_and_obeys_keys(used: Store) -> None:
    with terminal("top", used.name, "--interval", "0.05") as view:
        view.wait_until(lambda display: "▇" in view.text or "█" in view.text)
        assert view.display[0].startswith(f"{used.name}: ")
        assert r"login \x1b[31m" in view.text
        assert "*decided/s" in view.text
        # The name with wide characters doesn't move the columns.
        (denied,) = {line.index("denied/s") + len("denied/s") for line in view.display if "decided/s" in line}
        view.wait_until(lambda display: row_of(display, "login")[:denied].rstrip()[-1:].isdigit())
        view.type("s")
        view.wait_until(lambda display: "*denied/s" in view.text and display[4].startswith("login"))
        view.type("r")
        view.wait_until(lambda display: not display[4].startswith("login"))
        view.type("/lo\x7fOGi")
        view.wait_until(lambda display: ": lOGi_" in display[-1] and not row_of(display, "api"))
        view.type("\r")
        view.wait_until(lambda display: ": lOGi " in display[-1] and bool(row_of(display, "login")))
        view.type("/\x1b")
        view.wait_until(lambda display: bool(row_of(display, "api")))
        view.type(" ")
        view.wait_until(lambda display: display[-1].startswith("PAUSED"))
        stands = row_of(view.display, "api")
        view.type("s")
        view.wait_until(lambda display: "*denied " in view.text and row_of(display, "api") == stands)
        view.type(" ")
        view.wait_until(lambda display: not display[-1].startswith("PAUSED"))
        view.type("q")
        assert view.wait() == 0
        assert LEAVES_THE_OTHER_SCREEN in view.written


def test_pasted_text_is_drawn_once(used: Store) -> None:
    pasted = "a-filter-of-some-length"  # without spaces, over which the cursor is moved
    with terminal("top", used.name, "--interval", "3600") as view:
        view.wait_until(lambda display: display[-1].startswith("q quit"))
        view.type(f"/{pasted}")
        view.wait_until(lambda display: f": {pasted}_" in display[-1])
        assert f"{pasted}_".encode() in view.written


def test_view_fits_a_terminal_that_is_resized(used: Store) -> None:
    with terminal("top", used.name, "--interval", "0.05") as view:

        def is_drawn(display: list[str]) -> bool:
            return display[0].startswith(used.name[: view.screen.columns - 1]) and display[-1].startswith("q quit")

        view.wait_until(is_drawn)
        for columns, lines in ((60, 8), (200, 30), (20, 3), (1, 1), (90, 6)):
            view.resize(columns, lines)
            if columns >= 20:
                view.wait_until(is_drawn)
        view.wait_until(lambda display: "(3 more limiters)" in display[-1])
        view.type("q")
        assert view.wait() == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signal_restores_the_terminal(used: Store, number: signal.Signals, status: int) -> None:
    with terminal("top", used.name, "--interval", "0.05") as view:
        view.wait_until(lambda display: "q quit" in display[-1])
        assert view.mode[3] & termios.ECHO == 0
        os.kill(view.pid, number)
        assert view.wait() == status
        assert view.written.rindex(LEAVES_THE_OTHER_SCREEN) > view.written.rindex(b"q quit")
        assert SHOWS_THE_CURSOR in view.written[view.written.rindex(b"q quit") :]
        assert b"Traceback" not in view.written


def test_interrupt_of_the_keyboard_restores_the_terminal(used: Store) -> None:
    with terminal("top", used.name, "--interval", "10") as view:
        view.wait_until(lambda display: "q quit" in display[-1])
        view.type("\x03")
        assert view.wait() == 0
        assert LEAVES_THE_OTHER_SCREEN in view.written


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "", "LANG": "tlh_QO.UTF-8"}, {"COLUMNS": "99999", "LINES": "99999"}],
    ids=["a locale that isn't installed", "a size that ncurses refuses"],
)
def test_view_is_shown_whatever_the_environment_has(used: Store, environment: dict[str, str]) -> None:
    with terminal("top", used.name, **environment) as view:
        view.wait_until(lambda display: "q quit" in display[-1])
        view.type("q")
        assert view.wait() == 0


def test_view_without_unicode_is_plain(used: Store) -> None:
    with terminal("top", used.name, "--interval", "0.05", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0") as view:
        view.wait_until(lambda display: "#" in row_of(display, "api"))
        assert view.written.isascii()
        assert "login \\x1b[31m??" in view.text
        view.type("q")
        assert view.wait() == 0


@pytest.mark.parametrize("kind", ["dumb", "no-such-terminal", ""])
def test_terminals_that_cannot_show_it_are_refused(used: Store, kind: str) -> None:
    with terminal("top", used.name, TERM=kind) as view:
        assert view.wait() == 2
        assert b"can't show it: give --once or --json" in view.written.replace(b"\r\n", b" ")


# Hot keys


@pytest.fixture
def noting(store_name: str) -> Iterator[Store]:
    """A store that has noted two denied keys, of two limiters."""
    with Store(store_name, keys=1000, hot_keys=8) as store:
        bucket, window = TokenBucket(store, "api", "1/year"), FixedWindow(store, "login", "1/year")
        for limiter, times in ((bucket, 1201), (window, 3)):
            for _ in range(times + 1):
                limiter.allow("key")
        yield store


def test_once_and_json_have_the_hot_keys(noting: Store) -> None:
    first, second = noting.hot_keys()
    lines = run(noting.name, "--once", "--interval", "0.02").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("hot keys"))
    assert lines[at + 1].split()[:4] == ["api", "(TokenBucket)", first.digest, "1,201"]
    assert lines[at + 2].split()[:4] == ["login", "(FixedWindow)", second.digest, "3"]
    filtered = run(noting.name, "--once", "--interval", "0.02", "--filter", "LOG").stdout
    assert (first.digest in filtered, second.digest in filtered) == (False, True)
    assert "hot keys" not in run(noting.name, "--once", "--interval", "0.02", "--filter", "none").stdout
    found = json.loads(run(noting.name, "--once", "--json", "--interval", "0.02").stdout)["hot_keys"]
    assert [(one["limiter"], one["digest"], one["denied"]) for one in found] == [
        ("api", first.digest, 1201),
        ("login", second.digest, 3),
    ]


def test_a_store_without_a_record_has_no_hot_keys(used: Store) -> None:
    assert "hot keys" not in run(used.name, "--once", "--interval", "0.02").stdout
    assert json.loads(run(used.name, "--once", "--json", "--interval", "0.02").stdout)["hot_keys"] is None


def test_watch_finds_a_record_that_is_made_later(store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        watch = Watch(store.path or "")
        assert watch.look().hot_keys is None
        watch.close()
        with Store(store_name, keys=100, hot_keys=8):
            watch = Watch(store.path or "")
            assert watch.look().hot_keys == ()
            watch.close()


def test_view_shows_hot_keys_where_there_is_room(noting: Store) -> None:
    first, second = noting.hot_keys()
    with terminal("top", noting.name, "--interval", "0.05") as view:
        view.wait_until(lambda display: first.digest in view.text and second.digest in view.text)
        assert view.display[-4].startswith("hot keys")
        view.type("/log\r")
        view.wait_until(lambda display: first.digest not in view.text and second.digest in view.text)
        view.type("/\x1b")
        view.wait_until(lambda display: first.digest in view.text)
        view.resize(100, 8)
        view.wait_until(lambda display: "hot keys" not in view.text and bool(row_of(display, "login")))
        view.type("q")
        assert view.wait() == 0
