"""Titles of pages, for links whose text is a file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"


def title_of(page: str) -> str:
    """The heading of the page ``docs/{page}.md``."""
    with (DOCS / f"{page}.md").open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
