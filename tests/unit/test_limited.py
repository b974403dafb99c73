"""``limited`` in memory: a decorator of functions and of coroutines, and a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from forebay import AllOf, Concurrency, FixedWindow, InvalidLimiter, LimitExceeded, Store, TokenBucket
from forebay.testing import ManualClock


@pytest.fixture
def three(store: Store) -> TokenBucket:
    return TokenBucket(store, "api", "3/hour")


def test_each_call_of_a_function_spends_permits(three: TokenBucket) -> None:
    @three.limited("k", 2, timeout=0)
    def twice(number: int, *, more: int = 0) -> int:
        """Doubles."""
        return 2 * number + more

    assert (twice(4, more=1), twice.__name__, twice.__doc__) == (9, "twice", "Doubles.")
    with pytest.raises(LimitExceeded) as caught:
        twice(4)
    assert (caught.value.limiter, caught.value.limit, caught.value.retry_after) == ("api", 3, 1200.0)
    assert three.peek("k").remaining == 1


def test_the_key_may_come_from_the_calls_arguments(three: TokenBucket) -> None:
    @three.limited(lambda user, **_: ("user", user), timeout=0)
    def ask(user: str, *, question: str = "") -> str:
        return f"{user}?{question}"

    assert [ask("ada", question="a"), ask("ada"), ask("ada"), ask("bob")] == ["ada?a", "ada?", "ada?", "bob?"]
    with pytest.raises(LimitExceeded):
        ask("ada")
    assert three.peek(("user", "bob")).remaining == 2
    with pytest.raises(TypeError, match="no arguments to make a key of"), three.limited(lambda: "k"):
        pass


def test_call_waits_for_its_permits_up_to_the_timeout(three: TokenBucket, clock: ManualClock) -> None:
    at: list[float] = []
    impatient = three.limited("k", timeout="20 minutes")(lambda: at.append(clock.now()))
    began = clock.now()
    for _ in range(5):
        impatient()
    assert [now - began for now in at] == [0, 0, 0, 1200, 2400]
    with pytest.raises(LimitExceeded):
        three.limited("k", 2, timeout="20 minutes")(impatient)()


def test_each_run_of_a_coroutine_spends_a_permit(three: TokenBucket) -> None:
    @three.limited("k", timeout=0)
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async def main() -> None:
        forgotten = work()
        assert three.peek("k").remaining == 3
        assert await asyncio.gather(forgotten, work(), work()) == ["done"] * 3
        with pytest.raises(LimitExceeded):
            await work()
        with pytest.raises(LimitExceeded):
            async with three.limited("k", timeout=0):
                raise AssertionError("the block ran")
        async with three.limited("another"):
            assert three.peek("another").remaining == 2

    assert asyncio.iscoroutinefunction(work)
    asyncio.run(main())


def test_an_error_of_the_call_spends_its_permit(three: TokenBucket) -> None:
    @three.limited("k")
    def fail() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        fail()
    assert three.peek("k").remaining == 2


def test_generators_are_refused(three: TokenBucket) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def later() -> AsyncIterator[int]:
        yield 1

    for function in (numbers, later):
        with pytest.raises(TypeError, match=r"generator.*use wait\(\) inside it"):
            three.limited("k")(function)


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_a_method_without_a_self_is_limited_below_its_own_decorator(three: TokenBucket, kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"write @limiter.limited\(key\) below @{kind.__name__}"):
        three.limited("k")(kind(lambda *_: "called"))

    class Mail:
        send = kind(three.limited("k")(lambda *_: "called"))

    assert Mail().send() == "called"


def test_decorator_without_a_key_is_refused_at_the_first_call(three: TokenBucket) -> None:
    ran: list[int] = []
    decorate: Any = three.limited(ran.append)  # as `@three.limited` alone
    for arguments, named in (((), {}), ((1,), {}), ((len, 1), {}), ((), {"number": 1})):
        with pytest.raises(TypeError, match=r"limiter 'api' limits a function by @limiter.limited\(key\) above it"):
            decorate(*arguments, **named)
    assert ran == []


def test_several_limits_limit_a_function_together(store: Store, three: TokenBucket) -> None:
    day = FixedWindow(store, "day", "5/day")

    @AllOf(day, three).limited(lambda user: [user, "all"], [1, 2], timeout=0)
    def work(user: str) -> None: ...

    work("ada")
    with pytest.raises(LimitExceeded) as caught:
        work("bob")
    assert (caught.value.limiter, caught.value.limit) == ("api", 3)
    assert [day.peek(user).remaining for user in ("ada", "bob")] == [4, 5]


def test_several_limits_with_held_permits_limit_no_function(store: Store, three: TokenBucket) -> None:
    with pytest.raises(InvalidLimiter, match="would not release the permits of its Concurrency"):
        AllOf(three, Concurrency(store, "c", 1)).limited("k")


def test_an_error_without_a_wait_names_the_lack_of_room(clock: ManualClock) -> None:
    with Store.private(keys=1, on_full="deny", clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/hour")
        key = next(number for number in range(10_000) if bucket.hit(number).reason == "no room")
        no_room = pytest.raises(LimitExceeded, match="now, unless the store has no room for the key")
        with no_room, bucket.limited(key, timeout=0):
            pass
