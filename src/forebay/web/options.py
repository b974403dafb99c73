"""The options of ``Gate`` that the middlewares and the frameworks' extensions take, too."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

from forebay.errors import InvalidLimiter, LimitsDisabledWarning, short_repr
from forebay.seldom import Seldom
from forebay.web.denials import log
from forebay.web.functions import check_function, has_to_be_awaited
from forebay.web.request import KeyFunction, Request
from forebay.web.store_errors import WhenUnavailable

if TYPE_CHECKING:
    from forebay.web.byte_rates import ByteRate
    from forebay.web.rules import BodyLimit, Denial, Deny, Rule, Shed

__all__ = ["GateOptions", "GivenRule", "GivenRules", "OnDenied", "checked_on_denied", "is_enabled"]

VARIABLE: Final = "FOREBAY_ENABLED"
VALUES: Final = {"true": True, "false": False}
_warning: Final = Seldom()

OnDenied = Callable[[Request, "Denial"], object]
GivenRule: TypeAlias = "Rule | Deny | Shed | BodyLimit | ByteRate"
GivenRules: TypeAlias = Iterable[GivenRule]
"""The rules of a middleware."""


class GateOptions(TypedDict, total=False):
    """See ``Gate``."""

    client: KeyFunction | None
    headers: str | Iterable[str]
    partition_keys: bool
    enabled: bool
    on_denied: OnDenied | None
    when_unavailable: WhenUnavailable


def is_enabled(enabled: Any) -> bool:
    """Whether limits apply: not if the argument or the environment switches them off. Then it warns, and logs."""
    if not isinstance(enabled, bool):
        raise InvalidLimiter(f"enabled is True or False, not {short_repr(enabled)}")
    text = os.environ.get(VARIABLE, "true")
    if text not in VALUES:
        raise InvalidLimiter(f"the environment variable {VARIABLE} is true or false, not {short_repr(text)}")
    if enabled and VALUES[text]:
        return True
    if _warning.is_due():
        switch = f"the environment variable {VARIABLE}" if enabled else "enabled=False"
        message = f"limits are switched off by {switch}: every request is handled, and none is counted"
        log.warning(message)
        warnings.warn(message, LimitsDisabledWarning, stacklevel=3)
    return False


def checked_on_denied(on_denied: Any) -> OnDenied | None:
    """Raises ``InvalidLimiter``."""
    if on_denied is None:
        return None
    check_function("on_denied is a callable that takes a request and a denial", on_denied, 2)
    if has_to_be_awaited(on_denied):
        raise InvalidLimiter(f"on_denied is a plain function, and {short_repr(on_denied)} has to be awaited")
    checked: OnDenied = on_denied
    return checked
