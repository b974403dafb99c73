"""Stores from URLs, so that one setting chooses where limits are kept.

=========================  =============================================================================================
``shm:///shop?keys=1000``  a ``Store``, in the shared memory of this host
``redis://...``            a ``RedisStore``; also ``rediss``, ``unix``, ``redis+cluster`` and ``rediss+cluster``
``leased+redis://...``     a ``LeasedStore`` over such a ``RedisStore``
``synced+redis://...``     a ``SyncedStore`` over such a ``RedisStore``
=========================  =============================================================================================

An option of a URL is the argument of that name of the store. `host` is the ``shm`` URL of the host's store. Further
options of a Redis URL are redis-py's.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urlencode, urlsplit, urlunsplit

from forebay.errors import (
    InvalidRate,
    InvalidURL,
    SegmentError,
    SegmentSpaceError,
    StoreFallbackWarning,
    redacted_repr,
    short_repr,
)
from forebay.rate import as_period_ns
from forebay.store import Store

if TYPE_CHECKING:
    from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore, SyncedStore

__all__ = ["connect", "connect_async"]

VARIABLE: Final = "FOREBAY_URL"
EXAMPLE: Final = "shm:///shop?keys=1000000"
STRICT: Final = "strict"
"""The fallback of a leased or synced store: Redis decides each request."""
REDIS_SCHEMES: Final = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")


def connect(url: str | None = None) -> Store | RedisStore | LeasedStore | SyncedStore:
    """The store of a URL, or of the environment variable ``FOREBAY_URL``.

    ``TokenBucket(connect("shm:///shop?keys=1000000"), "api", "100/minute")``. docs/urls.md lists the URLs and their
    options.

    With the option `fallback`, a store goes on elsewhere: with Redis if there is no room or no permission for the
    host's shared memory, or with the host's share of each limit while Redis is unavailable. ``connect`` then warns with
    ``StoreFallbackWarning``. Any other problem of a segment is an error all the same.

    Raises ``InvalidURL``, and what the stores raise. No error shows a password. *Threads*: safe. *Fork*: as the store.
    """
    store: Store | RedisStore | LeasedStore | SyncedStore = _connect(url, is_async=False)
    return store


def connect_async(url: str | None = None) -> Store | AsyncRedisStore | AsyncLeasedStore | SyncedStore:
    """As ``connect``, for asyncio: limits that wait for Redis are made over an ``AsyncRedisStore`` or an
    ``AsyncLeasedStore``.

    A ``Store`` and a ``SyncedStore`` never wait for Redis. Their limiters are the same in both.
    """
    store: Store | AsyncRedisStore | AsyncLeasedStore | SyncedStore = _connect(url, is_async=True)
    return store


def _connect(url: str | None, *, is_async: bool) -> Any:
    if url is None:
        url = os.environ.get(VARIABLE)
        if not url:
            raise InvalidURL(f"connect() takes its URL from the environment variable {VARIABLE}: set it to {EXAMPLE}")
    if not isinstance(url, str):
        raise InvalidURL(f"the URL of a store is text such as {EXAMPLE}, not {redacted_repr(url)}")
    mode, parts = _split(url)
    if mode == "shm":
        return _host_store_or_fallback(parts, is_async)
    return _RedisPlace(mode, parts, is_async).store()


def _split(url: str) -> tuple[str, SplitResult]:
    """``"shm"``, ``"redis"``, ``"leased"`` or ``"synced"``, and the URL without the last two."""
    mode, plus, rest = url.partition("+")
    if not plus or mode not in ("leased", "synced"):
        mode, rest = "redis", url
    try:
        parts = urlsplit(rest)
    except ValueError as error:
        raise InvalidURL(f"the URL of a store can't be read ({error}): one is {EXAMPLE}") from None
    if parts.scheme == "shm" and mode == "redis":
        return "shm", parts
    if parts.scheme not in REDIS_SCHEMES:
        raise InvalidURL(
            f"the URL of a store begins with shm, redis, leased+redis or synced+redis, or with one of the last three "
            f"and {', '.join(REDIS_SCHEMES[1:])} for redis, not with {short_repr(url.partition(':')[0])}: "
            f"one is {EXAMPLE}"
        )
    return mode, parts


# Options


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("a whole number")
    return int(text)


def _octal(text: str) -> int:
    try:
        return int(text.removeprefix("0o"), 8)
    except ValueError:
        raise ValueError("an octal number such as 660") from None


def _group(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() else text


def _yes(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number such as 0.1") from None


def _duration(text: str) -> str | float:
    duration: str | float = text
    with contextlib.suppress(ValueError):
        duration = float(text)
    try:
        as_period_ns(duration)
    except InvalidRate:
        raise ValueError('a length of time from 1 ns to 10 years, such as 0.5 or "500 ms"') from None
    return duration


Reader = Callable[[str], Any]
STORE_OPTIONS: Final[Mapping[str, Reader]] = {
    "keys": _number,
    "on_full": str,
    "mode": _octal,
    "group": _group,
    "directory": str,
    "path": str,
    "clock": str,
    "hot_keys": _number,
}
REDIS_OPTIONS: Final[Mapping[str, Reader]] = {
    "namespace": str,
    "plain_keys": _yes,
    "timeout": _duration,
    "when_unavailable": str,
    "hosts": _number,
}
MODE_OPTIONS: Final[Mapping[str, Mapping[str, Reader]]] = {
    "redis": {},
    "leased": {"lease": _duration, "share": _share},
    "synced": {"interval": _duration, "keys": _number},
}


def _pairs(parts: SplitResult) -> list[tuple[str, str]]:
    # Here a plus sign is no space: it is a part of schemes.
    split = (pair.partition("=") for pair in parts.query.split("&") if pair)
    pairs = [(unquote(name), unquote(text)) for name, _, text in split]
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidURL(f"the URL of a store has the option {short_repr(name)} twice: leave one out")
    return pairs


def _read(readers: Mapping[str, Reader], name: str, text: str) -> Any:
    try:
        return readers[name](text)
    except ValueError as error:
        raise InvalidURL(f"the option {name} of a store's URL is {error}, not {short_repr(text)}") from None


def _unknown(name: str, known: list[str]) -> InvalidURL:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(sorted(known))}"
    return InvalidURL(
        f"the URL of this store has no option {short_repr(name)}: {hint} (within a URL that is an option itself, "
        "write %26 for &)"
    )


# Shared memory


def _host_store_or_fallback(parts: SplitResult, is_async: bool) -> Any:
    pairs = dict(_pairs(parts))
    fallback = pairs.pop("fallback", None)
    store: Any = None
    if fallback is not None:
        mode, redis_parts = _split(fallback)
        if mode != "redis":
            raise InvalidURL(f"the fallback of shared memory is the URL of a Redis server, not one of {mode!r}")
        # Made now, so that its options are checked before it is needed. It has no connection yet.
        store = _RedisPlace(mode, redis_parts, is_async).store()
    try:
        return _host_store(parts, pairs)
    except SegmentError as error:
        if store is None or not _is_out_of_reach(error):
            raise
        _warn(f"limits are kept in Redis, {store!r}, and not in this host's memory: {error}")
        return store


def _is_out_of_reach(error: SegmentError) -> bool:
    """Whether the host has no room for a segment, or this process no permission. Other errors have to be mended."""
    return type(error) in (SegmentError, SegmentSpaceError)


def _host_store(parts: SplitResult, pairs: Mapping[str, str]) -> Store:
    name = unquote(parts.path.removeprefix("/"))
    if parts.netloc:
        raise InvalidURL(f"the name of a store is the path of its URL, as in {EXAMPLE}: write a third slash")
    if parts.fragment:
        raise InvalidURL(f"the URL of a store has no fragment, as {short_repr(parts.fragment)}: write %23 for #")
    for option in pairs:
        if option not in STORE_OPTIONS:
            raise _unknown(option, [*STORE_OPTIONS, "fallback"])
    options = {option: _read(STORE_OPTIONS, option, text) for option, text in pairs.items()}
    if "keys" not in options:
        raise InvalidURL(f"the URL of a store in shared memory has the option keys, as in {EXAMPLE}")
    if bool(name) == ("path" in options):
        raise InvalidURL(f"the URL of a store in shared memory has a name, as in {EXAMPLE}, or else the option path")
    try:
        return Store(name or options["path"], **options)
    except ValueError as error:
        raise InvalidURL(f"the URL of a store can't be used: {error}") from None


# Redis


class _RedisPlace:
    """A URL of Redis, checked as far as that goes without its stores."""

    def __init__(self, mode: str, parts: SplitResult, is_async: bool) -> None:
        self._mode, self._is_async = mode, is_async
        readers = {**REDIS_OPTIONS, **MODE_OPTIONS[mode]}
        options, others = {}, []
        self._host = self._fallback = None
        for name, text in _pairs(parts):
            if name == "host":
                self._host = text
            elif name == "fallback":
                self._fallback = text
            elif name in readers:
                options[name] = _read(readers, name, text)
            else:
                others.append((name, text))
        self._check_others(others, [*readers, "host", "fallback"])
        self._own = {name: options.pop(name) for name in MODE_OPTIONS[mode] if name in options}
        self._options = options
        # `urlunsplit` leaves out the slashes in front of an empty host, which a URL of a Unix socket has.
        scheme = "" if parts.scheme == "unix" else parts.scheme
        server = urlunsplit((scheme, parts.netloc, parts.path, urlencode(others), parts.fragment))
        self._server = server if scheme else f"unix://{server.removeprefix('//')}"
        self._check()

    def _check_others(self, others: list[tuple[str, str]], known: list[str]) -> None:
        """Refuse misspelt options here: only this module knows all of them."""
        for name, _ in others:
            if difflib.get_close_matches(name, known, 1, 0.8):
                raise _unknown(name, known)

    def _check(self) -> None:
        if self._mode == "redis":
            if self._fallback is not None and ("when_unavailable" in self._options or self._host is not None):
                raise InvalidURL(
                    "a fallback is the host's store and the policy when_unavailable=local: leave host and "
                    "when_unavailable out"
                )
            return
        if self._host is None:
            raise InvalidURL(f"the URL of a {self._mode} store has the host's store as its option host={EXAMPLE}")
        if self._fallback not in (None, STRICT):
            raise InvalidURL(
                f"the fallback of a {self._mode} store is {STRICT}: Redis decides each request. It is not "
                f"{redacted_repr(self._fallback)}"
            )
        if self._fallback is not None and self._options.get("when_unavailable") == "local":
            raise InvalidURL(
                f"fallback={STRICT} is for hosts without shared memory, and when_unavailable=local needs that: leave "
                "one of them out"
            )
        if self._mode == "synced" and "keys" not in self._own:
            raise InvalidURL("the URL of a synced store has the option keys: how many keys a limiter has at once")

    def store(self) -> Any:
        """Make the store. Warns in the name of the caller of ``connect``."""
        if self._mode == "redis" and self._fallback is not None:
            share = _host_store_of(self._fallback)
            store = self._redis_store(is_async=self._is_async, host=share, when_unavailable="local")
            if (error := self._failure()) is not None:
                _warn(f"Redis is unavailable, and the host keeps its share of each limit, {store!r}: {error}")
            return store
        try:
            host = None if self._host is None else _host_store_of(self._host)
        except SegmentError as error:
            if self._fallback is None or not _is_out_of_reach(error):
                raise
            store = self._redis_store(is_async=self._is_async)
            _warn(f"Redis decides each request, {store!r}, as there is no {self._mode} store: {error}")
            return store
        return self._redis_store(is_async=self._is_async, host=host) if self._mode == "redis" else self._over(host)

    def _over(self, host: Any) -> Any:
        from forebay.redis import AsyncLeasedStore, LeasedStore, SyncedStore

        # The exchanges of a synced store have a thread of their own, so they block no event loop.
        is_async = self._is_async and self._mode == "leased"
        kind: Any = SyncedStore if self._mode == "synced" else AsyncLeasedStore if is_async else LeasedStore
        redis_store = self._redis_store(is_async=is_async, host=host)
        return _checked(lambda: kind(redis_store, host, owns_stores=True, **self._own))

    def _redis_store(self, *, is_async: bool, **options: Any) -> Any:
        from forebay.redis import AsyncRedisStore, RedisStore

        kind: Any = AsyncRedisStore if is_async else RedisStore
        return _checked(lambda: kind(self._server, **self._options, **options))

    def _failure(self) -> Exception | None:
        """Why Redis can't be had now, if so."""
        import redis

        from forebay.redis.transport.clients import client_of

        client = client_of(self._server, self._options.get("timeout"))
        try:
            client.script_load("return 1")
        except redis.RedisError as error:
            return error
        finally:
            client.close()
        return None


def _host_store_of(url: str) -> Store:
    mode, parts = _split(url)
    if mode != "shm":
        raise InvalidURL(f"the store of a host is in its shared memory, as {EXAMPLE}, and not in Redis")
    return _host_store(parts, dict(_pairs(parts)))


def _checked(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise InvalidURL(f"the URL of a store can't be used: {error}") from None


def _warn(message: str) -> None:
    warnings.warn(message, StoreFallbackWarning, stacklevel=5)
