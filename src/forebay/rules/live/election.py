"""The election of the one process of a host that loads rules: by a lock on the segment's file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from forebay._native import native
from forebay.segment import ofd_locks

__all__ = ["Election"]

PLACE: Final = 2**61
"""The locked byte: where no file has bytes, and below the attachment locks."""


class Election:
    """This process's candidacy. The kernel ends the term of a process that dies, however it dies; a term ends with its
    object, too.

    A segment's file has the lock, so the processes of a removed segment and those of its successor have a loader each.
    Without the compiled core no other process has the rules: every process loads its own.

    *Threads*: one at a time. *Fork*: the child gives up the descriptor that it has from its parent.
    """

    def __init__(self, store: Any) -> None:
        """Raises ``SegmentError`` for a store that this process may only read: it could publish nothing."""
        self._fd: int | None = None
        self._attachment = store.attachment
        if native:
            self._attachment.check_writable()
        self._status: os.stat_result | None = None

    def try_win(self) -> bool:
        """Become the loader, if there is none, or stay it. A process that may not open the file never is."""
        if not native:
            return True
        if self._own() is None:
            own = self._attachment.own_file()
            if own is None:
                return False
            # A descriptor of its own: a child that has the segment's from its parent would keep the lock.
            self._fd = os.open(f"/proc/self/fd/{own}", os.O_RDWR | os.O_CLOEXEC)
            self._status = os.fstat(self._fd)
        assert self._fd is not None
        return ofd_locks.try_lock(self._fd, PLACE, 1)

    def give_up(self) -> None:
        """Let another process become the loader."""
        fd = self._own()
        if fd is not None:
            # A child that another thread forks meanwhile has the descriptor, too.
            ofd_locks.unlock(fd, PLACE, 1)
        self._close()

    def begin_in_child(self) -> None:
        """The parent goes on with its term."""
        self._close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # then the modules that closing needs may be gone, and the kernel closes
            self._close()

    def _close(self) -> None:
        fd = self._own()
        self._fd = None
        if fd is not None:
            os.close(fd)

    def _own(self) -> int | None:
        """The descriptor, unless the program has closed it: a daemon closes all, and other files get their numbers."""
        if self._fd is not None and self._status is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), self._status):
                    return self._fd
        return None
