"""Rule files and shadow rules over stores of Redis, under WSGI and ASGI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from web_requests import Answered, Site, Wire, asgi_scope

import forebay
from forebay import InvalidRuleFile, Store
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore, SyncedStore
from forebay.rules import LiveRules, Source, load_rules

FILE = """version = 1
[limits.api]
algorithm = "fixed-window"
rate = "3/year"
[limits.new]
algorithm = "fixed-window"
rate = "1/year"
[limits.held]
algorithm = "concurrency"
limit = 1
[[rules]]
name = "api"
limits = ["api"]
[[rules.overrides]]
key = {address = "192.0.2.9"}
deny = true
until = 2999-01-01T00:00:00Z
[[rules]]
name = "new"
limits = ["new"]
shadow = true
"""
HELD = """[[rules]]
name = "held"
limits = ["held"]
shadow = true
"""
Ask = Callable[..., Answered]


@pytest.fixture(params=["RedisStore", "AsyncRedisStore", "LeasedStore", "AsyncLeasedStore", "SyncedStore"])
def ask(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[Ask]:
    """Makes a request to an application with the rules."""
    file = tmp_path / "limits.toml"
    loop = asyncio.new_event_loop()
    is_async = request.param.startswith("Async")
    redis_store: Any = (AsyncRedisStore if is_async else RedisStore)(server.url, timeout=30)
    store: Any = redis_store
    host = Store.private(keys=1000)
    text = FILE
    if request.param == "SyncedStore":
        store = SyncedStore(redis_store, host, keys=100, owns_stores=True)
    elif "Leased" in request.param:
        store = (AsyncLeasedStore if is_async else LeasedStore)(redis_store, host, owns_stores=True)
    if store is not redis_store:
        text = text.replace('[limits.held]\nalgorithm = "concurrency"\nlimit = 1\n', "")
    else:
        text += HELD
    file.write_text(text)
    site = Site("asgi" if is_async else "wsgi", load_rules(file, store=store))

    def ask(**options: Any) -> Answered:
        if not is_async:
            return site.request(**options)
        wire = Wire({"type": "http.request", "body": b"", "more_body": False})
        loop.run_until_complete(site.app(asgi_scope("/", "GET", **options), wire.receive, wire.send))
        return wire.answered()

    yield ask
    closing = store.close()
    if closing is not None:
        loop.run_until_complete(closing)
    host.close()
    loop.close()


def test_rules_of_a_file_decide_over_redis(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay.web.denied")
    assert [ask(client="192.0.2.9").status for _ in range(2)] == [403, 403]
    answers = [ask() for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert answers[0]["ratelimit-policy"] == '"api";q=3;w=31536000'
    messages = [record.getMessage() for record in caplog.records if record.forebay_is_shadow]  # type: ignore[attr-defined]
    assert messages == ["in the shadow, 429 for 'GET' '/' by new"] * 2


def test_file_names_a_server_of_redis(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'store = "{server.url}"\n{FILE}{HELD}')
    rules = load_rules(file)
    assert isinstance(rules[0].limiter.store, RedisStore)
    rules[0].limiter.store.close()
    rules = load_rules(file, in_loop=True)
    assert isinstance(rules[0].limiter.store, AsyncRedisStore)
    asyncio.run(rules[0].limiter.store.close())


@pytest.mark.parametrize("in_loop", [False, True])
def test_problem_that_only_the_store_has_closes_it(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_loop: bool
) -> None:
    """A delay needs turns, which a limit in Redis doesn't book."""
    made: list[Any] = []
    monkeypatch.setattr("forebay.rules.loading.connect", lambda url: made.append(forebay.connect(url)) or made[0])
    file = tmp_path / "limits.toml"
    file.write_text(f"""version = 1
store = "{server.url}"
[limits.api]
algorithm = "token-bucket"
rate = "3/hour"
[[rules]]
name = "api"
limits = ["api"]
delay = "2s"
""")
    with pytest.raises(InvalidRuleFile, match=r"6:1: rules\[0\]: .* can't delay requests"):
        load_rules(file, in_loop=in_loop)
    assert in_loop or made[0].closed


def live_document(limit: int, on_change: str = "") -> str:
    return (
        f'version = 1\n[limits.api]\nalgorithm = "fixed-window"\nrate = "{limit}/year"\n{on_change}'
        '[[rules]]\nname = "api"\nlimits = ["api"]\n'
    )


@pytest.mark.parametrize("kind", [RedisStore, LeasedStore, SyncedStore])
def test_live_limits_at_redis_keep_their_state(
    server: RedisServer, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset would be one of a host, and a host that starts later would count apart."""
    with RedisStore(server.url, timeout=30) as there, Store.private(keys=1000) as host:
        store: Any = there
        if kind is LeasedStore:
            store = LeasedStore(there, host)
        elif kind is SyncedStore:
            store = SyncedStore(there, host, keys=100)
        source = TextSource(live_document(3))
        with LiveRules(source, store=store, host=host, interval="10 hours") as live:
            site = Site("wsgi", live)
            assert [site.request().status for _ in range(4)] == [200, 200, 200, 429]
            source.text = live_document(2)
            live.step()
            assert [site.request().status for _ in range(2)] == [429, 429]
            for on_change in ("share", "reset"):
                source.text = live_document(5, f'on_change = "{on_change}"\n')
                live.step()
                assert f"memory.toml:5:13: on_change = '{on_change}' is for limits in the" in str(live.status().error)
            assert live.status().version == 2
        if kind is not RedisStore:
            store.close()


class TextSource(Source):
    """A document in memory."""

    name = label = "memory.toml"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> bytes:
        return self.text.encode()


def test_live_rules_move_from_a_host_to_redis(server: RedisServer) -> None:
    """The version in force has a limit that brings the shares of a former one, in the store of the host."""
    source = TextSource(live_document(3))
    with RedisStore(server.url, timeout=30) as there, Store.private(keys=1000) as host:
        with LiveRules(source, store=host, interval="10 hours") as live:
            assert Site("wsgi", live).request().status == 200
            source.text = live_document(5)
            live.step()
            assert Site("wsgi", live).request().status == 200
        with LiveRules(source, store=there, host=host, interval="10 hours") as live:
            site = Site("wsgi", live)
            assert [site.request().status for _ in range(6)] == [*[200] * 5, 429]
