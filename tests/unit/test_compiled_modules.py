"""Machine code and symbols of the compiled modules of the installed package."""

from __future__ import annotations

import importlib
import inspect
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


def name_of(path: Path) -> str:
    """``core/limiter`` for the module ``forebay.core.limiter``."""
    return str(path.relative_to(PACKAGE).with_name(path.name.split(".")[0]))


def test_tests_run_against_an_installed_package() -> None:
    source = Path(__file__).parents[2] / "src"
    assert source not in PACKAGE.parents
    sources = (source / "forebay").rglob("*.pyx")
    expected = {str(path.relative_to(source / "forebay").with_suffix("")) for path in sources} | {"cython_utility"}
    assert {name_of(path) for path in MODULES} == expected
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
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
        *("c_api/decisions", "c_api/leases", "cell_limiter", "table/table"),
        *("algorithms/bucketed_window", "algorithms/concurrency", "algorithms/leaky_bucket", "algorithms/min_interval"),
        *("algorithms/sliding_log", "algorithms/token_bucket", "algorithms/window"),
    ],
)
def test_hot_modules_swap_cells_in_one_instruction(name: str) -> None:
    (module,) = [path for path in MODULES if name_of(path) == f"core/{name}"]
    assert CAS128 in " ".join(output_of("objdump", "--disassemble", "--no-show-raw-insn", module).split())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_exports_only_its_init_function(path: Path) -> None:
    defined = output_of("nm", "--dynamic", "--defined-only", path).split()[2::3]
    assert defined == [f"PyInit_{path.name.split('.')[0]}"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_leaves_its_docstring_in_the_source(path: Path) -> None:
    """setup.py takes it out of the code that Cython has made, and so it finds there what it looks for."""
    name = f"forebay.{name_of(path).replace('/', '.')}"
    assert importlib.import_module(name).__doc__ is None


def test_public_methods_keep_their_docstrings_and_signatures() -> None:
    assert (forebay.TokenBucket.hit.__doc__ or "").startswith("Charge `cost` permits")
    assert list(inspect.signature(forebay.TokenBucket.hit).parameters)[:3] == ["self", "key", "cost"]
    assert list(inspect.signature(forebay.TokenBucket).parameters)[:3] == ["store", "name", "rate"]
