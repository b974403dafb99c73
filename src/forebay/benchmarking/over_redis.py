"""Subjects over a Redis server: the modes in which hosts share a limit."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from forebay.benchmarking.limiters import GENEROUS
from forebay.benchmarking.subjects import LEASED, REDIS, STRICT, SYNCED, Subject, loop
from forebay.benchmarking.timing import statement
from forebay.core.kinds import TokenBucket
from forebay.extras import Needs
from forebay.store import Store

with Needs("redis", __name__):
    import redis

from forebay.redis import LeasedStore, RedisStore, SyncedStore

__all__ = ["of_redis"]

KEY: Final = "user:42:abcdefg"
BATCH: Final = 500
MOST_TO_SETTLE: Final = 2_000_000
SYNCED_KEYS: Final = 1000
SECONDS: Final = 5


def of_redis(stack: ExitStack, url: str) -> tuple[list[Subject], str]:
    """Strict, leased and synced decisions, and the server's version.

    All keys have names of this run alone. They are removed when `stack` ends. Raises ``ValueError`` for a URL that is
    none, and ``OSError`` or ``StoreUnavailable`` if the server doesn't answer.
    """
    if "+cluster" in url.partition("://")[0]:
        raise ValueError("bench measures one Redis server, not a cluster: give the URL of one, redis://...")
    namespace = f"forebay-bench-{secrets.token_hex(8)}"
    server = RedisStore(url, namespace=namespace, timeout=f"{SECONDS} s")
    client = stack.enter_context(redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS))
    try:
        info = client.info("server")
    except redis.RedisError as error:
        raise OSError(f"no Redis that answers at the URL of --redis: {error}") from error
    stack.enter_context(_removing(client, namespace))
    stack.enter_context(server)
    host = stack.enter_context(Store.private(keys=100_000))
    leased = stack.enter_context(LeasedStore(server, host))
    synced = stack.enter_context(SyncedStore(server, host, keys=SYNCED_KEYS))
    strict_bucket = TokenBucket(server, "strict", **GENEROUS)
    leased_bucket = TokenBucket(leased, "leased", **GENEROUS)
    synced_bucket = TokenBucket(synced, "synced", **GENEROUS)
    for bucket in (strict_bucket, leased_bucket, synced_bucket):
        if not bucket.allow(KEY):
            raise ValueError(f"a limit that has never been used denied a request: is {namespace} used by another?")
    # Until the host knows how much to lease.
    for _ in range(min(2 * leased_bucket.terms.most_on_loan, MOST_TO_SETTLE)):
        leased_bucket.allow(KEY)
    batch = [f"user:{number}:abcdefg" for number in range(BATCH)]

    def fault() -> str:
        status = server.status()
        return f"Redis did not answer meanwhile: {status}" if status.decided_by_policy else synced.status().error or ""

    version = f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info['redis_version']}"
    over = functools.partial(loop, REDIS)
    return [
        over("PING by redis-py", statement("f()", f=client.ping)),
        over(STRICT, statement("f(k)", f=strict_bucket.allow, k=KEY), fault=fault),
        over(
            f"RedisStore: allow_many, {BATCH} keys, per key",
            statement("f(ks)", f=strict_bucket.allow_many, ks=batch),
            operations=BATCH,
            fault=fault,
        ),
        over(LEASED, statement("f(k)", f=leased_bucket.allow, k=KEY), fault=fault),
        over(SYNCED, statement("f(k)", f=synced_bucket.allow, k=KEY), fault=fault),
    ], version


@contextmanager
def _removing(client: redis.Redis, namespace: str) -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        raise OSError(f"Redis did not answer as bench needs it: {error}") from error
    finally:
        try:
            for name in client.scan_iter(match=f"{namespace}:*", count=10_000):
                client.unlink(name)
        except redis.RedisError as error:
            raise OSError(f"the keys {namespace}:* could not be removed from Redis, and expire: {error}") from error
