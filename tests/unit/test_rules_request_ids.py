"""Request ids in rule files: a client's retry is charged once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rule_files import FILE, LIMITS, problems
from test_rules_live import TextSource
from web_requests import Answered, Kind, Site

from forebay import Store
from forebay.cli.rules import command
from forebay.rules import LiveRules, load_rules
from forebay.testing import ManualClock

IDS = "request_id = { retries = 2 }\n"


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


def loaded(tmp_path: Path, text: str, store: Any) -> Any:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return load_rules(path, store=store)


def post(site: Site, sent: str | None = "one", field: str = "Idempotency-Key") -> Answered:
    return site.request("/", "POST", fields=[] if sent is None else [(field, sent)])


def test_a_retry_is_charged_once(kind: Kind, tmp_path: Path, store: Store) -> None:
    site = Site(kind, loaded(tmp_path, FILE + IDS, store))
    # The limit, and two free retries.
    assert [post(site).status for _ in range(8)] == [200] * 7 + [429]


def test_words_of_the_request_id_count(tmp_path: Path, store: Store, clock: ManualClock) -> None:
    words = 'request_id = { field = "X-Id", retries = 1, lasts = "10s" }\n'
    site = Site("wsgi", loaded(tmp_path, FILE + words, store))
    assert post(site, field="X-Id")["ratelimit"] == post(site, field="X-Id")["ratelimit"]
    clock.advance(10)
    assert "r=3" in post(site, field="X-Id")["ratelimit"]
    assert "r=2" in post(site)["ratelimit"]


def test_all_limits_of_a_rule_and_an_override_charge_a_retry_once(tmp_path: Path, store: Store) -> None:
    more = '[limits.other]\nalgorithm = "fixed-window"\nrate = "2/hour"\n'
    override = '[[rules.overrides]]\nkey = {address = "192.0.2.1"}\nuntil = 2999-01-01T00:00:00Z\nlimits = ["other"]\n'
    text = FILE.replace('["api"]', '["api", "other"]') + IDS + more
    site = Site("wsgi", loaded(tmp_path, text, store))
    assert [post(site).status for _ in range(5)] == [200] * 4 + [429]
    with Store.private(keys=1000) as second:
        site = Site("wsgi", loaded(tmp_path, FILE + IDS + override + more, second))
        assert [post(site).status for _ in range(5)] == [200] * 4 + [429]
        override = override.replace('limits = ["other"]', "deny = true")
        site = Site("wsgi", loaded(tmp_path, FILE + IDS + override, second))
        assert [post(site, "two").status for _ in range(2)] == [403] * 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("request_id = 5", "8:14: rules[0].request_id is a table such as"),
        (
            'request_id = { fields = "a" }',
            "8:16: 'fields' is no word of rules[0].request_id: did you mean 'field'? allowed: field, lasts, retries",
        ),
        ("request_id = { retries = 0 }", "8:26: rules[0].request_id.retries is a whole number from 1 to 100, not 0"),
        (
            'request_id = { field = "a b" }',
            "8:24: rules[0].request_id.field: a header field has a name such as \"Idempotency-Key\", not 'a b'",
        ),
        ('request_id = { lasts = "long" }', "8:24: rules[0].request_id.lasts: 'long' is not a length of time"),
        ("request_id = {}\ncharge_on = [401]", "5:3: rules[0]: the rule of"),
        (
            'request_id = {}\nbytes = "responses"',
            "8:14: rules[0].request_id: request_id has no effect on bytes: leave it out",
        ),
        (
            'request_id = {}\n[[rules]]\nname = "b"\nlimits = ["api"]\nrequest_id = {retries = 2}',
            "12:14: rules[1].request_id: a request has one id, and rules[0].request_id is another one: write the same",
        ),
        (
            'request_id = {}\n[limits."api attempts"]\nalgorithm = "min-interval"\ninterval = "1s"\n'
            '[[rules]]\nname = "b"\nlimits = ["api attempts"]',
            "8:14: rules[0].request_id: the limit 'api attempts' has the name of the count of its attempts: rename it",
        ),
    ],
)
def test_mistake_is_found_with_its_place(words: str, expected: str) -> None:
    found = problems(f"{FILE}{words}\n")
    assert found[0].startswith(expected) or found[0].startswith(expected.replace("5:3", "5:1")), found


def test_held_limit_is_refused() -> None:
    held = LIMITS.replace('"fixed-window"\nrate = "5/hour"', '"concurrency"\nlimit = 5')
    [found] = problems(FILE.replace(LIMITS, held) + IDS)
    assert "takes no request_id" in found


def test_explain_shows_the_retries(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(FILE + "request_id = {}\n")
    result = CliRunner().invoke(command, ["explain", str(file), "/", "--client", "192.0.2.1"])
    assert result.stdout == (
        "api: applies: key address '192.0.2.1', cost 1\n"
        "  api: FixedWindow, 5 requests per hour\n"
        "  a retry with the same Idempotency-Key is not charged again, up to 3 times within 5 minutes\n"
    )


def test_live_rules_keep_marks_and_do_not_warn_of_another_id(kind: Kind, store: Store) -> None:
    source = TextSource(FILE + IDS)
    with warnings.catch_warnings(), LiveRules(source, store=store, interval="10 hours") as rules:
        warnings.simplefilter("error")
        site = Site(kind, rules)
        first = post(site)
        source.text = FILE + IDS + "shadow = false\n"
        rules.step(), rules.step()
        assert (rules.status().version, post(site)["ratelimit"]) == (2, first["ratelimit"])
        source.text = FILE + IDS.replace("2", "1")
        rules.step(), rules.step()
        assert rules.status().version == 3
        assert [post(site, "new").status for _ in range(6)] == [200] * 5 + [429]
