"""One version of live rules, as a process has it: the limiters and rules that it has made of a publication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.rules.building import Built, BuiltRule, build
from forebay.rules.keys import Functions
from forebay.rules.live.carrying import MARKS, carried
from forebay.rules.live.publication import Publication
from forebay.rules.loading import check
from forebay.rules.model import Limit, RuleFile
from forebay.rules.places import Document
from forebay.rules.problems import Problems
from forebay.rules.reading import read_document, read_rule_file
from forebay.rules.shedders import names_of_shedders
from forebay.rules.together import names_of_limits
from forebay.store import Store
from forebay.web import ByteRate, Deny, Rule, Shed
from forebay.web.bans import names_of_limiters
from forebay.web.charging_once import name_of_attempts

__all__ = ["Version", "build_published", "checked_limits", "make_version"]


@dataclass(frozen=True, eq=False, slots=True)
class Version:
    """The rules of a publication."""

    publication: Publication
    rules: Sequence[Deny | Shed | Rule | ByteRate] = field(repr=False)
    number: int = 0
    """0 for one that isn't published yet."""


def checked_limits(name: str, document: bytes, functions: Functions, store: Any = None) -> Mapping[str, Limit]:
    """The limits of a document, checked as a whole. `store`: theirs, if it is known.

    Raises ``InvalidRuleFile``. O(size of the document).
    """
    spec, read, _ = check(name, document, functions)
    problems = Problems(name)
    if spec.store:
        problems.add(read.word(("store",)), "live rules are for the store of LiveRules: leave 'store' out")
    if store is not None and not isinstance(store, Store):
        for limit, of in spec.limits.items():
            if of.on_change in ("share", "reset"):
                # A reset counts in cells of the next generation, and each host has its own number of generations.
                problems.add(
                    read.value(("limits", limit, "on_change")),
                    f"on_change = {of.on_change!r} is for limits in the memory of one host, and these are at Redis, "
                    f"where hosts that have seen other changes would count apart: leave it out, or rename the limit",
                )
    problems.raise_if_any()
    return spec.limits


def make_version(publication: Publication, store: Any, functions: Functions, number: int = 0) -> Version:
    """The rules of a document that was checked. Raises ``InvalidRuleFile``, and what the store raises."""
    problems = Problems(publication.name)
    document = read_document(publication.name, publication.document, problems)
    rules = []
    for one in build_published(read_rule_file(document, problems), document, store, functions, problems):
        for of_effect in one.rules.values():
            for at, rule in enumerate(of_effect):
                live = carried(rule, publication.limits, store)
                if isinstance(one, BuiltRule) and not isinstance(live, (Deny, Shed)):
                    # Requests that a version holds back count for the next one, too.
                    live.held_back.counted_as = store, one.spec.name, at
                rules.append(live)
    return Version(publication, rules, number)


def build_published(
    spec: RuleFile, document: Document, store: Any, functions: Functions, problems: Problems
) -> list[Built]:
    """As ``build``, beside the limiters of other versions."""
    # Limiters of the version before live on, and count apart if they must.
    bans = [limiter for name in spec.bans or () for limiter in names_of_limiters(name)]
    attempts = [name_of_attempts(name) for rule in spec.rules if rule.request_id for name in names_of_limits(rule)]
    slots = [limiter for names in names_of_shedders(spec).values() for limiter in names]
    for name in (*spec.limits, *bans, *slots, *attempts, MARKS):
        store.names.expect_several(name)
    return build(spec, document, store, functions, problems)
