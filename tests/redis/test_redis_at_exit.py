"""Calls while the interpreter ends, when not even clients can be imported any more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from redis_server import RedisServer

CODE = """
import atexit, sys
from forebay import Store, StoreUnavailable, TokenBucket
from forebay.redis import LeasedStore, RedisStore

url, over, by, policy = sys.argv[1:]
redis_store = RedisStore(url, timeout=30, when_unavailable=policy)
store = LeasedStore(redis_store, Store.private(keys=100)) if over == "leased" else redis_store
limiter = TokenBucket(store, "l", "100/hour")

def ask():
    try:
        return [limiter.allow("k")] if by == "allow" else limiter.allow_many(["k", "k"])
    except StoreUnavailable as error:
        return str(error)

class Last:
    def __del__(self):
        print(ask(), flush=True)

sys.modules["last"] = Last()
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
    return ended.stdout.strip()


@pytest.mark.parametrize("over", ["strict", "leased"])
@pytest.mark.parametrize("by", ["allow", "allow_many"])
@pytest.mark.parametrize("policy", ["deny", "allow"])
def test_first_use_in_a_finalizer(server: RedisServer, over: str, by: str, policy: str) -> None:
    said = run(CODE, server.url, over, by, policy)
    if policy == "allow":
        assert said in ("[True]", "[True, True]")
    else:
        assert "the interpreter is ending" in said


def test_an_atexit_function_still_decides(server: RedisServer) -> None:
    code = CODE.replace('sys.modules["last"] = Last()', "atexit.register(lambda: print(ask()))")
    for over in ("strict", "leased"):
        assert run(code, server.url, over, "allow", "deny") == "[True]"
