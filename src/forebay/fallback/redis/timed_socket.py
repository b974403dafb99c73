"""A socket with a deadline and a size limit for each reply. See redis/transport/timed_socket.pyx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from forebay.fallback.redis.replies import ReplySizes

__all__ = ["UNTIL_S", "TimedSocket"]

# The current call's deadline, by ``time.monotonic``.
UNTIL_S: Final[ContextVar[float]] = ContextVar("forebay.redis.until_s", default=math.inf)
# A call that has this fraction of its timeout left when it sends waits for the socket's own timeout.
MOST_OF_IT: Final = 0.95

_monotonic: Final = time.monotonic


class TimedSocket:
    """The socket of one connection. The handshake and each reply have a deadline and a size limit.

    `handshake_until_s` is the handshake's deadline, by ``time.monotonic``. It counts until ``end_handshake`` is called.
    A reply's deadline is the socket's own timeout, and at the latest ``UNTIL_S``. Every other attribute is the wrapped
    socket's.

    *Threads*: one at a time, as its connection.
    """

    def __init__(self, sock: Any, timeout_s: float, handshake_until_s: float, *, of_cluster: bool = False) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self._handshake_until_s: float | None = handshake_until_s
        self._answer_until_s: float | None = None
        self.fileno: Callable[[], int] = sock.fileno
        self.pending: Callable[[], int] = getattr(sock, "pending", int)
        self._check_size = ReplySizes(of_cluster=of_cluster).take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def end_handshake(self) -> None:
        self._handshake_until_s = None

    def sendall(self, data: Any) -> None:
        self._answer_until_s = self._handshake_until_s
        if self._answer_until_s is None:
            until_s = UNTIL_S.get()
            if until_s - _monotonic() < MOST_OF_IT * self._timeout_s:
                self._answer_until_s = until_s
        self._sock.sendall(data)

    def recv_into(self, buffer: Any) -> int:
        size: int
        if self._answer_until_s is None:
            self._answer_until_s = _monotonic() + self._timeout_s
            size = self._sock.recv_into(buffer)
        else:
            size = self.receive_in_time(self._sock.recv_into, buffer)
        self._check_size(buffer, size)
        return size

    def recv(self, *arguments: Any) -> bytes:
        """For redis-py without hiredis, which reads by this method."""
        if self._answer_until_s is None:
            self._answer_until_s = _monotonic() + self._timeout_s
        received: bytes = self.receive_in_time(self._sock.recv, *arguments)
        self._check_size(received, len(received))
        return received

    def receive_in_time(self, receive: Callable[..., Any], *arguments: Any) -> Any:
        usual_s = self._sock.gettimeout()
        # A caller that polls for readable data doesn't wait.
        if usual_s == 0:
            return receive(*arguments)
        assert self._answer_until_s is not None  # the callers have set it
        left_s = self._answer_until_s - _monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not done within {self._timeout_s} s")
        self._sock.settimeout(left_s)
        try:
            return receive(*arguments)
        finally:
            self._sock.settimeout(usual_s)
