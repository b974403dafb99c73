"""The examples of the pages for operators: units, directories, Compose files, manifests and the stores in them."""

from __future__ import annotations

import configparser
import grp
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import forebay
from forebay import Store
from forebay.testing import ManualClock, private_stores

PAGES = Path(__file__).resolve().parents[2] / "docs/operations"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URLS = re.compile(r"(?:shm|leased\+redis)://\S+")


def blocks(page: str, language: str) -> list[str]:
    found = [text for name, text in BLOCK.findall((PAGES / page).read_text()) if name == language]
    assert found, f"{page} has no {language!r}"
    return found


@pytest.fixture
def stores() -> Iterator[None]:
    with private_stores(ManualClock(1000)):
        yield


def directory_of(url: str) -> str:
    """Where the store of a URL is."""
    found = re.search(r"directory=([^&]+)", url)
    return found[1] if found else "/dev/shm"


@pytest.mark.parametrize("page", ["places.md", "systemd.md"])
def test_options_of_stores_are_taken(page: str, stores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = grp.getgrgid(0)
    monkeypatch.setattr(grp, "getgrnam", lambda name: group)
    for snippet in blocks(page, "python"):
        exec(snippet, {"Store": Store})


@pytest.mark.parametrize(
    ("page", "language"), [("containers.md", "yaml"), ("kubernetes.md", "yaml"), ("systemd.md", "ini")]
)
def test_urls_name_a_store(page: str, language: str, stores: None) -> None:
    urls = {url for text in blocks(page, language) for url in URLS.findall(text)}
    assert urls
    for url in urls:
        forebay.connect(url).close()


@pytest.mark.parametrize("page", ["places.md", "systemd.md"])
def test_units_keep_the_directory_of_their_store(page: str) -> None:
    for text in blocks(page, "ini"):
        unit = configparser.ConfigParser(strict=True, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(text)
        service = unit["Service"]
        assert service["RuntimeDirectoryPreserve"] == "yes"
        for url in URLS.findall(service.get("Environment", "")):
            assert directory_of(url) == f"/run/{service['RuntimeDirectory']}"


def test_directory_of_tmpfiles_is_that_of_the_store() -> None:
    (text,) = blocks("systemd.md", "")
    kind, path, mode, user, group, age = text.splitlines()[1].split()
    assert (kind, user, group, age) == ("d", "root", "shop", "-")
    assert int(mode, 8) & 0o7 == 0
    assert f'directory="{path}", mode=0o660, group="{group}"' in blocks("systemd.md", "python")[-1]


def test_services_of_compose_share_one_volume_of_their_user() -> None:
    (text,) = blocks("containers.md", "yaml")
    compose = yaml.safe_load(text)
    options = compose["volumes"]["limits"]["driver_opts"]
    assert options["type"] == options["device"] == "tmpfs"
    assert "mode=0700" in options["o"]
    places = set()
    for service in compose["services"].values():
        assert f"uid={service['user'].partition(':')[0]}," in options["o"]
        mounts = dict(mount.split(":") for mount in service["volumes"])
        url = service["environment"]["FOREBAY_URL"]
        assert directory_of(url) == mounts["limits"]
        places.add(url)
    assert len(places) == 1


def test_containers_of_the_pod_share_one_store() -> None:
    manifest, change = (yaml.safe_load(text) for text in blocks("kubernetes.md", "yaml"))
    template = manifest["spec"]["template"]
    assert manifest["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    pod: dict[str, Any] = template["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["limits"]["emptyDir"]["medium"] == "Memory"
    places = set()
    for container in pod["containers"]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes.keys()
        (url,) = (variable["value"] for variable in container["env"] if variable["name"] == "FOREBAY_URL")
        assert mounts[directory_of(url)] == "limits"
        places.add(url)
    assert len(places) == 1
    assert f"host={places.pop()}" in change["env"][0]["value"]


def test_every_page_is_on_the_map() -> None:
    links = re.findall(r"\]\((\w[\w-]*\.md)", (PAGES / "README.md").read_text())
    assert {page.name for page in PAGES.glob("*.md")} - {"README.md"} == set(links)
