"""Rule files: their rules decide as rules written by hand do, and no bytes raise anything but the error of ours."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from rule_files import functions
from web_requests import Site, asgi_scope

from forebay import FixedWindow, InvalidRuleFile, SlidingWindow, Store, TokenBucket
from forebay.rules import RuleFileProblem, load_rules
from forebay.rules.explanation import explain
from forebay.rules.loading import check
from forebay.rules.toml import read_toml
from forebay.testing import ManualClock
from forebay.web import ClientAddress, Gate, Passage, Request, Rule, everyone, header, user
from forebay.web.native_requests import ASGIRequest

ME = ClientAddress()
PATHS = ["/", "/a", "/a/7", "/b/7", "/a/7/x"]
CLIENTS = ["192.0.2.1", "10.0.0.1", "10.1.0.1", "2001:db8::1", "2001:db8::2"]
KINDS = {
    "token-bucket": lambda store, name, rate: TokenBucket(store, name, rate),
    "fixed-window": lambda store, name, rate: FixedWindow(store, name, rate),
    "sliding-window": lambda store, name, rate: SlidingWindow(store, name, rate),
}
KEYS = {
    "address": None,
    "everyone": everyone,
    "user | address": user(otherwise=ME),
    "header:X-Key | address": header("X-Key", otherwise=ME),
}


def tier_of(request: Request) -> str:
    return request.header("X-Tier") or "free"


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    """A rule as words of a file. Each has a limit of its own."""
    return {
        "algorithm": draw(st.sampled_from(list(KINDS))),
        "rate": f"{draw(st.integers(2, 4))}/hour",
        "key": draw(st.sampled_from(list(KEYS))),
        "cost": draw(st.integers(1, 2)),
        "path": draw(st.sampled_from([None, "/a", "/a/*", "/{x}/7"])),
        "methods": draw(st.sampled_from([None, "GET", "POST"])),
        "headers": draw(st.sampled_from([None, {"X-Key": "k*"}])),
        "except_address": draw(st.sampled_from([None, ["10.0.0.0/16", "2001:db8::/64"]])),
        "except_tier": draw(st.sampled_from([None, ["pro"]])),
        "charge_on": draw(st.sampled_from([None, [200, "300-499"], ["500-599"]])),
        "shadow": draw(st.booleans()),
    }


requests = st.fixed_dictionaries(
    {
        "path": st.sampled_from(PATHS),
        "method": st.sampled_from(["GET", "POST", "HEAD"]),
        "client": st.sampled_from(CLIENTS),
        "user": st.sampled_from([None, "ada"]),
        "fields": st.lists(st.sampled_from([("X-Key", "k1"), ("X-Key", "z"), ("X-Tier", "pro")]), max_size=2),
    }
)


def file_of(given_rules: list[dict[str, Any]]) -> str:
    """JSON's values are values of TOML, too, except tables."""
    lines = ["version = 1"]
    if any(rule["except_tier"] for rule in given_rules):
        lines.append('tiers = ["pro", "free"]')
    for number, rule in enumerate(given_rules):
        lines += [f"[limits.l{number}]", f'algorithm = "{rule["algorithm"]}"', f'rate = "{rule["rate"]}"']
    for number, rule in enumerate(given_rules):
        lines += ["[[rules]]", f'name = "r{number}"', f'limits = ["l{number}"]']
        words = {word: value for word, value in rule.items() if value is not None and word not in ("algorithm", "rate")}
        for word, value in words.items():
            text = json.dumps(value)
            lines.append(f"{word} = {text.replace(': ', ' = ') if isinstance(value, dict) else text}")
    return "\n".join(lines)


def by_hand(store: Store, given_rules: list[dict[str, Any]]) -> Iterator[Rule]:
    for number, rule in enumerate(given_rules):
        charge_on = rule["charge_on"] and ({200, *range(300, 500)} if 200 in rule["charge_on"] else range(500, 600))

        def is_exempt(request: Request, rule: dict[str, Any] = rule) -> bool:
            if rule["headers"] and not (request.header("X-Key") or "").startswith("k"):
                return True
            if rule["except_address"] and ME(request).startswith(("10.0.", "2001:db8:")):
                return True
            return bool(rule["except_tier"]) and tier_of(request) == "pro"

        yield Rule(
            KINDS[rule["algorithm"]](store, f"l{number}", rule["rate"]),
            path=rule["path"],
            methods=rule["methods"] or (),
            key=KEYS[rule["key"]],
            cost=rule["cost"],
            exempt=is_exempt,
            charge_on=charge_on,
            shadow=rule["shadow"],
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules") / "limits.toml"


@examples(30)
@given(
    given_rules=st.lists(rules(), min_size=1, max_size=4),
    asked=st.lists(requests, min_size=5, max_size=20),
    kind=st.sampled_from(["wsgi", "asgi"]),
)
def test_loaded_rules_decide_as_rules_by_hand(
    path: Path, given_rules: list[dict[str, Any]], asked: list[dict[str, Any]], kind: Any
) -> None:
    path.write_text(file_of(given_rules))
    clock = ManualClock(1000)
    with Store.private(keys=100, clock=clock) as one, Store.private(keys=100, clock=clock) as other:
        loaded = Site(kind, load_rules(path, store=one, tier=tier_of))
        written = Site(kind, list(by_hand(other, given_rules)))
        for request in asked:
            assert loaded.request(**request) == written.request(**request)
            clock.advance(60)
        counts = [
            {name: (stats.allowed, stats.denied) for name, stats in store.stats().limiters.items()}
            for store in (one, other)
        ]
        assert counts[0] == counts[1]


@examples(30)
@given(given_rules=st.lists(rules(), min_size=1, max_size=4), asked=st.lists(requests, min_size=5, max_size=20))
def test_explanation_names_the_limits_that_are_charged(
    path: Path, given_rules: list[dict[str, Any]], asked: list[dict[str, Any]]
) -> None:
    given_rules = [{**rule, "shadow": False, "rate": "999/hour", "charge_on": None} for rule in given_rules]
    text = file_of(given_rules)
    path.write_text(text)
    _, _, built = check(str(path), text.encode(), functions(tier_of))
    with Store.private(keys=100) as store:
        gate = Gate(load_rules(path, store=store, tier=tier_of))
        for one in asked:
            request = ASGIRequest(asgi_scope(**one))
            decided = gate.enter(request)
            assert decided is None or isinstance(decided, Passage)
            charged = "" if decided is None else decided.fields[0][1]
            for explanation in explain(built, request):
                assert explanation.applies == bool(explanation.limits)
                assert explanation.applies != bool(explanation.reasons)
                assert explanation.applies == (f'"l{explanation.rule[1:]}";' in charged)


# Bytes

CORPUS = [
    b"""version = 1
tiers = ["pro"]
[client]
trusted_proxies = ["10.0.0.0/8", "unix"]
header = "X-Forwarded-For"
[limits.api]
algorithm = "token-bucket"
rate = "100/minute"
refill = "interval"
start = 2026-01-01T00:00:00Z
[limits.'log in']
algorithm = "concurrency"
limit = 5
[[rules]]
name = "one"
limits = ["api", "log in"]
path = ["/a/{id}"]
key = ["header:X-Key | address", "path:id", "tier"]
response = {status = 429, headers = {X = "a"}, body = '''b'''}
tier = ["pro"]
address = ["10.0.0.0/8"]
[[rules.overrides]]
key = {address = "192.0.2.1", "path:id" = "7", tier = "pro"}
until = 2027-01-01T00:00:00Z
deny = true
""",
    b"""version: 1
limits:
  api: {algorithm: sliding-log, rate: 5/hour, keys: 100}
rules:
  - name: one
    limits: [api]
    charge_on: [401, 500-599]
    overrides:
    - key: {address: "192.0.2.1"}
      until: 2027-01-01T00:00:00Z
      exempt: true
""",
]
PIECES = [bytes([one]) for one in b"[]{}\"'=:\n-*&!\xff\x00"] + [b"9" * 40, b"1e9", b"&a ", b"!!int "]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with pieces removed, doubled or put in."""
    data = draw(st.sampled_from(CORPUS))
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        end = min(end, at + draw(st.sampled_from([0, 1, 8, 100])))
        data = data[:at] + draw(st.sampled_from([b"", *PIECES, data[at:end] * 2])) + data[end:]
    return data


@examples(100)
@given(data=st.one_of(st.binary(max_size=50), mutated()), name=st.sampled_from(["a.toml", "a.yaml", "a.json"]))
@example(data=b"a: " + b"[" * 2000, name="a.yaml")
@example(data=b"a = " + b"[" * 2000, name="a.toml")
@example(data=b"a = 0x" + b"f" * 9000, name="a.toml")
@example(data=b"a = 2026-99-99", name="a.toml")
@example(data=b"a: 2026-99-99T99:99:99Z", name="a.yaml")
@example(data=b"? ? ? a", name="a.yaml")
@example(data=b"%YAML 9.9\n---\na: 1", name="a.yaml")
@example(data=b"\xef\xbb\xbfversion = 1", name="a.toml")
@example(data=b"\xfe\xff", name="a.yaml")
def test_no_bytes_raise_anything_but_the_error_of_rule_files(data: bytes, name: str) -> None:
    found: tuple[RuleFileProblem, ...] = ()
    try:
        check(name, data, functions())
    except InvalidRuleFile as error:
        found = error.problems
    last_line = data.count(b"\n") + data.count(b"\r") + 2
    assert all(one.message and 1 <= one.line <= last_line and one.column >= 1 for one in found)


# Places

words = st.one_of(
    st.sampled_from(["a", "b", "c-d", "1", "'a b'", '"a.b"', '"\\u0041"', "''"]),
)
dotted = st.lists(words, min_size=1, max_size=3).map(" . ".join)
NUMBERS = ["1", "-1.5e3", "true", "inf", "0xff"]
TIMES = ["2026-01-01", "2026-01-01 07:32:00.5Z", "07:32:00", "1979-05-27T07:32:00-08:00"]
TEXTS = ['"a # ] }"', "'b\"'", '"\\"\\\\"', '"""x\n"y" \\" ""\n"""""', "'''z\n''''", '""', "''", '""""""']
scalars = st.sampled_from([*NUMBERS, *TIMES, *TEXTS])
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ " + ", # x ]\n".join(items) + " ]"),
        st.lists(inner, max_size=2).map(lambda items: f"[{','.join(items)},]" if items else "[]"),
        st.lists(st.tuples(dotted, inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{word} ={value}" for word, value in pairs) + "}"
        ),
    ),
    max_leaves=4,
)
lines = st.one_of(
    st.tuples(dotted, values).map(lambda pair: f"  {pair[0]}= {pair[1]} # c"),
    dotted.map(lambda word: f"[ {word} ]"),
    dotted.map(lambda word: f"[[{word} ]] # d"),
    st.just(""),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for word, inner in items:
        yield from paths_of(inner, (*path, word))


@examples(100)
@given(st.lists(lines, max_size=6).map("\n".join), st.booleans())
@example("[[a]]\n[[a.b]]\nc=1\n[[a.b]]\n[a.b.d]\n[[a]]\n[a.b]\ne.f = [[], [{g = 1}]]", False)
def test_every_value_of_toml_has_its_place(text: str, has_returns: bool) -> None:
    text = text.replace("\n", "\r\n") if has_returns else text
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    document = read_toml(text)
    assert document.data == data or "inf" in text
    assert set(document.values) == set(paths_of(data))
    assert set(document.words) == {path for path in document.values if path and isinstance(path[-1], str)}
    source = text.replace("\r\n", "\n").split("\n")
    for path, place in document.words.items():
        start = source[place.line - 1][place.column - 1 :]
        assert start.startswith((str(path[-1]), "'", '"')), (path, start)
    for path, place in document.values.items():
        value = data
        for part in path:
            value = value[part]
        start = source[place.line - 1][place.column - 1 :]
        if isinstance(value, list):
            assert start.startswith("["), (path, start)
        elif isinstance(value, str):
            assert start.startswith(("'", '"')), (path, start)
        elif type(value) in (int, bool):
            assert start.startswith(("-", "t", "0", "1")), (path, start)
