"""The options of a storage, in its URI or as keywords.

=====================  =================================================================================================
``keys``               how many keys can be live at once, 100,000 by default; 21 bytes each, taken at once
``moving_window_keys`` how many of them for each limit of the moving window, 10,000 by default or `keys` if that is
                       less; each takes 8 bytes for every permit of the limit, or 808 of one above 101 where all
                       would take more than 16 MiB
``moving_windows``     limits whose memory is taken at once, as ``"100/minute; 10000/day"``; that of other limits is
                       taken at their first request
``on_full``            ``"evict"``, ``"deny"`` or ``"allow"``, see ``Store``
``mode``, ``group``    which users share the store, see ``Store``; a mode in a URI is octal: ``mode=660&group=www-data``
``directory``          where the segment's file is
``path``               the segment's file, instead of a name
``clock``              ``"monotonic"`` or ``"time"``, or as a keyword a ``ManualClock``; for tests
=====================  =================================================================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit

from limits import parse_many
from limits.errors import ConfigurationError

from forebay.errors import short_repr
from forebay.segment.sizes import MAX_KEYS
from forebay.store import Store, default_path

__all__ = ["StorageOptions"]

NAMES: Final = (
    *("keys", "moving_window_keys", "moving_windows", "on_full", "mode", "group", "directory", "path"),
    "clock",
)
KEYS: Final = 100_000
MOVING_WINDOW_KEYS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The store that a storage opens, and its moving windows."""

    uri: str | None
    name: str
    moving_window_keys: int
    moving_windows: list[tuple[int, int]]
    """Limits, and their periods in seconds."""
    store: dict[str, Any]
    """Arguments of ``Store``."""

    @classmethod
    def of(cls, uri: str | None, keywords: dict[str, Any]) -> StorageOptions:
        """Raises ``ConfigurationError`` that names the option that can't be used."""
        try:
            parts = urlsplit(uri or "forebay://")
        except ValueError as error:
            raise ConfigurationError(
                f"{short_repr(uri)} is no URI: that of a forebay storage is like forebay:///shop?keys=100000 ({error})"
            ) from None
        options: dict[str, Any] = {}
        for option, value in [*parse_qsl(parts.query, keep_blank_values=True), *keywords.items()]:
            if option not in NAMES:
                raise ConfigurationError(
                    f"a forebay storage has no option {short_repr(option)}; its options are {', '.join(NAMES)}"
                )
            if option in options:
                raise ConfigurationError(
                    f"the option {option} of a forebay storage is given twice, in {short_repr(uri)}"
                )
            options[option] = value
        for option, base in {"keys": 10, "moving_window_keys": 10, "mode": 8}.items():
            if isinstance(options.get(option), str):
                options[option] = _number(option, options[option], base)
        if str(options.get("group", "")).isdigit():
            options["group"] = int(options["group"])
        keys = options.setdefault("keys", KEYS)
        # If keys is no number, the store raises when it is opened.
        few_keys = min(keys, MOVING_WINDOW_KEYS) if isinstance(keys, int) and keys > 0 else MOVING_WINDOW_KEYS
        moving_window_keys = _moving_window_keys(options.pop("moving_window_keys", few_keys))
        moving_windows = _limits(options.pop("moving_windows", None))
        return cls(uri, _name(uri, parts.netloc, parts.path, options), moving_window_keys, moving_windows, options)

    @property
    def path(self) -> str:
        """The path of the store's file."""
        if "path" in self.store:
            return os.path.abspath(str(self.store["path"]))
        return default_path(self.name, self.store.get("directory"))

    @property
    def keys(self) -> int:
        keys: int = self.store["keys"]
        return keys

    def open_store(self) -> Store:
        """Raises ``ConfigurationError`` for arguments that can't make a store, and other errors of ``Store``."""
        try:
            return Store(self.name, **self.store)
        except ValueError as error:
            raise ConfigurationError(
                f"{short_repr(self.uri)} can't be a forebay storage, whose URI is like "
                f"forebay:///shop?keys=100000: {error}"
            ) from None


def _name(uri: str | None, netloc: str, path: str, options: dict[str, Any]) -> str:
    name = netloc + path.removeprefix("/")
    if "path" in options:
        if name:
            raise ConfigurationError(f"{short_repr(uri)} names a store and a path: a forebay storage has one of them")
        return str(options["path"])
    if not name or (netloc and path.removeprefix("/")):
        raise ConfigurationError(
            f"{short_repr(uri)} names no store: the URI of a forebay storage is like forebay:///shop?keys=100000"
        )
    return name


def _limits(text: object) -> list[tuple[int, int]]:
    if text is None:
        return []
    try:
        return [(item.amount, item.get_expiry()) for item in parse_many(cast(str, text))]
    except (ValueError, TypeError):
        raise ConfigurationError(
            "the option moving_windows of a forebay storage is text with limits, such as "
            f'"100/minute; 10000/day", not {short_repr(text)}'
        ) from None


def _moving_window_keys(keys: Any) -> int:
    # Checked here, since a moving window may be made as late as by a request.
    if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
        raise ConfigurationError(
            f"the option moving_window_keys of a forebay storage is a whole number from 1 to 2**32, not "
            f"{short_repr(keys)}"
        )
    return keys


def _number(option: str, text: str, base: int) -> int:
    try:
        return int(text.removeprefix("0o"), base)
    except ValueError:
        kind = "a whole number" if base == 10 else "an octal number"
        raise ConfigurationError(
            f"the option {option} of a forebay storage is {kind}, not {short_repr(text)}"
        ) from None
