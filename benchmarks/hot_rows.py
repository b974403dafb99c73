"""The hot path's rows of one build, which ``regression.py`` starts: it reads commands and answers each by a line.

``ROW CALLS`` makes so many calls and returns the nanoseconds of CPU time of each. With the library of callgrind.c as
argument, it runs under callgrind, and each command writes a file of counts. It uses the public names alone, as the
build may be an older one.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from timeit import Timer
from typing import Any

from forebay import SlidingWindow, Store, TokenBucket
from forebay.web import Rule, WSGIMiddleware

KEY = "user:42:abcdefg"
BATCH = [f"user:{number}:abcdefg" for number in range(100)]
ENVIRON = {
    "REQUEST_METHOD": "GET",
    "SCRIPT_NAME": "",
    "PATH_INFO": "/",
    "QUERY_STRING": "",
    "REMOTE_ADDR": "203.0.113.7",
}
# Never denied, and its key stays live.
GENEROUS: dict[str, Any] = {"rate": "1000/second", "burst": 2_000_000_000}


def web_decision(store: Store) -> Callable[[dict[str, Any]], None]:
    """A request with one limit and its header fields."""

    def application(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"Hello\n"]

    limited = WSGIMiddleware(application, [Rule(TokenBucket(store, "web", **GENEROUS))])

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        if status != "200 OK" or len(headers) < 2:
            raise AssertionError(f"not the intended response: {status} {headers}")

    def request(environ: dict[str, Any]) -> None:
        answer = limited(dict(environ), start_response)
        for _ in answer:
            pass
        close = getattr(answer, "close", None)
        if close is not None:
            close()

    return request


def rows(store: Store) -> dict[str, Timer]:
    bucket = TokenBucket(store, "generous", **GENEROUS)
    strict = TokenBucket(store, "strict", "1/day")
    window = SlidingWindow(store, "window", "1000000000/day")
    if not strict.allow(KEY) or strict.allow(KEY) or not window.allow(KEY) or not all(bucket.allow_many(BATCH)):
        raise AssertionError("not the intended decisions")
    calls: dict[str, tuple[Callable[..., object], object]] = {
        "allow": (bucket.allow, KEY),
        "denied": (strict.allow, KEY),
        "hit": (bucket.hit, KEY),
        "window": (window.allow, KEY),
        "batch": (bucket.allow_many, BATCH),
        "web": (web_decision(store), ENVIRON),
    }
    return {
        name: Timer("f(k)", "f = function; k = key", time.thread_time, {"function": function, "key": key})
        for name, (function, key) in calls.items()
    }


def main() -> None:
    callgrind = ctypes.CDLL(sys.argv[1]) if len(sys.argv) > 1 else None
    with Store.private(keys=1000) as store:
        timers = rows(store)
        print(*timers, flush=True)
        for line in sys.stdin:
            name, calls = line.split()[0], int(line.split()[1])
            if callgrind is None:
                print(timers[name].timeit(calls) * 1e9 / calls, flush=True)
            else:
                callgrind.begin()
                timers[name].timeit(calls)
                callgrind.end(f"{name}:{calls}".encode())
        total = store.stats().limiters
        if total["generous"].denied or total["web"].denied or total["strict"].allowed != 1:
            raise AssertionError(f"not the intended decisions: {total}")


if __name__ == "__main__":
    main()
