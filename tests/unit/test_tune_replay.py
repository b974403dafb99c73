"""``forebay tune`` replays requests: decisions, the judge, and the figures of a comparison, against naive models."""

from __future__ import annotations

import mmap
import random
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import Rate, SlidingLog, Store, TokenBucket
from forebay.errors import ForebayError
from forebay.testing import ManualClock
from forebay.tuning.candidates import ALGORITHMS, Candidate, candidates
from forebay.tuning.comparison import Comparison, compare
from forebay.tuning.replay import Replay, demand, exact_log
from forebay.tuning.requests import Columns, Keys
from forebay.tuning.traffic import KINDS, Generated, generate

MS = 10**6
START_NS = 1_700_000_000 * 10**9
GB = 10**9

# Requests: a pause in ms before each, and its key.
traffics = st.lists(st.tuples(st.sampled_from([0, 0, 1, 7, 40, 100, 333]), st.sampled_from("abc")), min_size=1)


def written(requests: Sequence[tuple[int, str]]) -> tuple[mmap.mmap, Keys, list[tuple[int, str]]]:
    """Requests in a file, and their times in ns."""
    timed, now_ns = [], START_NS
    for pause_ms, key in requests:
        now_ns += pause_ms * MS
        timed.append((now_ns, key))
    with tempfile.TemporaryFile() as file:
        columns = Columns(file)
        assert columns.extend([time for time, _ in timed], [key for _, key in timed]) == []
        columns.finish()
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), columns.keys, timed


def naive_log(timed: list[tuple[int, str]], limit: int, period_ns: int) -> list[bool]:
    admitted: dict[str, list[int]] = defaultdict(list)
    decisions = []
    for now_ns, key in timed:
        decisions.append(sum(time > now_ns - period_ns for time in admitted[key]) < limit)
        if decisions[-1]:
            admitted[key].append(now_ns)
    return decisions


def bits(packed: bytearray, count: int) -> list[bool]:
    return [bool(packed[index // 8] >> index % 8 & 1) for index in range(count)]


@given(traffics, st.integers(1, 5), st.sampled_from([1, 40, 100, 1000]))
def test_exact_log_admits_what_a_naive_log_admits(requests: list[tuple[int, str]], limit: int, period_ms: int) -> None:
    view, keys, timed = written(requests)
    packed = exact_log(view, keys.count, limit, period_ms * MS)
    assert bits(packed, len(timed)) == naive_log(timed, limit, period_ms * MS)


@given(traffics, st.sampled_from([1, 40, 100, 1000]))
def test_demand_is_the_most_in_any_window(requests: list[tuple[int, str]], span_ms: int) -> None:
    view, keys, timed = written(requests)
    peaks = array("I", bytes(4 * keys.count))
    live = demand(view, span_ms * MS, peaks)
    windows = [[key for time, key in timed if end_ns - span_ms * MS < time <= end_ns] for end_ns, _ in timed]
    assert {keys.text(number): peak for number, peak in enumerate(peaks)} == {
        key: max(window.count(key) for window in windows) for _, key in timed
    }
    assert live == max(len(set(window)) for window in windows)


@given(traffics, st.sampled_from(ALGORITHMS), st.integers(1, 5), st.sampled_from([100, 1000]))
def test_figures_are_those_of_the_limiter_asked_one_by_one(
    requests: list[tuple[int, str]], algorithm: str, limit: int, period_ms: int
) -> None:
    """The oracle asks the same limiter by ``allow``, moves the clock by ``set_ns`` and counts by brute force."""
    view, keys, timed = written(requests)
    period_ns = period_ms * MS
    rate = Rate.per_ns(limit, period_ns)
    (candidate,) = candidates([rate], [algorithm], [])
    clock = ManualClock(START_NS // 10**9)
    with Store.private(keys=100, clock=clock) as store:
        limiter = candidate.make(store, 100)
        decisions = []
        for time_ns, key in timed:
            clock.set_ns(time_ns)
            decisions.append(limiter.allow(key))
    comparison = compare(view, keys, [rate], [algorithm], memory_bytes=GB)
    (result,) = comparison.results
    admitted = [request for request, allowed in zip(timed, decisions, strict=True) if allowed]

    def in_window(now_ns: int, key: str, before: int) -> int:
        """Requests of the key that were admitted in the period up to now, of the first `before`."""
        return sum(
            allowed and other == key and time > now_ns - period_ns
            for (time, other), allowed in zip(timed[:before], decisions[:before], strict=True)
        )

    used = [in_window(time, key, index) for index, (time, key) in enumerate(timed)]
    assert (result.admitted, result.denied) == (decisions.count(True), decisions.count(False))
    assert result.users_hit == len({key for (_, key), yes in zip(timed, decisions, strict=True) if not yes})
    assert result.largest == max(
        sum(other == key and time - period_ns < earlier <= time for earlier, other in admitted)
        for time, key in admitted
    )
    assert result.differing == sum(
        ours != exact for ours, exact in zip(decisions, naive_log(timed, limit, period_ns), strict=True)
    )
    assert result.wrongly_allowed == sum(yes and count >= limit for yes, count in zip(decisions, used, strict=True))
    assert result.wrongly_denied == sum(not yes and count < limit for yes, count in zip(decisions, used, strict=True))
    assert sum(result.denied_by_bin) == result.denied
    assert sum(comparison.requests_by_bin) == len(timed)
    assert dict(result.most_denied) == {
        key: sum(k == key and not yes for (_, k), yes in zip(timed, decisions, strict=True))
        for key in {key for (_, key), yes in zip(timed, decisions, strict=True) if not yes}
    }


@pytest.mark.parametrize("kind", list(KINDS))
def test_sliding_log_decides_as_the_exact_log(kind: str) -> None:
    """Of each kind of traffic, with as much room as the command gives it, and in batches."""
    view, keys = generated(kind)
    comparison = compare(view, keys, [Rate(60, 60)], ["sliding-log", "token-bucket"], memory_bytes=GB)
    log, bucket = comparison.results
    assert log.denied > 0
    assert (log.differing, log.wrongly_allowed, log.wrongly_denied, log.largest) == (0, 0, 0, 60)
    assert bucket.differing > 0
    assert bucket.wrongly_allowed > 0
    assert bucket.largest <= 120


def generated(kind: str, seed: int = 1) -> tuple[mmap.mmap, Keys]:
    with tempfile.TemporaryFile() as file:
        columns = Columns(file)
        generate(Generated(kind, 30_000, 100, Rate(60, 60), seed), columns)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), columns.keys


def figures(comparison: Comparison) -> Comparison:
    return replace(comparison, results=[replace(result, decision_ns=0.0) for result in comparison.results])


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_seed_generates_the_same_traffic_again(kind: str) -> None:
    def compared(seed: int) -> Comparison:
        return figures(compare(*generated(kind, seed), [Rate(60, 60)], ["sliding-window"], memory_bytes=GB))

    assert compared(1) == compared(1)
    assert compared(1) != compared(2)


def test_traffic_is_as_described() -> None:
    def peaks_and_keys(kind: str) -> tuple[dict[str, int], int]:
        view, keys = generated(kind)
        peaks = array("I", bytes(4 * keys.count))
        demand(view, 10**9, peaks)
        time_ns = int.from_bytes(view[-12:-4], "little") - int.from_bytes(view[:8], "little")
        return {keys.text(number): peak for number, peak in enumerate(peaks)}, time_ns

    poisson, poisson_ns = peaks_and_keys("poisson")
    assert len(poisson) == 100
    # 100 users of one request per second each send 30,000 requests in five minutes.
    assert 280 < poisson_ns / 10**9 < 320
    bursts, bursts_ns = peaks_and_keys("bursts")
    assert 250 < bursts_ns / 10**9 < 350
    assert sum(bursts.values()) > 2 * sum(poisson.values())
    zipf, _ = peaks_and_keys("zipf")
    assert zipf["user-0"] > 2 * zipf["user-9"] > zipf["user-90"]
    attack, attack_ns = peaks_and_keys("attack")
    assert {key for key in attack if key.startswith("attacker")} == {f"attacker-{number}" for number in range(10)}
    assert min(peak for key, peak in attack.items() if key.startswith("attacker")) > 70
    assert max(peak for key, peak in attack.items() if key.startswith("user")) < 20
    assert 60 < attack_ns / 10**9 < 75


def test_the_suggested_limit_is_the_least_that_spares_the_users() -> None:
    peaks = [1] * 90 + [5] * 6 + [20] * 3 + [70]
    requests = [(0, f"user-{user}") for user, peak in enumerate(peaks) for _ in range(peak)]
    view, keys, _ = written(requests)
    for share, limit, hit in ((0.0, 70, 0), (0.01, 20, 1), (0.039, 20, 1), (0.04, 5, 4), (0.1, 1, 10), (0.99, 1, 10)):
        comparison = compare(view, keys, [Rate(9, 60)], ["sliding-log"], deny_at_most=share, memory_bytes=GB)
        (suggestion,) = comparison.suggestions
        assert (suggestion.rate, suggestion.users_hit) == (Rate(limit, 60), hit)
        # The suggested limit is replayed, too, and the limiter hits as many users.
        asked, suggested = comparison.results
        assert (asked.candidate.rate, asked.users_hit) == (Rate(9, 60), 4)
        assert (suggested.candidate.rate, suggested.users_hit) == (Rate(limit, 60), hit)


def test_candidates_are_all_combinations() -> None:
    rates = [Rate(5, 60), Rate(9, 60), Rate(5, 60)]
    named = [str(one) for one in candidates(rates, ["token-bucket", "fixed-window"], [1, 20])]
    assert named == [
        "5 per minute, token-bucket, burst 1",
        "5 per minute, token-bucket, burst 20",
        "5 per minute, fixed-window",
        "9 per minute, token-bucket, burst 1",
        "9 per minute, token-bucket, burst 20",
        "9 per minute, fixed-window",
    ]
    assert [str(one) for one in candidates([Rate(5, 60)], ["leaky-bucket"], [])] == ["5 per minute, leaky-bucket"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_needed_is_that_of_the_store(algorithm: str) -> None:
    candidate = next(candidates([Rate(100, 60)], [algorithm], []))
    for keys in (10, 1000, 50_000):
        with Store.private(keys=candidate.store_keys(keys), clock=ManualClock()) as store:
            candidate.make(store, keys)
            assert candidate.bytes_needed(keys) == pytest.approx(store.stats().bytes, rel=0.2, abs=30_000)


def test_a_candidate_that_is_impossible_or_too_large_is_left_out() -> None:
    view, keys, _ = written([(1, str(user)) for user in range(1000)])
    small = compare(view, keys, [Rate(10_000, 60)], ["sliding-log", "fixed-window"], memory_bytes=10**6)
    assert [result.candidate.algorithm for result in small.results] == ["fixed-window"]
    (left,) = small.left_out
    assert left.candidate == Candidate("sliding-log", Rate(10_000, 60))
    assert "for 1,000 live keys: give more --memory" in left.reason
    fast = compare(view, keys, [Rate(2**30, 60)], ["sliding-log"], memory_bytes=2**60)
    assert fast.results == []
    assert "limit" in fast.left_out[0].reason


def test_a_replay_refuses_what_it_cannot_judge() -> None:
    view, keys, _ = written([(1, "a"), (1, "b")])
    exact = exact_log(view, keys.count, 1, 10**9)
    clock = ManualClock()
    with Store.private(keys=10) as store, Store.private(keys=10, clock=clock) as manual:
        with pytest.raises(ValueError, match="ManualClock"):
            Replay(TokenBucket(store, "api", "1/second"), view, keys, exact, 1, 10**9, 10**9, 1)
        limiter = SlidingLog(manual, "api", "1/second", keys=10)
        with pytest.raises(ValueError, match="exact log has 0 bytes"):
            Replay(limiter, view, keys, bytearray(), 1, 10**9, 10**9, 1)
        with pytest.raises(ValueError, match="bins"):
            Replay(limiter, view, keys, exact, 1, 10**9, 1, 1)
        with pytest.raises(ValueError, match="no requests"):
            Replay(limiter, b"", keys, exact, 1, 10**9, 1, 1)
        replay = Replay(limiter, view, keys, exact, 1, 10**9, 10**9, 1)
        assert replay.run(1) == 1
        manual.close()
        with pytest.raises(ForebayError, match="the store was closed"):
            replay.run(1)
        replay.close()
        replay.close()
        with pytest.raises(ValueError, match="closed"):
            replay.run(1)


def test_long_traffic_is_judged_as_brute_force_does() -> None:
    """Over several batches and writes of the file."""
    moving = random.Random(3)
    view, keys, timed = written([(moving.choice([0, 0, 1, 2]), str(moving.randrange(20))) for _ in range(20_000)])
    packed = exact_log(view, keys.count, 10, 1000 * MS)
    windows: dict[str, list[int]] = defaultdict(list)
    expected = []
    for now_ns, key in timed:
        windows[key] = [time for time in windows[key] if time > now_ns - 1000 * MS]
        expected.append(len(windows[key]) < 10)
        if expected[-1]:
            windows[key].append(now_ns)
    assert bits(packed, len(timed)) == expected
    (result,) = compare(view, keys, [Rate(10, 1)], ["sliding-log"], memory_bytes=GB).results
    assert (result.admitted, result.differing) == (sum(expected), 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_store_has_room_for_all_keys_that_are_live_at_a_time(algorithm: str) -> None:
    """Of 20,000 keys that come now and then, so that their states end all the time."""
    moving = random.Random(5)
    view, keys, _ = written([(1, f"user-{moving.randrange(20_000)}") for _ in range(60_000)])
    comparison = compare(view, keys, [Rate(1, 10)], [algorithm], [1, 5], memory_bytes=GB)
    # With as many live keys as a store has room for, fewer than one insertion of 10,000 finds no free cell.
    assert max(result.evicted for result in comparison.results) <= 6
