"""Stores over Redis that threads share: leases, exchanges and the circuit breaker. None of them needs a server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import redis
from thread_helpers import often, race, together

from forebay import Store, StoreUnavailable
from forebay.redis.commands import Command
from forebay.redis.keys import KeySpace
from forebay.redis.leased import executor
from forebay.redis.leased.executor import Keeper, LeaseExecutor
from forebay.redis.synced import background
from forebay.redis.synced.exchange import Exchange
from forebay.redis.transport.breaker import THRESHOLD, Breaker

HOT: Final = b"12" * 16
"""The name of a hot key."""


class Exchanged(Exchange):
    """An exchange with a server whose hot lists are all alike: empty, until the key is hot."""

    main = "sync_window"

    def __init__(self) -> None:
        self.limiter = SimpleNamespace(store=SimpleNamespace(now_ns=int))  # type: ignore[assignment]
        self.version = 4
        self.before_reply: Callable[[], object] = int
        self.before_reports: Callable[[], object] = int
        self.has_found: list[bool] = []
        """For each exchange that has read the lists, whether it has found the hot key."""
        super().__init__(SimpleNamespace(keyspace=KeySpace((), "n", is_plain=False)), "w", b"s", b"h")  # type: ignore[arg-type]

    def lists_at(self, now_ns: int) -> list[tuple[bytes, int]]:
        return [(b"hot", 0)]

    def learn(self, name: bytes, total: int, end_ns: int, server_us: int, read_ns: int) -> None:
        """The host's store would keep it."""

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        raise NotImplementedError

    def send(self, messages: list[Command[None]]) -> list[Any]:
        before_reply, self.before_reply = self.before_reply, int
        before_reply()
        names = (1, HOT, 7) if self.version > 4 else (0,)
        return [
            [1, 0, self.version, *((0,) if message.arguments == [b"%d" % self.version] else names)]
            for message in messages
        ]

    def messages(self, round_number: int, learned: bytearray | None = None) -> Iterator[Command[None]]:
        self.has_found.append(learned is not None and any(learned))
        before_reports, self.before_reports = self.before_reports, int
        before_reports()
        return iter(())


def test_hot_key_of_an_exchange_that_fails_is_not_forgotten_by_one_of_another_thread() -> None:
    exchange = Exchanged()

    def exchange_in_a_thread() -> None:
        thread = threading.Thread(target=exchange.run, args=(1,))
        thread.start()
        thread.join()
        exchange.version = 5
        exchange.before_reports = fail

    def fail() -> None:
        raise StoreUnavailable("away")

    exchange.before_reply = exchange_in_a_thread
    with pytest.raises(StoreUnavailable):
        exchange.run(1)
    exchange.run(1)
    exchange.run(1)
    assert exchange.has_found == [False, True, True, False]


def test_leased_store_is_closed_while_its_first_thread_begins() -> None:
    executor: Any = SimpleNamespace(check_every_s=3600.0, closed=False)

    def make() -> Keeper:
        return Keeper(LeaseExecutor(executor, "store", 10**9))

    for keeper, _ in race(often(400), make, Keeper.start, Keeper.end):
        keeper.end()


def test_breaker_opens_though_another_thread_has_closed_it_at_a_failure() -> None:
    """The failing thread finds no count in the host's store, and goes over to counts of its process."""
    error = redis.ConnectionError("refused")

    def lets_pass(breaker: Breaker) -> bool:
        try:
            return breaker.enter() is None
        except StoreUnavailable:
            return False

    with Store.private(keys=64) as host:
        breaker = Breaker(host, "server", 1.0)
        for _ in race(often(2000), lambda: None, lambda _: breaker.failed(error), lambda _: breaker._close()):
            for _ in range(THRESHOLD + 1):
                breaker.failed(error)
            assert not lets_pass(breaker)
            breaker._close()
            assert lets_pass(breaker)
        breaker.close()


@pytest.mark.parametrize(
    ("module", "objects", "act"),
    [
        (executor, "_executors", executor._finish_all),
        (background, "_working", background._close_all),
    ],
    ids=["leased", "synced"],
)
def test_end_of_the_process_finds_all_stores_while_threads_make_others(
    monkeypatch: pytest.MonkeyPatch, module: Any, objects: str, act: Callable[[], None]
) -> None:
    ended: list[object] = []

    class Made:
        def __init__(self) -> None:
            remembered.add(self)

        def finish(self) -> None:
            ended.append(self)

        close = finish

    remembered: weakref.WeakSet[Made] = weakref.WeakSet()
    monkeypatch.setattr(module, objects, remembered)
    first, is_over = [Made() for _ in range(50)], threading.Event()

    def make() -> None:
        while not is_over.is_set():
            Made()

    def end() -> None:
        try:
            for _ in range(often(200)):
                ended.clear()
                act()
                assert set(first) <= set(ended)
        finally:
            is_over.set()

    together(end, make, make)
