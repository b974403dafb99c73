"""Flows: bodies that are written once for callers that block and for callers that await.

A flow is a generator. It yields the result of each call that waits for a server: with asyncio, a coroutine of the
result. Its driver sends the result back.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar, cast

__all__ = ["Flow", "run", "run_async"]

T = TypeVar("T")
Flow = Generator[Any, Any, T]


def run(flow: Flow[T]) -> T:
    """Run a flow whose calls have blocked: what it yields is the result."""
    try:
        result = next(flow)
        while True:
            result = flow.send(result)
    except StopIteration as end:
        return cast(T, end.value)


async def run_async(flow: Flow[T]) -> T:
    """Run a flow whose calls have to be awaited. A cancellation is raised in the flow, as an error of a call is.

    So the flow gives back what it has taken. Each such call goes on by itself if the task is cancelled once more.
    """
    try:
        call = next(flow)
        while True:
            try:
                result = await call
            except BaseException as error:
                call = flow.throw(error)
            else:
                call = flow.send(result)
    except StopIteration as end:
        return cast(T, end.value)
