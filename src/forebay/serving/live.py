"""The plans of live rules: of the version in force, and of each later one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Final

import forebay.segment.layout as layout
from forebay.errors import ForebayError, InvalidLimiter
from forebay.rules.keys import Functions
from forebay.rules.live import FileSource, LiveRules
from forebay.rules.live.publication import Publication
from forebay.rules.live.version import build_published
from forebay.rules.problems import Problems
from forebay.rules.reading import read_document, read_rule_file
from forebay.serving.gated import GatePlan
from forebay.serving.plan import Plan, written
from forebay.serving.remembered import Remembered
from forebay.serving.unserved import refuse_unserved
from forebay.store import Store
from forebay.urls import connect

__all__ = ["LivePlans"]

_FUNCTIONS: Final = Functions(tier=lambda request: "")


class LivePlans:
    """Follows the live rules of a host, as its workers do, and takes part in loading them.

    `store`: a URL such as ``shm:///shop?keys=1000000``, or one of Redis with a store of the host, which has the
    version. Raises ``InvalidRuleFile`` if the server can't decide the rules in force, ``InvalidLimiter`` for a store
    without one of the host, and what source and store raise.

    *Threads*: one at a time. *Fork*: a process that follows live rules has no children.
    """

    def __init__(self, path: str | os.PathLike[str], store: str, *, tier_field: str | None) -> None:
        self._store: Any = connect(store)
        host = _host_of(self._store)
        self._remembered = Remembered()
        self._tier_field = tier_field
        self._domain = Path(path).stem
        self.memory: Final = _first_page(host)
        """A mapping of the segment's first page."""
        self.place: Final = layout.HEADER_OFFSET + layout.HEADER_RULES_VERSION
        """Where it has the number of the version in force."""
        self._rules = LiveRules(FileSource(path), store=self._store, tier=_FUNCTIONS.tier, host=host)
        self.number, self._made_of = self._rules.published()
        self.plan = self._plan(self._made_of)
        self._rules.begin()

    def latest(self) -> tuple[int, Plan | GatePlan | None]:
        """The version in force, and its plan: None if it can't be used, or is that of before."""
        number, publication = self._rules.published()
        if publication is self._made_of:
            return number, None
        # Another request doesn't try it again.
        self._made_of = publication
        try:
            return number, self._plan(publication)
        except (ForebayError, ValueError) as error:
            self.refuse(number, error)
            return number, None

    def refuse(self, number: int, error: Exception) -> None:
        """The plan of that version can't be used. The server keeps the one before, and the log has the reason."""
        self._rules.refuse(number, error)

    def _plan(self, publication: Publication) -> Plan | GatePlan:
        problems = Problems(publication.name)
        document = read_document(publication.name, publication.document, problems)
        spec = read_rule_file(document, problems)
        refuse_unserved(
            spec,
            document,
            problems,
            has_tiers=self._tier_field is not None,
            holds_permits=False,
        )
        problems.raise_if_any()
        built = build_published(spec, document, self._store, _FUNCTIONS, problems)
        return written(self._domain, spec, built, self._store, self._tier_field, publication.limits, self._remembered)


def _host_of(store: Any) -> Store:
    """The store that has the version. Closes the given one if there is none."""
    host = store if isinstance(store, Store) else getattr(store, "host_store", None) or store.host
    if isinstance(host, Store):
        return host
    store.close()
    raise InvalidLimiter(
        "the version of live rules is in the memory of a host, and the URL of this store in Redis names none: add the "
        "option host=shm:///NAME?keys=1000 to it, or start the server without --live"
    )


def _first_page(store: Store) -> mmap.mmap:
    file = store.attachment.own_file()
    if file is None:
        raise InvalidLimiter("live rules need the file of the store, which this process can't open")
    return mmap.mmap(file, mmap.PAGESIZE, prot=mmap.PROT_READ)
