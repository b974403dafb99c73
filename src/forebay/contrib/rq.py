"""RQ with limits: a decorator that puts a denied job back to its queue until its turn.

``@limited(limiter, key=...)`` above the job's function. A scheduler returns the job: ``rq worker --with-scheduler``.
For the guarantees see docs/queues.md. Needs ``forebay[rq]``.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack

from forebay.extras import Needs

with Needs("rq", __name__):
    from rq import Retry, get_current_job

from forebay.contrib.tasks import NEVER, Blocking, Options, TaskLimit, checked_function
from forebay.errors import InvalidLimiter

if TYPE_CHECKING:
    from forebay.core.table.keys import Key

__all__ = ["limited"]

P = ParamSpec("P")
T = TypeVar("T")

USAGE: Final = "@limited decorates the function of a job"
SYNC: Final = "sync"
"""The worker's name of a job that ``Queue(is_async=False)`` runs in the caller's process."""


def limited(
    limiter: Blocking, *, key: Key | list[Key] | Callable[..., Key | list[Key]], **options: Unpack[Options]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for the function of a job: each run of it takes a permit, and holds it if it is of a
    ``Concurrency``.

    `key` is one key for all calls, or a function that takes the job's arguments. Options: see
    ``forebay.contrib.tasks.Options``. A denied job goes back to its queue, scheduled in whole seconds, and doesn't use
    up its retries. Where no worker runs it (a direct call, ``is_async=False``), a denial raises ``LimitExceeded``. A
    call that can never be allowed fails with ``CostExceedsLimit``, and isn't retried.

    Decorators above it use ``functools.wraps``, by which it recognizes its job.

    Raises ``InvalidLimiter`` for a coroutine function, a limiter that has to be awaited, a private store, and a
    function for `key` or `cost` that doesn't take the job's arguments. *Threads*, *fork*: safe.

    A run takes one decision, and a denial one more, for the turn.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        checked_function(function, USAGE)
        if inspect.iscoroutinefunction(function):
            raise InvalidLimiter(f"{USAGE}: {function!r} has to be awaited, so call asyncio.run in a plain function")
        limit = TaskLimit(function, limiter, key, options, in_loop=False)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            job = get_current_job()
            if job is not None and not _is_call_of(job, run):
                job = None
            is_queued = job is not None and job.worker_name != SYNC
            try:
                admission = limit.ask(args, kwargs, job.id if job is not None and is_queued else None)
            except NEVER:
                if job is not None:
                    job.retries_left = 0
                raise
            if admission.later_s is not None and job is not None:
                # RQ counts this one, too.
                job.number_of_retries = (job.number_of_retries or 0) - 1
                return Retry(max=sys.maxsize, interval=[_scheduled_in_s(admission.later_s)])  # type: ignore[list-item]
            with limit.held(admission):
                return function(*args, **kwargs)

        return run

    return decorate


def _is_call_of(job: Any, run: Any) -> bool:
    """Whether the worker calls `run` for this job, maybe by way of other decorators. Otherwise the job's code does."""
    function = job.func
    while getattr(function, "__func__", function) is not run:
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
    return True


def _scheduled_in_s(delay_s: float) -> float:
    """The time until the second at the end of `delay_s`: RQ cuts off the fraction of a scheduled time."""
    now_s = time.time()
    return math.ceil(now_s + delay_s) - now_s
