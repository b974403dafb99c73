"""Replies of Redis that come when a test wants them, and tasks that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


class Late:
    """Holds back the replies to a store until the test releases them."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way, self.may_come = asyncio.Event(), asyncio.Event()
        for owner, name in ((store.executor, "execute_command"), (store.executor.client, "execute_many")):
            monkeypatch.setattr(owner, name, self.late(getattr(owner, name)))

    def late(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def execute(*call: Any) -> Any:
            answer = await send(*call)
            self.under_way.set()
            await self.may_come.wait()
            return answer

        return execute


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
