"""The decision server of forebay, in Rust. ``forebay serve`` starts it; docs/server.md describes it."""

import os
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

class Plan:
    """The rules of a file over their limiters, as ``forebay.serving.plan`` writes them.

    Raises ``ValueError`` for a limiter that decides in Python, and for a document that this version can't read, and
    ``ImportError`` if forebay is of another release. Immutable. *Threads*: safe. *Fork*: the child makes its own.
    """

    def __new__(cls, document: str, limiters: Sequence[object]) -> Plan: ...
    def decide(
        self, method: str, uri: bytes, headers: Sequence[tuple[str, bytes]], peer: str | None
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Charge a request that a peer asks about: the status, the header fields and the body for its client.

        200: it is admitted. `uri`: as the client sent it. `peer`: an address; None is a peer behind a Unix socket.
        Raises ``ValueError``. O(rules).
        """

class Gate:
    """The rules of a file whose limits Python charges, as ``forebay.serving.charging`` does.

    `document` is as that of a plan, and `limiters` are those of its first limits. The methods of `charging` are called
    in so many threads. `books`: whether the limits can book ahead. A question that isn't answered within `within_s` is
    denied by 503. `takes_s`: how long a method takes at most; a question with less time left isn't asked. Raises as
    ``Plan``. *Threads*: safe. *Fork*: the child makes its own.
    """

    def __new__(
        cls,
        document: str,
        limiters: Sequence[object],
        charging: object,
        *,
        books: bool,
        threads: int,
        within_s: float,
        takes_s: float,
    ) -> Gate: ...
    def decide(
        self, method: str, uri: bytes, headers: Sequence[tuple[str, bytes]], peer: str | None
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """As ``Plan.decide``. Rules in the shadow are charged later."""

class Server:
    """A server that listens from now on, and answers while `run` runs.

    `listen` are addresses such as ``"127.0.0.1:7464"`` or ``"unix:/run/forebay.sock"``. `idle_s`: a connection without
    a whole request for so long is closed. `drain_s`: requests that are under way at the end have so long. `token`: for
    calls of the JSON API that change state; None admits peers of this host and the trusted proxies. `proxies`: whether
    they may ask. `live`: for rules that change, a mapping of the segment, where it has the number of the version in
    force, the number that the plan is for, and a function that returns the number and the plan of the version in force;
    None instead of one that can't be used. `tls`: files of a certificate and its key, for connections over TCP; read
    again at SIGHUP. Raises ``OSError``.
    """

    def __new__(
        cls,
        rules: Plan | Gate,
        listen: Sequence[str],
        *,
        threads: int,
        connections: int,
        idle_s: float,
        drain_s: float,
        reuse_port: bool,
        token: str | None,
        proxies: bool,
        live: tuple[Buffer, int, int, Callable[[], tuple[int, Plan | Gate | None]]] | None,
        tls: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None,
    ) -> Server: ...
    @property
    def addresses(self) -> list[str]:
        """Where it listens: with the port that the host chose for port 0."""

    def run(self, ready: Callable[[], object]) -> float:
        """Answer until SIGTERM or SIGINT, without the GIL. Raises ``OSError``, also for an exception of `ready`.

        `ready` is called once these signals end the server in this way. Returns what is left of `drain_s`, in seconds.
        """

def readings(paths: Sequence[str]) -> list[str]:
    """As ``forebay.web.native_requests.readings``: every path that a router may read in these; none if any."""

def target_readings(target: bytes) -> tuple[list[str], list[str], list[str]]:
    """The readings of a request's target: all, of the path as it was sent, and of the decoded path."""

def layouts() -> tuple[list[tuple[str, int, list[tuple[str, int]]]], list[tuple[str, int]]]:
    """The structs of forebay.h as they were compiled, with sizes and offsets, and its constants."""
