"""The plan of a rule file: plain data for `forebay_server`, and the limiters that it names by their numbers."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from forebay.core.kinds import BucketedWindow, Concurrency, LeakyBucket, TokenBucket
from forebay.rate import as_period_ns
from forebay.rules.building import Built, BuiltRule
from forebay.rules.keys import Alternative, Functions, RuleKey
from forebay.rules.live.carrying import links_of, marks_of
from forebay.rules.live.standing import Standing
from forebay.rules.loading import check, load_built
from forebay.rules.model import ClientPart, FileRule, RuleFile
from forebay.rules.overrides import DENIED, response_of
from forebay.rules.problems import Problems
from forebay.rules.refusals import BuiltDeny
from forebay.serving.gated import GatePlan, charging_of
from forebay.serving.remembered import Remembered
from forebay.serving.unserved import needs_client, refuse_unserved
from forebay.store import Store
from forebay.urls import connect
from forebay.web import Answer, Ban
from forebay.web.addresses import as_network
from forebay.web.answers import QUOTA_EXCEEDED, REDUCED_CAPACITY, reason_of
from forebay.web.client import UNIX
from forebay.web.header_fields import Policy, allowance, rate_of
from forebay.web.options import is_enabled
from forebay.web.patterns import RequestPattern
from forebay.web.rules import kind_of

__all__ = ["Plan", "plan_of", "written"]

_TOKEN: Final = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
"""A part of the expression of a path pattern: an escape, a class, the beginning of a group, or one character."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `forebay_server` decides by."""

    document: str
    """JSON."""
    limiters: tuple[Any, ...]
    """One for each of its `limits`."""
    store: Store
    """It stays open as long as the plan is used."""
    trusts_unix: bool
    """Whether a peer behind a Unix socket may name a client. True if no rule needs one."""

    def compiled(self, server: Any) -> Any:
        """As the module `forebay_server` takes it. Raises ``ValueError`` for a limiter that decides in Python."""
        return server.Plan(self.document, self.limiters)


def plan_of(
    path: str | os.PathLike[str],
    store: Store | str | None = None,
    *,
    tier_field: str | None = None,
    holds_permits: bool = False,
) -> Plan | GatePlan:
    """Read a rule file, make its limiters, and write its plan. `store`: that or the URL of one, for a
    file that names none.

    `tier_field`: the field that names a request's tier; without it, rules by tiers are refused. `holds_permits`:
    whether all those who ask report the end of a request, too; if not, limits of requests at one time are refused.
    ``FOREBAY_ENABLED=false`` switches all limits off, as for the middleware.

    Raises ``InvalidRuleFile`` with all problems, also of rules that the server can't decide, ``OSError`` if the file
    can't be read, and what the store raises. Nothing is made in the store unless the server can decide all rules.
    O(size of the file).
    """
    file = os.fspath(path)
    problems = Problems(file)
    # The server finds tiers itself.
    functions = Functions(tier=lambda request: "")
    spec, document, _ = check(file, Path(file).read_bytes(), functions)
    refuse_unserved(spec, document, problems, has_tiers=tier_field is not None, holds_permits=holds_permits)
    if (spec.store or store) is None:
        reason = 'the file names no store: write store = "shm:///NAME?keys=1000000", or start the server with --store'
        problems.add(document.value(("store",)), reason)
    problems.raise_if_any()
    loaded = load_built(file, connect(store) if isinstance(store, str) else store, functions, in_loop=False)
    return written(Path(file).stem, loaded.spec, loaded.built, loaded.store, tier_field)


def written(
    domain: str,
    spec: RuleFile,
    built: Iterable[Built],
    store: Any,
    tier_field: str | None,
    standings: Mapping[str, Standing] = MappingProxyType({}),
    remembered: Remembered | None = None,
) -> Plan | GatePlan:
    """The plan of rules that the server can decide. `domain`: by which Envoy's requests for rate limits name them.

    `standings`: of live rules, where their limits count. `remembered`: over Redis, what the server remembers
    of earlier versions.
    """
    built = list(built)
    if isinstance(store, Store):
        document, _, limiters = _written(domain, spec, built, store, tier_field, standings)
        return Plan(document, limiters, store, _trusts_unix(spec))
    # In Redis no key brings its share to another limit.
    ours = {name: Standing(standing.generation) for name, standing in standings.items()}
    document, of_bans, limiters = _written(domain, spec, built, store, tier_field, ours)
    charging = charging_of(built, limiters, store, remembered or Remembered())
    return GatePlan(document, of_bans, charging, store, _trusts_unix(spec))


def _written(
    domain: str,
    spec: RuleFile,
    built: Iterable[Built],
    store: Any,
    tier_field: str | None,
    standings: Mapping[str, Standing],
) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """The document of a plan, the limiters of its first limits, which are those of bans, and all limiters."""
    built = list(built) if is_enabled(True) else []
    writer = _Writer((tier_field or "").lower(), store, standings)
    for one in built:
        if isinstance(one, BuiltRule):
            writer.ban(one.rules[None])
    of_bans = tuple(writer.limiters)
    plan = {
        "domain": domain,
        "client": _client(spec),
        "denies": [writer.deny(one) for one in built if isinstance(one, BuiltDeny)],
        "rules": [writer.rule(one) for one in built if isinstance(one, BuiltRule)],
        "retries": _retries(built),
    }
    plan["limits"] = writer.limits()
    return json.dumps(plan), of_bans, tuple(writer.limiters)


class _Writer:
    """Numbers the limiters as rules name them."""

    def __init__(self, tier_field: str, store: Any, standings: Mapping[str, Standing]) -> None:
        self.limiters: list[Any] = []
        self._tier_field, self._store, self._standings = tier_field, store, standings
        self._any_case = _AnyCase()

    def limits(self) -> list[dict[str, Any]]:
        """All limiters: those that rules name, and behind them those that their keys come from."""
        named = list(self.limiters)
        carried = [self._carried(limiter) for limiter in named]
        carried += [None] * (len(self.limiters) - len(named))
        return [{**_limit(limiter), "carried": each} for limiter, each in zip(self.limiters, carried, strict=True)]

    def _carried(self, limiter: Any) -> dict[str, Any] | None:
        standing = self._standings.get(limiter.name, Standing())
        if not standing.generation and not standing.former:
            return None
        links = links_of(limiter, standing, self._store)
        return {
            "generation": standing.generation,
            "links": [
                {
                    "source": self._number(link.source),
                    "source_generation": link.source_generation,
                    "target": self._number(link.target),
                    "target_generation": link.target_generation,
                    "name": link.target.name,
                }
                for link in links
            ],
            "marks": self._number(marks_of(links, self._store)) if links else 0,
        }

    def deny(self, built: BuiltDeny) -> dict[str, Any]:
        spec = built.spec
        [deny] = built.rules[None]
        until = spec.until or None
        return {
            "where": self._where(deny.where),
            "networks": _networks(spec.address),
            "until_s": None if until is None else until.timestamp(),
            "denied": {**_denied(deny.status, response_of(spec)), "kind": "about:blank"},
        }

    def rule(self, built: BuiltRule) -> dict[str, Any]:
        spec = built.spec
        own: Sequence[Any] = built.rules[None]
        response = response_of(spec)
        return {
            "name": spec.name,
            "where": self._where(own[0].where),
            "headers": [
                {"name": name.lower(), "parts": pattern.split("*")} for name, pattern in (spec.headers or {}).items()
            ],
            "inside": _networks(spec.address or ()),
            "outside": _networks(spec.except_address or ()),
            "key": self._key(built.key, spec),
            "cost": spec.cost,
            "shadow": spec.shadow,
            "is_once": own[0].request_id is not None,
            "ban": self.ban(own),
            "limits": self._numbers(own),
            "canary": self._canary(built),
            "lifted": {"field": self._tier_field, "tiers": sorted(own[0].tiers)} if own[0].tiers else None,
            "overrides": [
                {
                    "key": key,
                    "until_s": override.until.timestamp(),
                    "until": override.until.isoformat(),
                    "limits": None
                    if override.deny
                    else self._numbers(built.rules.get(tuple(override.limits or ()), ())),
                }
                for key, override in built.overrides.by_key.items()
            ],
            "denied": _denied(own[0].denial_status, response),
            # A denial for good has no report of a limit, so an empty response is sent as it is.
            "denied_by_override": _denied(response.status if response else DENIED, response, is_whole=True),
        }

    def _where(self, where: RequestPattern) -> dict[str, Any]:
        pattern = where.pattern
        text = pattern and pattern.pattern
        if pattern is not None and pattern.flags & re.IGNORECASE:
            text = self._any_case(pattern.pattern)
        return {"pattern": text, "methods": sorted(where.methods)}

    def _canary(self, built: BuiltRule) -> dict[str, Any] | None:
        chosen, canary = built.overrides.chosen, built.spec.canary
        if chosen is None or not canary:
            return None
        limits = self._numbers(built.rules[tuple(canary.limits)])
        return {"below": chosen.below, "salt": list(chosen.salt), "limits": limits}

    def _key(self, key: RuleKey, spec: FileRule) -> dict[str, Any]:
        texts = [spec.key] if isinstance(spec.key, str) else spec.key
        if texts == ["everyone"]:
            return {"everyone": True, "parts": []}
        return {"everyone": False, "parts": [[self._alternative(one) for one in part] for part in key.parts]}

    def _alternative(self, one: Alternative) -> dict[str, Any]:
        word, _, argument = one.word.partition(":")
        match word:
            case "path":
                return {"word": word, "name": argument, "patterns": [pattern.pattern for pattern in one.patterns]}
            case "header":
                return {"word": word, "name": argument}
            case "address":
                return {"word": word}
            case "tier":
                return {"word": word, "field": self._tier_field}
        return {"word": "constant", "text": argument}

    def ban(self, rules: Sequence[Any]) -> dict[str, Any] | None:
        ban: Ban | None = rules[0].ban
        if ban is None:
            return None
        bans, denials = ban.limiters
        return {"name": ban.name, "bans": self._number(bans), "denials": self._number(denials)}

    def _numbers(self, rules: Sequence[Any]) -> list[int]:
        return [self._number(rule.limiter) for rule in rules]

    def _number(self, limiter: Any) -> int:
        for number, known in enumerate(self.limiters):
            if known is limiter:
                return number
        self.limiters.append(limiter)
        return len(self.limiters) - 1


def _limit(limiter: Any) -> dict[str, Any]:
    policy = Policy(limiter)
    kind = kind_of(limiter)
    rate = rate_of(limiter)
    permits = None if rate is None else [rate.limit, rate.period_ns]
    comes_one_by_one = kind is LeakyBucket or (kind is TokenBucket and limiter.refill == "continuous")
    return {
        "name": limiter.name,
        "shown": policy.name,
        "policy": policy.policy_item,
        "prefix": policy.prefix,
        "allowance": allowance(limiter),
        "refill": permits if comes_one_by_one else None,
        "rate": permits,
        "is_last": kind in (LeakyBucket, BucketedWindow),
        "concurrency": [limiter.limit, limiter.lease_ns] if kind is Concurrency else None,
    }


def _client(spec: RuleFile) -> dict[str, Any] | None:
    client = spec.client or ClientPart()
    proxies = client.trusted_proxies or ()
    if not proxies and not needs_client(spec):
        return None
    return {
        "trusted": _networks(proxy for proxy in proxies if proxy != UNIX),
        "trusts_unix": UNIX in proxies,
        "field": (client.header or "").lower() or None,
        "ipv4_prefix": client.ipv4_prefix or 32,
        "ipv6_prefix": client.ipv6_prefix or 64,
    }


def _trusts_unix(spec: RuleFile) -> bool:
    client = _client(spec)
    return client is None or bool(client["trusts_unix"])


def _retries(built: Iterable[Built]) -> dict[str, Any] | None:
    """The one `request_id` of all rules that have any."""
    for one in built:
        own: Sequence[Any] = one.rules[None] if isinstance(one, BuiltRule) else ()
        for ids in [rule.request_id for rule in own if rule.request_id is not None]:
            return {"field": ids.field.lower(), "most": ids.retries, "lasts_ns": as_period_ns(ids.lasts)}
    return None


def _networks(texts: Any) -> list[str]:
    return [str(as_network(text, "a network", "")) for text in texts]


def _denied(status: int, response: Answer | None, *, is_whole: bool = False) -> dict[str, Any]:
    """The response to a denied request, and what a problem report has without one."""
    answer = None
    if response is not None and (is_whole or response.body or response.headers):
        answer = {"fields": [list(pair) for pair in response.headers], "body": response.body.decode()}
    kind = REDUCED_CAPACITY if status == 503 else QUOTA_EXCEEDED
    return {"status": status, "kind": kind, "title": reason_of(status), "answer": answer}


class _AnyCase:
    """Writes the expression of a path pattern so that it matches letters in any case.

    Each letter becomes a class of those that Python takes for the same one. Rust compares by other rules: it takes
    "\u0130" for no "i".
    """

    def __call__(self, expression: str) -> str:
        return "".join(self._letters(part) if len(part) == 1 else part for part in _TOKEN.findall(expression))

    def _letters(self, character: str) -> str:
        if character not in self._cased:
            return character
        return f"[{''.join(re.findall(re.escape(character), self._cased, re.IGNORECASE))}]"

    @functools.cached_property
    def _cased(self) -> str:
        """All characters that have another case, in one text."""
        characters = (chr(number) for number in range(sys.maxunicode + 1))
        return "".join(one for one in characters if one.lower() != one or one.upper() != one or one.casefold() != one)
