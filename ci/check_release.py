"""Check that the sources are those of a release: ``python ci/check_release.py v0.1.0``, with the release's tag.

The tag names the version of the package, and the changelog begins with that version and a date.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def problems(tag: str, root: Path) -> Iterator[str]:
    version = runpy.run_path(str(root / "src/forebay/_version.py"))["__version__"]
    if tag != f"v{version}":
        yield f"the tag is {tag}, but src/forebay/_version.py has {version}: the tag of that version is v{version}"
    heading = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = heading[0] if heading else "no heading"
    if not re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", found):
        yield f"CHANGELOG.md begins with {found!r}, not with '## {version} (YEAR-MONTH-DAY)'"


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} TAG", file=sys.stderr)
        return 2
    found = list(problems(sys.argv[1], ROOT))
    for problem in found:
        print(problem)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
