"""One test for both kinds of store: a result, or a coroutine of it that is awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.redis import AsyncRedisStore, RedisStore

Body = Callable[[Any], Coroutine[Any, Any, None]]
Opened = Callable[[Body], None]


async def done(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def with_store(body: Body, is_async: bool, make_server: Callable[[], Any], **options: Any) -> None:
    """Run `body` with a store. The server is a URL, or a client that is made where it is used, and closed there."""

    async def main() -> None:
        server = make_server()
        try:
            if is_async:
                async with AsyncRedisStore(server, **options) as store:
                    await body(store)
            else:
                with RedisStore(server, **options) as store:
                    await body(store)
        finally:
            if not isinstance(server, str):
                pool = getattr(server, "connection_pool", None)
                for client in (server, *getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())):
                    await done(getattr(client, "aclose", client.close)())

    asyncio.run(main())
