"""Copy the docstrings of the compiled public classes into their stubs, as editors and the reference show stubs.

Without arguments it writes the stubs from the installed package; with ``--check`` it fails if they differ.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import forebay
import forebay.web

STUBS = Path(__file__).parents[1] / "src"
PUBLIC = [getattr(package, name) for package in (forebay, forebay.web) for name in package.__all__]


def stub_of(kind: type) -> Path:
    return STUBS / f"{kind.__module__.replace('.', '/')}.pyi"


CLASSES = {base for kind in PUBLIC if inspect.isclass(kind) for base in kind.__mro__ if stub_of(base).exists()}


def text_of(thing: object) -> str | None:
    text = getattr(thing, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) and text else None


def wanted(kind: type, node: ast.ClassDef) -> list[tuple[ast.ClassDef | ast.FunctionDef, str | None]]:
    """Each definition in a class's stub, and the class itself, with the docstring that it should have."""
    found: list[tuple[ast.ClassDef | ast.FunctionDef, str | None]] = [(node, text_of(kind))]
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
            own = kind.__dict__.get(inner.name)
            found.append((inner, text_of(getattr(own, "__func__", own))))
    return found


def replaced(lines: list[str], node: ast.ClassDef | ast.FunctionDef, text: str) -> None:
    first = node.body[0]
    quoted = f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
    new = textwrap.indent(quoted, " " * (node.col_offset + 4)).split("\n")
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        lines[first.lineno - 1 : first.end_lineno] = new
    elif isinstance(node, ast.FunctionDef):
        head = lines[first.lineno - 1][: first.col_offset].rstrip()
        lines[first.lineno - 1 : first.lineno] = [head, *new] if head else new
    else:
        begin = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))])
        lines[begin - 1 : begin - 1] = new


def main(check: bool) -> int:
    differing = []
    for path in sorted({stub_of(kind) for kind in CLASSES}):
        stub = path.read_text(encoding="utf-8")
        lines = stub.split("\n")
        kinds = {kind.__name__: kind for kind in CLASSES if stub_of(kind) == path}
        nodes = [node for node in ast.parse(stub).body if isinstance(node, ast.ClassDef) and node.name in kinds]
        pairs = [pair for node in nodes for pair in wanted(kinds[node.name], node)]
        for node, text in reversed(pairs):
            if text is not None and ast.get_docstring(node) != text:
                differing.append(f"{path.name}: {node.name}")
                replaced(lines, node, text)
        if not check:
            path.write_text("\n".join(lines), encoding="utf-8")
    if check and differing:
        print(f"differs from the compiled docstrings: {', '.join(differing)}; run {sys.argv[0]}")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
