"""The pages: links and paths lead to files, prose is wrapped, and snippets import existing names.

Some are run here, the others in test_page_examples.py, test_c_api_examples.py and tests/redis/test_redis_pages.py.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from forebay import LimitExceeded
from forebay.testing import ManualClock, private_stores

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("", "docs", "docs/operations", "docs/reference", "examples", "benchmarks")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
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


def python_snippets(page: str, heading: str = "") -> list[str]:
    """The Python snippets of a page, or those under one of its headings."""
    text = (ROOT / page).read_text()
    if heading:
        text = text.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    return [snippet for language, snippet in BLOCK.findall(text) if language == "python"]


@pytest.mark.parametrize("page", ["README.md", "docs/using.md", "docs/web.md"])
def test_snippets_run_in_their_order(page: str) -> None:
    names: dict[str, Any] = {"__name__": "pasted"}
    with private_stores(ManualClock(1000)):
        for snippet in python_snippets(page):
            exec(snippet, names)


@pytest.fixture
def shop_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that all quick starts share. No time passes."""
    module = ModuleType("shop.limits")
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.limits", module)
    with private_stores(ManualClock(1000)):
        exec(*python_snippets("docs/tutorial.md", "## Quick starts"), vars(module))
        yield module


SIX = range(6)
DENIES_THE_SIXTH = [200] * 5 + [429]


@pytest.mark.parametrize("framework", ["ASGI and WSGI", "Flask"])
def test_wsgi_quick_start_denies_the_sixth_order(framework: str, shop_limits: ModuleType) -> None:
    names: dict[str, Any] = {"__name__": "shop.app"}
    exec(*python_snippets("docs/tutorial.md", f"### {framework}"), names)
    with httpx.Client(transport=httpx.WSGITransport(names["app"]), base_url="http://127.0.0.1") as client:
        assert [client.post("/orders").status_code for _ in SIX] == DENIES_THE_SIXTH


def test_fastapi_quick_start_denies_the_sixth_order(shop_limits: ModuleType) -> None:
    names: dict[str, Any] = {"__name__": "shop.app"}
    exec(*python_snippets("docs/tutorial.md", "### FastAPI"), names)

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(names["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [(await client.post("/orders")).status_code for _ in SIX]

    assert asyncio.run(statuses()) == DENIES_THE_SIXTH


def test_django_quick_start_denies_the_sixth_order(tmp_path: Path) -> None:
    """In a project of its own, as Django has one for each process."""
    (limits,) = python_snippets("docs/tutorial.md", "## Quick starts")
    settings, urls = python_snippets("docs/tutorial.md", "### Django")
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "limits.py").write_text(limits)
    # As `django-admin`, without the folder on the path: no project may have the name of a module.
    subprocess.run([sys.executable, "-P", "-m", "django", "startproject", "shop", "."], cwd=tmp_path, check=True)
    with (shop / "settings.py").open("a") as file:
        file.write(settings)
    (shop / "urls.py").write_text(urls)
    (tmp_path / "orders.py").write_text(ORDERS_OF_DJANGO)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, "orders.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "shop.settings"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert [int(status) for status in result.stdout.splitlines()[-1].split()] == DENIES_THE_SIXTH


ORDERS_OF_DJANGO = """
from forebay.testing import ManualClock, private_stores

with private_stores(ManualClock(1000)):
    import django
    from django.core.management import call_command
    from django.test import Client

    django.setup()
    call_command("check")
    client = Client(headers={"host": "127.0.0.1"})
    print(*(client.get("/orders").status_code for _ in range(6)))
"""


def test_celery_quick_start_limits_its_tasks(shop_limits: ModuleType) -> None:
    """Tasks run at once, in this process, where no queue can return a denied one."""
    names: dict[str, Any] = {"__name__": "shop.tasks"}
    exec(*python_snippets("docs/tutorial.md", "### Celery"), names)
    names["app"].conf.task_always_eager = True
    notify = names["notify"]
    results = [notify.delay(order).get() for order in range(2)]
    assert results == [f"notified the partner of order {order}" for order in range(2)]
    with pytest.raises(LimitExceeded) as raised:
        notify.delay(2).get()
    assert raised.value.retry_after == 0.1
