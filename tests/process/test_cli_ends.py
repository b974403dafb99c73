"""The ends of the ``forebay`` command: a reader that has ended, and an interrupt at any moment."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from process_helpers import DEADLINE_S

from forebay import Store, TokenBucket

COMMAND: Final = str(Path(sys.executable).parent / "forebay")


def end_of(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status of a command whose output nobody reads, and what it says of that."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_S
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def run(program: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", program]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize(
    "words", [("ls",), ("stat",), ("show", "key"), ("verify",), ("doctor",), ("metrics",), ("top", "--once"), ("hot",)]
)
def test_every_command_ends_quietly_with_2_if_its_reader_has_ended(
    name: str, words: tuple[str, ...], as_json: tuple[str, ...]
) -> None:
    with Store(name, keys=100, hot_keys=8) as store:
        TokenBucket(store, "api", "1/hour").allow("key")
        command, *others = words
        named = [] if command == "ls" else [name]
        assert end_of([command, *named, *others, *as_json]) == (2, "")


HELPS: Final = [("--help",), ("--version",), ("rules", "check", "--help"), ("completion", "fish")]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_ends_quietly_with_2_if_its_reader_has_ended(words: tuple[str, ...]) -> None:
    assert end_of(words) == (2, "")


@pytest.mark.parametrize("words", [*HELPS, ("ls",)], ids=" ".join)
def test_a_full_device_ends_every_command_with_2_and_the_reason(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_S
        )
    assert (done.returncode, done.stderr) == (2, "[Errno 28] No space left on device\n")


@pytest.mark.parametrize("takes_nothing", ["/dev/full", "a pipe without a reader"])
@pytest.mark.parametrize("words", [("nosuch",), ("rm",), ("ls", "--nope"), ("verify", "/nosuch")], ids=" ".join)
def test_a_refusal_that_cannot_be_printed_ends_with_2(words: tuple[str, ...], takes_nothing: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe, open("/dev/full", "wb") as full:
        stream = full if takes_nothing == "/dev/full" else pipe
        done = subprocess.run([COMMAND, *words], stdout=stream, stderr=stream, check=False, timeout=DEADLINE_S)
    assert done.returncode == 2


@pytest.mark.parametrize("size", [{"COLUMNS": "0"}, {"COLUMNS": "00", "LINES": "0"}])
def test_a_terminal_of_size_0_in_the_environment_counts_as_none(name: str, size: dict[str, str]) -> None:
    Store(name, keys=100).close()
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as terminal:
        environment = {**os.environ, "TERM": "xterm", **size}
        done = subprocess.run(
            [COMMAND, "stat", name], stdout=theirs, stderr=theirs, env=environment, check=False, timeout=DEADLINE_S
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of what the terminal got
            while data := terminal.read(2**16):
                shown += data
    assert done.returncode == 0
    assert name.encode() in shown


@pytest.mark.parametrize("module", ["click", "rich", "forebay.cli.commands"])
def test_an_interrupt_while_modules_are_imported_prints_nothing(module: str) -> None:
    """SIGINT arrives when the command begins to import the module."""
    program = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
from forebay.cli import main
sys.meta_path.insert(0, Interrupt())
sys.argv = ["forebay", "ls"]
main()
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("module", ["forebay", "forebay.store", "forebay.cli"])
def test_an_interrupt_while_forebay_is_imported_ends_the_command_with_130(module: str) -> None:
    program = f"""
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv = [{COMMAND!r}, "ls"]
runpy.run_path({COMMAND!r}, run_name="__main__")
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_interrupt_stays_ignored(name: str) -> None:
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from forebay.cli import main
sys.argv = ["forebay", "ls"]
try:
    main()
finally:
    print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
"""
    done = run(program)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "True", "")


def test_an_interrupt_of_a_command_that_works_ends_it_with_130() -> None:
    program = """
import os, signal, sys
from forebay.cli import main, stores
signal.signal(signal.SIGINT, signal.default_int_handler)
stores.file_users = lambda: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["forebay", "ls"]
main()
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
