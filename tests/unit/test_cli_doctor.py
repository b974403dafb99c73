"""``forebay doctor``: each finding has its remedy, and the exit status says whether there is a problem."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from process_helpers import FREE_USER, Crew, SharedNumbers, path_of, wait_until

from forebay import BucketedWindow, Concurrency, Store, TokenBucket
from forebay.cli import diagnosis, doctor
from forebay.cli.commands import forebay
from forebay.segment import free_space, host_clock
from forebay.segment.file_users import FileUsers, file_users


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(forebay, list(map(str, arguments)), env={"COLUMNS": "200"}, prog_name="forebay")


Finding = dict[str, str]


def _own_users() -> FileUsers:
    """The files that this process and its children use. Other tests run on the host, too."""
    users, own = file_users(), {os.getpid()}
    for task in Path("/proc/self/task").iterdir():
        own.update(map(int, (task / "children").read_text().split()))
    found = {file: [pid for pid in pids if pid in own] for file, pids in users.mapped_by.items()}
    return replace(users, mapped_by={file: pids for file, pids in found.items() if pids})


@pytest.fixture(autouse=True)
def sound_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A host without problems, of which a test may change parts."""

    def set_up(
        *, clock: str = "tsc", huge_pages: str = "always within_size [advise] never", systemd: bool = False
    ) -> None:
        folder = tmp_path / "host"
        folder.mkdir(exist_ok=True)
        for name, text in (("CLOCK_SOURCE", clock), ("HUGE_PAGES", huge_pages)):
            (folder / name).write_text(f"{text}\n")
            monkeypatch.setattr(diagnosis, name, folder / name)
        monkeypatch.setattr(diagnosis, "SYSTEMD", folder if systemd else folder / "none")
        monkeypatch.setattr(diagnosis, "LINGER", folder)

    set_up()
    monkeypatch.setattr(free_space, "memory_limits", list)
    monkeypatch.setattr(doctor, "file_users", _own_users)
    return set_up


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "stores"
    place.mkdir()
    return place


@pytest.fixture
def shop(directory: Path) -> Iterator[Store]:
    with Store("shop", keys=1000, directory=directory) as store:
        assert TokenBucket(store, "api", "5/hour").allow("key")
        yield store


def findings(*arguments: str | Path, status: int | None = None) -> list[Finding]:
    result = run("doctor", *arguments, "--json")
    assert result.stderr == ""
    document = json.loads(result.stdout)
    found: list[Finding] = document["findings"]
    problems = [one for one in found if one["severity"] == "problem"]
    assert document["problems"] == len(problems)
    assert result.exit_code == (1 if problems else 0)
    if status is not None:
        assert result.exit_code == status, problems
    return found


def one_with(found: list[Finding], text: str) -> Finding:
    (one,) = [one for one in found if text in one["found"]]
    return one


def test_sound_store_has_no_problem(shop: Store, directory: Path) -> None:
    before = Path(str(shop.path)).stat()
    found = findings("shop", "--directory", directory, status=0)
    assert str(os.getpid()) in one_with(found, "used by 1 process")["found"]
    assert one_with(found, "MiB in use")["where"] == str(directory)
    assert one_with(found, "advise")["severity"] == "note"
    assert one_with(found, "without a system call")["where"] == "clock"
    result = run("doctor", "shop", "--directory", directory)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no problem")
    assert Path(str(shop.path)).stat().st_mtime_ns == before.st_mtime_ns


def test_store_without_processes_is_a_note(directory: Path) -> None:
    Store("shop", keys=1000, directory=directory).close()
    found = one_with(findings("shop", "--directory", directory, status=0), "no process has it attached")
    assert found["remedy"].endswith(f"forebay rm {directory}/forebay-shop")


def test_slow_clock_is_a_problem(sound_host: Any, shop: Store, directory: Path) -> None:
    sound_host(clock="acpi_pm")
    found = one_with(findings("shop", "--directory", directory, status=1), "acpi_pm")
    assert "tsc" in found["remedy"]


def test_memory_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, shop: Store, directory: Path) -> None:
    for used, severity in ((50, "note"), (95, "problem")):
        limit = (Path("/sys/fs/cgroup/shop"), 100 << 20, used << 20)
        monkeypatch.setattr(free_space, "memory_limits", lambda limit=limit: [limit])
        found = one_with(findings("shop", "--directory", directory), f"{used} of 100 MiB in use in the control group")
        assert found["severity"] == severity


def test_full_file_system_is_a_problem(monkeypatch: pytest.MonkeyPatch, shop: Store, directory: Path) -> None:
    real = os.statvfs(directory)
    full = os.statvfs_result((real.f_bsize, 4096, 1000, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found = one_with(findings("shop", "--directory", directory, status=1), "MiB in use, by forebay-shop")
    assert "--shm-size" in found["remedy"]


def test_file_that_all_may_write_is_a_problem(shop: Store, directory: Path) -> None:
    os.chmod(str(shop.path), 0o666)
    found = one_with(findings("shop", "--directory", directory, status=1), "mode 0666")
    assert found["remedy"] == f"chmod o-w {shop.path}"


def test_file_that_is_no_segment_is_a_problem(directory: Path) -> None:
    (directory / "forebay-shop").write_text("another program's")
    found = one_with(findings("shop", "--directory", directory, status=1), "another")
    assert found["severity"] == "problem"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of root")
def test_store_that_only_root_may_open_is_a_problem(directory: Path) -> None:
    """In the directory of a service's user. Elsewhere the service may be root's."""
    Store("shop", keys=1000, directory=directory).close()
    assert one_with(findings("shop", "--directory", directory, status=0), "owned by root")["severity"] == "note"
    os.chown(directory, FREE_USER, FREE_USER)
    found = one_with(findings("shop", "--directory", directory, status=1), "owned by root")
    assert "start the service" in found["remedy"]


def _boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_clock, "read_boot_id", lambda: uuid.UUID(int=5).bytes)


def test_segment_of_another_boot(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str) -> None:
    """On a disk it is what survives a reboot; in /dev/shm no reboot leaves one."""
    Store("shop", keys=1000, directory=directory).close()
    Store(name, keys=1000).close()
    _boot(monkeypatch)
    assert one_with(findings("shop", "--directory", directory), "of an earlier boot")["severity"] == "note"
    found = one_with(findings(name, status=1), "of another boot")
    assert found["remedy"].endswith(f"forebay rm {name}")


def test_full_store_is_a_problem(directory: Path) -> None:
    with Store("shop", keys=100, directory=directory) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        for number in range(95):
            assert bucket.allow(number)
        found = one_with(findings("shop", "--directory", directory, status=1), "95 of 100 keys live")
        assert found["remedy"].startswith(f"forebay resize {store.path} --keys N")


def test_evictions_and_full_memory_are_problems(directory: Path) -> None:
    with Store("shop", keys=1000, directory=directory) as store:
        window = BucketedWindow(store, "parts", "5/hour", buckets=4, keys=10)
        for number in range(40):
            assert window.allow(number)
        found = findings("shop", "--directory", directory, status=1)
        evicted = store.stats().limiters["parts"].evicted
        assert one_with(found, f"{evicted} live keys were forgotten")["where"] == f"{store.path}, limiter 'parts'"
        assert one_with(found, "10 of the 10 keys of its own memory live")["severity"] == "problem"


def test_store_that_logind_removes(monkeypatch: pytest.MonkeyPatch, sound_host: Any, name: str, tmp_path: Path) -> None:
    sound_host(systemd=True)
    monkeypatch.setattr(diagnosis, "FIRST_USER", 0)
    with Store(name, keys=1000):
        found = one_with(findings(name, status=1), "systemd-logind removes it")
        assert "loginctl enable-linger" in found["remedy"]
        import pwd

        (tmp_path / "host" / pwd.getpwuid(os.geteuid()).pw_name).touch()
        findings(name, status=0)


def _stay(name: str | None, ready: SharedNumbers, index: int) -> None:
    with Store(name, keys=1000) if name else Store.private(keys=1000):
        ready[index] = 1
        wait_until(lambda: ready[index] == 2, "the end")


def test_processes_of_a_removed_segment_are_named(crew: Crew, name: str) -> None:
    ready = SharedNumbers(1)
    worker = crew.start(_stay, name, ready, 0)
    wait_until(lambda: ready[0], "the worker")
    os.unlink(path_of(name))
    with pytest.warns(UserWarning, match="was removed while processes use it"):
        store = Store(name, keys=1000)
    with store:
        found = one_with(findings(name, status=1), "a removed segment of that name is in use by 1 process")
        assert (found["where"], str(worker.pid) in found["found"]) == (path_of(name), True)
        assert found["remedy"] == "restart these processes"
    worker.kill()
    assert not [one for one in findings(name) if "a removed segment" in one["found"]]


def test_workers_that_count_alone_are_named(crew: Crew) -> None:
    ready = SharedNumbers(2)
    workers = [crew.start(_stay, None, ready, index) for index in range(2)]
    wait_until(lambda: ready[0] and ready[1], "the workers")
    found = [one for one in findings(status=1) if one["where"] == f"process {os.getpid()}"]
    (one,) = [one for one in found if "2 children have private stores" in one["found"]]
    for worker in workers:
        assert str(worker.pid) in one["found"]
    assert "before the workers are forked" in one["remedy"]


def test_doctor_prints_literally(directory: Path) -> None:
    (directory / "forebay-\x1b[31m:x:").write_text("another program's")
    result = run("doctor", "--directory", directory)
    assert (result.exit_code, r"forebay-\x1b[31m:x:" in result.stdout) == (1, True)
    assert "\x1b" not in result.stdout


def test_remedies_quote_the_names_that_others_choose(directory: Path) -> None:
    made = directory / "forebay-x;touch pwned #"
    with Store("x", keys=100, path=made):
        made.chmod(0o602)
        remedies = [one["remedy"] for one in findings("--directory", directory, status=1)]
        assert f"chmod o-w '{made}'" in remedies


def test_doctor_of_all_stores_sees_those_in_memory(name: str) -> None:
    with Store(name, keys=1000):
        assert path_of(name) in [one["where"] for one in findings()]


def test_a_limiter_for_one_key_is_never_too_full(directory: Path) -> None:
    with Store("shop", keys=1000, directory=directory) as store:
        held = Concurrency(store, "everyone", 5, keys=1).acquire("everyone")
        assert held
        assert not [one for one in findings("shop", "--directory", directory) if "of its own memory" in one["found"]]
