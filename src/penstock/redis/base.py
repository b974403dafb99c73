"""What both kinds of stores are: names for keys, deadlines, and what goes wrong."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, TypeVar

from redis.exceptions import NoScriptError

from penstock.core.all_of import AllOf
from penstock.core.concurrency import Concurrency
from penstock.core.limiter import bound_arguments
from penstock.errors import InvalidLimiter, StoreClosed, StoreUnavailable, shown
from penstock.redis.asking import Asked, Asking
from penstock.redis.keys import fingerprint, plain
from penstock.redis.kinds import made_of

__all__ = [
    "CHUNK",
    "DEFAULT_TIMEOUT_S",
    "RedisStoreBase",
    "checked_client",
    "checked_limiters",
    "deadlines",
    "replaced",
    "unknown",
]

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 0.5
# Of a batch, so many calls are sent before their answers are read.
CHUNK: Final = 500
MOST_LIMITERS: Final = 16
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,100}", re.ASCII)


class RedisStoreBase:
    _limiter: ClassVar[type[Asking]]
    _staggered: ClassVar[type[Asking]]
    _concurrency: ClassVar[type[Asking]]

    def __init__(self, namespace: str, plain_keys: bool) -> None:
        if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
            raise ValueError(
                f"a namespace is 1 to 100 letters, digits and characters of '_.:/-', not {shown(namespace)}"
            )
        self.namespace = namespace
        self.closed = False
        self._stand_in = plain if plain_keys else fingerprint

    def _around(self, name: str, suffix: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind a key's stand-in.

        All states of one key are in one slot of a cluster, as that is found by what is in braces. The suffix has no
        colon, so that no two limiters have one key.
        """
        encoded = name.encode("utf-8", "surrogatepass")
        return self.namespace.encode() + b":{", b"}:" + encoded + b":" + suffix

    def _make_limiter(self, kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        name, made = made_of(kind, args, kwargs)
        if kind is Concurrency:
            return self._concurrency(self, name, kind, made)
        if made.parameters.get("align") == "stagger":
            return self._staggered(self, name, kind, made)
        return self._limiter(self, name, kind, made)

    def _was_closed(self) -> StoreClosed:
        return StoreClosed(f"{self!r} was used after it was closed")

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self!r} has not decided: {type(error).__name__}: {error}")

    def _answers(self, asked: list[Asked[T]], replies: list[Any]) -> list[T]:
        """Of a batch."""
        answers = []
        for one, reply in zip(asked, replies, strict=True):
            if isinstance(reply, Exception):
                raise self._unavailable(reply) from reply
            answers.append(one.answer(reply))
        return answers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace!r}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same URL")


def unknown(asked: list[Asked[T]], replies: list[Any]) -> list[Asked[T]]:
    """Those whose script Redis didn't know, so that nothing was done."""
    return [one for one, reply in zip(asked, replies, strict=True) if isinstance(reply, NoScriptError)]


def replaced(replies: list[Any], again: list[Any]) -> list[Any]:
    """All replies, where those that were not known have been asked again."""
    better = iter(again)
    return [next(better) if isinstance(reply, NoScriptError) else reply for reply in replies]


def deadlines(timeout: float | None) -> dict[str, Any]:
    """What a client is made with."""
    if timeout is None:
        timeout = DEFAULT_TIMEOUT_S
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is a number of seconds above 0, not {shown(timeout)}")
    return {"socket_timeout": timeout, "socket_connect_timeout": timeout}


def checked_client(client: Any, kind: type[Any], name: str, timeout: float | None) -> Any:
    """A client of somebody else's, with the deadlines that he gave it."""
    if not isinstance(client, kind):
        raise TypeError(f"the first argument of {name} is a URL or a {kind.__module__}.Redis, not {shown(client)}")
    if timeout is not None:
        raise ValueError("timeout is for a client that the store makes itself: give yours a socket_timeout")
    options = client.connection_pool.connection_kwargs
    if options.get("socket_timeout") is None:
        raise ValueError(
            f"{shown(client)} would wait for ever for an answer: make it with socket_timeout=0.5 and "
            "socket_connect_timeout=0.5, or whatever a request may wait"
        )
    return client


def checked_limiters(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], of: type[Any]) -> tuple[Any, ...]:
    """The limiters of an ``AllOf``."""
    if kind is not AllOf:
        raise TypeError(f"the first argument of {kind.__name__} is a store, not {shown(args[0] if args else kwargs)}")
    bound_arguments(kind, args, kwargs)
    if not 1 <= len(args) <= MOST_LIMITERS:
        raise InvalidLimiter(f"AllOf takes 1 to {MOST_LIMITERS} limiters, not {len(args)}")
    for limiter in args:
        if not isinstance(limiter, of):
            raise InvalidLimiter(f"AllOf takes limiters of one store, not {shown(limiter)} beside {args[0]!r}")
        if limiter._store is not args[0]._store:
            raise InvalidLimiter(f"AllOf takes limiters of one store, but {limiter!r} is in another than {args[0]!r}")
    return args
