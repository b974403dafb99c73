"""Leases that are renewed while the thread of a request waits, reads its body or sends: under WSGI, without a timer.

The thread waits in slices, and reads a body in pieces. Between them it renews what its request holds: the cleanups in
the request's environment, where each layer of middleware adds its own. So the leases of all layers are renewed,
whichever of them waits. A handler that computes renews nothing, nor does a read or a send that the server blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from typing import Any, Final, Protocol

from forebay.web.inputs import READ_AT_ONCE, PiecewiseInput
from forebay.web.request import Environ

__all__ = ["RENEWALS", "Renewals", "renew_while_reading", "renewals_of"]

RENEWALS: Final = "forebay.renewals"
"""The key in the environment, and in the scope of ASGI."""
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
    if not renewals.reads and (body := environ.get("wsgi.input")) is not None:
        renewals.reads = True
        environ["wsgi.input"] = _Input(body, renewals)


class _Input(PiecewiseInput):
    """A request's body. Between the pieces that it is read in, the leases are renewed."""

    def __init__(self, body: Any, renewals: Renewals) -> None:
        super().__init__(body)
        self._renewals = renewals

    def _most_at_once(self) -> int:
        self._renewals.renew()
        return HELD_READ_AT_ONCE if self._renewals.slice_s < math.inf else READ_AT_ONCE

    def _came(self, piece: bytes) -> None:
        self._renewals.renew()
