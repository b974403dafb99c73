"""What redis-py raises, as errors that executors and the breaker know.

A server that breaks the protocol makes redis-py fail with almost any exception of Python: a handshake that is answered
with a text is an ``AttributeError``. Each is an outage, as every other reply that can't be read.
"""

from __future__ import annotations

import sys
from typing import Final

from redis.exceptions import ClusterError, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

__all__ = ["raise_as_redis_error"]

PACKAGES: Final = frozenset({*sys.stdlib_module_names, "redis", "hiredis"})


def raise_as_redis_error(error: Exception) -> None:
    """Raise a ``RedisError`` in the place of another error of redis-py. Returns if `error` is to be raised as it is.

    Those are redis-py's own errors; a ``TimeoutError``, which executors know; every error while the interpreter ends;
    and exceptions of other packages. Redis-py raises none of these: a signal handler did, to end the task.
    """
    if isinstance(error, (RedisError, TimeoutError)) or sys.is_finalizing():
        return
    kind = type(error)
    if isinstance(error, RedisClusterException):
        raise ClusterError(f"{kind.__name__}: {error}") from error
    if kind.__module__.partition(".")[0] in PACKAGES:
        raise RedisConnectionError(f"redis-py failed at the server's answer with {kind.__name__}: {error}") from error
