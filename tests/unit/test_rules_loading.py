"""Rules from files: what they match, whom they count for, and what they answer."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import time_machine
from rule_files import FILE
from web_requests import CLIENT, Kind, Site, asgi_scope, wsgi_environ

from forebay import InvalidLimiter, InvalidRuleFile, Store
from forebay.rules import load_rules
from forebay.testing import ManualClock, private_stores
from forebay.web import Gate, Request
from forebay.web.native_requests import ASGIRequest, WSGIRequest

HEAD = """version = 1
[limits.api]
algorithm = "fixed-window"
rate = "3/hour"
"""


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


@pytest.fixture
def load(tmp_path: Path, store: Store) -> Callable[..., Any]:
    def load(text: str, name: str = "limits.toml", **options: Any) -> Any:
        path = tmp_path / name
        path.write_text(text)
        return load_rules(path, **{"store": store, **options})

    return load


@pytest.fixture
def site(kind: Kind, load: Callable[..., Any]) -> Callable[..., Site]:
    def make(rule: str, *, head: str = HEAD, handle: Callable[[], int] = lambda: 200, **options: Any) -> Site:
        return Site(kind, load(f'{head}[[rules]]\nname = "one"\nlimits = ["api"]\n{rule}\n', **options), {}, handle)

    return make


def statuses(site: Site, count: int, path: str = "/", method: str = "GET", **options: Any) -> list[int]:
    return [site.request(path, method, **options).status for _ in range(count)]


LIMITED = [200, 200, 200, 429]
FREE = [200] * 4


ALL_LIMITS = {
    "TokenBucket": 'algorithm = "token-bucket"\nrate = "5/hour"\nburst = 4\ninitial = 3',
    "TokenBucket, by interval": (
        'algorithm = "token-bucket"\nrate = "3/hour"\nrefill = "interval"\nstart = 2026-01-01T06:00:00+01:00'
    ),
    "LeakyBucket": 'algorithm = "leaky-bucket"\nrate = "3/hour"\ncapacity = 3',
    "MinInterval": 'algorithm = "min-interval"\ninterval = "20 minutes"',
    "FixedWindow": 'algorithm = "fixed-window"\nrate = "3/hour"\nalign = "stagger"',
    "FixedWindow, by the calendar": (
        'algorithm = "fixed-window"\nrate = "3/day"\nalign = "calendar"\ntimezone = "UTC"'
    ),
    "SlidingWindow": 'algorithm = "sliding-window"\nrate = "3/hour"\nrounding = "down"',
    "BucketedWindow": 'algorithm = "bucketed-window"\nrate = "3/hour"\nbuckets = 12\nkeys = 100',
    "SlidingLog": 'algorithm = "sliding-log"\nrate = "3/hour"\nkeys = 100',
    "Concurrency": 'algorithm = "concurrency"\nlimit = 3\nlease = "20s"\nkeys = 100',
}


@pytest.mark.parametrize("limiter", ALL_LIMITS)
def test_every_limiter_has_its_own_parameters(load: Callable[..., Any], limiter: str) -> None:
    text = f'version = 1\n[limits.api]\n{ALL_LIMITS[limiter]}\n[[rules]]\nname = "one"\nlimits = ["api"]\n'
    (rule,) = load(text)
    name, _, _ = limiter.partition(",")
    assert type(rule.limiter).__name__ == name
    assert rule.limiter.name == "api"
    allowed = [rule.limiter.allow("ada") for _ in range(4)]
    assert allowed == ([True, False, False, False] if name == "MinInterval" else [True, True, True, False])
    given = dict(line.split(" = ") for line in ALL_LIMITS[limiter].splitlines()[1:])
    for word in given.keys() & {"burst", "initial", "capacity", "align", "timezone", "rounding", "buckets", "refill"}:
        assert str(getattr(rule.limiter, word)) == given[word].strip('"')


def test_yaml_and_toml_say_the_same(load: Callable[..., Any]) -> None:
    toml = (
        HEAD + '[[rules]]\nname = "one"\nlimits = ["api"]\npath = "/a"\ncharge_on = [401, "403-404"]\nshadow = true\n'
    )
    yaml = """
version: 1
limits:
  api: {algorithm: fixed-window, rate: 3/hour}
rules:
  - name: one
    limits: [api]
    path: /a
    charge_on: [401, 403-404]
    shadow: true
"""
    for text, name in ((toml, "limits.toml"), (yaml, "limits.yaml"), (yaml, "limits.yml")):
        (rule,) = load(text, name)
        assert (rule.path, rule.charge_on, rule.shadow) == ("/a", {401, 403, 404}, True)
        assert str(rule.limiter.rate) == "3 per hour"


# What a rule is for


def test_path_and_methods(site: Callable[..., Site]) -> None:
    limited = site('path = ["/a/*", "/B"]\nmethods = ["POST", "PUT"]\nignore_case = true')
    assert statuses(limited, 4, "/A/x", "POST") == LIMITED
    assert statuses(limited, 1, "/b", "PUT") == [429]
    assert statuses(limited, 4, "/c", "POST") + statuses(limited, 4, "/a") == FREE * 2


@pytest.mark.parametrize(
    ("pattern", "values", "others"),
    [
        ("mobile", ["mobile"], ["Mobile", "mobile2", "", None]),
        ("*", ["x", "a b"], ["", None]),
        ("mobile/*", ["mobile/", "mobile/1"], ["mobile", "a mobile/1"]),
        ("*/json", ["a/json", "/json"], ["a/json;q=1"]),
        ("a*b*c", ["abc", "a-b-c", "abbcc"], ["ac", "acb", "ab", "abcd", "aXc"]),
        ("ab*ba", ["abba", "ab-ba"], ["aba", "ab"]),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_header_is_like_a_pattern(
    site: Callable[..., Site], pattern: str, values: list[str], others: list[str | None]
) -> None:
    limited = site(f"headers = {{X-App = '{pattern}'}}")
    for value in others:
        assert statuses(limited, 4, fields=[] if value is None else [("x-app", value)]) == FREE, value
    assert statuses(limited, 3, fields=[("X-App", values[0])]) == [200] * 3
    for value in values:
        assert statuses(limited, 1, fields=[("X-App", value)]) == [429], value


def test_long_header_takes_no_long_time(site: Callable[..., Site]) -> None:
    """By a regular expression with as many `.*` it would take until the end of this world."""
    limited = site(f"headers = {{X-App = '{'*a' * 20}*b'}}")
    assert statuses(limited, 4, fields=[("X-App", "a" * 30_000)]) == FREE


def test_addresses_are_in_networks(site: Callable[..., Site]) -> None:
    limited = site(
        'address = ["10.0.0.0/8", "2001:db8::/32", "192.0.2.9"]\n'
        'except_address = ["10.1.0.0/16", "2001:db8::8"]\nkey = "everyone"'
    )
    for other in ("10.1.2.3", "11.0.0.1", "2001:db9::1", "::ffff:10.1.0.1", "192.0.2.8", "2001:db8::8"):
        assert statuses(limited, 4, client=other) == FREE, other
    inside = ["10.2.0.1", "2001:db8::1", "::ffff:10.2.0.2", "10.255.255.255"]
    assert [limited.request(client=one).status for one in inside] == LIMITED


@pytest.mark.parametrize("word", ["address", "except_address"])
def test_client_without_an_address_is_in_no_network(site: Callable[..., Site], word: str) -> None:
    proxied = '[client]\ntrusted_proxies = ["unix"]\nheader = "X-Forwarded-For"\n'
    limited = site(f'{word} = ["0.0.0.0/1", "128.0.0.0/1"]', head=HEAD.replace("[limits", proxied + "[limits"))
    # An allow list never has it.
    assert statuses(limited, 4, client=None) == (FREE if word == "address" else LIMITED)


@pytest.mark.parametrize("word", ["address", "except_address"])
def test_unknown_client_is_in_no_network(site: Callable[..., Site], word: str) -> None:
    """The server reports no address, and the file trusts no field."""
    limited = site(f'{word} = ["0.0.0.0/1", "128.0.0.0/1"]\nkey = "everyone"')
    assert statuses(limited, 4, client=None) == (FREE if word == "address" else LIMITED)


def test_unknown_client_has_no_override(site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    with time_machine.travel("2026-11-30T23:59:00Z", tick=False):
        answer = site(OVERRIDES % "exempt = true").request(client=None)
    assert (answer.status, answer["content-type"]) == (500, "application/problem+json")


def test_proxies_of_the_file_name_the_client(site: Callable[..., Site]) -> None:
    proxied = '[client]\ntrusted_proxies = ["10.0.0.0/8"]\nheader = "X-Forwarded-For"\n'
    head = HEAD.replace("[limits", proxied + "[limits")
    limited = site('except_address = ["192.0.2.0/24"]', head=head)
    forwarded = [("X-Forwarded-For", "198.51.100.7")]
    assert statuses(limited, 4, client="10.0.0.1", fields=forwarded) == LIMITED
    assert statuses(limited, 1, client="198.51.100.7") == [429]
    assert statuses(limited, 4, client="10.0.0.1", fields=[("X-Forwarded-For", "192.0.2.7")]) == FREE
    # The client's own claim doesn't count.
    assert statuses(limited, 4, client="203.0.113.1", fields=[("X-Forwarded-For", "192.0.2.7")]) == LIMITED


def test_proxy_that_names_no_client_is_in_no_network(site: Callable[..., Site]) -> None:
    """Otherwise its own address would exempt every client that it doesn't name."""
    proxied = '[client]\ntrusted_proxies = ["10.0.0.0/8"]\nheader = "X-Forwarded-For"\n'
    limited = site('except_address = ["10.0.0.0/8"]', head=HEAD.replace("[limits", proxied + "[limits"))
    assert statuses(limited, 4, client="10.0.0.1") == LIMITED
    inside = [("X-Forwarded-For", "10.5.5.5")]
    assert statuses(limited, 4, client="10.0.0.1", fields=inside) == FREE


def plan(request: Request) -> str:
    return request.header("X-Plan") or "free"


TIERS = 'version = 1\ntiers = ["free", "pro", "internal"]\n' + HEAD.removeprefix("version = 1\n")


def test_rules_are_for_tiers(load: Callable[..., Any], kind: Kind) -> None:
    text = f"""{TIERS}
[limits.pro]
algorithm = "fixed-window"
rate = "5/hour"
[[rules]]
name = "free"
limits = ["api"]
tier = ["free"]
[[rules]]
name = "others"
limits = ["pro"]
except_tier = ["free", "internal"]
"""
    limited = Site(kind, load(text, tier=plan))
    assert statuses(limited, 4) == LIMITED
    assert statuses(limited, 6, fields=[("X-Plan", "pro")]) == [200] * 5 + [429]
    assert statuses(limited, 9, fields=[("X-Plan", "internal")]) == [200] * 9
    # The limits of all tiers hold for a tier that the file doesn't name.
    assert statuses(limited, 1, fields=[("X-Plan", "gold")]) == [429]
    assert limited.request(client="192.0.2.9", fields=[("X-Plan", "gold")])["ratelimit"].startswith('"api";r=2')


def test_tier_may_be_awaited_under_asgi(load: Callable[..., Any]) -> None:
    async def tier(request: Request) -> str:
        return plan(request)

    text = TIERS + '[[rules]]\nname = "one"\nlimits = ["api"]\nexcept_tier = ["free", "internal"]\n'
    limited = Site("asgi", load(text, tier=tier))
    assert statuses(limited, 4, fields=[("X-Plan", "pro")]) == LIMITED
    assert statuses(limited, 4) == FREE


def test_several_limits_of_a_rule_hold_together(
    site: Callable[..., Site], load: Callable[..., Any], kind: Kind
) -> None:
    text = f"""{HEAD}
[limits.all]
algorithm = "fixed-window"
rate = "5/hour"
[[rules]]
name = "one"
limits = ["api", "all"]
[[rules]]
name = "more"
limits = ["api"]
path = "/dear"
cost = 2
"""
    limited = Site(kind, load(text))
    assert statuses(limited, 2, "/dear") == [200, 429]  # one and two permits of "api"
    assert limited.request("/")["ratelimit-policy"] == '"api";q=3;w=3600, "all";q=5;w=3600'


# Keys


def key_of(rules: Any, kind: Kind, path: str = "/", **options: Any) -> Any:
    (rule,) = rules
    made = ASGIRequest(asgi_scope(path, **options)) if kind == "asgi" else WSGIRequest(wsgi_environ(path, **options))
    return rule.key(made)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ('"address"', CLIENT),
        ('"everyone"', "everyone"),
        ('"user | address"', ("user", "ada")),
        ('"header:X-API-Key | address"', ("header", "x-api-key", "k")),
        ('"header:X-Other | address"', CLIENT),
        ('"constant:reports"', ("constant", "reports")),
        ('["path:id", "address"]', ("path", "id", "7", "address", CLIENT)),
        ('["tier", "header:X-Other | user | everyone"]', ("tier", "pro", "user", "ada")),
        ('["constant:a", "everyone"]', ("constant", "a", "constant", "")),
    ],
)
def test_key_has_its_parts(load: Callable[..., Any], kind: Kind, key: str, expected: Any) -> None:
    rules = load(
        f'{HEAD}[[rules]]\nname = "one"\nlimits = ["api"]\npath = "/users/{{id:int}}/*"\nkey = {key}\n',
        tier=lambda request: "pro",
        user=lambda request: "ada",
    )
    assert key_of(rules, kind, "/users/7/posts", fields=[("X-API-Key", "k")]) == expected


def test_user_is_the_requests_own_without_a_function(load: Callable[..., Any], kind: Kind) -> None:
    rules = load(f'{HEAD}[[rules]]\nname = "one"\nlimits = ["api"]\nkey = "user | address"\n')
    assert key_of(rules, kind, user="ada") == ("user", "ada")
    assert key_of(rules, kind) == CLIENT


@pytest.mark.parametrize(("result", "message"), [(5, "user returned 5, which is no user"), (b"x", "no user")])
def test_user_of_another_type_is_refused(load: Callable[..., Any], kind: Kind, result: Any, message: str) -> None:
    text = f'{HEAD}[[rules]]\nname = "one"\nlimits = ["api"]\nkey = "user | address"\n'
    with pytest.raises(InvalidLimiter, match=message):
        key_of(load(text, user=lambda request: result), kind)


class TestPathParameter:
    def rules(self, load: Callable[..., Any], more: str = "") -> Any:
        return load(
            f'{HEAD}[[rules]]\nname = "one"\nlimits = ["api"]\npath = ["/users/{{id}}", "/caf%C3%A9/{{id}}/*"]\n'
            f'key = "path:id"\n{more}'
        )

    @pytest.mark.parametrize("path", ["/users/7", "/users/7/", "/users/7//", "//users/7", "/caf\xe9/7", "/caf\xe9/7/x"])
    def test_spellings_of_one_value_are_one_key(self, load: Callable[..., Any], path: str) -> None:
        assert key_of(self.rules(load), "asgi", path) == ("path", "id", "7")

    @pytest.mark.parametrize("path", ["/users/7;a=1", "/users/%37", "/users/7;b", "/x/../users/7", "/users/@@7"])
    def test_spellings_that_a_router_may_read_otherwise_share_one_key(
        self, load: Callable[..., Any], path: str
    ) -> None:
        """Otherwise each of them would have a limit of its own."""
        assert key_of(self.rules(load), "asgi", path) == ("path", "id", "")

    def test_case_counts_unless_it_is_ignored(self, load: Callable[..., Any]) -> None:
        assert key_of(self.rules(load), "asgi", "/users/Ada") == ("path", "id", "Ada")
        assert key_of(self.rules(load, "ignore_case = true\n"), "asgi", "/Users/Ada") == ("path", "id", "ada")


# Cost, outcome, response


def test_cost_and_charge_on(site: Callable[..., Site]) -> None:
    answers = iter([200, 401, 200, 401, 200])
    limited = site("cost = 1\ncharge_on = [401]", handle=lambda: next(answers))
    assert statuses(limited, 5) == [200, 401, 200, 401, 200]
    assert site("cost = 3").request().status == 429


def test_response_has_the_fields_of_a_denial(site: Callable[..., Site]) -> None:
    limited = site('response = {status = 503, body = "slow down", headers = {X-Why = "limit"}}')
    answer = [limited.request() for _ in range(4)][-1]
    assert (answer.status, answer.body, answer["x-why"]) == (503, b"slow down", "limit")
    assert answer["content-type"] == "text/plain; charset=utf-8"
    assert int(answer["retry-after"]) > 0
    assert answer["ratelimit"].startswith('"api";r=0')


def test_status_alone_keeps_the_report(site: Callable[..., Site]) -> None:
    answer = [site("response = {status = 420}").request() for _ in range(4)][-1]
    assert (answer.status, answer["content-type"]) == (420, "application/problem+json")


def test_response_that_looks_like_success_has_no_traces(site: Callable[..., Site]) -> None:
    limited = site('response = {status = 200, headers = {Content-Type = "application/json"}, body = "{}"}')
    answers = [limited.request() for _ in range(4)]
    assert (answers[-1].status, limited.handled) == (200, 3)
    assert not [name for answer in answers for name, _ in answer.fields if name in ("retry-after", "ratelimit")]


def test_delay_holds_requests_back(site: Callable[..., Site], clock: ManualClock) -> None:
    head = 'version = 1\n[limits.api]\nalgorithm = "leaky-bucket"\nrate = "1/second"\ncapacity = 9\n'
    limited = site('delay = "2s"\nmost_delayed = 5', head=head)
    before_ns = clock.now_ns()
    assert statuses(limited, 3) == [200] * 3
    assert clock.now_ns() - before_ns == 2_000_000_000


def test_bytes_go_at_the_rate_of_a_tier(load: Callable[..., Any], kind: Kind, clock: ManualClock) -> None:
    text = """version = 1
tiers = ["free", "pro"]
[limits.slow]
algorithm = "token-bucket"
rate = "2 B/second"
[[rules]]
name = "files"
limits = ["slow"]
path = "/files/*"
tier = ["free"]
bytes = "responses"
after = "1 B"
most_wait = "1 minute"
most_held = 9
[[rules]]
name = "pro files"
limits = ["slow"]
path = "/archive/*"
tier = ["pro"]
bytes = "responses"
[[rules]]
name = "uploads"
limits = ["slow"]
methods = "POST"
bytes = "requests"
[[rules.overrides]]
key = {address = "192.0.2.1"}
deny = true
until = 2999-01-01T00:00:00Z
"""
    limited = Site(kind, load(text, tier=plan))
    begin = clock.now()
    assert limited.request("/files/1", fields=[("X-Plan", "pro")]).body == b"done"
    assert clock.now() == begin
    # Four bytes: one is free, two go at once, and one waits.
    assert limited.request("/files/1").body == b"done"
    assert clock.now() == begin + 0.5
    assert limited.request("/other", method="POST").status == 403


def test_shadow_rule_denies_nothing(site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay.web.denied")
    assert statuses(site("shadow = true"), 4) == FREE
    assert [record.getMessage() for record in caplog.records] == ["in the shadow, 429 for 'GET' '/' by api"]


# Overrides

OVERRIDES = """
[[rules.overrides]]
key = {address = "192.0.2.1"}
%s
until = 2026-12-01T00:00:00Z
[[rules.overrides]]
key = {address = "2001:db8::7"}
exempt = true
until = 2026-12-01T00:00:00Z
"""
MORE = HEAD + '[limits.more]\nalgorithm = "fixed-window"\nrate = "5/hour"\n'


@pytest.mark.parametrize(
    ("effect", "head", "expected"),
    [
        ('limits = ["more"]', MORE, [200] * 5 + [429]),
        ("exempt = true", HEAD, [200] * 6),
        ("deny = true", HEAD, [403] * 6),
    ],
)
def test_override_holds_for_its_key_until_its_time(
    site: Callable[..., Site], effect: str, head: str, expected: list[int]
) -> None:
    with time_machine.travel("2026-11-30T23:59:00Z", tick=False) as traveller:
        limited = site(OVERRIDES % effect, head=head)
        assert statuses(limited, 6) == expected
        assert statuses(limited, 4, client="192.0.2.2") == LIMITED
        assert statuses(limited, 4, client="2001:db8::ffff") == FREE  # of the same /64
        traveller.shift(61)
        assert statuses(limited, 4) == LIMITED
        assert statuses(limited, 4, client="2001:db8::7") == LIMITED


@pytest.mark.parametrize("effect", ['limits = ["more"]', "deny = true"])
def test_no_request_is_without_a_limit_when_an_override_ends(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    """The clock passes the end after each number of readings."""
    text = f"""{MORE}[[rules]]
name = "one"
limits = ["api"]
{OVERRIDES % effect}
[[rules]]
name = "other"
limits = ["more"]
path = "/other"
"""
    gate = Gate(load(text))
    end_s = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    for readings_before in range(4):
        readings = iter([end_s - 1] * readings_before + [end_s + 1] * 9)
        monkeypatch.setattr(time, "time", functools.partial(next, readings))
        assert gate.enter(ASGIRequest(asgi_scope("/"))) is not None


def test_denial_says_until_when(site: Callable[..., Site], store: Store) -> None:
    with time_machine.travel("2026-11-30T23:59:00Z", tick=False):
        plain = site(OVERRIDES % "deny = true").request()
        assert (plain.status, plain["retry-after"]) == (403, "60")
        assert plain.json["detail"] == "Requests of this client are denied until 2026-12-01T00:00:00+00:00."
        own = site('response = {status = 418, body = "no"}' + OVERRIDES % "deny = true").request()
        assert (own.status, own.body, own["retry-after"]) == (418, b"no", "60")
        hidden = site('response = {status = 200, body = "ok"}' + OVERRIDES % "deny = true")
        assert (hidden.request().status, hidden.handled) == (200, 0)
    # A denied request counts nowhere.
    assert store.stats().live_keys == 0


def test_denied_key_is_denied_beside_other_rules(load: Callable[..., Any], kind: Kind) -> None:
    text = f"""{HEAD}
[limits.held]
algorithm = "concurrency"
limit = 1
[[rules]]
name = "held"
limits = ["held"]
charge_on = [401]
[[rules]]
name = "one"
limits = ["api"]
{OVERRIDES % "deny = true"}""".replace("charge_on = [401]\n", "")
    with time_machine.travel("2026-11-30T23:59:00Z", tick=False):
        limited = Site(kind, load(text))
        assert statuses(limited, 3) == [403] * 3
        assert statuses(limited, 4, client="192.0.2.2") == LIMITED


def test_override_of_a_combined_key(load: Callable[..., Any], kind: Kind) -> None:
    text = f"""{HEAD}
[[rules]]
name = "one"
limits = ["api"]
path = "/users/{{id}}"
key = ["constant:users", "header:X-API-Key | address", "path:id"]
[[rules.overrides]]
key = {{"header:X-API-KEY" = "secret", "path:id" = "7"}}
exempt = true
until = 2999-01-01T00:00:00Z
"""
    limited = Site(kind, load(text))
    secret = [("X-Api-Key", "secret")]
    assert statuses(limited, 4, "/users/7", fields=secret) == FREE
    assert statuses(limited, 4, "/users/8", fields=secret) == LIMITED
    assert statuses(limited, 4, "/users/7", fields=[("X-Api-Key", "other")]) == LIMITED


# Stores and arguments


def test_file_names_its_store(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text('store = "shm:///shop?keys=100"\n' + FILE)
    with private_stores(ManualClock(1000)):
        (rule,) = load_rules(path)
        assert rule.limiter.store.path == Store("shop", keys=100).path
        (rule,) = load_rules(path, in_loop=True)
        assert rule.limiter.store.path == Store("shop", keys=100).path


def test_store_is_named_once(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    with pytest.raises(InvalidRuleFile, match='1:1: the file names no store: write store = "shm:'):
        load_rules(path)
    path.write_text('store = "shm:///shop?keys=100"\n' + FILE)
    with pytest.raises(InvalidRuleFile, match="1:1: a store is given beside the file, too: leave one of the two out"):
        load_rules(path, store=store)
    path.write_text('store = "shn:///secret"\n' + FILE)
    with pytest.raises(InvalidRuleFile, match="1:9: store: the URL of a store begins with shm") as raised:
        load_rules(path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("store", ["shm:///shop?keys=1000", b"", 5, object()])
def test_something_else_is_no_store(load: Callable[..., Any], store: Any) -> None:
    with pytest.raises(
        InvalidLimiter, match=r"store is a store, as forebay\.connect\(url\) returns one, not"
    ) as raised:
        load(FILE, store=store)
    assert "shm:///" not in str(raised.value)


def test_functions_are_checked(load: Callable[..., Any]) -> None:
    async def user(request: Request) -> str:
        return "ada"

    with pytest.raises(InvalidLimiter, match="user is a plain function"):
        load(FILE, user=user)
    with pytest.raises(InvalidLimiter, match="tier is a callable that takes a request, not 'pro'"):
        load(FILE, tier="pro")


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_rules(tmp_path / "none.toml")
