"""Check the imports of the package, and its use of private attributes: ``python ci/architecture.py``.

It reads every .py, .pyi, .pyx and .pxd file of src, including imports for type checking and imports in functions. It
fails if a module imports from a higher layer, if modules import each other in a circle, or if code reads an attribute
with a leading underscore of an object other than ``self`` and ``cls``. It also fails if an exception is unneeded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).parent.parent / "src"
SUFFIXES: Final = (".py", ".pyi", ".pyx", ".pxd")

# From the bottom to the top. A module belongs to the longest of these names that it begins with. It imports modules of
# that name and of lower layers only: the names of one layer do not import each other.
LAYERS: Final = (
    ("forebay._version", "forebay.c_api", "forebay.errors", "forebay.forking", "forebay.host_time"),
    ("forebay.fallback.stand_ins",),
    ("forebay._native",),
    (
        *("forebay.alive", "forebay.awaited", "forebay.extras", "forebay.flows", "forebay.headers", "forebay.names"),
        *("forebay.rate", "forebay.reporting", "forebay.seldom", "forebay.stats"),
    ),
    ("forebay.segment",),
    ("forebay.core.table",),
    ("forebay.calendars", "forebay.clock"),
    ("forebay.store_options",),
    ("forebay.holding", "forebay.store", "forebay.waiting"),
    ("forebay.core",),
    ("forebay.fallback",),
    ("forebay.own_counts",),
    ("forebay.redis", "forebay.shedding", "forebay.testing", "forebay.verification"),
    ("forebay.limits", "forebay.metrics", "forebay.snapshots", "forebay.urls", "forebay.web"),
    ("forebay.benchmarking", "forebay.contrib", "forebay.fallback.web", "forebay.rules", "forebay.tuning"),
    ("forebay.serving",),
    ("forebay.cli",),
    ("forebay",),
    ("forebay_command", "pytest_forebay"),
)

# (file, attribute): patterns, and the reason.
REACHES: Final = {
    ("forebay/awaited.pyx", "_getframe"): "the documented function of `sys`, which has no other name",
    ("forebay/fallback/awaited.py", "_getframe"): "the documented function of `sys`, which has no other name",
    ("forebay/cli/serve.py", "_exit"): "the documented function of `os`, which has no other name",
    ("forebay/core/c_api/functions.pyx", "_C_API"): "the name of the capsule, which its users import it by",
    ("forebay/contrib/rest_framework.py", "_request"): "Django's request in REST framework's, which has no other name",
    ("forebay/redis/operations.py", "_is_coroutine"): "the mark of coroutine functions before Python 3.12",
}

DOCSTRING: Final = re.compile(r'"""(?:.|\n)*?"""')
FROM: Final = re.compile(r"^[ \t]*from\s+([\w.]+)\s+c?import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
IMPORT: Final = re.compile(r"^[ \t]*c?import\s+([^\n]*)", re.MULTILINE)
COMMENT: Final = re.compile(r"#[^\n]*")
REACH: Final = re.compile(r"(?<!\bself)(?<!\bcls)\.(_(?!_)\w+)")


class Import(NamedTuple):
    importer: str
    imported: str
    path: Path


def main() -> int:
    modules = dict(all_modules())
    problems = [*import_problems(list(all_imports(modules))), *reach_problems(modules)]
    for problem in problems:
        print(problem)
    return bool(problems)


def all_modules() -> Iterator[tuple[str, list[Path]]]:
    """Each module's name and its files."""
    files: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix in SUFFIXES:
            parts = path.relative_to(SOURCE).with_suffix("").parts
            files.setdefault(".".join(part for part in parts if part != "__init__"), []).append(path)
    yield from files.items()


def code_of(path: Path) -> str:
    """The file's text without docstrings and comments, with the same lines."""
    text = DOCSTRING.sub(lambda found: '""' + "\n" * found[0].count("\n"), path.read_text())
    return COMMENT.sub("", text)


def all_imports(modules: dict[str, list[Path]]) -> Iterator[Import]:
    for importer, paths in modules.items():
        for path in paths:
            code = code_of(path)
            names = [name.split()[0] for line in IMPORT.findall(code) for name in line.split(",")]
            for origin, listed in FROM.findall(code):
                found = (f"{origin}.{name}" for name in re.findall(r"(\w+)(?:\s+as\s+\w+)?", listed))
                names += [name if name in modules else origin for name in found]
            for imported in dict.fromkeys(names):
                if imported in modules and imported != importer:
                    yield Import(importer, imported, path)


def import_problems(imports: list[Import]) -> Iterator[str]:
    imported: dict[str, set[str]] = {}
    for one in imports:
        imported.setdefault(one.importer, set()).add(one.imported)
        (below, own), (level, name) = layer_of(one.importer), layer_of(one.imported)
        if level > below or (level == below and name != own):
            yield f"{one.path.relative_to(SOURCE)}: imports {one.imported}, which is not in a lower layer"
    for circle in circles(imported):
        yield f"a circle of imports: {' -> '.join(circle)}"


def layer_of(module: str) -> tuple[int, str]:
    """The number of the module's layer and its name there."""
    names = ((level, name) for level, names in enumerate(LAYERS) for name in names)
    return max(
        ((level, name) for level, name in names if f"{module}.".startswith(f"{name}.")), key=lambda found: len(found[1])
    )


def circles(imports: dict[str, set[str]]) -> Iterator[list[str]]:
    """A circle through each module that has one and is in none of those before."""
    seen: set[str] = set()
    for start in sorted(imports):
        paths = [[start]]
        reached = set(seen)
        while paths:
            path = paths.pop(0)
            for imported in sorted(imports.get(path[-1], set())):
                if imported == start:
                    yield [*path, start]
                    seen.update(path)
                    paths.clear()
                    break
                if imported not in reached:
                    reached.add(imported)
                    paths.append([*path, imported])


def reach_problems(modules: dict[str, list[Path]]) -> Iterator[str]:
    used = set()
    for path in (path for paths in modules.values() for path in paths):
        file = str(path.relative_to(SOURCE))
        for line, attribute in reaches(path):
            exception = next((pair for pair in REACHES if matches(pair, file, attribute)), None)
            if exception:
                used.add(exception)
            else:
                yield f"{file}:{line}: reads {attribute} of another object"
    yield from (f"ci/architecture.py: no attribute needs the exception {pair}" for pair in REACHES.keys() - used)


def reaches(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute of another object."""
    if path.suffix in (".pyx", ".pxd"):
        for number, line in enumerate(code_of(path).splitlines(), 1):
            yield from ((number, attribute) for attribute in REACH.findall(line))
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield node.lineno, node.attr


def matches(patterns: tuple[str, str], first: str, second: str) -> bool:
    return fnmatchcase(first, patterns[0]) and fnmatchcase(second, patterns[1])


if __name__ == "__main__":
    sys.exit(main())
