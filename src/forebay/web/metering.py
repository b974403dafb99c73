"""A meter: the bytes of one body go on when their turn comes, by the limiters of its byte rates."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Self

from forebay.rate import NS
from forebay.web.denials import log_for_operator
from forebay.web.renewals import Renewals
from forebay.web.store_errors import STORE_ERRORS
from forebay.web.turns import HeldBack, Turn, sleep_until_due, sleeps_until_due

__all__ = ["Meter", "Place"]

MOST_AT_ONCE: Final = 65536
"""Bytes of one piece. Bodies of one key take turns by pieces: smaller ones are fairer, and cost more decisions."""


class Place:
    """One body under one byte rate: its limiter and key, and how many of its next bytes are free."""

    __slots__ = ("free", "held_back", "key", "limiter", "most_at_once", "most_wait_s")

    def __init__(self, limiter: Any, key: Any, free: int, held_back: HeldBack, most_wait_ns: int) -> None:
        self.limiter, self.key, self.free, self.held_back = limiter, key, free, held_back
        self.most_wait_s = most_wait_ns / NS
        # A piece takes a second of the rate at most, so that no proxy takes the connection for dead.
        each_second = limiter.rate.limit * NS // limiter.rate.period_ns
        self.most_at_once = max(1, min(MOST_AT_ONCE, limiter.burst, each_second))


class Meter:
    """Slows one body down. `admits_unchecked`: whether its bytes go on while a store fails.

    For one thread or task at a time. Call ``end`` when the body has ended.
    """

    __slots__ = ("_admits_unchecked", "_held", "_is_off", "_places")

    def __init__(self, places: Sequence[Place], admits_unchecked: bool) -> None:
        self._places, self._admits_unchecked = places, admits_unchecked
        self._held: list[HeldBack] = []
        self._is_off = False

    def begin(self, status: int) -> None:
        """A response has this status. Without a body it isn't metered, whatever the application sends."""
        self._is_off = self._is_off or status < 200 or status in (204, 304)

    def pieces(self, part: Any, renewals: Renewals) -> Iterator[Any]:
        """The bytes of `part`, each piece when its turn comes; the thread waits for it, and renews the leases."""
        at = 0
        while at < len(part):
            size, places = self._next_piece(len(part) - at)
            with _Bookings() as bookings:
                for place in places:
                    if turn := self._book(place, size, bookings):
                        sleep_until_due([turn], renewals)
            yield part if size == len(part) else part[at : at + size]
            at += size

    async def pieces_async(
        self, part: Any, renewals: Renewals, pause: Callable[[float], Awaitable[bool]]
    ) -> AsyncIterator[Any]:
        """As ``pieces``, for a task. `pause` sleeps for some seconds, or returns True once the client has gone."""
        at = 0
        while at < len(part):
            size, places = self._next_piece(len(part) - at)
            with _Bookings() as bookings:
                for place in places:
                    turn = self._book(place, size, bookings)
                    for seconds in sleeps_until_due([turn] if turn else (), renewals):
                        if await pause(seconds):
                            # The server drops the rest.
                            self._is_off = True
                            raise _ClientHasGone
            yield part if size == len(part) else part[at : at + size]
            at += size

    def end(self) -> None:
        """The body has ended, or is no longer sent. A second call does nothing."""
        held, self._held = self._held, []
        for one in held:
            one.remove()

    def _next_piece(self, count: int) -> tuple[int, list[Place]]:
        """How many of the next `count` bytes go together, and the places that they aren't free at.

        They wait there one after the other. Booked all at once, they could miss the last turn, and go with those behind
        them: the last rate is exact when they are sent.
        """
        if self._is_off:
            return count, []
        size = min([count, *(place.free or place.most_at_once for place in self._places)])
        metered = [place for place in self._places if not place.free]
        for place in self._places:
            place.free = max(place.free - size, 0)
        return size, metered

    def _book(self, place: Place, size: int, bookings: _Bookings) -> Turn | None:
        """The turn to wait for; None if `size` bytes may go at once."""
        limiter = place.limiter
        try:
            reservation = limiter.reserve(place.key, size, place.most_wait_s)
        except STORE_ERRORS as error:
            if not self._admits_unchecked:
                log_for_operator("cut off", error)
                raise
            log_for_operator("admitted without a byte rate", error)
            return None
        if not reservation:
            why = "the store has no room for its key" if reservation.full else "too many bytes of its key wait"
            cut = TimeoutError(f"a body is cut off by {limiter!r}: {why}, the next ones for {reservation.delay} s")
            log_for_operator("cut off", cut)
            raise cut
        turn = Turn(limiter.store, reservation, place.held_back)
        bookings.turns.append(turn)
        if not reservation.delay_ns:
            return None
        if not self._held:
            self._held = [place.held_back for place in self._places if place.held_back.add()]
        return turn


class _ClientHasGone(Exception):
    pass


class _Bookings:
    """The bookings of one piece. If the block fails or is interrupted, it isn't sent, and they come back."""

    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is not None:
            for turn in self.turns:
                with contextlib.suppress(*STORE_ERRORS):
                    turn.cancel()
        return kind is _ClientHasGone
