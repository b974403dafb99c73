"""The explorer itself: it walks all schedules, and its memory is as weak as documented."""

from __future__ import annotations

from math import comb

import pytest
from forebay.core.explorer import Done, Explored, Program

Access = tuple[str, int] | tuple[str, int, int, int]


def outcomes_of(
    processes: list[list[Access]], strong: bool = False, **bounds: int
) -> tuple[set[tuple[int, ...]], Explored]:
    """The possible results of a program's loads and swaps, in program order."""
    program = Program()
    reads: list[int] = []
    count = 0
    for process, accesses in enumerate(processes):
        for kind, word, *values in accesses:
            if kind != "store":
                reads.append(count)
            count += 1
            program.litmus(process, kind, word, *values, strong=strong)
    seen: set[tuple[int, ...]] = set()

    def judge(done: list[Done], finals: list[int], final_ns: int) -> str:
        seen.add(tuple(done[i].value for i in reads))
        return ""

    explored = program.explore(judge, **bounds)
    assert explored.verdict == "complete"
    return seen, explored


STORE_BUFFERING: list[list[Access]] = [
    [("swap", 0, 0, 1), ("load", 1)],
    [("swap", 1, 0, 1), ("load", 0)],
]


def test_two_processes_that_write_and_then_read_may_miss_each_other_on_weaker_memory() -> None:
    """Store buffering: what the claim and its scan must not do."""
    assert outcomes_of(STORE_BUFFERING)[0] == {(1, 0, 1, 1), (1, 1, 1, 0), (1, 1, 1, 1)}
    assert (1, 0, 1, 0) in outcomes_of(STORE_BUFFERING, stale_reads=2)[0]
    assert (1, 0, 1, 0) not in outcomes_of(STORE_BUFFERING, stale_reads=2, strong=True)[0]


def test_an_acquire_sees_all_writes_before_the_release() -> None:
    """Message passing."""
    seen, _ = outcomes_of([[("store", 0), ("store", 1)], [("load", 1), ("load", 0)]], stale_reads=2)
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_one_word_is_never_seen_to_go_back() -> None:
    """Coherence, of reads and reads."""
    seen, _ = outcomes_of([[("store", 0)], [("load", 0), ("load", 0)]], stale_reads=2)
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_two_readers_may_see_two_writers_in_two_orders() -> None:
    """Independent reads of independent writes: allowed to weaker memory, not to the strong operations."""
    program: list[list[Access]] = [
        [("swap", 0, 0, 1)],
        [("swap", 1, 0, 1)],
        [("load", 0), ("load", 1)],
        [("load", 1), ("load", 0)],
    ]
    apart = (1, 1, 1, 0, 1, 0)
    assert apart not in outcomes_of(program)[0]
    assert apart in outcomes_of(program, stale_reads=2)[0]
    assert apart not in outcomes_of(program, stale_reads=2, strong=True)[0]


def test_only_one_of_two_swaps_is_done() -> None:
    seen, _ = outcomes_of([[("swap", 0, 0, 1)], [("swap", 0, 0, 1)]], stale_reads=2)
    assert seen == {(1, 0), (0, 1)}


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_all_interleavings_are_walked(steps: int) -> None:
    """One process counts up, the other looks as often: each way to shuffle them gives other readings."""
    program: list[list[Access]] = [
        [("store", 0, 0, k + 1) for k in range(steps)],
        [("load", 0)] * steps,
    ]
    assert len(outcomes_of(program)[0]) == comb(2 * steps, steps)
    assert outcomes_of(program, preemptions=0)[0] == {(0,) * steps, (steps,) * steps}


def test_a_crash_is_possible_between_all_accesses() -> None:
    program = Program()
    for word in range(3):
        program.litmus(0, "store", word)
    done_before: set[int] = set()

    def judge(done: list[Done], finals: list[int], final_ns: int) -> str:
        done_before.add(sum(d.done for d in done))
        return ""

    assert program.explore(judge, crashes=1).verdict == "complete"
    assert done_before == {1, 2, 3}


def test_a_complaint_ends_the_search_and_comes_with_the_schedule() -> None:
    program = Program()
    program.litmus(0, "store", 0)
    program.litmus(1, "swap", 0, 1, 2)
    explored = program.explore(lambda done, finals, final_ns: "it was seen" if done[1].value else "")
    assert (explored.verdict, explored.complaint) == ("wrong", "it was seen")
    assert "process 0 writes litmus[0]: 0x1" in explored.trace
    assert "process 1 CAS    litmus[0]: 0x1 0 -> 0x2 0: done" in explored.trace
