"""``forebay show``, ``reset``, ``ban`` and ``unban``: a key's states from outside."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_rules_live import NEVER, TextSource, document
from web_requests import Site

from forebay import (
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.cli.commands import forebay
from forebay.rules import LiveRules
from forebay.shedding import AdaptiveLimit
from forebay.testing import ManualClock
from forebay.web import Ban, ClientAddress

RULES = """
version = 1
[limits.bucket]
algorithm = "token-bucket"
rate = "100/minute"
burst = 20
[limits.leaky]
algorithm = "leaky-bucket"
rate = "10/minute"
capacity = 5
[limits.interval]
algorithm = "min-interval"
interval = "30 seconds"
[limits.fixed]
algorithm = "fixed-window"
rate = "10/hour"
align = "first"
[limits.sliding]
algorithm = "sliding-window"
rate = "10/hour"
[limits.log]
algorithm = "sliding-log"
rate = "5/hour"
keys = 9
[limits.parts]
algorithm = "bucketed-window"
rate = "60/hour"
[limits.held]
algorithm = "concurrency"
limit = 4
[limits.missing]
algorithm = "fixed-window"
rate = "10/hour"
[[rules]]
name = "all"
limits = ["bucket", "leaky", "interval", "fixed", "sliding", "log", "parts", "held", "missing"]
"""


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(forebay, list(map(str, arguments)), env={"COLUMNS": "200"}, prog_name="forebay")


def states(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    command, *rest = arguments
    result = run(command, "--json", *rest)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return {one["limiter"]: one for one in json.loads(result.stdout)["limiters"]}


@pytest.fixture
def shop(name: str) -> Iterator[Store]:
    with Store(name, keys=1000, clock=ManualClock(10_000)) as store:
        yield store


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "limits.toml"
    file.write_text(RULES)
    return file


def limiters(store: Store) -> dict[str, Any]:
    return {
        "bucket": TokenBucket(store, "bucket", "100/minute", burst=20),
        "leaky": LeakyBucket(store, "leaky", "10/minute", capacity=5),
        "interval": MinInterval(store, "interval", "30 seconds"),
        "fixed": FixedWindow(store, "fixed", "10/hour", align="first"),
        "sliding": SlidingWindow(store, "sliding", "10/hour"),
        "log": SlidingLog(store, "log", "5/hour", keys=3),
        "parts": BucketedWindow(store, "parts", "60/hour"),
        "held": Concurrency(store, "held", 4),
    }


@pytest.fixture
def used(shop: Store) -> dict[str, Any]:
    found = limiters(shop)
    for limiter in found.values():
        assert limiter.allow("key")
    return found


def test_show_agrees_with_peek_by_the_limits_of_a_rule_file(shop: Store, used: dict[str, Any], rules: Path) -> None:
    found = states("show", shop.name, "key", "--rules", rules)
    assert set(found) == set(used)
    for name, limiter in used.items():
        decision = limiter.peek("key")
        state = found[name]
        assert (state["limit"], state["remaining"]) == (decision.limit, decision.remaining), name
        assert (state["retry_after"], state["reset_after"]) == (decision.retry_after, decision.reset_after), name
        assert state["note"] == ""


def test_show_without_rules_reads_the_times_of_buckets(shop: Store, used: dict[str, Any]) -> None:
    for _ in range(5):
        used["bucket"].allow("key")
        used["leaky"].allow("key")
    found = states("show", shop.name, "key")
    for name in ("bucket", "leaky", "interval"):
        assert found[name]["reset_after"] == used[name].peek("key").reset_after > 0
        assert (found[name]["limit"], found[name]["remaining"]) == (None, None)
    assert found["interval"]["retry_after"] == 30
    for name in ("fixed", "sliding", "log", "parts", "held"):
        assert found[name]["reset_after"] is None
        assert "--rules FILE" in found[name]["note"]
    result = run("show", shop.name, "key")
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("interval (")]
    assert row.split() == ["interval", "(MinInterval)", "30.0", "s", "30.0", "s"]


def test_show_counts_and_adds_nothing(shop: Store, used: dict[str, Any], rules: Path) -> None:
    assert shop.path is not None
    before, size = shop.stats(), Path(shop.path).stat().st_size
    states("show", shop.name, "key", "--rules", rules)
    states("show", shop.name, "other")
    assert shop.stats() == before
    assert Path(shop.path).stat().st_size == size


def test_show_says_what_it_cannot_find(shop: Store, rules: Path) -> None:
    assert TokenBucket(shop, "bucket", "100/minute", burst=20, initial=5).hit("key", 5)
    assert SlidingLog(shop, "log", "6/hour", keys=3).allow("key")
    found = states("show", shop.name, "key", "--rules", rules)
    assert "no memory for limiter 'log' with these parameters" in found["log"]["note"]
    found = states("show", shop.name, "key")
    assert found["bucket"]["reset_after"] == 0
    assert "made with initial=" in found["bucket"]["note"]


def test_limiter_that_the_rule_file_lacks_is_named(shop: Store, used: dict[str, Any], rules: Path) -> None:
    limit = '[limits.fixed]\nalgorithm = "fixed-window"\nrate = "10/hour"\nalign = "first"\n'
    rules.write_text(f'version = 1\n{limit}[[rules]]\nname = "all"\nlimits = ["fixed"]\n')
    found = states("show", shop.name, "key", "--rules", rules)
    assert (found["fixed"]["remaining"], found["fixed"]["note"]) == (9, "")
    assert found["held"]["note"] == "the rule file has no such limit"
    assert found["interval"]["retry_after"] == 30


def test_show_of_one_limiter(shop: Store, used: dict[str, Any]) -> None:
    assert set(states("show", shop.name, "key", "--limiter", "bucket", "--limiter", "log")) == {"bucket", "log"}
    result = run("show", shop.name, "key", "--limiter", "bukket")
    assert result.exit_code == 2
    assert "has no limiter 'bukket'; its limiters: 'bucket', 'leaky'" in result.stderr


def test_limiter_with_a_long_name_is_found(shop: Store) -> None:
    name = "a limiter whose name is longer than the segment has room for, " * 2
    assert MinInterval(shop, name, "30 seconds").allow("key")
    (state,) = states("show", shop.name, "key", "--limiter", name).values()
    assert state["retry_after"] == 30


KEYS: list[tuple[list[str], Any]] = [
    (["key"], "key"),
    (["42"], "42"),
    (["42", "--int"], 42),
    (["--int", "--", "-42"], -42),
    (["00ff", "--bytes"], b"\x00\xff"),
    (["--part", "text", "user", "--part", "int", "42"], ("user", 42)),
    (["--part", "bytes", "ff"], (b"\xff",)),
    (["203.0.113.9", "--address"], "203.0.113.9"),
    (["2001:db8:1:2::5", "--address"], "2001:db8:1:2::/64"),
]


@pytest.mark.parametrize(("arguments", "key"), KEYS)
def test_keys_of_every_type(shop: Store, arguments: list[str], key: Any) -> None:
    limiter = MinInterval(shop, "interval", "30 seconds")
    assert limiter.allow(key)
    result = run("show", "--json", shop.name, *arguments)
    found = json.loads(result.stdout)
    assert (found["key"], found["limiters"][0]["retry_after"]) == (repr(key), 30)


def test_address_keys_are_the_middlewares(shop: Store, rules: Path) -> None:
    client = ClientAddress(ipv6_prefix=48)
    rules.write_text(f"{RULES}[client]\nipv6_prefix = 48\n")
    limiter = MinInterval(shop, "interval", "30 seconds")
    assert limiter.allow(client.key_of("2001:db8:1:2::5", None))
    assert limiter.allow(ClientAddress().key_of("2001:db8:5:6::7", None))
    found = states("show", shop.name, "2001:db8:1:3::6", "--address", "--rules", rules)
    assert found["interval"]["retry_after"] == 30
    assert states("show", shop.name, "2001:db8:5:6::8", "--address")["interval"]["retry_after"] == 30


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["key", "--part", "text", "a"],
        ["--part", "text", "a", "--int"],
        ["--part", "float", "1"],
        ["x", "--int"],
        ["xyz", "--bytes"],
        ["--part", "int", "x"],
        ["300.1.1.1", "--address"],
        ["key", "--rules", "none.toml"],
    ],
)
@pytest.mark.parametrize("command", ["show", "reset"])
def test_wrong_keys_are_refused(shop: Store, command: str, arguments: list[str]) -> None:
    result = run(command, shop.name, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_wrong_rule_file_is_refused(shop: Store, rules: Path) -> None:
    rules.write_text(RULES.replace("fixed-window", "fixd-window"))
    result = run("show", shop.name, "key", "--rules", rules)
    assert result.exit_code == 2
    assert "none of the algorithms" in result.stderr


def test_names_and_keys_are_printed_literally(shop: Store) -> None:
    assert MinInterval(shop, ":x:[red]\x1b[31m", "30 seconds").allow("key")
    for command in ("show", "reset"):
        result = run(command, shop.name, "key")
        assert r":x:[red]\x1b[31m (MinInterval)" in result.stdout
        assert "\x1b" not in result.stdout


# reset


def test_reset_forgets_the_key_in_every_limiter(shop: Store, used: dict[str, Any], rules: Path) -> None:
    for limiter in used.values():
        assert limiter.allow("other")
    result = run("reset", shop.name, "key", "--rules", rules)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    for name, limiter in used.items():
        assert limiter.peek("key").remaining == limiter.peek("fresh").remaining, name
        assert limiter.peek("other").remaining < limiter.peek("fresh").remaining, name


def test_reset_without_rules_names_what_it_left_out(shop: Store, used: dict[str, Any]) -> None:
    result = run("reset", shop.name, "key")
    assert result.exit_code == 1
    for name, limiter in used.items():
        is_fresh = limiter.peek("key").remaining == limiter.peek("fresh").remaining
        assert is_fresh == (name in ("bucket", "leaky", "interval")), name
        assert (
            f"{name} ({type(limiter).__name__}): {'reset' if is_fresh else 'left out: give its limit'}" in result.stdout
        )
    assert run("reset", shop.name, "key", "--limiter", "bucket").exit_code == 0


# Live rules


def change(live: LiveRules, source: TextSource, rate: str, **words: str) -> None:
    source.text = document(rate, on_change='"share"', **words)
    live.step()
    assert live.status().error is None


@pytest.fixture
def source() -> TextSource:
    return TextSource(document("100/hour", algorithm="fixed-window"))


@pytest.fixture
def live(shop: Store, source: TextSource) -> Iterator[LiveRules]:
    with LiveRules(source, store=shop, interval=NEVER) as found:
        yield found


def test_show_and_reset_find_keys_of_live_rules(shop: Store, live: LiveRules, source: TextSource) -> None:
    site = Site("wsgi", live)
    for _ in range(50):
        site.request(client="192.0.2.1")
    (state,) = states("show", shop.name, "192.0.2.1").values()
    assert (state["limit"], state["remaining"], state["note"]) == (100, 50, "")
    change(live, source, "10/hour", algorithm="fixed-window")
    (state,) = states("show", shop.name, "192.0.2.1").values()
    assert (state["limit"], state["remaining"]) == (10, 10)
    assert "the share of its former limit is charged by its next request" in state["note"]
    site.request(client="192.0.2.1")
    (state,) = states("show", shop.name, "192.0.2.1").values()
    assert (state["remaining"], state["note"]) == (4, "")
    result = run("reset", shop.name, "192.0.2.1")
    assert (result.exit_code, result.stdout) == (0, "api (FixedWindow): reset\n")
    assert [site.request(client="192.0.2.1").status for _ in range(11)] == [200] * 10 + [429]


def test_reset_forgets_a_share_that_was_not_charged_yet(shop: Store, live: LiveRules, source: TextSource) -> None:
    site = Site("wsgi", live)
    for _ in range(100):
        site.request()
    change(live, source, "10/hour", algorithm="sliding-window")
    assert site.request(client="192.0.2.7").status == 200
    limiters = json.loads(run("show", "--json", shop.name, "192.0.2.1").stdout)["limiters"]
    # The former limit, and the one of now.
    assert [(one["algorithm"], one["remaining"]) for one in limiters] == [("FixedWindow", 0), ("SlidingWindow", 10)]
    assert run("reset", shop.name, "192.0.2.1", "--limiter", "api").exit_code == 0
    assert [site.request(client="192.0.2.1").status for _ in range(11)] == [200] * 10 + [429]


def test_a_rule_file_comes_before_live_rules(shop: Store, live: LiveRules, source: TextSource, tmp_path: Path) -> None:
    change(live, source, "10/hour", algorithm="fixed-window")
    Site("wsgi", live).request(client="192.0.2.1")
    file = tmp_path / "limits.toml"
    file.write_text(document("9/hour", algorithm="fixed-window"))
    (state,) = states("show", shop.name, "192.0.2.1", "--rules", file).values()
    assert (state["limit"], state["remaining"]) == (9, 8)


# ban, unban


@pytest.fixture
def ban(shop: Store) -> Ban:
    return Ban(shop, "guessers", "3/minute", lasts="10 minutes")


def test_ban_and_unban_act_as_the_ban_of_the_application(shop: Store, ban: Ban) -> None:
    result = run("ban", shop.name, "203.0.113.9", "--address", "--for", "1 hour")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "guessers: '203.0.113.9' is banned for 3,600.0 s" in result.stdout
    decision = ban.peek("203.0.113.9")
    assert (decision.allowed, decision.retry_after) == (False, 3600)
    assert ban.peek("203.0.113.8").allowed
    shop_clock = shop.manual_clock
    assert shop_clock is not None
    shop_clock.advance("3599 s")
    assert not ban.peek("203.0.113.9").allowed
    shop_clock.advance("1 s")
    assert ban.peek("203.0.113.9").allowed


def test_ban_replaces_a_ban(shop: Store, ban: Ban) -> None:
    for _ in range(3):
        ban.count_denial("key")
    assert ban.peek("key").retry_after == 600
    for lasts, seconds in (("5 seconds", 5), ("2 hours", 7200)):
        assert run("ban", shop.name, "key", "--for", lasts).exit_code == 0
        assert ban.peek("key").retry_after == seconds


def test_unban_ends_a_ban_of_the_application(shop: Store, ban: Ban) -> None:
    for _ in range(3):
        ban.count_denial("key")
    assert not ban.peek("key").allowed
    assert run("unban", shop.name, "key").exit_code == 0
    assert ban.peek("key").allowed
    result = run("unban", shop.name, "key")
    assert (result.exit_code, "guessers: 'key' was not banned" in result.stdout) == (1, True)
    # As after a ban's end, three denials ban again.
    ban.count_denial("key")
    ban.count_denial("key")
    assert ban.peek("key").allowed


def test_ban_with_a_long_name_is_found(shop: Store) -> None:
    name = "clients who guess passwords, names and addresses of others"
    ban = Ban(shop, name, "3/minute", lasts="10 minutes")
    assert run("ban", shop.name, "key", "--for", "1 hour", "--ban", name).exit_code == 0
    assert not ban.peek("key").allowed
    assert run("unban", shop.name, "key", "--ban", name).exit_code == 0
    assert ban.peek("key").allowed


def test_ban_is_named_if_there_are_several(shop: Store, ban: Ban) -> None:
    other = Ban(shop, "scrapers", "3/minute", lasts="10 minutes")
    result = run("ban", shop.name, "key", "--for", "1 hour")
    assert result.exit_code == 2
    assert "name one of its bans by --ban; its bans: 'guessers', 'scrapers'" in result.stderr
    assert run("ban", shop.name, "key", "--for", "1 hour", "--ban", "scrapers").exit_code == 0
    assert (ban.peek("key").allowed, other.peek("key").allowed) == (True, False)
    result = run("unban", shop.name, "key", "--ban", "none")
    assert (result.exit_code, "there is no Ban 'none'" in result.stderr) == (2, True)


def test_store_without_a_ban_is_refused(shop: Store) -> None:
    assert MinInterval(shop, "some bans", "1 s").allow("key")
    before = shop.stats()
    result = run("ban", shop.name, "key", "--for", "1 hour")
    assert (result.exit_code, "the store has no Ban: see `forebay stat`" in result.stderr) == (2, True)
    assert shop.stats() == before


@pytest.mark.parametrize("time", ["1", "soon", "-5 s", "0 s", "200 years"])
def test_ban_takes_a_length_of_time(shop: Store, ban: Ban, time: str) -> None:
    result = run("ban", shop.name, "key", "--for", time)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"not {time!r}" in result.stderr
    assert "a number of seconds" not in result.stderr
    assert ban.peek("key").allowed


@pytest.mark.filterwarnings("ignore::forebay.errors.LimiterNameWarning")
def test_limiters_of_one_name_are_shown_side_by_side(shop: Store) -> None:
    assert TokenBucket(shop, "api", "1/minute").allow("key")
    assert FixedWindow(shop, "api", "1/minute").allow("key")
    assert MinInterval(shop, "api", "1 minute").peek("key").retry_after == 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run("show", shop.name, "key", "--json")
    found = json.loads(result.stdout)["limiters"]
    assert [(one["algorithm"], one["reset_after"]) for one in found] == [
        ("TokenBucket", 60),
        ("FixedWindow", None),
        ("MinInterval", 60),
    ]


def test_load_shedder_has_no_key_to_show(shop: Store) -> None:
    AdaptiveLimit(shop, "search")
    assert "load shedder" in {algorithm for _, algorithm in shop.attachment.limiters().values()}
    for command in ("show", "reset"):
        assert "load shedder" not in run(command, shop.name, "key").stdout


def test_credits_are_shown_and_not_reset(shop: Store) -> None:
    prepaid = Credits(shop, "calls")
    assert states("show", shop.name, "key")["calls"]["remaining"] == 0
    prepaid.add("key", 25)
    state = states("show", shop.name, "key")["calls"]
    assert (state["limit"], state["remaining"], state["retry_after"], state["note"]) == (25, 25, 0.0, "prepaid")
    result = run("reset", shop.name, "key")
    assert result.exit_code == 1
    assert "calls (Credits): left out: they were paid for: Credits.take_up_to takes them" in result.stdout
    assert prepaid.peek("key").remaining == 25


def test_permits_above_a_burst_are_shown(shop: Store) -> None:
    bucket = TokenBucket(shop, "api", "60/minute", burst=10)
    assert bucket.add("key", 25) == 35
    state = states("show", shop.name, "key")["api"]
    assert (state["reset_after"], state["note"]) == (None, "25 permits above its burst")
    assert run("reset", shop.name, "key").exit_code == 0
    assert bucket.peek("key").remaining == 10
