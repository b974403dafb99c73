"""Bans and deny lists of a rule file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from forebay.errors import ForebayError, InvalidLimiter, InvalidRate, short_repr
from forebay.rules.conditions import AddressCondition, Condition, network_of
from forebay.rules.model import FileDeny, FileRule, RuleFile
from forebay.rules.overrides import DENIED, response_options
from forebay.rules.places import Document, Path
from forebay.rules.problems import did_you_mean
from forebay.store import Store
from forebay.web import AddressList, Ban, ClientAddress, Deny
from forebay.web.bans import names_of_limiters

__all__ = ["BuiltDeny", "Refusals"]

Refuse: TypeAlias = Callable[[Path, object], None]


@dataclass(frozen=True, slots=True)
class BuiltDeny:
    """A deny list of the file, and the ``Deny`` of the middleware that it has become."""

    spec: FileDeny
    conditions: Sequence[Condition]
    rules: Mapping[None, Sequence[Deny]]


class Refusals:
    """Makes the bans and deny lists of a file. `refuse` and `refuse_word` take problems of a value and of a word."""

    def __init__(
        self, file: RuleFile, document: Document, store: Any, client: ClientAddress, refuse: Refuse, refuse_word: Refuse
    ) -> None:
        self._file, self._client, self._refuse, self._refuse_word = file, client, refuse, refuse_word
        given = document.data.get("bans") if isinstance(document.data, dict) else None
        self._names = [name for name in given if name] if isinstance(given, dict) else []
        """Also of bans with a problem."""
        self._bans: dict[str, Ban] = {}
        for name in file.bans or ():
            self._make_ban(name, store)

    def ban_of(self, rule: FileRule, path: Path) -> dict[str, Ban]:
        """The option of a ``Rule``, if the rule has a ban."""
        if not rule.ban:
            return {}
        if rule.ban not in self._names:
            known = did_you_mean(rule.ban, self._names)
            self._refuse((*path, "ban"), f"there is no ban {short_repr(rule.ban)}: {known}")
        return {"ban": self._bans[rule.ban]} if rule.ban in self._bans else {}

    def denies(self) -> list[BuiltDeny]:
        """Each list. Its addresses are found as those of the file's keys are."""
        built = [self._deny(spec, ("deny", number)) for number, spec in enumerate(self._file.deny or ())]
        return [deny for deny in built if deny is not None]

    def check_names(self, rules: Iterable[FileRule]) -> None:
        """Each ban is a rule's, and each list has a name of its own. `rules`: those without a problem."""
        rules = list(rules)
        used = {rule.ban for rule in rules}
        for name in self._names:
            if len(rules) == len(self._file.rules) and name not in used:
                self._refuse_word(("bans", name), f"no rule names the ban {short_repr(name)}: name it, or leave it out")
        places: dict[str, str] = {rule.name: "a rule" for rule in rules}
        for number, spec in enumerate(self._file.deny or ()):
            if spec.name in places:
                self._refuse(("deny", number, "name"), f"{places[spec.name]} has the name {short_repr(spec.name)}, too")
            places.setdefault(spec.name, f"deny[{number}]")

    def _make_ban(self, name: str, store: Any) -> None:
        bans: Any = self._file.bans
        path, ban = ("bans", name), bans[name]
        # A leased store has one of its host.
        store = getattr(store, "host_store", store)
        if not isinstance(store, Store):
            self._refuse_word(
                path,
                "a ban is kept in the memory of a host, and a redis store has none: leave the ban out, or "
                "write a store of shm, leased+redis or synced+redis",
            )
            return
        for limiter in names_of_limiters(name):
            if limiter in self._file.limits:
                self._refuse_word(
                    ("limits", limiter), f"the ban {short_repr(name)} has a limiter of this name: rename one"
                )
        for word, value in (("denials", ban.denials), ("lasts", ban.lasts)):
            try:
                with Store.private(keys=64) as scratch:
                    Ban(scratch, name, **{"denials": "1/second", "lasts": "1s", word: value})
            except InvalidRate as error:
                self._refuse((*path, word), error)
                return
        try:
            self._bans[name] = Ban(store, name, ban.denials, lasts=ban.lasts)
        except (ForebayError, ValueError) as error:
            self._refuse_word(path, error)

    def _deny(self, spec: FileDeny, path: Path) -> BuiltDeny | None:
        networks = []
        for number, text in enumerate(spec.address):
            try:
                networks.append(network_of(text))
            except ValueError as error:
                self._refuse((*path, "address", number), error)
        if len(networks) != len(spec.address):
            return None
        until = spec.until or None
        options = {
            word: value for word in ("path", "methods", "ignore_case") if (value := getattr(spec, word)) or value == []
        }
        try:
            options |= response_options(spec, DENIED)
        except InvalidLimiter as error:
            self._refuse((*path, "response"), error)
            return None
        addresses = AddressList({str(network): until for network in networks})
        try:
            deny = Deny(addresses, client=self._client, **options)
        except InvalidLimiter as error:
            self._refuse_word(path, error)
            return None
        return BuiltDeny(spec, [AddressCondition(self._client, networks, is_inside=True)], {None: [deny]})
