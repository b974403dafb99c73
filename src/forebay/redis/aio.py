"""A store in Redis for asyncio: the same scripts, and the same answers, awaited."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import redis.asyncio
import redis.asyncio.cluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from forebay.rate import Duration
from forebay.redis.aio_held import AsyncRedisConcurrency
from forebay.redis.aio_limiters import (
    AsyncRedisAllOf,
    AsyncRedisLimiter,
    AsyncRedisStaggeredWindow,
)
from forebay.redis.awaiting import awaited
from forebay.redis.base import (
    RedisStoreBase,
    check_options,
    checked_client,
    checked_url,
    client_options,
)
from forebay.redis.executor import AsyncExecutor
from forebay.redis.transport.cluster import AsyncCluster, bounded, cluster_url
from forebay.redis.transport.deadline import with_bounded_replies
from forebay.redis.transport.servers import AsyncServer
from forebay.store import Store

__all__ = ["AsyncRedisStore"]

T = TypeVar("T")
# Of the event loop, until tasks that were cancelled have begun to give back: one for each that waits for another.
TURNS_TO_BEGIN: Final = 10


class AsyncRedisStore(RedisStoreBase):
    """Redis as the place where limiters keep their state, for asyncio: see ``RedisStore``, whose arguments it takes.

    ``await TokenBucket(AsyncRedisStore("redis://localhost"), "api", "100/minute").hit("user:42")``. `server` is a URL
    or a client of ``redis.asyncio``. Use it in one event loop, and close it there; in another it raises
    ``RuntimeError``.
    """

    is_awaited = True

    def __init__(
        self,
        server: str | redis.asyncio.Redis | redis.asyncio.cluster.RedisCluster,
        *,
        namespace: str = "forebay",
        plain_keys: bool = False,
        timeout: Duration | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys, when_unavailable, host, hosts)
        client: Any
        if isinstance(server, str):
            checked_url(server)
            options = {"retry": Retry(NoBackoff(), 0), **client_options(timeout)}
            if nodes_url := cluster_url(server):
                client = AsyncCluster(bounded(redis.asyncio.cluster.RedisCluster.from_url(nodes_url, **options)))
            else:
                own = redis.asyncio.Redis.from_url(server, **options)
                check_options(own.connection_pool)
                own.connection_pool.connection_class = with_bounded_replies(own.connection_pool.connection_class)
                client = AsyncServer(own)
        else:
            kinds = redis.asyncio.Redis, redis.asyncio.cluster.RedisCluster
            given = checked_client(server, kinds, "AsyncRedisStore", timeout)
            is_cluster = isinstance(given, redis.asyncio.cluster.RedisCluster)
            client = AsyncCluster(given) if is_cluster else AsyncServer(given)
        self.executor: AsyncExecutor = self._make_executor(AsyncExecutor, client, server, timeout, host)

    @awaited
    async def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more.

        Before that it waits, for a deadline or two, for permits to come back that cancelled tasks have taken; of what
        is asked meanwhile, it only lets permits be given back. So what other tasks hold comes back if they were
        cancelled just before; else let their blocks end first. It is closed also if it is cancelled.
        """
        await self.executor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    _limiter = AsyncRedisLimiter
    _all_of = AsyncRedisAllOf
    _staggered = AsyncRedisStaggeredWindow
    _concurrency = AsyncRedisConcurrency
