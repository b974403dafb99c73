"""Removing a segment's file, and noticing that it was removed or replaced while this process uses it."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import warnings
import weakref

from forebay.alive import alive_in
from forebay.errors import ForeignSegment, SegmentError, SegmentRemovedWarning
from forebay.segment import attachment_locks
from forebay.segment.header import MAGIC, is_foreign
from forebay.segment.names import rules_files, successor_of

__all__ = [
    "NameWatch",
    "expect_removal",
    "is_at",
    "removal_message",
    "unlink",
    "unlink_unused",
]


def is_at(path: str, status: os.stat_result) -> bool:
    """Whether the path leads to the file of that status."""
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False


def removal_message(path: str) -> str:
    """The text of ``SegmentRemovedWarning``."""
    return (
        f"{path} was removed while processes use it: they continue with the removed segment, processes that start make "
        f"a new one, and each group admits the whole limit; restart the older processes. If Store.unlink did not "
        f"remove it, see docs/operations/removing.md for what removes files"
    )


class NameWatch:
    """Checks whether a path still leads to an attached segment's file. Thread-safe, and works in forked children."""

    def __init__(self, path: str | None, status: os.stat_result) -> None:
        """`path` is None for a segment without a name. `status` is that of the open file."""
        self._path = path
        self._status = status
        self._is_expected = False
        if path is not None:
            _watches.add(self)

    def stop(self) -> None:
        """The process has closed the segment."""
        self._path = None

    def warn_if_removed(self, stacklevel: int) -> None:
        """Warn once with ``SegmentRemovedWarning`` if the path no longer leads to the file."""
        message = self.take_removal()
        if message is not None:
            warnings.warn(message, SegmentRemovedWarning, stacklevel=stacklevel + 1)

    def take_removal(self) -> str | None:
        """The text of the warning, once, if the path no longer leads to the file. Takes about 3 us."""
        path = self._path
        if path is None:
            return None
        try:
            # If the directory is gone too, as after ``private_stores``, no process makes another segment there.
            os.stat(os.path.dirname(path))
            is_removed = not is_at(path, self._status)
        except OSError as error:
            if error.errno is None:  # a signal handler raised it
                raise
            return None
        if not is_removed:
            return None
        self._path = None
        return removal_message(path)

    def take_removal_by_others(self) -> str | None:
        """``take_removal``, unless this process has unlinked the file itself."""
        return None if self._is_expected else self.take_removal()

    def expect_removal(self, status: os.stat_result) -> None:
        """This process has unlinked the file of that status."""
        if os.path.samestat(self._status, status):
            self._is_expected = True


_watches: weakref.WeakSet[NameWatch] = weakref.WeakSet()


def _check_names() -> None:
    """Check at the end of the process. A worker that ends is often replaced, and its successor makes a new segment."""
    errors = []
    for watch in alive_in(_watches):
        message = watch.take_removal_by_others()
        if message is None:
            continue
        try:
            warnings.warn(message, SegmentRemovedWarning, stacklevel=1)
        except Exception:  # a filter turns warnings into errors, or the warning can't be shown
            errors.append(message)
    if errors:
        raise SegmentRemovedWarning("\n".join(errors))  # the interpreter reports it


atexit.register(_check_names)


def unlink(path: str) -> None:
    """Remove the segment's file at the path, those of its live rules, and what a killed resize left beside it.

    Raises FileNotFoundError, and ``SegmentError`` if it isn't removed.

    A file of another program is refused, so a wrong path removes nothing. A damaged segment, one of another layout or
    user, and an empty file, as a killed creator leaves it, are removed if the system permits it.
    """
    # Listed first: from the removal on, a successor may have some.
    files = [*rules_files(path), successor_of(path)]
    try:
        status = _check_is_segment(path)
        os.unlink(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = "remove it as its owner or as root; if it is a directory, or mounted, it is no segment"
        expected = f"a file that uid {os.geteuid()} may remove"
        raise SegmentError(path, f"one that can't be removed ({error.strerror})", expected, remedy) from None
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    expect_removal(status)


def expect_removal(status: os.stat_result) -> None:
    """This process has taken the path of the file of that status. It doesn't warn of that at its end."""
    for watch in alive_in(_watches):
        watch.expect_removal(status)


def unlink_unused(path: str) -> bool:
    """``unlink``, unless a process is attached. Whether the file was removed. No process attaches in between."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError:
            unlink(path)  # no segment, which it refuses, or one of a user whose processes this one can't exclude
            return True
        try:
            if not attachment_locks.exclude_all(fd):
                return False
            if is_at(path, os.fstat(fd)):
                unlink(path)
                return True
            # Another process has removed the file meanwhile. By now another segment may be there, and in use.
        finally:
            os.close(fd)


def _check_is_segment(path: str) -> os.stat_result:
    status = os.stat(path, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise _foreign(path, "a symbolic link")
    if stat.S_ISREG(status.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status, begin = os.fstat(fd), os.pread(fd, len(MAGIC), 0)
        finally:
            os.close(fd)
        if is_foreign(begin):
            raise _foreign(path, f"a file that begins with {begin!r}")
    elif not stat.S_ISDIR(status.st_mode):  # a directory the system refuses to unlink
        raise _foreign(path, "a device, a pipe or a socket")
    return status


def _foreign(path: str, found: str) -> SegmentError:
    return ForeignSegment(
        path,
        found,
        f"a forebay segment, which begins with {MAGIC!r}",
        "check the name or path; nothing was removed. If it is in the way of a store, remove it by hand",
    )
