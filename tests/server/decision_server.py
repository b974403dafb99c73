"""The decision server for tests: a process of ``forebay serve``, and plans in this process beside Python's gates."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote_to_bytes

import forebay_server

from forebay.rules import load_rules
from forebay.serving.plan import plan_of
from forebay.web.fastpath import Passage
from forebay.web.gate import Gate
from forebay.web.native_requests import WSGIRequest
from forebay.web.rules import Denial

Answered = tuple[int, list[tuple[str, str]], bytes]
"""A status, header fields and a body."""

CLIENT = 'client = { trusted_proxies = ["127.0.0.1", "10.0.0.0/8", "unix"], header = "X-Forwarded-For" }\n'
HEAD = f"version = 1\n{CLIENT}"
TIER = "X-Tier"
MILD = """
[limits.api]
algorithm = "fixed-window"
rate = "1000000/hour"
[[rules]]
name = "api"
limits = ["api"]
"""


class DecisionServer:
    """``forebay serve`` with a rule file. Ends with the block."""

    def __init__(
        self,
        file: Path,
        *options: str,
        listen: Sequence[str] = ("127.0.0.1:0",),
        preexec: Callable[[], None] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "forebay", "serve", str(file), "--threads", "2", *options]
        for address in listen:
            command += ["--listen", address]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=preexec,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in listen]
        assert all(line.startswith("listening on ") for line in lines), self.process.communicate()
        self.addresses = [line.removeprefix("listening on ").rstrip("\n") for line in lines]

    @property
    def port(self) -> int:
        return int(self.addresses[0].rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(
        self, path: str, fields: Mapping[str, str] | None = None, method: str = "GET", body: bytes | None = None
    ) -> Answered:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(fields or {}))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def ask(self, call: str, fields: Mapping[str, str] | None = None, **question: Any) -> Any:
        """A call of the JSON API."""
        fields = {"Content-Type": "application/json", **(fields or {})}
        status, _, body = self.get(f"/v1/{call}", fields, "POST", json.dumps(question).encode())
        return {"http": status, **json.loads(body)}

    def stop(self) -> int:
        """End it by SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> DecisionServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.communicate()


class Both:
    """The rules of one file, decided by the server's code and by Python's gate, each in a store of its own."""

    def __init__(self, file: Path, text: str, served: Any, own: Any, field: str = "X-Forwarded-For") -> None:
        file.write_text(HEAD.replace("X-Forwarded-For", field) + text)
        self.served, self.own = served, own
        self.plan: Any = plan_of(file, served, tier_field=TIER)
        self.server = self.plan.compiled(forebay_server)
        self.gate = Gate(load_rules(file, store=own, tier=lambda request: request.header(TIER) or ""))

    def ask_server(self, method: str, target: bytes, fields: Sequence[tuple[str, str]], peer: str | None) -> Answered:
        encoded = [(name, value.encode("latin-1")) for name, value in fields]
        return _steady(self.server.decide(method, target, encoded, peer))

    def ask_python(self, method: str, target: bytes, fields: Sequence[tuple[str, str]], peer: str | None) -> Answered:
        request = WSGIRequest(environ_of(method, target, fields, peer))
        passage = self.gate.enter(request)
        if passage is None:
            return 200, [], b""
        if isinstance(passage, Denial):
            answer = self.gate.answer(request, passage)
            return _steady((answer.status, list(answer.headers), answer.body))
        assert isinstance(passage, Passage)
        return 200, list(passage.fields), b""


def _steady(answered: Answered) -> Answered:
    """The same without seconds until a year far off, which the wall clock counts down."""
    status, fields, body = answered
    return status, [(name, "years" if len(value) > 9 and value.isdecimal() else value) for name, value in fields], body


def environ_of(method: str, target: bytes, fields: Sequence[tuple[str, str]], peer: str | None) -> dict[str, Any]:
    """The request as a WSGI server makes it."""
    path, _, query = target.partition(b"?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "wsgi.input": io.BytesIO(),
    }
    if peer is not None:
        environ["REMOTE_ADDR"] = peer
    for name, value in fields:
        variable = "HTTP_" + name.upper().replace("-", "_")
        environ[variable] = f"{environ[variable]},{value}" if variable in environ else value
    return environ
