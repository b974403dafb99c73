"""Processes of one host that see it differently: by time namespaces, and by boot ids of their own."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from process_helpers import Crew, Worker, path_of

from forebay import FixedWindow, SlidingLog, Store, TokenBucket
from forebay.errors import ClockMismatch, StoreUnavailable
from forebay.redis import RedisStore
from forebay.redis.transport.breaker import THRESHOLD
from forebay.segment import layout
from forebay.segment.header import Header
from forebay.verification import verify

LIMIT: Final = 10
CLONE_NEWTIME: Final = 0x80
LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if LIBC.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def in_time_namespace(ahead_s: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a process whose monotonic clock is ahead by that many seconds. Call it in a process of its own."""
    _unshare(CLONE_NEWTIME)
    Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0")
    return Worker(work, *arguments).result()


def _admitted(name: str) -> list[int]:
    """Of 30 requests to each of three limiters; each answers by the clock in another way."""
    with Store(name, keys=1000) as store:
        limiters = [
            TokenBucket(store, "bucket", "10/hour", burst=LIMIT),
            FixedWindow(store, "window", "10/hour", "first"),
            SlidingLog(store, "log", "10/hour", keys=10),
        ]
        for limiter in limiters:
            assert limiter.peek("key").reset_after <= 3601
        return [sum(limiter.allow("key") for _ in range(30)) for limiter in limiters]


@pytest.mark.parametrize("order", [(86_400, 0, 86_400), (0, 86_400, 0), (86_400, 86_400 * 400, 0)])
def test_time_namespaces_share_one_limit(as_root: None, crew: Crew, name: str, order: tuple[int, ...]) -> None:
    """In whichever namespace the segment was made: no process's clock admits another one's requests, nor locks a key
    out.
    """
    admitted = [crew.start(in_time_namespace, ahead_s, _admitted, name).result() for ahead_s in order]
    assert admitted == [[LIMIT] * 3, [0] * 3, [0] * 3]
    for ahead_s in order:
        assert crew.start(in_time_namespace, ahead_s, _damage_found, name).result() == []


def _damage_found(name: str) -> list[str]:
    return [str(finding) for finding in verify(name).damage]


def test_a_process_whose_children_get_another_clock_is_refused(as_root: None, crew: Crew, name: str) -> None:
    """A store that it makes before it forks would have another time in its children."""
    message = crew.start(_refused_before_its_fork, name).result()
    assert "another time namespace" in message
    assert "unshare" in message
    assert not Path(path_of(name)).exists()


def _refused_before_its_fork(name: str) -> str:
    _unshare(CLONE_NEWTIME)
    with pytest.raises(ClockMismatch) as caught:
        Store(name, keys=1000)
    return str(caught.value)


@pytest.mark.parametrize("is_private", [False, True])
def test_a_store_from_before_a_fork_into_a_time_namespace_is_refused(
    as_root: None, crew: Crew, name: str, is_private: bool
) -> None:
    assert crew.start(_use_before_and_after, name, is_private).result() == ([LIMIT] * 3, [0] * 3)


def _use_before_and_after(name: str, is_private: bool) -> tuple[list[int], list[int]]:
    with Store.private(keys=1000) if is_private else Store(name, keys=1000) as store:
        limiters = [
            TokenBucket(store, "bucket", "10/hour", burst=LIMIT),
            FixedWindow(store, "window", "10/hour", "first"),
            SlidingLog(store, "log", "10/hour", keys=10),
        ]

        def admitted() -> list[int]:
            return [sum(limiter.allow("key") for _ in range(30)) for limiter in limiters]

        before = admitted()
        Worker(in_time_namespace, 86_400, _refuse_all, limiters).result()
        return before, admitted()


def _refuse_all(limiters: list[Any]) -> None:
    for limiter in limiters:
        for _ in range(2):
            with pytest.raises(ClockMismatch, match="into another time namespace"):
                limiter.allow("key")


@pytest.mark.parametrize(("ahead_s", "state"), [(0, "open"), (86_400, "open"), (-60, "closed")])
@pytest.mark.parametrize("failures", [0, 1, THRESHOLD])
def test_a_redis_store_from_before_a_fork_into_a_time_namespace_decides(
    as_root: None, crew: Crew, ahead_s: int, state: str, failures: int
) -> None:
    """The store of its circuit breaker is its own: another clock there only moves the breaker's times."""
    assert crew.start(_open_breakers, ahead_s, failures).result() == ([state] * 2, ["open"] * 2)


def _open_breakers(ahead_s: int, failures: int) -> tuple[list[str], list[str]]:
    """The breakers' states in another time namespace and then here, where so many calls fail before the fork."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        url = f"redis://127.0.0.1:{reserved.getsockname()[1]}"
        with RedisStore(url, when_unavailable="allow") as allowing, RedisStore(url) as raising:
            limiters = [TokenBucket(store, "api", "10/hour") for store in (allowing, raising)]
            for _ in range(failures):
                _ask_all(limiters)
            there = Worker(in_time_namespace, ahead_s, _states, limiters).result()
            return there, _states(limiters)


def _states(limiters: list[Any]) -> list[str]:
    for _ in range(2 * THRESHOLD):
        _ask_all(limiters)
    return [limiter.store.status().state for limiter in limiters]


def _ask_all(limiters: list[Any]) -> None:
    allowing, raising = limiters
    assert allowing.allow("key")
    with pytest.raises(StoreUnavailable):
        raising.allow("key")


@pytest.mark.parametrize("later_s", [1, 3600, 10**9])
def test_a_segment_from_the_future_is_refused(name: str, later_s: int) -> None:
    """Its time would be before 0, where every request is let in."""
    Store(name, keys=1000).close()
    header = Header.unpack(Path(path_of(name)).read_bytes()[: layout.HEADER.size])
    header = replace(header, epoch_ns=header.epoch_ns + later_s * 10**9)
    descriptor = os.open(path_of(name), os.O_RDWR)
    try:
        os.pwrite(descriptor, header.pack(layout.STATE_READY), 0)
    finally:
        os.close(descriptor)
    with pytest.raises(ClockMismatch, match=r"made \d+ s after now .* Store\.unlink"):
        Store(name, keys=1000)
