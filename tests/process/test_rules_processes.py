"""Live rules of several processes: one loads, each follows, and a kill leaves one version or the other."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from process_helpers import FREE_USER, SHARED_GROUP, Crew, as_user, wait_until
from rule_files import FILE
from web_requests import call_wsgi

from forebay import SegmentError, SegmentRemovedWarning, Store
from forebay.cli.survey import files_in
from forebay.rules import FileSource, LiveRules
from forebay.rules.live import publication
from forebay.rules.live.loader import Note, read_note
from forebay.rules.live.publication import Board, Publication, UnreadableRules
from forebay.web import WSGIMiddleware

INTERVAL = "20 ms"
NEVER = "10 hours"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store("live", keys=1000, directory=tmp_path) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    return path


def of_rate(limit: int) -> str:
    return FILE.replace("5/", f"{limit}/")


def replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def application(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b""]


def limit_of(app: Any) -> int:
    answered = call_wsgi(app)
    return int(answered["ratelimit-policy"].split(";")[1].removeprefix("q="))


def serve(store: Store, file: Path, wanted: int) -> tuple[int, int | None]:
    """Handle requests until the limit is as wanted; the process, and the loader."""
    live = LiveRules(FileSource(file), store=store, interval=INTERVAL)
    app = WSGIMiddleware(application, live)
    wait_until(lambda: limit_of(app) == wanted, f"a limit of {wanted}")
    return os.getpid(), live.status().loader


def test_every_process_follows_the_one_that_loads(crew: Crew, store: Store, file: Path) -> None:
    workers = [crew.start(serve, store, file, 7) for _ in range(3)]
    replace(file, of_rate(7))
    results = crew.results(workers)
    assert {loader for _, loader in results} & {pid for pid, _ in results}


def test_a_fork_of_the_application_follows(crew: Crew, store: Store, file: Path) -> None:
    # As gunicorn does with --preload.
    app = WSGIMiddleware(application, LiveRules(FileSource(file), store=store, interval=INTERVAL))
    assert limit_of(app) == 5

    def work() -> bool:
        wait_until(lambda: limit_of(app) == 9, "a limit of 9")
        return True

    workers = [crew.start(work) for _ in range(3)]
    replace(file, of_rate(9))
    assert crew.results(workers) == [True] * 3
    wait_until(lambda: limit_of(app) == 9, "a limit of 9")


def follow(store: Store, file: Path, path: Path) -> None:
    live = LiveRules(FileSource(file), store=store, interval=INTERVAL)
    app = WSGIMiddleware(application, live)
    while True:
        path.write_text(f"{limit_of(app)}")
        time.sleep(0.002)


def has_seen(path: Path, limit: int) -> bool:
    return path.exists() and path.read_text() == str(limit)


def test_another_process_takes_over_from_one_that_was_killed(
    crew: Crew, store: Store, file: Path, tmp_path: Path
) -> None:
    seen = [tmp_path / f"seen-{number}" for number in range(4)]
    workers = {worker.pid: (worker, path) for path in seen for worker in [crew.start(follow, store, file, path)]}
    live = LiveRules(FileSource(file), store=store, interval=NEVER)
    limit = 5

    def loader() -> int | None:
        found = live.status().loader
        return found if found in workers else None

    for _ in range(3):
        limit += 1
        replace(file, of_rate(limit))
        for _, path in workers.values():
            wait_until(functools.partial(has_seen, path, limit), f"a limit of {limit}")
        wait_until(loader, "a worker loads")
        pid = loader()
        assert pid is not None
        worker, _ = workers.pop(pid)
        worker.kill()
    assert live.status().published == 4


def test_a_stopped_loader_delays_no_request(crew: Crew, store: Store, file: Path, tmp_path: Path) -> None:
    worker = crew.start(follow, store, file, tmp_path / "seen")
    live = LiveRules(FileSource(file), store=store, interval=INTERVAL)
    wait_until(lambda: live.status().loader == worker.pid, "the worker loads")
    worker.pause()
    app = WSGIMiddleware(application, live)
    replace(file, of_rate(8))
    assert limit_of(app) == 5
    worker.kill()
    wait_until(lambda: limit_of(app) == 8, "the rules are loaded by another process")
    live.close()


def publish(board: Board, number: int, line: int) -> int | None:
    """Publish, and die before the `line`-th line of it; the version."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != publication.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    made = Publication("a.toml", "a test", os.getpid(), datetime.now(UTC), {}, str(number).encode())
    seen = board.version
    sys.settrace(trace)
    try:
        return board.publish(made, seen)
    finally:
        sys.settrace(None)


def test_a_kill_at_every_step_leaves_one_version_or_the_other(crew: Crew, store: Store) -> None:
    board = Board(store)
    old = new = 0
    for line in range(1, 1000):
        # A publication over the leftovers of the one before, which it removes.
        version = publish(board, 0, 0)
        names = {path.name.rpartition(".")[2] for path in Path(str(store.path)).parent.glob("*.rules-*")}
        assert names == {str(version)}
        worker = crew.start(publish, board, line, line)
        with contextlib.suppress(AssertionError):
            worker.result()
        found = int(board.read(board.version).document)
        assert found in (0, line)
        if os.WIFEXITED(worker.status or 0):
            break
        old, new = old + (found == 0), new + (found == line)
    assert found == line
    assert old > 10
    assert new > 5


def test_two_that_take_themselves_for_the_loader_publish_one_after_the_other(crew: Crew, store: Store) -> None:
    board = Board(store)
    publish(board, 0, 0)

    def race(number: int) -> list[int]:
        won = []
        for turn in range(300):
            seen = board.version
            made = Publication("a.toml", "a test", number, datetime.now(UTC), {}, f"{number} {turn}".encode())
            version = board.publish(made, seen)
            if version is not None:
                won.append(version)
                try:
                    assert board.read(version).document == made.document
                except UnreadableRules:
                    # Others have published since.
                    assert board.version > version
        return won

    won = crew.run(3, race)
    versions = [version for each in won for version in each]
    assert len(set(versions)) == len(versions)
    assert max(versions) == board.version
    assert board.read(board.version).loader == next(i for i, each in enumerate(won) if board.version in each)


def test_a_file_of_a_late_publication_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(store)
    versions = [publish(board, number, 0) for number in (1, 2)]
    # A process that has read version 0 prepares its file only now, and is killed after the CAS, which fails.
    monkeypatch.setattr(os, "unlink", lambda path: None)
    late = Publication("a.toml", "late", os.getpid(), datetime.now(UTC), {}, b"late")
    assert board.publish(late, 0) is None
    assert versions == [1, 2]
    with pytest.raises(UnreadableRules, match="version 1 of the rules was replaced by version 2"):
        board.read(1)
    assert board.read(2).document == b"2"


def test_a_process_that_ends_gives_the_election_up(crew: Crew, store: Store, file: Path) -> None:
    live = LiveRules(FileSource(file), store=store, interval=NEVER)

    def win() -> bool:
        return live._election.try_win()

    assert crew.start(win).result()
    wait_until(live._election.try_win, "the lock is free")
    assert not crew.start(win).result()
    live.close()
    assert crew.start(win).result()


FORGED = bytes(32) + msgspec.msgpack.encode(Publication("a.toml", "a", 1, datetime.now(UTC), {}, of_rate(9).encode()))


@pytest.mark.parametrize("damage", [b"x" * 40, b"", FORGED, None])
def test_a_publication_that_others_have_changed_is_not_used(
    store: Store, file: Path, tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveRules(FileSource(file), store=store, interval=NEVER)
    app = WSGIMiddleware(application, live)
    assert limit_of(app) == 5
    file.write_text(of_rate(6))
    LiveRules(FileSource(file), store=store, interval=NEVER)
    [path] = tmp_path.glob("*.rules-*.2")
    path.unlink() if damage is None else path.write_bytes(damage)
    assert [limit_of(app) for _ in range(3)] == [5] * 3
    assert "version 2" in str(live.status().process_error)
    assert caplog.text.count("version 2 of the rules can't be used here") == 1
    file.write_text(of_rate(7))
    with pytest.raises(UnreadableRules):
        Board(store).read(2)
    LiveRules(FileSource(file), store=store, interval=NEVER)
    assert limit_of(app) == 7
    assert live.status().process_error is None


def test_a_new_segment_has_rules_of_its_own(file: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with Store("new", keys=100, directory=tmp_path) as store:
            live = LiveRules(FileSource(file), store=store, interval=NEVER)
            assert live.status().version == 1
            live.close()
            assert sorted(path.name.rpartition(".")[2] for path in tmp_path.glob("*.rules-*")) == ["1", "loader"]
        Store.unlink("new", directory=tmp_path)
        assert list(tmp_path.iterdir()) == [file]


def test_a_removed_segment_and_its_successor_leave_each_other_their_files(file: Path, tmp_path: Path) -> None:
    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*.rules-*.[0-9]")}

    with Store("new", keys=100, directory=tmp_path) as removed:
        old = LiveRules(FileSource(file), store=removed, interval=NEVER)
        (tmp_path / "forebay-new").unlink()
        with pytest.warns(SegmentRemovedWarning):
            store = Store("new", keys=100, directory=tmp_path)
        with store:
            new = LiveRules(FileSource(file), store=store, interval=NEVER)
            replace(file, of_rate(6))
            for live in (new, old):
                live.step()
                live.step()
                assert live.status().published == 2
            assert len(files()) == 2
            for rules in (removed, store):
                assert Board(rules).read(2).document == of_rate(6).encode()


def refused(path: str, file: Path) -> str:
    with Store.attach(path=path) as store, pytest.raises(SegmentError) as caught:
        LiveRules(FileSource(file), store=store, interval=NEVER)
    return str(caught.value)


def leave_note(path: str, error: str) -> None:
    with Store.attach(path=path) as store:
        Board(store).write_note(msgspec.json.encode(Note(os.getpid(), error)))


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@as_root
def test_users_of_one_segment_replace_each_others_notes(crew: Crew, name: str) -> None:
    with Store(name, keys=100, mode=0o660, group=SHARED_GROUP) as store:
        for user, error in ((FREE_USER, "a long one"), (FREE_USER - 1, "short"), (FREE_USER, "again")):
            crew.start(as_user, user, user, [SHARED_GROUP], leave_note, store.path, error).result()
            note, _ = read_note(Board(store))
            assert note is not None
            assert note.error == error


@as_root
def test_a_user_who_may_only_read_the_segment_has_no_live_rules(crew: Crew, name: str, file: Path) -> None:
    with Store(name, keys=100) as store:
        LiveRules(FileSource(file), store=store, interval=NEVER)
        os.chmod(str(store.path), 0o644)
        found = crew.start(as_user, FREE_USER, FREE_USER, [], refused, store.path, file).result()
    assert f"a file that uid {FREE_USER} may only read" in found


def test_a_store_whose_name_is_like_that_of_rules_stays(file: Path, tmp_path: Path) -> None:
    with Store("shop", keys=100, directory=tmp_path) as store, Store("shop.rules-2", keys=100, directory=tmp_path):
        LiveRules(FileSource(file), store=store, interval=NEVER)
        Store.unlink("shop", directory=tmp_path)
    assert [path.name for path in tmp_path.glob("forebay-*")] == ["forebay-shop.rules-2"]
    assert files_in(str(tmp_path)) == [str(tmp_path / "forebay-shop.rules-2")]
