"""Counter lines within one process: each holder has a line of its own, until it gives the line back."""

from __future__ import annotations

from typing import Any

from process_helpers import counter_lines, path_of

from forebay import Store, TokenBucket
from forebay.segment import layout

FIRST_SHARED = layout.OWNED_COUNTER_LINES


def test_each_holder_has_a_line_of_its_own(store: Store) -> None:
    number = store.attachment.limiter_number("api", layout.ALGORITHM_TOKEN_BUCKET)
    other = store.attachment.limiter_number("other", layout.ALGORITHM_TOKEN_BUCKET)
    owners = [(number, 0), (number, 1), (number, -7), (other, 0), (other, 1)]
    taken = [store.attachment.counter_line(*owner) for owner in owners]
    assert not any(shared for _, shared in taken)
    assert len({line for line, _ in taken}) == len(owners)
    assert [store.attachment.counter_line(*owner) for owner in owners] == taken


def test_a_line_that_was_given_back_goes_to_another_holder_or_process(store_name: str) -> None:
    with Store(store_name, keys=10) as here, Store(store_name, keys=10) as there:
        number = here.attachment.limiter_number("api", layout.ALGORITHM_TOKEN_BUCKET)
        first, _ = here.attachment.counter_line(number, 1)
        second, _ = here.attachment.counter_line(number, 2)
        elsewhere = there.attachment.counter_line(number)
        assert len({first, second, elsewhere[0]}) == 3
        here.attachment.release_lines(1)
        assert there.attachment.counter_line(number, 1) == (first, False)
        assert here.attachment.counter_line(number, 2) == (second, False)
        assert here.attachment.counter_line(number, 3)[0] not in (first, second, elsewhere[0])
        here.attachment.release_lines(2)
        assert here.attachment.counter_line(number, 4) == (second, False)


def test_the_next_holder_of_a_line_continues_its_counts(store_name: str) -> None:
    with Store(store_name, keys=10) as here, Store(store_name, keys=10) as there:
        first, second = (TokenBucket(store, "api", "1/day", burst=100) for store in (here, there))
        for _ in range(7):
            first.allow("k")
        for holder in range(129):  # without the GIL, this thread is one of these
            here.attachment.release_lines(holder)
        for _ in range(5):
            second.allow("k")
        assert counter_lines(path_of(store_name))[0]["allowed"] == 12


def test_holders_without_a_free_line_share_one(store: Store) -> None:
    number = store.attachment.limiter_number("api", layout.ALGORITHM_TOKEN_BUCKET)
    for holder in range(layout.OWNED_COUNTER_LINES):
        assert not store.attachment.counter_line(number, holder)[1]
    for holder in range(layout.OWNED_COUNTER_LINES, layout.OWNED_COUNTER_LINES + 3):
        assert store.attachment.counter_line(number, holder) == (FIRST_SHARED + number, True)
    store.attachment.release_lines(layout.OWNED_COUNTER_LINES)
    assert store.attachment.counter_line(number, -1) == (FIRST_SHARED + number, True)
    store.attachment.release_lines(5)
    assert not store.attachment.counter_line(number, -1)[1]


def test_a_child_gives_back_no_line_of_its_parent(store_name: str, in_child: Any) -> None:
    with Store(store_name, keys=10) as store, Store(store_name, keys=10) as other:
        number = store.attachment.limiter_number("api", layout.ALGORITHM_TOKEN_BUCKET)
        line, _ = store.attachment.counter_line(number, 1)

        def give_back_and_take() -> int:
            store.attachment.release_lines(1)
            return store.attachment.counter_line(number, 1)[0]

        assert in_child(give_back_and_take) != line
        assert other.attachment.counter_line(number, 1)[0] != line


def test_nothing_is_given_back_after_a_close(store: Store) -> None:
    number = store.attachment.limiter_number("api", layout.ALGORITHM_TOKEN_BUCKET)
    store.attachment.counter_line(number, 1)
    store.close()
    store.attachment.release_lines(1)
    store.attachment.release_lines(2)
