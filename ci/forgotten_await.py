"""Calls of asyncio methods without await: mypy must report each. An unneeded ignore comment is an error."""

from forebay import Concurrency, Store, TokenBucket
from forebay.redis import AsyncRedisStore

store = AsyncRedisStore("redis://localhost")
api = TokenBucket(store, "api", "100/minute")
in_memory = TokenBucket(Store.private(keys=100), "api", "100/minute")


async def forgotten() -> int:
    if api.allow("key"):  # type: ignore[truthy-bool]
        return 1
    if not api.hit("key"):  # type: ignore[truthy-bool]
        return 2
    if Concurrency(store, "held", 3).acquire("key"):  # type: ignore[truthy-bool]
        return 3
    api.refund("key")  # type: ignore[unused-coroutine]
    if in_memory.wait_async("key"):  # type: ignore[truthy-bool]
        return 4
    return 5


async def awaited() -> bool:
    return await api.allow("key") or (await api.hit("key")).allowed
