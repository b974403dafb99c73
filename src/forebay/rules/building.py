"""From the structs of a rule file to the rules of the middlewares. Ambiguous rules are refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forebay.core.kinds import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)
from forebay.errors import CostExceedsLimit, ForebayError, InvalidLimiter, InvalidRate, short_repr
from forebay.extras import Needs
from forebay.rate import as_delay_ns
from forebay.rules import model
from forebay.rules.conditions import (
    AddressCondition,
    Condition,
    HeaderCondition,
    Network,
    TierCondition,
    network_of,
    none_outside,
)
from forebay.rules.keys import Functions, RuleKey, Sources, key_function, rule_key
from forebay.rules.model import FileRule, Limit, Override, RequestIdPart, RuleFile
from forebay.rules.overrides import (
    DENIED,
    DENY,
    Effect,
    Overrides,
    Unless,
    denied_answer,
    effect_of,
    response_of,
    response_options,
)
from forebay.rules.places import Document, Path, path_text
from forebay.rules.problems import Problems, did_you_mean
from forebay.rules.reading import BROKEN
from forebay.rules.refusals import BuiltDeny, Refusals
from forebay.rules.shedders import BuiltShedder, PrioritizedRule, Shedders
from forebay.rules.together import Together
from forebay.store import Store
from forebay.web import ByteRate, ClientAddress, RequestId, Rule
from forebay.web.patterns import TOKEN, RequestPattern

with Needs("rules", __name__):
    import msgspec
    from msgspec import UNSET

__all__ = [
    "Built",
    "BuiltPriority",
    "BuiltRule",
    "build",
    "client_of",
    "make_limiter",
    "parameters_of",
]

_KINDS: Final[Mapping[type, Any]] = {
    model.TokenBucketLimit: TokenBucket,
    model.LeakyBucketLimit: LeakyBucket,
    model.MinIntervalLimit: MinInterval,
    model.FixedWindowLimit: FixedWindow,
    model.SlidingWindowLimit: SlidingWindow,
    model.BucketedWindowLimit: BucketedWindow,
    model.SlidingLogLimit: SlidingLog,
    model.ConcurrencyLimit: Concurrency,
}
# Words of a rule that become options of a ByteRate, words that no ByteRate has, and words that only a ByteRate has.
_OF_BODIES: Final = ("path", "methods", "ignore_case", "key", "tiers", "tier", "exempt")
_OF_REQUESTS: Final = (
    "ban",
    "request_id",
    "cost",
    "charge_on",
    "delay",
    "most_delayed",
    "response",
    "shadow",
    "otherwise",
)
_OF_BYTES: Final = ("after", "most_wait", "most_held")
# Words of a rule that say which requests it is for. A rule without limits has no other words.
_OF_WHERE: Final = (
    *("name", "priority", "path", "methods", "ignore_case", "headers", "address", "except_address", "tier"),
    "except_tier",
)
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(FileRule)}


@dataclass(frozen=True, slots=True)
class BuiltRule:
    """A rule of the file, and the rules of the middleware that it has become: one for each limit of each effect."""

    spec: FileRule
    key: RuleKey
    conditions: Sequence[Condition]
    overrides: Overrides
    rules: Mapping[Effect, Sequence[Rule | ByteRate]]


@dataclass(frozen=True, slots=True)
class BuiltPriority:
    """A rule of the file without limits: it has a priority."""

    spec: FileRule
    conditions: Sequence[Condition]
    rules: Mapping[None, Sequence[Rule]]
    """None."""


Built: TypeAlias = BuiltDeny | BuiltShedder | BuiltPriority | BuiltRule


def build(file: RuleFile, document: Document, store: Any, functions: Functions, problems: Problems) -> list[Built]:
    """Make the limiters in `store`, the deny lists, the shedders and the rules.

    Raises ``InvalidRuleFile`` with all problems of their meaning.

    A ``Store`` that is only for a check has no memory for many keys: `store` None makes one, and closes it at the end.
    """
    if store is None:
        with Store.private(keys=64) as scratch:
            return _Builder(file, document, scratch, functions, problems, is_check=True).build()
    return _Builder(file, document, store, functions, problems, is_check=False).build()


def make_limiter(store: Any, name: str, limit: Limit, options: Mapping[str, Any]) -> Any:
    """The limiter of a limit, with its parameters. Raises what its class raises."""
    return _KINDS[type(limit)](store, name, **options)


def parameters_of(limit: Limit, *, is_check: bool) -> dict[str, Any]:
    """The parameters of a limit for its class. A limiter that is only for a check has memory for one key."""
    options = _given(limit)
    options.pop("on_change", None)
    if is_check and hasattr(limit, "keys"):
        options["keys"] = 1
    return options


class _Builder:
    def __init__(
        self,
        file: RuleFile,
        document: Document,
        store: Any,
        functions: Functions,
        problems: Problems,
        *,
        is_check: bool,
    ) -> None:
        self._file, self._document, self._problems = file, document, problems
        self._store, self._functions, self._is_check = store, functions, is_check
        self._client = ClientAddress()
        self._has_default = any(rule.otherwise for rule in file.rules)
        self._limiters: dict[str, Any] = {}
        self._request_ids: dict[Path, RequestId] = {}
        # Also of limits with a problem, which have no limiter.
        limits = document.data.get("limits") if isinstance(document.data, dict) else None
        self._names = [name for name in limits if name] if isinstance(limits, dict) else []

    def build(self) -> list[Built]:
        self._make_client()
        for name, limit in self._file.limits.items():
            self._make_limiter(name, limit)
        self._refusals = Refusals(
            self._file, self._document, self._store, self._client, self._refuse, self._refuse_word
        )
        denies = self._refusals.denies()
        self._shedders = Shedders(
            self._file, self._document, self._store, self._functions, self._refuse, self._refuse_word
        )
        built = [self._rule(rule, ("rules", number)) for number, rule in enumerate(self._file.rules)]
        together = Together(self._file, self._names, self._refuse, self._refuse_word)
        together.check_names()
        self._refusals.check_names(rule for rule in self._file.rules if rule is not BROKEN)
        are_valid = bool(self._file.rules) and BROKEN not in self._file.rules
        if are_valid:
            together.check_tiers()
            together.check_limits()
            together.check_request_ids(self._request_ids)
        shedders = self._shedders.build(are_rules_valid=are_valid and None not in built)
        self._problems.raise_if_any()
        return [*denies, *shedders, *[rule for rule in built if rule is not None]]

    def _refuse(self, path: Path, reason: object) -> None:
        self._problems.add(self._document.value(path), f"{path_text(path)}: {reason}")

    def _refuse_word(self, path: Path, reason: object) -> None:
        self._problems.add(self._document.word(path), f"{path_text(path)}: {reason}")

    # Limits and clients

    def _make_client(self) -> None:
        if self._file.client is not UNSET:
            try:
                self._client = client_of(self._file)
            except InvalidLimiter as error:
                self._refuse_word(("client",), error)

    def _make_limiter(self, name: str, limit: Limit) -> None:
        options = parameters_of(limit, is_check=self._is_check)
        path: Path = ("limits", name)
        try:
            self._limiters[name] = make_limiter(self._store, name, limit, options)
        except InvalidRate as error:
            of_text = next(word for word in ("rate", "interval", "lease") if word in options)
            self._refuse((*path, of_text), error)
        except (ForebayError, ValueError, TypeError) as error:
            self._refuse_word(path, error)

    # Rules

    def _rule(self, spec: FileRule, path: Path) -> BuiltRule | BuiltPriority | None:
        """None if it has a problem."""
        if spec is BROKEN:
            return None
        options = self._options(spec, path)
        conditions = self._conditions(spec, path)
        if options is not None and spec.priority:
            where = RequestPattern.of(spec.path or None, spec.methods or (), bool(spec.ignore_case))
            self._shedders.add(PrioritizedRule(spec, where, conditions), path)
        if not spec.limits:
            self._check_needless(spec, path)
            return BuiltPriority(spec, self._explained(conditions, options), {}) if options is not None else None
        sources = Sources(self._client, self._functions, _listed(spec.path), bool(spec.ignore_case))
        texts = _listed(spec.key)
        try:
            key = rule_key(texts, sources)
        except ValueError as error:
            self._refuse((*path, "key"), error)
            return None
        overrides = self._overrides(spec, key, path)
        groups: dict[Effect, Sequence[Any]] = {None: self._named(spec.limits, (*path, "limits"), spec.cost)}
        for number, override in enumerate(spec.overrides):
            effect = effect_of(override)
            if effect not in groups and effect is not DENY and effect is not None:
                groups[effect] = self._named(effect, (*path, "overrides", number, "limits"), spec.cost)
        if spec.canary:
            effect = tuple(spec.canary.limits)
            groups[effect] = self._named(effect, (*path, "canary", "limits"), spec.cost)
            if sorted(effect) == sorted(spec.limits):
                self._refuse(
                    (*path, "canary", "limits"), "these are the rule's own limits: name others, or leave it out"
                )
        if options is None:
            return None
        options["key"] = key_function(key, texts, self._client)
        rules: dict[Effect, Sequence[Rule | ByteRate]] = {}
        place = object()
        tiers = options["tier"], frozenset(options["tiers"] or ())
        is_partial = bool(conditions or spec.overrides or spec.canary or (self._has_default and tiers[1]))
        if any(override.deny for override in spec.overrides):
            rules[DENY] = self._denying(spec, {**options, "exempt": Unless(conditions, overrides, DENY, *tiers)}, path)
        # The rule's own limits come last: if an override ends between these decisions, both hold and not none.
        for effect, limiters in reversed(groups.items()):
            exempt = Unless(conditions, overrides, effect, *tiers) if is_partial else None
            of_effect = {**options, "exempt": exempt}
            rules[effect] = (
                self._metering(spec, limiters, of_effect, path) if spec.bytes else self._made(limiters, of_effect, path)
            )
            for number, one in enumerate(rules[effect]):
                # Together, the effects of a rule hold back as many requests as one rule may.
                one.held_back.counted_as = place, number
        return BuiltRule(spec, key, self._explained(conditions, options), overrides, rules)

    def _explained(self, conditions: Sequence[Condition], options: Mapping[str, Any]) -> Sequence[Condition]:
        """With one for the rule's tiers. The tiers of the ``Rule`` decide; this one explains them."""
        lifted = frozenset(options["tiers"] or ())
        if lifted and self._functions.tier is not None:
            return [*conditions, TierCondition(self._functions.tier, lifted)]
        return conditions

    def _made(self, limiters: Sequence[Any], options: Mapping[str, Any], path: Path) -> list[Rule]:
        try:
            return [Rule(limiter, **options) for limiter in limiters]
        except (ForebayError, ValueError, TypeError) as error:
            self._refuse_word(path, error)
            return []

    def _metering(
        self, spec: FileRule, limiters: Sequence[Any], options: Mapping[str, Any], path: Path
    ) -> list[ByteRate]:
        """The byte rates of a rule with `bytes`."""
        shared = {word: options[word] for word in _OF_BODIES if word in options}
        own = {"bodies": spec.bytes, **_given(spec, "after", "most_wait", "most_held")}
        try:
            return [ByteRate(limiter, **shared, **own) for limiter in limiters]
        except (ForebayError, ValueError, TypeError) as error:
            self._refuse_word(path, error)
            return []

    def _check_needless(self, spec: FileRule, path: Path) -> None:
        """Refuse words that have no meaning without limits."""
        if not spec.priority:
            place = self._document.word(path)
            self._problems.add(place, f"{path_text(path)} lacks limits: a list of names of limits, or a priority")
            return
        for word, default in _DEFAULTS.items():
            if word not in _OF_WHERE and getattr(spec, word) not in (UNSET, default, []):
                self._refuse((*path, word), f"{word} has no effect on a rule without limits: leave it out")

    def _check_bytes(self, spec: FileRule, path: Path) -> None:
        """Refuse words that have no meaning with `bytes`, or without it."""
        needless = _OF_REQUESTS if spec.bytes else _OF_BYTES
        for word in needless:
            if getattr(spec, word) not in (UNSET, _DEFAULTS[word]):
                reason = "has no effect on bytes" if spec.bytes else 'is for a rule with bytes = "responses"'
                self._refuse((*path, word), f"{word} {reason}: leave it out")

    def _denying(self, spec: FileRule, options: Mapping[str, Any], path: Path) -> list[Rule]:
        """A rule that denies every request that it is for: each costs more than its limit, so it has no state."""
        name = f"{spec.name} denied"
        if name in self._names:
            self._refuse(
                (*path, "name"), f"the limit {short_repr(name)} has the name of this rule's denials: rename it"
            )
        try:
            limiter: Any = TokenBucket(self._store, name, "1/day")
        except (ForebayError, ValueError) as error:
            self._refuse((*path, "name"), error)
            return []
        response = response_of(spec)
        overrides = options["exempt"].overrides
        denying = dict.fromkeys(("ban", "request_id", "charge_on", "delay", "most_delayed"), None)
        denying |= {"cost": 2, "status": response.status if response else DENIED}
        denying["answer"] = denied_answer(response, overrides)
        return self._made([limiter], {**options, **denying}, path)

    def _named(self, names: Sequence[str], path: Path, cost: int) -> list[Any]:
        """The limiters of these names."""
        limiters = []
        for number, name in enumerate(names):
            if self._names and name not in self._names:
                reason = f"there is no limit {short_repr(name)}: {did_you_mean(name, self._names)}"
                self._refuse((*path, number), reason)
            elif name in names[:number]:
                self._refuse((*path, number), f"the limit {short_repr(name)} is here twice: leave one out")
            elif name in self._limiters:
                limiters.append(self._limiters[name])
                self._check_cost(self._limiters[name], cost, (*path, number))
        return limiters

    def _check_cost(self, limiter: Any, cost: int, path: Path) -> None:
        if self._is_check:
            try:
                limiter.peek("key", cost)
            except CostExceedsLimit as error:
                self._refuse(path, error)

    def _options(self, spec: FileRule, path: Path) -> dict[str, Any] | None:
        """The options of the rule for ``Rule``, except its key and its exemptions. None if one has a problem."""
        count = self._problems.count
        self._check_bytes(spec, path)
        for word, pattern in (("path", _given(spec, "path")), ("methods", _given(spec, "methods"))):
            try:
                RequestPattern.of(pattern.get("path"), pattern.get("methods", ()), False)
            except InvalidLimiter as error:
                self._refuse((*path, word), error)
        options: dict[str, Any] = _given(
            spec, "path", "methods", "ignore_case", "cost", "delay", "most_delayed", "shadow", "otherwise"
        )
        options |= self._refusals.ban_of(spec, path)
        if spec.request_id is not UNSET:
            options["request_id"] = self._request_id(spec.request_id, (*path, "request_id"))
        if spec.delay:
            try:
                as_delay_ns(spec.delay, "delay is")
            except InvalidRate as error:
                self._refuse((*path, "delay"), error)
        options["tiers"], options["tier"] = self._tiers(spec, path)
        if spec.charge_on:
            options["charge_on"] = frozenset(status for one in spec.charge_on for status in _statuses(one))
            if not options["charge_on"]:
                self._refuse((*path, "charge_on"), "no status is in it, so no request would ever be charged")
        try:
            options |= response_options(spec)
        except InvalidLimiter as error:
            self._refuse((*path, "response"), error)
        return options if self._problems.count == count else None

    def _request_id(self, given: RequestIdPart, path: Path) -> RequestId | None:
        for word in ("field", "lasts"):
            try:
                RequestId(**_given(given, word))
            except (InvalidLimiter, InvalidRate) as error:
                self._refuse((*path, word), error)
                return None
        self._request_ids[path] = found = RequestId(**_given(given))
        return found

    def _tiers(self, spec: FileRule, path: Path) -> tuple[Mapping[str, None] | None, Any]:
        """`tiers` and `tier` of a ``Rule``: those for which the rule is not are without a limit.

        A tier that the file doesn't name is limited by the rules of all tiers.
        """
        if not spec.tier and not spec.except_tier:
            return None, None
        if spec.tier and spec.except_tier:
            self._refuse(
                (*path, "except_tier"), "give tier or except_tier: the rule is for the first, or for all others"
            )
        known = self._file.tiers or []
        word, names = ("tier", spec.tier) if spec.tier else ("except_tier", spec.except_tier)
        for number, name in enumerate(names or ()):
            if name not in known:
                reason = f"tiers has no {short_repr(name)}: {did_you_mean(name, known)}"
                self._refuse((*path, word, number), reason)
        if known and spec.except_tier and not set(known) - set(spec.except_tier):
            self._refuse((*path, word), "every tier is excepted, so the rule would match no request")
        if self._functions.tier is None:
            self._refuse((*path, word), "there is no function that returns a request's tier: write tier=")
            return None, None
        lifted = spec.except_tier or [name for name in known if name not in (spec.tier or ())]
        return dict.fromkeys(lifted), self._functions.tier

    def _conditions(self, spec: FileRule, path: Path) -> list[Condition]:
        conditions: list[Condition] = []
        for name, pattern in (spec.headers or {}).items():
            if not TOKEN.fullmatch(name):
                reason = f"{short_repr(name)} is no name of a header field such as X-API-Key"
                self._refuse_word((*path, "headers", name), reason)
            if not pattern:
                self._refuse((*path, "headers", name), "a field has a value: write * for any")
            conditions.append(HeaderCondition(name, pattern))
        inside = self._networks(spec.address or [], (*path, "address"))
        outside = self._networks(spec.except_address or [], (*path, "except_address"))
        if inside and none_outside(inside, outside):
            self._refuse((*path, "address"), "all of it is in except_address, so the rule would match no request")
        if inside:
            conditions.append(AddressCondition(self._client, inside, is_inside=True))
        if outside:
            conditions.append(AddressCondition(self._client, outside, is_inside=False))
        return conditions

    def _networks(self, texts: Sequence[str], path: Path) -> list[Network]:
        networks = []
        for number, text in enumerate(texts):
            try:
                networks.append(network_of(text))
            except ValueError as error:
                self._refuse((*path, number), error)
        return networks

    def _overrides(self, spec: FileRule, key: RuleKey, path: Path) -> Overrides:
        by_key: dict[Any, Override] = {}
        for number, override in enumerate(spec.overrides):
            place: Path = (*path, "overrides", number)
            if [bool(override.limits), override.exempt, override.deny].count(True) != 1:
                self._refuse(place, "an override has one of limits, exempt = true and deny = true")
            try:
                each = key.named(override.key)
            except ValueError as error:
                self._refuse((*place, "key"), error)
                continue
            if each in by_key:
                self._refuse((*place, "key"), "another override of the rule has this key: leave one out")
            by_key[each] = override
        return Overrides(key, by_key, spec)


def client_of(file: RuleFile) -> ClientAddress:
    """The clients' addresses of a file. Raises ``InvalidLimiter``."""
    return ClientAddress() if file.client is UNSET else ClientAddress(**_given(file.client))


def _given(struct: Any, *words: str) -> dict[str, Any]:
    """The words of a table that the file has, of these or of all."""
    named = words or struct.__struct_fields__
    return {word: value for word in named if (value := getattr(struct, word)) is not UNSET}


def _listed(value: Any) -> list[str]:
    return [] if value is UNSET else [value] if isinstance(value, str) else value


def _statuses(text: int | str) -> range:
    first, _, last = str(text).partition("-")
    return range(int(first), int(last or first) + 1)
