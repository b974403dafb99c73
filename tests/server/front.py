"""A proxy in front of an application, as a process."""

from __future__ import annotations

import http.client
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

Answered = tuple[int, dict[str, str], bytes]
"""A status, header fields by their names in small letters, and a body."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Front:
    """The process of a proxy, which listens to `port` of this host. Ends with the block.

    `log`: the file of its errors. `writes_log`: whether it writes that file itself. `source`: the address of its
    clients.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path, *, writes_log: bool, source: str = "127.0.0.1"
    ) -> None:
        self.port, self._source = port, source
        with open(log, "a") as output:
            written = None if writes_log else output
            self.process = subprocess.Popen(command, stdout=written, stderr=written)
        while not self._accepts():
            assert self.process.poll() is None, log.read_text()

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def get(self, path: str, fields: Mapping[str, str] | None = None, method: str = "GET") -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=(self._source, 0))
        try:
            connection.request(method, path, headers=dict(fields or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
