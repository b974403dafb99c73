"""The errors of a failing store, and what requests are answered meanwhile."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

from forebay.errors import (
    CostExceedsLimit,
    ForeignState,
    InvalidLimiter,
    SegmentError,
    StoreClosed,
    StoreUnavailable,
    short_repr,
)
from forebay.web.client import UnknownPeer

__all__ = ["DENYING_ERRORS", "STORE_ERRORS", "WhenUnavailable", "checked_when_unavailable"]

STORE_ERRORS: Final = (StoreUnavailable, StoreClosed, SegmentError, ForeignState)

DENYING_ERRORS: Final = (CostExceedsLimit, UnknownPeer, *STORE_ERRORS)
"""The errors that are answered (``Denials.for_error``), instead of failing the request."""

WhenUnavailable: TypeAlias = Literal["503", "429", "allow"]


def checked_when_unavailable(value: Any) -> WhenUnavailable:
    """Raises ``InvalidLimiter``."""
    if not isinstance(value, str) or value not in get_args(WhenUnavailable):
        raise InvalidLimiter(f'when_unavailable is "503", "429" or "allow", not {short_repr(value)}')
    checked: Any = value
    return checked  # type: ignore[no-any-return]
