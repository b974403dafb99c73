"""A program's outcomes are judged strictly: outcomes that must be refused, and their neighbours that may be."""

from __future__ import annotations

from forebay.core.explorer import Done
from programs import NS, SceneOfRepeats, SceneOfSeveral, SceneOfSlots
from scenes import FEWER, TOKENS, bucketed_window, sliding_log, token_bucket


def answer(
    process: int, before: set[int], allowed: bool, now_ns: int, *, done: bool = True, full: bool = False, value: int = 0
) -> Done:
    return Done(process, True, done, frozenset(before), allowed, full, now_ns, value, now_ns, now_ns)


def test_a_denial_by_a_sliding_log_with_room_is_refused() -> None:
    scene = sliding_log(2).before().hits(0).add(1, "refund")
    scene.expect()
    at = scene.at_ns
    assert scene.judge([answer(0, set(), False, at), answer(1, set(), True, at)], [1], at)
    assert not scene.judge([answer(0, set(), True, at), answer(1, set(), True, at)], [1], at)


def test_a_refund_that_gives_nothing_back_is_refused() -> None:
    scene = sliding_log(2).before().add(0, "refund")
    scene.expect()
    assert scene.judge([answer(0, set(), True, scene.at_ns)], [1], scene.at_ns)
    assert not scene.judge([answer(0, set(), True, scene.at_ns)], [2], scene.at_ns)


def test_a_later_reading_does_not_explain_an_admission() -> None:
    scene = bucketed_window(2).before(2).hits(0, 1)
    scene.expect(clock_moves=2, jumps_ns=[10, NS])
    at, later = scene.at_ns, scene.at_ns + NS + 10
    assert scene.judge([answer(0, set(), True, at), answer(1, {0}, False, later)], [1], later)
    assert not scene.judge([answer(0, set(), False, at), answer(1, {0}, True, later)], [1], later)


def test_no_room_for_a_key_that_has_a_cell_is_refused() -> None:
    scene = token_bucket(2, usable=1, crowded=True).before().hits(0)
    scene.expect()
    assert scene.judge([answer(0, set(), False, scene.at_ns, full=True)], [1], scene.at_ns)


def test_a_delay_that_is_too_short_is_refused() -> None:
    scene = token_bucket(1).before().reserves(0, 3 * NS)
    scene.expect()
    assert scene.judge([answer(0, set(), True, scene.at_ns, value=NS // 2)], [0], scene.at_ns)
    assert not scene.judge([answer(0, set(), True, scene.at_ns, value=NS)], [0], scene.at_ns)


def test_several_limits_deny_a_fitting_request_in_a_race_only() -> None:
    scene = SceneOfSeveral([TOKENS, FEWER]).hits(0, 1)
    scene.expect()
    at = scene.at_ns
    assert scene.judge([answer(0, set(), False, at), answer(1, {0}, False, at)], [2, 1], at)
    assert not scene.judge([answer(0, set(), False, at), answer(1, set(), False, at)], [2, 1], at)


def test_slots_are_denied_while_they_are_held_only() -> None:
    scene = SceneOfSlots(1, 2).holds_once(0, 1)
    scene.expect()
    at = scene.at_ns
    took, gave = answer(0, set(), True, at), answer(0, {0}, True, at)
    assert not scene.judge([took, gave, answer(1, {0}, False, at), answer(1, {0, 2}, False, at)], [1], at)
    assert scene.judge([took, gave, answer(1, {0, 1}, False, at), answer(1, {0, 1, 2}, False, at)], [1], at)
    denied = [answer(0, set(), False, at), answer(0, {0}, False, at)]
    assert scene.judge([*denied, answer(1, set(), False, at), answer(1, {2}, False, at)], [1], at)


def test_slots_must_be_free_in_the_end() -> None:
    scene = SceneOfSlots(1, 1).holds_once(0)
    scene.expect()
    both = [answer(0, set(), True, scene.at_ns), answer(0, {0}, True, scene.at_ns)]
    assert scene.judge(both, [0], scene.at_ns)
    assert not scene.judge(both, [1], scene.at_ns)


def test_the_slots_of_a_killed_process_are_free_in_the_end() -> None:
    scene = SceneOfSlots(1, 1).holds_once(0)
    scene.expect()
    both = [answer(0, set(), True, scene.at_ns), answer(0, {0}, False, scene.at_ns, done=False)]
    assert scene.judge(both, [0], scene.at_ns)
    assert not scene.judge(both, [1], scene.at_ns)


def test_permits_by_id_have_one_lease() -> None:
    scene = SceneOfRepeats(2, 2).sends(0, 1)
    both = [answer(0, set(), True, scene.at_ns), answer(1, {0}, True, scene.at_ns, value=1)]
    assert scene.judge(both, [0], scene.at_ns)
    assert not scene.judge(both, [1], scene.at_ns)


def test_a_renewal_after_permits_were_taken_over_is_refused() -> None:
    scene = SceneOfRepeats(2, 2).sends(0, renews=True).sends(1)
    at = scene.at_ns
    took, took_over = answer(0, set(), True, at), answer(1, {0}, True, at, value=1)
    assert scene.judge([took, answer(0, {0, 2}, True, at), took_over], [1], at)
    assert not scene.judge([took, answer(0, {0, 2}, False, at), took_over], [1], at)


def test_a_reset_and_a_refund_by_an_id_free_permits_that_were_held() -> None:
    for scene in (SceneOfRepeats(1, 1).sent_before().resets(0), SceneOfRepeats(1, 1).sent_before().refunds(0)):
        done = [answer(0, set(), True, scene.at_ns)]
        assert scene.judge(done, [0], scene.at_ns)
        assert not scene.judge(done, [1], scene.at_ns)


def test_a_reset_may_spare_permits_that_are_taken_meanwhile_and_no_others() -> None:
    scene = SceneOfRepeats(2, 2).sends(0).resets(1)
    took, reset = answer(0, set(), True, scene.at_ns), answer(1, set(), True, scene.at_ns)
    assert not scene.judge([took, reset], [1], scene.at_ns)
    assert not scene.judge([took, reset], [2], scene.at_ns)
    assert scene.judge([took, answer(1, {0}, True, scene.at_ns)], [1], scene.at_ns)


def test_permits_by_id_are_held_until_their_lease_is_over() -> None:
    scene = SceneOfRepeats(1, 2).sends(0).tries(1)
    scene.expect(clock_moves=2, jumps_ns=[NS * 6 // 10])
    took = answer(0, set(), True, scene.at_ns)
    within_ns, after_ns = scene.at_ns + NS * 6 // 10, scene.at_ns + NS * 12 // 10
    assert scene.judge([took, answer(1, {0}, True, within_ns)], [0], within_ns)
    assert not scene.judge([took, answer(1, {0}, False, within_ns)], [0], within_ns)
    assert not scene.judge([took, answer(1, {0}, True, after_ns)], [0], after_ns)
    assert scene.judge([took, answer(1, {0}, False, after_ns)], [1], after_ns)


def test_a_repeated_request_is_denied_only_while_another_one_is_under_way() -> None:
    scene = SceneOfRepeats(1, 2).sends(0, 1)
    took = answer(0, set(), True, scene.at_ns)
    assert scene.judge([took, answer(1, set(), False, scene.at_ns, value=1)], [0], scene.at_ns)
    assert not scene.judge([took, answer(1, set(), False, scene.at_ns, value=0)], [0], scene.at_ns)
