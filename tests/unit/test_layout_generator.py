"""The layout has one definition; the generator detects drift in the files that it generates."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.segment import layout

ROOT = Path(__file__).parents[2]
GENERATED = ["native/include/forebay/layout.h", "src/forebay/segment/layout.py", "docs/segment-format.md"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the definition, the generator and the generated files."""
    for name in ("native/layout.toml", "native/generate_layout.py", *GENERATED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def generate(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "native" / "generate_layout.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_generated_files_match_the_definition() -> None:
    done = generate(ROOT, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_changed_definition_is_drift_in_all_three_files(tree: Path) -> None:
    assert generate(tree, "--check").returncode == 0
    before = {name: (tree / name).read_text() for name in GENERATED}
    replace(tree / "native" / "layout.toml", "LAYOUT_VERSION = { value = ", "LAYOUT_VERSION = { value = 9")
    done = generate(tree, "--check")
    assert done.returncode == 1
    for name in GENERATED:
        assert f"{name} differs from native/layout.toml" in done.stdout
    # A check writes nothing; a run writes, and then there is no drift.
    assert {name: (tree / name).read_text() for name in GENERATED} == before
    assert generate(tree).returncode == 0
    assert generate(tree, "--check").returncode == 0
    assert {name: (tree / name).read_text() for name in GENERATED} != before


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_changed_by_hand_is_drift(tree: Path, name: str) -> None:
    replace(tree / name, "MAX_LOG_LIMIT", "MAX_LOG_LIMITS")
    done = generate(tree, "--check")
    assert done.returncode == 1
    assert done.stdout.count("differs from") == 1
    assert name in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('{ name = "tag", type = "u64"', '{ name = "tag", type = "u32"', "Cell"),
        ("size = 16\n", "size = 24\n", "Cell"),
        ('{ name = "checksum", type = "u32"', '{ name = "checksum", type = "u8"', "state"),
    ],
    ids=["narrower", "larger", "misaligned"],
)
def test_contradictory_definition_is_refused(tree: Path, old: str, new: str, complaint: str) -> None:
    replace(tree / "native" / "layout.toml", old, new)
    for options in ([], ["--check"]):
        done = generate(tree, *options)
        assert done.returncode == 1
        assert complaint in done.stderr


def test_installed_package_has_the_defined_layout() -> None:
    assert Path(layout.__file__).read_text() == (ROOT / "src" / "forebay" / "segment" / "layout.py").read_text()
    assert layout.CELL.size == 16
    assert layout.COUNTER_LINE.size == 64
    assert layout.TABLE_OFFSET % 64 == layout.COUNTERS_OFFSET % 64 == 0
