"""The frame and the style of a report, which is one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

__all__ = ["page_of", "table_of"]

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --grid: #d0d0d0; --pale: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --grid: #44484d; --pale: #22262b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 60em; padding: 0 1em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 0.3em 0.5em; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
th { background: var(--pale); vertical-align: bottom; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; }
text { font-size: 12px; fill: var(--ink); }
.grid { stroke: var(--grid); fill: none; }
.mark { stroke: var(--ink); stroke-dasharray: 4 3; fill: none; }
"""


def page_of(title: str, body: Iterable[str]) -> str:
    """The page. The parts of `body` are HTML, in which all text is escaped already."""
    lines = "\n".join([f"<h1>{escape(title)}</h1>", *body])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{lines}\n</body></html>\n"
    )


def table_of(headings: Iterable[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table. A heading is a text and its explanation, which may be empty."""
    heads = "".join(
        f'<th title="{escape(what)}">{escape(name)}</th>' if what else f"<th>{escape(name)}</th>"
        for name, what in headings
    )
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'
