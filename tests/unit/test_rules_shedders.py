"""Load shedders in rule files: their priorities come from the file's rules, and live rules keep their state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rule_files import FILE, functions, problems
from test_rules_live import TextSource
from web_requests import Kind, Site

from forebay import InvalidLimiter, Store
from forebay.cli.rules import command
from forebay.redis import LeasedStore, RedisStore
from forebay.rules import LiveRules, load_rules
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, Gradient2, ReservedSlots
from forebay.testing import ManualClock
from forebay.web import Request, Shed

NEVER = "10 hours"
PLACES = """[shedders.places]
algorithm = "reserved-slots"
slots = 4
priorities = ["orders", "other"]
reserved = { orders = "25%" }
"""
ORDERS = """[[rules]]
name = "orders first"
path = "/orders/*"
methods = "POST"
priority = "orders"
"""


@pytest.fixture(params=["wsgi", "asgi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


def loaded(tmp_path: Path, text: str, store: Any, **given: Any) -> Any:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return load_rules(path, store=store, **given)


def sheds_of(tmp_path: Path, text: str, store: Any, **given: Any) -> list[Shed]:
    return [rule for rule in loaded(tmp_path, text, store, **given) if isinstance(rule, Shed)]


def test_a_file_sheds_by_the_priority_of_its_rules(kind: Kind, tmp_path: Path, store: Store) -> None:
    site = Site(kind, loaded(tmp_path, FILE + PLACES + ORDERS, store))
    places = ReservedSlots(store, "places", 4, {"orders": "25%", "other": 0})
    others = [places.admit("other") for _ in range(3)]
    assert [bool(one) for one in others] == [True] * 3
    shed = site.request("/search")
    assert (shed.status, shed.json["violated-policies"]) == (503, ["places"])
    assert site.request("/orders/7", "POST").status == 200
    # The rule is for another method.
    assert site.request("/orders/7").status == 503
    others[0].end()
    assert site.request("/search").status == 200


def test_each_algorithm_becomes_its_shedder(tmp_path: Path, store: Store) -> None:
    text = """
[shedders.workers]
algorithm = "busy-workers"
workers = 16
priorities = ["orders", "usual", "other"]
above = 0.8
below = 0.5
step = 0.2
interval = "1s"
lease = "30s"
[shedders.search]
algorithm = "gradient2"
path = "/search/*"
methods = ["GET"]
initial = 5
least = 2
most = 50
queue = 0
tolerance = 2
smoothing = 0.5
long_windows = 100
window = "2s"
retry_after = "5s"
[shedders.database]
algorithm = "aimd"
timeout = "300ms"
backoff = 0.8
priorities = ["orders", "other"]
reserved = { orders = "20%" }
response = { status = 529, body = "Later." }
"""
    more = ORDERS + '[[rules]]\nname = "usual"\nmethods = "PUT"\npriority = "usual"\n'
    places, workers, search, database = sheds_of(tmp_path, FILE + PLACES + text + more, store)
    assert (type(places.shedder), places.shedder.slots) == (ReservedSlots, 4)
    assert (places.shedder.priorities, places.status) == (("orders", "other"), 503)
    assert isinstance(workers.shedder, BusyWorkers)
    assert (workers.shedder.slots, workers.shedder.lease_ns) == (16, 30 * 10**9)
    assert isinstance(search.shedder, AdaptiveLimit)
    algorithm = Gradient2(5, 2, 50, queue=0, tolerance=2, smoothing=0.5, long_windows=100)
    assert (search.shedder.algorithm, search.priority, search.retry_after_s) == (algorithm, None, 5)
    assert search.where.matches(("GET",), ("/search/x",))
    assert not search.where.matches(("POST",), ("/search/x",))
    assert isinstance(database.shedder, AdaptiveLimit)
    assert database.shedder.algorithm == AIMD(backoff=0.8, timeout="300ms")
    assert (database.shedder.priorities, database.status) == (("orders", "other"), 529)


def test_response_of_a_shedder_is_sent(kind: Kind, tmp_path: Path, store: Store) -> None:
    text = PLACES.replace("4", "2") + 'response = { status = 529, body = "Later." }\nretry_after = "10s"\n'
    site = Site(kind, loaded(tmp_path, FILE + text + ORDERS, store))
    assert ReservedSlots(store, "places", 2, {"orders": "25%", "other": 0}).admit("other")
    shed = site.request()
    assert (shed.status, shed.body) == (529, b"Later.")
    assert 10 <= int(shed["retry-after"]) <= 20


def priority(shed: Shed, path: str, method: str = "GET", **fields: str) -> Any:
    from forebay.web.native_requests import ASGIRequest

    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "root_path": ""}
    assert callable(shed.priority)
    return shed.priority(ASGIRequest({**scope, "client": ("192.0.2.1", 0)}))


def test_most_important_rule_of_a_request_counts(tmp_path: Path, store: Store) -> None:
    shedder = PLACES.replace('"other"]', '"staff", "reads", "other"]')
    rules = """[[rules]]
name = "reads"
methods = "GET"
priority = "reads"
[[rules]]
name = "staff"
headers = { X-Staff = "*" }
priority = "staff"
"""
    [shed] = sheds_of(tmp_path, FILE + shedder + rules + ORDERS, store)
    assert priority(shed, "/") == "reads"
    assert priority(shed, "/", x_staff="1") == "staff"
    assert priority(shed, "/orders/1", "POST", x_staff="1") == "orders"
    assert priority(shed, "/", "PUT") == "other"


@pytest.mark.parametrize(
    "path", ["/orders/../search", "/orders/%2e%2e/search", "/x/../orders/7", "/orders/\n", "//orders/7", "orders/7"]
)
def test_odd_path_gets_no_priority(tmp_path: Path, store: Store, path: str) -> None:
    text = FILE + PLACES + ORDERS.replace("/orders/*", "/orders/{id}")
    [shed] = sheds_of(tmp_path, text, store)
    assert priority(shed, "/orders/7", "POST") == "orders"
    # If a router may read it otherwise, it has the last priority; the shedder counts it all the same.
    assert priority(shed, path, "POST") in ({"orders", "other"} if path == "//orders/7" else {"other"})


def test_method_of_another_field_gets_no_priority(tmp_path: Path, store: Store) -> None:
    [shed] = sheds_of(tmp_path, FILE + PLACES + ORDERS, store)
    assert priority(shed, "/orders/7", x_http_method_override="POST") == "other"
    assert priority(shed, "/orders/7", "POST", x_http_method_override="GET") == "other"


def test_tier_gives_a_priority(tmp_path: Path, store: Store) -> None:
    rules = """[[rules]]
name = "paid"
except_tier = ["free"]
priority = "orders"
"""

    def tier(request: Request) -> str:
        return request.header("X-Tier") or "free"

    text = 'tiers = ["free", "pro"]\n' + FILE + PLACES + rules
    [shed] = sheds_of(tmp_path, text, store, tier=tier)
    assert priority(shed, "/", x_tier="pro") == "orders"
    assert priority(shed, "/") == "other"
    # All tiers' limits hold for a tier that the file doesn't know, and it has no priority.
    assert priority(shed, "/", x_tier="admin") == "other"
    with pytest.raises(InvalidLimiter, match="tier returned None, which is no tier"):
        priority(sheds_of(tmp_path, text, store, tier=lambda request: None)[0], "/")

    async def slow(request: Request) -> str:
        return "pro"

    assert problems(text, given=functions(tier=slow)) == [
        "17:12: rules[1].priority: the priority depends on the tier, so the function of load_rules can't be async"
    ]


def test_shedder_of_a_leased_store_is_in_its_host(tmp_path: Path, store: Store) -> None:
    leased = LeasedStore(RedisStore("redis://127.0.0.1:1"), store)
    [shed] = sheds_of(tmp_path, FILE + PLACES + ORDERS, leased)
    assert shed.shedder.store is store


def test_shedder_over_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"8:11: shedders.places: a shedder counts the requests of a host, in its"):
        loaded(tmp_path, FILE + PLACES + ORDERS, RedisStore("redis://127.0.0.1:1"))


BUSY = '[shedders.w]\nalgorithm = "busy-workers"\nworkers = 4\npriorities = ["orders", "other"]\n'
SHEDDER_WORDS = (
    "allowed: above, below, ignore_case, interval, lease, methods, path, priorities, response, retry_after, step, "
    "workers"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            BUSY.replace("busy-workers", "busy-worker"),
            "2:13: shedders.w.algorithm is none of the algorithms: 'busy-worker': did you mean 'busy-workers'? "
            "allowed: aimd, busy-workers, gradient2, reserved-slots",
        ),
        (
            BUSY + "abov = 0.5\n",
            f"5:1: 'abov' is no word of shedders.w (busy-workers): did you mean 'above'? {SHEDDER_WORDS}",
        ),
        (
            BUSY + "shadow = true\n",
            "5:1: 'shadow' is no word of shedders.w (busy-workers): a shedder has no shadow: its denials change the "
            "load that it measures, so one that denies nothing measures another load",
        ),
        (BUSY + "above = 1.5\n", "5:9: shedders.w.above is a part above 0, up to 1, such as 0.9, not 1.5"),
        (BUSY + "above = 0.5\n", "1:11: shedders.w: below is less than above, 0.5, not 0.7: between them the level"),
        (BUSY + 'interval = "often"\n', "5:12: shedders.w.interval: 'often' is not a length of time"),
        (BUSY + 'retry_after = "soon"\n', "5:15: shedders.w.retry_after: retry_after is"),
        (BUSY + 'path = "api"\n', "5:8: shedders.w.path: a path pattern begins with"),
        (BUSY + 'methods = "POTS"\n', "5:11: shedders.w.methods: no request has the method 'POTS': did you mean"),
        (
            BUSY + "response = { status = 503, headers = { 'a b' = 'c' } }\n",
            "5:12: shedders.w.response: an Answer has headers such as",
        ),
        (
            BUSY.replace('"orders", ', ""),
            "4:14: shedders.w.priorities is a list of two priorities or more, the most important first, "
            "not a list of 1",
        ),
        (
            BUSY.replace('"orders"', '"orders", "orders"'),
            "4:25: shedders.w.priorities[1]: the priority 'orders' is here twice: leave one out",
        ),
        (
            BUSY.replace('"orders"', '"orders", "bulk"'),
            "4:25: shedders.w.priorities[1]: no rule has the priority 'bulk': name it, or leave it out",
        ),
        (
            BUSY.replace('"orders"', '"order"'),
            "4:15: shedders.w.priorities[0]: no rule has the priority 'order': name it, or leave it out\n"
            "9:12: rules[1].priority: no shedder has the priority 'orders': did you mean 'order'?",
        ),
        (
            PLACES.replace("orders =", "order ="),
            "5:14: shedders.places.reserved.order: priorities has no 'order': did you mean 'orders'? "
            "allowed: orders, other",
        ),
        (
            PLACES.replace("25%", "a lot"),
            "5:23: shedders.places.reserved.orders is a number of slots or per cent such as \"20%\", not 'a lot'",
        ),
        (PLACES.replace("25%", "99%"), "1:11: shedders.places: 4 of the 4 slots of 'places' are reserved"),
        (
            PLACES.replace("places", "api"),
            "1:11: shedders.api: the limit 'api' has this name, too: rename one",
        ),
        (
            PLACES + BUSY.replace(".w]", '."places, less than orders"]'),
            "6:11: shedders.places, less than orders: a limiter of another shedder 'places, less than orders' has this "
            "name, too: rename one",
        ),
        (
            '[shedders.s]\nalgorithm = "gradient2"\npriorities = ["orders", "other"]\n',
            "3:14: shedders.s.priorities: it has no effect without reserved: write both, or none",
        ),
    ],
)
def test_mistake_of_a_shedder_is_found_with_its_place(text: str, expected: str) -> None:
    found = [line.partition(":") for line in problems(FILE + text + ORDERS)]
    # Lines count from that of the shedder.
    shown = "\n".join(f"{int(line) - 7}:{rest}" for line, _, rest in found)
    assert shown.startswith(expected), shown


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('[[rules]]\nname = "none"\n', "8:1: rules[1] lacks limits: a list of names of limits, or a priority"),
        (
            ORDERS + "cost = 2\nshadow = true\n",
            "12:12: rules[1].priority: no shedder has the priority 'orders': allowed: none\n"
            "13:8: rules[1].cost: cost has no effect on a rule without limits: leave it out\n"
            "14:10: rules[1].shadow: shadow has no effect on a rule without limits: leave it out",
        ),
        (ORDERS, "12:12: rules[1].priority: no shedder has the priority 'orders': allowed: none"),
    ],
)
def test_mistake_of_a_rule_without_limits_is_found(rule: str, expected: str) -> None:
    assert "\n".join(problems(FILE + rule)) == expected


def test_explain_shows_shedders_and_priorities(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(FILE + 'priority = "orders"\nmethods = "POST"\n' + PLACES + BUSY + 'path = "/a"\n' + ORDERS)

    def explained(request: str) -> str:
        result = CliRunner().invoke(command, ["explain", str(file), request, "--client", "192.0.2.1"])
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    assert explained("POST /orders/7") == (
        "places: denies by the load, priority 'orders': ReservedSlots, 4 slots\n"
        "w: not for this request: the path '/orders/7' does not match /a\n"
        "api: applies: key address '192.0.2.1', cost 1, priority 'orders'\n"
        "  api: FixedWindow, 5 requests per hour\n"
        "orders first: applies, priority 'orders'\n"
    )
    assert "w: denies by the load, priority 'other': BusyWorkers, 4 workers\n" in explained("/a")
    result = CliRunner().invoke(command, ["check", str(file)])
    assert result.stdout.endswith("is valid: limits: 1, rules: 2, shedders: 2\n")


def test_live_rules_keep_the_state_of_a_shedder(kind: Kind, store: Store) -> None:
    source = TextSource(FILE + PLACES + ORDERS)
    with LiveRules(source, store=store, interval=NEVER) as rules:
        statuses: list[int] = []

        def handle() -> int:
            # A version changes the file, and keeps the shedder, while this request holds its place.
            source.text = (FILE + PLACES + ORDERS).replace("5/hour", "50/hour")
            rules.step(), rules.step()
            statuses.append(inner.request("/search").status)
            return 200

        places = ReservedSlots(store, "places", 4, {"orders": "25%", "other": 0})
        held = [places.admit("other") for _ in range(2)]
        inner = Site(kind, rules)
        if kind == "wsgi":
            assert Site(kind, rules, handle=handle).request("/").status == 200
            assert (rules.status().version, statuses) == (2, [503])
        else:
            source.text = (FILE + PLACES + ORDERS).replace("5/hour", "50/hour")
            held.append(places.admit("other"))
            rules.step(), rules.step()
            assert (rules.status().version, inner.request("/search").status) == (2, 503)
            held.pop().end()
        assert inner.request("/search").status == 200
        # Other slots are another shedder: requests of the one before don't count for it.
        source.text = (FILE + PLACES + ORDERS).replace("slots = 4", "slots = 8")
        rules.step(), rules.step()
        assert (rules.status().version, rules.status().error) == (3, None)
        assert [inner.request("/search").status for _ in range(3)] == [200] * 3
        # The first definition again, with the places that are held.
        source.text = FILE + PLACES + ORDERS
        rules.step(), rules.step()
        held.append(places.admit("other"))
        assert inner.request("/search").status == 503
        del held


def test_live_rules_refuse_a_wrong_shedder(store: Store) -> None:
    source = TextSource(FILE + PLACES + ORDERS)
    with LiveRules(source, store=store, interval=NEVER) as rules:
        source.text = FILE + PLACES
        rules.step(), rules.step()
        status = rules.status()
        assert (status.version, status.published) == (1, 1)
        assert "no rule has the priority 'orders'" in str(status.error)
