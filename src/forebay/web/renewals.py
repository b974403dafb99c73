"""Leases that are renewed while the thread of a request waits, reads its body or sends: under WSGI, without a timer.

The thread waits in slices, and reads a body in pieces. Between them it renews what its request holds: the cleanups in
the request's environment, where each layer of middleware adds its own. So the leases of all layers are renewed,
whichever of them waits. A handler that computes renews nothing, nor does a read or a send that the server blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Final, Protocol

from forebay.web.request import Environ

__all__ = ["RENEWALS", "Renewals", "renew_while_reading", "renewals_of"]

RENEWALS: Final = "forebay.renewals"
"""The key in the environment, and in the scope of ASGI."""
READ_AT_ONCE: Final = 65536
HELD_READ_AT_ONCE: Final = 4096
"""Bytes of one read while a lease is held: the thread can't renew until the client has sent them."""
LEAST_SLICE_S: Final = 0.001


class _Held(Protocol):
    """What a request holds: a ``RequestCleanup``."""

    renew_after_s: float

    @property
    def has_renewals(self) -> bool: ...

    def renew_if_due(self) -> None: ...


class Renewals:
    """The cleanups of one request whose leases its thread renews. Without a lease all of it does nothing.

    *Threads*: any thread may add a cleanup, or end it, while another one renews.
    """

    __slots__ = ("_cleanups", "reads")

    def __init__(self, cleanups: Iterable[_Held] = ()) -> None:
        self._cleanups = list(cleanups)
        self.reads = False
        """Whether the request's body is read in pieces."""

    def add(self, cleanup: _Held) -> None:
        if cleanup not in self._cleanups:
            self._cleanups.append(cleanup)

    def beside(self, cleanup: _Held) -> Renewals:
        """These, and a cleanup that isn't one of them yet."""
        return Renewals([*self._cleanups, cleanup])

    @property
    def slice_s(self) -> float:
        """The longest wait without ``renew``: a third of the shortest lease, or infinite."""
        slices = [one.renew_after_s for one in self._cleanups if one.has_renewals]
        return max(min(slices), LEAST_SLICE_S) if slices else math.inf

    def renew(self) -> None:
        """Renew the leases that are due. Call it between two slices."""
        for cleanup in self._cleanups:
            cleanup.renew_if_due()


def renewals_of(native: MutableMapping[str, Any]) -> Renewals:
    """Those of a request: of its environment, or of its scope."""
    found: Renewals | None = native.get(RENEWALS)
    if found is None:
        found = native[RENEWALS] = Renewals()
    return found


def renew_while_reading(environ: Environ, renewals: Renewals) -> None:
    """Let the application read the request's body in pieces. A second call does nothing."""
    if not renewals.reads:
        renewals.reads = True
        environ["wsgi.input"] = _Input(environ["wsgi.input"], renewals)


class _Input:
    """A request's body. Between the pieces that it is read in, the leases are renewed."""

    def __init__(self, body: Any, renewals: Renewals) -> None:
        self._body, self._renewals = body, renewals

    def __getattr__(self, name: str) -> Any:
        # Some applications look for more than PEP 3333 has, as for the socket. None reads past the renewals.
        # A copy has no body yet when it is asked for names with an underscore.
        if name.startswith(("read", "_")):
            raise AttributeError(f"a request's body has no {name} while leases are renewed", name=name)
        return getattr(self._body, name)

    def read(self, size: int | None = -1) -> bytes:
        return b"".join(self._pieces(self._body.read, size))

    def readline(self, size: int | None = -1) -> bytes:
        parts = []
        for part in self._pieces(self._body.readline, size):
            parts.append(part)
            if part.endswith(b"\n"):
                break
        return b"".join(parts)

    def _pieces(self, read: Callable[[int], bytes], size: int | None) -> Iterator[bytes]:
        """The results of `read` until the end, or until they have `size` bytes."""
        left = math.inf if size is None or size < 0 else size
        self._renewals.renew()
        while left > 0:
            at_once = HELD_READ_AT_ONCE if self._renewals.slice_s < math.inf else READ_AT_ONCE
            asked = int(min(left, at_once))
            part = read(asked)
            self._renewals.renew()
            if part:
                yield part
            # Without a size, a server may return less than it was asked for before the end.
            if not part or (left < math.inf and len(part) < asked):
                return
            left -= len(part)

    def readlines(self, hint: int | None = None) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line
