"""Checks of a rule file as a whole: its rules, limits, tiers and request ids beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from forebay.errors import short_repr
from forebay.extras import Needs
from forebay.rules.model import FileRule, RuleFile
from forebay.rules.places import Path, path_text
from forebay.rules.reading import BROKEN
from forebay.web import RequestId
from forebay.web.charging_once import name_of_attempts

with Needs("rules", __name__):
    import msgspec

__all__ = ["Together", "names_of_limits"]

Refuse: TypeAlias = Callable[[Path, object], None]


def names_of_limits(rule: FileRule) -> list[str]:
    """The names of all limits of a rule, also of those of its canary and its overrides."""
    canary = rule.canary.limits if rule.canary else ()
    return [*(rule.limits or ()), *canary, *(name for one in rule.overrides for name in one.limits or ())]


class Together:
    """Finds the problems. `names`: of all limits, also of those with a problem.

    `refuse` and `refuse_word` take problems of a value and of a word.
    """

    def __init__(self, file: RuleFile, names: Sequence[str], refuse: Refuse, refuse_word: Refuse) -> None:
        self._file, self._names, self._refuse, self._refuse_word = file, names, refuse, refuse_word

    def check_names(self) -> None:
        names: dict[str, int] = {}
        seen: dict[str, int] = {}
        for number, rule in enumerate(self._file.rules):
            if rule is BROKEN:
                continue
            first = names.setdefault(rule.name, number)
            if first != number:
                self._refuse(("rules", number, "name"), f"rules[{first}] has the name {short_repr(rule.name)}, too")
            first = seen.setdefault(repr(msgspec.structs.replace(rule, name="")), number)
            if first != number:
                self._refuse_word(
                    ("rules", number), f"it repeats rules[{first}], so each request would be charged twice"
                )

    def check_request_ids(self, request_ids: Mapping[Path, RequestId]) -> None:
        """A request has one id, and no limit has the name of the limiter that counts its attempts."""
        for path, request_id in request_ids.items():
            first = next(iter(request_ids))
            if request_id != request_ids[first]:
                self._refuse(path, f"a request has one id, and {path_text(first)} is another one: write the same")
            for name in names_of_limits(self._file.rules[int(path[1])]):
                if name_of_attempts(name) in self._names:
                    reason = f"the limit {short_repr(name_of_attempts(name))} has the name of the count of its attempts"
                    self._refuse(path, f"{reason}: rename it")

    def check_limits(self) -> None:
        by_unit: dict[bool, set[str]] = {True: set(), False: set()}
        for rule in self._file.rules:
            by_unit[bool(rule.bytes)].update(names_of_limits(rule))
        used = by_unit[True] | by_unit[False]
        for name in by_unit[True] & by_unit[False]:
            reason = "a rule with bytes names it, and one without: make two limits, of bytes and of requests"
            self._refuse_word(("limits", name), reason)
        for name in self._names:
            if name not in used:
                reason = f"no rule names the limit {short_repr(name)}: name it, or leave it out"
                self._refuse_word(("limits", name), reason)

    def check_tiers(self) -> None:
        """Each tier is one of a rule's, or is excepted from one: else it would have no limit by mistake.

        A file may have tiers for priorities only. Its limits hold for all tiers then.
        """
        known = self._file.tiers or []
        by_tier = [rule for rule in self._file.rules if rule.tier or rule.except_tier]
        limiting = [rule for rule in by_tier if rule.limits]
        named = {name for rule in limiting for name in (known if rule.except_tier else rule.tier or ())}
        if by_tier and not limiting:
            named = {*known}
        for number, name in enumerate(known):
            if name in known[:number]:
                self._refuse(("tiers", number), f"the tier {short_repr(name)} is here twice: leave one out")
            elif name not in named:
                reason = f"no rule's tier or except_tier is about {short_repr(name)}: name it, or leave it out"
                self._refuse(("tiers", number), reason)
