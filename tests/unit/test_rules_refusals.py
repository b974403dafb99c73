"""Bans and deny lists in rule files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import time_machine
from click.testing import CliRunner
from rule_files import FILE, LIMITS, RULE, problems
from web_requests import CLIENT, Kind, Site

from forebay import InvalidRuleFile, Store
from forebay.cli.rules import command
from forebay.redis import LeasedStore, RedisStore
from forebay.rules import load_rules
from forebay.testing import ManualClock
from forebay.web import Deny

BAN = """[bans.guessers]
denials = "2/day"
lasts = "1 hour"
"""
DENY = """[[deny]]
name = "scrapers"
"""


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


def loaded(tmp_path: Path, text: str, store: Any, name: str = "limits.toml") -> Any:
    path = tmp_path / name
    path.write_text(text)
    return load_rules(path, store=store)


def test_a_rule_bans(kind: Kind, tmp_path: Path, store: Store, clock: ManualClock) -> None:
    site = Site(kind, loaded(tmp_path, FILE + 'ban = "guessers"\n' + BAN, store))
    assert [site.request().status for _ in range(8)] == [200] * 5 + [429] * 3
    banned = site.request()
    assert (banned["retry-after"], banned.json["violated-policies"]) == ("3600", ["guessers"])
    clock.advance(3600)
    assert site.request().status == 200


def test_rules_share_a_ban(tmp_path: Path, store: Store) -> None:
    more = """[[rules]]
name = "login"
limits = ["login"]
path = "/login"
ban = "guessers"
[limits.login]
algorithm = "fixed-window"
rate = "1/hour"
"""
    site = Site("wsgi", loaded(tmp_path, FILE + 'ban = "guessers"\n' + more + BAN, store))
    assert [site.request("/login").status for _ in range(4)] == [200, 429, 429, 429]
    assert site.request("/").json["violated-policies"] == ["guessers"]


def test_denials_by_an_override_ban_nobody(tmp_path: Path, store: Store) -> None:
    override = """ban = "guessers"
[[rules.overrides]]
key = {address = "192.0.2.1"}
deny = true
until = 2999-01-01T00:00:00Z
"""
    site = Site("wsgi", loaded(tmp_path, FILE + override + BAN, store))
    assert [site.request().status for _ in range(4)] == [403] * 4


def test_a_leased_store_has_the_bans_of_its_host(tmp_path: Path, store: Store) -> None:
    with RedisStore("redis://127.0.0.1:1") as redis, LeasedStore(redis, store) as leased:
        (rule,) = loaded(tmp_path, FILE + 'ban = "guessers"\n' + BAN, leased)
        assert rule.ban.limiters[0].store is store


def test_a_store_over_redis_has_no_bans(tmp_path: Path) -> None:
    with (
        RedisStore("redis://127.0.0.1:1") as redis,
        pytest.raises(InvalidRuleFile, match=r"9:7: bans.guessers: a ban is kept in the memory of a host"),
    ):
        loaded(tmp_path, FILE + 'ban = "guessers"\n' + BAN, redis)


def test_a_list_refuses_its_addresses(kind: Kind, tmp_path: Path, store: Store) -> None:
    text = FILE + DENY + 'address = ["192.0.2.0/24", "2001:db8::/32"]\npath = "/private/*"\nmethods = "POST"\n'
    site = Site(kind, loaded(tmp_path, text, store))
    refused = site.request("/private/a", "POST")
    assert (refused.status, refused.json["detail"], "retry-after" in refused) == (
        403,
        "Requests from this address are refused.",
        False,
    )
    assert site.request("/private/a", "POST", client="203.0.113.1").status == 200
    assert site.request("/private/a").status == 200
    assert site.request("/other", "POST").status == 200


def test_a_list_ends(kind: Kind, tmp_path: Path, store: Store) -> None:
    text = FILE + DENY + 'address = ["192.0.2.1"]\nuntil = 2030-01-01T00:00:00Z\nresponse = {body = "Go away."}\n'
    site = Site(kind, loaded(tmp_path, text, store))
    with time_machine.travel(datetime(2029, 12, 31, 23, 59, 30, tzinfo=UTC), tick=False):
        refused = site.request()
    assert (refused.status, refused.body, refused["retry-after"]) == (403, b"Go away.", "30")
    with time_machine.travel(datetime(2030, 1, 1, tzinfo=UTC), tick=False):
        assert site.request().status == 200


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("{status = 404}", (404, "application/problem+json")),
        ('{status = 200, body = "[]", headers = {Content-Type = "application/json"}}', (200, "application/json")),
    ],
)
def test_a_list_has_its_response(tmp_path: Path, store: Store, response: str, expected: Any) -> None:
    text = FILE + DENY + f'address = ["192.0.2.1"]\nresponse = {response}\n'
    answer = Site("wsgi", loaded(tmp_path, text, store)).request()
    assert (answer.status, answer["content-type"]) == expected


def test_addresses_of_a_list_are_found_behind_the_proxies_of_the_file(kind: Kind, tmp_path: Path, store: Store) -> None:
    """Not by the `client` of the middleware, which doesn't know them."""
    client = '[client]\ntrusted_proxies = ["10.0.0.0/8"]\nheader = "X-Forwarded-For"\n'
    site = Site(kind, loaded(tmp_path, FILE + DENY + 'address = ["192.0.2.1"]\n' + client, store))
    for address, status in ((CLIENT, 403), ("192.0.2.2", 200)):
        answer = site.request(client="10.0.0.1", fields=[("X-Forwarded-For", address)])
        assert answer.status == status


def test_yaml_has_the_same_words(tmp_path: Path, store: Store) -> None:
    text = """
version: 1
limits:
  api: {algorithm: fixed-window, rate: 5/hour}
bans:
  guessers: {denials: 2/day, lasts: 1 hour}
deny:
  - {name: scrapers, address: [203.0.113.0/24], until: 2999-01-01T00:00:00Z}
rules:
  - {name: api, limits: [api], ban: guessers}
"""
    deny, rule = loaded(tmp_path, text, store, "limits.yaml")
    assert isinstance(deny, Deny)
    assert rule.ban.name == "guessers"


def rule(body: str) -> str:
    """A file with these words of its rule, from line 8 on."""
    return f"{FILE}{body}\n"


def deny(body: str, name: str = "list") -> str:
    """A file with a deny list, whose words begin in line 10."""
    return f'{FILE}[[deny]]\nname = "{name}"\n{body}\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            rule(f'ban = "guesser"\n{BAN}[[rules]]\nname = "b"\nlimits = ["api"]\nban = "guessers"\npath = "/b"'),
            "8:7: rules[0].ban: there is no ban 'guesser': did you mean 'guessers'? allowed: guessers",
        ),
        (rule('ban = "guessers"'), "8:7: rules[0].ban: there is no ban 'guessers': allowed: none"),
        (FILE + BAN, "8:7: bans.guessers: no rule names the ban 'guessers': name it, or leave it out"),
        (
            rule('ban = "guessers"\n[bans.guessers]\ndenials = "often"\nlasts = "1 hour"'),
            "10:11: bans.guessers.denials: 'often' is not a rate; the accepted forms are",
        ),
        (
            rule('ban = "guessers"\n[bans.guessers]\ndenials = "2/day"\nlasts = "a while"'),
            "11:9: bans.guessers.lasts: 'a while' is not a length of time; the accepted forms are",
        ),
        (rule('ban = "guessers"\n[bans.guessers]\ndenials = "2/day"'), "bans.guessers lacks lasts: a length of time"),
        (rule(f'ban = "guessers"\nshadow = true\n{BAN}'), "in the shadow bans no key: leave ban or shadow out"),
        (
            LIMITS.replace("api", '"guessers bans"')
            + RULE.replace('["api"]', '["guessers bans"]')
            + f'ban = "guessers"\n{BAN}',
            "the ban 'guessers' has a limiter of this name: rename one",
        ),
        (deny('address = ["10.0.0.1/8"]'), "10:12: deny[0].address[0]: an address or a network is such as"),
        (deny("address = []"), "10:11: deny[0].address is an empty list"),
        (deny('address = ["0.0.0.0/0"]'), "10:12: deny[0].address[0]: '0.0.0.0/0' is every address: leave it out"),
        (deny('address = ["10.0.0.1"]\npath = "/[0-9]+"'), "deny[0]: "),
        (deny('address = ["10.0.0.1"]\nresponse = {headers = {"A B" = "c"}}'), "11:12: deny[0].response: "),
        (deny('address = ["10.0.0.1"]', name="api"), "9:8: deny[0].name: a rule has the name 'api', too"),
        (
            deny('address = ["10.0.0.1"]\n[[deny]]\nname = "list"\naddress = ["10.0.0.2"]'),
            "12:8: deny[1].name: deny[0] has the name 'list', too",
        ),
    ],
)
def test_mistake_is_found_with_its_place(text: str, expected: str) -> None:
    (found,) = problems(text)
    assert expected in found


def test_check_counts_lists_and_names_those_that_have_ended(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(FILE + DENY + 'address = ["192.0.2.1"]\nuntil = 2020-01-01T00:00:00Z\n')
    result = CliRunner().invoke(command, ["check", str(file)])
    assert result.stdout == (
        f"{file} is valid: limits: 1, rules: 1, deny lists: 1\n"
        "deny list 'scrapers' has ended, at 2020-01-01T00:00:00+00:00\n"
    )
    document = json.loads(CliRunner().invoke(command, ["check", str(file), "--json"]).stdout)
    assert (document["deny"], document["ended_deny"]) == (
        1,
        [{"deny": "scrapers", "until": "2020-01-01T00:00:00+00:00"}],
    )


def explained(file: Path, *arguments: str) -> str:
    result = CliRunner().invoke(command, ["explain", str(file), *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_explain_shows_lists_and_bans(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    lists = 'address = ["192.0.2.0/24"]\nuntil = 2999-01-01T00:00:00Z\npath = "/a"\n'
    lists += '[[deny]]\nname = "over"\naddress = ["192.0.2.0/24"]\nuntil = 2020-01-01T00:00:00Z\n'
    file.write_text(FILE + 'ban = "guessers"\n' + BAN + DENY + lists)
    assert explained(file, "/a", "--client", "192.0.2.1") == (
        "scrapers: refused until 2999-01-01T00:00:00+00:00, by the deny list\n"
        "over: not for this request: it has ended, at 2020-01-01T00:00:00+00:00\n"
        "api: applies: key address '192.0.2.1', cost 1\n"
        "  api: FixedWindow, 5 requests per hour\n"
        "  banned after too many denials: guessers\n"
    )
    assert explained(file, "/b", "--client", "203.0.113.1").startswith(
        "scrapers: not for this request: the path '/b' does not match /a; the address 203.0.113.1 is in none of "
        "192.0.2.0/24\n"
    )
    result = CliRunner().invoke(command, ["explain", str(file), "/a", "--client", "192.0.2.1", "--json"])
    one, _, rule = json.loads(result.stdout)["rules"]
    assert (one["applies"], one["is_list"], one["until"]) == (True, True, "2999-01-01T00:00:00+00:00")
    assert (rule["is_list"], rule["ban"]) == (False, "guessers")
