"""How large a request's body may be: what WSGI and ASGI have in common."""

from __future__ import annotations

from typing import Protocol

__all__ = ["BodyTooLarge", "is_told_longer"]


class BodyTooLarge(OSError):
    """More of a request's body was read than its limit."""


class HasLength(Protocol):
    @property
    def content_length(self) -> str | None: ...


def is_told_longer(request: HasLength, most_bytes: int) -> bool:
    """Whether the request says by itself that its body is larger. A server lets nobody read more than it says."""
    told = request.content_length
    return told is not None and told.isdecimal() and int(told[:20]) > most_bytes
