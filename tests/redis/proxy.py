"""A TCP proxy for a test server that delays, drips and cuts, and counts connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class Proxy:
    """Connections to `port` are passed on to `server_port`. A changed attribute holds at once, also for open
    connections.

    ``drip_s``: pause before each byte of a reply; None: whole replies at once. ``is_silent``: nothing is passed on.
    ``delay_s``: pause before each answer. ``instead``: what is sent instead of each answer.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.drip_s: float | None = None
        self.delay_s = 0.0
        self.is_silent = False
        self.instead: bytes | None = None
        self.connection_count = 0
        self.most_connections = 0
        """The most that were there at one time since `cut`."""
        self._sockets: set[socket.socket] = set()
        self.open_count = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [self._started(self._accept)]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _started(self, work: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port))
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
                self.connection_count += 1
                self.open_count += 1
                self.most_connections = max(self.most_connections, self.open_count)
            self._threads += [
                self._started(self._pass_on, client, server, False),
                self._started(self._pass_on, server, client, True),
            ]

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_silent and not self._is_closed:
                    time.sleep(0.005)
                if is_answer and self.delay_s:
                    time.sleep(self.delay_s)
                if is_answer and self.instead is not None:
                    data = self.instead
                if is_answer and self.drip_s is not None:
                    for byte in data:
                        time.sleep(self.drip_s)
                        target.sendall(bytes([byte]))
                else:
                    target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if is_answer:
            with self._lock:
                self.open_count -= 1
                self._sockets -= {source, target}
            source.close()
            target.close()

    def cut(self) -> None:
        """End every connection."""
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.most_connections = 0

    def close(self) -> None:
        self._is_closed = True
        # Wakes the thread that waits in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def proxy(server_port: int) -> Iterator[Proxy]:
    opened = Proxy(server_port)
    try:
        yield opened
    finally:
        opened.close()
