"""Runs the tests on the pure-Python fallback: a pytest plugin for ``ci/fallback``.

What can't hold without the compiled core is named here, each with its reason, and listed at the end of a run. In a run
of whole folders, a name that matches nothing fails the run. Everything else runs, and a skipped test fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

import forebay

TESTS: Final = Path(__file__).resolve().parents[1]

# By reason: files, which aren't even imported, and patterns of the other tests' ids.
LEFT_OUT: Final[dict[str, tuple[str, ...]]] = {
    "the C API, which only the compiled core has": (
        *("unit/test_c_api.py", "unit/test_c_api_all.py", "unit/test_c_api_leases.py", "unit/test_native_headers.py"),
        *("unit/test_native_threads.py", "unit/test_stopped_threads.py"),
    ),
    "forebay tune, which runs the compiled core": (
        *("unit/test_cli_tune.py", "unit/test_tune_json.py", "unit/test_tune_readers.py", "unit/test_tune_replay.py"),
    ),
    "segments: their files, bytes and checks": (
        *("unit/test_cli_verify.py", "unit/test_counter_lines.py", "unit/test_free_space.py", "unit/test_removal.py"),
        *("unit/test_layout_generator.py", "unit/test_process_identity.py", "unit/test_verification.py"),
        *("unit/test_store_objects.py", "unit/test_field_bounds.py::test_abandoned_claim_*"),
        "unit/test_field_bounds.py::test_cost_of_0_over_a_damaged_state_has_no_delay*",
        "unit/test_field_bounds.py::test_decisions_do_not_depend_on_counters_that_wrap",
        "unit/test_field_bounds.py::test_larger_use_gives_a_larger_state*",
    ),
    "the compiled modules: machine code, threads": (
        *("unit/test_compiled_modules.py", "unit/test_threads.py", "unit/test_threads_model.py"),
    ),
    "races between the steps of a decision, which one lock makes one step": ("unit/test_refund_races.py",),
    "programs that choose, and both beside each other: ci/test runs them": (
        *("unit/test_fallback.py", "property/test_fallback_agrees.py"),
    ),
    "a forked child has a copy of the state, and counts apart": (
        "unit/test_convert.py::test_charges_of_other_processes_count_before_or_after",
        "unit/test_convert_windows.py::test_charges_of_other_processes_count_before_or_after",
        "unit/test_request_ids.py::test_another_worker_*",
        "unit/test_request_ids.py::test_racing_workers_*",
        "unit/test_request_ids.py::test_worker_*",
        "unit/test_request_ids.py::test_workers_*",
        "unit/test_testing_helpers.py::test_children_share_a_private_store",
        "unit/test_python_clock.py::test_time_moved_by_one_process_moves_the_others*",
        "unit/test_manual_clock.py::test_child_sees_its_parents_clock_move",
        "unit/test_retry_after.py::test_pauses_of_many_processes_do_not_add_up",
        "unit/test_web_bans.py::test_processes_count_denials_together",
        "unit/test_web_wsgi.py::test_gate_can_be_replaced_during_a_decision*",
        "unit/test_fixed_window.py::test_staggered_keys_have_the_same_phase_in_every_process*",
        "behaviour/test_worked_examples.py::*forked child]",
        "unit/test_concurrency.py::test_child_does_not_own_its_parents_permits*",
    ),
    "what only compiled code meets: objects that no limiter made, lists that change while they are read": (
        "unit/test_concurrency.py::test_lease_that_was_never_granted_does_not_crash",
        "unit/test_token_bucket.py::test_decision_without_a_limiter_does_no_harm",
        "unit/test_all_of.py::test_all_of_refuses_lists_that_shrink_while_it_reads_them*",
    ),
    "the search for processes that have ended: permits are this process's": (
        "unit/test_concurrency.py::test_interrupt_of_the_search_for_ended_processes_loses_no_permit",
        "unit/test_concurrency.py::test_first_use_by_several_threads_loses_no_permit",
        "unit/test_all_of.py::test_rollback_takes_no_other_requests_permit_after_a_key_was_let_in_uncharged",
        "unit/test_cancellations.py::test_denial_by_several_limits_frees_no_other_permit",
    ),
    "requests that interrupt each other between two readings of the clock: a decision reads it once": (
        "unit/test_request_ids.py::test_late_rollback_takes_no_other_requests_permit*",
        "unit/test_held_request_ids.py::test_two_requests_at_once_*",
        "unit/test_held_request_ids.py::test_request_at_once_with_a_renewal_*",
    ),
    "the warning of several workers is shown of every store, with another remedy: test_fallback.py": (
        "unit/test_web_workers.py::test_worker_count_is_read_from_the_command_line*",
        "unit/test_web_workers.py::test_named_store_causes_no_warning",
        "unit/test_web_workers.py::test_store_from_before_a_fork_causes_no_warning",
    ),
    "methods that only forebay's modules call have no underscore here, and the test calls all": (
        "unit/test_forgotten_await.py::test_wait_async_is_the_only_method_that_is_awaited[[]*",
    ),
    "forebay.limits is among the modules": ("unit/test_extras.py::test_import_without_a_package_names_the_extra",),
    "stores have no file": (
        "unit/test_testing_helpers.py::test_stores_are_real_after_the_block",
        "unit/test_testing_helpers.py::test_unlink_in_the_block_leaves_the_real_store",
    ),
    "every store is private, and limits tasks nevertheless": (
        "unit/test_task_limits.py::TestRefusals::test_private_store_is_refused",
    ),
    "an evicted key's permits are forgotten with it": (
        "unit/test_concurrency.py::test_key_without_room_follows_on_full[[]evict-True]",
    ),
    "a named store is a private one that a dict has by its name: test_fallback.py tests that": (
        "*[[]named*",
        "behaviour/test_every_limiter.py::Test*Named::*",
    ),
    "each limit in Redis, where a script decides: worked examples and several limits run there": (
        "behaviour/test_any_*[[]redis*",
        "behaviour/test_any_*[[]asyncio*",
    ),
    "leased and synced limits, which need a host's shared memory": (
        "*[[]leased*",
        "*[[]synced*",
        "*-leased[]]",
        "*-synced[]]",
        "behaviour/test_every_limiter.py::Test*Synced::*",
        "behaviour/test_several_limits.py::TestSynced::*",
    ),
}

MATCHES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if forebay.native:
        raise pytest.UsageError("these tests are for the fallback: set FOREBAY_FALLBACK=1")
    config.stash[MATCHES] = Counter()


def patterns() -> Iterator[str]:
    return (pattern for listed in LEFT_OUT.values() for pattern in listed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    found = [name for name in patterns() if collection_path.resolve() == TESTS / name]
    config.stash[MATCHES].update(found)
    return True if found else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items[:]:
        name = item.nodeid.removeprefix("tests/")
        found = next((pattern for pattern in patterns() if fnmatchcase(name, pattern)), None)
        if found is not None:
            config.stash[MATCHES][found] += 1
            left_out.append(item)
            items.remove(item)
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    is_whole = not config.option.keyword and all(Path(argument).is_dir() for argument in config.args)
    unused = [pattern for pattern in patterns() if is_whole and not config.stash[MATCHES][pattern]]
    if (skipped or unused) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for pattern in unused:
        print(f"\nfallback_plugin.py leaves out {pattern}, which matches no test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("what the fallback leaves out")
    for reason, listed in LEFT_OUT.items():
        for pattern in listed:
            if count := config.stash[MATCHES][pattern]:
                what = "file" if pattern.endswith(".py") else f"{count} tests"
                terminalreporter.write_line(f"{pattern} ({what}): {reason}")
