"""arq with limits: a decorator that puts a denied job back to its queue until its turn.

``@limited(limiter, key=...)`` above the job's coroutine. For the guarantees see docs/queues.md. Needs ``forebay[arq]``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, Unpack

from forebay.extras import Needs

with Needs("arq", __name__):
    from arq import Retry
    from arq.constants import retry_key_prefix

from forebay.contrib.tasks import ForEventLoop, Options, TaskLimit, checked_function
from forebay.errors import InvalidLimiter

if TYPE_CHECKING:
    from forebay.core.table.keys import Key

__all__ = ["limited"]

P = ParamSpec("P")
T = TypeVar("T")

USAGE: Final = "@limited decorates the coroutine function of a job"


def limited(
    limiter: ForEventLoop,
    *,
    key: Key | list[Key] | Callable[..., Key | list[Key]],
    **options: Unpack[Options],
) -> Callable[
    [Callable[Concatenate[dict[Any, Any], P], Awaitable[T]]], Callable[Concatenate[dict[Any, Any], P], Awaitable[T]]
]:
    """A decorator for the coroutine of a job: each run of it takes a permit, and holds it if it is of a
    ``Concurrency``.

    `key` is one key for all calls, or a function that takes the job's arguments, the worker's context first. Options:
    see ``forebay.contrib.tasks.Options``. A denied job goes back to its queue, and doesn't use up its ``max_tries``.
    Where no worker runs it (a direct call, with a context without a job), a denial raises ``LimitExceeded``. A call
    that can never be allowed fails with ``CostExceedsLimit``.

    Raises ``InvalidLimiter`` for a function that isn't a coroutine function, a limiter over a ``RedisStore``, which
    would block the event loop, a private store, and a function for `key` or `cost` that doesn't take the job's
    arguments. *Tasks*: any number, in one event loop.

    A run takes one decision, and a denial one more, for the turn.
    """

    def decorate(
        function: Callable[Concatenate[dict[Any, Any], P], Awaitable[T]],
    ) -> Callable[Concatenate[dict[Any, Any], P], Awaitable[T]]:
        checked_function(function, USAGE)
        if not inspect.iscoroutinefunction(function):
            raise InvalidLimiter(f"{USAGE}: arq can't await {function!r}")
        limit = TaskLimit(function, limiter, key, options, in_loop=True)

        @functools.wraps(function)
        async def run(context: dict[Any, Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
            job_id = context.get("job_id")
            admission = await limit.ask_async((context, *args), kwargs, job_id)
            if admission.later_s is not None:
                # The number of tries, which arq counts up when the job returns.
                await context["redis"].decr(f"{retry_key_prefix}{job_id}")
                raise Retry(defer=admission.later_s)
            async with limit.held_async(admission):
                return await function(context, *args, **kwargs)

        return run

    return decorate
