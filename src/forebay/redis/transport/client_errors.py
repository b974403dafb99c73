"""Errors at the boundary of redis-py: an outage leaves it as a ``RedisError``, every other exception as it was raised.

A server that breaks the protocol makes redis-py fail with almost any exception of Python: a handshake that is answered
with a text is an ``AttributeError``. Each is an outage, as every other reply that can't be read.

A signal handler runs in the middle of a call, and its exception is the application's: a time limit that ends a task,
for example. redis-py takes an ``OSError`` of such a handler for a network's, so this module looks for the handler.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from types import FrameType
from typing import Final

from redis.exceptions import ClusterError, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["raise_as_redis_error"]

PACKAGES: Final = frozenset({*sys.stdlib_module_names, "redis", "hiredis"})


def raise_as_redis_error(error: Exception) -> None:
    """Raise a ``RedisError`` in the place of another error of redis-py. Returns if `error` is to be raised as it is.

    Those are redis-py's own errors; every error while the interpreter ends; a ``RecursionError``, which the depth of
    the application's calls causes; and exceptions of other packages, which a signal handler or a credential provider
    raises. An exception of a signal handler is raised in place of an error that redis-py made from it.
    """
    if sys.is_finalizing():
        return
    applications = of_application(error)
    if applications is error:
        return
    if applications is not None:
        raise applications
    kind = type(error)
    if isinstance(error, RedisClusterException):
        raise ClusterError(f"{kind.__name__}: {error}") from error
    if isinstance(error, RedisError):
        return
    if isinstance(error, TimeoutError):
        raise RedisTimeoutError(*error.args) from error
    if kind.__module__.partition(".")[0] in PACKAGES:
        raise RedisConnectionError(f"redis-py failed at the server's answer with {kind.__name__}: {error}") from error


def of_application(error: BaseException) -> BaseException | None:
    """`error`, or the exception that redis-py was handling when it raised `error`, if that is the application's."""
    callers = {frame for frame, _ in traceback.walk_stack(inspect.currentframe())}
    found: BaseException | None = error
    while found is not None:
        frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
        if found is not error and (not frames or frames[0] in callers):
            # A caller handles it: it is older than the call.
            return None
        if isinstance(found, RecursionError) or any(map(is_signal_handler, frames)):
            return found
        found = found.__context__
    return None


def is_signal_handler(frame: FrameType) -> bool:
    """Whether a frame is a signal handler's: only such a function has the frame that it interrupts as an argument."""
    interrupted = frame.f_back
    if interrupted is None:
        return False
    # By identity: the objects of an application may not be comparable.
    for value in frame.f_locals.values():
        if value is interrupted or (type(value) is tuple and any(one is interrupted for one in value)):
            return True
    return False
