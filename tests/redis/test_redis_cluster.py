"""Limiters over a Redis Cluster: slots, requests over several of them, redirections, failovers."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.cluster
from blocking import blocking_store
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis_cluster import SLOTS, RedisCluster
from redis_server import PATIENCE_S, RedisServer, free_port, until
from test_redis_store import EVERY_KIND

from forebay import AllOf, Concurrency, FixedWindow, ForeignState, StoreUnavailable, TokenBucket
from forebay.redis import AsyncRedisStore, RedisStore
from forebay.redis.keys import fingerprint
from forebay.redis.transport.cluster import Cluster
from forebay.redis.transport.timed_socket import TimedSocket


@pytest.fixture
def store(cluster: RedisCluster, is_async: bool) -> Iterator[Any]:
    with blocking_store(cluster.url, is_async, timeout=PATIENCE_S) as opened:
        yield opened


def key_in(third: int, prefix: str = "user") -> str:
    """A key whose states lie in this third of the slots. Each node begins with a third."""
    keys = (f"{prefix}:{number}" for number in range(1000))
    return next(key for key in keys if slot_of(key) * 3 // SLOTS == third)


def slot_of(key: str) -> int:
    return int(key_slot(fingerprint(key)))


KEYS = [key_in(third) for third in range(3)]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_limiter_decides_over_a_cluster(kind: str, store: Any) -> None:
    limiter = EVERY_KIND[kind](store, "api")
    for key in KEYS:
        first = limiter.hit(key)
        assert first.allowed
        assert limiter.peek(key).remaining == first.remaining == limiter.limit - 1
        while limiter.allow(key):
            pass
        limiter.reset(key)
        booked = limiter.reserve(key)
        assert booked.allowed
        booked.cancel()
        assert limiter.peek(key).remaining == limiter.limit
    assert limiter.wait(KEYS[0], timeout=1)


def test_a_request_is_charged_once(store: Any) -> None:
    bucket = TokenBucket(store, "api", "9/hour")
    for key in KEYS:
        for _ in range(3):
            assert bucket.hit(key, request_id="r").remaining == 8
        bucket.refund(key, request_id="r")
        assert bucket.peek(key).remaining == 9


def test_a_batch_goes_to_all_nodes_in_order(store: Any, cluster: RedisCluster) -> None:
    bucket = TokenBucket(store, "api", "3/hour")
    keys = [key for _ in range(5) for key in KEYS]
    assert bucket.allow_many(keys) == [True] * 9 + [False] * 6
    assert all(cluster.ask(node, "DBSIZE") == 1 for node in cluster.masters())
    # One node knows the script, the others don't.
    for node in cluster.masters()[1:]:
        cluster.ask(node, "SCRIPT FLUSH")
    assert bucket.allow_many([f"{key}!" for key in KEYS]) == [True] * 3
    both = AllOf(bucket, TokenBucket(store, "other", "3/hour"))
    assert both.allow_many([*(key + "?" for key in KEYS), KEYS[0]]) == [True] * 3 + [False]


# Several limits


def test_limits_of_one_key_take_one_script_call(store: Any, cluster: RedisCluster) -> None:
    limits = [make(store, kind) for kind, make in EVERY_KIND.items()]
    both = AllOf(*limits)
    assert both.allow(KEYS[0])
    called = calls(cluster)
    both.hit(KEYS[0])
    assert calls(cluster) == called + 1


def calls(cluster: RedisCluster) -> int:
    """The number of scripts that all masters have run."""
    count = 0
    for node in cluster.masters():
        with node.client() as client:
            stats = client.info("commandstats")
        count += sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_evalsha", "cmdstat_eval"))
    return count


def test_limits_of_several_slots_are_charged_all_or_none(store: Any, cluster: RedisCluster) -> None:
    user, team, all_users = (
        TokenBucket(store, "user", "2/hour"),
        Concurrency(store, "team", 3, lease="1 hour"),
        FixedWindow(store, "all", "4/week"),
    )
    three = AllOf(user, team, all_users)

    def left() -> list[int]:
        limits = (user, team, all_users)
        return [limit.peek(key).remaining for limit, key in zip(limits, KEYS, strict=True)]

    first = three.hit(KEYS, [1, 2, 1])
    assert first.allowed
    assert (first.limiter, first.remaining) == ("user", 1)
    assert left() == [1, 1, 3]

    denied = three.hit(KEYS, [1, 2, 1])
    assert not denied.allowed
    assert (denied.limiter, denied.limit, denied.remaining) == ("team", 3, 1)
    assert 3590 < denied.retry_after <= 3600
    assert [one.allowed for one in three.hit_each(KEYS, [1, 2, 1])] == [True, False, True]
    assert not three.reserve(KEYS, [1, 2, 1])
    assert not three.wait(KEYS, [1, 2, 1], 0)
    assert left() == [1, 1, 3]

    # In the same order, whichever of them denies.
    all_users.hit(KEYS[2], 3)
    denied = three.hit(KEYS)
    assert (denied.allowed, denied.limiter, denied.remaining) == (False, "all", 0)
    assert not three.allow(KEYS)
    assert left() == [1, 1, 0]
    assert three.peek(KEYS).limiter == "all"
    three.refund(KEYS, [1, 2, 4])
    booked = three.reserve(KEYS)
    assert booked.allowed
    booked.cancel()
    assert left() == [2, 3, 4]
    assert three.allow_many([KEYS, KEYS, KEYS]) == [True, True, False]
    three.reset(KEYS)
    assert three.peek(KEYS).remaining == 2


def test_charges_are_given_back_after_an_error_half_way(cluster: RedisCluster, is_async: bool) -> None:
    with blocking_store(cluster.url, is_async, timeout=PATIENCE_S) as store:
        limits = [TokenBucket(store, name, "9/hour") for name in ("a", "b", "c")]
        three = AllOf(*limits)
        assert three.allow(KEYS)
        (foreign,) = [name for name in cluster.names() if name.endswith(b":c:tat")]
        cluster.ask(cluster.nodes[2], "SET", foreign, "mine")
        for method in ("allow", "hit", "reserve", "refund", "reset"):
            limits[1].reset(KEYS[1])
            limits[1].allow(KEYS[1])
            with pytest.raises(ForeignState):
                getattr(three, method)(KEYS)
            # The calls to the others are done, or undone.
            remaining = limits[1].peek(KEYS[1]).remaining
            assert remaining == (9 if method in ("refund", "reset") else 8)
        cluster.ask(cluster.nodes[2], "DEL", foreign)
        assert three.allow(KEYS)


def test_a_node_that_does_not_answer_fails_only_its_own_keys(cluster: RedisCluster, is_async: bool) -> None:
    names = ("a", "b", "c")
    with RedisStore(cluster.url, timeout=PATIENCE_S) as patient:
        assert AllOf(*[TokenBucket(patient, name, "9/hour") for name in names]).allow(KEYS)
    with blocking_store(cluster.url, is_async, timeout=0.3) as store:
        limits = [TokenBucket(store, name, "9/hour") for name in names]
        three = AllOf(*limits)
        connect(limits)
        with cluster.nodes[1].stopped():
            for ask in (three.allow, three.hit, three.reserve):
                with pytest.raises(StoreUnavailable):
                    ask(KEYS)
            with pytest.raises(StoreUnavailable):
                limits[1].allow_many(KEYS)
            # Others are served.
            until(lambda: seen(limits[0], KEYS[0]) == 8, "a reply of another node")
        until(lambda: seen(limits[0], KEYS[0]) == 8, "a reply of the first node")
        until(lambda: seen(limits[2], KEYS[2]) == 8, "a reply of the last node")
    settle(cluster)


def seen(limiter: Any, key: str) -> int | None:
    """The remaining permits; None if a busy machine replies after the deadline."""
    with contextlib.suppress(StoreUnavailable):
        decision = limiter.peek(key)
        return None if decision.degraded else int(decision.remaining)
    return None


def connect(limits: list[Any]) -> None:
    """Let a store with a short deadline find the nodes, before one of them stops."""
    for limiter, key in zip(limits, KEYS, strict=True):
        until(lambda limiter=limiter, key=key: seen(limiter, key) is not None, "a reply in time")


def test_a_batch_that_loses_a_node_keeps_the_replies_of_others(cluster: RedisCluster, is_async: bool) -> None:
    with (
        RedisStore(cluster.url, timeout=PATIENCE_S) as patient,
        blocking_store(cluster.url, is_async, timeout=1, when_unavailable="allow") as store,
    ):
        held, bucket = Concurrency(store, "held", 2, lease="1 hour"), TokenBucket(store, "api", "1/hour")
        for key in KEYS:
            assert TokenBucket(patient, "api", "1/hour").allow(key)
        connect([held] * 3)
        connect([bucket] * 3)
        for limiter, answers in ((held, [True] * 3), (bucket, [False, True, True])):
            with cluster.nodes[1].stopped():
                assert limiter.allow_many(KEYS) == answers
            for key in KEYS:
                until(lambda limiter=limiter, key=key: seen(limiter, key) is not None, "all nodes are known again")
        assert seen(held, KEYS[0]) == 1
        held.refund(KEYS[0])
        assert seen(held, KEYS[0]) == 2
    settle(cluster)


@pytest.mark.parametrize("error", [AttributeError("x"), redis.exceptions.InvalidResponse("x")], ids=repr)
def test_a_batch_with_an_unreadable_reply_keeps_the_replies_of_others(
    cluster: RedisCluster, is_async: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = redis.asyncio.Connection if is_async else redis.Connection
    read_response = kind.read_response

    def read(connection: Any, *arguments: Any, **options: Any) -> Any:
        if connection.port == cluster.nodes[1].port:
            raise error
        return read_response(connection, *arguments, **options)

    with blocking_store(cluster.url, is_async, timeout=PATIENCE_S, when_unavailable="allow") as store:
        bucket = TokenBucket(store, "api", "1/hour")
        assert bucket.allow_many(KEYS) == [True] * 3
        with monkeypatch.context() as patch:
            patch.setattr(kind, "read_response", read)
            assert bucket.allow_many(KEYS) == [False, True, True]
        assert store.status().failures == isinstance(error, AttributeError)
        assert store.status().decided_by_policy == 2
        assert bucket.allow_many(KEYS) == [False] * 3


def settle(cluster: RedisCluster) -> None:
    until(cluster.is_settled, "the cluster is settled")


@pytest.mark.parametrize("own_client", [False, True], ids=["URL", "client"])
def test_a_call_whose_reply_is_lost_is_not_repeated(
    cluster: RedisCluster, is_async: bool, own_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py would refresh its slots and repeat the call, as often as it has retries."""
    node = cluster.nodes[1]

    def client() -> Any:
        kind: Any = redis.asyncio.RedisCluster if is_async else redis.cluster.RedisCluster
        # redis-py 5 has its nodes connect again and again.
        retry: Any = {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0)} if is_async else {}
        return kind(host="127.0.0.1", port=cluster.nodes[0].port, socket_timeout=0.3, **retry)

    server, options = (client, {}) if own_client else (cluster.url, {"timeout": 0.3})
    with (
        RedisStore(cluster.url, timeout=PATIENCE_S) as patient,
        blocking_store(server, is_async, **options) as store,
    ):
        bucket = TokenBucket(store, "a", "9/hour")
        assert TokenBucket(patient, "a", "9/hour").allow(KEYS[1])
        connect([bucket] * 3)
        with stopped_until_a_refresh(node, is_async, monkeypatch), pytest.raises(StoreUnavailable):
            bucket.allow(KEYS[1])
        refresh_at_once(store)
        assert TokenBucket(patient, "a", "9/hour").allow(KEYS[1])
        connect([bucket] * 3)
        with stopped_until_a_refresh(node, is_async, monkeypatch), pytest.raises(StoreUnavailable):
            bucket.allow_many([KEYS[1]])
    settle(cluster)
    with RedisStore(cluster.url, timeout=PATIENCE_S) as store:
        # It has read them when it was there again.
        until(lambda: TokenBucket(store, "a", "9/hour").peek(KEYS[1]).remaining <= 5, "all requests have come")
        assert TokenBucket(store, "a", "9/hour").peek(KEYS[1]).remaining == 5


def refresh_at_once(store: Any) -> None:
    """Allow another refresh, after the thread of a sync store that refreshes, if there is one, has ended."""
    if isinstance(store, RedisStore):
        refresher = store.executor.client._own().refresher
        until(lambda: not (refresher and refresher.is_alive()), "the slots are refreshed")
        store.executor.client._own().next_refresh_s = 0.0


class CountedRefreshes:
    """Counts the refreshes of sync clients. Each waits until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.may = 0, threading.Event()
        initialize = redis.cluster.NodesManager.initialize

        def initialize_later(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            assert self.may.wait(PATIENCE_S)
            return initialize(*arguments, **options)

        monkeypatch.setattr(redis.cluster.NodesManager, "initialize", initialize_later)


def test_no_call_waits_for_a_refresh_of_the_slots(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node that the refresh calls may be silent, too. One refresh runs at a time, and not for each failure."""
    monkeypatch.setattr("forebay.redis.transport.cluster.REFRESH_EVERY_S", 1000.0)
    with RedisStore(cluster.url, timeout=1) as store:
        bucket = TokenBucket(store, "api", "99/hour")
        assert all(bucket.allow(key) for key in KEYS)
        refreshes = CountedRefreshes(monkeypatch)

        def is_refreshed() -> bool:
            refresher = store.executor.client._own().refresher
            return refresher is None or not refresher.is_alive()

        with cluster.nodes[1].stopped():
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    bucket.allow(KEYS[1])
                with pytest.raises(StoreUnavailable):
                    bucket.allow_many([KEYS[1]])
                assert bucket.allow(KEYS[0])
            assert not is_refreshed()
        refreshes.may.set()
        until(is_refreshed, "the refresh has ended")
        with cluster.nodes[1].stopped(), pytest.raises(StoreUnavailable):
            bucket.allow(KEYS[1])
        until(is_refreshed, "no refresh runs")
        assert refreshes.count == 1
        assert bucket.allow(KEYS[1])
        # The next second has come.
        store.executor.client._own().next_refresh_s = 0.0
        with cluster.nodes[1].stopped(), pytest.raises(StoreUnavailable):
            bucket.allow(KEYS[1])
        until(is_refreshed, "the refresh has ended")
        assert refreshes.count == 2
    settle(cluster)


def test_a_store_that_is_closed_leaves_no_connections(
    cluster: RedisCluster, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        total = 0
        for node in cluster.masters():
            with node.client() as client:
                total += len(client.client_list("normal"))
        return total

    gc.collect()
    before = count()
    with blocking_store(cluster.url, is_async, timeout=PATIENCE_S) as store:
        window = FixedWindow(store, "w", "100/hour")
        for key in KEYS:
            assert window.allow(key)
        assert count() >= before + 3
        refresher = None
        if not is_async:
            # A refresh that calls the nodes, and makes connections, after that.
            nodes, is_closed = store.executor.client._cluster().nodes_manager, threading.Event()
            initialize = nodes.initialize

            def late() -> None:
                assert is_closed.wait(PATIENCE_S)
                initialize()
                for key in KEYS:
                    store.executor.client._pool_of(store.executor.client._node_of(fingerprint(key))).get_connection()

            monkeypatch.setattr(nodes, "initialize", late)
            store.executor.client._refresh_slots()
            refresher = store.executor.client._own().refresher
        store.close()
        until(lambda: count() <= before, "the connections have ended")
        if refresher is not None:
            is_closed.set()
            refresher.join()
            until(lambda: count() <= before, "the connections have ended that were made afterwards")


def test_every_reply_of_a_node_has_a_deadline(cluster: RedisCluster) -> None:
    with RedisStore(cluster.url, timeout=PATIENCE_S) as store:
        assert TokenBucket(store, "api", "9/hour").allow(KEYS[0])
        pool = store.executor.client._pool_of(store.executor.client._node_of(fingerprint(KEYS[0])))
        connection = pool.get_connection()
        try:
            assert isinstance(connection._sock, TimedSocket)
        finally:
            pool.release(connection)


def test_a_child_begins_with_a_client_of_its_own(
    cluster: RedisCluster, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    """A thread of the parent has locked the parent's client, and refreshes its slots."""
    with RedisStore(cluster.url, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "api", "9/hour")
        assert bucket.allow(KEYS[0])
        manager = store.executor.client._cluster().nodes_manager
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with getattr(manager, "_lock", contextlib.nullcontext()):
                held.set()
                over.wait(PATIENCE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(PATIENCE_S)
        store.executor.client._own().refresher, store.executor.client._own().next_refresh_s = thread, math.inf
        try:

            def ask() -> tuple[int, object, float]:
                return (
                    bucket.hit(KEYS[0]).remaining,
                    store.executor.client._own().refresher,
                    store.executor.client._own().next_refresh_s,
                )

            assert in_child(ask) == (7, None, -math.inf)
        finally:
            over.set()
            thread.join()
        assert bucket.hit(KEYS[0]).remaining == 6


def test_concurrent_threads_share_one_client() -> None:
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def make() -> object:
        together.wait()
        return object()

    client = Cluster(make)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(client._cluster())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1]


@contextlib.contextmanager
def stopped_until_a_refresh(node: RedisServer, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The node goes on as soon as a client refreshes its slots."""
    manager = redis.asyncio.cluster.NodesManager if is_async else redis.cluster.NodesManager
    initialize = manager.initialize

    def and_go_on(*arguments: Any, **options: Any) -> Any:
        node.process.send_signal(signal.SIGCONT)
        return initialize(*arguments, **options)

    with node.stopped(), monkeypatch.context() as patch:
        patch.setattr(manager, "initialize", and_go_on)
        yield


# Changes of the cluster


def test_a_slot_that_moves_is_followed(store: Any, cluster: RedisCluster) -> None:
    key = key_in(1, "moved")
    slot = slot_of(key)
    # It isn't brought back: the next test that has it moved moves it on.
    source = cluster.master_of(fingerprint(key))
    target = next(node for node in cluster.nodes[1:3] if node is not source)

    bucket, log = TokenBucket(store, "a", "20/hour"), FixedWindow(store, "b", "20/week")
    both = AllOf(bucket, log)

    def ask_all() -> None:
        assert bucket.allow(key)
        assert bucket.allow_many([key, KEYS[0], key]) == [True] * 3
        assert both.allow([key, key])

    ask_all()
    cluster.ask(target, "CLUSTER SETSLOT", slot, "IMPORTING", cluster.id_of(source))
    cluster.ask(source, "CLUSTER SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    names = [name for name in cluster.ask(source, "KEYS", "*") if key_slot(name) == slot]
    assert len(names) == 2
    # Half-way there's one key on either side: the calls for both at once have to wait, the others need not.
    cluster.ask(source, "MIGRATE", "127.0.0.1", target.port, names[0], 0, 60_000)
    moved = bucket if names[0].endswith(b":tat") else log
    assert moved.allow(key)
    assert moved.allow_many([key, key]) == [True] * 2
    with pytest.raises(StoreUnavailable):
        both.allow(key)
    cluster.ask(source, "MIGRATE", "127.0.0.1", target.port, names[1], 0, 60_000)
    ask_all()
    # First the new owner: that begins an epoch, without which other nodes' older news would count as newer.
    for node in (target, source, cluster.nodes[0]):
        cluster.ask(node, "CLUSTER SETSLOT", slot, "NODE", cluster.id_of(target))
    # Until they agree, nodes may redirect a client to and fro.
    settle(cluster)
    ask_all()
    spent = [20 - one.peek(key).remaining for one in (bucket, log)]
    assert spent == [12 + 3 * (moved is bucket), 3 + 3 * (moved is log)]


def test_a_failover_is_followed(store: Any, cluster: RedisCluster) -> None:
    bucket = TokenBucket(store, "a", "9/hour")
    for _ in range(4):
        assert bucket.allow(KEYS[0])
    (replica,) = [node for node in cluster.nodes if node not in cluster.masters()]
    (master,) = [node for node in cluster.masters() if node in (cluster.nodes[0], cluster.nodes[3])]
    cluster.ask(replica, "CLUSTER FAILOVER")
    until(lambda: replica in cluster.masters() and master not in cluster.masters(), "the replica is the master")
    settle(cluster)
    assert bucket.allow_many([KEYS[0], KEYS[1], KEYS[0]]) == [True] * 3
    assert [bucket.allow(KEYS[0]) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
def test_calls_leave_a_master_that_is_gone(cluster: RedisCluster, is_async: bool, is_batch: bool) -> None:
    with (
        RedisStore(cluster.url, timeout=PATIENCE_S) as patient,
        blocking_store(cluster.url, is_async, timeout=0.3) as store,
    ):
        assert TokenBucket(patient, "a", "9/hour").allow_many([KEYS[0]] * 4) == [True] * 4
        bucket = TokenBucket(store, "a", "9/hour")
        connect([bucket] * 3)
        (replica,) = [node for node in cluster.nodes if node not in cluster.masters()]
        (master,) = [node for node in cluster.masters() if node in (cluster.nodes[0], cluster.nodes[3])]
        assert cluster.ask(master, "WAIT", 1, int(1000 * PATIENCE_S)) == 1
        with master.stopped():
            cluster.ask(replica, "CLUSTER FAILOVER", "TAKEOVER")
            until(
                lambda: all(
                    [b"127.0.0.1", replica.port] in [part[2][:2] for part in cluster.ask(node, "CLUSTER SLOTS")]
                    for node in (*cluster.nodes[1:3], replica)
                ),
                "the others know it",
            )
            with pytest.raises(StoreUnavailable):
                bucket.allow_many([KEYS[0]]) if is_batch else bucket.allow(KEYS[0])
            # And then it looks up the slot's node, as often as the breaker lets it.

            def is_answered() -> bool:
                with contextlib.suppress(StoreUnavailable):
                    return bucket.allow_many([KEYS[0]]) == [True] if is_batch else bool(bucket.allow(KEYS[0]))
                return False

            until(is_answered, "the new master allows")
            until(lambda: seen(bucket, KEYS[0]) == 4, "the new master's count")
    settle(cluster)


def test_an_unavailable_cluster_raises_store_unavailable(is_async: bool) -> None:
    with blocking_store(f"redis+cluster://127.0.0.1:{free_port()}", is_async, timeout=1) as store:
        bucket = TokenBucket(store, "a", "9/hour")
        for ask in (bucket.allow, bucket.hit, bucket.peek, AllOf(bucket).allow):
            with pytest.raises(StoreUnavailable, match="has not decided"):
                ask("ada")
        with pytest.raises(StoreUnavailable):
            bucket.allow_many(["ada", "bob"])
        with pytest.raises(StoreUnavailable):
            AllOf(bucket, bucket).allow(["ada", "bob"])


def test_invalid_clients_are_refused(cluster: RedisCluster) -> None:
    make: Any = RedisStore
    client = redis.cluster.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, socket_timeout=None)
    try:
        with pytest.raises(ValueError, match="socket_timeout"):
            make(client)
        with pytest.raises(TypeError, match=r"redis\.asyncio\.cluster\.RedisCluster"):
            AsyncRedisStore(client)  # type: ignore[arg-type]
    finally:
        client.close()
    with RedisStore(f"redis://127.0.0.1:{cluster.nodes[0].port}") as store:
        bucket = TokenBucket(store, "api", "5/minute")
        with pytest.raises(StoreUnavailable, match=r"MovedError.*redis\+cluster://"):
            bucket.allow_many(range(100))
    for url in ("http+cluster://127.0.0.1:1", "redis+clusters://127.0.0.1:1"):
        with pytest.raises(ValueError, match="redis://"):
            make(url)
