"""A socket with a deadline and a size limit for each reply. Compiled: every call to Redis passes through it twice."""

cimport cython

import math
import time
from contextvars import ContextVar

from forebay.redis.transport.replies import ReplySizes

# The current call's deadline, by ``time.monotonic``. Each call sets it, so what an interrupted call leaves behind is
# harmless.
UNTIL_S = ContextVar("forebay.redis.until_s", default=math.inf)

cdef object until_of_call = UNTIL_S.get
cdef object monotonic = time.monotonic

# A call that has this fraction of its timeout left when it sends waits for the socket's own timeout.
cdef double MOST_OF_IT = 0.95


@cython.final
cdef class TimedSocket:
    """The socket of one connection. The handshake and each reply have a deadline and a size limit.

    `handshake_until_s` is the handshake's deadline, by ``time.monotonic``. It counts until ``end_handshake`` is called.
    A reply's deadline is the socket's own timeout, and at the latest ``UNTIL_S``. If most of the timeout is left when
    the call is sent, the first receive of its reply waits for the socket's own timeout; so the usual call changes no
    timeout. Every other attribute is the wrapped socket's.

    *Threads*: one at a time, as its connection.
    """

    cdef object sock, receive, send, timeout_s, handshake_until_s, answer_until_s, check_size
    # redis-py reads these before each call.
    cdef readonly object fileno, pending

    def __init__(self, sock, timeout_s, handshake_until_s, *, of_cluster=False):
        self.sock, self.timeout_s, self.handshake_until_s = sock, timeout_s, handshake_until_s
        self.receive, self.send, self.fileno = sock.recv_into, sock.sendall, sock.fileno
        self.pending = getattr(sock, "pending", int)
        self.check_size = ReplySizes(of_cluster=of_cluster).take

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def end_handshake(self):
        self.handshake_until_s = None

    def sendall(self, data):
        cdef double until_s
        self.answer_until_s = self.handshake_until_s
        if self.answer_until_s is None:
            until_s = until_of_call()
            if until_s - <double>monotonic() < MOST_OF_IT * <double>self.timeout_s:
                self.answer_until_s = until_s
        self.send(data)

    def recv_into(self, buffer):
        if self.answer_until_s is None:
            self.answer_until_s = monotonic() + self.timeout_s
            size = self.receive(buffer)
        else:
            size = self.receive_in_time(self.receive, buffer)
        self.check_size(buffer, size)
        return size

    def recv(self, *arguments):
        """For redis-py without hiredis, which reads by this method."""
        if self.answer_until_s is None:
            self.answer_until_s = monotonic() + self.timeout_s
        received = self.receive_in_time(self.sock.recv, *arguments)
        self.check_size(received, len(received))
        return received

    def receive_in_time(self, receive, *arguments):
        usual_s = self.sock.gettimeout()
        # A caller that polls for readable data doesn't wait.
        if usual_s == 0:
            return receive(*arguments)
        left_s = self.answer_until_s - monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not done within {self.timeout_s} s")
        self.sock.settimeout(left_s)
        try:
            return receive(*arguments)
        finally:
            self.sock.settimeout(usual_s)
