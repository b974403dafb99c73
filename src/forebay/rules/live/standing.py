"""The standing of a limit: which cells have its keys' state, after all changes of live rules.

A limit of a new generation counts in cells of its own: see ``carrying``. Its name, its counters and its header fields
stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.extras import Needs
from forebay.rules.building import make_limiter, parameters_of
from forebay.rules.model import ConcurrencyLimit, FixedWindowLimit, Limit
from forebay.store import Store

with Needs("rules", __name__):
    import msgspec
    from msgspec import UNSET, Struct

__all__ = ["Former", "Standing", "can_share", "change_of", "standings"]

KEY: Final = "key"


class Former(Struct, frozen=True):
    """A limit of before, of which keys bring their share."""

    limit: Limit
    generation: int
    until_ns: int
    """By the segment's time: when its keys are as new."""


class Standing(Struct, frozen=True):
    """Where a limit counts."""

    generation: int = 0
    former: tuple[Former, ...] = ()
    """From the oldest on. Each brings its share to the one behind it, the last one to the limit itself."""
    limit: Limit | None = None
    """The limit itself. None for one that was removed so long ago that its keys are as new."""
    is_removed: bool = False
    """Whether the document has no such limit."""
    until_ns: int = 0
    """The time at which the keys of a removed limit are as new."""


def standings(before: Mapping[str, Standing], new: Mapping[str, Limit], store: Any, now_ns: int) -> dict[str, Standing]:
    """The standing of each new limit, and of those that were removed and may come back. `store`: of the limits.

    O(limits).
    """
    found = {}
    for name, limit in new.items():
        was = before.get(name, Standing())
        left = _left(was, now_ns)
        if was.limit is None or (was.is_removed and was.until_ns <= now_ns) or _is_same(was.limit, limit):
            found[name] = Standing(was.generation, left, limit)
        else:
            until_ns = was.until_ns if was.is_removed else now_ns + _lasts_ns(was.limit)
            found[name] = _changed(Former(was.limit, was.generation, until_ns), left, limit, store)
    for name, was in before.items():
        if name not in new and (removed := _removed(was, now_ns)) is not None:
            found[name] = removed
    return found


def _removed(was: Standing, now_ns: int) -> Standing | None:
    """For a later document that has the limit again, as it was or another one. None if nothing of it is left.

    A later generation stays, as generation 0 would be cells of long ago.
    """
    until_ns = was.until_ns
    if not was.is_removed and was.limit is not None:
        until_ns = now_ns + _lasts_ns(was.limit)
    limit = was.limit if until_ns > now_ns else None
    if limit is None and not was.generation:
        return None
    return Standing(was.generation, _left(was, now_ns), limit, is_removed=True, until_ns=until_ns)


def _left(standing: Standing, now_ns: int) -> tuple[Former, ...]:
    """The limits of before whose keys aren't as new yet."""
    return tuple(former for former in standing.former if former.until_ns > now_ns)


def can_share(limit: Limit, store: Any) -> bool:
    """Whether keys can bring their share of such a limit to another one: if a look at it is no round trip."""
    return isinstance(store, Store) and not isinstance(limit, ConcurrencyLimit)


def change_of(before: Standing | None, after: Standing) -> str:
    """In words, what a limit of this standing has of its keys' state, for the log."""
    if before is None or before.generation == after.generation:
        return "as it is"
    return "in proportion" if after.former else "reset"


def _changed(former: Former, left: tuple[Former, ...], new: Limit, store: Any) -> Standing:
    """The standing of a limit that takes the keys of `former` over. `left`: those that the former one took over."""
    old, generation = former.limit, former.generation
    mode = "keep" if new.on_change is UNSET else new.on_change
    if mode == "reset":
        return Standing(generation + 1, (), new)
    if not can_share(old, store) or not can_share(new, store):
        return Standing(generation, (), new)
    if mode == "keep":
        with Store.private(keys=64) as scratch:
            scratch.names.expect_several(KEY)
            _use_up(scratch, old)
            if _made(scratch, new).peek(KEY, 0).reset_after_ns:
                # It reads what the old one has written.
                return Standing(generation, left, new)
    return Standing(generation + 1, (*left, former), new)


def _lasts_ns(limit: Limit) -> int:
    """For how long what a key has used of a limit matters, and as long again. 0 if it can't be brought to another."""
    if isinstance(limit, ConcurrencyLimit):
        return 0
    with Store.private(keys=64) as scratch:
        used_up = _use_up(scratch, limit)
        # By another clock, another part of the window is left.
        period_ns = used_up.rate.period_ns if isinstance(limit, FixedWindowLimit) else 0
        return max(2 * int(used_up.peek(KEY, 0).reset_after_ns), period_ns)


def _use_up(scratch: Store, limit: Limit) -> Any:
    """A limiter of this limit, of which a key has used all."""
    made = _made(scratch, limit)
    made.take_up_to(KEY, 2**63)
    return made


def _made(scratch: Store, limit: Limit) -> Any:
    return make_limiter(scratch, KEY, limit, parameters_of(limit, is_check=True))


def _is_same(old: Limit, new: Limit) -> bool:
    return msgspec.structs.replace(old, on_change=UNSET) == msgspec.structs.replace(new, on_change=UNSET)
