"""Live rules of one process: what a middleware takes in place of a list of rules."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from forebay import forking
from forebay.alive import alive_in
from forebay.errors import InvalidLimiter, SegmentBusy, redacted_repr, short_repr
from forebay.rate import Duration, as_delay_ns
from forebay.rules.keys import Functions
from forebay.rules.live.election import Election
from forebay.rules.live.loader import LiveStatus, Loader, log, read_note
from forebay.rules.live.publication import Board, Publication, UnreadableRules
from forebay.rules.live.sources import Source
from forebay.rules.live.version import Version, make_version
from forebay.rules.loading import check_functions, check_store
from forebay.store import Store
from forebay.web import ByteRate, Deny, Request, Rule, Shed
from forebay.web.functions import has_to_be_awaited
from forebay.web.live_gate import LiveGate, VersionedRules

__all__ = ["LiveRules"]

NS: Final = 10**9
LEAST_S: Final = 0.01
MOST_S: Final = 86_400.0
PATIENCE_S: Final = 30.0
SETTLING_S: Final = 0.05


class LiveRules(VersionedRules):
    """Rules that change while the application runs: ``WSGIMiddleware(app, LiveRules(FileSource(path), store=store))``.

    * `source`: where the document is, which is as a rule file. It names no store.
    * `store`: where the limits are kept.
    * `tier`, `user`: as in ``load_rules``.
    * `interval`: the time between two readings of the source, from 10 ms to a day.
    * `host`: the ``Store`` that has the version, for limits over Redis. By default that of the limits. One segment has
      one version, so one document.

    One process of the host reads the source, and publishes what is valid. If it dies, another takes over. Every process
    compares the version at each request, and makes gates of a new one before it decides that request. A document that
    is gone or can't be used leaves the last good rules in force, also at a start. Then the logger ``forebay.rules``
    says so once, and ``status`` as long as it lasts.

    Raises, if there are no rules in force yet, ``InvalidRuleFile`` and what the source and the store raise;
    ``InvalidLimiter`` for other arguments that can't be used.

    *Threads*: safe. *Processes*: each makes its own, over the same store. *Fork*: safe; the child starts its thread
    at its first request. A request costs one load and a comparison, a new version O(size of the document).
    """

    def __init__(
        self,
        source: Source,
        *,
        store: Any,
        tier: Callable[[Request], str] | None = None,
        user: Callable[[Request], str | None] | None = None,
        interval: Duration = "1 s",
        host: Store | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise InvalidLimiter(f"source is a FileSource, SqlSource or RedisSource, not {redacted_repr(source)}")
        check_functions(tier, user)
        check_store(store)
        self._host = host if host is not None else getattr(store, "host_store", store)
        if not isinstance(self._host, Store):
            raise InvalidLimiter(
                f"{redacted_repr(store)} has no segment for the version of its rules: give a Store, host="
            )
        self._interval_s = as_delay_ns(interval, "interval is") / NS
        if not LEAST_S <= self._interval_s <= MOST_S:
            raise InvalidLimiter(f"interval is at least 10 ms, and at most a day, not {short_repr(interval)}")
        self._source, self._store, self._functions = source, store, Functions(tier, user)
        self._board, self._election = Board(self._host), Election(self._host)
        self._loader = Loader(source, self._board, store, self._functions, self._make)
        self._gates: weakref.WeakSet[LiveGate] = weakref.WeakSet()
        self._version: Version | None = None
        self._number = 0
        """The version that was looked at last; 0 if it is looked at again."""
        self._is_unread = False
        """Whether that version's file could not be read."""
        self._error: str | None = None
        self._closed = False
        self._begin()
        self._load_first()
        _all.add(self)

    def _begin(self) -> None:
        """Set up the state that belongs to one process."""
        # Reentrant, as a signal handler may be a request.
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_in_child(self) -> None:
        """Go on in a forked child, which has copies of locks in their state, and no threads."""
        self._begin()
        self._election.begin_in_child()
        for gate in alive_in(self._gates):
            gate.begin_in_child()

    # For gates

    @property
    def segment(self) -> Any:
        """The segment that has the version."""
        return self._board.segment

    @property
    def may_be_awaited(self) -> bool:
        """Whether the rules of some version may have to be awaited."""
        return bool(getattr(self._store, "is_awaited", False)) or has_to_be_awaited(self._functions.tier)

    def in_force(self) -> tuple[int, Sequence[ByteRate | Deny | Shed | Rule]]:
        """The version of the segment, and its rules: the last good ones if they can't be made."""
        with self._lock:
            number = self._board.version
            while number != self._number:
                try:
                    version = make_version(self._board.read(number), self._store, self._functions, number)
                except Exception as error:
                    if self._board.version != number:
                        number = self._board.version
                        continue
                    if self._version is None:
                        raise
                    self.refuse(number, error)
                    self._is_unread = isinstance(error, UnreadableRules)
                else:
                    self._version, self._error, self._is_unread = version, None, False
                self._number = number
            assert self._version is not None
            return number, self._version.rules

    def published(self) -> tuple[int, Publication]:
        """The version of the segment, and the publication of the rules in force: the last good ones, as `in_force`.

        Raises what `in_force` raises.
        """
        with self._lock:
            number, _ = self.in_force()
            assert self._version is not None
            return number, self._version.publication

    def refuse(self, version: int, error: Exception) -> None:
        """Keep the rules of before, and say so."""
        text = f"version {version} of the rules can't be used here: {error}"
        if text != self._error:
            log.error("%s\nthis process keeps the rules that it has", text)
        self._error = text

    def add(self, gate: LiveGate) -> None:
        """These rules have one more gate."""
        self._gates.add(gate)

    def begin(self) -> None:
        """Start this process's thread, at its first request: a server may fork its workers after it made the gate."""
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(
                    target=_run,
                    args=(weakref.ref(self), self._stop, self._interval_s),
                    name="forebay-rules",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    # The request goes on, and so does the loader, which may be another process.
                    log.error("this process has no thread for live rules, and only follows others: %s", error)
                else:
                    self._thread = thread

    # Loading

    def step(self) -> None:
        """For the thread: read the source if this process is the loader, and take over what is in force."""
        if self._host.closed:
            return
        with self._lock:
            if looks_again := self._is_unread:
                # This process may have had no descriptor left.
                self._number = 0
        if self._election.try_win():
            number, _ = self.in_force()
            self._loader.step(self._version, number)
            if self._version is None or self._version.number != number:
                # Other processes have their turn: one that can use the version in force goes on from there.
                self._election.give_up()
        else:
            self._loader.unwritten = None
        for gate in alive_in(self._gates):
            if looks_again or gate.watch.has_news():
                gate.refresh()

    def _load_first(self) -> None:
        """Publish the source's document, or wait for the process that does. Raises if there are no rules then."""
        deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + PATIENCE_S
        while True:
            if self._election.try_win():
                try:
                    self._load_as_loader()
                finally:
                    # The thread will be the loader: this process may only fork workers.
                    self._election.give_up()
                return
            if self._board.version:
                self.in_force()
                assert self._version is not None
                self._loader.start_with(self._version.publication.document)
                return
            if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
                raise SegmentBusy(
                    self._host.path or self._host.name,
                    "no rules, as the process that loads them doesn't go on",
                    "rules within 30 s",
                    "end that process; it may be stopped",
                )
            time.sleep(0.005)

    def _load_as_loader(self) -> None:
        number = self._board.version
        if number:
            try:
                number, _ = self.in_force()
            except Exception as error:
                # As that of another application.
                log.warning("version %d of the rules can't be used here: %s", number, error)
        problem = self._loader.step(self._version, number, at_once=self._version is None)
        if self._version is None and problem is not None:
            raise problem
        if self._loader.has_more:
            # The second reading of a file. A process may have no thread for it.
            time.sleep(SETTLING_S)
            self._loader.step(self._version, number)
        self.in_force()

    def _make(self, publication: Publication) -> Version:
        """A version, for which each gate of this process can be made. Raises what is wrong with it."""
        version = make_version(publication, self._store, self._functions)
        for gate in alive_in(self._gates):
            gate.gate_with(version.rules)
        return version

    # For users

    def status(self) -> LiveStatus:
        """The rules in force, the process that loads them, and the last problem. Reads a file, but not the source."""
        with self._lock:
            version, error = self._version, self._error
        assert version is not None
        note, checked_ago = read_note(self._board)
        unwritten = self._loader.unwritten
        if unwritten is not None and unwritten.loader == os.getpid():
            note = unwritten
        return LiveStatus(
            version.number,
            self._board.version,
            version.publication.source,
            version.publication.since,
            None if note is None else note.loader,
            checked_ago,
            None if note is None else note.error,
            error,
        )

    def close(self) -> None:
        """End the thread, and let another process load the rules. Gates keep the rules that they have."""
        with self._lock:
            self._closed = True
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._election.give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LiveRules {self._source.label}, version {self._number}>"


_all: weakref.WeakSet[LiveRules] = weakref.WeakSet()


def _run(ref: weakref.ref[LiveRules], stop: threading.Event, interval_s: float) -> None:
    """The thread's loop. It doesn't keep the rules alive."""
    while not stop.wait(interval_s):
        rules = ref()
        if rules is None:
            return
        try:
            rules.step()
        except Exception:
            # The next step may succeed.
            log.exception("live rules: a step of the loader has failed")
        del rules


def _begin_in_child() -> None:
    for rules in alive_in(_all):
        rules.begin_in_child()


forking.in_child(_begin_in_child)
