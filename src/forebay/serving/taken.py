"""Charges that services may give back: a server remembers its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

__all__ = ["TakenCharges"]

_MOST_BYTES: Final = 64 << 20
"""Of all that gives charges back, about."""
_OF_CHARGE: Final = 1024
"""Beside its key, of each limit."""


class TakenCharges:
    """The newest charges, by their ids. *Threads*: safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, tuple[int, Iterable[Any]]] = {}
        """From the oldest on."""
        self._bytes = 0

    def add(self, keys: Sequence[str | tuple[str, ...]], taken: Iterable[Any]) -> str:
        """The id of a charge of these keys, which `taken` gives back."""
        charge = secrets.token_hex(16)
        texts = [text for key in keys for text in (key if isinstance(key, tuple) else (key,))]
        size = _OF_CHARGE * (1 + len(keys)) + sum(map(len, texts))
        with self._lock:
            self._by_id[charge] = size, taken
            self._bytes += size
            while self._bytes > _MOST_BYTES:
                self._pop(next(iter(self._by_id)))
        return charge

    def pop(self, charge: str) -> Iterable[Any] | None:
        """What gives a charge back, once. None if it isn't known, or not any more."""
        with self._lock:
            return self._pop(charge)

    def _pop(self, charge: str) -> Iterable[Any] | None:
        size, taken = self._by_id.pop(charge, (0, None))
        self._bytes -= size
        return taken
