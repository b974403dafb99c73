"""The C API as others build against it: the header in C and C++, the examples, and threads without the GIL."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import c_api
import pytest
from process_helpers import COUNTER_FIELDS, Crew, counter_lines, path_of, wait_until

import forebay
from forebay import Concurrency, FixedWindow, SlidingLog, Store, TokenBucket
from forebay.segment import layout
from forebay.testing import ManualClock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "c_api"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the examples, built as their setup.py states."""
    directory = tmp_path_factory.mktemp("examples")
    for file in EXAMPLES.iterdir():
        if file.is_file() and file.suffix in {".c", ".pyx", ".py"}:
            (directory / file.name).write_bytes(file.read_bytes())
    environment = {
        **os.environ,
        "CFLAGS": "-Wall -Wextra -Werror -Wno-unused-parameter",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=directory, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.fixture
def gate(built: Path) -> ModuleType:
    import gate

    module: ModuleType = gate
    return module


@pytest.fixture
def service(built: Path) -> ModuleType:
    import service

    module: ModuleType = service
    return module


@pytest.fixture
def line_filter(built: Path) -> ModuleType:
    import line_filter

    module: ModuleType = line_filter
    return module


def test_the_examples_leave_the_gil_off(built: Path) -> None:
    # Where there is one, importing a module that needs it is an error.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    code = f"import sys; sys.path[:0] = {[str(built), *sys.path]}; import gate, service, line_filter"
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The header


def test_the_include_directory_has_the_header() -> None:
    assert (Path(forebay.get_include()) / "forebay.h").is_file()
    assert (Path(forebay.get_include()).parent / "c_api.pxd").is_file()


LAYOUT = """
#include <forebay.h>
#include <stddef.h>
#include <stdio.h>

int main(void) {
    %s
    return 0;
}
"""


@pytest.mark.parametrize(
    "compiler",
    [
        ("cc", "-std=c99", "-x", "c"),
        ("cc", "-std=c11", "-x", "c"),
        ("c++", "-std=c++11", "-x", "c++"),
        ("c++", "-std=c++20", "-x", "c++"),
    ],
    ids=lambda compiler: compiler[1],
)
def test_the_header_compiles_and_has_the_layout_that_other_languages_declare(
    tmp_path: Path, compiler: tuple[str, ...]
) -> None:
    """Size and offsets, of structs that were declared from the header by hand: as in Rust, so in ctypes."""
    structs: dict[str, type[ctypes.Structure]] = {
        "forebay_request": c_api.Request, "forebay_result": c_api.Result, "forebay_lease": c_api.Lease,
        "forebay_api": c_api.Api,
    }  # fmt: skip
    lines, expected = [], []
    for name, struct in structs.items():
        lines.append(f'printf("%zu ", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            lines.append(f'printf("%zu ", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    statuses = [name for name in vars(c_api) if name.isupper() and isinstance(getattr(c_api, name), int)]
    for name in statuses:
        constant = (
            f"FOREBAY_KEY_{name}" if name in {"TEXT", "BYTES", "INT", "LARGE_INT", "PARTS"} else f"FOREBAY_{name}"
        )
        lines.append(f'printf("%d ", (int){constant});')
        expected.append(getattr(c_api, name))
    source = tmp_path / "layout.c"
    source.write_text(LAYOUT % "\n    ".join(lines))
    program = tmp_path / "layout"
    command = [*compiler, "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{forebay.get_include()}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    assert [int(number) for number in subprocess.check_output(program).split()] == expected


def test_the_header_has_no_function_that_the_test_does_not_know() -> None:
    text = (Path(forebay.get_include()) / "forebay.h").read_text()
    functions = [name for name, *_ in c_api.Api._fields_ if name not in {"version", "reserved", "size"}]
    assert re.findall(r"\(\*(\w+)\)", text) == functions


def test_the_cython_declarations_have_every_name_of_the_header() -> None:
    header = (Path(forebay.get_include()) / "forebay.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    declared = (Path(forebay.get_include()).parent / "c_api.pxd").read_text()
    names = set(re.findall(r"\b(?:FOREBAY_\w+|forebay_\w+)\b|(?<=\(\*)\w+(?=\))", header)) - {"FOREBAY_H"}
    assert names
    assert names <= set(re.findall(r"\w+", declared))


# The examples


def test_the_c_example_decides_in_native_threads(gate: ModuleType, store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        limiter = TokenBucket(store, "api", "1000/day")
        assert gate.run(limiter, b"user:42", threads=4, requests=1000) == (1000, 3000, None)
        assert not limiter.allow("user:42")
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (1000, 3001)
        with pytest.raises(ValueError, match="no limiter"):
            gate.run(store, b"k", threads=1, requests=1)
    with pytest.raises(ValueError, match="closed"):
        gate.run(limiter, b"k", threads=1, requests=1)


def test_the_second_c_example_serves_within_all_limits(service: ModuleType, store_name: str) -> None:
    with Store(store_name, keys=100) as store:
        places = Concurrency(store, "places", 2, lease="1h")
        limiters = TokenBucket(store, "user", "1000/day"), SlidingLog(store, "all", "900/day", keys=4)
        served, limited, busy, retry_after_ns, error = service.run(places, limiters, b"k", threads=4, requests=500)
        # Two requests that race for the last permit may both be denied.
        assert 897 <= served <= 900
        assert (served + limited + busy, error) == (2000, None)
        assert limited
        assert 0 < retry_after_ns < 86_400 * 10**9
        assert [limiter.peek("k").remaining for limiter in limiters] == [1000 - served, 900 - served]
        assert places.peek("k").remaining == 2
        assert places.acquire("k", 2)
        assert service.run(places, limiters, b"k", threads=2, requests=10)[2:] == (20, 2**64 - 1, None)
        with pytest.raises(ValueError, match="1 to 16 limiters"):
            service.run(places, (), b"k", threads=1, requests=1)
        for wrong in ((limiters[0], limiters), (places, (*limiters, places))):
            assert "another kind" in service.run(*wrong, b"other", threads=1, requests=1)[-1]
        assert "no limiter" in service.run(store, limiters, b"k", threads=1, requests=1)[-1]
    assert "closed" in service.run(places, limiters, b"k", threads=2, requests=1)[-1]


def test_the_cython_example_decides_for_each_line(line_filter: ModuleType, clock: ManualClock) -> None:
    with Store.private(keys=100, clock=clock) as store:
        limiter = TokenBucket(store, "api", "3/hour")
        log = b"ada GET /\nbob GET /\nada GET /x\n" * 2 + b"\nada\neve"
        assert line_filter.admitted(limiter, log) == 3 + 2 + 1 + 1
        assert limiter.peek("ada").remaining == 0
        assert limiter.peek("").remaining == 2
    with pytest.raises(ValueError, match="closed"):
        line_filter.admitted(limiter, log)


def test_native_threads_run_while_a_thread_holds_the_gil(gate: ModuleType) -> None:
    store = Store.private(keys=10)
    limiter = TokenBucket(store, "api", "1000000000/second")
    worker = threading.Thread(target=lambda: gate.run(limiter, b"k", threads=2, requests=10**12))
    sleep_with_gil = ctypes.PyDLL(None).usleep
    size = layout.COUNTER_LINE.size * layout.OWNED_COUNTER_LINES

    def decided() -> int:
        lines = layout.COUNTER_LINE.iter_unpack(store.segment.read(layout.COUNTERS_OFFSET, size))
        return sum(line[COUNTER_FIELDS.index("allowed")] for line in lines)

    before = sys.getswitchinterval()
    worker.start()
    wait_until(decided, "a native decision")
    # From here on nothing lets go of the GIL.
    sys.setswitchinterval(1000)
    try:
        first = decided()
        turns = 0
        while decided() == first:
            sleep_with_gil(1000)
            turns += 1
            assert turns < 100_000
    finally:
        sys.setswitchinterval(before)
        store.close()
        worker.join()


def test_a_close_ends_native_threads_with_a_status(gate: ModuleType, store_name: str) -> None:
    store = Store(store_name, keys=10)
    limiter = TokenBucket(store, "api", "1000000000/second")
    done: list[tuple[int, int, str | None]] = []
    worker = threading.Thread(target=lambda: done.append(gate.run(limiter, b"k", threads=2, requests=10**12)))
    worker.start()
    with Store(store_name, keys=10) as other:
        wait_until(lambda: other.stats().total.allowed > 1000, "a native decision")
        store.close()
        worker.join()
        stats = other.stats().limiters["api"]
    ((allowed, denied, error),) = done
    assert error == "the store was closed"
    assert (stats.allowed, stats.denied) == (allowed, denied)


# Several processes


def _decide_natively(name: str, requests: int) -> tuple[int, int, str | None]:
    import gate

    with Store(name, keys=100) as store:
        answer: tuple[int, int, str | None] = gate.run(
            SlidingLog(store, "api", "5000/day", keys=4), b"k", threads=2, requests=requests
        )
        return answer


def test_native_threads_of_several_processes_admit_exactly_the_limit(gate: ModuleType, crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        limiter = SlidingLog(store, "api", "5000/day", keys=4)
        workers = [crew.start(_decide_natively, name, 2000) for _ in range(3)]
        mine = sum(limiter.allow("k") for _ in range(2000))
        answers = [worker.result() for worker in workers]
        assert mine + sum(allowed for allowed, _, _ in answers) == 5000
        assert {error for _, _, error in answers} == {None}
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (5000, 3 * 4000 + 2000 - 5000)


def test_a_killed_process_leaves_exact_limits_and_free_lines(gate: ModuleType, crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        limiter = SlidingLog(store, "api", "5000/day", keys=4)

        def decided() -> int:
            stats = store.stats().total
            return stats.allowed + stats.denied

        for _ in range(10):
            seen = decided()
            worker = crew.start(_decide_natively, name, 10**12)
            wait_until(lambda seen=seen: decided() > seen, "a native decision")
            worker.kill()
        for _ in range(5000):
            limiter.allow("k")
        # A kill between a decision and its count loses that count, so the statistics may lack two for each kill.
        assert 5000 - 20 <= store.stats().limiters["api"].allowed <= 5000
        assert limiter.peek("k").remaining == 0
        assert not limiter.allow("k")
        lines = [line for line in _owned_lines(name) if line]
        assert len(lines) <= 1 + 2


def _owned_lines(name: str) -> list[int]:
    return [line["limiter"] for line in counter_lines(path_of(name))[: layout.OWNED_COUNTER_LINES]]


def test_a_fork_beside_native_threads_leaves_both_working(
    gate: ModuleType, in_child: Callable[[Callable[[], object]], object], store_name: str
) -> None:
    with Store(store_name, keys=100) as store:
        limiter = FixedWindow(store, "api", "1000000/day")
        done: list[tuple[int, int, str | None]] = []
        worker = threading.Thread(target=lambda: done.append(gate.run(limiter, b"k", threads=2, requests=1_000_000)))
        worker.start()
        wait_until(lambda: store.stats().total.allowed, "a native decision")
        children = [in_child(lambda: gate.run(limiter, b"other", threads=2, requests=1000)) for _ in range(5)]
        worker.join()
        assert children == [(2000, 0, None)] * 5
        assert done == [(1_000_000, 1_000_000, None)]
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (1_010_000, 1_000_000)
