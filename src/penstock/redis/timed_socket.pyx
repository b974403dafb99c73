"""A socket with bounds for what it receives. Compiled, as every call to Redis passes through it twice."""

cimport cython

import time

from penstock.redis.replies import ReplySizes


@cython.final
cdef class TimedSocket:
    """A socket of one connection, whose handshake and whose every answer have a deadline each, and a size.

    `handshake_until_s` is that of the handshake, by ``time.monotonic``, until ``end_handshake`` is called. The first
    operation of an answer waits for the socket's own timeout, as ever; so in the usual call nothing is computed and no
    timeout is changed. What else a socket can do is its own.

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
        self.answer_until_s = self.handshake_until_s
        self.send(data)

    def recv_into(self, buffer):
        if self.answer_until_s is None:
            self.answer_until_s = time.monotonic() + self.timeout_s
            size = self.receive(buffer)
        else:
            size = self.receive_in_time(self.receive, buffer)
        self.check_size(buffer, size)
        return size

    def recv(self, *arguments):
        """What redis-py without hiredis reads by."""
        if self.answer_until_s is None:
            self.answer_until_s = time.monotonic() + self.timeout_s
        received = self.receive_in_time(self.sock.recv, *arguments)
        self.check_size(received, len(received))
        return received

    def receive_in_time(self, receive, *arguments):
        usual_s = self.sock.gettimeout()
        # Who only looks whether there is something to read doesn't wait.
        if usual_s == 0:
            return receive(*arguments)
        left_s = self.answer_until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not done within {self.timeout_s} s")
        self.sock.settimeout(left_s)
        try:
            return receive(*arguments)
        finally:
            self.sock.settimeout(usual_s)
