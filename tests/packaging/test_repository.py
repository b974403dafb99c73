"""The files for the host of the repository agree with those that they repeat."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

import forebay

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE: str = PROJECT["project"]["urls"]["Source"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
VERSIONS = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))


def test_pre_commit_has_the_versions_of_lint() -> None:
    requirements = (ROOT / "ci/requirements-lint.txt").read_text().splitlines()
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    used = re.findall(r'additional_dependencies: \["(.*)"\]', text)
    assert used
    assert set(used) <= set(requirements)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_scripts_that_exist(workflow: Path) -> None:
    text = workflow.read_text()
    scripts = set(re.findall(r"(?<!\.)ci/([\w.-]+)", text.replace("ci/${{ matrix.script }}", "")))
    scripts |= {name.split()[0] for found in re.findall(r"script: \[(.*)\]", text) for name in found.split(", ")}
    assert scripts
    assert all((ROOT / "ci" / name).exists() for name in scripts), scripts


def test_every_check_of_a_change_is_a_job() -> None:
    checks = set(re.findall(r"bash ci/([\w-]+)", (ROOT / ".ci/run").read_text()))
    jobs = (ROOT / ".github/workflows/tests.yml").read_text()
    assert not [name for name in checks if not re.search(rf"ci/{name}\b|script: .*\b{name}\b", jobs)]


def test_every_version_is_tested_and_has_a_wheel() -> None:
    assert VERSIONS
    assert PROJECT["project"]["requires-python"] == f">={VERSIONS[0]}"
    jobs = (ROOT / ".github/workflows/tests.yml").read_text()
    assert re.findall(r'python: \[(.*"3\.\d+".*)\]', jobs)[0] == ", ".join(f'"{version}"' for version in VERSIONS)
    built = [name.removesuffix("-*").removeprefix("cp3") for name in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert [f"3.{minor}" for minor in built if not minor.endswith("t")] == VERSIONS
    assert [f"3.{minor}" for minor in built if minor.endswith("t")] == re.findall(r'"(3\.\d+t)"', jobs)


def test_files_name_one_repository() -> None:
    files = ["SECURITY.md", "ci/site/mkdocs.yml", ".github/ISSUE_TEMPLATE/config.yml", "docs/release.md"]
    for name in files:
        assert re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text()) == [SOURCE], name
    assert PROJECT["project"]["urls"]["Documentation"] in (ROOT / "ci/site/mkdocs.yml").read_text()


SERVER_FILES = ["native/server/Cargo.toml", "native/server/pyproject.toml", "pyproject.toml"]
"""The files that have the version of the decision server."""


def versions_of_the_server(folder: Path, version: str) -> None:
    """Copies of these files with this version."""
    for name in SERVER_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text().replace(forebay.__version__, version))


RELEASED = "# Changelog\n\n## 1.2.3 (2027-01-31)\n\n### Added\n\n## 1.2.2 (2026-12-01)\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "expected"),
    [
        ("v1.2.3", RELEASED, []),
        ("v1.2.4", RELEASED, ["the tag of that version is v1.2.3"]),
        ("1.2.3", RELEASED, ["the tag of that version is v1.2.3"]),
        ("v1.2.3", RELEASED.replace("2027-01-31", "not released yet"), ["not released yet"]),
        ("v1.2.3", RELEASED.replace("## 1.2.3 (2027-01-31)", ""), ["'## 1.2.2 (2026-12-01)', not with '## 1.2.3"]),
        ("v1.2.3", "", ["no heading"]),
    ],
)
def test_release_needs_its_tag_and_its_changelog(tmp_path: Path, tag: str, changelog: str, expected: list[str]) -> None:
    (tmp_path / "src/forebay").mkdir(parents=True)
    (tmp_path / "src/forebay/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    versions_of_the_server(tmp_path, "1.2.3")
    problems = list(runpy.run_path(str(ROOT / "ci/check_release.py"))["problems"](tag, tmp_path))
    assert len(problems) == len(expected)
    assert all(text in problem for problem, text in zip(problems, expected, strict=True))


def test_release_needs_the_version_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "src/forebay").mkdir(parents=True)
    (tmp_path / "src/forebay/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(RELEASED)
    versions_of_the_server(tmp_path, "1.2.2")
    problems = list(runpy.run_path(str(ROOT / "ci/check_release.py"))["problems"]("v1.2.3", tmp_path))
    assert [problem.partition(" ")[0] for problem in problems] == SERVER_FILES
