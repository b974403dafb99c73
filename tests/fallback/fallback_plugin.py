"""Runs the tests on the pure-Python fallback: a pytest plugin for ``ci/fallback``.

What can't hold without the compiled core is named here, each with its reason, and listed at the end of a run. All else
runs, and a skipped test fails the run. In a run of whole folders, so does a name of theirs that matches no test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import forebay

TESTS: Final = Path(__file__).resolve().parents[1]

# By reason: files, which aren't even imported, tests with all their parameters, and tests with the parameters named.
LEFT_OUT: Final[dict[str, tuple[str, ...]]] = {
    "the C API, which only the compiled core has": (
        *("unit/test_c_api.py", "unit/test_c_api_all.py", "unit/test_c_api_leases.py", "unit/test_native_headers.py"),
        *("unit/test_native_threads.py", "unit/test_stopped_threads.py", "property/test_c_api_keys.py"),
    ),
    "the forebay command, which runs the compiled core": (
        *("unit/test_cli_bench.py", "unit/test_cli_doctor.py", "unit/test_cli_show.py", "unit/test_cli_stores.py"),
        *("unit/test_cli_tune.py", "unit/test_cli_verify.py", "unit/test_tune_json.py", "unit/test_tune_readers.py"),
        *("unit/test_cli_hot.py", "unit/test_cli_metrics.py", "unit/test_cli_top.py", "unit/test_tune_replay.py"),
        "unit/test_rules_command.py::test_without_its_packages_the_command_names_the_extra",
    ),
    "segments: their files, bytes and checks": (
        *("unit/test_counter_lines.py", "unit/test_free_space.py", "unit/test_removal.py", "unit/test_verification.py"),
        *("unit/test_damaged_permits.py", "unit/test_layout_generator.py", "unit/test_process_identity.py"),
        *("unit/test_metrics_segments.py", "unit/test_snapshots.py", "property/test_snapshot_files.py"),
        *("unit/test_hot_keys.py", "unit/test_latency.py", "threads/test_threads_hot_keys.py"),
        "unit/test_field_bounds.py::test_abandoned_claim_can_be_taken_after_two_units_and_again_after_its_stamp_wraps",
        "unit/test_field_bounds.py::test_cost_of_0_over_a_damaged_state_has_no_delay",
        "unit/test_field_bounds.py::test_decisions_do_not_depend_on_counters_that_wrap",
        "unit/test_field_bounds.py::test_larger_use_gives_a_larger_state",
        "unit/test_store_objects.py::test_segment_reveals_no_key",
        "unit/test_store_objects.py::test_segment_takes_21_bytes_per_key_and_100_kib",
        "unit/test_store_objects.py::test_verification_names_limiters_as_the_statistics_do",
    ),
    "stores have no file": (
        "unit/test_metrics.py::test_counters_go_on_when_their_store_is_made_again",
        "unit/test_rules_live.py::test_a_loader_whose_store_was_removed_leaves_no_files_and_says_why",
        "unit/test_rules_live.py::test_a_loader_without_room_leaves_no_files_and_says_why",
        "unit/test_store_objects.py::test_attached_store_keeps_an_unlinked_segment",
        "unit/test_store_objects.py::test_group_that_does_not_exist_is_refused",
        "unit/test_store_objects.py::test_named_store_is_in_shared_memory",
        "unit/test_testing_helpers.py::test_stores_are_real_after_the_block",
        "unit/test_testing_helpers.py::test_unlink_in_the_block_leaves_the_real_store",
    ),
    "the compiled modules: machine code, counter lines, the GIL": (
        *("unit/test_compiled_modules.py", "unit/test_threads_model.py"),
        "unit/test_threads.py::test_a_child_has_the_slots_of_threads_that_it_lacks",
        "unit/test_threads.py::test_a_thread_that_attaches_beside_a_close_finds_the_store_closed",
        "unit/test_threads.py::test_a_thread_that_decides_while_it_ends_keeps_no_slot",
        "unit/test_threads.py::test_an_ended_thread_gives_back_its_lines",
        "unit/test_threads.py::test_an_ending_thread_gives_back_no_line_of_its_slots_next_owner",
        "unit/test_threads.py::test_import_leaves_the_gil_off",
        "unit/test_threads.py::test_no_two_threads_get_one_claim_id",
        "unit/test_threads.py::test_short_threads_use_no_more_lines_than_live_at_once",
        "unit/test_threads.py::test_threads_without_a_slot_share_a_line_exactly",
    ),
    "what only compiled code meets: objects that no limiter made, lists that change while they are read": (
        "unit/test_all_of.py::test_all_of_refuses_lists_that_shrink_while_it_reads_them",
        "unit/test_allow_many.py::test_batch_survives_keys_that_change_while_its_limiter_is_registered",
        "unit/test_concurrency.py::test_lease_that_was_never_granted_does_not_crash",
        "unit/test_threads.py::test_a_batch_survives_threads_that_change_its_list",
        "unit/test_threads.py::test_all_of_decides_its_lists_as_they_were_at_the_call_where_other_threads_may_change_them",
    ),
    "a lock makes one step of each decision, and of each batch": (
        "unit/test_allow_many.py::test_large_batch_lets_other_threads_run",
        "unit/test_held_request_ids.py::test_request_at_once_with_a_renewal_never_goes_without_a_permit",
        "unit/test_held_request_ids.py::test_two_requests_at_once_hold_one_set_of_permits",
        "unit/test_refund_races.py",
        "unit/test_request_ids.py::test_late_rollback_takes_no_other_requests_permit",
    ),
    "the search for processes that have ended: permits are this process's": (
        "unit/test_all_of.py::test_rollback_takes_no_other_requests_permit_after_a_key_was_let_in_uncharged",
        "unit/test_cancellations.py::test_denial_by_several_limits_frees_no_other_permit",
        "unit/test_concurrency.py::test_first_use_by_several_threads_loses_no_permit",
        "unit/test_concurrency.py::test_interrupt_of_the_search_for_ended_processes_loses_no_permit",
    ),
    "a forked child has a copy of the state, and counts apart": (
        "unit/test_convert.py::test_charges_of_other_processes_count_before_or_after",
        "unit/test_convert_windows.py::test_charges_of_other_processes_count_before_or_after",
        "unit/test_fixed_window.py::test_staggered_keys_have_the_same_phase_in_every_process",
        "unit/test_manual_clock.py::test_child_sees_its_parents_clock_move",
        "unit/test_python_clock.py::test_time_moved_by_one_process_moves_the_others",
        "unit/test_request_ids.py::test_another_worker_recognises_the_request",
        "unit/test_request_ids.py::test_racing_workers_lose_races",
        "unit/test_request_ids.py::test_worker_killed_anywhere_leaves_no_mark_without_a_charge",
        "unit/test_request_ids.py::test_workers_at_the_limit_let_in_no_more_ids_than_permits",
        "unit/test_request_ids.py::test_workers_that_refund_one_id_at_once_refund_once",
        "unit/test_request_ids.py::test_workers_with_one_id_at_once_charge_once",
        "unit/test_retry_after.py::test_pauses_of_many_processes_do_not_add_up",
        "unit/test_store_objects.py::test_decisions_of_a_forked_child_are_counted",
        "unit/test_testing_helpers.py::test_children_share_a_private_store",
        "unit/test_web_bans.py::test_processes_count_denials_together",
    ),
    "every store is private, and limits tasks nevertheless": (
        "unit/test_task_limits.py::TestRefusals::test_private_store_is_refused",
    ),
    "the warning of several workers is shown of every store": (
        "unit/test_web_workers.py::test_named_store_causes_no_warning",
        "unit/test_web_workers.py::test_store_from_before_a_fork_causes_no_warning",
    ),
    "an evicted key's permits are forgotten with it": (
        "unit/test_concurrency.py::test_key_without_room_follows_on_full[evict-True]",
    ),
    "methods that only forebay's modules call have no underscore, and the test calls all": (
        "unit/test_forgotten_await.py::test_wait_async_is_the_only_method_that_is_awaited",
    ),
    "the fallback beside the compiled core: ci/test compares them": ("property/test_fallback_agrees.py",),
    "a full store of the fallback looks at every state for each new key": (
        "unit/test_credits.py::test_charge_that_found_no_room_comes_back_by_another_call",
    ),
    "leased and synced limits, which need a host's shared memory": (
        "threads/test_threads_synced.py",
        "behaviour/test_every_limiter.py::TestFixedWindowClockSynced::runTest",
        "behaviour/test_every_limiter.py::TestSlidingWindowSynced::runTest",
        "behaviour/test_every_limiter.py::TestTokenBucketSynced::runTest",
        "behaviour/test_several_limits.py::TestSynced::runTest",
        "unit/test_rules_refusals.py::test_a_leased_store_has_the_bans_of_its_host",
        "unit/test_rules_shedders.py::test_shedder_of_a_leased_store_is_in_its_host",
    ),
}
# By what a parameter of tests/behaviour says of the place where limits are kept, and why tests there are left out.
PLACES: Final = {
    "leased": "leased limits need a host's shared memory",
    "synced": "synced limits need a host's shared memory",
    "private and forked child": "a forked child has a copy of the state, and counts apart",
    "named and forked child": "a forked child has a copy of the state, and counts apart",
}
PLACE_PARAMETERS: Final = ("place_kind", "sharing", "where")

REASONS: Final = {name: reason for reason, names in LEFT_OUT.items() for name in names} | PLACES

MATCHES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if forebay.native:
        raise pytest.UsageError("these tests are for the fallback: set FOREBAY_FALLBACK=1")
    config.stash[MATCHES] = Counter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    path = collection_path.resolve()
    name = str(path.relative_to(TESTS)) if path.is_relative_to(TESTS) else ""
    if name not in REASONS:
        return None
    config.stash[MATCHES][name] += 1
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items[:]:
        found = next((name for name in names_of(item) if name in REASONS), None)
        if found is not None:
            config.stash[MATCHES][found] += 1
            left_out.append(item)
            items.remove(item)
    config.hook.pytest_deselected(items=left_out)


def names_of(item: pytest.Item) -> Iterator[str]:
    """By which a test may be left out."""
    name = item.nodeid.removeprefix("tests/")
    yield name
    yield name.partition("[")[0]
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        yield from (item.callspec.params[parameter] for parameter in PLACE_PARAMETERS & item.callspec.params.keys())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    unused = [name for name in names_in(config) if not config.stash[MATCHES][name]]
    if (skipped or unused) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for name in unused:
        print(f"\nfallback_plugin.py leaves out {name}, which matches no test")


def names_in(config: pytest.Config) -> Iterator[str]:
    """The names of `REASONS` that are in the folders of this run."""
    folders = [Path(argument).resolve() for argument in config.args if Path(argument).is_dir()]
    if not config.option.keyword:
        for name in REASONS:
            path = TESTS / ("behaviour" if name in PLACES else name)
            if any(path.is_relative_to(folder) for folder in folders):
                yield name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("what the fallback leaves out")
    for name, reason in REASONS.items():
        if count := config.stash[MATCHES][name]:
            what = "file" if name.endswith(".py") else f"{count} tests"
            terminalreporter.write_line(f"{name} ({what}): {reason}")
