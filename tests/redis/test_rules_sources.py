"""Sources of live rules beside files: SQLite, a real PostgreSQL, and a real Redis."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from click.testing import CliRunner
from postgres_server import PostgresServer, postgres_server
from redis.asyncio import Redis as AsyncRedis
from redis_server import RedisServer, redis_server, until
from rule_files import FILE
from web_requests import Site

from forebay import InvalidLimiter, Store
from forebay.cli.rules import command
from forebay.redis import RedisStore
from forebay.rules import FileSource, LiveRules, RedisSource, Source, SqlSource
from forebay.rules.live import promotion
from forebay.rules.live.promotion import promoted
from forebay.rules.live.sources import SourceChanged, SourceGone

NEVER = "10 hours"
MakeSource = Callable[[], Source]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "sqlite engine", "postgresql", "postgresql engine", "redis", "redis client"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A source without a document."""
    kind, _, given = request.param.partition(" ")
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("server")
        with server.client() as client:
            yield RedisSource(client if given else server.url, "forebay:rules")
        return
    url = f"sqlite:///{tmp_path}/rules.db" if kind == "sqlite" else request.getfixturevalue("postgres").url
    engine = sqlalchemy.create_engine(url)
    made = SqlSource(engine if given else url, table=f"rules_{os.urandom(4).hex()}")
    made.create_table()
    made.create_table()
    yield made
    engine.dispose()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.private(keys=100) as opened:
        yield opened


def of_rate(limit: int) -> bytes:
    return FILE.replace("5/", f"{limit}/").encode()


def policy(site: Site) -> str:
    return site.request()["ratelimit-policy"]


def test_a_changed_document_is_in_force(source: Any, store: Store) -> None:
    with pytest.raises(Exception, match=r"has no (row|key)"):
        LiveRules(source, store=store, interval=NEVER)
    source.write(of_rate(5))
    with LiveRules(source, store=store, interval=NEVER) as live:
        site = Site("wsgi", live)
        assert policy(site) == '"api";q=5;w=3600'
        for limit in (6, 7):
            source.write(of_rate(limit))
            live.step()
            assert policy(site) == f'"api";q={limit};w=3600'
        source.write(b"nonsense \xc3\xa9")
        live.step()
        assert policy(site) == '"api";q=7;w=3600'
        assert f"{source.label} holds what can't be used: {source.name}:1:" in str(live.status().error)
        source.write(of_rate(8))
        live.step()
        assert policy(site) == '"api";q=8;w=3600'


def test_a_forked_child_reads_for_itself(
    source: Any, store: Store, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    source.write(of_rate(5))
    assert source.read() == of_rate(5)
    for limit in (6, 7):
        assert in_child(source.read) == of_rate(limit - 1)
        source.write(of_rate(limit))
        assert source.read() == of_rate(limit)


def test_a_document_that_has_changed_meanwhile_is_not_replaced(source: Any) -> None:
    source.write(of_rate(5))
    source.write(of_rate(6), instead_of=of_rate(5))
    with pytest.raises(SourceChanged, match=r"has changed meanwhile, so nothing was written"):
        source.write(of_rate(7), instead_of=of_rate(5))
    assert source.read() == of_rate(6)


def test_a_promotion_replaces_no_newer_document(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def published_meanwhile(*arguments: Any) -> tuple[bytes, str]:
        target.write(of_rate(9))
        return promoted(*arguments)

    monkeypatch.setattr(promotion, "promoted", published_meanwhile)
    file = FileSource(tmp_path / "limits.toml")
    for target in (source, file):
        target.write(FILE.encode() + b"shadow = true\n")
        monkeypatch.setattr("forebay.rules.live.sources.source_at", lambda text, target=target: target)
        result = CliRunner().invoke(command, ["promote", "api", "source"], env={"COLUMNS": "80"})
        assert result.exit_code == 2
        assert "has changed meanwhile, so nothing was written: look at it, and try again" in result.output
        assert target.read() == of_rate(9)


def test_a_database_that_does_not_answer_leaves_the_last_good_rules(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/rules.db"
    source = SqlSource(url)
    source.create_table()
    source.write(of_rate(5))
    connects, may_answer = [], threading.Event()

    def hang(*_: Any) -> None:
        connects.append(1)
        may_answer.wait()

    with LiveRules(source, store=store, interval=NEVER) as live:
        site = Site("wsgi", live)
        source.write(of_rate(6))
        monkeypatch.setattr("forebay.rules.live.sources.TIMEOUT_S", 0.01)
        sqlalchemy.event.listen(sqlalchemy.Engine, "do_connect", hang)
        try:
            for _ in range(3):
                live.step()
                assert policy(site) == '"api";q=5;w=3600'
                assert "its database doesn't answer within" in str(live.status().error)
            assert connects == [1]
        finally:
            sqlalchemy.event.remove(sqlalchemy.Engine, "do_connect", hang)
            may_answer.set()
        monkeypatch.undo()
        until(lambda: "forebay-sql" not in [one.name for one in threading.enumerate()], "an answer")
        live.step()
        assert policy(site) == '"api";q=6;w=3600'
        assert live.status().error is None


def test_a_row_that_is_removed_leaves_the_last_good_rules(postgres: PostgresServer, store: Store) -> None:
    source = SqlSource(postgres.url)
    source.create_table()
    source.write(of_rate(5))
    with LiveRules(source, store=store, interval=NEVER) as live:
        site = Site("wsgi", live)
        engine = sqlalchemy.create_engine(postgres.url)
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("DROP TABLE forebay_rules"))
        engine.dispose()
        live.step()
        assert policy(site) == '"api";q=5;w=3600'
        assert "forebay_rules" in str(live.status().error)


def test_a_server_that_ends_and_comes_back(store: Store) -> None:
    with redis_server() as server:
        source = RedisSource(server.url, "rules")
        source.write(of_rate(5))
        live = LiveRules(source, store=store, interval=NEVER)
        port = server.port
    site = Site("wsgi", live)
    live.step()
    assert policy(site) == '"api";q=5;w=3600'
    assert "can't be read" in str(live.status().error)
    with redis_server(port=port):
        source.write(of_rate(9))
        live.step()
        assert policy(site) == '"api";q=9;w=3600'
        assert live.status().error is None
    live.close()


def test_the_thread_follows(server: RedisServer, store: Store) -> None:
    source = RedisSource(server.url, "rules")
    source.write(of_rate(5))
    with LiveRules(source, store=store, interval="20 ms") as live:
        site = Site("asgi", live)
        assert policy(site) == '"api";q=5;w=3600'
        source.write(of_rate(6))
        until(lambda: policy(site) == '"api";q=6;w=3600', "a limit of 6")


def test_yaml_in_a_row(tmp_path: Path, store: Store) -> None:
    source = SqlSource(f"sqlite:///{tmp_path}/rules.db", row="shop", syntax="yaml")
    source.create_table()
    source.write(
        b"version: 1\nlimits: {api: {algorithm: fixed-window, rate: 5/hour}}\nrules: [{name: all, limits: [api]}]\n"
    )
    with LiveRules(source, store=store, interval=NEVER) as live:
        assert policy(Site("wsgi", live)) == '"api";q=5;w=3600'
        assert source.name == "forebay_rules:shop.yaml"


def test_a_missing_table_is_named_with_its_remedy(tmp_path: Path) -> None:
    source = SqlSource(f"sqlite:///{tmp_path}/rules.db", table="limits")
    with pytest.raises(SourceGone, match=r"no SQL table 'limits': make it by create_table\(\)"):
        source.read()
    with pytest.raises(SourceGone, match=r"no SQL table 'limits': make it by create_table\(\)"):
        source.write(of_rate(5))


def test_limits_over_redis_need_a_store_for_the_version(server: RedisServer, store: Store) -> None:
    source = RedisSource(server.url, "rules")
    source.write(of_rate(5))
    with RedisStore(server.url, timeout=60) as limits:
        with pytest.raises(InvalidLimiter, match="give a Store, host="):
            LiveRules(source, store=limits, interval=NEVER)
        with LiveRules(source, store=limits, host=store, interval=NEVER) as live:
            site = Site("wsgi", live)
            assert [site.request().status for _ in range(6)] == [200] * 5 + [429]
            source.write(of_rate(6))
            live.step()
            assert [site.request().status for _ in range(2)] == [200, 429]


def test_commands_write_where_applications_read(source: Any, tmp_path: Path, server: RedisServer) -> None:
    path = tmp_path / "limits.toml"
    path.write_bytes(of_rate(5) + b"shadow = true\n")
    if isinstance(source, RedisSource):
        place, read = f"{server.url}#forebay:rules", source.read
    else:
        source = SqlSource(f"sqlite:///{tmp_path}/rules.db", table="limits", row="shop")
        source.create_table()
        place, read = f"sqlite:///{tmp_path}/rules.db#limits:shop", source.read
    result = CliRunner().invoke(command, ["publish", str(path), place])
    assert (result.exit_code, result.output) == (0, f"{source.label} has {path}\n")
    assert read() == path.read_bytes()
    result = CliRunner().invoke(command, ["promote", "api", place])
    assert (result.exit_code, result.output) == (0, f"{source.label}: the rule 'api' is enforced\n")
    assert read() == of_rate(5) + b"shadow = false\n"


@pytest.mark.parametrize(
    "make",
    [
        lambda: SqlSource("sqlite://", table="a; drop table b"),
        lambda: SqlSource("sqlite://", row=""),
        lambda: SqlSource(5),
        lambda: SqlSource("sqlite://", syntax="json"),  # type: ignore[arg-type]
        lambda: RedisSource(5, "key"),
        lambda: RedisSource(AsyncRedis(), "key"),
        lambda: RedisSource("redis://127.0.0.1", ""),
    ],
)
def test_wrong_arguments_are_refused(make: MakeSource) -> None:
    with pytest.raises(InvalidLimiter):
        make()
