"""Helpers for tests of code that uses forebay.

*A limiter for one test*: ``Store.private(keys=..., clock=ManualClock())``. With pytest, use the fixtures
``forebay_store`` and ``forebay_clock`` (see ``pytest_forebay``), which exist wherever forebay is installed.

*An application that makes its stores on import*: import it under ``private_stores``, and call ``reset_store`` before
each test.

*Tests that move Python's time* (freezegun, time-machine, a patched ``time.time``): use ``clock="time"``, in the
application or by ``private_stores("time")``. Limits then follow ``time.time``, to the microsecond, but never go back.
Call ``reset_store`` after the time was frozen earlier than it was, and after it is real again. A ``wait`` sleeps in
real time; in a frozen window that never ends, until its timeout. freezegun gives the real time to ``threading`` and
some other modules, and stops asyncio's sleep unless ``real_asyncio=True`` is set; time-machine does neither. Each
decision calls ``time.time`` first, so it takes 0.2 microseconds more, about four times as long in all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from forebay.clock import ManualClock
from forebay.errors import short_repr

if TYPE_CHECKING:
    from forebay.store import Store

__all__ = ["ManualClock", "private_stores", "reset_store"]


@contextlib.contextmanager
def private_stores(clock: ManualClock | Literal["time"], *, keys: int = 10_000) -> Iterator[None]:
    """Make every new ``Store`` in the block private to this process and its forked children, with `clock`.

    For applications that make their stores on import::

        clock = ManualClock()
        with private_stores(clock):
            import shop

    Stores of one name (or path) share one segment, as always. Their names, modes and groups have no effect outside.
    A store that requests more than `keys` keys gets `keys`. The stores stay private after the block. Only one thread
    may enter the block, and only once at a time.
    """
    import hashlib
    import tempfile
    from unittest.mock import patch

    from forebay.store import DIRECTORY, Store, default_path

    init, private, unlink = Store.__init__, Store.__dict__["private"], Store.__dict__["unlink"]

    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir=DIRECTORY) as scratch:

        def stand_in(name: Any, path: Any, where: Any) -> str:
            real = default_path(name, where) if path is None else os.path.abspath(path)
            return f"{scratch}/{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}"

        def fewer(options: dict[str, Any]) -> dict[str, Any]:
            # If it is missing or no number, the store itself refuses it.
            return {**options, "keys": min(wanted, keys)} if type(wanted := options.get("keys")) is int else options

        def make(store: Store, name: str, *, path: Any = None, directory: Any = None, **options: Any) -> None:
            here = {"mode": 0o600, "group": None, "clock": clock, "path": stand_in(name, path, directory)}
            init(store, name, **{**fewer(options), **here})

        def make_private(kind: type[Store], /, **options: Any) -> Store:
            made: Store = private.__func__(kind, **{**fewer(options), "clock": clock})
            return made

        def remove(
            name: str | None = None, *, path: Any = None, directory: Any = None, missing_ok: bool = False
        ) -> None:
            unlink.__func__(path=stand_in(name, path, directory), missing_ok=missing_ok)

        with patch.multiple(Store, __init__=make, private=classmethod(make_private), unlink=staticmethod(remove)):
            yield


def reset_store(store: Store) -> None:
    """Make every limiter of `store` forget all its keys and counts, so that the next test begins with a fresh store.

    With ``clock="time"`` its time becomes ``time.time`` again, even if that is earlier; other clocks continue.
    Bookings and held permits are lost. For tests only: no process may make a decision meanwhile. Raises ``TypeError``
    for a store at Redis, which it can't reset.
    """
    from forebay.store import Store, clear

    if not isinstance(store, Store):
        raise TypeError(
            f"reset_store takes a Store, not {short_repr(store)}: limits at Redis start empty in "
            f"another database, or with "
            "another namespace for each test"
        )
    clear(store)
