"""Canaries: other limits for a percentage of the keys, in rule files and in code; and the promotion of a rule."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rule_files import FILE, LIMITS, problems
from test_rules_live import NEVER, TextSource
from web_requests import Site

from forebay import FixedWindow, InvalidLimiter, MinInterval, Store
from forebay.cli.rules import command
from forebay.rules import LiveRules, load_rules
from forebay.testing import ManualClock
from forebay.web import AddressList, ClientAddress, Deny, Rule, Shed, canary
from forebay.web.canaries import Chosen

CLIENTS = [f"198.51.100.{number}" for number in range(250)]
NEW = '[limits.new]\nalgorithm = "fixed-window"\nrate = "2/hour"\n'
CANARY = LIMITS + NEW + '[[rules]]\nname = "api"\nlimits = ["api"]\ncanary = { percent = 20, limits = ["new"] }\n'


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=5000, clock=clock) as opened:
        yield opened


def load(tmp_path: Path, text: str, store: Store) -> list[Rule]:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return load_rules(path, store=store)


def limits(site: Site) -> dict[str, str]:
    """The limits of each client."""
    return {client: site.request(client=client)["ratelimit-policy"].split('"')[1] for client in CLIENTS}


def test_a_part_of_the_keys_has_the_new_limit(tmp_path: Path, store: Store) -> None:
    site = Site("wsgi", load(tmp_path, CANARY, store))
    first = limits(site)
    chosen = [client for client, limit in first.items() if limit == "new"]
    assert 25 <= len(chosen) <= 75  # 50 expected, 6 the standard deviation
    # The same for another gate, and for the same client again.
    assert limits(Site("asgi", load(tmp_path, CANARY, store))) == first
    # The first of both requests was charged to one limit only.
    assert [site.request(client=chosen[0]).status for _ in range(2)] == [429, 429]
    more = limits(Site("wsgi", load(tmp_path, CANARY.replace("20", "60").replace("2/", "9/"), store)))
    assert {client for client, limit in more.items() if limit == "new"} > set(chosen)
    everybody = limits(Site("wsgi", load(tmp_path, CANARY.replace("20", "100").replace("2/", "9/"), store)))
    assert set(everybody.values()) == {"new"}


def test_rules_in_code_choose_as_files_do(store: Store) -> None:
    key = ClientAddress()
    old, new = FixedWindow(store, "api", "5/hour"), FixedWindow(store, "new", "2/hour")
    sites = [Site(kind, canary(Rule(old, key=key), new, percent=20)) for kind in ("wsgi", "asgi")]  # type: ignore[arg-type]
    first, second = map(limits, sites)
    assert first == second
    assert set(first.values()) == {"api", "new"}
    exempt = Site("wsgi", canary(Rule(old, key=key, exempt=lambda request: True), new, percent=20))
    assert "ratelimit-policy" not in exempt.request()


GAPS = """version = 1
[limits.old]
algorithm = "token-bucket"
rate = "1/second"
[limits.new]
algorithm = "token-bucket"
rate = "2/second"
[[rules]]
name = "api"
limits = ["old"]
canary = { percent = 20, limits = ["new"] }
overrides = [{ key = { address = "192.0.2.1" }, limits = ["new"], until = 2999-01-01T00:00:00Z }]
"""


def test_a_rule_and_its_canary_hold_back_as_many_as_one_rule(tmp_path: Path, store: Store) -> None:
    old, new = MinInterval(store, "old", "1s"), MinInterval(store, "new", "2s")
    delayed = Rule(old, key=ClientAddress(), delay="9s", most_delayed=1)
    in_layers = [one for each in canary(delayed, new, percent=20) for one in canary(each, new, percent=5)]
    for rules in (
        canary(delayed, new, percent=20),
        in_layers,
        load(tmp_path, GAPS + 'delay = "9s"\nmost_delayed = 1\n', store),
        load(tmp_path, GAPS + 'bytes = "responses"\nmost_held = 1\n', store),
        LiveRules(TextSource(GAPS + 'delay = "9s"\nmost_delayed = 1\n'), store=store, interval=NEVER).in_force()[1],
    ):
        first, *others = [rule.held_back for rule in rules if not isinstance(rule, (Deny, Shed))]
        assert others
        assert first.add()
        assert not any(other.add() for other in others)
        first.remove()


def test_a_client_without_an_address_is_answered_once(store: Store) -> None:
    old, new = FixedWindow(store, "api", "5/hour"), FixedWindow(store, "new", "2/hour")
    site = Site("wsgi", canary(Rule(old, key=ClientAddress()), new, percent=50))
    assert site.request(client=None).status == 500


def test_the_share_of_a_percentage_is_right() -> None:
    for percent in (0.5, 10, 33.3, 100):
        found = sum(("key", number) in Chosen(percent, "salt") for number in range(20_000)) / 200
        assert abs(found - percent) < 2


def test_other_rules_choose_other_keys() -> None:
    one, two = Chosen(50, "one"), Chosen(50, "two")
    assert 0 < sum((number in one) != (number in two) for number in range(100)) < 100


@pytest.mark.parametrize(
    ("options", "percent", "message"),
    [
        ({"key": None}, 5, "needs a plain function as its key"),
        ({}, 0, "percent is a number"),
        ({}, True, "percent is a number"),
        ({}, "5", "percent is a number"),
        ({"exempt": AddressList("192.0.2.1")}, 5, "exempts addresses"),
    ],
)
def test_what_cant_be_a_canary_is_refused(store: Store, options: dict[str, Any], percent: Any, message: str) -> None:
    old, new = FixedWindow(store, "api", "5/hour"), FixedWindow(store, "new", "2/hour")
    with pytest.raises(InvalidLimiter, match=message):
        canary(Rule(old, **{"key": ClientAddress(), **options}), new, percent=percent)


def test_problems_of_a_canary_have_their_places() -> None:
    assert problems(CANARY) == []
    for change, message in (
        (("20", "0"), "rules[0].canary.percent is a number above 0"),
        (("20", "101"), "rules[0].canary.percent is a number above 0"),
        (('limits = ["new"]', 'limits = ["nw"]'), "did you mean 'new'?"),
        (('limits = ["new"]', 'limits = ["api"]'), "these are the rule's own limits"),
        (("percent = 20, ", ""), "lacks percent"),
    ):
        found = problems(CANARY.replace(*change))
        assert any(message in problem for problem in found), found


# Promotion


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    ("name", "text", "promoted"),
    [
        ("a.toml", FILE + "shadow = true  # since May\n", FILE + "shadow = false  # since May\n"),
        ("a.toml", CANARY, CANARY.replace("percent = 20", "percent = 100")),
        ("a.toml", CANARY.replace("percent = 20", "percent = 2.5"), CANARY.replace("percent = 20", "percent = 100")),
        (
            "a.yaml",
            "version: 1\nlimits: {a: {algorithm: fixed-window, rate: 5/hour}}\n"
            "rules:\n- {limits: [a], name: api, shadow: true} # é\n",
            "version: 1\nlimits: {a: {algorithm: fixed-window, rate: 5/hour}}\n"
            "rules:\n- {limits: [a], name: api, shadow: false} # é\n",
        ),
    ],
)
def test_promotion_changes_one_value(tmp_path: Path, name: str, text: str, promoted: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o640)
    result = run("promote", "api", path)
    assert result.exit_code == 0, result.output
    assert path.read_text() == promoted
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_promotion_writes_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.toml", tmp_path / "a.toml"
    target.write_text(FILE + "shadow = true\n")
    link.symlink_to(target)
    assert run("promote", "api", link).exit_code == 0
    assert link.is_symlink()
    assert target.read_text() == FILE + "shadow = false\n"


def test_what_cant_be_promoted_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for text, rule, status, message in (
        (FILE, "api", 2, "neither in the shadow nor has a canary"),
        (FILE, "apo", 2, "did you mean 'api'?"),
        ("version = 2\n", "api", 1, f"{path}:1:"),
    ):
        path.write_text(text)
        result = run("promote", rule, path)
        assert result.exit_code == status
        assert message in result.stderr
        assert path.read_text() == text
    assert run("promote", "api", tmp_path / "none.toml").exit_code == 2


@pytest.mark.parametrize("rule", ["one", "two", "six"])
def test_no_other_rule_is_promoted(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "limits.yaml"
    # YAML breaks a line at the separator of the comment.
    text = (
        "version: 1\nlimits:\n  api: {algorithm: fixed-window, rate: 5/hour}\n# shadows \u2028\nrules:\n"
        "  - {name: one, limits: [api], shadow: true, path: /1}\n"
        "  - {name: two, limits: [api], shadow: true, path: /2}\n"
        "  - {name: six, limits: [api], shadow: true, path: /3}\n"
    )
    path.write_text(text)
    result = run("promote", rule, path)
    assert result.exit_code == 2
    assert f"the word of the rule {rule!r} isn't found in {path}: change it by hand" in " ".join(result.stderr.split())
    assert path.read_text() == text


def test_a_promoted_rule_is_enforced_in_running_applications(store: Store) -> None:
    from forebay.rules.live.promotion import promoted

    source = TextSource(FILE + "shadow = true\n")
    with LiveRules(source, store=store, interval=NEVER) as live:
        site = Site("wsgi", live)
        assert [site.request().status for _ in range(7)] == [200] * 7
        assert store.stats().limiters["api"].denied == 2
        source.text = promoted(source.read(), source.name, "api")[0].decode()
        live.step()
        assert site.request().status == 429


# The other commands


def test_status_shows_the_rules_of_a_store(tmp_path: Path) -> None:
    with Store("live", keys=100, directory=tmp_path) as store:
        if store.path is None:
            # Without the compiled core there is no file to look at.
            assert run("status", tmp_path / "none").exit_code == 2
            return
        result = run("status", store.path)
        assert (result.exit_code, result.stderr) == (
            2,
            f"{store.path} has no live rules: an application gives them, by LiveRules over this store\n",
        )
        source = TextSource(FILE + "shadow = true\n")
        with LiveRules(source, store=store, interval=NEVER) as live:
            site = Site("wsgi", live)
            for _ in range(7):
                site.request()
            result = run("status", store.path)
            assert result.exit_code == 0
            assert "version 1, from memory.toml, since 20" in result.stdout
            assert f"loaded by process {os.getpid()}, which read the source" in result.stdout
            assert "  api: allowed: 5, denied: 2\n" in result.stdout
            source.text = None
            live.step()
            result = run("status", store.path)
            assert result.exit_code == 1
            assert "the last good rules are in force: memory.toml can't be read: ConnectionError: redis://me:***@" in (
                result.stdout
            )
            document = json.loads(run("status", store.path, "--json").stdout)
            assert document["limits"] == {"api": {"allowed": 5, "denied": 2}}
            assert document["rules_version"] == 1
    assert run("status").exit_code == 2
    result = run("status", tmp_path / "none")
    assert (result.exit_code, result.stderr.startswith(f"{tmp_path / 'none'}: found no such file")) == (2, True)


def test_publish_keeps_the_readers_of_a_file(tmp_path: Path) -> None:
    file, target, new = (tmp_path / name for name in ("source.toml", "limits.toml", "new.toml"))
    for path in (file, target):
        path.write_text(FILE)
    target.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(target, 12345, 12346)
    before, other = target.stat(), file.stat()
    for path in (target, new):
        assert run("publish", file, path).exit_code == 0
    after = target.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    # One of this user, by its umask.
    assert new.stat().st_mode == other.st_mode
    assert sorted(tmp_path.iterdir()) == [target, new, file]


def test_publish_checks_first(tmp_path: Path) -> None:
    file, target = tmp_path / "new.toml", tmp_path / "limits.toml"
    target.write_text(FILE)
    file.write_text("nonsense")
    assert run("publish", file, target).exit_code == 1
    # load_rules takes it, and LiveRules doesn't.
    file.write_text(f'store = "shm:///shop?keys=1000"\n{FILE}')
    result = run("publish", file, target)
    assert result.exit_code == 1
    assert "live rules are for the store of LiveRules: leave 'store' out" in result.output
    assert target.read_text() == FILE
    file.write_text(FILE.replace("version = 1", 'version = 1\nstore = "shm:///shop?keys=100"'))
    result = run("publish", file, target)
    assert (result.exit_code, "leave 'store' out" in result.stderr) == (1, True)
    assert target.read_text() == FILE
    file.write_text(FILE.replace("rate = ", "rat = ").replace("fixed-window", "fixed-windo"))
    assert "\\n" not in run("publish", file, target).stderr
    file.write_text(FILE.replace("5/", "6/"))
    assert run("publish", file, target).exit_code == 0
    assert target.read_text() == FILE.replace("5/", "6/")
    # A source without a syntax in its name is read as TOML.
    (tmp_path / "new.yaml").write_text(
        "{version: 1, limits: {api: {algorithm: fixed-window, rate: 5/hour}}, rules: [{name: api, limits: [api]}]}"
    )
    for place in (f"sqlite:///{tmp_path}/rules.db#shop", target, tmp_path / "limits.conf"):
        result = run("publish", tmp_path / "new.yaml", place)
        assert (result.exit_code, "give a source whose name ends with .yaml" in result.output) == (2, True)
    assert target.read_text() == FILE.replace("5/", "6/")
    assert not (tmp_path / "rules.db").exists()
    assert run("publish", tmp_path / "none.toml", target).exit_code == 2
    assert run("publish", file, "redis://127.0.0.1:1/0").exit_code == 2
