"""Exceptions from outside, such as a signal handler raises, in the middle of a call."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay import FixedWindow
from forebay.redis import RedisStore


class SoftTimeLimit(BaseException):
    """The exception that a task queue raises in a task that takes too long."""


def interrupted(call: Callable[[], object], at_line: int) -> bool:
    """Run `call` until that line of Python, of forebay's and redis-py's code. Whether it came so far.

    The garbage collector is off meanwhile: an exception in a finalizer that it calls does not reach the call.
    """
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        is_ours = frame.f_globals["__name__"].startswith(("forebay.", "redis."))
        if event == "line" and is_ours and next(lines) == at_line:
            raise SoftTimeLimit
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except SoftTimeLimit:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def by_url(url: str) -> RedisStore:
    # A traced call is slow.
    return RedisStore(url, timeout=30)


def by_client(url: str) -> RedisStore:
    client = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=30, retry=Retry(NoBackoff(), 0))
    return RedisStore(client)


@pytest.mark.parametrize("make", [by_url, by_client])
@pytest.mark.parametrize("how", ["allow", "allow_many"])
def test_no_call_gets_another_reply_wherever_a_call_is_interrupted(
    server: Any, make: Callable[[str], RedisStore], how: str
) -> None:
    with make(server.url) as store:
        full, free = FixedWindow(store, "full", "1/year"), FixedWindow(store, "free", "1000000/year")
        assert full.allow("key")
        calls = {"allow": lambda: free.allow("key"), "allow_many": lambda: free.allow_many(["key"] * 3)}
        calls[how]()
        for line in itertools.count():
            was_interrupted = interrupted(calls[how], line)
            assert not full.allow("key")
            assert full.allow_many(["key"] * 2) == [False] * 2
            if not was_interrupted:
                break
        assert line > 20
