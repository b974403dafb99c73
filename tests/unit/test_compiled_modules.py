"""Machine code and symbols of the compiled modules of the installed package."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

import forebay

PACKAGE = Path(forebay.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.so"))
CAS128 = {"x86_64": "lock cmpxchg16b", "aarch64": "caspal"}[platform.machine()]


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def module(name: str) -> Path:
    (found,) = [path for path in MODULES if path.name.split(".")[0] == name]
    return found


def test_tests_run_against_an_installed_package() -> None:
    source = Path(__file__).parents[2] / "src"
    assert source not in PACKAGE.parents
    sources = (source / "forebay").rglob("*.pyx")
    assert {path.name.split(".")[0] for path in MODULES} == {path.stem for path in sources}
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name.split(".")[0])
def test_no_module_calls_libatomic(path: Path) -> None:
    """The 16-byte operations of libatomic may take a lock of the process, which other processes don't share."""
    assert "libatomic" not in output_of("readelf", "--dynamic", "--wide", path)
    undefined = output_of("nm", "--dynamic", "--undefined-only", path)
    assert "PyModuleDef_Init" in undefined, "nm lists undefined symbols"
    for name in ("__atomic_", "__sync_", "__aarch64_"):
        assert name not in undefined


@pytest.mark.parametrize(
    "name",
    [
        *("bucketed_window", "cell_limiter", "concurrency", "leaky_bucket", "min_interval", "sliding_log", "table"),
        *("token_bucket", "window"),
    ],
)
def test_hot_modules_swap_cells_in_one_instruction(name: str) -> None:
    assert CAS128 in " ".join(output_of("objdump", "--disassemble", "--no-show-raw-insn", module(name)).split())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name.split(".")[0])
def test_module_exports_only_its_init_function(path: Path) -> None:
    defined = output_of("nm", "--dynamic", "--defined-only", path).split()[2::3]
    assert defined == [f"PyInit_{path.name.split('.')[0]}"]
