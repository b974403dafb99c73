"""Default rules, under WSGI and ASGI and from files: for requests that no rule with a path of its own is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rule_files import problems
from web_requests import CLIENT, Kind, Site

from forebay import FixedWindow, InvalidLimiter, Store
from forebay.cli.rules import command
from forebay.contrib.views import rules_of
from forebay.rules import load_rules
from forebay.web import AddressList, Request, Rule, everyone
from forebay.web.patterns import RequestPattern

ROUTES = ("/login", "/search", "/files/{name}", "/about", "/")
CHARACTERS = ["/", "login", "search", "files", "about", "..", ".", "%2f", "%2e", ";a=1", "\n", "x", "//", "%"]


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=1000) as opened:
        yield opened


def limit(store: Store, name: str) -> FixedWindow:
    return FixedWindow(store, name, "1000/year")


def used(limiter: Any, key: Any = CLIENT) -> int:
    return 1000 - int(limiter.peek(key, 0).remaining)


def test_a_default_counts_what_no_rule_with_a_path_is_for(kind: Kind, store: Store) -> None:
    login, default, every = (limit(store, name) for name in ("login", "default", "every"))
    writes = limit(store, "writes")
    site = Site(
        kind,
        [
            Rule(default, otherwise=True),
            Rule(login, path="/login", methods="POST"),
            # For the whole application, so they own no route.
            Rule(every, key=everyone),
            Rule(writes, methods="POST"),
        ],
    )
    policy = site.request("/login", "POST")["ratelimit-policy"]
    assert (used(login), used(default), used(writes)) == (1, 0, 1)
    assert '"default"' not in policy
    # Another method of the route, and a path that no route has.
    assert '"default"' in site.request("/login")["ratelimit-policy"]
    site.request("/nowhere", "POST")
    assert (used(login), used(default), used(writes), used(every, "everyone")) == (1, 2, 2, 3)


def test_defaults_may_be_for_methods_and_paths(kind: Kind, store: Store) -> None:
    reads, writes, api, login = (limit(store, name) for name in ("reads", "writes", "api", "login"))
    rules = [
        Rule(reads, methods="GET", otherwise=True),
        Rule(writes, methods=["POST", "PUT"], otherwise=True),
        Rule(api, path="/api/*", otherwise=True),
        Rule(login, path="/api/login"),
    ]
    site = Site(kind, rules)
    for path, method in (("/", "GET"), ("/", "PUT"), ("/api/x", "GET"), ("/api/login", "POST"), ("/", "DELETE")):
        site.request(path, method)
    # A default with a path owns nothing: the defaults of a method count beside it.
    assert [used(one) for one in (reads, writes, api, login)] == [2, 1, 1, 1]


def test_shadows_own_nothing_and_exemptions_do(kind: Kind, store: Store) -> None:
    shadow, exempt, tiered, default = (limit(store, name) for name in ("shadow", "exempt", "tiered", "default"))
    site = Site(
        kind,
        [
            Rule(shadow, path="/shadow", shadow=True),
            Rule(exempt, path="/exempt", exempt=AddressList(CLIENT)),
            Rule(tiered, path="/tiered", tiers={"internal": None}, tier=lambda request: "internal"),
            Rule(default, otherwise=True),
        ],
    )
    for path in ("/shadow", "/exempt", "/tiered"):
        site.request(path)
    assert [used(one) for one in (shadow, exempt, tiered, default)] == [1, 0, 0, 1]


def test_a_default_has_exemptions_and_a_shadow_of_its_own(kind: Kind, store: Store) -> None:
    default, tried, login = (limit(store, name) for name in ("default", "tried", "login"))
    rules = [
        Rule(default, otherwise=True, exempt=lambda request: request.path == "/health"),
        Rule(tried, otherwise=True, shadow=True),
        Rule(login, path="/login"),
    ]
    site = Site(kind, rules)
    for path in ("/health", "/login", "/x"):
        site.request(path)
    assert [used(one) for one in (default, tried, login)] == [1, 2, 1]


@pytest.mark.parametrize("path", ["/x/../about", "/about/%2e%2e/login", "/login/../about", "//x/..;/about"])
def test_an_odd_path_does_not_dodge_the_default(store: Store, path: str) -> None:
    login, default = limit(store, "login"), limit(store, "default")
    site = Site("asgi", [Rule(login, path="/login"), Rule(default, otherwise=True)])
    site.request(path)
    assert used(default) == 1


@pytest.mark.parametrize("path", ["/api_docs", "/api.docs", "/api-docs/index", "/api-docs/index/"])
def test_a_path_that_few_routers_read_as_a_rules_does_not_dodge_the_default(
    kind: Kind, store: Store, path: str
) -> None:
    """CherryPy reads them as ``/api-docs``. Another router may have a view for them, or one for any path."""
    own, default = limit(store, "own"), limit(store, "default")
    rules = [Rule(own, path="/api-docs", exempt=lambda request: True), Rule(default, otherwise=True)]
    site = Site(kind, rules)
    site.request("/api-docs"), site.request("/api-docs/")
    assert used(default) == 0
    site.request(path)
    assert used(default) == 1


@pytest.mark.parametrize(
    ("pattern", "certain", "uncertain"),
    [
        ("/a-b/{name}", ["/a-b/c", "/a-b/c/"], ["/a_b/c", "/a-b/c/index"]),
        ("/{name}/b", ["/a/b"], ["//b"]),
        ("/a.b/*", ["/a.b", "/a.b/c_d/index"], ["/a-b/c"]),
        ("/a/{rest:path}/z", ["/a/b/c/z"], ["/a/b/c/z/index"]),
        ("/", ["/"], ["/index"]),
        ("/a%20b", ["/a b"], ["/a_b"]),
    ],
)
def test_a_path_is_certain_as_it_is_written(pattern: str, certain: list[str], uncertain: list[str]) -> None:
    where = RequestPattern.of(["/other", pattern], (), False)
    assert all(where.is_certain(("GET",), (path,)) for path in certain)
    assert not any(where.is_certain(("GET",), (path,)) for path in uncertain)


def test_an_override_of_the_method_does_not_dodge_the_default(kind: Kind, store: Store) -> None:
    own, default = limit(store, "own"), limit(store, "default")
    site = Site(kind, [Rule(own, path="/x", methods="POST"), Rule(default, otherwise=True)])
    site.request("/x", fields=[("X-HTTP-Method-Override", "POST")])
    assert (used(own), used(default)) == (1, 1)
    site.request("/x", "POST")
    assert (used(own), used(default)) == (2, 1)


@given(st.lists(st.sampled_from(CHARACTERS), max_size=6).map(lambda parts: "/" + "".join(parts)))
def test_every_request_is_counted_by_its_own_rule_or_the_default(path: str) -> None:
    """However a router reads the path: if one reading is that of a route without a rule, the default counts it."""
    with Store.private(keys=1000) as store:
        rules = [Rule(limit(store, name), path=name, key=everyone) for name in ROUTES[:3]]
        default = limit(store, "default")
        site = Site("asgi", [*rules, Rule(default, key=everyone, otherwise=True)])
        site.request(path)
        matching = [used(rule.limiter, "everyone") for rule in rules]
        is_default = used(default, "everyone")
        assert sum(matching) + is_default >= 1
        from forebay.web.native_requests import readings

        paths = readings(path)
        is_owned = paths and any(all(rule.where.matches(("GET",), (each,)) for each in paths) for rule in rules)
        assert bool(is_default) is not bool(is_owned)


def test_async_tiers_and_exemptions_own_requests(store: Store) -> None:
    async def tier(request: Request) -> str:
        return "internal"

    own, default = limit(store, "own"), limit(store, "default")
    rules = [Rule(own, path="/x", tiers={"internal": None}, tier=tier), Rule(default, otherwise=True)]
    site = Site("asgi", rules)
    site.request("/x"), site.request("/y")
    assert (used(own), used(default)) == (0, 1)


def test_a_default_is_of_an_application(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match="is a default, for an application and not for a view"):
        rules_of([Rule(limit(store, "a"), otherwise=True)], {})
    with pytest.raises(InvalidLimiter, match="otherwise is True or False, not 'yes'"):
        Rule(limit(store, "a"), otherwise="yes")  # type: ignore[arg-type]
    # Alone it is for every request.
    site = Site("wsgi", Rule(limit(store, "alone"), otherwise=True))
    assert '"alone"' in site.request()["ratelimit-policy"]


FILE = """version = 1
tiers = ["free", "pro"]
[limits.own]
algorithm = "fixed-window"
rate = "1000/year"
[limits.default]
algorithm = "fixed-window"
rate = "1000/year"
[[rules]]
name = "own"
limits = ["own"]
path = "/x"
except_tier = ["pro"]
except_address = ["203.0.113.0/24"]
[[rules.overrides]]
key = {address = "192.0.2.2"}
exempt = true
until = 2999-01-01T00:00:00Z
[[rules]]
name = "default"
limits = ["default"]
otherwise = true
key = "everyone"
"""


@pytest.mark.parametrize("is_async", [False, True])
def test_conditions_of_a_file_own_nothing_and_overrides_do(tmp_path: Path, store: Store, is_async: bool) -> None:
    def tier(request: Request) -> str:
        return request.header("X-Tier") or "free"

    async def slow_tier(request: Request) -> str:
        return tier(request)

    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    site = Site("asgi", load_rules(path, store=store, tier=slow_tier if is_async else tier))
    default = FixedWindow(store, "default", "1000/year")

    def counts(expected: int, *arguments: Any, **options: Any) -> None:
        before = used(default, "everyone")
        site.request(*arguments, **options)
        assert used(default, "everyone") - before == expected

    counts(0, "/x")
    counts(1, "/y")
    counts(0, "/x", client="192.0.2.2")
    counts(1, "/x", client="203.0.113.7")
    counts(1, "/x", fields=[("X-Tier", "pro")])
    # A tier that the file doesn't know is limited by the rules of all tiers.
    counts(0, "/x", fields=[("X-Tier", "other")])


def test_explain_names_the_rule_that_is_for_a_request(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)

    def explained(request: str, tier: str) -> str:
        arguments = ["explain", str(path), request, "--client", "192.0.2.1", "--tier", tier]
        result = CliRunner().invoke(command, arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    assert explained("/x", "free").endswith("default: not for this request: the rule 'own' is\n")
    assert "default: applies: key everyone, cost 1\n" in explained("/x", "pro")
    assert "default: applies: key everyone, cost 1\n" in explained("/y", "free")


def test_a_default_in_a_file_is_true_or_false() -> None:
    assert problems(FILE.replace("otherwise = true", "otherwise = 1")) == [
        "22:13: rules[1].otherwise is true or false, not 1"
    ]
