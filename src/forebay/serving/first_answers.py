"""Answers by the ids of questions: a question that is sent again is decided once, and gets the first answer again.

Each server remembers its own. One that is forgotten, as others have taken its room, is decided once more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Final

from forebay.serving.decided import Answer, Decided

__all__ = ["FirstAnswers"]

_LASTS_S: Final = 300.0
"""For so long, a question may be sent again."""
_MOST_BYTES: Final = 64 << 20
"""Of all answers, about."""
_OF_ANSWER: Final = 1024
_OF_DECISION: Final = 224


@dataclasses.dataclass(slots=True)
class _Known:
    digests: tuple[bytes, bytes]
    """The digest of the question, and that of what it was charged to."""
    answer: Decided
    until_s: float
    """The answer may be given again until this time of the monotonic clock. `prolong` moves it, at most to the end."""
    end_s: float
    size: int
    is_undone: bool = False
    """What it has taken is given back, or will be: nobody may renew it."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.answer.charge, self.answer.lease) if name is not None]


class FirstAnswers:
    """The newest answers that allow their questions. *Threads*: safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, _Known] = {}
        """From the oldest on."""
        self._ids: dict[str, str] = {}
        """A charge or a lease leads to the id of the question whose answer names it."""
        self._bytes = 0

    def once(
        self,
        request_id: str,
        question: str,
        charged: str,
        decide: Callable[[], tuple[Answer, float]],
        undo: Callable[[Decided], bool],
    ) -> Answer:
        """The answer to a question: the first one that has allowed it, or that of `decide`, and how long that lasts.

        `charged`: what the limits are. If other limits are charged by now, as rules change, or if the first answer is
        over, the question is decided anew: before, `undo` gives back what the first answer has taken, as permits may be
        held still. None if it can't for sure: then the next repetition begins with that. Questions with one id come one
        after the other.
        """
        digests = _digest(question), _digest(charged)
        begun_s = time.monotonic()
        with self._lock:
            known = self._find(request_id, begun_s)
            is_over = known is None or known.until_s <= begun_s
            if known is not None and known.digests[0] == digests[0]:
                known.is_undone |= is_over or known.digests != digests
        if known is not None and known.digests == digests and not is_over:
            return known.answer.given_again()
        if known is not None and known.digests[0] != digests[0]:
            if not is_over:
                return f"the request_id {request_id!r} was that of another question: make one for each"
            known = None
        if known is not None and not undo(known.answer):
            # It is never given again, as a part of it may have come back: no limits have this digest.
            self._put(request_id, dataclasses.replace(known, digests=(digests[0], b"")))
            return None
        answer, lasts_s = decide()
        if isinstance(answer, Decided) and answer.allowed:
            self._add(request_id, digests, answer, begun_s, lasts_s)
        return answer

    def prolong(self, name: str, until_s: float) -> bool:
        """The answer with this charge or lease may be given again until then, up to its end. False if what it has taken
        is given back: a repetition has found it over.
        """
        with self._lock:
            known = self._by_id.get(self._ids.get(name, ""))
            if known is None or known.is_undone:
                return known is None
            known.until_s = min(until_s, known.end_s)
            return True

    def forget(self, name: str) -> None:
        """The next question with the id of the answer with this charge or lease is another one."""
        with self._lock:
            self._remove(self._ids.get(name, ""))

    def _find(self, request_id: str, now_s: float) -> _Known | None:
        while self._by_id and next(iter(self._by_id.values())).end_s <= now_s:
            self._remove(next(iter(self._by_id)))
        known = self._by_id.get(request_id)
        return known if known is not None and known.end_s > now_s else None

    def _add(
        self, request_id: str, digests: tuple[bytes, bytes], answer: Decided, begun_s: float, lasts_s: float
    ) -> None:
        size = _OF_ANSWER + len(request_id) + _OF_DECISION * len(answer.each)
        end_s = begun_s + _LASTS_S
        self._put(request_id, _Known(digests, answer, min(begun_s + lasts_s, end_s), end_s, size))

    def _put(self, request_id: str, known: _Known) -> None:
        with self._lock:
            self._remove(request_id)
            self._by_id[request_id] = known
            self._ids |= dict.fromkeys(known.names, request_id)
            self._bytes += known.size
            while self._bytes > _MOST_BYTES:
                self._remove(next(iter(self._by_id)))

    def _remove(self, request_id: str) -> None:
        known = self._by_id.pop(request_id, None)
        if known is not None:
            self._bytes -= known.size
            for name in known.names:
                self._ids.pop(name, None)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
