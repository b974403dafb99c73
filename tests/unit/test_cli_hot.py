"""``forebay hot``: the keys that a store's processes deny and allow most."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.cli.commands import forebay
from forebay.testing import ManualClock

RULES = """
version = 1
[limits.window]
algorithm = "fixed-window"
rate = "1/hour"
[[rules]]
name = "all"
limits = ["window"]
"""


def run(*arguments: str | Path, given: str | None = None) -> Result:
    return CliRunner().invoke(
        forebay, ["hot", *map(str, arguments)], input=given, env={"COLUMNS": "200"}, prog_name="forebay"
    )


def store_of(name: str, clock: ManualClock) -> Store:
    return Store(name, keys=1000, clock=clock, hot_keys=64)


def rows(result: Result) -> list[list[str]]:
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return [line.split() for line in result.output.splitlines()]


def deny(limiter: TokenBucket | FixedWindow | SlidingWindow, key: str | int, times: int) -> None:
    limiter.allow(key)
    for _ in range(times):
        assert not limiter.allow(key)


def test_the_most_denied_keys_come_first(name: str, clock: ManualClock) -> None:
    with store_of(name, clock) as store:
        assert run(name).output == "no key was noted yet\n"
        bucket = TokenBucket(store, "api", "1/hour")
        deny(bucket, "few", 2)
        deny(bucket, "many", 1200)
        clock.advance(5)
        _, first, second = rows(run(name))
        digests = [one.digest for one in store.hot_keys()]
        assert first[:4] == ["api", "(TokenBucket)", digests[0], "1,200"]
        assert second[:4] == ["api", "(TokenBucket)", digests[1], "2"]
        assert len(rows(run(name, "--most", "1"))) == 2
        assert run(name, "--limiter", "api").output == run(name).output
        assert run(name, "--limiter", "none").exit_code == 2


def test_among_puts_keys_in_place_of_their_hashes(name: str, clock: ManualClock, tmp_path: Path) -> None:
    with store_of(name, clock) as store:
        deny(TokenBucket(store, "api", "1/hour"), "203.0.113.9", 3)
        deny(TokenBucket(store, "api", "1/hour"), 42, 2)
        given = "192.0.2.1\n\n203.0.113.9\r\n203.0.113.10\n"
        _, first, second = rows(run(name, "--among", "-", "--address", given=given))
        assert first[2] == "203.0.113.9"
        assert len(second[2]) == 14
        keys = tmp_path / "keys"
        keys.write_bytes(b"\xff\n203.0.113.9\n")
        assert rows(run(name, "--among", keys))[1][2] == "203.0.113.9"
        keys.write_text("41\n42\n")
        assert rows(run(name, "--among", keys, "--int"))[2][2] == "42"
        result = run(name, "--among", keys, "--address")
        assert (result.exit_code, "'41' is no address" in result.stderr) == (2, True)


def test_keys_of_a_window_are_found_by_its_limit(name: str, clock: ManualClock, tmp_path: Path) -> None:
    rules = tmp_path / "limits.toml"
    rules.write_text(RULES)
    with store_of(name, clock) as store:
        deny(FixedWindow(store, "window", "1/hour"), "ann", 3)
        without = run(name, "--among", "-", given="ann\n").output
        assert "window (FixedWindow): give its limit in a rule file: --rules FILE" in without
        assert " ann " not in without
        assert rows(run(name, "--among", "-", "--rules", rules, given="ann\n"))[1][2] == "ann"


def test_json_has_keys_and_digests(name: str, clock: ManualClock) -> None:
    with store_of(name, clock) as store:
        deny(TokenBucket(store, "api", "1/hour"), "ann", 3)
        document = json.loads(run(name, "--json", "--among", "-", given="ann\n").output)
        (digest,) = [one.digest for one in store.hot_keys()]
        (found,) = document["hot_keys"]
        assert (document["version"], document["store"]) == (1, name)
        assert found.pop("denied_ago") >= 0
        assert found == {
            "limiter": "api",
            "algorithm": "TokenBucket",
            "digest": digest,
            "denied": 3,
            "allowed": 0,
            "key": "ann",
        }


def test_text_of_others_is_no_markup(name: str, clock: ManualClock) -> None:
    with store_of(name, clock) as store:
        deny(TokenBucket(store, "[red]:smile:", "1/hour"), "[b]\x1b[31m", 1)
        output = run(name, "--among", "-", given="[b]\x1b[31m\n").output
        assert "[red]:smile: (TokenBucket)" in output
        assert "[b]" in output
        assert "\x1b" not in output


def test_a_store_without_a_record_is_refused(name: str) -> None:
    with Store(name, keys=100):
        result = run(name)
        assert result.exit_code == 2
        assert "no record of hot keys" in result.stderr
        assert "hot_keys=64" in result.stderr
    assert run("nosuchstore-at-all").exit_code == 2
