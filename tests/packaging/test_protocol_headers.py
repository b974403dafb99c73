"""The protocol headers: every function, field, constant, file and explorer program that they name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "src").rglob("*.p*") if p.suffix in {".py", ".pyx", ".pxd"})
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"#.*")
TRANSITIONS = re.compile(r"^Transitions.*?(?=^Invariant$)", re.MULTILINE | re.DOTALL)


def header_of(path: Path) -> str:
    found = DOCSTRING.match(path.read_text())
    return found[1] if found else ""


HEADERS = [path for path in SOURCES if re.search(r"^Transitions", header_of(path), re.MULTILINE)]


@pytest.fixture(scope="module")
def identifiers() -> set[str]:
    """All names in the code; those in docstrings and comments alone don't count."""
    texts = (COMMENT.sub("", DOCSTRING.sub("", path.read_text())) for path in SOURCES)
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}


@pytest.fixture(scope="module")
def programs() -> set[str]:
    """The programs of the explorer, from the sources: their modules import only in the explorer's build."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests" / "interleaving").glob("*scenes.py"))
    tables = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Dict))
    keys = (key for table in tables for key in table.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def unknown_names(header: str, identifiers: set[str], programs: set[str]) -> Iterator[str]:
    text = " ".join(header.split())
    quoted = re.findall(r"(?<!`)``?([A-Za-z_][\w.]*)``?(?!`)", text) + re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text)
    yield from (name for name in quoted if not set(name.split(".")) <= identifiers)
    for section in TRANSITIONS.findall(header):
        yield from (name for name in re.findall(r'"([^"]+)"', " ".join(section.split())) if name not in programs)
    for name in re.findall(r"[\w/]+\.(?:py|pyx|pxd|md|lua)\b", text):
        if not (ROOT / name).exists() and not any(path.match(name) for path in SOURCES):
            yield name


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_protocol_header_names_existing_things(path: Path, identifiers: set[str], programs: set[str]) -> None:
    assert not list(unknown_names(header_of(path), identifiers, programs))


@pytest.mark.parametrize("section", ["State", "Transitions", "Invariant", "Proof", "Crash and stall", "Not handled"])
@pytest.mark.parametrize("path", HEADERS, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_protocol_header_has_every_section(path: Path, section: str) -> None:
    assert re.search(rf"^{section}.*\n-+$", header_of(path), re.MULTILINE)


def test_wrong_names_are_found(identifiers: set[str], programs: set[str]) -> None:
    header = """By `table_decide` and ``gcra_takes``, see CHARGED_BEFORE, CHARGED_AFTER, table.pyx and tables.pyx.

Transitions
-----------
* *help*: a request. "insertion
  by two", "insertion by two hundred"

Invariant
---------
"""
    wrong = ["gcra_takes", "CHARGED_AFTER", "insertion by two hundred", "tables.pyx"]
    assert list(unknown_names(header, identifiers, programs)) == wrong
