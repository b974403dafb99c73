"""The record of hot keys with threads that note at once."""

from __future__ import annotations

import threading

from thread_helpers import often

from forebay import Store, TokenBucket

DENIALS = often(2000)
THREADS = 4


def test_threads_that_note_one_key_count_no_more_than_they_deny() -> None:
    with Store.private(keys=100, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/year")
        bucket.allow("key")

        def deny() -> None:
            for _ in range(DENIALS):
                assert not bucket.allow("key")

        threads = [threading.Thread(target=deny) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats().limiters["api"].denied == THREADS * DENIALS
        assert 1 <= sum(one.denied for one in store.hot_keys()) <= THREADS * DENIALS
