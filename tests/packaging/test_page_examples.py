"""The examples of pages that need stand-ins around them: each is run."""

from __future__ import annotations

import asyncio
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import flask
import flask_limiter.util
import httpx
import pytest
import slowapi
from fastapi import FastAPI
from starlette.middleware.authentication import AuthenticationMiddleware

from forebay import Store
from forebay.testing import ManualClock, private_stores

COMMANDS = Path(sys.executable).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: str, heading: str = "") -> list[str]:
    """The Python of a page, or of the part under one of its headings."""
    text = (DOCS / page).read_text()
    if heading:
        text = text.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    return PYTHON.findall(text)


def run(snippet: str, names: dict[str, Any]) -> None:
    exec(snippet + ("def anything(): ...\n" if snippet.rstrip().rpartition("\n")[2].startswith("@") else ""), names)


@pytest.fixture
def stores() -> Iterator[None]:
    """Stores are private, and no time passes."""
    with private_stores(ManualClock(1000)):
        yield


@pytest.mark.parametrize("page", ["tutorial.md", "operations/capacity.md"])
def test_consoles_show_what_they_show(page: str) -> None:
    text = "\n".join(CONSOLE.findall((DOCS / page).read_text()))
    test = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    assert test.examples
    with private_stores("time"):
        assert not doctest.DocTestRunner().run(test).failed


def test_limited_application_of_the_tutorial_denies_the_sixth_request(stores: None) -> None:
    names: dict[str, Any] = {}
    run(*snippets("tutorial.md", "## A limited application"), names)
    with httpx.Client(transport=httpx.WSGITransport(names["app"]), base_url="http://127.0.0.1") as client:
        assert [client.get("/").status_code for _ in range(6)] == [200] * 5 + [429]


def test_application_of_the_page_about_shedding_sheds(stores: None) -> None:
    names: dict[str, Any] = {}
    for snippet in snippets("shedding.md"):
        run(snippet, names)
    with httpx.Client(transport=httpx.WSGITransport(names["app"]), base_url="http://127.0.0.1") as client:
        assert client.post("/orders").status_code == 200
        held = [names["fleet"].admit("default") for _ in range(80)]
        assert all(held)
        denied = client.post("/orders")
        assert denied.status_code == 503
        assert 2 <= int(denied.headers["Retry-After"]) <= 4
        assert client.post("/payments").status_code == 200


def test_outbound_clients_wait_for_their_permits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wait moves the clock: two permits at once, and three a tenth of a second apart."""
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda self, request: httpx.Response(200))
    clock = ManualClock(1000)
    with private_stores(clock):
        (page,) = snippets("outbound.md")[:1]
        run(page, {})
        limits = ModuleType("shop.limits")
        limits.store = Store("shop", keys=1_000_000)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
        monkeypatch.setitem(sys.modules, "shop.limits", limits)
        run(*snippets("tutorial.md", "### Outbound clients"), {})
    assert capsys.readouterr().out.split() == ["200"] * 5
    assert clock.now_ns() == 1_000_300_000_000


def test_tasks_of_every_queue_are_limited(stores: None) -> None:
    """Called where no queue can return them: each takes a permit of the one limit, and of those for customers."""
    limits, *queues, options = snippets("queues.md")
    names: dict[str, Any] = {"__name__": "pasted"}
    run(limits, names)
    tasks = []
    for queue in queues:
        run(queue, names)
        tasks.append(names["notify"])
    celery, rq, arq, dramatiq = tasks
    for order in range(5):
        assert celery(order) == rq(order) == asyncio.run(arq({}, order)) == f"notified the partner of order {order}"
        dramatiq(order)
    assert not names["partner"].allow("partner")
    run(options, names)
    assert names["import_rows"]("ada", 5000) == "imported 5000 rows"
    assert names["each_customer"].peek("ada").remaining == 94
    assert names["export"]("ada") == "exported the data of ada"


def test_storage_of_the_limits_library_is_found_by_its_address(stores: None) -> None:
    def limiter(*arguments: Any, **options: Any) -> Any:
        """The page shows those of two packages."""
        return (flask_limiter.Limiter if "app" in options else slowapi.Limiter)(*arguments, **options)

    names = {"Limiter": limiter, "get_remote_address": flask_limiter.util.get_remote_address}
    run(*snippets("limits.md"), names | {"app": flask.Flask("one")})
    change, with_rules = snippets("migration.md")
    run(change, names | {"app": flask.Flask("two")})
    run(with_rules, {"app": flask.Flask("three"), "store": Store("other", keys=100)})


def rule_files(folder: Path) -> None:
    """The two files of rules.md, in a folder."""
    page = (DOCS / "rules.md").read_text()
    for language in ("toml", "yaml"):
        found = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert found is not None
        (folder / f"limits.{language}").write_text(found[1])


@pytest.mark.parametrize("file", ["limits.toml", "limits.yaml"])
def test_application_of_the_rules_page_has_its_limits(
    stores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    rule_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippet, *_ = snippets("rules.md")
    run(snippet.replace("limits.toml", file), names)

    def statuses(method: str, path: str, client: str, count: int, **headers: str) -> list[int]:
        transport = httpx.WSGITransport(names["app"], remote_addr=client)
        with httpx.Client(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            return [http.request(method, path).status_code for _ in range(count)]

    assert statuses("GET", "/api/x", "192.0.2.1", 21) == [200] * 20 + [429]
    assert statuses("GET", "/api/x", "192.0.2.1", 1, **{"X-API-Key": "made up"}) == [429]
    assert statuses("GET", "/api/x", "192.0.2.1", 21, **{"X-API-Key": "secret-of-ada"}) == [200] * 21
    assert statuses("GET", "/api/x", "192.0.2.1", 21, **{"X-API-Key": "secret-of-ci"}) == [200] * 21
    assert statuses("POST", "/login", "192.0.2.1", 9) == [200] * 9  # no status of charge_on
    assert statuses("POST", "/login", "203.0.113.9", 2) == [403] * 2
    assert statuses("POST", "/login", "198.51.100.7", 9) == [200] * 9
    assert statuses("GET", "/reports/7", "192.0.2.1", 4) == [200] * 4


def test_live_rules_of_the_rules_page_follow_their_file(
    stores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "limits.toml"
    canary = re.findall(r"^```toml\n(.*?)^```$", (DOCS / "rules.md").read_text(), re.MULTILINE | re.DOTALL)[-1]
    limit = '[limits.{}]\nalgorithm = "fixed-window"\nrate = "3/hour"\n'
    path.write_text("version = 1\n" + limit.format("api") + limit.format("api-new") + canary)
    (snippet,) = snippets("rules.md", "## Live rules")

    def application(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b""]

    names: dict[str, Any] = {"hello": application, "plan": lambda request: "free"}
    run(snippet.replace("/etc/shop/limits.toml", str(path)), names)
    with httpx.Client(transport=httpx.WSGITransport(names["app"]), base_url="http://127.0.0.1") as http:
        assert [http.get("/").status_code for _ in range(4)] == [200] * 3 + [429]
    names = {}
    (snippet,) = snippets("rules.md", "## Shadow and canary")
    run(snippet, names)
    assert len(names["rules"]) == 2


def test_commands_of_the_rules_page_print_what_it_shows(tmp_path: Path) -> None:
    rule_files(tmp_path)
    blocks = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", (DOCS / "rules.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for command, printed in blocks:
        program, *arguments = shlex.split(command)
        result = subprocess.run(
            [Path(sys.executable).parent / program, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout == printed


FRAMEWORKS = {
    "## Flask": {"g": flask.g, "render_template": flask.render_template},
    "## FastAPI and Starlette": {"AuthenticationMiddleware": AuthenticationMiddleware},
    "## aiohttp": {},
}


@pytest.mark.parametrize("heading", FRAMEWORKS)
def test_frameworks_take_the_rules(heading: str, stores: None) -> None:
    names: dict[str, Any] = {"__name__": "pasted", **FRAMEWORKS[heading]}
    run(snippets("frameworks.md")[0], names)
    found = snippets("frameworks.md", heading)
    assert found
    for snippet in found:
        if snippet.startswith("setup(app)"):
            names["app"] = FastAPI()
        run(snippet, names)


def test_django_takes_the_settings_and_limits_the_views(tmp_path: Path) -> None:
    """In a project of its own, as Django has one for each process."""
    (limits, *_), (settings, views) = snippets("frameworks.md"), snippets("frameworks.md", "## Django")
    (throttles,) = snippets("frameworks.md", "## Django REST framework")
    shop = tmp_path / "shop"
    shop.mkdir()
    subprocess.run([sys.executable, "-P", "-m", "django", "startproject", "shop", "."], cwd=tmp_path, check=True)
    (shop / "limits.py").write_text(limits)
    with (shop / "settings.py").open("a") as file:
        file.write(f"before = {{'MIDDLEWARE': MIDDLEWARE, 'INSTALLED_APPS': INSTALLED_APPS}}\n{settings}\n{ELLIPSES}\n")
        file.write(f"rules = FOREBAY\n{throttles}\nFOREBAY |= rules\n")
    (shop / "views.py").write_text(views)
    (tmp_path / "check.py").write_text(CHECK_OF_DJANGO)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    result = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "True True"


# The page's `...` are the settings that are there already.
ELLIPSES = """
for name, there in before.items():
    globals()[name] = list(dict.fromkeys([*there, *(entry for entry in globals()[name] if entry is not ...)]))
"""

CHECK_OF_DJANGO = """
from forebay.testing import ManualClock, private_stores

with private_stores(ManualClock(1000)):
    import django
    from django.core.management import call_command
    from django.test import RequestFactory

    django.setup()
    call_command("check")
    import shop.views
    from django.contrib.auth.models import AnonymousUser
    from rest_framework.settings import api_settings
    from rest_framework.views import APIView

    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    request = APIView().initialize_request(request)
    print(*(throttle().allow_request(request, None) for throttle in api_settings.DEFAULT_THROTTLE_CLASSES))
"""


def test_examples_for_tests_pass_as_tests(tmp_path: Path) -> None:
    alone, fixtures, conftest = snippets("testing.md")
    run(alone, {})
    (tmp_path / "shop.py").write_text("from forebay import Store\n\nstore = Store('shop', keys=100)\n")
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_shop.py").write_text(fixtures)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout
