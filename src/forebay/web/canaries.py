"""Canaries: another limit for a part of the keys, chosen by a hash that is the same in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.web.client import UnknownPeer
from forebay.web.functions import has_to_be_awaited
from forebay.web.request import KeyFunction, Request
from forebay.web.rules import Rule

__all__ = ["Chosen", "canary", "checked_percent"]

PARTS: Final = 2**32


class Chosen:
    """Whether a key is among `percent` of all keys. *Threads*, *fork*: safe. O(length of the key), about 1 us.

    `salt` keys the hash, so that other rules choose other keys. A key that is chosen stays chosen when the percentage
    grows. A key is chosen if its hash, with `salt` as the hash's key, is below `below` of 2**32. The decision server
    chooses by the same numbers.
    """

    def __init__(self, percent: float, salt: str) -> None:
        self.percent = percent
        self.below = round(checked_percent(percent) / 100 * PARTS)
        self.salt = blake2b(salt.encode(errors="surrogatepass")).digest()

    def __contains__(self, key: Any) -> bool:
        digest = blake2b(_bytes_of(key), key=self.salt, digest_size=4).digest()
        return int.from_bytes(digest) < self.below


def _bytes_of(key: Any) -> bytes:
    """Text, or several texts, as any language writes them, and other keys as Python does."""
    if isinstance(key, tuple) and all(isinstance(part, str) for part in key):
        key = "\0".join(key)
    return (key if isinstance(key, str) else repr(key)).encode(errors="surrogatepass")


def canary(rule: Rule, limiter: Any, *, percent: float) -> list[Rule]:
    """The rule for most of its keys, and the same with another limiter for `percent` of them.

    ``rules = [*canary(Rule(old, key=client), new, percent=5)]``. A hash of the key chooses, so a key has one of both
    limits in every process, and keeps the new one while the percentage grows. The rule has a plain `key`, which is
    called once more for each request, and neither `tiers` nor an ``AddressList`` to exempt.

    Raises ``InvalidLimiter``.
    """
    key = rule.key
    if key is None or has_to_be_awaited(key) or has_to_be_awaited(rule.exempt):
        raise InvalidLimiter(
            f"the rule of {rule.limiter!r} needs a plain function as its key: write key=ClientAddress()"
        )
    if rule.tiers is not None:
        raise InvalidLimiter(f"the rule of {rule.limiter!r} has tiers: make a canary of each tier's rule")
    if rule.exempt is not None and not callable(rule.exempt):
        raise InvalidLimiter(f"the rule of {rule.limiter!r} exempts addresses: write a function for exempt")
    chosen = Chosen(percent, getattr(rule.limiter, "name", ""))
    both = [
        dataclasses.replace(rule, exempt=_Other(rule.exempt, key, chosen, is_for_chosen=False)),
        dataclasses.replace(rule, limiter=limiter, exempt=_Other(rule.exempt, key, chosen, is_for_chosen=True)),
    ]
    for one in both:
        # Together, they hold back as many requests as the rule may.
        one.held_back.counted_as = rule.held_back.counted_as
    return both


class _Other:
    """Whether the rule isn't for a request: it is exempt, or its key has the other limit."""

    def __init__(self, exempt: Any, key: KeyFunction, chosen: Chosen, *, is_for_chosen: bool) -> None:
        self._exempt: Callable[[Request], bool] | None = exempt
        self._key, self._chosen, self._is_for_chosen = key, chosen, is_for_chosen

    def __call__(self, request: Request) -> bool:
        if self._exempt is not None and self._exempt(request):
            return True
        try:
            key: Any = self._key(request)
        except UnknownPeer:
            # The first rule answers it.
            return self._is_for_chosen
        return (key in self._chosen) != self._is_for_chosen


def checked_percent(percent: Any) -> float:
    """Raises ``InvalidLimiter``."""
    if isinstance(percent, bool) or not isinstance(percent, (int, float)) or not 0 < percent <= 100:
        raise InvalidLimiter(f"percent is a number above 0, up to 100, not {short_repr(percent)}")
    return float(percent)
