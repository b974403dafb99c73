"""Names of synced keys, which threads compute and keep until they insert the key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from process_helpers import DEADLINE_S
from thread_helpers import together

from forebay import AllOf, Store
from forebay.core.synced.token_bucket import SyncedTokenBucket

KEYS: Final = 40_000


def synced(store: Store, name: str, name_of: Callable[[Any], bytes]) -> Any:
    return SyncedTokenBucket(store, name, "1000/hour", None, None, KEYS, name_of)


def name_of(key: int) -> bytes:
    return b"%016d" % key


def test_new_keys_of_one_thread_leave_another_threads_key_its_name(store: Store) -> None:
    """One thread is about to compute its key's name in a second limit, while another thread asks for many new keys."""
    in_second, may_go_on = threading.Event(), threading.Event()

    def wait_and_name(key: int) -> bytes:
        in_second.set()
        assert may_go_on.wait(DEADLINE_S)
        return name_of(key)

    first, second = synced(store, "first", name_of), synced(store, "second", wait_and_name)

    def ask() -> None:
        assert AllOf(first, second).allow(1)

    def ask_for_many() -> None:
        assert in_second.wait(DEADLINE_S)
        for key in range(2, 3000):
            assert first.allow(key)
        may_go_on.set()

    together(ask, ask_for_many)
    reports, unnamed = first.reports(0, first.cell_count, -2)
    assert unnamed == 0
    assert len(reports) == 2999


def test_every_new_key_of_several_threads_is_named(store: Store) -> None:
    bucket, size = synced(store, "bucket", name_of), KEYS // 8

    def hit(number: int) -> None:
        for key in range(number * size, (number + 1) * size):
            bucket.hit(key)

    together(*[partial(hit, number) for number in range(4)])
    reports, unnamed = bucket.reports(0, bucket.cell_count, -2)
    assert unnamed == 0
    assert len(reports) == 4 * size
