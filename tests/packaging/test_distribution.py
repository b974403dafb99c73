"""The sdist builds on every supported platform, and the wheel needs no other package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import forebay

ROOT = Path(__file__).resolve().parents[2]
# ci/environment puts the built and installed files there.
DIST = Path(sys.prefix) / "dist"


@pytest.fixture
def sdist_names() -> list[str]:
    (sdist,) = DIST.glob("forebay-*.tar.gz")
    with tarfile.open(sdist) as archive:
        return [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]


@pytest.fixture
def wheel_names() -> list[str]:
    (wheel,) = DIST.glob("forebay-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def sources(*patterns: str) -> set[str]:
    """The package's sources. A distribution omits sources of special builds for proofs."""
    found = (path for folder in ("src", "native") for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    names = {str(path.relative_to(ROOT)) for path in found}
    return {name for name in names if not name.startswith(("native/interleave/", "native/sanitize/", "native/server/"))}


def test_installed_package_is_the_one_under_test() -> None:
    assert Path(forebay.__file__).is_relative_to(sys.prefix)


def test_sdist_has_every_source_and_no_generated_file(sdist_names: list[str]) -> None:
    assert sources("*.py", "*.pyx", "*.pxd", "*.pyi", "*.lua", "*.h", "*.toml") <= set(sdist_names)
    assert not [name for name in sdist_names if name.endswith((".c", ".so", ".o"))]


def test_wheel_has_stubs_modules_and_only_python_sources(wheel_names: list[str]) -> None:
    modules = {str(Path(name).relative_to("src").with_suffix("")) for name in sources("*.pyx")}
    # One module is Cython's own code, which the others share.
    assert {name.split(".")[0] for name in wheel_names if name.endswith(".so")} == modules | {"forebay/cython_utility"}
    stubs = {str(Path(name).relative_to("src").with_suffix(".pyi")) for name in sources("*.pyx")}
    assert stubs <= set(wheel_names)
    assert {"forebay/py.typed", "forebay/include/forebay.h", "forebay/c_api.pxd"} <= set(wheel_names)
    scripts = {str(Path(name).relative_to("src")) for name in sources("*.lua")}
    assert scripts
    assert scripts <= set(wheel_names)
    assert [name for name in wheel_names if name.endswith(".pxd")] == ["forebay/c_api.pxd"]
    assert not [name for name in wheel_names if name.endswith((".c", ".pyx"))]
    modules = {str(Path(name).relative_to("src")) for name in sources("*.py") if name.startswith("src/")}
    assert modules - set(wheel_names) == {name for name in modules if name.startswith("forebay/fallback/")}


def test_wheel_with_the_compiled_core_refuses_to_run_as_the_fallback() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import forebay"],
        capture_output=True,
        text=True,
        env={**os.environ, "FOREBAY_FALLBACK": "1"},
    )
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: FOREBAY_FALLBACK is 1, and this forebay has the compiled core, but no")
    assert "FOREBAY_FALLBACK=1 pip install --force-reinstall --no-binary forebay forebay" in error


def test_readme_has_whole_addresses_in_the_metadata() -> None:
    description = metadata.metadata("forebay")["Description"] or ""
    addresses = re.findall(r"\]\(([^)]*)\)", description)
    assert len(addresses) == len(re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text())) > 0
    (source,) = (url for url in metadata.metadata("forebay").get_all("Project-URL") or [] if url.startswith("Source, "))
    files = [address.removeprefix(f"{source.removeprefix('Source, ')}/") for address in addresses]
    assert all((ROOT / re.sub("^(raw|blob)/main/", "", file)).exists() for file in files), files


def test_base_install_has_no_dependencies() -> None:
    assert not [need for need in metadata.requires("forebay") or [] if "extra ==" not in need]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("platform.machine = lambda: 'riscv64'", "not riscv64"),
        ("sys.maxsize = 2**31 - 1", "supports 64-bit Linux"),
        ("sys.implementation.name = 'pypy'", "supports CPython on Linux, not pypy"),
    ],
)
def test_unsupported_platform_fails_with_one_clear_line(change: str, expected: str) -> None:
    result = run_setup(change)
    assert result.returncode == 1
    assert expected in result.stderr
    assert "FOREBAY_FALLBACK=1" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "modules"),
    [
        ("pass", "some"),
        ("os.environ['FOREBAY_FALLBACK'] = '1'", "none"),
        ("sys.platform = 'darwin'", "none"),
        ("sys.platform = 'win32'; platform.machine = lambda: 'AMD64'", "none"),
    ],
)
def test_modules_are_compiled_on_linux_unless_the_fallback_is_asked_for(change: str, modules: str) -> None:
    left_out = [] if modules == "some" else ["forebay"]
    assert run_setup(change).stdout == f"{modules} {left_out}\n"


def run_setup(change: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py after a change; print whether it has modules to compile, and of which packages it leaves out files.

    Some environments lack setuptools.
    """
    stand_ins = (
        "show = lambda ext_modules, exclude_package_data, **others: "
        "print('some' if ext_modules else 'none', list(exclude_package_data)); "
        "extension = lambda *args, **kwargs: types.SimpleNamespace(); "
        "sys.modules['setuptools'] = types.SimpleNamespace(Extension=extension, setup=show); "
        "sys.modules['setuptools.command.build_ext'] = types.SimpleNamespace(build_ext=object); "
        "sys.modules['setuptools.command.build_py'] = types.SimpleNamespace(build_py=object)"
    )
    # The standard library chooses its own modules by the platform, too: that which setup.py imports comes first.
    program = f"import os, platform, runpy, sys, tempfile, types; {stand_ins}; {change}; runpy.run_path('setup.py')"
    environment = {name: value for name, value in os.environ.items() if name != "FOREBAY_FALLBACK"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env={**environment, "LC_ALL": "C"}
    )


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [
        ("/nonexistent/cc -pthread", "the C compiler /nonexistent/cc can't run: No such file or directory"),
        ("gcc", "the C compiler gcc can't run: No such file or directory"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "can't compile: exit 3"),
    ],
)
def test_build_without_a_compiler_names_the_packages_before_cython_runs(
    tmp_path: Path, compiler: str, problem: str
) -> None:
    """Wherever Cython ran before, it would write its output anew."""
    pytest.importorskip("Cython")
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    environment = {**os.environ, "CC": compiler, "PATH": str(tmp_path), "LC_ALL": "C"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert problem in result.stderr
    for system in ("Debian", "Fedora", "Alpine"):
        assert system in result.stderr
    assert not list(tmp_path.iterdir())


def test_header_refuses_an_unsupported_platform(tmp_path: Path) -> None:
    source = tmp_path / "elsewhere.c"
    source.write_text('#include "forebay/platform.h"\n')
    command = ["cc", "-fsyntax-only", f"-I{ROOT / 'native' / 'include'}", str(source)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    result = subprocess.run([*command, "-U__linux__"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "forebay supports 64-bit Linux on x86-64 and aarch64 only" in result.stderr
