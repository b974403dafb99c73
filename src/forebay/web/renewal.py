"""Holding on to what is held, for as long as a coroutine handles a request."""

from __future__ import annotations

import asyncio

from forebay.web.gate import OnEnd

__all__ = ["Renewal"]


class Renewal:
    """The event loop renews what is held, in time, from ``start`` to ``stop``. No task and no thread."""

    __slots__ = ("is_stopped", "on_end", "timer")

    def __init__(self, on_end: OnEnd) -> None:
        self.on_end = on_end
        self.timer: asyncio.TimerHandle | None = None
        self.is_stopped = False

    def start(self) -> None:
        """Does nothing while nothing is held, when it has been started, and when it is over."""
        if self.timer is None and self.on_end.leases and not self.is_stopped:
            self.timer = asyncio.get_running_loop().call_later(self.on_end.renew_after_s, self._renew)

    def stop(self) -> None:
        self.is_stopped = True
        if self.timer is not None:
            self.timer.cancel()

    def _renew(self) -> None:
        self.on_end.renew()
        self.timer = None
        self.start()
