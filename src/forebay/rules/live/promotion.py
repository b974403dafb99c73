"""Promotion: a rule in the shadow is enforced, or a canary's limits hold for every key."""

from __future__ import annotations

import re
from typing import Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.rules.keys import Functions
from forebay.rules.loading import check
from forebay.rules.places import Place
from forebay.rules.problems import did_you_mean

__all__ = ["promoted"]

_VALUE: Final = re.compile(r"[+\-.\w]+")


def promoted(document: bytes, name: str, rule: str) -> tuple[bytes, str]:
    """The document with the rule promoted, and what that means, in words. Everything else stays as it is written.

    Raises ``InvalidRuleFile``, and ``InvalidLimiter`` if there is nothing to promote.
    """
    # Whatever the document says of tiers, the application's function is not here.
    functions = Functions(lambda request: "")
    spec, read, _ = check(name, document, functions)
    names = [one.name for one in spec.rules]
    if rule not in names:
        raise InvalidLimiter(f"there is no rule {short_repr(rule)}: {did_you_mean(rule, names)}")
    number = names.index(rule)
    # The spec becomes that of the document as it should be.
    found, path = spec.rules[number], ("rules", number)
    if found.shadow:
        found.shadow = False
        place, value, what = read.value((*path, "shadow")), "false", "is enforced"
    elif found.canary:
        found.canary.percent = 100
        place, value, what = read.value((*path, "canary", "percent")), "100", "has its canary's limits for all"
    else:
        raise InvalidLimiter(f"the rule {short_repr(rule)} is neither in the shadow nor has a canary")
    changed = _with_value(document.decode(), place, value).encode()
    if check(name, changed, functions)[0] != spec:
        raise InvalidLimiter(f"the word of the rule {short_repr(rule)} isn't found in {name}: change it by hand")
    return changed, what


def _with_value(text: str, place: Place, value: str) -> str:
    """The text with another value at the place; the same text if there is none. YAML breaks lines elsewhere, too."""
    lines = text.split("\n")
    if place.line > len(lines):
        return text
    line, start = lines[place.line - 1], place.column - 1
    found = _VALUE.match(line, start)
    if found is None:
        return text
    lines[place.line - 1] = line[:start] + value + line[found.end() :]
    return "\n".join(lines)
