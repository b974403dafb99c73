"""Objects of asyncio behind blocking methods, so that one test covers a sync and an asyncio class."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from forebay.redis import AsyncRedisStore, RedisStore


class Blocking:
    """Wraps a store, a limiter, a reservation or a lease: each method runs the event loop until its result is there.

    Without a loop, each call has one of its own.
    """

    def __init__(self, wrapped: Any, loop: asyncio.AbstractEventLoop | None = None, store: Any = None) -> None:
        self.wrapped, self.loop = wrapped, loop
        self.store: Any = store or self
        """The store of a limiter."""

    @property
    def limiters(self) -> tuple[Blocking, ...]:
        """The limiters of an ``AllOf``."""
        return tuple(Blocking(limiter, self.loop, self.store) for limiter in self.wrapped.limiters)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.wrapped, name)
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self._finish(value(*args, **kwargs))
        return value

    def __bool__(self) -> bool:
        return bool(self.wrapped)

    def __enter__(self) -> Any:
        return self._finish(self.wrapped.__aenter__())

    def __exit__(self, *raised: Any) -> Any:
        return self._finish(self.wrapped.__aexit__(*raised))

    def __repr__(self) -> str:
        return repr(self.wrapped)

    def __reduce__(self) -> Any:
        return self.wrapped.__reduce__()

    def _finish(self, answer: Any) -> Any:
        if inspect.isawaitable(answer):
            run: Any = asyncio.run if self.loop is None else self.loop.run_until_complete
            answer = run(answer)
        needs_wrapping = hasattr(answer, "cancel") or hasattr(answer, "__aenter__")
        return Blocking(answer, self.loop, self.store) if needs_wrapping else answer

    def make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Blocking:
        """Called by the limiter classes, which get this wrapper as their store."""
        unwrapped = [one.wrapped if isinstance(one, Blocking) else one for one in args]
        named = {name: one.wrapped if isinstance(one, Blocking) else one for name, one in kwargs.items()}
        return Blocking(kind(*unwrapped, **named), self.loop, self.store)


@contextlib.contextmanager
def blocking_store(server: str | Callable[[], Any], is_async: bool, **options: Any) -> Iterator[Any]:
    """A ``RedisStore``, or an ``AsyncRedisStore`` behind `Blocking`.

    `server` is a URL, or makes a client, which is closed after the store.
    """
    kind: Any = AsyncRedisStore if is_async else RedisStore

    async def make() -> tuple[Any, Any]:
        client = server if isinstance(server, str) else server()
        return client, kind(client, **options)

    with asyncio.Runner() as runner:
        client, made = runner.run(make())
        store = Blocking(made, runner.get_loop()) if is_async else made
        try:
            yield store
        finally:
            store.close()
            if not isinstance(client, str):
                pool = getattr(client, "connection_pool", None)
                for one in (client, *getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())):
                    blocking = Blocking(one, runner.get_loop())
                    (blocking.aclose if is_async else blocking.close)()


def in_event_loop(url: str, work: Callable[[Any], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Run `work` in an event loop with an ``AsyncRedisStore``."""

    async def main() -> Any:
        async with AsyncRedisStore(url, **options) as store:
            return await work(store)

    return asyncio.run(main())
