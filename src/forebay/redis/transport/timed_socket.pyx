"""A socket with bounds for what it receives. Compiled, as every call to Redis passes through it twice."""

cimport cython

import math
import time
from contextvars import ContextVar

from forebay.redis.transport.replies import ReplySizes

# Of the call at hand, by ``time.monotonic``. Each call sets it, so what an interrupt leaves behind harms none.
UNTIL_S = ContextVar("forebay.redis.until_s", default=math.inf)

cdef object until_of_call = UNTIL_S.get
cdef object monotonic = time.monotonic

# What a call has done before it sends takes no time worth counting.
cdef double MOST_OF_IT = 0.95


@cython.final
cdef class TimedSocket:
    """A socket of one connection, whose handshake and whose every answer have a deadline each, and a size.

    `handshake_until_s` is that of the handshake, by ``time.monotonic``, until ``end_handshake`` is called. An answer
    has the socket's own timeout, and no longer than until ``UNTIL_S``. If most of the timeout is left then, the first
    operation of an answer waits for the socket's own, as ever; so in the usual call no timeout is changed. What else a
    socket can do is its own.

    *Threads*: one at a time, as its connection.
    """

    cdef object sock, receive, send, timeout_s, handshake_until_s, answer_until_s, check_size
    # redis-py asks for these before each call.
    cdef readonly object fileno, pending

    def __init__(self, sock, timeout_s, handshake_until_s):
        self.sock, self.timeout_s, self.handshake_until_s = sock, timeout_s, handshake_until_s
        self.receive, self.send, self.fileno = sock.recv_into, sock.sendall, sock.fileno
        self.pending = getattr(sock, "pending", int)
        self.check_size = ReplySizes().take

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
        """What redis-py without hiredis reads by."""
        if self.answer_until_s is None:
            self.answer_until_s = monotonic() + self.timeout_s
        received = self.receive_in_time(self.sock.recv, *arguments)
        self.check_size(received, len(received))
        return received

    def receive_in_time(self, receive, *arguments):
        usual_s = self.sock.gettimeout()
        # Who only looks whether there is something to read doesn't wait.
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
