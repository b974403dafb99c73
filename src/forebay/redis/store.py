"""Stores in Redis: their options, the limiters that they make, and their end.

A store makes a client (``transport/clients.py``), a circuit breaker, a policy for the time while Redis is unavailable
(``fallback.py``), and an executor, which sends the commands of its limiters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar, overload

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.all_of import AllOf
from forebay.core.cell_limiter import CellLimiter
from forebay.core.limiter_arguments import bound_arguments
from forebay.errors import InvalidLimiter, short_repr
from forebay.host_time import host_ns
from forebay.names import LimiterNames
from forebay.rate import Duration
from forebay.redis.algorithms import Gcra
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.commands import LimiterCommands, StaggeredCommands
from forebay.redis.concurrency import ConcurrencyCommands
from forebay.redis.executor import Executor
from forebay.redis.executor_base import ExecutorBase
from forebay.redis.factory import spec_for
from forebay.redis.fallback import checked_policy
from forebay.redis.keys import KeySpace
from forebay.redis.operations import awaited
from forebay.redis.public_limiters import (
    AsyncRedisAllOf,
    AsyncRedisConcurrency,
    AsyncRedisLimiter,
    RedisAllOf,
    RedisConcurrency,
    RedisLimiter,
)
from forebay.redis.transport.breaker import Breaker, RedisStatus
from forebay.redis.transport.clients import async_client_of, client_of, server_identity_of, server_of, timeout_s_of
from forebay.store import Store

__all__ = ["AsyncRedisStore", "RedisStore", "check_all_of"]

E = TypeVar("E", bound=ExecutorBase)
L = TypeVar("L")
C = TypeVar("C")

MOST_LIMITERS: Final = 16
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,100}", re.ASCII)


class BaseRedisStore(Generic[E, L, C]):
    """`E` is the executor, `L` the class of its limiters, `C` that of those of held permits."""

    is_awaited: ClassVar[bool] = False
    """Whether its limiters' methods return coroutines."""

    executor: E
    """Sends the commands of the store's limiters."""
    keyspace: KeySpace
    """The server and the key names of the limiters' states."""
    server: str
    """The server's address, without user and password."""

    _limiter: ClassVar[Any]
    _concurrency: ClassVar[Any]
    _all_of: ClassVar[Any]

    def __init__(
        self,
        server: Any,
        client_of: Any,
        make_executor: Any,
        namespace: str,
        plain_keys: bool,
        timeout: Duration | None,
        when_unavailable: Any,
        host: Store | None,
        hosts: int | None,
    ) -> None:
        if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
            raise ValueError(
                f"a namespace is 1 to 100 letters, digits and characters of '_.:/-', not {short_repr(namespace)}"
            )
        if not isinstance(plain_keys, bool):
            raise ValueError(
                f"plain_keys is True or False, not {short_repr(plain_keys)}: keys may be people's addresses"
            )
        self.namespace = namespace
        self.host = host
        """The store of this host, or None."""
        self._policy = checked_policy(when_unavailable, namespace, host, hosts)
        client = client_of(server, timeout)
        timeout_s = timeout_s_of(server, timeout)
        self.server = server_of(server)
        self.names = LimiterNames()
        self.keyspace = KeySpace(server_identity_of(server), namespace, is_plain=plain_keys)
        self.executor = make_executor(
            client,
            repr(self),
            Breaker(host, self.server, timeout_s),
            timeout_s,
            None if host is None else host.segment.note_redis_latency,
            owns_client=isinstance(server, str),
            raises_when_unavailable=self._policy.raises,
        )

    @property
    def closed(self) -> bool:
        return self.executor.closed

    def status(self) -> RedisStatus:
        """The server's state as this host knows it, for metrics. Makes no call.

        It covers all processes that share the `host` store; without one, this process and those that it has forked. All
        stores of one server count together. Raises ``StoreClosed``.
        """
        return self.executor.status()

    @overload
    def make_limiter(self, kind: type[Concurrency], args: tuple[Any, ...], kwargs: dict[str, Any]) -> C: ...
    @overload
    def make_limiter(self, kind: type[CellLimiter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> L: ...
    def make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        name, spec = spec_for(kind, args, kwargs)
        make_commands, make = LimiterCommands, self._limiter
        if kind is Concurrency:
            make_commands, make = ConcurrencyCommands, self._concurrency
        elif spec.parameters.get("align") == "stagger":
            make_commands = StaggeredCommands
        commands = make_commands(self.keyspace, repr(self), name, kind, spec)
        commands.fallback = self._policy.fallback_of(commands, kwargs.get("keys"))
        limiter = make(self, commands)
        self.names.note(limiter, kind.__name__, spec.algorithm.suffix, is_common=isinstance(spec.algorithm, Gcra))
        return limiter

    def all_of(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For ``AllOf``, when a limiter of this store is its first argument."""
        return self.together(checked_limiters(kind, args, kwargs, self._limiter))

    def together(self, limiters: Sequence[Any]) -> Any:
        """Several limiters of this store as one, without a bound on their number."""
        fallback = self._policy.fallback_of_all([limiter.commands for limiter in limiters])
        return self._all_of(self, limiters, fallback)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace!r} at {self.server}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same URL")


class RedisStore(BaseRedisStore[Executor, RedisLimiter, RedisConcurrency]):
    """Redis as the place where limiters keep their state.

    ``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``. `server` is a URL as ``redis.Redis.from_url``
    takes it (``rediss://`` for TLS, a user and a password for ACLs). For a cluster it is the URL of any node, with
    ``redis+cluster://`` or ``rediss+cluster://``. It may also be a client of your own with a ``socket_timeout``: a
    ``redis.Redis``, also a ``Sentinel``'s, or a ``redis.cluster.RedisCluster``. With a URL every call has the deadline
    `timeout`: text like ``"500 ms"`` (the default), seconds or a ``timedelta``. In a cluster the deadline holds at the
    node of the key. With a client of your own, and with a cluster over asyncio, each operation on a socket has a
    deadline. No call is repeated, because a repeated decision might be charged twice.

    When Redis is slow, gone, or can't do its work, `when_unavailable` decides. ``"deny"`` raises ``StoreUnavailable``
    (for a web service 503, not 429). ``"allow"`` allows everything. ``"local"`` goes on with the host's share of each
    limit, in the shared memory of the store `host`: a limit of 100 is one of 25 on each of four `hosts`. The decisions
    are then ``degraded``, and Redis never learns of them.

    After three failed calls in a row, the circuit breaker opens: one call each second, or each two deadlines if that is
    longer, goes to Redis until one gets a reply; no other call waits. All processes of a host share the breaker through
    `host`; without it, each process has its own. ``status()`` returns its state. docs/redis-failures.md lists the
    failures and their effects.

    `namespace` begins the name of every Redis key. A limiter's keys are stored as fingerprints; with `plain_keys` as
    they are.

    *Threads*: safe. *Fork*: safe. Close a store that was made from a URL; it is a context manager.
    """

    manual_clock: ClassVar[None] = None  # waiting threads sleep, and move no clock
    _limiter = RedisLimiter
    _concurrency = RedisConcurrency
    _all_of = RedisAllOf

    def __init__(
        self,
        server: str | redis.Redis | redis.cluster.RedisCluster,
        *,
        namespace: str = "forebay",
        plain_keys: bool = False,
        timeout: Duration | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(server, client_of, Executor, namespace, plain_keys, timeout, when_unavailable, host, hosts)

    def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def now_ns() -> int:
        """The time of reservations, by which a waiting thread sleeps."""
        return host_ns()


class AsyncRedisStore(BaseRedisStore[AsyncExecutor, AsyncRedisLimiter, AsyncRedisConcurrency]):
    """Redis as the place where limiters keep their state, for asyncio: see ``RedisStore``, whose arguments it takes.

    ``await TokenBucket(AsyncRedisStore("redis://localhost"), "api", "100/minute").hit("user:42")``. `server` is a URL
    or a client of ``redis.asyncio``. Use it in one event loop, and close it there; in another it raises
    ``RuntimeError``.
    """

    is_awaited = True
    _limiter = AsyncRedisLimiter
    _concurrency = AsyncRedisConcurrency
    _all_of = AsyncRedisAllOf

    def __init__(
        self,
        server: str | redis.asyncio.Redis | redis.asyncio.cluster.RedisCluster,
        *,
        namespace: str = "forebay",
        plain_keys: bool = False,
        timeout: Duration | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(
            server, async_client_of, AsyncExecutor, namespace, plain_keys, timeout, when_unavailable, host, hosts
        )

    @awaited
    async def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more.

        Before that it waits, for at most two deadlines, until the permits that cancelled tasks have taken come back.
        Meanwhile the store accepts only calls that give permits back. So cancel the tasks that hold permits just before
        ``close``, or let their blocks end first. The store is closed even if ``close`` is cancelled.
        """
        await self.executor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def check_all_of(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ``TypeError`` and ``InvalidLimiter`` unless these are the arguments of an ``AllOf``."""
    if kind is not AllOf:
        raise TypeError(
            f"the first argument of {kind.__name__} is a store, not {short_repr(args[0] if args else kwargs)}"
        )
    bound_arguments(kind, args, kwargs)
    if not 1 <= len(args) <= MOST_LIMITERS:
        raise InvalidLimiter(f"AllOf takes 1 to {MOST_LIMITERS} limiters, not {len(args)}")


def checked_limiters(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], of: type[Any]) -> tuple[Any, ...]:
    """The limiters of an ``AllOf``. Raises ``TypeError`` and ``InvalidLimiter``."""
    check_all_of(kind, args, kwargs)
    for limiter in args:
        if not isinstance(limiter, of):
            raise InvalidLimiter(
                f"AllOf takes limiters of one store, not {short_repr(limiter)} beside {args[0]!r}: make all of them "
                f"over the same {type(args[0].store).__name__}"
            )
        if limiter.store is not args[0].store:
            raise InvalidLimiter(
                f"AllOf takes limiters of one store, but {limiter!r} is in another than {args[0]!r}: make both over "
                f"the same {type(args[0].store).__name__} object"
            )
    return args
