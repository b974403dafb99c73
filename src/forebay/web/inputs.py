"""A request's body under WSGI, read in pieces: its leases are renewed between them, or they are metered or counted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["READ_AT_ONCE", "PiecewiseInput"]

READ_AT_ONCE: Final = 65536
# The parts of a raw stream that PEP 3333 doesn't have, and so not each server's input.
_RAW: Final[Mapping[str, tuple[Any]]] = {
    "closed": (False,),
    "close": (lambda: None,),
    "flush": (lambda: None,),
    "seekable": (lambda: False,),
    "writable": (lambda: False,),
}


class PiecewiseInput(ABC):
    """An input of PEP 3333, which can also be wrapped as a raw stream of ``io``."""

    def __init__(self, body: Any) -> None:
        self._body = body

    @abstractmethod
    def _most_at_once(self) -> int:
        """The most bytes of the next piece, at least 1."""

    @abstractmethod
    def _came(self, piece: bytes) -> None:
        """A piece was read; an empty one at the end."""

    def __getattr__(self, name: str) -> Any:
        # Some applications look for more than PEP 3333 has, as for the socket. None reads past the pieces.
        # A copy has no body yet when it is asked for names with an underscore.
        if name.startswith(("read", "_")):
            raise AttributeError(f"a request's body has no {name} while forebay reads it in pieces", name=name)
        return getattr(self._body, name, *_RAW.get(name, ()))

    def read(self, size: int | None = -1) -> bytes:
        return b"".join(self._pieces(self._body.read, size))

    readall = read

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as view, view.cast("B") as flat:
            part = self.read(len(flat))
            flat[: len(part)] = part
        return len(part)

    def readline(self, size: int | None = -1) -> bytes:
        parts = []
        for part in self._pieces(self._body.readline, size):
            parts.append(part)
            if part.endswith(b"\n"):
                break
        return b"".join(parts)

    def readlines(self, hint: int | None = None) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line

    def readable(self) -> bool:
        return True

    def _pieces(self, read: Callable[[int], bytes], size: int | None) -> Iterator[bytes]:
        """The results of `read` until the end, or until they have `size` bytes."""
        left = math.inf if size is None or size < 0 else size
        while left > 0:
            asked = int(min(left, self._most_at_once()))
            part = read(asked)
            self._came(part)
            if part:
                yield part
            # Without a size, a server may return less than it was asked for before the end.
            if not part or (left < math.inf and len(part) < asked):
                return
            left -= len(part)
