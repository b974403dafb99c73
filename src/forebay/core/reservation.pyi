from typing import NoReturn, final

@final
class Reservation:
    """Permits booked for later. True when they were.

    ``allowed``; ``delay``, the seconds from the booking on after which they may be used, or, when nothing was booked,
    after which asking again may succeed; ``delay_ns`` and ``due_ns``, the same in exact nanoseconds, and as the
    segment's time; ``full``, whether the store had no room for the key, so that its ``on_full`` has decided.
    Reservations are made by limiters only.
    """
    def __init__(self, *args: object, **kwargs: object) -> NoReturn: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def delay(self) -> float: ...
    @property
    def delay_ns(self) -> int: ...
    @property
    def due_ns(self) -> int: ...
    @property
    def full(self) -> bool: ...
    def cancel(self) -> None:
        """Give the permits back, once, as far as they still count.

        Who has booked behind keeps its time. So as long as one of them may not go yet, nothing is given back: the place
        of this booking can't be given to anybody else. In a child that was forked since, it does nothing: only the
        process that has booked cancels.
        """
    def __bool__(self) -> bool: ...
