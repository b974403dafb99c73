"""Limits for the size of a server's replies, checked before redis-py's parsers read them.

See redis/transport/replies.pyx for the reasons. The parsers trust the lengths that a reply declares, so this module
reads them and refuses larger ones.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from redis.exceptions import ConnectionError as RedisConnectionError

__all__ = ["ReplySizes"]

DEEPEST: Final = 16
MOST_ELEMENTS: Final = 2**10
MOST_BYTES: Final = 2**16
MOST_CLUSTER_ELEMENTS: Final = 2**19
MOST_CLUSTER_BYTES: Final = 2**24
MOST_DIGITS: Final = 18
MOST_PUSHES: Final = 100

WITH_LENGTH: Final = b"*$%~>=!"
TEXTS: Final = b"$=!"
LINES: Final = b":+-_#,("


class ReplySizes:
    """The sizes of one connection's replies. Pass all received bytes to ``take`` before a parser reads them.

    With `of_cluster`, replies may be as large as those to a cluster's client, which reads the table of slots.

    ``take`` raises redis-py's ``ConnectionError`` if a reply is larger than any reply to a limiter, or isn't RESP.
    *Threads*: one at a time.
    """

    def __init__(self, *, of_cluster: bool = False) -> None:
        self._most_elements = MOST_CLUSTER_ELEMENTS if of_cluster else MOST_ELEMENTS
        self._most_bytes = MOST_CLUSTER_BYTES if of_cluster else MOST_BYTES
        # For each open list, its elements that are still to come.
        self._open_lists: list[int] = []
        self._elements = self._bytes = self._pushes = 0
        # The part being read: a line up to its end, or the rest of a text, of so many bytes.
        self._line = b""
        self._text_left = 0

    def take(self, received: Any, size: int) -> None:
        """Check the first `size` bytes of `received`."""
        chunk = bytes(memoryview(received)[:size])
        at = 0
        while at < len(chunk):
            if self._text_left:
                step = min(self._text_left, len(chunk) - at)
                self._count_bytes(step)
                self._text_left -= step
                at += step
                if self._text_left == 0:
                    self._end_element()
                continue
            if not self._line:
                self._begin_element(chunk[at])
            if self._line.endswith(b"\r") and chunk[at] == ord("\n"):
                end, ended = at + 1, True
            else:
                found = chunk.find(b"\r\n", at)
                end, ended = (len(chunk), False) if found < 0 else (found + 2, True)
            self._count_bytes(end - at)
            self._line += chunk[at:end]
            at = end
            self._check_line(ended)

    def _check_line(self, ended: bool) -> None:
        kind = self._line[:1]
        if kind in WITH_LENGTH:
            digits = self._line[1:].removesuffix(b"\r\n" if ended else b"\r").removeprefix(b"-")
            if len(digits) > MOST_DIGITS or ((digits or ended) and not digits.isdigit()):
                _refuse("a length that isn't one")
        if not ended:
            return
        line, self._line = self._line, b""
        if kind in WITH_LENGTH:
            self._take_length(kind, int(line[1:]))
        else:
            self._end_element()

    def _count_bytes(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self._most_bytes:
            _refuse(f"more than {self._most_bytes} bytes")

    def _begin_element(self, kind: int) -> None:
        if not self._open_lists:
            self._pushes = self._pushes + 1 if kind == ord(">") else 0
            if self._pushes > MOST_PUSHES:
                _refuse(f"more than {MOST_PUSHES} push messages before it")
        if kind not in WITH_LENGTH and kind not in LINES:
            _refuse(f"an element that begins with byte {kind}")

    def _take_length(self, kind: bytes, length: int) -> None:
        if length < 0:
            # A null in the place of a text or a list.
            if length != -1:
                _refuse(f"a length of {length}")
            self._end_element()
        elif kind in TEXTS:
            if length > self._most_bytes:
                _refuse(f"a text of {length} bytes")
            self._text_left = length + 2
        else:
            self._begin_list(2 * length if kind == b"%" else length)  # keys and values

    def _begin_list(self, length: int) -> None:
        self._elements += length
        if self._elements > self._most_elements:
            _refuse(f"{self._elements} elements")
        if length == 0:
            self._end_element()
        elif len(self._open_lists) == DEEPEST:
            _refuse(f"lists in lists, {DEEPEST} deep and deeper")
        else:
            self._open_lists.append(length)

    def _end_element(self) -> None:
        while self._open_lists:
            self._open_lists[-1] -= 1
            if self._open_lists[-1]:
                return
            # The element was the last of its list. The list is an element of the list around it.
            self._open_lists.pop()
        self._elements = self._bytes = 0


def _refuse(what: str) -> NoReturn:
    raise RedisConnectionError(f"the server's answer has {what}, which no answer to a limiter has")
