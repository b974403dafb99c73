from typing import final

from typing_extensions import disjoint_base

@disjoint_base
class Reservable:
    """Base class of limiters and of ``AllOf``, which make reservations."""

@final
class Reservation:
    """Permits booked for later use. True if they were booked.

    * ``allowed``
    * ``delay``: seconds from the booking until the permits may be used; if nothing was booked, until another attempt
      may succeed
    * ``delay_ns``: the same in exact nanoseconds
    * ``due_ns``: the segment's time at the end of the delay
    * ``full``: the store had no room for the key, and its ``on_full`` decided

    Only limiters make reservations.
    """
    def __init__(self, *args: object, **kwargs: object) -> None: ...
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
        """Give back those of the permits that still count. Further calls do nothing.

        Later bookings keep their times, so no other request can take the place of this one. Nothing is given back while
        a later booking still waits for its time. In a child that was forked since the booking, ``cancel`` does nothing:
        only the process that booked can cancel. After ``StoreFull``, which only ``Credits`` raise, another call tries
        again.
        """
    def __bool__(self) -> bool: ...
