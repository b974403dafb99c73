"""What ``forebay bench`` concludes from figures."""

from __future__ import annotations

import pytest

from forebay.benchmarking.advice import advice
from forebay.benchmarking.comparison import compared
from forebay.benchmarking.run import Figure, Run

LIMITERS, REDIS = "limiters, one hot key", "over Redis"


def run(*figures: Figure, **facts: str) -> Run:
    return Run("2026-01-01T00:00:00Z", "0.1.0", 1000, False, facts, 0.0, 0.0, list(figures))


def quiet(group: str, name: str, ns: float, workers: int = 1) -> Figure:
    return Figure(group, name, [ns] * 3, workers)


def test_nothing_is_concluded_from_nothing() -> None:
    assert advice(run()) == []


def test_algorithms_within_the_noise_cost_the_same() -> None:
    figures = [
        Figure(LIMITERS, "token bucket: allow", [40.0, 41.0, 42.0]),
        Figure(LIMITERS, "fixed window: allow", [42.0, 43.0, 44.0]),
        Figure(LIMITERS, "sliding window: allow", [50.0, 51.0, 52.0]),
    ]
    (text,) = advice(run(*figures))
    assert "allow costs the same for token bucket; fixed window." in text
    assert "Sliding window costs most: 51.0 ns, 1.2 times as much as token bucket." in text


def test_a_mode_is_named_only_if_it_is_cheaper_beyond_the_noise() -> None:
    strict, leased = quiet(REDIS, "RedisStore: allow", 100_000), quiet(REDIS, "LeasedStore: allow", 60)
    (text,) = advice(run(strict, leased))
    assert text.startswith("Mode: a decision in Redis takes 100 µs, one of a LeasedStore 60.0 ns; there the hosts")
    assert advice(run(strict, quiet(REDIS, "LeasedStore: allow", 90_000))) == []
    noisy = Figure(REDIS, "LeasedStore: allow", [60.0, 60.0, 200_000.0])
    assert not any(text.startswith("Mode") for text in advice(run(strict, noisy)))


@pytest.mark.parametrize(("share", "is_named"), [("0%", True), ("40%", False), ("", False)])
def test_huge_pages_are_named_if_there_are_none(share: str, is_named: bool) -> None:
    live = quiet("one process, many keys", "allow, 1,000 live keys at random", 100)
    texts = advice(run(live, **{"stores in huge pages": share}))
    assert [text.startswith("Huge pages: the kernel granted none") for text in texts] == [True] * is_named


def test_workers_on_one_key_are_compared_with_one() -> None:
    group = "processes at the same time"
    alone, both = quiet(group, "one allowed key: 1", 50), quiet(group, "one allowed key: 2", 40, workers=2)
    (text,) = advice(run(alone, both))
    assert text.startswith("Processes: 2 of them decide 25.0 million/s on one allowed key, 1.2 times as many as one.")
    noisy = Figure(group, "one allowed key: 2", [30.0, 40.0, 50.0], 2)
    assert any("25.0 million/s on one allowed key, as many as one within" in text for text in advice(run(alone, noisy)))


def test_noise_is_named() -> None:
    (text,) = advice(run(Figure("floors", "x", [1.0, 1.0, 1.5])))
    assert text.startswith("Noise: half of the figures differ by more than 50% from pass to pass.")


def test_a_difference_counts_beyond_the_ranges_of_both_runs() -> None:
    before = run(Figure("floors", "x", [9.0, 10.0, 11.0]))
    for median_ns, verdict in ((12.9, ""), (13.5, "slower"), (6.5, "faster"), (7.1, "")):
        after = run(Figure("floors", "x", [median_ns - 0.5, median_ns, median_ns + 0.5]))
        (change,) = compared(before, after).changes
        assert change.verdict == verdict
