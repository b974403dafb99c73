"""Carrying keys' state over to a limit of live rules that has changed: on the first sight of each key.

State
-----
A limit of generation 0 counts a key as it is. One of a later generation counts the key with the generation before it,
so in cells that no limit has used. A key's use under a former limit stays in that limit's cell. A *mark* of the
key, in a limiter of its own, says that its share was brought to the limit of now.

Transitions
-----------
* *look*: a request finds no mark, and that the key has used a part of the former limit.
* *bring*: it charges the same part of the new limit, rounded up, by one CAS: ``reserve``.
* *mark*: it marks the key, by one CAS, which one request wins.
* *return*: a request that has brought the share but lost the mark cancels its own charge, by one CAS.

Invariant
---------
A marked key has been charged its share, at least once. A request under the new limit is decided after that.

Proof
-----
Only a request that has brought the whole share marks the key, and the winner never returns it. Each other one returns
no more than it has brought itself. If the whole share isn't there, as others have brought it at the same time, the
request takes what is left and marks nothing: so the key has no permits, and the next request looks again.

Crash and stall
---------------
A process that is killed between *bring* and *mark* leaves a charge without a mark, so another request brings the share
once more. So does a mark that is evicted, or for which a full store has no room. That denies some requests, and admits
none by mistake. A process that is stopped between *look* and *bring* finds the mark when it goes on, and returns its
charge.

Not handled
-----------
Requests that entered under the former limit and charge it after the key's share was brought: as many as run at that
moment, once for each change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.rate import Rate
from forebay.rules.building import make_limiter, parameters_of
from forebay.rules.live.standing import Standing
from forebay.store import Store
from forebay.web import ByteRate, Deny, Request, Rule, Shed
from forebay.web.keys import CellKey
from forebay.web.request import KeyFunction

__all__ = ["MARKS", "Link", "carried", "counted", "links_of", "marks_of"]

MARKS: Final = "forebay carried"
"""The limiter that has the marks."""
MARK: Final = 2
"""The permits that a mark takes: all. If that were one, a full store would have no room for marks by default."""
UNSEEN: Final = "forebay: no request has this key"


def carried(
    rule: Deny | Shed | Rule | ByteRate, limits: Mapping[str, Standing], store: Any
) -> Deny | Shed | Rule | ByteRate:
    """The rule, whose requests count in the cells of its limit's generation, and bring their shares there first."""
    if isinstance(rule, (Deny, Shed)):
        return rule
    limiter: Any = rule.limiter
    standing = limits.get(limiter.name, Standing())
    if not standing.generation and not standing.former:
        return rule
    assert rule.key is not None
    # Those of a store that the rules had before have no keys at Redis.
    links = links_of(limiter, standing, store) if isinstance(store, Store) else []
    return replace(rule, key=_CarriedKey(rule.key, standing.generation, links, store))


def links_of(limiter: Any, standing: Standing, store: Any) -> list[Link]:
    """The former limits of a limiter, from the oldest on."""
    links = []
    latest: tuple[Any, int] = limiter, standing.generation
    for former in reversed(standing.former):
        source = make_limiter(store, limiter.name, former.limit, parameters_of(former.limit, is_check=False))
        links.append(Link(source, former.generation, *latest, former.until_ns))
        latest = source, former.generation
    return links[::-1]


def marks_of(links: Sequence[Link], store: Store) -> Any:
    """The limiter that has the marks, until the last of the links' keys is as new."""
    until_ns = max(link.until_ns for link in links)
    lasts_s = max(1, (until_ns - store.now_ns()) // 10**9 + 1)
    return TokenBucket(store, MARKS, Rate(MARK, timedelta(seconds=lasts_s)))


def counted(key: Any, generation: int) -> Any:
    """The key by which a limiter counts. No key of a rule file has a number in it."""
    if not generation:
        return key
    return ("", generation, *key) if isinstance(key, tuple) else ("", generation, key)


@dataclass(frozen=True, slots=True)
class Link:
    """A limit of before, and the one that takes its keys over."""

    source: Any
    source_generation: int
    target: Any
    target_generation: int
    until_ns: int

    def bring(self, key: Any, marks: Any) -> None:
        """Charge the key the part of the target that it has used of the source. O(1)."""
        mark = (self.target.name, self.target_generation, *(key if isinstance(key, tuple) else (key,)))
        if not marks.peek(mark, MARK).allowed:
            return
        was = self.source.peek(counted(key, self.source_generation), 0)
        used = was.limit - was.remaining
        if used <= 0:
            return
        target = counted(key, self.target_generation)
        fresh = self.target.peek(UNSEEN, 0)
        share = min(-(-used * fresh.limit // was.limit), fresh.remaining)
        charge = self.target.reserve(target, share)
        if not charge:
            self.target.take_up_to(target, share)
        else:
            marked = marks.hit(mark, MARK)
            if not marked.allowed and not marked.full:
                charge.cancel()


class _CarriedKey(CellKey):
    """A rule's key function. Until the former limits' keys are as new, it brings the share of each key that it sees."""

    def __init__(self, key_of: KeyFunction, generation: int, links: Sequence[Link], store: Any) -> None:
        self.client_key, self._generation, self._links, self._store = key_of, generation, links, store
        self._until_ns = max((link.until_ns for link in links), default=0)
        if links:
            self._marks = marks_of(links, store)

    def __call__(self, request: Request) -> Any:
        key: Any = self.client_key(request)
        if self._until_ns and self._store.now_ns() < self._until_ns:
            for link in self._links:
                link.bring(key, self._marks)
        return counted(key, self._generation)
