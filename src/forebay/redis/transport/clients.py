"""The redis-py clients of stores: makes a client from a URL, or checks the user's own client.

A client is refused if it could wait without a deadline or repeat a call.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.cluster
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from forebay.errors import InvalidRate, short_repr
from forebay.rate import Duration, as_period_ns
from forebay.redis.transport.cluster import AsyncCluster, Cluster, TimedPool, bounded, cluster_url
from forebay.redis.transport.deadline import keep_deadlines, with_bounded_replies
from forebay.redis.transport.servers import AsyncServer, Server

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "async_client_of",
    "client_of",
    "connection_that_listens",
    "server_identity_of",
    "server_of",
    "timeout_s_of",
]

DEFAULT_TIMEOUT_S: Final = 0.5
_SCHEMES: Final = {"redis", "rediss", "unix", "redis+cluster", "rediss+cluster"}
# Options of a URL that are refused: `timeout` sets the deadlines, and no call is repeated.
_OWN_OPTIONS: Final = {"socket_timeout", "socket_connect_timeout", "retry_on_timeout", "retry_on_error"}
_UNREADABLE: Final = (
    "the host and the port can't be read from the Redis URL: a port is a number, and in a user or password all but "
    "letters and digits is written as by urllib.parse.quote(password, safe='')"
)


def client_of(server: Any, timeout: Duration | None) -> Server | Cluster:
    """The client of a ``RedisStore``. Raises ``TypeError``, ``ValueError`` and ``InvalidRate``."""
    if not isinstance(server, str):
        given = checked_client(server, (redis.Redis, redis.cluster.RedisCluster), "RedisStore", timeout)
        return Cluster(lambda: given) if isinstance(given, redis.cluster.RedisCluster) else Server(given)
    checked_url(server)
    options = {"retry": Retry(NoBackoff(), 0), **client_options(timeout)}
    if nodes_url := cluster_url(server):
        check_options(redis.ConnectionPool.from_url(nodes_url))
        options["connection_pool_class"] = TimedPool
        return Cluster(functools.partial(redis.cluster.RedisCluster.from_url, nodes_url, **options))

    def make() -> redis.Redis:
        client = redis.Redis.from_url(server, **options)
        keep_deadlines(client.connection_pool, options["socket_timeout"])
        return client

    own = make()
    check_options(own.connection_pool)
    return Server(own, make)


def connection_that_listens(pool: Any) -> Any:
    """A connection of its own for messages, with a pool's options: it keeps no deadlines, and repeats nothing."""
    kind = next(base for base in pool.connection_class.__mro__ if base.__module__.startswith("redis."))
    options = {name: value for name, value in pool.connection_kwargs.items() if name != "retry"}
    if kind is not pool.connection_class:
        options.pop("redis_connect_func", None)
    return kind(**options | {"protocol": 2, "decode_responses": False, "retry": Retry(NoBackoff(), 0)})


def async_client_of(server: Any, timeout: Duration | None) -> AsyncServer | AsyncCluster:
    """The client of an ``AsyncRedisStore``, as ``client_of``."""
    if not isinstance(server, str):
        kinds = redis.asyncio.Redis, redis.asyncio.cluster.RedisCluster
        given = checked_client(server, kinds, "AsyncRedisStore", timeout)
        is_cluster = isinstance(given, redis.asyncio.cluster.RedisCluster)
        return AsyncCluster(given) if is_cluster else AsyncServer(given)
    checked_url(server)
    options = {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0), **client_options(timeout)}
    if nodes_url := cluster_url(server):
        check_options(redis.ConnectionPool.from_url(nodes_url))
        return AsyncCluster(bounded(redis.asyncio.cluster.RedisCluster.from_url(nodes_url, **options)))
    own = redis.asyncio.Redis.from_url(server, **options)
    check_options(own.connection_pool)
    own.connection_pool.connection_class = with_bounded_replies(own.connection_pool.connection_class)
    return AsyncServer(own)


def server_of(server: Any) -> str:
    """The name of a URL's or a client's server in the host's store, and in messages. Without user and password."""
    if isinstance(server, str):
        url = urlsplit(server)
        if url.scheme == "unix":
            return url.path
        address = f"{url.hostname or 'localhost'}:{url.port or 6379}"
        return f"the cluster of {address}" if cluster_url(server) else address
    pool = getattr(server, "connection_pool", None)
    if pool is None:
        return f"the cluster of {', '.join(sorted(map(str, server.nodes_manager.startup_nodes)))}"
    if hasattr(pool, "service_name"):
        # Other sentinels may have a master of the same name.
        sentinels = sorted(address_of(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels)
        return f"the master {pool.service_name!r} of {', '.join(sentinels)}"
    return address_of(pool)


def address_of(pool: Any) -> str:
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def server_identity_of(server: Any) -> tuple[Any, ...]:
    """The identity of a server and its database. Without user and password."""
    if isinstance(server, str):
        options: dict[str, Any] = parse_url(cluster_url(server) or server)  # type: ignore[no-untyped-call]
        return server_of(server), options.get("db", 0), []
    pool = getattr(server, "connection_pool", None)
    if pool is None:
        return server_of(server), 0, []
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())
    return server_of(server), pool.connection_kwargs.get("db") or 0, sorted(map(server_of, sentinels))


def timeout_s_of(server: Any, timeout: Duration | None) -> float:
    """The longest time that an operation of a client takes."""
    if isinstance(server, str):
        return _given_s(timeout)
    pool = getattr(server, "connection_pool", None)
    options = pool.connection_kwargs if pool else server.get_connection_kwargs()
    return float(options["socket_timeout"])


def _given_s(timeout: Duration | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT_S
    try:
        return as_period_ns(timeout) / 1e9
    except InvalidRate as error:
        raise InvalidRate(f"timeout: {error}") from None


def _check_seconds(timeout: Any, name: str) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"{name} is a number of seconds above 0, not {short_repr(timeout)}")


def client_options(timeout: Duration | None) -> dict[str, Any]:
    """The options of a client: deadlines, and the defaults of redis-py before version 8.

    By those of version 8, a client speaks the newer protocol, over which it doesn't check a connection before it uses
    it again. And its pool refuses the call that needs a hundred-and-first connection.
    """
    timeout_s = _given_s(timeout)
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2, "max_connections": 2**31}


def checked_url(url: str) -> str:
    """Check a URL for parts that redis-py would silently ignore. No error shows the URL: it may have a password."""
    try:
        parts = urlsplit(url)
        server_of(url)
    except ValueError:
        raise ValueError(_UNREADABLE) from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(
            "a Redis URL begins with redis://, rediss:// (with TLS), unix://, redis+cluster:// or rediss+cluster://, "
            f"not with {short_repr(parts.scheme or url.rpartition('@')[2])}: say redis://localhost:6379/0, or pass the "
            "client that a Sentinel's master_for returns"
        )
    if parts.scheme != "unix" and ("@" in parts.path or parts.fragment):
        raise ValueError(_UNREADABLE)
    if parts.scheme != "unix" and not re.fullmatch(r"/?[0-9]*/?", parts.path):
        raise ValueError(
            f"the path of a Redis URL is the number of a database, as in redis://localhost/0, not "
            f"{short_repr(parts.path)}"
        )
    if own := _OWN_OPTIONS & parse_qs(parts.query).keys():
        raise ValueError(
            f"{min(own)} has no place in the URL: say timeout=0.5 (as long as a request may wait); nothing is repeated"
        )
    return url


def check_options(pool: Any) -> None:
    """Check that a URL's options make a connection. A pool raises at the first call only, and a cluster never."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        # redis-py names one of its own functions, too.
        named = re.search(r"argument '(\w+)'", str(error))
        what = short_repr(named[1]) if named else str(error)
        raise ValueError(
            f"the Redis URL has an unknown option, {what}: leave it out; options of TLS need rediss://"
        ) from None


def checked_client(client: Any, kinds: tuple[type[Any], ...], name: str, timeout: Duration | None) -> Any:
    """The user's own client, with the deadlines that the user gave it."""
    if not isinstance(client, kinds):
        possible = " or a ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        # The error doesn't show the value, which may have a password in it.
        raise TypeError(
            f"the first argument of {name} is a URL, a {possible}, not one of {type(client)}: a RedisStore takes the "
            "clients of redis, an AsyncRedisStore those of redis.asyncio"
        )
    if timeout is not None:
        raise ValueError("timeout is for a client that the store makes itself: give yours a socket_timeout")
    pool = getattr(client, "connection_pool", None)
    options = pool.connection_kwargs if pool else client.get_connection_kwargs()
    if options.get("socket_timeout") is None:
        raise ValueError(
            f"{short_repr(client)} would wait for ever for a reply: make it with socket_timeout=0.5 and "
            "socket_connect_timeout=0.5, or as long as a request may wait"
        )
    _check_seconds(options["socket_timeout"], "socket_timeout")
    if getattr(pool, "is_master", True) is False:
        raise ValueError(
            f"the client of {server_of(client)} is a client of replicas, which accept no writes: take the Sentinel's "
            "master_for, not its slave_for"
        )
    for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
        its_options = sentinel.connection_pool.connection_kwargs
        if its_options.get("socket_timeout") is None:
            raise ValueError(
                f"{short_repr(client)} would wait for ever for {short_repr(sentinel)}: give the "
                f"Sentinel a socket_timeout as well"
            )
        _check_retries(its_options, f"the Sentinel of {server_of(sentinel)}", "sentinel_kwargs={'retry': %s, ...}")
    _check_retries(options, f"the client of {server_of(client)}", "retry=%s")
    return client


def _check_retries(options: dict[str, Any], whose: str, remedy: str) -> None:
    """Refuse options that repeat a connection attempt: the pool repeats it with pauses, and no caller can stop it."""
    retry = options.get("retry")
    if retry is None:
        # Without a retry object, these options cause one more attempt.
        repeats = bool(options.get("retry_on_timeout") or options.get("retry_on_error"))
    else:
        repeats = getattr(retry, "_retries", 0) != 0
    if repeats:
        raise ValueError(
            f"{whose} would repeat attempts to connect while Redis is unavailable, for seconds, as redis-py does by "
            f"default: make it with {remedy % 'Retry(NoBackoff(), 0)'}, of redis.retry (for asyncio of "
            "redis.asyncio.retry) and redis.backoff, and without retry_on_timeout and retry_on_error"
        )
