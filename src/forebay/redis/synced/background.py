"""The life of a thread that works for an object: it doesn't keep the object alive, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from typing import ClassVar

from forebay import forking
from forebay.alive import alive_in

__all__ = ["Background"]


class Background(ABC):
    """An object with a thread, which calls `step` again and again. The end of the interpreter closes the object.

    *Threads*: safe. *Fork*: the child starts a thread of its own if the parent had one.
    """

    thread_name: ClassVar[str]
    first_pause_s: float = 0.0

    def __init__(self) -> None:
        self.closed = False
        self._begin()
        _working.add(self)

    def _begin(self) -> None:
        """Set up the state that belongs to one process."""
        # Reentrant: a signal handler may close the object while the interrupted thread starts its thread. No step holds
        # the lock, so a thread that starts or closes the object doesn't wait for Redis.
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_in_child(self) -> None:
        """Go on in a forked child. A fork copies locks in their state, and no threads."""
        had_thread = self._thread is not None
        self._begin()
        if had_thread:
            self.start()

    def start(self) -> None:
        """Start the thread, unless there is one or the object is closed."""
        with self._lock:
            if self._thread is None and not self.closed:
                thread = threading.Thread(
                    target=run,
                    args=(weakref.ref(self), self._stop, self.first_pause_s),
                    name=self.thread_name,
                    daemon=True,
                )
                thread.start()
                self._thread = thread

    @abstractmethod
    def step(self) -> float | None:
        """One step of the thread: how long to pause before the next one, in seconds. None ends the thread."""

    @abstractmethod
    def finish(self) -> None:
        """The rest of closing, after the end of the thread."""

    def close(self) -> None:
        """End the thread, and finish."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.finish()


_working: weakref.WeakSet[Background] = weakref.WeakSet()


def run(ref: weakref.ref[Background], stop: threading.Event, pause_s: float | None) -> None:
    """The thread's loop."""
    while pause_s is not None and not stop.wait(pause_s):
        background = ref()
        if background is None:
            return
        pause_s = background.step()
        del background


def _begin_in_child() -> None:
    for background in alive_in(_working):
        background.begin_in_child()


def _close_all() -> None:
    for background in alive_in(_working):
        with contextlib.suppress(Exception):
            background.close()


forking.in_child(_begin_in_child)
atexit.register(_close_all)
