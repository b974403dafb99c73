"""Warnings at start: each worker would count by itself, or no client would have an address."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from forebay._native import native
from forebay.core.limiter import Limiter
from forebay.errors import CountsPerWorkerWarning, UnknownClientsWarning
from forebay.seldom import Seldom
from forebay.web.client import UNIX_REMEDY, ClientAddress

if TYPE_CHECKING:
    from forebay.store import Store

__all__ = ["warn_if_clients_have_no_address", "warn_if_each_counts_alone"]

SERVERS: Final = ("gunicorn", "uvicorn", "hypercorn", "granian", "fastapi")
# Packages whose frames are between the user's line and this module.
OURS: Final = ("forebay", "django", "rest_framework", "starlette", "fastapi")

# A store is one cause, however many limiters and rules it has.
_warnings_of: weakref.WeakKeyDictionary[Store, Seldom] = weakref.WeakKeyDictionary()
_socket_warning: Final = Seldom()


def warn_if_each_counts_alone(limiters: Iterable[Limiter]) -> None:
    """Warn once if each of several workers makes a private store, instead of their parent before the fork.

    Without the compiled core every store is private.
    """
    # A store that was made before a fork is shared by all.
    alone = [
        x
        for x in limiters
        if x.store.path is None
        and not x.store.closed
        and not x.store.attachment.is_inherited
        and x.store not in _warnings_of
    ]
    workers = worker_count() if alone else 1
    if workers > 1 and _warnings_of.setdefault(alone[0].store, Seldom()).is_due():
        remedy = (
            f'Name the store, Store("shop", keys={alone[0].store.keys}), or make it before the workers are forked, as '
            f"by gunicorn --preload"
            if native
            else "forebay runs without its compiled core, so no store is shared: start one worker, or run it on Linux"
        )
        warnings.warn(
            f"limiter {alone[0].name!r} is in a private store of this process, one of {workers} workers: each counts "
            f"by itself, so together they allow {workers} times the limit. {remedy}",
            CountsPerWorkerWarning,
            stacklevel=_users_level(),
        )


def warn_if_clients_have_no_address(key_functions: Iterable[object]) -> None:
    """Warn once if one of these uses the peer's address, and the server listens at Unix sockets only."""
    if not any(isinstance(key, ClientAddress) and key.needs_peer for key in key_functions):
        return
    socket = unix_socket()
    if socket is not None and _socket_warning.is_due():
        warnings.warn(
            f"the server listens at the Unix socket {socket}, where no client has an address: unless an outer layer "
            f"sets it, requests that are limited by it are answered by 500; {UNIX_REMEDY}",
            UnknownClientsWarning,
            stacklevel=_users_level(),
        )


def unix_socket() -> str | None:
    """The socket at which this server listens, if it listens at Unix sockets only, and trusts no proxy's fields."""
    if (config := _gunicorn_config("gunicorn.")) is not None:
        trusts_all = "uvicorn" in str(config.worker_class_str) and "*" in config.forwarded_allow_ips
        sockets = [address for address in config.address if isinstance(address, str)]
        return sockets[0] if sockets and len(sockets) == len(config.address) and not trusts_all else None
    server, arguments = _command()
    if server == "hypercorn":
        binds = _values(arguments, ("--bind", "-b"))
        return binds[0] if binds and all(bind.startswith("unix:") for bind in binds) else None
    if server not in ("uvicorn", "granian"):
        return None
    trusted = [*_values(arguments, ("--forwarded-allow-ips",)), os.environ.get("FORWARDED_ALLOW_IPS", "")]
    return next(iter(_values(arguments, ("--uds",))), None) if trusted[0] != "*" else None


def _users_level() -> int:
    """The `stacklevel` with which the caller's warning points at the line that made the limits."""
    for level, frame in enumerate(_frames()):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in OURS:
            # The frames begin with _frames, this function and its caller. `stacklevel` counts the caller as 1.
            return level - 1
    return 1


def worker_count() -> int:
    """How many workers run, if this is one of them; 1 if it isn't one, or if the number is unknown."""
    config = _gunicorn_config()
    if config is not None:
        return int(config.workers)
    if (uwsgi := sys.modules.get("uwsgi")) is not None:
        # 0: not forked yet.
        return int(uwsgi.numproc) if uwsgi.worker_id() else 1
    if multiprocessing.parent_process() is None:
        return 1
    server, arguments = _command()
    if server not in SERVERS:
        return 1
    return _count(arguments) or _count(["--workers", os.environ.get("WEB_CONCURRENCY", "")]) or 1


def _command() -> tuple[str, list[str]]:
    """The name of the program that was started, and its arguments."""
    folder, name = os.path.split(sys.argv[0] if sys.argv else "")
    return os.path.basename(folder) if name == "__main__.py" else name, sys.argv[1:]


def _gunicorn_config(within: str = "gunicorn.workers.") -> Any:
    """The configuration of the gunicorn worker that imports the application now; None without one."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").startswith(within):
            config = getattr(frame.f_locals.get("self"), "cfg", None)
            if config is not None:
                return config
    return None


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _count(arguments: Sequence[str]) -> int:
    """The number of workers that a command line names; 0 if it names none."""
    numbers = _values(arguments, ("--workers", "-w"))
    return int(numbers[0]) if numbers and numbers[0].isdecimal() else 0


def _values(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """The values of an option, which may have several names."""
    values = []
    for i, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in options:
            values.append(value or (arguments[i + 1] if i + 1 < len(arguments) else ""))
    return values
