"""The partner's server: it serves 10 requests a second, and refuses further ones with a pause of a second.

It counts all requests together, as most do for one API key. Without forebay: it isn't ours.
"""

import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LIMIT, PERIOD_S = 10, 1.0


class Partner(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.arrived: deque[float] = deque()
        self.served = self.refused = 0
        self.lock = threading.Lock()

    def admit(self) -> bool:
        with self.lock:
            now = time.monotonic()
            while self.arrived and self.arrived[0] <= now - PERIOD_S:
                self.arrived.popleft()
            self.arrived.append(now)
            if len(self.arrived) > LIMIT:
                self.refused += 1
                return False
            self.served += 1
            return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Partner

    def do_GET(self) -> None:
        if self.server.admit():
            self.send_response(200)
        else:
            self.send_response(429)
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...
