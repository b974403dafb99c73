"""Resizing a store while processes use it: its table is made anew in its own file, for another number of keys.

``core/table/moving.pxd`` has the protocol; this process is the mover. Limiters with memory of their own, counters, live
rules and permits stay where they are, as the file stays.

**Crash.** A killed mover leaves the room that it has appended, unused, and maybe frozen cells. The next process that
misses a key thaws them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import cast

from forebay.core.table.segment_view import Extent
from forebay.errors import DamagedSegment, SegmentBusy
from forebay.segment import attachment_locks, ofd_locks
from forebay.segment.extents import append_table, give_back_table
from forebay.segment.opening import opening_error
from forebay.segment.reading import open_to_write, spec_to_look
from forebay.store import Store
from forebay.verification.lists import names_another_table
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["move_table"]


def move_table(path: str, keys: int) -> tuple[int, int]:
    """Move the table of a store in use. How many live keys it has, and for how many of them there is no room.

    In the latter case the table stays. Raises the kinds of ``SegmentError`` that attaching raises, ``SegmentBusy`` if
    another resize is under way, or a process without the GIL has the store attached, ``SegmentSpaceError`` if there is
    no space for the table, ``DamagedSegment`` if the header doesn't say where the table is, and ``OSError``. Then the
    store is as before.
    """
    with Store.attach(path=path) as store, _mover(store):
        place, target = append_table(store.attachment, keys)
        try:
            return store.segment.move_table(cast(Extent, target), place.word)
        except OSError:
            _refuse_damage(path)
            raise
        finally:
            # By the header: an interrupt may come after the move, and before it has returned.
            if store.segment.moved_table() != place.word:
                give_back_table(store.attachment, place)


def _refuse_damage(path: str) -> None:
    with MappedSegment(path) as segment:
        if names_another_table(segment):
            raise DamagedSegment(
                path,
                "a header whose words `moved_table`, `moved_keys` and `moved_check` don't agree",
                "the place that a resize has given the table",
                "look at it with `forebay verify`; then stop its users and resize it, which makes these words anew, or "
                "remove it (forebay rm)",
            )


@contextlib.contextmanager
def _mover(store: Store) -> Iterator[None]:
    """Hold the mover's lock, on a description of the file that this process shares with no other."""
    attachment = store.attachment
    attachment.check_writable()
    spec = spec_to_look(attachment.label)
    fd, _ = open_to_write(spec)
    try:
        is_mover = attachment.is_in_place() and ofd_locks.try_lock(fd, attachment_locks.RESIZE_BYTE, 1)
        if not is_mover:
            raise SegmentBusy(
                attachment.label,
                "a resize by another process, or a process without the GIL that has the store attached",
                "neither, to resize a store in use",
                "try again; or stop the processes without the GIL first (`forebay doctor` lists all)",
            )
        yield
    except OSError as error:
        raise opening_error(spec, error) from None
    finally:
        # A close alone would leave the lock with a child that another thread forked meanwhile.
        with contextlib.suppress(OSError):
            ofd_locks.unlock(fd, attachment_locks.RESIZE_BYTE, 1)
        os.close(fd)
