"""The command ``forebay rules``, and the schema that it prints. The page's examples run the installed one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result
from rule_files import FILE, problems

from forebay.cli.rules import command

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), env={"COLUMNS": "80"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text(f"""{FILE}path = "/a"
[[rules.overrides]]
key = {{address = "192.0.2.1"}}
deny = true
until = 2020-01-01T00:00:00Z
[[rules.overrides]]
key = {{address = "192.0.2.2"}}
exempt = true
until = 2999-01-01T00:00:00Z
""")
    return path


def test_check_counts_and_names_overrides_that_have_ended(file: Path) -> None:
    result = run("check", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"{file} is valid: limits: 1, rules: 1\nrule 'api': overrides[0] has ended, at 2020-01-01T00:00:00+00:00\n"
    )
    document = json.loads(run("check", file, "--json").stdout)
    assert document == {
        "version": 1,
        "problems": [],
        "limits": 1,
        "rules": 1,
        "deny": 0,
        "shedders": 0,
        "ended_deny": [],
        "ended_overrides": [{"rule": "api", "override": 0, "until": "2020-01-01T00:00:00+00:00"}],
    }


@pytest.mark.parametrize("words", [("check",), ("explain", "GET /")])
def test_without_its_packages_the_command_names_the_extra(file: Path, words: tuple[str, ...]) -> None:
    program = "import sys; sys.modules['msgspec'] = None; from forebay.cli import main; main()"
    what, *others = words
    arguments = [sys.executable, "-c", program, "rules", what, file, *others]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == 'this command needs the package msgspec: pip install "forebay[rules]"\n'


def test_check_prints_every_problem(file: Path) -> None:
    file.write_text(FILE.replace("fixed", "fixd") + "cost = 0\npath = 'a\\u001b[31m'\n")
    result = run("check", file)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{file}:3:13: limits.api.algorithm is none of the algorithms: 'fixd-window'")
    assert lines[1] == f"{file}:8:8: rules[0].cost is a whole number of at least 1, not 0"
    document = json.loads(run("check", file, "--json").stdout)
    assert [(one["line"], one["column"]) for one in document["problems"]] == [(3, 13), (8, 8)]
    assert document["problems"][1]["message"] == "rules[0].cost is a whole number of at least 1, not 0"


def test_escapes_of_a_file_do_not_reach_the_terminal(file: Path) -> None:
    file.write_text(FILE + '"\\u001b[31m" = 1\n')
    result = run("check", file)
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout


def test_file_that_cannot_be_read_is_no_problem_of_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    for result in (run("check", file), run("explain", file, "GET /")):
        assert result.exit_code == 2
        assert "No such file" in result.stderr


def explained(file: Path, *arguments: str) -> Any:
    result = run("explain", file, *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["version"] == 1
    (rule,) = document["rules"]
    return rule


def test_explain_has_keys_limits_costs_and_reasons(file: Path) -> None:
    rule = explained(file, "GET /a?b", "--client", "192.0.2.9")
    assert rule == {
        "rule": "api",
        "applies": True,
        "reasons": [],
        "key": ["192.0.2.9"],
        "cost": 1,
        "limits": [{"name": "api", "algorithm": "FixedWindow", "allowance": "5 requests per hour"}],
        "override": "",
        "until": None,
        "shadow": False,
        "bytes": "",
        "is_list": False,
        "ban": None,
        "key_words": "address '192.0.2.9'",
        "retries": "",
        "is_shedder": False,
        "priority": None,
    }
    # An override that has ended, one that has not, and another path.
    assert explained(file, "/a", "--client", "192.0.2.1")["limits"] == rule["limits"]
    exempt = explained(file, "/a", "--client", "192.0.2.2")
    assert (exempt["override"], exempt["limits"], exempt["until"]) == ("exempt", [], "2999-01-01T00:00:00+00:00")
    other = explained(file, "/b", "--client", "192.0.2.1")
    assert (other["applies"], other["reasons"]) == (False, ["the path '/b' does not match /a"])


def test_explain_names_each_reason(file: Path) -> None:
    file.write_text(
        'tiers = ["pro", "free"]\n'
        + FILE
        + 'methods = ["PUT", "POST"]\nheaders = {X-A = "b*", X-C = "*"}\naddress = ["10.0.0.0/8"]\n'
        + 'except_tier = ["pro"]\n'
    )
    result = run("explain", file, "GET /", "--client", "192.0.2.1", "--header", "X-A: c", "--tier", "pro")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "api: not for this request: the method GET is not PUT or POST; the header field X-A is 'c', not 'b*'; "
        "the header field X-C is missing, and should be '*'; the address 192.0.2.1 is in none of 10.0.0.0/8; "
        "the rule isn't for the tier 'pro'\n"
    )
    headers = ("--header", "X-A: b1", "--header", "x-c: d")
    result = run("explain", file, "PUT /", "--client", "10.0.0.1", *headers, "--tier", "free")
    assert result.stdout == "api: applies: key address '10.0.0.1', cost 1\n  api: FixedWindow, 5 requests per hour\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no path"], "a REQUEST is such as \"POST /login\", not 'no path'"),
        (["/", "--header", "X"], "a header is such as 'X-API-Key: secret', not 'X'"),
        (["/a", "--client", "here"], "--client is an address such as 192.0.2.1, not 'here'"),
        (["/a"], "the rules need the client's address: give --client, such as --client 192.0.2.1"),
    ],
)
def test_request_that_cannot_be_explained_is_refused(file: Path, arguments: list[str], message: str) -> None:
    result = run("explain", file, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_explain_asks_for_a_tier(file: Path) -> None:
    file.write_text('tiers = ["free", "pro"]\n' + FILE + 'except_tier = ["pro"]\n')
    result = run("explain", file, "/")
    assert result.exit_code == 2
    assert "give --tier, one of free, pro" in " ".join(result.stderr.replace("│", "").split())
    result = run("explain", file, "/", "--client", "192.0.2.1", "--tier", "gold")
    assert (result.exit_code, result.stderr) == (
        0,
        "note: the file has no tier 'gold', so the rules of all tiers hold\n",
    )
    assert result.stdout.startswith("api: applies")


def test_explain_of_a_wrong_file_is_its_problems(file: Path) -> None:
    file.write_text("version = 2\n")
    result = run("explain", file, "/")
    assert result.exit_code == 1
    assert f"{file}:1:11: version is 1" in result.stderr


# The schema


def test_explain_shows_the_rate_of_bytes(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        'version = 1\n[limits.slow]\nalgorithm = "token-bucket"\nrate = "1 kB/second"\n'
        '[[rules]]\nname = "files"\nlimits = ["slow"]\nbytes = "responses"\n'
    )
    result = run("explain", file, "/files/film", "--client", "10.0.0.1")
    assert result.stdout == (
        "files: applies: key address '10.0.0.1', bytes of responses\n  slow: TokenBucket, 1000 bytes per second\n"
    )


def test_schema_of_the_docs_is_the_commands() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert result.stdout == (ROOT / "docs/rules.schema.json").read_text(), (
        "forebay rules schema > docs/rules.schema.json"
    )


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        (("", ""), True),
        (('"api"]', '"api"]\ncharge_on = [401, "500-599"]\npath = ["/a"]\nkey = "user | address"'), True),
        (("5/hour", "5/fortnight"), None),  # text is text to a schema
        (("version = 1", "version = 2"), False),
        (("fixed-window", "fixd-window"), False),
        (("rate", "raet"), False),
        (('"api"]', '"api"]\ncost = 0'), False),
        (('"api"]', '"api"]\npriority = 1'), False),
        (('["api"]', "[]"), False),
    ],
)
def test_schema_accepts_what_the_loader_accepts(change: tuple[str, str], is_valid: bool | None) -> None:
    text = FILE.replace(*change) if change[0] else FILE
    schema = json.loads((ROOT / "docs/rules.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = list(jsonschema.Draft202012Validator(schema).iter_errors(tomllib.loads(text)))
    assert bool(found) is (is_valid is False)
    assert bool(problems(text)) is (is_valid is not True)
