"""The arguments of stores, checked."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from forebay.clock import ManualClock
from forebay.errors import short_repr

__all__ = ["DIRECTORY", "check_options", "checked_mode", "default_path", "is_name", "path_of"]

DIRECTORY: Final = "/dev/shm/"
MAX_KEYS: Final = 2**36
LEAST_HOT_KEYS: Final = 4
MOST_HOT_KEYS: Final = 2**16
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a store could have that name."""
    return _NAME.fullmatch(text) is not None


def path_of(name: str | None, path: str | os.PathLike[str] | None, directory: str | os.PathLike[str] | None) -> str:
    if path is None:
        return default_path(name, directory)
    if directory is not None:
        raise ValueError(f"path={short_repr(path)} is the whole path of the file: give it or directory=, not both")
    return checked_path(path, "path", "file")


def default_path(name: str | None, directory: str | os.PathLike[str] | None = None) -> str:
    """The path of the store of that name."""
    if isinstance(name, str) and "://" in name:
        # The message leaves out the URL: it may contain a password.
        raise ValueError("a store's name is no URL: for limits over Redis use RedisStore(url) of forebay.redis")
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(
            f"a store's name is 1 to 100 letters, digits, '_', '.' and '-', and does not begin with '.' or '-'; "
            f"not {short_repr(name)}"
        )
    where = DIRECTORY if directory is None else checked_path(directory, "directory", "directory")
    return os.path.join(where, f"forebay-{name}")


def checked_path(path: Any, option: str, kind: str) -> str:
    try:
        target = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise ValueError(f"{option} is the path of a {kind}, as text or a Path, not {short_repr(path)}") from None
    if "\0" in target:
        raise ValueError(f"{option} is the path of a {kind}, which has no zero byte in it, not {short_repr(path)}")
    return target


def check_options(keys: int, on_full: str | None, clock: object, hot_keys: int | None = None) -> None:
    if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
        raise ValueError(f"keys is a whole number from 1 to 2**36, not {short_repr(keys)}")
    if on_full not in (None, "evict", "deny", "allow"):
        raise ValueError(f"on_full is 'evict', 'deny' or 'allow', not {short_repr(on_full)}")
    is_number = isinstance(hot_keys, int) and not isinstance(hot_keys, bool)
    if hot_keys is not None and not (is_number and LEAST_HOT_KEYS <= hot_keys <= MOST_HOT_KEYS):
        raise ValueError(
            f"hot_keys is a whole number from {LEAST_HOT_KEYS} to {MOST_HOT_KEYS}, or None for no record of hot keys, "
            f"not {short_repr(hot_keys)}"
        )
    if not isinstance(clock, ManualClock) and clock not in ("monotonic", "time"):
        raise ValueError(f"clock is 'monotonic', 'time' or a forebay.testing.ManualClock, not {short_repr(clock)}")


def checked_mode(mode: int, group: str | int | None) -> int:
    if not isinstance(mode, int) or mode not in (0o600, 0o660):
        given = f"{mode:#o}" if isinstance(mode, int) else short_repr(mode)
        raise ValueError(f"mode is 0o600 (this user) or 0o660 (with a group), not {given}")
    if group is not None and mode != 0o660:
        raise ValueError(f"group={group!r} needs mode=0o660: members of a group share a store by writing to it")
    return mode
