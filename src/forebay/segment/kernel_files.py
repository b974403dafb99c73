"""Files of /proc and /sys, in which the kernel shows what it knows of a process or of the host."""

from __future__ import annotations

import os

__all__ = ["read_kernel_file"]


def read_kernel_file(path: str | os.PathLike[str]) -> bytes:
    """The whole content. Raises ``OSError``."""
    # Unbuffered: free-threaded CPython 3.13 yields the processor 40 times when it closes a buffered file, 80 times when
    # it closes a text file. Beside busy threads each of these yields lasts milliseconds.
    with open(path, "rb", buffering=0) as file:
        return file.read()
