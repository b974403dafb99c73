"""Load shedders of a rule file, and the priority that the file's rules give a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forebay.errors import ForebayError, InvalidLimiter, InvalidRate, short_repr
from forebay.extras import Needs
from forebay.rate import as_delay_ns, as_period_ns
from forebay.rules.conditions import Condition
from forebay.rules.keys import Functions, tier_name
from forebay.rules.model import (
    AIMDShedder,
    BusyWorkersShedder,
    FileRule,
    Gradient2Shedder,
    ReservedSlotsShedder,
    RuleFile,
    Shedder,
)
from forebay.rules.overrides import response_options
from forebay.rules.places import Document, Path
from forebay.rules.problems import did_you_mean
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, Gradient2, ReservedSlots
from forebay.shedding.reserved import name_below
from forebay.store import Store
from forebay.web import Request, Shed
from forebay.web.functions import has_to_be_awaited
from forebay.web.patterns import RequestPattern

with Needs("rules", __name__):
    from msgspec import UNSET

__all__ = ["BuiltShedder", "PrioritizedRule", "Priority", "Shedders", "names_of_shedders"]

Refuse: TypeAlias = Callable[[Path, object], None]

OVERLOADED: Final = 503
"""The status of a request that is shed, unless the shedder has a response."""
_ALGORITHMS: Final[Mapping[type, Any]] = {Gradient2Shedder: Gradient2, AIMDShedder: AIMD}
_OF_ALGORITHMS: Final = (
    *("initial", "least", "most", "queue", "tolerance", "smoothing", "long_windows"),
    *("timeout", "backoff"),
)
_OF_SHEDS: Final = ("path", "methods", "ignore_case", "retry_after")
_PERIODS: Final = ("lease", "interval", "window", "timeout")


@dataclass(frozen=True, slots=True)
class PrioritizedRule:
    """A rule of the file that has a priority, and the requests that it is for."""

    spec: FileRule
    where: RequestPattern
    conditions: Sequence[Condition]


class Priority:
    """The priority of a request for a shedder: the function for the `priority` of a ``Shed``.

    The most important priority of the rules that are for the request counts. A rule counts only if it is
    for the request however a router reads its path, whichever of its methods the application takes, and only if the
    file knows the tier. Otherwise a client could get a priority by an odd spelling. Other requests have the last
    priority. O(rules with a priority).
    """

    def __init__(self, priorities: Sequence[str], rules: Iterable[PrioritizedRule], known: Iterable[str], tier: Any):
        """`known`: the file's tiers. `tier`: the function that returns a request's."""
        ranked = [rule for rule in rules if rule.spec.priority in priorities]
        self._ranked = sorted(ranked, key=lambda rule: priorities.index(str(rule.spec.priority)))
        self._last, self._known, self._tier = priorities[-1], frozenset(known), tier

    def __call__(self, request: Request) -> str:
        methods, paths = request.methods, request.paths
        for rule in self._ranked:
            if (
                rule.where.is_certain(methods, paths)
                and self._has_tier(rule.spec, request)
                and all(condition.holds(request) for condition in rule.conditions)
            ):
                return str(rule.spec.priority)
        return self._last

    def _has_tier(self, spec: FileRule, request: Request) -> bool:
        if not spec.tier and not spec.except_tier:
            return True
        name = tier_name(self._tier, request)
        return name in self._known and (name in spec.tier if spec.tier else name not in (spec.except_tier or ()))


@dataclass(frozen=True, slots=True)
class BuiltShedder:
    """A shedder of the file, and the ``Shed`` of the middleware that it has become."""

    name: str
    spec: Shedder
    rules: Mapping[None, Sequence[Shed]]

    @property
    def conditions(self) -> Sequence[Condition]:
        """Beside its path and methods it has none."""
        return ()


def names_of_shedders(file: RuleFile) -> dict[str, list[str]]:
    """For each shedder the names of the limiters that it may have."""
    return {name: _names_of(name, spec) for name, spec in (file.shedders or {}).items()}


def _names_of(name: str, spec: Shedder) -> list[str]:
    return [name, *(name_below(name, priority) for priority in dict.fromkeys(spec.priorities or ()))]


class Shedders:
    """Makes the shedders of a file. `refuse` and `refuse_word` take problems of a value and of a word."""

    def __init__(
        self,
        file: RuleFile,
        document: Document,
        store: Any,
        functions: Functions,
        refuse: Refuse,
        refuse_word: Refuse,
    ) -> None:
        self._file, self._functions, self._refuse, self._refuse_word = file, functions, refuse, refuse_word
        # A leased store has one of its host.
        self._store = getattr(store, "host_store", store)
        given = document.data.get("shedders") if isinstance(document.data, dict) else None
        self._specs: Mapping[str, Shedder] = file.shedders or {}
        self._are_all_valid = len(given) == len(self._specs) if isinstance(given, dict) else given is None
        self._rules: list[PrioritizedRule] = []

    def add(self, rule: PrioritizedRule, path: Path) -> None:
        """Note a rule with a priority, at this place of the file."""
        self._rules.append(rule)
        known = {priority for spec in self._specs.values() for priority in spec.priorities or ()}
        if self._are_all_valid and rule.spec.priority not in known:
            has = f"no shedder has the priority {short_repr(rule.spec.priority)}"
            self._refuse((*path, "priority"), f"{has}: {did_you_mean(str(rule.spec.priority), known)}")
        is_by_tier = bool(rule.spec.tier or rule.spec.except_tier)
        if is_by_tier and self._functions.tier is not None and has_to_be_awaited(self._functions.tier):
            self._refuse(
                (*path, "priority"), "the priority depends on the tier, so the function of load_rules can't be async"
            )

    def build(self, *, are_rules_valid: bool) -> list[BuiltShedder]:
        """Each shedder, in the order of the file. `are_rules_valid`: whether all rules with a priority were added."""
        if are_rules_valid:
            self._check_priorities()
        self._check_names()
        built = [self._built(name, spec) for name, spec in self._specs.items()]
        return [one for one in built if one is not None]

    def _check_priorities(self) -> None:
        """Each priority is a rule's, except the last, which all other requests have."""
        named = {rule.spec.priority for rule in self._rules}
        for name, spec in self._specs.items():
            for number, priority in enumerate(list(spec.priorities or ())[:-1]):
                if priority not in named:
                    reason = f"no rule has the priority {short_repr(priority)}: name it, or leave it out"
                    self._refuse(("shedders", name, "priorities", number), reason)

    def _check_names(self) -> None:
        """No limit and no other shedder has the name of a shedder's limiters."""
        taken = dict.fromkeys(self._file.limits, "the limit")
        for shedder, names in names_of_shedders(self._file).items():
            for name in names:
                if name in taken:
                    reason = f"{taken[name]} {short_repr(name)} has this name, too: rename one"
                    self._refuse_word(("shedders", shedder), reason)
                taken.setdefault(name, "a limiter of another shedder")

    def _built(self, name: str, spec: Shedder) -> BuiltShedder | None:
        path: Path = ("shedders", name)
        if not isinstance(self._store, Store):
            reason = "a shedder counts the requests of a host, in its memory, and the store of the file has none"
            self._refuse_word(path, reason)
            return None
        if not self._check_words(spec, path):
            return None
        options: dict[str, Any] = {
            word: value for word in _OF_SHEDS if (value := getattr(spec, word)) is not UNSET
        } | response_options(spec, OVERLOADED)
        try:
            shedder = _made(self._store, name, spec)
            if spec.priorities:
                tiers = self._file.tiers or ()
                options["priority"] = Priority(spec.priorities, self._rules, tiers, self._functions.tier)
            return BuiltShedder(name, spec, {None: [Shed(shedder, **options)]})
        except (ForebayError, ValueError, TypeError) as error:
            self._refuse_word(path, error)
            return None

    def _check_words(self, spec: Shedder, path: Path) -> bool:
        """Whether no word is wrong by itself."""
        found: list[tuple[Path, object]] = []
        for word in (*_PERIODS, "retry_after"):
            try:
                if text := getattr(spec, word, UNSET):
                    as_delay_ns(text, "retry_after is") if word == "retry_after" else as_period_ns(text)
            except InvalidRate as error:
                found.append(((*path, word), error))
        for word, options in (("path", {"path": spec.path or None}), ("methods", {"methods": spec.methods or ()})):
            try:
                RequestPattern.of(**{"path": None, "methods": (), "ignore_case": False, **options})  # type: ignore[arg-type]
            except InvalidLimiter as error:
                found.append(((*path, word), error))
        try:
            response_options(spec, OVERLOADED)
        except InvalidLimiter as error:
            found.append(((*path, "response"), error))
        priorities = list(spec.priorities or ())
        for number, priority in enumerate(priorities):
            if priority in priorities[:number]:
                reason = f"the priority {short_repr(priority)} is here twice: leave one out"
                found.append(((*path, "priorities", number), reason))
        reserved = getattr(spec, "reserved", UNSET) or {}
        for priority in reserved if priorities else ():
            if priority not in priorities:
                self._refuse_word(
                    (*path, "reserved", priority),
                    f"priorities has no {short_repr(priority)}: {did_you_mean(priority, priorities)}",
                )
                return False
        if not isinstance(spec, BusyWorkersShedder) and bool(priorities) != bool(reserved):
            given, missing = ("priorities", "reserved") if priorities else ("reserved", "priorities")
            found.append(((*path, given), f"it has no effect without {missing}: write both, or none"))
        for problem in found:
            self._refuse(*problem)
        return not found


def _made(store: Store, name: str, spec: Shedder) -> ReservedSlots | BusyWorkers | AdaptiveLimit:
    """Raises what its class raises."""

    def given(*words: str) -> dict[str, Any]:
        return {word: value for word in words if (value := getattr(spec, word, UNSET)) is not UNSET}

    if isinstance(spec, ReservedSlotsShedder):
        kept = {priority: spec.reserved.get(priority, 0) for priority in spec.priorities}
        return ReservedSlots(store, name, spec.slots, kept, **given("lease"))
    if isinstance(spec, BusyWorkersShedder):
        options = given("above", "below", "step", "interval", "lease")
        return BusyWorkers(store, name, spec.workers, spec.priorities, **options)
    reserved = {priority: (spec.reserved or {}).get(priority, "0%") for priority in spec.priorities or ()}
    algorithm = _ALGORITHMS[type(spec)](**given(*_OF_ALGORITHMS))
    return AdaptiveLimit(store, name, algorithm, reserved=reserved or None, **given("window", "lease"))
