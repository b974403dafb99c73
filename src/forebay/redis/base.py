"""What both kinds of stores are: names for keys, deadlines, and what goes wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis.connection import parse_url

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.all_of import AllOf
from forebay.core.limiter import bound_arguments
from forebay.errors import (
    InvalidLimiter,
    InvalidRate,
    shown,
)
from forebay.rate import Duration, as_period_ns
from forebay.redis.commands import LimiterCommands
from forebay.redis.factory import spec_for
from forebay.redis.fallback import checked_policy
from forebay.redis.keys import fingerprint, plain
from forebay.redis.transport.breaker import Breaker, RedisStatus
from forebay.redis.transport.cluster import cluster_url
from forebay.redis.transport.deadline import Patience
from forebay.store import Store

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "RedisStoreBase",
    "check_options",
    "checked_client",
    "checked_limiters",
    "checked_url",
    "client_options",
    "none_held",
    "noop",
    "server_of",
]

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 0.5
MOST_LIMITERS: Final = 16
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,100}", re.ASCII)
_SCHEMES: Final = {"redis", "rediss", "unix", "redis+cluster", "rediss+cluster"}
# Of a URL. What they would set, `timeout` sets, or is not done.
_OWN_OPTIONS: Final = {"socket_timeout", "socket_connect_timeout", "retry_on_timeout", "retry_on_error"}
_UNREADABLE: Final = (
    "the host and the port can't be read from the Redis URL: a port is a number, and in a user or password all but "
    "letters and digits is written as by urllib.parse.quote(password, safe='')"
)


def noop(fallback: object) -> None:
    """What is to be given back to Redis while it is away is not given back."""


class RedisStoreBase:
    is_awaited: ClassVar[bool] = False
    """Whether what its limiters' methods return has to be awaited."""

    _limiter: ClassVar[type[LimiterCommands]]
    _all_of: ClassVar[Any]
    _staggered: ClassVar[type[LimiterCommands]]
    _concurrency: ClassVar[type[LimiterCommands]]

    executor: Any
    _server: str

    def __init__(
        self, namespace: str, plain_keys: bool, when_unavailable: Any, host: Store | None, hosts: int | None
    ) -> None:
        if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
            raise ValueError(
                f"a namespace is 1 to 100 letters, digits and characters of '_.:/-', not {shown(namespace)}"
            )
        if not isinstance(plain_keys, bool):
            raise ValueError(f"plain_keys is True or False, not {shown(plain_keys)}: keys may be people's addresses")
        self.namespace = namespace
        self._encode_key = plain if plain_keys else fingerprint
        self._policy = checked_policy(when_unavailable, namespace, host, hosts)

    @property
    def closed(self) -> bool:
        return bool(self.executor.closed)

    def _make_executor(
        self, kind: type[T], client: Any, server: Any, timeout: Duration | None, host: Store | None
    ) -> T:
        """Once it is known that there can be a client of that server."""
        timeout_s = timeout_s_of(server, timeout)
        self._server = server_of(server)
        self.server_identity = server_identity_of(server)
        make: Any = kind
        executor: T = make(
            client,
            repr(self),
            Breaker(host, self._server, timeout_s),
            timeout_s,
            owns_client=isinstance(server, str),
            raises_when_unavailable=self._policy.raises,
        )
        return executor

    def status(self) -> RedisStatus:
        """What this host knows of the server, for metrics. Asks nobody.

        Of all processes that share the `host` store; without one, of this process and those that it has forked. All
        stores of one server count together. Raises ``StoreClosed``.
        """
        status: RedisStatus = self.executor.status()
        return status

    def _key_affixes(self, name: str, suffix: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind a key's stand-in.

        All states of one key are in one slot of a cluster, as that is found by what is in braces. The suffix has no
        colon, so that no two limiters have one key.
        """
        encoded = name.encode("utf-8", "surrogatepass")
        return self.namespace.encode() + b":{", b"}:" + encoded + b":" + suffix

    def _make_limiter(self, kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        name, made = spec_for(kind, args, kwargs)
        make = self._staggered if made.parameters.get("align") == "stagger" else self._limiter
        limiter: Any = (self._concurrency if kind is Concurrency else make)(self, name, kind, made)
        limiter._fallback = self._policy.fallback_of(limiter, kwargs.get("keys"))
        return limiter

    # Aliases until the limiters use the executor themselves.
    @property
    def _timeout_s(self) -> float:
        return float(self.executor.timeout_s)

    def _do(self, command: Any, fall_back: Any = None, fallback: Any = None) -> Any:
        return self.executor.run_command(command, fall_back and functools.partial(fall_back, fallback))

    def _run(self, flow: Any, fall_back: Any = None, fallback: Any = None) -> Any:
        return self.executor.run(flow, fall_back and functools.partial(fall_back, fallback))

    def _run_to_its_end(self, flow: Any, fall_back: Any = noop, fallback: Any = None) -> Any:
        return self.executor.run_to_end(flow, functools.partial(fall_back, fallback))

    def _do_many(self, commands: Any, fall_back: Any = None, fallback: Any = None) -> Any:
        return self.executor.run_many(commands, fall_back and (lambda number: fall_back(number, fallback)))

    def _patience(self) -> Patience:
        """For the web: of one request, for all that it asks of this store and gives back to it."""
        return Patience(self.executor.timeout_s)

    def _together(self, limiters: Sequence[LimiterCommands]) -> Any:
        """For the web: limiters of this store as one, however many."""
        return self._all_of(limiters)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace!r} at {self._server}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same URL")


def none_held(fallback: object) -> int:
    """Of permits that were to be given back, or renewed."""
    return 0


def server_of(server: Any) -> str:
    """What stands for a URL's or a client's server in the host's store, and in messages. No user and no password."""
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
        # Many have the same name, by other sentinels.
        sentinels = sorted(address_of(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels)
        return f"the master {pool.service_name!r} of {', '.join(sentinels)}"
    return address_of(pool)


def address_of(pool: Any) -> str:
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def server_identity_of(server: Any) -> tuple[Any, ...]:
    """What tells a server and its database from all others. No user and no password."""
    if isinstance(server, str):
        options: dict[str, Any] = parse_url(cluster_url(server) or server)  # type: ignore[no-untyped-call]
        return server_of(server), options.get("db", 0), []
    pool = getattr(server, "connection_pool", None)
    if pool is None:
        return server_of(server), 0, []
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())
    return server_of(server), pool.connection_kwargs.get("db") or 0, sorted(map(server_of, sentinels))


def timeout_s_of(server: Any, timeout: Duration | None) -> float:
    """What an operation of a client takes at the most."""
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
        raise ValueError(f"{name} is a number of seconds above 0, not {shown(timeout)}")


def client_options(timeout: Duration | None) -> dict[str, Any]:
    """What a client is made with: deadlines, and what redis-py 8 has other defaults for.

    With the newer protocol it doesn't look whether a connection is in order before it uses it again; and it has a
    hundred connections at the most, so that whoever comes next is refused.
    """
    timeout_s = _given_s(timeout)
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2, "max_connections": 2**31}


def checked_url(url: str) -> str:
    """A URL without what redis-py would pass over in silence. It is not shown: it may have a password in it."""
    try:
        parts = urlsplit(url)
        server_of(url)
    except ValueError:
        raise ValueError(_UNREADABLE) from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(
            "a Redis URL begins with redis://, rediss:// (with TLS), unix://, redis+cluster:// or rediss+cluster://, "
            f"not with {shown(parts.scheme or url.rpartition('@')[2])}: say redis://localhost:6379/0, or give the "
            "store what a Sentinel's master_for gives"
        )
    if parts.scheme != "unix" and ("@" in parts.path or parts.fragment):
        raise ValueError(_UNREADABLE)
    if parts.scheme != "unix" and not re.fullmatch(r"/?[0-9]*/?", parts.path):
        raise ValueError(
            f"the path of a Redis URL is the number of a database, as in redis://localhost/0, not {shown(parts.path)}"
        )
    if own := _OWN_OPTIONS & parse_qs(parts.query).keys():
        raise ValueError(
            f"{min(own)} has no place in the URL: say timeout=0.5, or whatever a request may wait; nothing is repeated"
        )
    return url


def check_options(pool: Any) -> None:
    """That connections can be made of what a URL says. The pool itself would find out at the first call."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        raise ValueError(f"the Redis URL has an option that isn't one: {error}; those of TLS need rediss://") from None


def checked_client(client: Any, kinds: tuple[type[Any], ...], name: str, timeout: Duration | None) -> Any:
    """A client of somebody else's, with the deadlines that he gave it."""
    if not isinstance(client, kinds):
        possible = " or a ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        # Not the value: it may have a password in it.
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
            f"{shown(client)} would wait for ever for an answer: make it with socket_timeout=0.5 and "
            "socket_connect_timeout=0.5, or whatever a request may wait"
        )
    _check_seconds(options["socket_timeout"], "socket_timeout")
    if getattr(pool, "is_master", True) is False:
        raise ValueError(
            f"the client of {server_of(client)} is one of replicas, which nothing is written to: take the Sentinel's "
            "master_for, not its slave_for"
        )
    for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
        its_options = sentinel.connection_pool.connection_kwargs
        if its_options.get("socket_timeout") is None:
            raise ValueError(
                f"{shown(client)} would wait for ever for {shown(sentinel)}: give the Sentinel a socket_timeout as well"
            )
        _check_retries(its_options, f"the Sentinel of {server_of(sentinel)}", "sentinel_kwargs={'retry': %s, ...}")
    _check_retries(options, f"the client of {server_of(client)}", "retry=%s")
    return client


def _check_retries(options: dict[str, Any], whose: str, remedy: str) -> None:
    """A pool connects as often as its options say, and pauses in between: nobody else can make it stop."""
    retry = options.get("retry")
    if retry is None:
        # Then it makes one attempt more, for these.
        repeats = bool(options.get("retry_on_timeout") or options.get("retry_on_error"))
    else:
        repeats = getattr(retry, "_retries", 0) != 0
    if repeats:
        raise ValueError(
            f"{whose} would try to connect again and again while Redis is away, for seconds, as redis-py does by "
            f"default: make it with {remedy % 'Retry(NoBackoff(), 0)'}, of redis.retry (for asyncio of "
            "redis.asyncio.retry) and redis.backoff, and without retry_on_timeout and retry_on_error"
        )


def checked_limiters(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], of: type[Any]) -> tuple[Any, ...]:
    """The limiters of an ``AllOf``."""
    if kind is not AllOf:
        raise TypeError(f"the first argument of {kind.__name__} is a store, not {shown(args[0] if args else kwargs)}")
    bound_arguments(kind, args, kwargs)
    if not 1 <= len(args) <= MOST_LIMITERS:
        raise InvalidLimiter(f"AllOf takes 1 to {MOST_LIMITERS} limiters, not {len(args)}")
    for limiter in args:
        if not isinstance(limiter, of):
            raise InvalidLimiter(
                f"AllOf takes limiters of one store, not {shown(limiter)} beside {args[0]!r}: make all of them "
                f"over the same {type(args[0]._store).__name__}"
            )
        if limiter._store is not args[0]._store:
            raise InvalidLimiter(
                f"AllOf takes limiters of one store, but {limiter!r} is in another than {args[0]!r}: make both over "
                f"the same {type(args[0]._store).__name__} object"
            )
    return args
