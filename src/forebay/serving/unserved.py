"""Refuses what the server can't decide, with its place in the file. Nothing of a rule is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.extras import Needs
from forebay.rules import model
from forebay.rules.model import FileDeny, FileRule, RuleFile
from forebay.rules.places import Document, Path, path_text
from forebay.rules.problems import Problems
from forebay.rules.together import names_of_limits

with Needs("rules", __name__):
    import msgspec
    from msgspec import UNSET

__all__ = ["needs_client", "refuse_unserved"]

_NO_RESPONSES: Final = "the server sees no response"
_NO_END: Final = "the server doesn't see when a request ends"
_NO_BODIES: Final = "the server sees no body"
_NO_TURNS: Final = "the server answers at once, and holds no request back"
_NO_LOAD: Final = "the server sees no load of the application"
_NO_TIERS: Final = "no field names the tier: start the server with --tier-header NAME, a field that your proxy sets"

# The words that the server knows, and why it doesn't know others.
_OF_FILES: Final = frozenset({"version", "limits", "rules", "store", "client", "deny", "bans", "tiers"})
_OF_RULES: Final = frozenset(
    {"name", "limits", "path", "methods", "ignore_case", "headers", "address", "except_address"}
    | {"key", "cost", "response", "shadow", "overrides", "ban", "canary", "tier", "except_tier", "request_id"}
)
_OF_DENIES: Final = frozenset({"name", "address", "path", "methods", "ignore_case", "until", "response"})
_REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("charge_on",), _NO_RESPONSES),
    **dict.fromkeys(("bytes", "after", "most_wait", "most_held"), _NO_BODIES),
    **dict.fromkeys(("delay", "most_delayed"), _NO_TURNS),
    **dict.fromkeys(("shedders", "priority", "otherwise"), _NO_LOAD),
}
_REMEDY: Final = "leave it out, or leave the rule to the middleware of the application"


def refuse_unserved(
    file: RuleFile,
    document: Document,
    problems: Problems,
    *,
    has_tiers: bool,
    holds_permits: bool,
) -> None:
    """Add a problem for each part of the file that the server can't decide.

    `has_tiers`: whether a field names a request's tier. `holds_permits`: whether requests report their end.
    """
    _Refusals(file, document, problems, has_tiers, holds_permits).refuse()


def needs_client(file: RuleFile) -> bool:
    """Whether a rule or a deny list needs the address of a request's client."""
    return bool(file.deny) or any(
        "address" in _words_of_key(rule) or rule.address or rule.except_address for rule in file.rules
    )


def _words_of_key(rule: FileRule) -> list[str]:
    keys = [rule.key] if isinstance(rule.key, str) else rule.key
    return [one.strip() for text in keys for one in text.split("|")]


class _Refusals:
    def __init__(
        self,
        file: RuleFile,
        document: Document,
        problems: Problems,
        has_tiers: bool,
        holds_permits: bool,
    ) -> None:
        self._file, self._document, self._problems = file, document, problems
        self._has_tiers, self._holds_permits = has_tiers, holds_permits

    def refuse(self) -> None:
        self._unknown(self._file, (), _OF_FILES)
        for name, limit in self._file.limits.items():
            self._limit(limit, ("limits", name))
        for number, rule in enumerate(self._file.rules):
            self._rule(rule, ("rules", number))
        for number, deny in enumerate(self._file.deny or ()):
            self._unknown(deny, ("deny", number), _OF_DENIES)
            self._response(deny, ("deny", number))
        client = self._file.client
        # Services name the client in each question.
        is_unnamed = not self._holds_permits and (client is UNSET or client.trusted_proxies is UNSET)
        if is_unnamed and needs_client(self._file):
            self._refuse(
                ("client",),
                "the server's peers are proxies, so each request would count for the proxy's address: name them, "
                'client = { trusted_proxies = ["127.0.0.1"], header = "X-Forwarded-For" }',
            )

    def _refuse(self, path: Path, reason: str) -> None:
        self._problems.add(self._document.word(path), f"{path_text(path)}: {reason}")

    def _unknown(self, struct: Any, path: Path, known: frozenset[str]) -> None:
        """Refuse words that have a value and that the server doesn't know."""
        for field in msgspec.structs.fields(struct):
            if field.name not in known and getattr(struct, field.name) not in (UNSET, field.default):
                reason = _REASONS.get(field.name, "the server doesn't have it")
                self._refuse((*path, field.name), f"{reason}: {_REMEDY}")

    def _limit(self, limit: Any, path: Path) -> None:
        if isinstance(limit, model.ConcurrencyLimit):
            if not self._holds_permits:
                remedy = "start the server with --no-proxies, for services that call /v1/acquire"
                self._refuse(path, f"{_NO_END}, so it can't hold permits: {remedy}, or {_REMEDY}")
        elif isinstance(limit, model.FixedWindowLimit) and limit.align == "calendar":
            self._refuse((*path, "align"), "Python computes where windows by the calendar end: write another align")
        elif isinstance(limit, model.TokenBucketLimit) and limit.initial is not UNSET:
            self._refuse((*path, "initial"), "Python decides about a bucket with initial permits: leave it out")

    def _rule(self, rule: FileRule, path: Path) -> None:
        self._unknown(rule, path, _OF_RULES)
        self._response(rule, path)
        words = _words_of_key(rule)
        if "user" in words:
            reason = 'an application authenticates users, and the server has none: write "header:NAME" of a field '
            self._refuse((*path, "key"), f"{reason}that your proxy sets")
        if not self._has_tiers:
            places = [word for word in ("tier", "except_tier") if getattr(rule, word)]
            for word in [*places, *["key"] * ("tier" in words)]:
                self._refuse((*path, word), _NO_TIERS)
        held = {name for name, limit in self._file.limits.items() if isinstance(limit, model.ConcurrencyLimit)}
        if rule.shadow and held.intersection(names_of_limits(rule)):
            self._refuse((*path, "shadow"), "nobody gives back the permits of a rule in the shadow: leave it out")
        if rule.ignore_case is True and any(word.startswith("path:") for word in words):
            reason = "the server doesn't compare values without regard to case: leave ignore_case or path:NAME out"
            self._refuse((*path, "key"), reason)

    def _response(self, rule: FileRule | FileDeny, path: Path) -> None:
        status = rule.response.status if rule.response else UNSET
        if status is not UNSET and status < 400:
            reason = f"a proxy would take {status} for a permission: write a status of at least 400"
            self._refuse((*path, "response", "status"), reason)
