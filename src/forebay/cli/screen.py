"""The live view on a terminal, by curses: it writes only what has changed on the screen."""

from __future__ import annotations

import curses
import locale
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Final

from forebay.extras import Needs

with Needs("cli", __name__):
    from rich.cells import cell_len, set_cell_size

from forebay.cli.rates import COLUMNS, Frame, Watch
from forebay.cli.table import (
    CELL,
    NAME,
    ORDERS,
    heading,
    hot_panel,
    line_of,
    ordered,
    sparkline,
    summary,
)
from forebay.errors import printable

__all__ = ["show"]

HELP: Final = "q quit  space pause  s sort  r reverse  / filter"
ESCAPE: Final = "\x1b"
END: Final = ("\n", "\r")
ERASE: Final = ("\x7f", "\b", curses.KEY_BACKSPACE)


def show(watch: Watch, name: str, interval: float, order: str, part: str) -> None:
    """Show the view until the user ends it. Raises ``ValueError`` for a terminal that can't show it.

    The terminal is as before afterwards, also after an interrupt or SIGTERM.
    """
    with suppress(locale.Error):  # one that isn't installed
        locale.setlocale(locale.LC_CTYPE, "")
    # Escape is a key of its own here: it ends a filter.
    os.environ.setdefault("ESCDELAY", "25")
    if not _moves_its_cursor():
        raise ValueError(f"the terminal {os.environ.get('TERM', '')!r} can't show it: give --once or --json")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        curses.wrapper(lambda window: _View(window, watch, name, order, part).run(interval))
    finally:
        signal.signal(signal.SIGTERM, before)


def _moves_its_cursor() -> bool:
    try:
        curses.setupterm()
    except curses.error:
        return False
    return bool(curses.tigetstr("cup"))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class _View:
    """A screen, and the keys that change it."""

    def __init__(self, window: curses.window, watch: Watch, name: str, order: str, part: str) -> None:
        self._window, self._watch, self._name = window, watch, name
        self._order, self._part = order, part
        self._is_reversed = self._is_paused = self._is_typing = False
        self._sparklines: dict[tuple[str, str], str] = {}
        self._drawn_for = (0.0, 0)
        self._is_plain = locale.getpreferredencoding().lower().replace("-", "") != "utf8"

    def run(self, interval: float) -> None:
        with suppress(curses.error):  # it can't be hidden
            curses.curs_set(0)
        frame = self._watch.look()
        next_s = time.monotonic() + interval
        while True:
            self._draw(frame)
            key = self._key(max(0, round((next_s - time.monotonic()) * 1000)))
            while key:
                if not self._handle(key):
                    return
                # All that is there, before the screen is drawn: text may have been pasted.
                key = self._key(0)
            now_s = time.monotonic()
            if now_s >= next_s:
                # After a stop of this process, the looks that were missed are not made up for.
                next_s = max(next_s + interval, now_s)
                if not self._is_paused:
                    frame = self._watch.look()

    def _key(self, timeout_ms: int) -> int | str:
        """The next key, or nothing if none comes in time."""
        self._window.timeout(timeout_ms)
        try:
            return self._window.get_wch()
        except curses.error:
            return ""

    def _handle(self, key: int | str) -> bool:
        """Whether the view goes on."""
        if key == curses.KEY_RESIZE:
            self._window.clear()
        elif self._is_typing:
            self._type(key)
        elif key == "q":
            return False
        elif key == " ":
            self._is_paused = not self._is_paused
        elif key == "s":
            orders = list(ORDERS)
            self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        elif key == "r":
            self._is_reversed = not self._is_reversed
        elif key == "/":
            self._is_typing = True
        return True

    def _type(self, key: int | str) -> None:
        if key in ERASE:
            self._part = self._part[:-1]
        elif key == ESCAPE:
            self._part, self._is_typing = "", False
        elif key in END or key == curses.KEY_ENTER:
            self._is_typing = False
        elif isinstance(key, str) and key.isprintable():
            self._part += key

    def _draw(self, frame: Frame) -> None:
        window = self._window
        height, width = window.getmaxyx()
        window.erase()
        for y, line in enumerate(summary(self._name, frame)):
            self._put(y, line, height, width)
        self._put(3, heading(self._order), height, width, curses.A_REVERSE)
        rows = ordered(frame.limiters, self._order, self._part, is_reversed=self._is_reversed)
        # A third of the screen at most.
        panel = hot_panel(frame.hot_keys, self._part, max(0, (height - 5) // 3 - 1))
        shown = rows[: max(0, height - 5 - len(panel))]
        bars = max(0, min(COLUMNS, width - NAME - CELL * len(ORDERS) - 3))
        for y, row in enumerate(shown, 4):
            line = f"{line_of(row)}  {self._sparkline((row.name, row.algorithm), bars)}"
            self._put(y, line, height, width, curses.A_BOLD if row.denied_share else curses.A_NORMAL)
        for y, line in enumerate(panel, height - 1 - len(panel)):
            self._put(y, line, height, width, curses.A_REVERSE if line is panel[0] else curses.A_NORMAL)
        self._put(height - 1, self._footer(len(rows) - len(shown)), height, width)
        window.refresh()

    def _sparkline(self, limiter: tuple[str, str], bars: int) -> str:
        if self._drawn_for != (self._watch.marked_s, bars):
            self._sparklines, self._drawn_for = {}, (self._watch.marked_s, bars)
        if limiter not in self._sparklines:
            course = self._watch.course(limiter, bars) if bars else []
            self._sparklines[limiter] = sparkline(course, is_plain=self._is_plain)
        return self._sparklines[limiter]

    def _footer(self, hidden: int) -> str:
        parts = ["PAUSED  " if self._is_paused else "", HELP]
        if self._part or self._is_typing:
            parts.append(f": {self._part}{'_' if self._is_typing else ''}")
        if hidden:
            parts.append(f"  ({hidden} more limiters)")
        return "".join(parts)

    def _put(self, y: int, text: str, height: int, width: int, attribute: int = curses.A_NORMAL) -> None:
        if not 0 <= y < height or width < 2:
            return
        if not text.isprintable():
            text = printable(text)
        # The last column stays free: to write into the last cell of all moves the cursor out of the window.
        if cell_len(text) >= width:
            text = set_cell_size(text, width - 1)
        if self._is_plain:
            encoding = locale.getpreferredencoding()
            text = text.encode(encoding, errors="replace").decode(encoding)
        with suppress(curses.error):  # the terminal has become smaller since
            self._window.addstr(y, 0, text, attribute)
