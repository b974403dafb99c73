"""Celery with limits: a decorator that puts a denied task back to its queue until its turn.

``@app.task`` above ``@limited(limiter, key=...)``. For the guarantees see docs/queues.md. Needs ``forebay[celery]``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack

from forebay.extras import Needs

with Needs("celery", __name__):
    from celery import current_task  # type: ignore[import-untyped]
    from celery.exceptions import Retry  # type: ignore[import-untyped]

from forebay.contrib.tasks import Blocking, Options, TaskLimit, checked_function
from forebay.errors import InvalidLimiter

if TYPE_CHECKING:
    from forebay.core.table.keys import Key

__all__ = ["limited"]

P = ParamSpec("P")
T = TypeVar("T")

USAGE: Final = "@limited decorates a function, beneath @app.task"


def limited(
    limiter: Blocking, *, key: Key | list[Key] | Callable[..., Key | list[Key]], **options: Unpack[Options]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for the function of a task: each run of it takes a permit, and holds it if it is of a
    ``Concurrency``.

    `key` is one key for all calls, or a function that takes the task's arguments, with ``bind=True`` the task first.
    Options: see ``forebay.contrib.tasks.Options``. A denied task goes back to its queue with a countdown, and doesn't
    use up its ``max_retries``. Where no worker runs it (a direct call, ``apply``, ``task_always_eager``), a denial
    raises ``LimitExceeded``. A call that can never be allowed fails with ``CostExceedsLimit``.

    Raises ``InvalidLimiter`` for a coroutine function, a limiter that has to be awaited, a private store, and a
    function for `key` or `cost` that doesn't take the task's arguments. *Threads*, *fork*: safe, in every pool.

    A run takes one decision, and a denial one more, for the turn.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        checked_function(function, USAGE)
        if inspect.iscoroutinefunction(function):
            raise InvalidLimiter(f"{USAGE}: Celery's workers don't await {function!r}")
        limit = TaskLimit(function, limiter, key, options, in_loop=False)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            request: Any = current_task.request if current_task else None
            is_queued = request is not None and not request.called_directly and not request.is_eager
            admission = limit.ask(args, kwargs, request.id if is_queued else None)
            if admission.later_s is not None:
                # As `Task.retry`, which would count a retry.
                again = current_task.signature_from_request(
                    request, countdown=admission.later_s, retries=request.retries
                )
                again.apply_async()
                raise Retry(f"no permit of {limiter.name!r}", when=admission.later_s, sig=again)
            with limit.held(admission):
                return function(*args, **kwargs)

        return run

    return decorate
