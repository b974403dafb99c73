"""A server for limited clients, in its own process. It records each request with its own clock.

The path selects the response: ``/ok``; ``/429/2/1``, a 429 with a ``Retry-After`` of 2 to the first request for that
path, and a 200 to the others; ``/503/date/1``, with a date about two seconds later; ``/busy``, with a pause between the
response's head and its body. The server ignores a request's body, and records its checksum.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from process_helpers import Crew, SharedNumbers, nanoseconds, wait_until

NS: Final = 1_000_000_000
MOST_REQUESTS: Final = 1000
WORDS: Final = 4
"""The words of one request: arrival, status of the response, end of the demanded pause, checksum of the body."""


@dataclass(frozen=True)
class Seen:
    """A request as the server saw it."""

    arrived_ns: int
    status: int
    pause_until_ns: int
    checksum: int


class RecordingServer:
    """A server on 127.0.0.1 that runs until its crew ends."""

    def __init__(self, crew: Crew) -> None:
        self._numbers = SharedNumbers(3 + MOST_REQUESTS * WORDS)
        crew.start(self._run)
        wait_until(lambda: self._numbers[0], "the server listens")
        self.url = f"http://127.0.0.1:{self._numbers[0]}"

    def seen(self) -> list[Seen]:
        """All requests so far, in order of arrival."""
        words = list(self._numbers.values[3 : 3 + self._numbers[1] * WORDS])
        return sorted(
            (Seen(*words[i : i + WORDS]) for i in range(0, len(words), WORDS)), key=lambda seen: seen.arrived_ns
        )

    def most_at_once(self) -> int:
        """The largest number of concurrent requests to ``/busy``."""
        return self._numbers[2]

    def _run(self) -> None:
        numbers = self._numbers
        lock = threading.Lock()
        requests: Counter[str] = Counter()
        busy = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                nonlocal busy
                arrived_ns = nanoseconds()
                body = self.read_body()
                with lock:
                    requests[self.path] += 1
                    status, retry_after, pause_until_ns = self.decide(requests[self.path])
                    at = 3 + numbers[1] * WORDS
                    for i, word in enumerate((arrived_ns, status, pause_until_ns, zlib.crc32(body))):
                        numbers[at + i] = word
                    numbers[1] += 1
                    if self.path == "/busy":
                        busy += 1
                        numbers[2] = max(numbers[2], busy)
                self.send_response(status)
                if retry_after:
                    self.send_header("Retry-After", retry_after)
                self.send_header("Content-Length", "5")
                self.end_headers()
                if self.path == "/busy":
                    time.sleep(0.03)
                    with lock:
                        busy -= 1
                if self.command != "HEAD":
                    self.wfile.write(b"there")

            do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

            def decide(self, count: int) -> tuple[int, str, int]:
                """Status, ``Retry-After``, and the end of that pause: the time is read before the response is sent."""
                if self.path in ("/ok", "/busy"):
                    return 200, "", 0
                status, retry_after, times = self.path.split("/")[1:]
                if count > int(times):
                    return 200, "", 0
                decided_ns = nanoseconds()
                if retry_after == "date":
                    until_s = int(time.time()) + 2
                    return int(status), formatdate(until_s, usegmt=True), decided_ns + int((until_s - time.time()) * NS)
                pause_s = int(retry_after) if retry_after.isdigit() else 0
                return int(status), retry_after, decided_ns + pause_s * NS

            def read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def log_message(self, *arguments: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        with Server(("127.0.0.1", 0), Handler) as server:
            numbers[0] = server.server_port
            server.serve_forever()
