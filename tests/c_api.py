"""The C API as a language without C headers sees it: the structs of forebay.h, declared again for ctypes.

A call releases the GIL, as a call from native code without the GIL does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Final

import pytest

from forebay import Decision

OK: Final = 0
DENIED: Final = 0
NOT_HELD: Final = 0
ALLOWED: Final = 1
HELD: Final = 1
INVALID_ARGUMENT: Final = -1
COST_EXCEEDS_LIMIT: Final = -2
CLOSED: Final = -3
FORKED: Final = -4
NOT_A_LIMITER: Final = -5
NEEDS_PYTHON: Final = -6
INVALID_RATE: Final = -7
NO_MEMORY: Final = -8
FAILED: Final = -9
FINALIZING: Final = -10
WRONG_LIMITER: Final = -11

TEXT, BYTES, INT, LARGE_INT, PARTS = range(5)
BOOK: Final = 1
MOST_LIMITS: Final = 16


class Request(ctypes.Structure):
    _fields_ = (
        ("key", c_char_p),
        ("key_size", c_uint64),
        ("hash", c_uint64),
        ("cost", c_uint64),
        ("rate", c_void_p),
        ("max_delay_ns", c_uint64),
        ("key_kind", c_uint32),
        ("flags", c_uint32),
    )


class Result(ctypes.Structure):
    _fields_ = (
        ("limit", c_uint64),
        ("remaining", c_uint64),
        ("retry_after_ns", c_uint64),
        ("reset_after_ns", c_uint64),
        ("delay_ns", c_uint64),
        ("charge", c_uint64),
        ("allowed", c_uint32),
        ("full", c_uint32),
        ("binding", c_uint32),
        ("reserved", c_uint32),
    )


class Lease(ctypes.Structure):
    _fields_ = (
        ("maker", c_uint64),
        ("key", c_uint64),
        ("cell", c_uint64),
        ("slot", c_uint64),
        ("permits", c_uint64),
        ("owner", c_uint64),
        ("end_ns", c_uint64),
        ("full", c_uint32),
        ("available", c_uint32),
    )


def _function(result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)


class Api(ctypes.Structure):
    _fields_ = (
        ("version", c_uint32),
        ("reserved", c_uint32),
        ("size", c_uint64),
        ("message", _function(c_char_p, c_int32)),
        ("limiter_open", ctypes.PYFUNCTYPE(c_int32, ctypes.py_object, POINTER(c_void_p))),
        ("limiter_close", _function(None, c_void_p)),
        ("attach", _function(c_int32, c_void_p, POINTER(c_void_p))),
        ("detach", _function(None, c_void_p)),
        ("rate_open", _function(c_int32, c_void_p, c_uint64, c_uint64, c_uint64, POINTER(c_void_p))),
        ("rate_close", _function(None, c_void_p)),
        ("maintain", _function(c_int32, c_void_p)),
        ("hash", _function(c_int32, c_void_p, c_uint32, c_char_p, c_size_t, POINTER(c_uint64))),
        ("allow", _function(c_int32, c_void_p, c_char_p, c_size_t)),
        ("allow_hash", _function(c_int32, c_void_p, c_uint64)),
        ("tick", _function(c_int32, c_void_p)),
        ("allow_at_tick", _function(c_int32, c_void_p, c_char_p, c_size_t)),
        ("decide", _function(c_int32, c_void_p, POINTER(Request), POINTER(Result))),
        ("peek", _function(c_int32, c_void_p, POINTER(Request), POINTER(Result))),
        ("refund", _function(c_int32, c_void_p, POINTER(Request), c_uint64)),
        ("reset", _function(c_int32, c_void_p, POINTER(Request))),
        ("decide_many", _function(c_int32, c_void_p, POINTER(Request), c_size_t, POINTER(c_uint8))),
        (
            "decide_all",
            _function(c_int32, POINTER(c_void_p), POINTER(Request), c_size_t, POINTER(Result), POINTER(Result)),
        ),
        ("acquire", _function(c_int32, c_void_p, POINTER(Request), POINTER(Lease))),
        ("renew", _function(c_int32, c_void_p, POINTER(Lease))),
        ("release", _function(c_int32, c_void_p, POINTER(Lease))),
    )


def table() -> Api:
    """The table, as ``PyCapsule_Import`` finds it."""
    pythonapi = ctypes.pythonapi
    pythonapi.PyCapsule_Import.restype = c_void_p
    pythonapi.PyCapsule_Import.argtypes = (c_char_p, ctypes.c_int)
    address = pythonapi.PyCapsule_Import(b"forebay.core._C_API", 0)
    return Api.from_address(address)


API: Final = table()


class CallError(Exception):
    """A negative status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}: {API.message(status).decode()}")
        self.status = status


def checked(status: int) -> int:
    if status < 0:
        raise CallError(status)
    return status


class Handle:
    """A limiter's handle, with the threads and rates that were made from it. Closes all at its end."""

    def __init__(self, limiter: object) -> None:
        self.limiter = limiter
        self.pointer = c_void_p()
        self.threads: list[Thread] = []
        self.rates: list[c_void_p] = []
        checked(API.limiter_open(limiter, self.pointer))

    def attach(self) -> Thread:
        thread = Thread(self)
        self.threads.append(thread)
        return thread

    def rate(self, limit: int, period_ns: int, burst: int = 0) -> c_void_p:
        rate = c_void_p()
        checked(API.rate_open(self.pointer, limit, period_ns, burst, rate))
        self.rates.append(rate)
        return rate

    def hash(self, key: bytes, kind: int = TEXT) -> int:
        value = c_uint64()
        checked(API.hash(self.pointer, kind, key, len(key), value))
        return value.value

    def maintain(self) -> int:
        return int(API.maintain(self.pointer))

    def close(self) -> None:
        API.limiter_close(self.pointer)
        self.pointer = c_void_p()
        for rate in self.rates:
            API.rate_close(rate)
        self.rates.clear()
        for thread in self.threads:
            thread.detach()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def request_of(
    key: bytes | None = None,
    cost: int = 1,
    *,
    kind: int = TEXT,
    key_hash: int = 0,
    rate: c_void_p | None = None,
    max_delay_ns: int = 0,
    flags: int = 0,
) -> Request:
    return Request(key, 0 if key is None else len(key), key_hash, cost, rate, max_delay_ns, kind, flags)


class Thread:
    def __init__(self, handle: Handle) -> None:
        self.pointer = c_void_p()
        checked(API.attach(handle.pointer, self.pointer))

    def detach(self) -> None:
        API.detach(self.pointer)
        self.pointer = c_void_p()

    def allow(self, key: bytes) -> int:
        return int(API.allow(self.pointer, key, len(key)))

    def allow_hash(self, value: int) -> int:
        return int(API.allow_hash(self.pointer, value))

    def tick(self) -> int:
        return int(API.tick(self.pointer))

    def allow_at_tick(self, key: bytes) -> int:
        return int(API.allow_at_tick(self.pointer, key, len(key)))

    def decide(self, key: bytes | None = None, cost: int = 1, **fields: Any) -> Result:
        result = Result()
        checked(API.decide(self.pointer, request_of(key, cost, **fields), result))
        return result

    def peek(self, key: bytes | None = None, cost: int = 1, **fields: Any) -> Result:
        result = Result()
        checked(API.peek(self.pointer, request_of(key, cost, **fields), result))
        return result

    def refund(self, key: bytes, cost: int = 1, charge: int = 0, **fields: Any) -> None:
        checked(API.refund(self.pointer, request_of(key, cost, **fields), charge))

    def decide_many(self, requests: list[Request]) -> list[int]:
        allowed = (c_uint8 * len(requests))()
        checked(API.decide_many(self.pointer, (Request * len(requests))(*requests), len(requests), allowed))
        return list(allowed)

    def reset(self, key: bytes) -> None:
        checked(API.reset(self.pointer, request_of(key)))

    def acquire(self, key: bytes, cost: int = 1, **fields: Any) -> tuple[int, Lease]:
        lease = Lease()
        return checked(API.acquire(self.pointer, request_of(key, cost, **fields), lease)), lease

    def renew(self, lease: Lease) -> int:
        return int(API.renew(self.pointer, lease))

    def release(self, lease: Lease) -> int:
        return int(API.release(self.pointer, lease))


def decide_all(threads: Sequence[Thread], requests: Sequence[Request]) -> tuple[int, Result, list[Result]]:
    """The status, the binding result, and each limit's."""
    binding, each = Result(), (Result * len(requests))()
    status = API.decide_all(array_of(threads), (Request * len(requests))(*requests), len(requests), binding, each)
    return checked(status), binding, list(each)


def array_of(threads: Sequence[Thread]) -> Any:
    return (c_void_p * len(threads))(*[thread.pointer.value for thread in threads])


# For tests


def numbers(result: Result) -> tuple[Any, ...]:
    return (
        bool(result.allowed), bool(result.full), result.limit, result.remaining, result.retry_after_ns,
        result.reset_after_ns,
    )  # fmt: skip


def numbers_of(decision: Decision) -> tuple[Any, ...]:
    """The same of Python's decision."""
    return (
        decision.allowed, decision.full, decision.limit, decision.remaining, decision.retry_after_ns,
        decision.reset_after_ns,
    )  # fmt: skip


def status_of(call: Callable[[], object]) -> int:
    """The negative status that the call ends with."""
    with pytest.raises(CallError) as caught:
        call()
    return caught.value.status
