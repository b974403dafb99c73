"""The error of a log that can't be replayed."""

from __future__ import annotations

from forebay.errors import ForebayError

__all__ = ["UnusableLog"]


class UnusableLog(ForebayError, ValueError):
    """A log without requests, with too many lines that can't be read or come too late, or that ends too early."""
