"""The server's decisions beside those of Python's gate, for the same rule file and the same requests."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forebay_server
import pytest
from decision_server import Both
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay import InvalidRuleFile, Store
from forebay.serving.plan import plan_of
from forebay.testing import ManualClock

RULES = """
tiers = ["free", "paid"]
[limits.all]
algorithm = "token-bucket"
rate = "60/minute"
burst = 6
[limits.queue]
algorithm = "leaky-bucket"
rate = "10/second"
capacity = 4
[limits.apart]
algorithm = "min-interval"
interval = "2s"
[limits.login]
algorithm = "fixed-window"
rate = "5/hour"
align = "first"
[limits.orders]
algorithm = "sliding-window"
rate = "10/minute"
[limits.tried]
algorithm = "sliding-log"
rate = "2/minute"
keys = 100
[limits.parts]
algorithm = "bucketed-window"
rate = "7/minute"
[limits.partner]
algorithm = "token-bucket"
rate = "2/second"
[limits.tiered]
algorithm = "fixed-window"
rate = "9/minute"
align = "first"
[limits.before]
algorithm = "fixed-window"
rate = "8/minute"
align = "first"
[limits.after]
algorithm = "token-bucket"
rate = "4/minute"
[limits."odd \\u00f6"]
algorithm = "token-bucket"
rate = "30/minute"
refill = "interval"

[[deny]]
name = "scrapers"
address = ["198.51.100.0/24", "2001:db8:7::/48"]
until = 2999-01-31T12:00:00Z
[[deny]]
name = "closed"
address = ["192.0.2.66"]
path = "/api/*"
response = { status = 451, body = "No.", headers = { X-Why = "law" } }

[[rules]]
name = "all"
limits = ["all"]
except_address = ["10.0.0.0/8"]
[[rules]]
name = "queue"
limits = ["queue", "parts"]
path = ["/queue", "/api/{version}/queue/*"]
key = "everyone"
[[rules]]
name = "apart"
limits = ["apart"]
path = "/sms/{number}"
key = ["path:number", "header:X-API-Key | address"]
response = { status = 503, body = "Later." }
[bans.guessers]
denials = "3/minute"
lasts = "1 minute"
[bans."odd \\u00f6"]
denials = "1/minute"
lasts = "5 seconds"

[[rules]]
name = "login"
limits = ["login"]
path = "/login"
methods = "POST"
ignore_case = true
ban = "guessers"
[[rules.overrides]]
key = { address = "192.0.2.2" }
deny = true
until = 2999-01-31T12:00:00Z
[[rules.overrides]]
key = { address = "192.0.2.3" }
exempt = true
until = 2999-01-31T12:00:00Z
[[rules.overrides]]
key = { address = "192.0.2.4" }
limits = ["partner"]
until = 2999-01-31T12:00:00Z
[[rules.overrides]]
key = { address = "192.0.2.5" }
deny = true
until = 2020-01-31T12:00:00Z
[[rules]]
name = "orders"
limits = ["orders", "odd \\u00f6"]
path = "/orders/*"
methods = ["GET", "PUT"]
headers = { X-App = "mobile/*" }
ban = "odd \\u00f6"
cost = 2
response = { status = 503 }
[[rules]]
name = "tiered"
limits = ["tiered"]
path = "/queue"
except_tier = ["paid"]
key = ["tier", "header:X-API-Key | address"]
[[rules]]
name = "paid"
limits = ["partner"]
path = "/queue/*"
tier = ["paid"]
key = "tier"
[[rules]]
name = "changing"
limits = ["before"]
path = ["/sms/{number}", "/orders"]
key = ["address", "header:X-API-Key | constant:none"]
canary = { percent = 50, limits = ["after"] }
[[rules.overrides]]
key = { address = "192.0.2.4", "header:x-api-key" = "ada" }
exempt = true
until = 2999-01-31T12:00:00Z
[[rules]]
name = "alone"
limits = ["before"]
path = "/alone"
canary = { percent = 30.5, limits = ["after"] }
[[rules]]
name = "tried"
limits = ["tried", "partner"]
path = "/orders/{id}"
shadow = true
key = "header:X-API-Key | constant:none"
"""

LIMIT = '[limits.a]\nalgorithm = "fixed-window"\nrate = "5/hour"\n'
CALENDAR = LIMIT.replace("hour", "month") + 'align = "calendar"\ntimezone = "UTC"\n'
BUCKET = '[limits.a]\nalgorithm = "token-bucket"\nrate = "5/hour"\n'
HELD = '[limits.a]\nalgorithm = "concurrency"\nlimit = 3\n'
RULE = '[[rules]]\nname = "a"\nlimits = ["a"]\n'

_TARGETS = [
    *(b"/", b"/alone", b"/queue", b"/queue/", b"/api/v1/queue/7", b"/api/x", b"/sms/1", b"/sms/2?now", b"/login"),
    *(b"/log\xc4\xb1n", b"/orders/1", b"/orders/1/items", b"/orders", b"//login", b"/login;x=1", b"/a/../login"),
    *(b"/LOGIN/", b"/sms/1;a", b"/queue/index", b"/api/%76/queue"),
]
TARGETS = st.sampled_from(_TARGETS)
ADDRESSES = ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5", "192.0.2.66", "198.51.100.9", "10.9.9.9"]
FIELDS = st.lists(
    st.sampled_from(
        [
            *[("x-forwarded-for", address) for address in ADDRESSES],
            *[
                ("x-forwarded-for", text)
                for text in ("2001:db8:7::9", "2001:db8:8::9, 10.0.0.1", "unknown", "[::1]:80")
            ],
            *[
                ("x-forwarded-for", "192.0.2.1:80, 10.1.1.1"),
                ("x-forwarded-for", "::ffff:192.0.2.4"),
                ("x-forwarded-for", ""),
            ],
            *[("x-app", "mobile/3"), ("x-app", "web"), ("x-api-key", "ada"), ("x-api-key", "\xe9"), ("x-api-key", "")],
            *[("x-tier", "free"), ("x-tier", "paid"), ("x-tier", "other")],
            *[("x-http-method-override", "post, put"), ("origin", "https://a.example")],
            ("access-control-request-method", "POST"),
        ]
    ),
    max_size=4,
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "put"]),
        TARGETS,
        FIELDS,
        st.sampled_from(["127.0.0.1", "10.0.0.9", "192.0.2.1", "2001:db8:7::1", None]),
        st.sampled_from([0, 0, 1, 100_000_000, 500_000_000, 2_000_000_000, 61_000_000_000]),
    ),
    min_size=1,
    max_size=40,
)


def drawn(count: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Requests, each with the nanoseconds that go by before it. Always the same ones."""
    draw = random.Random(1)
    for _ in range(count):
        pause_ns = draw.choice([0, 0, 0, 1, 100_000_000, 500_000_000, 2_000_000_000])
        fields = [("x-forwarded-for", draw.choice([*ADDRESSES, "2001:db8:7::9", "unknown", ""]))]
        fields += draw.choice([[], [("x-app", "mobile/3")], [("x-app", "web"), ("x-api-key", "ada")]])
        fields += draw.choice([[], [("x-tier", "free")], [("x-tier", "paid")]])
        fields += draw.choice([[]] * 9 + [[("origin", "https://a"), ("access-control-request-method", "PUT")]])
        method, target = draw.choice(["GET", "POST", "PUT", "OPTIONS"]), draw.choice(_TARGETS)
        yield pause_ns, (method, target, fields, draw.choice(["127.0.0.1"] * 6 + ["10.0.0.9", "192.0.2.1", None]))


KINDS = ("200 ", "403 ", "429 ", "451 ", "503 ", "address are refused", "denied until", "requests were denied")


def compare(
    pair: Both, requests: Iterator[tuple[int, tuple[Any, ...]]], move: Callable[[int], None], seen: Sequence[str]
) -> None:
    """Ask both about each request, after `move` has let its time go by. Answers of all kinds `seen` occur."""
    kinds: dict[str, str] = {}
    for pause_ns, request in requests:
        move(pause_ns)
        ours = pair.ask_server(*request)
        assert ours == pair.ask_python(*request), request
        kinds.setdefault(f"{ours[0]} {ours[2]!r}", str(request))
    for each in seen:
        assert any(each in kind for kind in kinds), f"{each} is in none of {kinds}"


@given(REQUESTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_server_answers_as_the_gate_does(tmp_path: Path, requests: list[Any]) -> None:
    clock = ManualClock()
    with Store.private(keys=4096, clock=clock) as served, Store.private(keys=4096, clock=clock) as own:
        both = Both(tmp_path / "limits.toml", RULES, served, own)
        for method, target, fields, peer, pause_ns in requests:
            clock.set_ns(clock.now_ns() + pause_ns)
            request = (method, target, fields, peer)
            assert both.ask_server(*request) == both.ask_python(*request), request
        _have_same_counts(served, own)


def _have_same_counts(served: Store, own: Store) -> None:
    ours, theirs = served.stats().limiters, own.stats().limiters
    for name in ours:
        assert (ours[name].allowed, ours[name].denied) == (theirs[name].allowed, theirs[name].denied), name


def test_the_server_answers_as_the_gate_does_in_a_long_run(both: Callable[[str], Both], clock: ManualClock) -> None:
    pair = both(RULES)
    compare(pair, drawn(3000), lambda pause_ns: clock.set_ns(clock.now_ns() + pause_ns), KINDS)
    _have_same_counts(pair.served, pair.own)


KEYS = [
    ('"everyone"', b"/", []),
    ('"constant:a"', b"/", []),
    ('"header:X-API-Key | address"', b"/", [("x-api-key", "\xe9, b")]),
    ('"header:X-API-Key | address"', b"/", []),
    ('["path:id", "header:X-API-Key | constant:none", "address"]', b"/users/7%20a", []),
    ('"path:id"', b"/users/7;a=1", []),
    ('["path:id", "everyone"]', b"/users/a%2Fb", []),
]
"""Keys, and a target and the fields of a request."""


@pytest.mark.parametrize(("key", "target", "fields"), KEYS)
def test_a_key_is_the_same_for_the_server_and_for_python(
    tmp_path: Path, key: str, target: bytes, fields: list[tuple[str, str]]
) -> None:
    with Store.private(keys=4096) as store:
        have_same_key(tmp_path, store, key, target, fields)


def have_same_key(folder: Path, store: Any, key: str, target: bytes, fields: list[tuple[str, str]]) -> None:
    """The server charges a request, and Python's gate the next permit of its key."""
    path = 'path = "/users/{id}"\n' if "path:id" in key else ""
    pair = Both(folder / "limits.toml", f"{LIMIT}{RULE}{path}key = {key}\n", store, store)
    first = pair.ask_server("GET", target, fields, "127.0.0.1")
    assert first[1][1][1].startswith('"a";r=4')
    if target == b"/users/a%2Fb":
        # Only a router that doesn't decode the path takes it for a user's.
        assert pair.ask_python("GET", target, fields, "127.0.0.1")[1] == []
    else:
        assert pair.ask_python("GET", target, fields, "127.0.0.1")[1][1][1].startswith('"a";r=3')


_HOPS = st.sampled_from(
    [
        *("192.0.2.1", "10.0.0.7", "10.1.1.1:80", "[2001:db8:1::7]:443", "2001:db8:1::7", "::ffff:10.0.0.7", "unix"),
        *("for=192.0.2.1", 'for="[2001:db8:2::7]:80"', "for=10.0.0.7", "For=192.0.2.9;proto=http", "for=a;for=b"),
        *(",", ", ", ";", '"', "\\", "=", " ", "", "unknown", "for=", "1.2.3.4:x", "1.2.3.4:\xb2", "fe80::1%eth0"),
        *("1.2.3", "01.2.3.4", "::", "1:2:3:4:5:6:7::", "::1.2.3.4", "[", "]", "2001:DB8::A:0:0:1", "\xa0", "\x85"),
    ]
)

_FIELD = st.lists(_HOPS, max_size=8).map("".join)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Callable[[str], Both]]:
    """A rule of each client, for a field of proxies."""
    with ExitStack() as stores:

        @functools.cache
        def make(field: str) -> Both:
            store = stores.enter_context(Store.private(keys=4096))
            text = LIMIT.replace("5/hour", "1000000/day") + RULE
            return Both(tmp_path / "limits.toml", text, store, store, field)

        yield make


@pytest.mark.parametrize("field", ["X-Forwarded-For", "Forwarded"])
@given(
    text=st.lists(_HOPS, max_size=8).map("".join), peer=st.sampled_from(["127.0.0.1", "10.0.0.1", "192.0.2.1", None])
)
@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_client_is_the_same_for_the_server_and_for_python(
    clients: Callable[[str], Both], field: str, text: str, peer: str | None
) -> None:
    pair = clients(field)
    fields = [(field, text.strip(" \t"))]
    first, second = (ask("GET", b"/", fields, peer)[1][1][1] for ask in (pair.ask_server, pair.ask_python))
    left = [int(item.partition("r=")[2].partition(";")[0]) for item in (first, second)]
    # Both are of one store: the second one finds what the first has charged.
    assert left[1] == left[0] - 1


def test_more_rules_than_one_decision_takes_are_all_or_none(both: Callable[[str], Both]) -> None:
    text = "".join(
        f'[limits.l{n}]\nalgorithm = "fixed-window"\nrate = "{3 if n == 19 else 9}/hour"\n' for n in range(20)
    )
    text += "".join(f'[[rules]]\nname = "r{n}"\nlimits = ["l{n}"]\n' for n in range(20))
    pair = both(text)
    request = ("GET", b"/", [("x-forwarded-for", "192.0.2.1")], "127.0.0.1")
    for _ in range(5):
        ours, theirs = pair.ask_server(*request), pair.ask_python(*request)
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert {pair.plan.limiters[n].peek("192.0.2.1").remaining for n in range(19)} == {6}


def test_a_full_store_has_no_room_for_another_client(tmp_path: Path) -> None:
    rules = '[limits.a]\nalgorithm = "min-interval"\ninterval = "1 hour"\n[[rules]]\nname = "a"\nlimits = ["a"]\n'
    with Store.private(keys=64, on_full="deny") as served, Store.private(keys=64, on_full="deny") as own:
        pair = Both(tmp_path / "limits.toml", rules, served, own)
        full = []
        for number in range(2000):
            request = ("GET", b"/", [("x-forwarded-for", f"192.0.{number // 256}.{number % 256}")], "127.0.0.1")
            full += [answer for answer in (pair.ask_server(*request), pair.ask_python(*request)) if answer[0] == 503]
        assert full
        assert {answer[1][-1][0] for answer in full} == {"Retry-After"}
        assert all(b"has no room to count" in answer[2] for answer in full)


def test_a_closed_store_is_unavailable(both: Callable[[str], Both]) -> None:
    pair = both('[limits.a]\nalgorithm = "fixed-window"\nrate = "5/hour"\n[[rules]]\nname = "a"\nlimits = ["a"]\n')
    request = ("GET", b"/", [("x-forwarded-for", "192.0.2.1")], "127.0.0.1")
    pair.served.close()
    pair.own.close()
    with pytest.raises(ValueError, match="the store was closed"):
        pair.ask_server(*request)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (HELD + RULE, "limits.a", "doesn't see when a request ends"),
        (
            LIMIT.replace("hour", "month") + 'align = "calendar"\ntimezone = "UTC"\n' + RULE,
            "limits.a.align",
            "calendar",
        ),
        (BUCKET + "initial = 1\n" + RULE, "limits.a.initial", "initial permits"),
        (LIMIT + RULE + "charge_on = [401]\n", "rules[0].charge_on", "sees no response"),
        (LIMIT + RULE + 'response = { status = 200, body = "ok" }\n', "rules[0].response.status", "for a permission"),
        (LIMIT + RULE + 'key = "user | address"\n', "rules[0].key", "authenticates users"),
        (LIMIT + RULE + 'key = "tier"\n', "rules[0].key", "--tier-header"),
        (f'tiers = ["x", "y"]\n{LIMIT}{RULE}except_tier = ["y"]\n', "rules[0].except_tier", "--tier-header"),
        (LIMIT + RULE + 'path = "/{id}"\nignore_case = true\nkey = "path:id"\n', "rules[0].key", "regard to case"),
        (BUCKET + RULE + 'delay = "2s"\n', "rules[0].delay", "at once"),
        (BUCKET + RULE + 'bytes = "responses"\n', "rules[0].bytes", "sees no body"),
    ],
)
def test_a_rule_that_the_server_cannot_decide_is_refused(tmp_path: Path, text: str, place: str, reason: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("version = 1\n" + 'client = { trusted_proxies = ["10.0.0.1"], header = "X-Real-IP" }\n' + text)
    with Store.private(keys=64) as store, pytest.raises(InvalidRuleFile) as caught:
        plan_of(file, store)
    assert place in str(caught.value)
    assert reason in str(caught.value)


def test_permits_of_a_rule_in_the_shadow_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'version = 1\n{HELD}{RULE}key = "everyone"\nshadow = true\n')
    with Store.private(keys=64) as store, pytest.raises(InvalidRuleFile, match="nobody gives back the permits"):
        plan_of(file, store, holds_permits=True)


def test_a_file_without_proxies_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("version = 1\n" + LIMIT + RULE)
    with Store.private(keys=64) as store, pytest.raises(InvalidRuleFile, match="trusted_proxies"):
        plan_of(file, store)


def test_a_file_whose_keys_need_no_address_needs_no_proxies(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("version = 1\n" + LIMIT + RULE + 'key = "everyone"\n')
    with Store.private(keys=64) as store:
        assert plan_of(file, store).trusts_unix


def test_a_store_of_another_clock_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("version = 1\n" + LIMIT + RULE + 'key = "everyone"\n')
    with Store.private(keys=64, clock="time") as store:
        plan = plan_of(file, store)
        with pytest.raises(ValueError, match=r'limit "a" of the rule "a" can\'t be decided without Python'):
            forebay_server.Plan(plan.document, plan.limiters)


def test_a_plan_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown field `tiers`"):
        forebay_server.Plan('{"client": null, "limits": [], "denies": [], "rules": [], "tiers": []}', [])
