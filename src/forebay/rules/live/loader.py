"""The loader: the one process of a host that reads the source of live rules and publishes what is good."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from forebay.extras import Needs
from forebay.rules.keys import Functions
from forebay.rules.live.publication import Board, Publication, UnreadableRules
from forebay.rules.live.sources import Source
from forebay.rules.live.standing import Standing, change_of, standings
from forebay.rules.live.version import Version, checked_limits
from forebay.rules.model import Limit
from forebay.store import Store

with Needs("rules", __name__):
    import msgspec
    from msgspec import Struct

__all__ = ["LiveStatus", "Loader", "Note", "read_note"]

log: Final = logging.getLogger("forebay.rules")


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """The state of live rules, for metrics and checks."""

    version: int
    """The number of the rules in force in this process."""
    published: int
    """The number of the host's rules: another one if this process hasn't had a request since, or can't use them."""
    source: str
    """Where the rules in force came from."""
    since: datetime
    """When they were published."""
    loader: int | None
    """The process that loads the rules of the host; None if there was none yet."""
    checked_ago: float | None
    """Seconds since it has last read the source; None if it hasn't yet."""
    error: str | None
    """Why the source isn't in force now: it is gone, or what it holds can't be used. None if it is."""
    process_error: str | None
    """Why this process doesn't use the version that is published; None if it does."""


class Note(Struct, frozen=True):
    """A loader's report to the other processes."""

    loader: int
    error: str | None


class Loader:
    """Reads a source, and publishes what is good. *Threads*: one at a time.

    `make` makes a version of the rules in this process, as ``LiveRules`` uses it, and raises what is wrong with it.
    """

    def __init__(
        self,
        source: Source,
        board: Board,
        store: Any,
        functions: Functions,
        make: Callable[[Publication], Version],
    ) -> None:
        self._source, self._board, self._store = source, board, store
        self._functions, self._make = functions, make
        self._handled: bytes | None = None
        """The document that was published or in force at the start, or that no process can use."""
        self._refusal: str | None = None
        """Why no process can use it."""
        self._seen: bytes | None = None
        """The document of the last reading, if that was another one."""
        self.error: str | None = None
        self.unwritten: Note | None = None
        """The note, if it can't be written."""

    @property
    def has_more(self) -> bool:
        """Whether the last step has left a document to the next one."""
        return self._seen is not None and self._seen != self._handled

    def start_with(self, document: bytes) -> None:
        """The document in force at this process's start.

        It is not published over a newer one: the source of an older deployment may be older, too.
        """
        self._handled = document

    def step(self, in_force: Version | None, seen: int, *, at_once: bool = False) -> Exception | None:
        """Publish the source's document, if it is another one and good. Returns why not.

        `in_force`: the version of this process, or None. `seen`: the version of the host that it has looked at, which
        it may not be able to use. `at_once`: a document that may be in parts counts, too.
        """
        error = self._publish_news(in_force, seen, at_once)
        self._leave_note()
        return error

    def _publish_news(self, in_force: Version | None, seen: int, at_once: bool) -> Exception | None:
        try:
            document = self._source.read()
        except Exception as error:
            self._complain(f"can't be read: {_described(error)}", in_force)
            return error
        if in_force is not None and document == in_force.publication.document:
            # Also after a refused one: the source is as the rules in force again.
            self._seen = None
            self._handle(document, None, in_force)
            return None
        if document == self._handled:
            # Again, after a reading that has failed or has found another one.
            self._complain(self._refusal or _replaced_by(in_force, seen), in_force)
            return None
        is_settled = at_once or self._source.is_whole or document == self._seen
        self._seen = document
        if not is_settled:
            return None
        if self._board.version != seen:
            # Another process has published since. The next step begins with that.
            return None
        published = in_force.publication if in_force is not None and in_force.number == seen else self._published(seen)
        if in_force is None:
            if seen and published is None:
                log.error("limits that have changed before count as if they had not: version %d can't be read", seen)
        else:
            if published is None:
                # Without it, it is unknown where limits count. The next step reads it again.
                return None
            if published.document == document:
                # This process can't use it, and others can.
                self._handle(document, None, in_force)
                return None
        try:
            limits = checked_limits(self._source.name, document, self._functions, self._store)
        except Exception as error:
            self._handle(document, f"holds what can't be used: {_described(error)}", in_force)
            return error
        try:
            version = self._publish(document, limits, {} if published is None else published.limits, seen)
        except Exception as error:
            # The next step tries again: a file system may be full.
            self._complain(f"can't be put in force: {_described(error)}", in_force)
            return error
        if version is not None:
            self._handle(document, None, in_force)
        return None

    def _handle(self, document: bytes, refusal: str | None, in_force: Version | None) -> None:
        self._handled, self._refusal = document, refusal
        self._complain(refusal, in_force)

    def _publish(
        self, document: bytes, limits: Mapping[str, Limit], before: Mapping[str, Standing], seen: int
    ) -> int | None:
        """`before`: where the limits of the version `seen` count, which goes on in this one."""
        after = standings(before, limits, self._store, self._store_now_ns())
        publication = Publication(
            self._source.name, self._source.label, os.getpid(), datetime.now(UTC), after, document
        )
        self._make(publication)
        version = self._board.publish(publication, seen)
        if version is not None:
            changed = [
                f"{name} ({change_of(before.get(name), after[name])})"
                for name, limit in limits.items()
                if name in before and before[name].limit not in (None, limit)
            ]
            log.info(
                "version %d of the rules is in force, from %s; changed limits, and their keys' state: %s",
                version,
                self._source.label,
                ", ".join(changed) or "none",
            )
        return version

    def _published(self, version: int) -> Publication | None:
        """The publication in force on the host. None if there is none, or if it can't be read."""
        with contextlib.suppress(UnreadableRules):
            return self._board.read(version)
        return None

    def _store_now_ns(self) -> int:
        """The time by which limits count: the host's store may have another one."""
        return int(self._store.now_ns() if isinstance(self._store, Store) else self._board.segment.now_ns())

    def _complain(self, error: str | None, in_force: Version | None) -> None:
        """Log an error once, and its end. Without rules in force the application doesn't start, and says why itself."""
        if error == self.error or in_force is None:
            return
        if error is None:
            log.info("%s is readable and valid again", self._source.label)
        else:
            log.error("%s %s\nthe last good rules stay in force", self._source.label, error)
        self.error = error

    def _leave_note(self) -> None:
        """For ``LiveRules.status`` of every process."""
        note = Note(os.getpid(), None if self.error is None else f"{self._source.label} {self.error}")
        try:
            if read_note(self._board)[0] == note:
                os.utime(self._board.note_path)
            else:
                self._board.write_note(msgspec.json.encode(note))
        except OSError:
            self.unwritten = note
        else:
            self.unwritten = None


def read_note(board: Board) -> tuple[Note | None, float | None]:
    """The note of the host's last loader, and how many seconds ago it has read the source."""
    try:
        with open(board.note_path, "rb") as file:
            age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
            return msgspec.json.decode(file.read(), type=Note), age_s
    except (OSError, msgspec.MsgspecError):
        return None, None


def _replaced_by(in_force: Version | None, seen: int) -> str | None:
    if in_force is None or in_force.number != seen:
        # The status of the process has its reason.
        return None
    return (
        f"holds a document that was in force before that of process {in_force.publication.loader}: a change of it "
        "counts again"
    )


def _described(error: BaseException) -> str:
    # A driver's message may quote its URL.
    text = str(error)
    return (
        text if type(error).__module__.startswith("forebay") else f"{type(error).__name__}: {_without_passwords(text)}"
    )


def _without_passwords(text: str) -> str:
    return re.sub(r"(://[^/\s:@]*:)[^@\s/]*@", r"\1***@", text)
