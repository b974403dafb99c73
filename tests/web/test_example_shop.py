"""The example shop with all kinds of limits together, in a process and under gunicorn."""

from __future__ import annotations

import runpy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from middleware_server import MiddlewareServer
from shop_server import PATIENCE_S
from web_requests import call_wsgi, wsgi_environ

from forebay import Store
from forebay.testing import ManualClock, private_stores

SHOP = Path(__file__).parents[2] / "examples" / "shop"
ADA, BOB, CI = ([("X-API-Key", f"secret-of-{name}")] for name in ("ada", "bob", "ci"))
MIB = 2**20
NS = 1_000_000_000


@pytest.fixture
def shop(clock: ManualClock) -> Iterator[Any]:
    """The application; no time passes except where it waits."""
    with private_stores(clock):
        yield runpy.run_path(str(SHOP / "complete.py"))["app"]


def statuses(shop: Any, count: int, path: str = "/", method: str = "GET", **options: Any) -> dict[int, int]:
    """How many of `count` requests have each status."""
    return dict(Counter(call_wsgi(shop, path, method, **options).status for _ in range(count)))


def test_each_plan_has_its_limit_by_account_or_address(shop: Any) -> None:
    assert statuses(shop, 30) == {200: 20, 429: 10}
    assert statuses(shop, 30, client="192.0.2.9") == {200: 20, 429: 10}
    assert statuses(shop, 30, fields=BOB) == {200: 20, 429: 10}
    assert statuses(shop, 5, fields=BOB, client="192.0.2.10") == {429: 5}
    assert statuses(shop, 510, fields=ADA) == {200: 500, 429: 10}
    assert statuses(shop, 600, fields=CI) == {200: 600}


def test_all_clients_together_have_a_limit(shop: Any) -> None:
    assert statuses(shop, 2010, fields=CI) == {200: 2000, 503: 10}
    assert statuses(shop, 1) == {503: 1}


def test_endpoints_have_limits_of_their_own(shop: Any, clock: ManualClock) -> None:
    assert statuses(shop, 7, "/login", "POST", body=b"guess") == {401: 5, 429: 2}
    assert statuses(shop, 3, "/login", "POST", body=b"sesame", client="192.0.2.9") == {200: 3}
    begin = clock.now()
    assert statuses(shop, 21, "/search", fields=CI) == {200: 21}
    # A tenth of a second apart.
    assert clock.now() - begin == pytest.approx(2.0)


def test_reports_run_three_at_a_time(shop: Any) -> None:
    responses = [shop(wsgi_environ("/reports/5", fields=CI), lambda *_: print) for _ in range(3)]
    assert statuses(shop, 1, "/reports/6", fields=ADA) == {503: 1}
    for response in responses:
        response.close()
    assert statuses(shop, 1, "/reports/6", fields=ADA) == {200: 1}


def test_orders_of_an_account_are_counted_from_wherever_they_come(shop: Any, clock: ManualClock) -> None:
    for number in range(10):
        assert statuses(shop, 100, "/orders", "POST", fields=ADA, client=f"192.0.2.{number}") == {200: 100}
        clock.advance(10)
    assert statuses(shop, 1, "/orders", "POST", fields=ADA) == {429: 1}
    assert statuses(shop, 1, "/orders", "POST", fields=BOB) == {200: 1}


def test_files_go_at_the_rate_of_the_plan(shop: Any, clock: ManualClock) -> None:
    # 16 MiB: of the free plan 2 are free and 1 goes at once, of the paid one 10 and 6.
    for fields, seconds in ((BOB, 13.0), (ADA, 0.0), (CI, 0.0), (ADA, 0.2)):
        begin = clock.now()
        assert len(call_wsgi(shop, "/files/film", fields=fields).body) == 16 * MIB
        assert clock.now() - begin == pytest.approx(seconds, abs=0.001)


def test_orders_find_a_place_when_the_shop_is_full(shop: Any) -> None:
    def begin(path: str, method: str) -> tuple[int, Any]:
        begun: list[str] = []
        response = shop(wsgi_environ(path, method, fields=CI), lambda status, *_: begun.append(status) or print)
        return int(begun[0][:3]), response

    visits = [begin("/", "GET") for _ in range(50)]
    assert Counter(status for status, _ in visits) == {200: 48, 503: 2}
    orders = [begin("/orders", "POST") for _ in range(20)]
    assert Counter(status for status, _ in orders) == {200: 16, 503: 4}
    for _, response in (*visits, *orders):
        getattr(response, "close", lambda: None)()
    assert begin("/", "GET")[0] == 200


def test_workers_follow_a_change_of_the_limits_under_load(store_name: str, tmp_path: Path) -> None:
    """Each response is by the file of before or by the new one, and none by the old one after a new one."""
    limits = tmp_path / "limits.toml"
    limits.write_bytes((SHOP / "limits.toml").read_bytes())
    old, new = '"pro";q=5000;w=60', '"pro";q=7000;w=60'
    environment = {"SHOP_STORE": store_name, "SHOP_LIMITS": str(limits)}
    options = ["--chdir", str(SHOP), "--config", str(SHOP / "gunicorn.conf.py"), "--bind", "127.0.0.1:0"]
    policies: list[list[str]] = []
    with MiddlewareServer(tmp_path, "gthread", app="complete", options=options, environment=environment) as site:

        def ask() -> None:
            connection = HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
            mine: list[str] = []
            policies.append(mine)
            end = time.monotonic() + PATIENCE_S
            while mine.count(new) < 50 and time.monotonic() < end:
                connection.request("GET", "/", headers={"X-API-Key": "secret-of-ada"})
                answer = connection.getresponse()
                answer.read()
                [of_plan] = [each for each in (answer.headers["RateLimit-Policy"] or "").split(", ") if "pro" in each]
                mine.append(of_plan)
            connection.close()

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        changed = tmp_path / "changed.toml"
        changed.write_text(limits.read_text().replace('rate = "5000/minute"', 'rate = "7000/minute"'))
        changed.rename(limits)
        for thread in asking:
            thread.join()
    for mine in policies:
        assert set(mine) <= {old, new}
        assert mine == [old] * mine.count(old) + [new] * 50


def test_limits_hold_together_under_gunicorn(store_name: str, tmp_path: Path) -> None:
    """Requests and downloads at once, to four workers. By the store's clock, no limit is exceeded at any time."""
    environment = {"SHOP_STORE": store_name, "SHOP_FILM_BYTES": str(4 * MIB)}
    options = ["--chdir", str(SHOP), "--config", str(SHOP / "gunicorn.conf.py"), "--bind", "127.0.0.1:0"]
    with (
        MiddlewareServer(tmp_path, "gthread", app="complete", options=options, environment=environment) as site,
        Store(store_name, keys=100_000) as store,
    ):
        begin_ns = store.now_ns()
        answered: list[tuple[str, int]] = []
        film = [0]

        def elapsed_s() -> float:
            return (store.now_ns() - begin_ns) / NS

        def ask(name: str) -> None:
            connection = HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
            for _ in range(100):
                connection.request("GET", "/", headers={"X-API-Key": f"secret-of-{name}"})
                answer = connection.getresponse()
                answer.read()
                answered.append((name, answer.status))
            connection.close()

        def download() -> None:
            connection = HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
            connection.request("GET", "/files/film", headers={"X-API-Key": "secret-of-bob"})
            answer = connection.getresponse()
            began.set()
            assert answer.status == 200
            while part := answer.read1(65536):
                film[0] += len(part)
                assert film[0] <= 3 * MIB + 1 + MIB * elapsed_s()
            connection.close()
            whole.set()

        began, whole = threading.Event(), threading.Event()
        downloading = threading.Thread(target=download)
        downloading.start()
        # One of the account's twenty requests.
        assert began.wait(PATIENCE_S)
        asking = [threading.Thread(target=ask, args=(name,)) for name in ("ada", "ada", "bob", "ci")]
        for thread in asking:
            thread.start()
        for thread in (*asking, downloading):
            thread.join()
        free = 20 + 100 / 60 * elapsed_s()
        assert whole.is_set()
        assert film == [4 * MIB]
        counts = Counter(answered)
        assert 19 <= counts["bob", 200] <= free
        assert counts["bob", 200] + counts["bob", 429] == 100
        assert (counts["ada", 200], counts["ci", 200]) == (200, 100)
