"""A Redis in this process, at a time that is set: it runs the Lua scripts of limiters. For the model of fleets.

It knows the commands that the scripts of fixed windows call, strict, leased and synced. tests/redis/test_scale_model.py
compares its replies with those of a redis-server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lupa.lua51 import LuaRuntime

from forebay.redis.commands import Command

__all__ = ["LuaRedis", "size_of"]

OK = b"OK"


class LuaRedis:
    """*Threads*: unsafe."""

    def __init__(self) -> None:
        self.now_us = 0
        self._values: dict[bytes, Any] = {}
        self._ends_ms: dict[bytes, float] = {}
        self._scripts: dict[str, Any] = {}
        self._lua = LuaRuntime(encoding=None, unpack_returned_tuples=False)
        self._lua.globals()[b"redis"] = self._lua.table_from({b"call": self._call, b"pcall": self._call})
        self._commands: dict[bytes, Callable[..., Any]] = {
            b"TIME": self._time,
            b"GET": self._value,
            b"SET": self._set,
            b"UNLINK": self._unlink,
            b"PEXPIREAT": self._pexpireat,
            b"HMGET": lambda key, *names: [self._hash(key).get(name, False) for name in names],
            b"HSET": lambda key, *pairs: self._hash(key).update(zip(pairs[::2], pairs[1::2], strict=True)),
            b"HLEN": lambda key: len(self._hash(key)),
            b"ZADD": self._zadd,
            b"ZREM": lambda key, member: self._hash(key).pop(member, None),
            b"ZCARD": lambda key: len(self._hash(key)),
            b"ZSCORE": lambda key, member: text_of(self._hash(key).get(member)),
            b"ZRANGE": self._zrange,
        }

    def run(self, command: Command[Any]) -> list[Any]:
        """The reply to a command."""
        script = self._scripts.get(command.script.sha)
        if script is None:
            text = command.script.text.encode()
            script = self._scripts[command.script.sha] = self._lua.execute(
                b"return function(KEYS, ARGV)\n" + text + b"\nend"
            )
        arguments = [part if isinstance(part, bytes) else part.encode() for part in command.arguments]
        reply = script(self._lua.table_from(command.keys), self._lua.table_from(arguments))
        return [part if isinstance(part, bytes) else int(part) for part in reply.values()]

    def has(self, key: bytes) -> bool:
        return key in self._values

    def _call(self, name: bytes, *arguments: Any) -> Any:
        reply = self._commands[name](*arguments)
        return self._lua.table_from(reply) if isinstance(reply, list) else reply

    def _time(self) -> list[bytes]:
        return [b"%d" % part for part in divmod(self.now_us, 1_000_000)]

    def _value(self, key: bytes) -> Any:
        if self._ends_ms.get(key, self.now_us) * 1000 < self.now_us:
            self._unlink(key)
        return self._values.get(key, False)

    def _hash(self, key: bytes) -> dict[bytes, Any]:
        """A hash or a sorted set, which is one of members and scores. A read of none leaves an empty one behind."""
        value: dict[bytes, Any] = self._value(key) or self._values.setdefault(key, {})
        return value

    def _set(self, key: bytes, value: bytes, _: bytes, end_ms: bytes) -> bytes:
        self._values[key] = value
        return self._pexpireat(key, end_ms)

    def _pexpireat(self, key: bytes, end_ms: bytes) -> bytes:
        self._ends_ms[key] = int(end_ms)
        return OK

    def _unlink(self, key: bytes) -> bytes:
        self._values.pop(key, None)
        self._ends_ms.pop(key, None)
        return OK

    def _zadd(self, key: bytes, *pairs: bytes) -> bytes:
        self._hash(key).update(zip(pairs[1::2], map(int, pairs[::2]), strict=True))
        return OK

    def _zrange(self, key: bytes, first: float, last: float, *_: bytes) -> list[bytes]:
        """With scores."""
        ordered = sorted((score, member) for member, score in self._hash(key).items())
        end = len(ordered) if last == -1 else int(last) + 1
        return [part for score, member in ordered[int(first) : end] for part in (member, b"%d" % score)]


def text_of(score: int | None) -> bytes | bool:
    return score is not None and b"%d" % score


def size_of(value: Any) -> int:
    """The bytes of a call or a reply on the wire."""
    if type(value) is int:
        return len(f":{value}\r\n")
    if type(value) in (bytes, str):
        return len(f"${len(value)}\r\n") + len(value) + 2
    return len(f"*{len(value)}\r\n") + sum(map(size_of, value))
