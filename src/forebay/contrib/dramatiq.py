"""dramatiq with limits: a decorator that puts a denied message back to its queue until its turn.

``@limited(limiter, key=...)`` above ``@dramatiq.actor``, with the middleware ``CurrentMessage``. For the guarantees see
docs/queues.md. Needs ``forebay[dramatiq]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack

from forebay.extras import Needs

with Needs("dramatiq", __name__):
    import dramatiq
    from dramatiq.middleware import CurrentMessage, Retries

from forebay.contrib.tasks import NEVER, Blocking, Options, TaskLimit
from forebay.errors import InvalidLimiter, short_repr

if TYPE_CHECKING:
    from forebay.core.table.keys import Key

__all__ = ["limited"]

P = ParamSpec("P")
T = TypeVar("T")

USAGE: Final = "@limited decorates an actor, above @dramatiq.actor"


class PutBack(dramatiq.Retry):
    """The message goes back to its queue: it has no permit yet."""


def limited(
    limiter: Blocking, *, key: Key | list[Key] | Callable[..., Key | list[Key]], **options: Unpack[Options]
) -> Callable[[dramatiq.Actor[P, T]], dramatiq.Actor[P, T]]:
    """A decorator for an actor: each run of it takes a permit, and holds it if it is of a ``Concurrency``.

    `key` is one key for all calls, or a function that takes the actor's arguments. Options: see
    ``forebay.contrib.tasks.Options``. A denied message goes back to its queue with a delay, and doesn't use up its
    ``max_retries``. Where no worker runs it (a direct call), a denial raises ``LimitExceeded``. A call that can never
    be allowed fails with ``CostExceedsLimit``, and isn't retried.

    The actor's broker needs the middleware ``CurrentMessage`` and ``Retries``. Raises ``InvalidLimiter`` without them,
    for a limiter that has to be awaited, a private store, and a function for `key` or `cost` that doesn't take the
    actor's arguments. *Threads*, *fork*: safe.

    A run takes one decision, and a denial one more, for the turn.
    """

    def decorate(actor: dramatiq.Actor[P, T]) -> dramatiq.Actor[P, T]:
        if not isinstance(actor, dramatiq.Actor):
            raise InvalidLimiter(f"{USAGE}: {short_repr(actor)} is no actor")
        _keep_from_failing(actor)
        function = actor.fn
        limit = TaskLimit(function, limiter, key, options, in_loop=False)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            message = CurrentMessage.get_current_message()
            if message is not None and message.actor_name != actor.actor_name:
                # The code of another actor calls this one.
                message = None
            try:
                admission = limit.ask(args, kwargs, None if message is None else message.message_id)
            except NEVER as error:
                if message is not None:
                    message.options["throws"] = type(error)
                raise
            if admission.later_s is not None and message is not None:
                # The middleware counts this one, too.
                message.options["retries"] = message.options.get("retries", 0) - 1
                raise PutBack(f"no permit of {limiter.name!r}", delay=math.ceil(admission.later_s * 1000))
            with limit.held(admission):
                return function(*args, **kwargs)

        actor.fn = run
        return actor

    return decorate


def _keep_from_failing(actor: dramatiq.Actor[Any, Any]) -> None:
    """Make sure that `PutBack` returns the message, whatever else the actor's options say of errors."""
    broker = actor.broker
    for needed in (CurrentMessage, Retries):
        if not any(isinstance(one, needed) for one in broker.middleware):
            raise InvalidLimiter(
                f"a limited actor needs the middleware {needed.__name__}: call "
                f"broker.add_middleware({needed.__name__}()) before {actor.actor_name!r} is declared"
            )
    throws = actor.options.get("throws", ())
    if issubclass(PutBack, throws):
        raise InvalidLimiter(
            f"throws={throws!r} of {actor.actor_name!r} would fail each message that has no permit yet: name narrower "
            "exceptions"
        )
    retries = next(one for one in broker.middleware if isinstance(one, Retries))
    retry_when = actor.options.get("retry_when", retries.retry_when)
    if retry_when is not None:
        actor.options["retry_when"] = lambda count, error: isinstance(error, PutBack) or retry_when(count, error)
