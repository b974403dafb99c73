"""Keys of limits as keys of a dict."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from forebay.errors import InvalidKey, short_repr

__all__ = ["Key", "known_key"]

Key: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
"""A key, by which a limit counts: text, bytes, a whole number, or a tuple of these."""

_KINDS: Final = "a key is str, bytes, int or a tuple of them, not {}: {}"
_PARTS: Final = "a tuple that is a key holds str, bytes and int, not {}: {}"


def known_key(key: Any) -> tuple[Any, ...]:
    """The key with its type, so that ``1``, ``"1"``, ``b"1"`` and ``("1",)`` differ. Raises ``InvalidKey``.

    An instance of a subclass counts as its base type does; no method of it is called.
    """
    if isinstance(key, tuple):
        return ("tuple", *[_typed(part, _PARTS) for part in tuple.__iter__(key)])
    return _typed(key, _KINDS)


def _typed(key: Any, complaint: str) -> tuple[Any, ...]:
    if isinstance(key, str):
        return "str", str.__str__(key)
    # True would be the same client as 1. A bool as a key is most likely the result of a test, passed by mistake.
    if isinstance(key, int) and not isinstance(key, bool):
        return "int", int.__int__(key)
    if isinstance(key, bytes):
        return "bytes", bytes(memoryview(key))
    raise InvalidKey(complaint.format(type(key).__name__, short_repr(key)))
