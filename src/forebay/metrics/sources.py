"""What there is to read behind the stores that a collector is given."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from forebay._native import native, need_compiled_core
from forebay.errors import ForebayError, StoreClosed, short_repr
from forebay.metrics.readings import (
    SYNC_AGE,
    SYNC_PENDING,
    SYNC_UNNAMED,
    Metric,
    Observed,
    Reading,
    Value,
    clean,
    redis_readings,
    store_readings,
)
from forebay.seldom import Seldom
from forebay.store import Store
from forebay.store_options import DIRECTORY, checked_path, default_path

if native:
    from forebay.metrics.segments import observed_in
    from forebay.verification.mapped_segment import MappedSegment

__all__ = ["PREFIX", "Sources", "label_of", "path_of_store"]

PREFIX: Final = "forebay-"
LOG_EVERY_S: Final = 60.0
log: Final = logging.getLogger("forebay.metrics")
_turns: Final = Seldom(LOG_EVERY_S)


def path_of_store(name: str, directory: str | None = None) -> str:
    """The path of a store that is named by its name or, with a slash in it, by its path. Raises ``ValueError``."""
    if "/" not in name:
        return default_path(name, directory)
    if directory is not None:
        raise ValueError(f"{name!r} is the whole path of a file: give it or --directory, not both")
    return checked_path(name, "NAME", "file")


def label_of(path: str) -> str:
    """The name by which commands find a store: in the usual directory without the directory."""
    directory, file = os.path.split(path)
    name = file.removeprefix(PREFIX)
    return name if directory == os.path.normpath(DIRECTORY) and name != file else path


class Sources:
    """The stores of one collector.

    *Threads*: safe. *Fork*: safe. Each reading reads all stores; the file of a store that is given by name is opened
    for each reading, so a store that was made again is followed.
    """

    def __init__(self, stores: Iterable[Any]) -> None:
        """Takes stores of every kind, and names or paths of others. Raises ``TypeError`` and ``ValueError``."""
        self._read: dict[str, Callable[[], Iterator[Reading]]] = {}
        self._private: dict[str, Any] = {}
        for store in stores:
            self._add(store)
        if not self._read:
            raise ValueError("give at least one store, or the name of one")

    def readings(self) -> dict[Metric, dict[tuple[str, ...], Value]]:
        """The samples of every metric that has some, by the values of its labels."""
        found: dict[Metric, dict[tuple[str, ...], Value]] = {}
        for read in list(self._read.values()):
            for metric, labels, value in read():
                found.setdefault(metric, {})[labels] = value
        return found

    def _add(self, store: Any) -> None:
        if isinstance(store, (str, os.PathLike)):
            need_compiled_core("A store of other processes", "give the Store itself")
            path = os.path.abspath(path_of_store(os.fspath(store)))
            self._read.setdefault(
                f"store {path}", lambda: store_readings(label_of(path), _tried(path, _observed_at, path))
            )
        elif isinstance(store, Store):
            self._add_store(store)
        elif hasattr(store, "host_store") and hasattr(store, "redis_store"):
            # A leased or a synced one.
            self._add(store.host_store)
            self._add(store.redis_store)
            if hasattr(store, "interval_ns"):
                label, server = _label(store.host_store), store.redis_store.server
                self._read.setdefault(f"synced {label} {server}", lambda: _synced(store, (clean(label), clean(server))))
        elif hasattr(store, "server") and hasattr(store, "executor"):
            self._read.setdefault(f"redis {store.server}", lambda: _of_redis(store))
        else:
            raise TypeError(f"{short_repr(store)} is no store, and no name or path of one")

    def _add_store(self, store: Store) -> None:
        label = _label(store)
        key = f"store {os.path.abspath(store.path)}" if store.path else f"private {label}"
        if store.path is None and self._private.setdefault(label, store.segment) is not store.segment:
            raise ValueError(f"two stores would have the label {label!r}: give one of them a name")
        self._read.setdefault(key, lambda: store_readings(label, _tried(label, _observed_by, store)))


def _label(store: Store) -> str:
    return label_of(os.path.abspath(store.path)) if store.path else store.name


def _tried(what: str, look: Callable[..., Any], *arguments: Any) -> Any:
    """The result; None, and a line in the log now and then, for what can't be read now."""
    try:
        return look(*arguments)
    except (ForebayError, OSError) as error:
        if _turns.is_due((what, type(error))):
            log.warning("no metrics of %s: %s", what, error)
        return None


def _observed_at(path: str) -> Observed:
    with MappedSegment(path) as segment:
        return observed_in(segment)


def _observed_by(store: Store) -> Observed:
    """As outside, by the file that this process has open. Without it, only the counts that ``stats`` has."""
    if native:
        if store.closed:
            raise StoreClosed(f"{store!r} has no metrics any more")
        with store.attachment.lock():
            own = store.attachment.own_file()
            mapped = None if own is None else MappedSegment(store.path or f"/{store.name}", fd=own)
        if mapped is not None:
            with mapped as segment:
                return observed_in(segment, has_path=store.path is not None)
    stats = store.stats()
    limiters = {
        (label.removesuffix(f" ({counts.algorithm})"), counts.algorithm): counts
        for label, counts in stats.limiters.items()
    }
    return Observed(stats.keys, stats.live_keys, stats.bytes, limiters)


def _of_redis(store: Any) -> Iterator[Reading]:
    status = _tried(store.server, store.status)
    if status is not None:
        is_shared = store.executor.breaker.is_shared
        yield from redis_readings(store.server, is_shared, status.state, status.failures, status.failing_for_s)


def _synced(store: Any, labels: tuple[str, ...]) -> Iterator[Reading]:
    status = _tried(" ".join(labels), store.status)
    if status is not None:
        if status.exchanged_ago is not None:
            yield Reading(SYNC_AGE, labels, status.exchanged_ago)
        yield Reading(SYNC_PENDING, labels, status.pending_keys)
        yield Reading(SYNC_UNNAMED, labels, status.unnamed_keys)
