"""Redis slow, gone, failing over, loading, read-only, out of memory, restarted: what decides, and how it recovers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
from blocking import blocking_store
from process_helpers import Crew, Meeting, SharedNumbers, path_of, wait_until
from proxy import Proxy, proxy
from redis_server import RedisServer, redis_server

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Decision,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.errors import CostExceedsLimit, ForeignState, InvalidKey, InvalidLimiter, StoreClosed, StoreUnavailable
from forebay.redis import AsyncRedisStore, RedisStore
from forebay.redis.fallback import UnleasedCounts
from forebay.redis.transport.breaker import AT_ONCE, THRESHOLD, Breaker
from forebay.testing import ManualClock

# Long enough for any machine; what a test makes wait has a shorter one.
PATIENT_S = 30.0
SHORT_S = 0.2
# Longer than the interval between two probes with its jitter; of a store with a short timeout.
PROBE_S = 1.3


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def host(clock: ManualClock) -> Iterator[Store]:
    """The host's store. Its clock stands still until the test moves it."""
    clock.set(1000)
    with Store.private(keys=1000, clock=clock) as opened:
        yield opened


@pytest.fixture
def through(server: RedisServer) -> Iterator[Proxy]:
    with proxy(server.port) as opened:
        yield opened


@pytest.fixture
def make(is_async: bool) -> Iterator[Callable[..., Any]]:
    """Opens a store with blocking methods."""
    with contextlib.ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(
            blocking_store(url, is_async, **{"timeout": PATIENT_S, **options})
        )


def break_open(store: Any, ask: Callable[..., Any]) -> None:
    """Send calls to a server that doesn't answer until the breaker is open."""
    for _ in range(THRESHOLD):
        with contextlib.suppress(StoreUnavailable):
            ask("x")
    assert store.status().state == "open"


# ---- What can happen to a server -------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    with server.stopped():
        yield


@contextlib.contextmanager
def out_of_memory(server: RedisServer) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextlib.contextmanager
def read_only(server: RedisServer) -> Iterator[None]:
    """The server is a replica, as a master after a failover."""
    with redis_server() as master, server.client() as client:
        client.replicaof("127.0.0.1", master.port)
        yield
        client.replicaof("NO", "ONE")


@contextlib.contextmanager
def cut_off_replica(server: RedisServer) -> Iterator[None]:
    """MASTERDOWN."""
    with server.client() as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)
        yield
        client.replicaof("NO", "ONE")
        client.config_set("replica-serve-stale-data", "yes")


@contextlib.contextmanager
def too_few_replicas(server: RedisServer) -> Iterator[None]:
    """NOREPLICAS."""
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


HAPPENINGS = [stopped, out_of_memory, read_only, cut_off_replica, too_few_replicas]


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_w27_a_server_that_cannot_work_then_can(
    make: Callable[..., Any], server: RedisServer, host: Store, clock: ManualClock, happening: Any
) -> None:
    """Each fallback decides until the server is back. Then Redis decides every request again."""
    timeout = SHORT_S if happening is stopped else PATIENT_S
    deny = make(server.url, timeout=timeout, host=host)
    allow = make(server.url, timeout=timeout, host=host, when_unavailable="allow", namespace="allow")
    local = make(server.url, timeout=timeout, host=host, when_unavailable="local", hosts=4, namespace="local")
    buckets = [TokenBucket(store, "api", "8/hour") for store in (deny, allow, local)]
    with contextlib.suppress(StoreUnavailable):  # a busy machine
        buckets[0].allow("ada")
    with happening(server):
        for _ in range(THRESHOLD + 2):
            with pytest.raises(StoreUnavailable):
                buckets[0].hit("ada")
        status = deny.status()
        assert (status.state, status.failures) == ("open", THRESHOLD)
        answers: list[Decision] = [buckets[1].hit("ada") for _ in range(10)]
        assert all(answer.allowed and answer.degraded for answer in answers)
        assert all(buckets[1].allow("ada") for _ in range(10))
        answers = [buckets[2].hit("ada") for _ in range(5)]
        assert [answer.allowed for answer in answers] == [True, True, False, False, False]
        assert all(answer.degraded and answer.limiter == "api" and answer.limit == 2 for answer in answers)
        assert not buckets[2].allow("ada")
        assert local.status() == allow.status()
    # No call goes to Redis before it is time.
    assert buckets[1].hit("ada").degraded

    def ask_until_answered() -> bool:
        clock.advance(2 * 2 * PATIENT_S)
        return not buckets[1].hit("ada").degraded

    wait_until(ask_until_answered, "the end of an outage")
    clock.advance(1)
    wait_until(lambda: not buckets[2].hit("ada").degraded, "a decision of Redis's")
    wait_until(lambda: not buckets[1].hit("ada").degraded, "a decision of Redis's")
    assert deny.status().state == "closed"
    assert deny.status().failures == 0


def test_w27_killed_and_restarted_empty(make: Callable[..., Any], host: Store, clock: ManualClock) -> None:
    """After SIGKILL without persistence, limits begin afresh, and scripts are sent again."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(redis_server())
        through = stack.enter_context(proxy(first.port))
        local = make(through.url, host=host, when_unavailable="local", hosts=2)
        bucket = TokenBucket(local, "api", "8/hour")
        assert [bucket.allow("ada") for _ in range(9)] == [True] * 8 + [False]
        first.process.kill()
        first.process.wait()
        # The host knows nothing of what Redis has counted.
        assert [bucket.hit("ada").allowed for _ in range(6)] == [True] * 4 + [False] * 2
        through.server_port = stack.enter_context(redis_server()).port
        clock.advance(5 * PATIENT_S)
        # Nor Redis of what the host has.
        assert [bucket.hit("ada").allowed for _ in range(9)] == [True] * 8 + [False]


def test_a_failover_behind_one_address(make: Callable[..., Any], host: Store, clock: ManualClock) -> None:
    with redis_server("--repl-diskless-sync-delay", "0") as old, redis_server() as new, proxy(old.port) as through:
        deny = make(through.url, host=host)
        bucket = TokenBucket(deny, "api", "8/hour")
        with old.client() as was_master, new.client() as is_master:
            is_master.replicaof("127.0.0.1", old.port)
            wait_until(lambda: is_master.info("replication")["master_link_status"] == "up", "replication")
            assert [bucket.allow("ada") for _ in range(4)] == [True] * 4
            assert was_master.wait(1, 60_000) == 1
            is_master.replicaof("NO", "ONE")
            was_master.replicaof("127.0.0.1", new.port)
            with pytest.raises(StoreUnavailable, match=r"(?i)readonly|read only"):
                bucket.allow("ada")
            through.server_port = new.port
            through.cut()
            # asyncio notices that a connection was cut only after the loop has run.
            with contextlib.suppress(StoreUnavailable):
                bucket.peek("ada")
            # One failure doesn't open it: the next call goes to the new master.
            assert [bucket.allow("ada") for _ in range(5)] == [True] * 4 + [False]
            assert deny.status().failures == 0


def test_a_loading_server_is_unavailable(
    make: Callable[..., Any], host: Store, clock: ManualClock, tmp_path: Path
) -> None:
    options = (
        "--enable-debug-command",
        "yes",
        "--dir",
        str(tmp_path),
        "--loading-process-events-interval-bytes",
        "1024",
    )
    with redis_server(*options) as server, server.client() as client:
        allow = make(server.url, host=host, when_unavailable="allow")
        bucket = TokenBucket(allow, "api", "1/hour")
        client.execute_command("DEBUG", "POPULATE", 10_000, "key", 100)
        client.config_set("key-load-delay", 2000)
        reloading = threading.Thread(target=client.execute_command, args=("DEBUG", "RELOAD"))
        reloading.start()
        with server.client() as other:
            wait_until(lambda: other.info("persistence")["loading"] == 1, "loading")
            assert [bucket.hit("ada").degraded for _ in range(5)] == [True] * 5
            assert repr(bucket.hit("ada")).endswith(", degraded=True)")
            assert allow.status().state == "open"
            other.config_set("key-load-delay", 0)
            reloading.join()
        clock.advance(5 * PATIENT_S)
        assert [bucket.hit("ada").allowed for _ in range(2)] == [True, False]


def test_forgotten_scripts_count_as_no_failure(
    make: Callable[..., Any], client: redis.Redis, server: RedisServer
) -> None:
    deny = make(server.url)
    bucket = TokenBucket(deny, "api", "8/hour")
    for _ in range(THRESHOLD + 1):
        client.script_flush()
        decision = bucket.hit("ada")
        assert not decision.degraded
        assert "degraded" not in repr(decision)
        client.script_flush()
        assert bucket.allow_many(["bob"]) in ([True], [False])
    assert deny.status().failures == 0


def test_a_rejected_request_counts_as_no_failure(
    make: Callable[..., Any], client: redis.Redis, server: RedisServer
) -> None:
    allow = make(server.url, when_unavailable="allow", plain_keys=True)
    bucket = TokenBucket(allow, "api", "8/hour")
    client.set("forebay:{s:ada}:api:tat", "something else")
    for _ in range(THRESHOLD + 1):
        with pytest.raises(ForeignState):
            bucket.hit("ada")
        with pytest.raises(CostExceedsLimit):
            bucket.hit("ada", 9)
        with pytest.raises(InvalidKey):
            bucket.allow(1.5)
    assert allow.status().failures == 0
    assert allow.status().decided_by_policy == 0


# ---- The breaker -----------------------------------------------------------------------------------------------------


def test_an_open_breaker_sends_one_probe_per_interval(
    make: Callable[..., Any], through: Proxy, host: Store, clock: ManualClock
) -> None:
    """Each call to a silent server opens a connection, so the connections count the calls."""
    through.is_silent = True
    deny = make(through.url, timeout=SHORT_S, host=host)
    bucket = TokenBucket(deny, "api", "8/hour")
    break_open(deny, bucket.allow)
    for probes in range(3):
        for _ in range(50):
            with pytest.raises(StoreUnavailable, match="asked again"):
                bucket.allow("ada")
        wait_until(lambda probes=probes: through.connection_count == THRESHOLD + probes, "a connection")
        clock.advance(PROBE_S)
        with pytest.raises(StoreUnavailable, match=r"[Tt]ime"):
            bucket.allow("ada")
    # Never before most of the interval has passed.
    clock.advance(0.7)
    with pytest.raises(StoreUnavailable, match="asked again"):
        bucket.allow("ada")


def test_consecutive_failures_open_the_breaker(make: Callable[..., Any], through: Proxy, host: Store) -> None:
    deny = make(through.url, timeout=SHORT_S, host=host)
    bucket = TokenBucket(deny, "api", "8/hour")
    for _ in range(2):
        through.is_silent = True
        for number in range(THRESHOLD - 1):
            with pytest.raises(StoreUnavailable):
                bucket.peek("ada")
            assert deny.status().failures == number + 1
        through.is_silent = False
        through.cut()
        with contextlib.suppress(StoreUnavailable):  # a busy machine; then it is open
            bucket.peek("ada")
            assert deny.status().failures == 0
            continue
        return


def test_processes_of_a_host_share_the_breaker(
    crew: Crew, store_name: str, server: RedisServer, through: Proxy, clock: ManualClock
) -> None:
    """The processes make their stores by themselves. Another host has a breaker of its own."""

    def ask(name: str) -> tuple[str, str, int]:
        with (
            Store(name, keys=1000, clock=clock) as host,
            RedisStore(through.url, timeout=PATIENT_S, host=host) as store,
        ):
            bucket = TokenBucket(store, "api", "8/hour")
            try:
                answer = str(bucket.allow("ada"))
            except StoreUnavailable as error:
                answer = str(error)
            return answer, store.status().state, through.connection_count

    def fail(name: str) -> None:
        with (
            Store(name, keys=1000, clock=clock) as host,
            RedisStore(through.url, timeout=SHORT_S, host=host) as store,
        ):
            for _ in range(THRESHOLD):
                with contextlib.suppress(StoreUnavailable):
                    TokenBucket(store, "api", "8/hour").allow("ada")

    # No time passes until the next probe.
    with Store(store_name, keys=1000, clock=clock):
        through.is_silent = True
        crew.start(fail, store_name).result()
        answer, state, _ = crew.start(ask, store_name).result()
        assert "asked again" in answer
        assert state == "open"
        through.is_silent = False
        with Store.private(keys=1000) as other, RedisStore(through.url, timeout=PATIENT_S, host=other) as store:
            assert TokenBucket(store, "api", "8/hour").allow("ada")


def test_another_process_probes_after_the_prober_is_killed(
    crew: Crew, through: Proxy, clock: ManualClock, host: Store
) -> None:
    through.is_silent = True
    with RedisStore(through.url, timeout=SHORT_S, host=host) as store:
        bucket = TokenBucket(store, "api", "8/hour")
        for _ in range(THRESHOLD):
            with contextlib.suppress(StoreUnavailable):
                bucket.allow("ada")
        count = through.connection_count

        def probe() -> None:
            with RedisStore(through.url, timeout=PATIENT_S, host=host) as patient:
                TokenBucket(patient, "api", "8/hour").allow("ada")

        clock.advance(PROBE_S)
        prober = crew.start(probe)
        wait_until(lambda: through.connection_count > count, "a probe")
        prober.kill()
        through.is_silent = False
        with pytest.raises(StoreUnavailable, match="asked again"):
            bucket.allow("ada")
        # A patient store's interval.
        clock.advance(3 * PATIENT_S)

        def is_answered() -> bool:
            with contextlib.suppress(StoreUnavailable):
                return bucket.allow("ada")
            clock.advance(3 * PATIENT_S)
            return False

        wait_until(is_answered, "an answer")


@pytest.mark.parametrize("filled_after", [0, 1, THRESHOLD])
@pytest.mark.parametrize("on_full", ["evict", "deny", "allow", None])
def test_the_breaker_works_in_a_full_host_store(
    through: Proxy, clock: ManualClock, on_full: Literal["evict", "deny", "allow"] | None, filled_after: int
) -> None:
    """It opens, sends one probe per interval and closes, whenever other keys fill the store."""
    clock.set(1000)
    with (
        Store.private(keys=100, on_full=on_full, clock=clock) as host,
        RedisStore(through.url, timeout=PATIENT_S, host=host) as store,
    ):
        bucket = TokenBucket(store, "api", "8/hour")

        def count_asked(calls: int) -> int:
            count = 0
            for _ in range(calls):
                with pytest.raises(StoreUnavailable) as caught:
                    bucket.allow("ada")
                count += "asked again" not in str(caught.value)
            return count

        port, through.server_port = through.server_port, 1
        for number in range(THRESHOLD + 1):
            if number == filled_after:
                clock.advance(3 * PATIENT_S)
                others = FixedWindow(host, "others", "1/day")
                for key in range(3000):
                    others.allow(key)
            if number < THRESHOLD:
                assert count_asked(1) == 1
        assert store.status().state == "open"
        for _ in range(3):
            clock.advance(3 * PATIENT_S)
            assert count_asked(20) == 1
        through.server_port = port
        clock.advance(3 * PATIENT_S)
        assert bucket.allow("ada")
        clock.advance(3 * PATIENT_S)
        assert bucket.allow("ada")
        assert store.status().state == "closed"
        # When there is room again, the other processes learn it.
        clock.advance(2 * 86_400)
        through.server_port = 1
        through.cut()
        assert count_asked(THRESHOLD) == THRESHOLD
        with RedisStore(through.url, host=host) as other:
            assert other.status().state == "open"


@pytest.mark.parametrize("on_full", ["evict", None])
def test_one_process_of_a_full_host_probes(clock: ManualClock, on_full: Literal["evict"] | None) -> None:
    """Two breakers stand for two processes: they share no more than the host's store."""
    with Store.private(keys=100, on_full=on_full, clock=clock) as host, contextlib.ExitStack() as stack:
        others = TokenBucket(host, "others", "2/second")
        one, other = (Breaker(host, "shop:6379", PATIENT_S) for _ in range(2))
        stack.callback(one.close)
        stack.callback(other.close)

        def fill() -> None:
            for key in range(3000):
                others.allow(key)

        fill()
        for _ in range(THRESHOLD):
            one.failed(redis.ConnectionError())
        for asking in (one, other, one):
            clock.advance(3 * PATIENT_S)
            fill()
            passage = asking.passage()
            for late in (one, other):
                with pytest.raises(StoreUnavailable, match="asked again"):
                    late.passage()
        with passage:
            pass
        fill()
        assert [breaker.status().state for breaker in (one, other)] == ["recovering"] * 2
        clock.advance(3600)
        assert [breaker.status().state for breaker in (one, other)] == ["closed"] * 2


def test_hosts_do_not_probe_together(clock: ManualClock) -> None:
    hosts = [Store.private(keys=100, clock=clock) for _ in range(40)]
    breakers = [Breaker(host, "shop:6379", SHORT_S) for host in hosts]

    def count_probes() -> int:
        count = 0
        for breaker in breakers:
            with contextlib.suppress(StoreUnavailable):
                breaker.passage()
                count += 1
        return count

    for breaker in breakers:
        for _ in range(THRESHOLD):
            breaker.failed(redis.ConnectionError())
    assert count_probes() == 0
    clock.advance(1)
    assert 0 < count_probes() < 40
    for store in (*breakers, *hosts):
        store.close()


def test_a_probe_ends_before_the_next_one(clock: ManualClock, host: Store) -> None:
    breaker = Breaker(host, "shop:6379", PATIENT_S)
    for _ in range(THRESHOLD):
        breaker.failed(redis.ConnectionError())
    clock.advance(PATIENT_S)
    with pytest.raises(StoreUnavailable):
        breaker.passage()
    clock.advance(2 * PATIENT_S)
    breaker.passage()
    breaker.close()


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_recovering_server_gets_few_calls_at_once(
    crew: Crew, through: Proxy, clock: ManualClock, host: Store, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of several processes that all want to connect at the moment at which the server is back. Without the
    gate, so the test sees, they would all come."""
    processes, threads = 3, 8
    if not is_gated:
        monkeypatch.setattr("forebay.redis.transport.breaker.AT_ONCE", 1000)
    with RedisStore(through.url, timeout=PATIENT_S, host=host) as store:
        through.is_silent = True
        with RedisStore(through.url, timeout=SHORT_S, host=host) as hasty:
            for _ in range(THRESHOLD):
                with contextlib.suppress(StoreUnavailable):
                    TokenBucket(hasty, "api", "8/hour").allow("ada")
        through.is_silent = False
        through.cut()
        clock.advance(5 * PATIENT_S)
        bucket = TokenBucket(store, "api", "1000000/hour")
        assert bucket.allow("ada")
        assert store.status().state == "recovering"
        # Each call stays until all have come, also on a slow machine: connections outlast the scheduler's turns there.
        through.delay_s = 1.5
        meeting, answered = Meeting(processes), SharedNumbers(processes)

        def work(number: int) -> None:
            counts = [0] * threads
            together = threading.Barrier(threads)

            def ask(i: int) -> None:
                together.wait()
                with contextlib.suppress(StoreUnavailable):
                    counts[i] = bucket.allow("ada")

            meeting.wait(number)
            asking = [threading.Thread(target=ask, args=(i,)) for i in range(threads)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            answered[number] = sum(counts)

        crew.run(processes, work)
        through.delay_s = 0
        if is_gated:
            assert 1 <= sum(answered) <= processes * threads
            assert through.most_connections <= AT_ONCE + 1
        else:
            assert through.most_connections > AT_ONCE + 1
        # A second later, all calls come.
        clock.advance(1)
        assert bucket.allow("ada")
        assert store.status().state == "closed"


def test_failures_during_the_recovery_reopen_the_breaker(through: Proxy, clock: ManualClock, host: Store) -> None:
    with RedisStore(through.url, timeout=SHORT_S, host=host) as store:
        bucket = TokenBucket(store, "api", "8/hour")
        through.is_silent = True
        for _ in range(THRESHOLD):
            with contextlib.suppress(StoreUnavailable):
                bucket.allow("ada")
        through.is_silent = False
        through.cut()

        def recovers() -> bool:
            clock.advance(PROBE_S)
            with contextlib.suppress(StoreUnavailable):
                bucket.peek("ada")
            return store.status().state == "recovering"

        wait_until(recovers, "recovery")
        through.is_silent = True
        through.cut()
        for _ in range(THRESHOLD):
            with pytest.raises(StoreUnavailable):
                bucket.peek("ada")
        assert store.status().state == "open"
        with pytest.raises(StoreUnavailable, match="asked again"):
            bucket.peek("ada")


def test_without_a_host_store_each_process_has_a_breaker(through: Proxy) -> None:
    through.is_silent = True
    with RedisStore(through.url, timeout=SHORT_S) as first, RedisStore(through.url, timeout=SHORT_S) as second:
        for _ in range(THRESHOLD):
            with pytest.raises(StoreUnavailable):
                TokenBucket(first, "api", "8/hour").allow("ada")
        assert first.status().state == "open"
        assert first.status().failing_for_s > 0
        assert second.status().state == "closed"
    with pytest.raises(StoreClosed):
        first.status()


# ---- Deadlines -------------------------------------------------------------------------------------------------------


def test_a_reply_that_drips_is_late(make: Callable[..., Any], through: Proxy) -> None:
    """No byte is late. Without a deadline for the whole reply, it would arrive."""
    patient = make(through.url)
    bucket = TokenBucket(patient, "api", "8/hour")
    assert bucket.allow("ada")
    through.drip_s = 0.01
    assert bucket.allow("ada")
    through.drip_s = None
    hasty = make(through.url, timeout=0.5)
    bucket = TokenBucket(hasty, "api", "8/hour")
    wait_until(lambda: answers(hasty, bucket), "an answer in time")
    through.drip_s = 0.1
    with pytest.raises(StoreUnavailable, match=r"[Tt]ime|not done within"):
        bucket.hit("ada")


def answers(store: Any, limiter: Any) -> bool:
    with contextlib.suppress(StoreUnavailable):
        limiter.peek("ada")
        return True
    return False


def test_a_slow_handshake_is_late(make: Callable[..., Any], through: Proxy, client: redis.Redis) -> None:
    """No single step is late, nor is any byte. The call ends before the last step: it sends no script."""
    # The replies to the three steps have 15 bytes, whether they arrive apart or as one.
    through.drip_s = 0.03
    hasty = make(through.url.replace("/0", "/1"), timeout=0.35)
    client.config_resetstat()
    with pytest.raises(StoreUnavailable, match=r"[Tt]ime|not done within"):
        TokenBucket(hasty, "api", "8/hour").allow("ada")
    # By then the server has read all that was sent.
    wait_until(lambda: through.open_count == 0, "the end of the connection")
    assert "cmdstat_evalsha" not in client.info("commandstats")
    through.drip_s = None
    patient = make(through.url.replace("/0", "/1"))
    assert TokenBucket(patient, "api", "8/hour").allow("ada")
    assert "cmdstat_evalsha" in client.info("commandstats")


def test_connecting_and_the_reply_have_one_deadline(redis_store: RedisStore, through: Proxy) -> None:
    """Two steps of the handshake, and the reply: each of the three is in time, and so are the first two together."""
    assert TokenBucket(redis_store, "api", "8/hour").allow("ada")
    through.delay_s = 0.4
    with RedisStore(through.url, timeout=1.0) as hasty:
        with pytest.raises(StoreUnavailable, match=r"[Tt]ime|not done within"):
            TokenBucket(hasty, "api", "8/hour").allow("ada")
        assert hasty.status().failures == 1


def test_a_script_that_is_sent_again_has_the_same_deadline(
    make: Callable[..., Any], through: Proxy, client: redis.Redis
) -> None:
    hasty = make(through.url, timeout=1.0)
    bucket = TokenBucket(hasty, "api", "8/hour")
    wait_until(lambda: answers(hasty, bucket), "an answer in time")
    client.script_flush()
    through.delay_s = 0.6
    with pytest.raises(StoreUnavailable, match=r"[Tt]ime|not done within|no answer"):
        bucket.allow("ada")


def test_a_slow_reply_does_not_end_a_row_of_failures(host: Store) -> None:
    breaker = Breaker(host, "slow:6379", timeout_s=1.0)
    for _ in range(THRESHOLD - 1):
        breaker.failed(redis.ConnectionError())
    breaker.answered(0.6)
    assert breaker.status().failures == THRESHOLD - 1
    breaker.answered(0.1)
    assert breaker.status().failures == 0
    for _ in range(THRESHOLD):
        breaker.failed(redis.ConnectionError())
        breaker.answered(0.6)
    assert breaker.status().state == "recovering", "a probe is answered, however late: or it would be open for ever"
    breaker.close()


# ---- What the policies answer ----------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any], Any]] = {
    "token bucket": lambda store: TokenBucket(store, "a limit", "8/hour", burst=8),
    "token bucket in intervals": lambda store: TokenBucket(store, "a limit", "8/hour", refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "a limit", "8/hour", capacity=8),
    "fixed window": lambda store: FixedWindow(store, "a limit", "8/hour"),
    "fixed window from the first": lambda store: FixedWindow(store, "a limit", "8/hour", align="first"),
    "fixed window staggered": lambda store: FixedWindow(store, "a limit", "8/hour", align="stagger"),
    "sliding window": lambda store: SlidingWindow(store, "a limit", "8/hour"),
    "bucketed window": lambda store: BucketedWindow(store, "a limit", "8/hour", buckets=6),
    "sliding log": lambda store: SlidingLog(store, "a limit", "8/hour", keys=10),
    "concurrency": lambda store: Concurrency(store, "a limit", 8, lease="1 hour"),
}


@pytest.fixture
def gone() -> str:
    """The URL of a server that does not exist."""
    with redis_server() as server:
        return server.url


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_falls_back_on_the_hosts_share(make: Callable[..., Any], gone: str, host: Store, kind: str) -> None:
    local = make(gone, host=host, when_unavailable="local", hosts=4)
    limiter = KINDS[kind](local)
    assert [limiter.allow("ada") for _ in range(3)] == [True, True, False]
    assert [limiter.hit("bob").remaining for _ in range(3)] == [1, 0, 0]
    assert limiter.allow_many(["cid"] * 3) == [True, True, False]
    assert limiter.allow_many(["dan"] * 2, [2, 1]) == [True, False]
    peeked = limiter.peek("eve")
    assert (peeked.allowed, peeked.degraded, peeked.limit, peeked.remaining) == (True, True, 2, 2)
    assert limiter.wait("eve", 2)
    reservation = limiter.reserve("fay", 2, 0)
    assert reservation.allowed
    assert not limiter.hit("fay").allowed
    reservation.cancel()
    assert limiter.hit("fay").allowed
    limiter.refund("ada", 2)
    assert limiter.hit("ada", 2).allowed
    # A cost that the limit would allow, and the share never will, is not decided.
    with pytest.raises(StoreUnavailable, match="share"):
        limiter.hit("ada", 3)
    with pytest.raises(CostExceedsLimit):
        limiter.hit("ada", 9)
    with pytest.raises(StoreUnavailable):
        limiter.reset("ada")


@pytest.mark.parametrize("rounding", ["up", "down", None])
def test_the_hosts_share_of_a_sliding_window_rounds_as_the_whole_does(
    make: Callable[..., Any], gone: str, host: Store, rounding: Any
) -> None:
    local = make(gone, host=host, when_unavailable="local", hosts=4)
    limiter: Any = SlidingWindow(local, "a limit", "8/hour", rounding=rounding)
    assert limiter.commands.fallback.native.rate.limit == 2
    assert limiter.commands.fallback.native.rounding == limiter.rounding == (rounding or "down")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_falls_back_on_allowing(make: Callable[..., Any], gone: str, kind: str) -> None:
    allow = make(gone, when_unavailable="allow")
    limiter = KINDS[kind](allow)
    for _ in range(10):
        assert limiter.allow("ada")
        decision = limiter.hit("ada", 3)
        assert (decision.allowed, decision.degraded, decision.limit, decision.remaining) == (True, True, 8, 8)
        assert (decision.retry_after, decision.reset_after) == (0, 0)
        reservation = limiter.reserve("ada")
        assert (reservation.allowed, reservation.delay) == (True, 0)
        reservation.cancel()
        limiter.refund("ada")
        assert limiter.wait("ada")
    assert limiter.allow_many(["ada"] * 20) == [True] * 20
    with pytest.raises(StoreUnavailable):
        limiter.reset("ada")
    # No policy can decide a reset. Permits that are held are given back without a word to Redis.
    assert allow.status().decided_by_policy == (60 if kind == "concurrency" else 70)


def test_the_hosts_share_divides_limits(gone: str, host: Store) -> None:
    """Rates and bursts are divided and rounded down, never below 1; gaps are multiplied."""
    with RedisStore(gone, host=host, when_unavailable="local", hosts=3) as store:
        tiers = TokenBucket(store, "tiers", "10/minute", burst=20)
        assert tiers.hit("ada").limit == 6
        assert tiers.hit("bob", rate="100/minute", burst=5).limit == 1
        # A third of 60 a minute is one every three seconds.
        first, second = (tiers.reserve("cid", rate="60/minute", burst=5).delay for _ in range(2))
        assert first == 0 < second <= 3
        assert TokenBucket(store, "rare", "1/minute", burst=1).hit("ada").limit == 1
        assert MinInterval(store, "gap", "2s").hit("ada").reset_after == 6
        assert LeakyBucket(store, "queue", "9/minute", capacity=4).hit("ada").reset_after == 20
        with pytest.raises(InvalidLimiter, match="keys=1000"):
            SlidingLog(store, "log", "10/minute", keys=None)  # type: ignore[call-overload]
        windows = FixedWindow(store, "n" * 90, "10/minute")
        assert windows.hit("ada", rate="4/minute").limit == 1
        assert windows.hit("bob", request_id="r").remaining == 2
        assert windows.hit("bob", request_id="r").remaining == 2


@pytest.mark.parametrize("policy", [{"when_unavailable": "allow"}, {"when_unavailable": "local", "hosts": 2}])
def test_fallback_decides_for_held_permits_by_request_id(gone: str, host: Store, policy: Any) -> None:
    local = policy["when_unavailable"] == "local"
    given = {"host": host} if local else {}
    with RedisStore(gone, **policy, **given) as store:
        held: Any = Concurrency(store, "held", 6, lease="1 hour")
        for _ in range(3):
            assert held.hit("ada", 2, request_id="r").remaining == (1 if local else 6)
        lease = held.acquire("ada", 2, request_id="r")
        assert lease
        assert lease.renew()
        assert held.peek("ada").remaining == (1 if local else 6)
        held.refund("ada", 2, request_id="r")
        assert lease.release() is False
        assert held.peek("ada").remaining == (3 if local else 6)


def test_several_limits_fall_back_together(make: Callable[..., Any], gone: str, host: Store) -> None:
    def all_of(store: Any) -> Any:
        return AllOf(
            TokenBucket(store, "rate", "40/hour"),
            Concurrency(store, "held", 12, lease="1 hour"),
            FixedWindow(store, "window", "20/hour"),
        )

    local = make(gone, host=host, when_unavailable="local", hosts=4)
    several = all_of(local)
    assert [several.allow("ada") for _ in range(4)] == [True] * 3 + [False]
    denial = several.hit("ada")
    assert (denial.allowed, denial.degraded, denial.limiter) == (False, True, "held")
    assert [decision.limiter for decision in several.hit_each("bob")] == ["rate", "held", "window"]
    assert several.peek("bob").remaining == 2
    several.refund("ada")
    reservation = several.reserve("ada")
    assert reservation.allowed
    assert not several.allow("ada")
    reservation.cancel()
    assert several.allow_many(["ada"] * 2) == [True, False]
    assert several.hit(["x", "y", "z"], [1, 2, 3]).allowed

    allow = make(gone, when_unavailable="allow")
    several = all_of(allow)
    assert all(several.allow("ada") for _ in range(50))
    assert several.hit("ada").limit == 12
    assert [decision.degraded for decision in several.hit_each("ada")] == [True] * 3
    assert several.reserve("ada").allowed
    # 50, and one each by hit, hit_each and reserve, of which Redis knows nothing.
    held = several.limiters[1]
    assert held.commands.fallback.give_back_unleased("ada", 100) == 53
    several.refund("ada")
    assert several.wait("ada")


def test_permits_of_a_fallback_are_not_given_back_to_redis(
    make: Callable[..., Any], through: Proxy, client: redis.Redis, host: Store, clock: ManualClock
) -> None:
    """Permits held in Redis stay so, whatever happens to permits that a fallback has given out."""
    for policy in ("allow", "local"):
        hosts = {"hosts": 1} if policy == "local" else {}
        store = make(through.url, host=host, when_unavailable=policy, namespace=policy, **hosts)
        held = Concurrency(store, "held", 8, lease="1 hour")
        assert held.acquire("ada")
        assert held.allow("ada")
        # Away, in a way that fails at once.
        port, through.server_port = through.server_port, 1
        through.cut()
        leases = [held.acquire("ada") for _ in range(3)]
        assert all(leases)
        assert held.wait("ada")
        assert held.allow("ada")
        assert leases[0].renew()
        leases[0].release()

        with held.hold("ada"):
            pass
        through.server_port = port
        clock.advance(5 * PATIENT_S)
        assert held.peek("ada").remaining == 6
        leases[1].release()
        with contextlib.suppress(RuntimeError):
            leases[2].release()
        assert not leases[2].release()
        # These two were given out by the policy.
        held.refund("ada", 2)
        assert held.peek("ada").remaining == 6
        # And this one by Redis.
        held.refund("ada")
        assert held.peek("ada").remaining == 7
        clock.advance(5 * PATIENT_S)
        held.peek("ada")


def test_permits_of_a_fallback_end_with_their_lease_and_belong_to_their_process(crew: Crew) -> None:
    ended = UnleasedCounts(0)
    ended.add("ada", 2)
    assert ended.take("ada", 2) == 0
    held = UnleasedCounts(3600)
    held.add("ada", 2)
    assert crew.start(held.take, "ada", 2).result() == 0
    assert held.take("ada", 2) == 2


def test_a_cancelled_reservation_leaves_nothing_behind(make: Callable[..., Any], gone: str, host: Store) -> None:
    local = make(gone, host=host, when_unavailable="local", hosts=1)
    held = Concurrency(local, "held", 8, lease="1 hour")
    several = AllOf(held, TokenBucket(local, "rate", "8/hour"))
    for limiter in (held, several):
        reservation = limiter.reserve("ada", 2)
        assert reservation.allowed
        reservation.cancel()
    # The next permits to be given back were taken from Redis.
    assert held.commands.fallback.give_back_unleased("ada", 8) == 0  # type: ignore[attr-defined]


def test_a_signal_handler_may_call_while_permits_are_counted(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisStore(gone, when_unavailable="allow") as allow:
        held = Concurrency(allow, "held", 8, lease="1 hour")
        loose = held.commands.fallback.unleased[0]  # type: ignore[attr-defined]

        class Interrupted(dict[Any, Any]):
            def get(self, *arguments: Any) -> Any:
                loose.own.given = {}
                # As a handler would that comes just here, in the same thread.
                assert held.allow("ada")
                return super().get(*arguments)

        loose.own.given = Interrupted()
        assert held.allow("ada")
        assert loose.take("ada", 8) >= 1


def test_a_batch_that_is_cut_off_falls_back_for_the_rest(make: Callable[..., Any], through: Proxy, host: Store) -> None:
    """Redis's replies count; the fallback decides the rest."""
    allow = make(through.url, host=host, when_unavailable="allow")
    window = FixedWindow(allow, "few", "10/hour", align="first")
    assert window.allow_many(["ada"] * 11) == [True] * 10 + [False]
    through.server_port = 1
    through.cut()
    assert window.allow_many(["ada"] * 1200) == [True] * 1200
    assert allow.status().failures == 1


def test_invalid_fallbacks_are_refused(gone: str, host: Store) -> None:
    for wrong in (
        {"when_unavailable": "ignore"},
        {"when_unavailable": None},
        {"when_unavailable": "local"},
        {"when_unavailable": "local", "host": host},
        {"when_unavailable": "local", "hosts": 4},
        {"when_unavailable": "local", "host": host, "hosts": 0},
        {"when_unavailable": "local", "host": host, "hosts": 2.5},
        {"hosts": 4, "host": host},
        {"host": "shop"},
    ):
        for kind in (RedisStore, AsyncRedisStore):
            with pytest.raises((TypeError, ValueError), match=r"host|when_unavailable"):
                kind(gone, **wrong)


def test_a_closed_host_store_is_an_error(server: RedisServer) -> None:
    with Store.private(keys=1000) as host, RedisStore(server.url, timeout=PATIENT_S, host=host) as store:
        bucket = TokenBucket(store, "api", "8/hour")
        assert bucket.allow("ada")
        host.close()
        with pytest.raises(StoreClosed):
            bucket.allow("ada")
    with Store.private(keys=1000) as host:
        with RedisStore(server.url, timeout=PATIENT_S, host=host) as store:
            assert store.status().state == "closed"
        with pytest.raises(StoreClosed):
            store.status()


def test_closed_stores_leave_nothing_behind(gone: str) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    RedisStore(gone).close()
    before = descriptors()
    for _ in range(10):
        with RedisStore(gone) as store, pytest.raises(StoreUnavailable):
            TokenBucket(store, "api", "8/hour").allow("ada")
    assert descriptors() == before
    assert not os.path.exists(path_of("private"))
