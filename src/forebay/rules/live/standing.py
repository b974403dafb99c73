"""The standing of a limit: which cells have its keys' state, after all changes of live rules.

A limit of a new generation counts in cells of its own: see ``carrying``. Its name, its counters and its header fields
stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.extras import Needs
from forebay.rules.building import make_limiter, parameters_of
from forebay.rules.model import ConcurrencyLimit, Limit
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
    is_removed: bool = False
    """Whether the document has no such limit."""


def standings(
    old: Mapping[str, Limit], before: Mapping[str, Standing], new: Mapping[str, Limit], store: Any, now_ns: int
) -> dict[str, Standing]:
    """The standing of each new limit, and of those of a later generation that were removed. `store`: of the limits.

    O(limits).
    """
    found = {}
    for name, limit in new.items():
        standing = before.get(name, Standing())
        left = _left(standing, now_ns)
        if name in old and not _is_same(old[name], limit):
            found[name] = _changed(old[name], standing.generation, left, limit, store, now_ns)
        else:
            found[name] = Standing(standing.generation, left)
    # A later document may have the limit again. It goes on then, as generation 0 would be cells of long ago.
    removed = {name: standing for name, standing in before.items() if name not in new and standing.generation}
    return found | {
        name: Standing(standing.generation, _left(standing, now_ns), is_removed=True)
        for name, standing in removed.items()
    }


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


def _changed(old: Limit, generation: int, left: tuple[Former, ...], new: Limit, store: Any, now_ns: int) -> Standing:
    mode = "keep" if new.on_change is UNSET else new.on_change
    if mode == "reset":
        return Standing(generation + 1)
    if not can_share(old, store) or not can_share(new, store):
        return Standing(generation)
    with Store.private(keys=64) as scratch:
        scratch.names.expect_several(KEY)
        was, now = (make_limiter(scratch, KEY, limit, parameters_of(limit, is_check=True)) for limit in (old, new))
        was.take_up_to(KEY, 2**63)
        if mode == "keep" and now.peek(KEY, 0).reset_after_ns:
            # It reads what the old one has written.
            return Standing(generation, left)
        lasts_ns = 2 * was.peek(KEY, 0).reset_after_ns
    return Standing(generation + 1, (*left, Former(old, generation, now_ns + lasts_ns)))


def _is_same(old: Limit, new: Limit) -> bool:
    return msgspec.structs.replace(old, on_change=UNSET) == msgspec.structs.replace(new, on_change=UNSET)
