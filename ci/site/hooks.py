"""What MkDocs does beside its configuration: pages from outside docs/, links between files, and names as links.

A link whose text is a page's file name shows its title. Where a page first has a public name, the name links to its
entry in the reference; where it first has a file of the repository, the file's name links to it.

A link on a page is relative to its file, as on GitHub. On the site it leads to the target's page if it has one, else to
the file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from public_names import public_paths
from titles import title_of

ROOT: Final = Path(__file__).resolve().parents[2]

# Files of the repository whose place on the site is not the one below docs/.
PLACES: Final = {
    "README.md": "index.md",
    "docs/README.md": "map.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks-method.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
ORIGINS: Final = {place: file for file, place in PLACES.items()}

ENTRIES: Final = public_paths()
FOLDERS: Final = ("benchmarks/", "ci/", "examples/", "native/", "src/", "tests/")
# A heading, a text that has a link already, or a name or file in backquotes.
CODE: Final = re.compile(r"^#.*$|\[[^]]*\]|(?<!`)`([A-Z]\w+|[\w.-]+/[\w./-]*[\w-])`(?!`)", re.MULTILINE)
FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE_NAME: Final = re.compile(r"\[(?:docs/)?([\w-]+)\.md\]\((?=(?:docs/)?\1\.md)")
LINK: Final = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)]+)?)\)")


def on_files(files: Files, config: Any) -> Files:
    files.remove(files.src_uris["README.md"])
    for place, file in ORIGINS.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def on_site(link: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, link[1]))
        place = PLACES.get(file, file.removeprefix("docs/"))
        if place in files.src_uris and (file in PLACES or file.startswith("docs/")):
            return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[2]})"
        if (ROOT / file).exists():
            return f"]({config.repo_url}/blob/main/{file}{link[2]})"
        return link[0]

    linked = set()

    def with_link(found: re.Match[str]) -> str:
        code = found[1]
        if not code or code in linked:
            return found[0]
        linked.add(code)
        if code in ENTRIES:
            return f"[`{code}`][{ENTRIES[code]}]"
        for file in (code, posixpath.join(folder, code)):
            if file.startswith(FOLDERS) and (ROOT / file).exists():
                return f"[`{code}`]({config.repo_url}/blob/main/{file})"
        return found[0]

    parts, position = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        text = LINK.sub(on_site, markdown[position : fence.start() if fence else None])
        text = FILE_NAME.sub(lambda found: f"[{title_of(found[1])}](", text)
        parts += [CODE.sub(with_link, text), fence[0] if fence else ""]
        position = fence.end() if fence else position
    return "".join(parts)
