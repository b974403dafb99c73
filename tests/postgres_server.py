"""A private PostgreSQL: on the loopback, on a free port, ended after the test."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis_server import free_port, until

USER = "tester"
# It refuses to run as root. Debian's package has made its user.
OWNER = "postgres"


@dataclass(frozen=True)
class PostgresServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/postgres"


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            options |= {"user": OWNER, "group": owner.pw_gid, "extra_groups": []}
        data = f"{folder}/data"
        initdb = [_program("initdb"), "-D", data, "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, **options)
        for _ in range(3):
            server = stack.enter_context(_begun(data, free_port(), options))
            # It ends at once if another process has taken the port meanwhile.
            if server.process.poll() is None:
                break
        assert server.process.poll() is None, "postgres has ended"
        yield server


@contextlib.contextmanager
def _begun(data: str, port: int, options: dict[str, Any]) -> Iterator[PostgresServer]:
    command = [_program("postgres"), "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", "", "-F"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        until(lambda: process.poll() is not None or _listens(port), f"postgres listens on port {port}")
        yield PostgresServer(process, port)
    finally:
        # Fast: it ends its sessions.
        process.send_signal(signal.SIGINT)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _program(name: str) -> str:
    found = shutil.which(name) or next((str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    assert found is not None, f"{name} is missing: install PostgreSQL"
    return found
