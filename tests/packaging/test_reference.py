"""Pages and examples import public names only. `ci/docs` checks that these have docstrings and entries."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = set(runpy.run_path(str(ROOT / "ci/site/public_names.py"))["public_names"]())


def names_imported_on_pages() -> set[str]:
    pages = [path for folder in ("", "docs", "examples") for path in (ROOT / folder).glob("*.md")]
    texts = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)]
    # A snippet may end with a decorator.
    trees = [ast.parse(f"{text}\ndef anything(): ...") for text in texts]
    trees += [ast.parse(path.read_text()) for path in (ROOT / "examples").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = [node for node in nodes if (node.module or "").partition(".")[0] == "forebay"]
    return {f"{node.module}.{name.name}" for node in modules for name in node.names}


def test_pages_and_examples_import_only_public_names() -> None:
    imported = names_imported_on_pages()
    assert "forebay.TokenBucket" in imported
    assert imported <= PUBLIC, imported - PUBLIC
