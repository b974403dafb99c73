"""``SyncedStore(push=True)``: a host hears of hot keys between its exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel
from redis_server import RedisServer, until
from synced_hosts import Host, hosts

from forebay import FixedWindow, SlidingWindow, Store, StoreUnavailable, TokenBucket
from forebay.redis import RedisStore, SyncedStore
from forebay.redis.synced import news

LIMIT: Final = 100
KINDS: Final[dict[str, Callable[[Any], Any]]] = {
    "fixed window": lambda store: FixedWindow(store, "api", f"{LIMIT}/year"),
    "sliding window": lambda store: SlidingWindow(store, "api", f"{LIMIT}/year"),
    "token bucket": lambda store: TokenBucket(store, "api", f"{LIMIT}/year"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def listeners(client: redis.Redis) -> int:
    """The subscriptions to news of all limiters."""
    channels: Any = client.pubsub_channels("forebay:*")
    counts: Any = client.pubsub_numsub(*channels)
    return sum(number for _, number in counts)


def heard(host: Host) -> int:
    return host.synced.status().news_heard


def left(host: Host, key: Any = "k") -> int:
    remaining: int = host.limiter.peek(key).remaining
    return remaining


@pytest.fixture
def three(server: RedisServer, client: redis.Redis, request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """Two hosts that push, and one that does not. None of them exchanges by itself."""
    client.flushall()
    make = KINDS[getattr(request, "param", "fixed window")]
    with ExitStack() as stack:
        pushing = stack.enter_context(hosts(2, server.url, make, push=True))
        made = [*pushing, *stack.enter_context(hosts(1, server.url, make))]
        until(lambda: listeners(client) == 2, "both hosts listen")
        yield made


@pytest.mark.parametrize("three", KINDS, indirect=True)
def test_host_hears_of_a_key_that_it_has_not_counted(three: list[Host]) -> None:
    first, second, alone = three
    assert first.limiter.hit("k", LIMIT)
    first.exchange()
    until(lambda: left(second) == 0, "the second host hears of the key")
    assert not second.limiter.allow("k")
    assert heard(second) == 1
    assert (left(alone), heard(alone), heard(first)) == (LIMIT, 0, 0)


@pytest.mark.parametrize("three", KINDS, indirect=True)
def test_host_hears_of_a_key_that_it_has_counted(three: list[Host]) -> None:
    first, second, _ = three
    second.limiter.hit("k", 5)
    second.limiter.hit("cold")
    first.limiter.hit("k", 60)
    first.exchange()
    until(lambda: left(second) == 35, "the second host hears of the other's permits")
    # That reported what the second host had counted of this key, and of no other.
    assert second.synced.status().pending_keys == 1
    second.exchange()
    first.exchange()
    assert (left(first), left(second)) == (35, 35)


def test_host_hears_of_every_change(three: list[Host]) -> None:
    first, second, _ = three
    for used in (30, 50, 70):
        first.limiter.hit("k", 20 if used > 30 else 30)
        first.exchange()
        until(lambda used=used: left(second) == LIMIT - used, "the second host hears of the change")


def test_exchange_that_changes_no_hot_key_publishes_nothing(three: list[Host], client: redis.Redis) -> None:
    def published() -> int:
        stats: Any = client.info("commandstats")
        return int(stats.get("cmdstat_publish", {"calls": 0})["calls"])

    first, _, alone = three
    before = published()
    first.limiter.hit("k", LIMIT // 4 - 1)
    first.exchange()
    assert published() == before
    first.limiter.hit("k")
    first.exchange()
    assert published() == before + 1
    first.exchange()
    assert published() == before + 1
    alone.limiter.hit("k", 50)
    alone.exchange()
    assert published() == before + 1


NONSENSE: Final = [
    b"",
    b"1",
    b"2 0123456789abcdef 1",
    b"1 0123456789abcdef",
    b"1 0123456789abcdef 10000",
    b"1 0123456789ABCDEF 1",
    b"1 0123456789abcdef 1\n",
    b"1 0123456789abcdef -1",
    b"\x00\xff" * 10,
    b"1 0123456789abcdef 1" + b"0" * 100_000,
]


def test_other_messages_are_ignored_and_counted(three: list[Host], client: redis.Redis) -> None:
    first, second, _ = three
    channel = client.pubsub_channels("forebay:*")[0]  # type: ignore[index]
    for message in NONSENSE:
        client.publish(channel, message)
    until(lambda: second.synced.status().news_ignored == len(NONSENSE), "the second host ignores the messages")
    assert (heard(second), second.synced.status().error) == (0, None)
    # A forged message is a reason to read what Redis has, no more.
    client.publish(channel, b"1 0123456789abcdef ffff")
    until(lambda: heard(second) == 1, "the second host reads the lists")
    assert left(second) == LIMIT
    first.limiter.hit("k", LIMIT)
    first.exchange()
    until(lambda: left(second) == 0, "the second host hears of the key")


def test_host_connects_again(three: list[Host], client: redis.Redis) -> None:
    first, second, _ = three
    client.client_kill_filter(_type="pubsub")  # type: ignore[no-untyped-call]
    until(lambda: listeners(client) == 2, "both hosts listen again")
    first.limiter.hit("k", LIMIT)
    first.exchange()
    until(lambda: left(second) == 0, "the second host hears of the key")
    assert second.synced.status().error is None


def test_silent_server_is_pinged(three: list[Host], client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    def connections() -> set[str]:
        return {one["id"] for one in client.client_list(_type="pubsub")}

    def pings() -> int:
        stats: Any = client.info("commandstats")
        return int(stats.get("cmdstat_ping", {"calls": 0})["calls"])

    before, pinged = connections(), pings()
    monkeypatch.setattr(news, "SILENCE_S", 0.3)
    until(lambda: pings() >= pinged + 4, "the hosts ping")
    # The replies kept the connections.
    assert connections() == before
    first, second, _ = three
    first.limiter.hit("k", LIMIT)
    first.exchange()
    until(lambda: left(second) == 0, "the second host hears of the key")


def test_host_gives_up_a_connection_without_replies(
    three: list[Host], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {one["id"] for one in client.client_list(_type="pubsub")}
    monkeypatch.setattr(news, "SILENCE_S", -1.0)
    until(lambda: not before & {one["id"] for one in client.client_list(_type="pubsub")}, "the hosts connect again")


def test_one_process_of_a_host_listens(server: RedisServer, client: redis.Redis) -> None:
    client.flushall()
    make = KINDS["fixed window"]
    with hosts(1, server.url, make, push=True) as (other,), Store.private(keys=100) as store:
        processes = [Host(server.url, make, store=store, push=True) for _ in range(2)]
        try:
            until(lambda: listeners(client) == 2, "one process of each host listens")
            other.limiter.hit("k", 50)
            other.exchange()
            until(lambda: left(processes[0]) == 50, "the host hears of the key")
            assert listeners(client) == 2
            assert [heard(one) for one in processes] in ([1, 0], [0, 1])
            listening = processes[heard(processes[1])]
            listening.synced.close()
            until(lambda: listeners(client) == 2, "the other process listens")
            other.limiter.hit("k", 20)
            other.exchange()
            until(lambda: left(processes[0]) == 30, "the host hears of the change")
        finally:
            for one in processes:
                one.redis_store.close()
                one.synced.close()


def test_host_listens_for_as_many_limiters_as_a_store_has(server: RedisServer, client: redis.Redis) -> None:
    with (
        Store.private(keys=100) as store,
        RedisStore(server.url, timeout=60) as redis_store,
        SyncedStore(redis_store, store, "1 minute", keys=1, push=True) as synced,
    ):
        for number in range(200):
            FixedWindow(synced, f"limit {number}", "9/hour")
        until(lambda: len(client.pubsub_channels()) == 200, "a channel of each limiter")


def test_child_listens_when_its_parent_does_not_any_more(
    server: RedisServer, client: redis.Redis, in_child: Callable[..., Any]
) -> None:
    client.flushall()
    make = KINDS["fixed window"]
    with hosts(2, server.url, make, push=True) as (parent, other):
        until(lambda: listeners(client) == 2, "both hosts listen")
        # A child that closes takes neither the parent's connection nor its turn.
        in_child(lambda: parent.synced.close())
        assert listeners(client) == 2
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.write(writing, b"begun")
                until(lambda: left(parent) == 0, "the child hears of the key")
                status = 0
            finally:
                os._exit(status)
        assert os.read(reading, 5) == b"begun"
        parent.synced.close()
        until(lambda: listeners(client) == 2, "the child listens")
        other.limiter.hit("k", LIMIT)
        other.exchange()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


RIGHTS: Final = (
    "~forebay:*",
    *("+hmget", "+hset", "+hlen", "+hgetall", "+hdel", "+pexpireat", "+zadd", "+zcard", "+zrange", "+zrem", "+zscore"),
    *("+time", "+evalsha", "+eval", "+script|load"),
)


def test_push_needs_few_rights(server: RedisServer, client: redis.Redis) -> None:
    client.flushall()
    for_push = ("+publish", "+subscribe", "+ping", "&forebay:*")
    client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">secret", *RIGHTS, *for_push)
    url = f"redis://shop:secret@127.0.0.1:{server.port}/0"
    try:
        with hosts(2, url, KINDS["fixed window"], push=True) as (first, second):
            until(lambda: listeners(client) == 2, "both hosts listen")
            first.limiter.hit("k", LIMIT)
            first.exchange()
            until(lambda: left(second) == 0, "the second host hears of the key")
            # Without the right to publish, everything else goes on.
            client.execute_command("ACL", "SETUSER", "shop", "-publish")
            first.limiter.hit("l", LIMIT)
            with pytest.raises(StoreUnavailable, match="can't run this command"):
                first.exchange()
            status = first.synced.status()
            assert (status.pending_keys, "can't run" in str(status.error)) == (0, True)
            second.exchange()
            assert left(second, "l") == 0
    finally:
        client.execute_command("ACL", "DELUSER", "shop")


def test_thread_ends_with_the_store(three: list[Host], client: redis.Redis) -> None:
    three[0].synced.close()
    until(lambda: listeners(client) == 1, "the first host listens no more")


def test_push_is_refused_over_clusters_and_sentinels() -> None:
    options: Any = {"socket_timeout": 0.1, "retry": Retry(NoBackoff(), 0)}  # type: ignore[no-untyped-call]
    sentinel: Any = Sentinel([("127.0.0.1", 1)], sentinel_kwargs=options, **options)  # type: ignore[no-untyped-call]
    with Store.private(keys=10) as store:
        for server in ("redis+cluster://127.0.0.1:1", sentinel.master_for("main", **options)):
            with RedisStore(server) as over, pytest.raises(ValueError, match="push=True is for a single Redis server"):
                SyncedStore(over, store, keys=10, push=True)
