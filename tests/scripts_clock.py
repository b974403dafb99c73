"""Scripts that read a time that tests set, in place of the server's time. Keys don't expire by the tests' time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import redis

from forebay.redis import scripts

KEY: Final = "the tests' time"
CLOCK: Final = f"""
local function clock()
  return tonumber(redis.call('GET', "{KEY}"))
end
local function expiry(until_us)
  return string.format('%.0f', (redis.call('TIME')[1] + 3600) * 1000)
end
"""


class ServerClock:
    def __init__(self, client: redis.Redis, start_us: int = 1_000_000_000_000_000) -> None:
        self.client = client
        self.set_us(start_us)

    def set_us(self, now_us: int) -> None:
        self.now_us = now_us
        self.client.set(KEY, now_us)

    def set(self, seconds: float) -> None:
        self.set_us(round(seconds * 1_000_000))

    def advance(self, seconds: float) -> None:
        self.set_us(self.now_us + round(seconds * 1_000_000))

    def now(self) -> float:
        return self.now_us / 1_000_000


@contextlib.contextmanager
def moved_by_tests() -> Iterator[None]:
    source = scripts.source
    scripts.script.cache_clear()
    scripts.source = lambda name: CLOCK if name == "clock" else source(name)
    try:
        yield
    finally:
        scripts.source = source
        scripts.script.cache_clear()
