"""Check that the sources are those of a release: ``python ci/check_release.py v0.1.0``, with the release's tag.

The tag names the version of the package, the changelog begins with that version and a date, and the decision server
has the version, too.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
OF_THE_SERVER: Final = {
    "native/server/Cargo.toml": '^version = "(.*)"$',
    "native/server/pyproject.toml": r'"forebay\[.*\]==(.*)"',
    "pyproject.toml": '"forebay-server==(.*)"',
}
"""The version of both distributions in other files."""


def problems(tag: str, root: Path) -> Iterator[str]:
    version = runpy.run_path(str(root / "src/forebay/_version.py"))["__version__"]
    if tag != f"v{version}":
        yield f"the tag is {tag}, but src/forebay/_version.py has {version}: the tag of that version is v{version}"
    heading = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = heading[0] if heading else "no heading"
    if not re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", found):
        yield f"CHANGELOG.md begins with {found!r}, not with '## {version} (YEAR-MONTH-DAY)'"
    for name, pattern in OF_THE_SERVER.items():
        versions = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if versions != [version]:
            yield f"{name} has {' and '.join(versions) or 'no version'} for the decision server, not {version}"


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
