"""Hammers every limiter from many threads, without the GIL: ``python threads.py SECONDS``. For the thread sanitizer.

The first run has few keys, so that threads meet. The second has more keys than there is room for, so that threads
insert, evict and reuse cells.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from hammer import SharedSearch, SharedSlots, hammer

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Credits,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)

THREADS: Final = 6
TURNS: Final = 4000
HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()
CALLS: Final = 100
# The numbers of keys in the first and the second run over one limiter. The second has more keys than there is room for.
FEW, MANY, FEW_WITH_RECORDS, MANY_WITH_RECORDS = 4, 3000, 2, 9

PLAIN: Final[list[Callable[[Store, str], Any]]] = [
    lambda store, name: TokenBucket(store, name, "2000/second", burst=20),
    lambda store, name: TokenBucket(store, name, "20/10 ms", burst=40, refill="interval"),
    lambda store, name: LeakyBucket(store, name, "2000/second", 20),
    lambda store, name: MinInterval(store, name, "1 ms"),
    lambda store, name: FixedWindow(store, name, "20/10 ms"),
    lambda store, name: FixedWindow(store, name, "20/10 ms", align="first"),
    lambda store, name: FixedWindow(store, name, "20/10 ms", align="stagger"),
    lambda store, name: SlidingWindow(store, name, "20/10 ms"),
]
WITH_RECORDS: Final[list[Callable[[Store, str], Any]]] = [
    lambda store, name: SlidingLog(store, name, "20/10 ms", keys=3),
    lambda store, name: SlidingLog(store, name, "1/ms", keys=3),
    lambda store, name: BucketedWindow(store, name, "20/10 ms", 5, keys=3),
    lambda store, name: BucketedWindow(store, name, "500/second", 60, keys=3),
]


def together(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)`, `work(1)` and so on, each in a thread of its own. Return their results in this order."""
    results: list[Any] = [None] * THREADS
    start = threading.Barrier(THREADS)

    def run(me: int) -> None:
        start.wait()
        results[me] = work(me)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results, "a thread failed"
    return results


def hammer_limiter(limiter: Any, keys: list[int], round_number: int) -> list[int]:
    """Two thirds of the threads call the C functions of a decision; the others decide batches as a program does."""
    batch = (keys * (2000 // len(keys) + 1))[:2000]

    def work(me: int) -> tuple[int, int, int, int]:
        if me % 3 == 0:
            for _ in range(TURNS // len(batch)):
                limiter.allow_many(batch)
            return 0, 0, 0, 0
        counts: tuple[int, int, int, int] = hammer(limiter, keys, 1 + me + THREADS * round_number, TURNS)
        return counts

    return [sum(column) for column in zip(*together(work), strict=True)]


def hammer_slots(count: int, round_number: int) -> tuple[int, int]:
    slots = SharedSlots(count)
    results = together(lambda me: slots.hammer(me + 1, 1 + me + THREADS * round_number, TURNS))
    most, denied = max(result[0] for result in results), sum(result[1] for result in results)
    assert most <= count, f"{most} of {count} slots were held"
    assert slots.left() == 0
    return most, denied


def hammer_search(round_number: int) -> None:
    search = SharedSearch()
    mixed = sum(together(lambda me: search.hammer(1 + me + THREADS * round_number, TURNS)))
    assert mixed == 0, f"{mixed} times the words of different scans were taken for those of one"


def call(limiter: Any, turn: int) -> None:
    limiter.allow(turn % FEW)
    limiter.hit(turn % FEW)
    limiter.peek(0)
    limiter.reserve(turn % FEW).cancel()
    limiter.allow_many([turn % FEW, "l"])
    limiter.refund(0)


def hammer_calls(store: Store) -> int:
    """Call limiters as programs do; one thread closes their store meanwhile. How many calls were made by others.

    Each thread has the results of its calls to itself: the interpreter's memory changes hands unseen by the sanitizer.
    """
    limiters = tuple(make(store, f"limiter {number}") for number, make in enumerate(PLAIN + WITH_RECORDS))
    gate = Concurrency(store, "gate", 3, keys=4)
    prepaid = Credits(store, "prepaid")
    both = AllOf(limiters[0], limiters[-1], prepaid)

    def work(me: int) -> int:
        for turn in range(CALLS):
            if me == 0 and turn == CALLS // 2:
                store.close()
            try:
                prepaid.add(turn % FEW, 9)
                for limiter in (*limiters, prepaid):
                    call(limiter, turn)
                both.allow(turn % FEW)
                if gate.allow("k"):
                    gate.refund("k")
                lease = gate.acquire("k")
                lease.renew()
                lease.release()
            except StoreClosed:
                return turn
        return CALLS

    return sum(together(work))


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    totals, rounds, denials, calls = [0, 0, 0, 0], 0, 0, 0
    while rounds == 0 or time.monotonic() < end:
        for makers, few, many in ((PLAIN, FEW, MANY), (WITH_RECORDS, FEW_WITH_RECORDS, MANY_WITH_RECORDS)):
            for number, make in enumerate(makers):
                with Store.private(keys=1) as store:
                    limiter = make(store, f"limiter {number}")
                    for size in (few, many):
                        counts = hammer_limiter(limiter, list(range(size)), rounds)
                        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        denials += sum(hammer_slots(count, rounds)[1] for count in (5, 70, 200))
        hammer_search(rounds)
        with Store.private(keys=1) as store:
            calls += hammer_calls(store)
        rounds += 1
    inserted, evicted, _, cas_retries = totals
    print(
        f"{rounds} rounds of {THREADS} threads: {cas_retries:,} CASes lost, {inserted:,} keys inserted, "
        f"{evicted:,} evicted, {denials:,} times no slot free, {calls:,} turns of calls; "
        f"{'with' if HAS_GIL else 'without'} the GIL"
    )
    assert all((cas_retries, inserted, evicted, denials)), "the threads met"


if __name__ == "__main__":
    main()
