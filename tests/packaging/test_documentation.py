"""The pages: links and paths lead to files, prose is wrapped, and snippets import existing names."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forebay.testing import ManualClock, private_stores

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for folder in ("", "docs", "examples", "benchmarks") for path in (ROOT / folder).glob("*.md"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:benchmarks|ci|docs|examples|native|src|tests)/[^`\s]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


def headings(page: Path) -> set[str]:
    """The page's headings, as anchors."""
    found = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for file, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in headings(target), f"{file}#{anchor}"


@every_page
def test_files_exist(page: Path) -> None:
    for pattern in FILE.findall(BLOCK.sub("", page.read_text())):
        assert list(ROOT.glob(pattern)), pattern


@every_page
def test_prose_fits_into_100_columns(page: Path) -> None:
    lines = BLOCK.sub("", page.read_text()).splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))]


@every_page
def test_snippets_import_existing_names(page: Path) -> None:
    for language, text in BLOCK.findall(page.read_text()):
        if language != "python":
            continue
        # A snippet may end with a decorator.
        for node in ast.walk(ast.parse(f"{text}\ndef anything(): ...")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "forebay":
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


def test_celery_quick_start_retries_once_when_its_permit_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks and their retries run at once, in this process, and no time passes: another permit would never be free."""
    page = (ROOT / "docs/tutorial.md").read_text()
    snippets = [BLOCK.findall(page.partition(heading)[2])[0][1] for heading in ("## Quick starts\n", "### Celery\n")]
    limits = ModuleType("shop.limits")
    monkeypatch.setitem(sys.modules, "shop.limits", limits)
    with private_stores(ManualClock(1000)):
        exec(snippets[0], vars(limits))
        names: dict[str, Any] = {"__name__": "shop.tasks"}
        exec(snippets[1], names)
        names["app"].conf.task_always_eager = True
        notify, countdowns = names["notify"], []
        retry = notify.retry

        def retry_after(args: tuple[Any, ...], countdown: float) -> BaseException:
            countdowns.append(countdown)
            error: BaseException = retry(args=args, countdown=countdown)
            return error

        monkeypatch.setattr(notify, "retry", retry_after)
        results = [notify.delay(order).get() for order in range(4)]
    assert results == [f"notified the partner of order {order}" for order in range(4)]
    assert countdowns == [0.1, 0.2]
