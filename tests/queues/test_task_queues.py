"""Limited tasks in the real queues, with real worker processes.

All workers start at once. Then all tasks are put into their queues, and the tests wait for what happens to them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator

import pytest
from redis_server import redis_server
from task_queues import QUEUES, STORES, TaskQueue

from forebay import Store

# arq's own, as it is made for redis-py before 6.
pytestmark = pytest.mark.filterwarnings("ignore:Call to '__init__' function with deprecated usage:DeprecationWarning")

TASKS = 12
BURST = PERMITS = 5
PERIOD_NS = 2_000_000_000
EXPORTS = 5


class Sent:
    """A queue whose workers run, and the tasks in it."""

    def __init__(self, queue: TaskQueue) -> None:
        self.queue = queue
        self.notified = [queue.enqueue("notify", number) for number in range(TASKS)]
        self.exported = [queue.enqueue("export", number) for number in range(EXPORTS)]


@pytest.fixture(scope="module")
def all_sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sent]]:
    folder = tmp_path_factory.mktemp("queues")
    with contextlib.ExitStack() as stack:
        queues: list[TaskQueue] = []
        for kind in QUEUES:
            server = stack.enter_context(redis_server())
            store = f"test-queues-{os.getpid()}-{secrets.token_hex(4)}"
            stack.callback(Store.unlink, store, missing_ok=True)
            url = f"shm:///{store}?keys=100" if STORES[kind.name] == "shm" else f"{server.url}?timeout=60"
            queues.append(kind(server, folder))
            stack.enter_context(queues[-1].running(url))
        for queue in queues:
            queue.until(lambda queue=queue: len(queue.records("started")) >= queue.workers, "the workers start")
        yield {queue.name: Sent(queue) for queue in queues}


@pytest.fixture(params=[kind.name for kind in QUEUES])
def sent(request: pytest.FixtureRequest, all_sent: dict[str, Sent]) -> Sent:
    return all_sent[request.param]


def test_tasks_never_exceed_the_limit_and_all_run(sent: Sent) -> None:
    """A task's permit was taken between its two times. So no span of time holds both times of more than it admits."""
    sent.queue.until(lambda: len(sent.queue.records("notified")) >= TASKS, f"{TASKS} tasks run")
    ran = sent.queue.records("notified")
    assert sorted(task["order"] for task in ran) == list(range(TASKS))
    assert len({request["pid"] for request in sent.queue.records("asked")}) > 1
    for first in ran:
        for last in ran:
            begin_ns, end_ns = first["asked_ns"], last["ran_ns"]
            inside = [task for task in ran if begin_ns <= task["asked_ns"] and task["ran_ns"] <= end_ns]
            assert not inside or len(inside) <= BURST + (end_ns - begin_ns) * PERMITS // PERIOD_NS
    assert_no_retry_is_counted(sent)


def assert_no_retry_is_counted(sent: Sent) -> None:
    """The other queues' tasks have no retries that could be used up."""
    if sent.queue.name == "rq":
        for job in sent.notified:
            job.refresh()
            assert not job.number_of_retries


def test_killed_task_runs_again_and_its_permit_comes_back(sent: Sent) -> None:
    queue = sent.queue
    queue.until(lambda: len({task["order"] for task in queue.records("exported")}) >= EXPORTS, f"{EXPORTS} exports run")
    [killed] = queue.records("killed")
    exported = sorted(queue.records("exported"), key=lambda task: int(task["begun_ns"]))
    assert killed["order"] in {task["order"] for task in exported}
    assert killed["pid"] not in {task["pid"] for task in exported}
    # One at a time.
    assert all(one["ran_ns"] <= next_one["begun_ns"] for one, next_one in itertools.pairwise([killed, *exported]))


def test_task_that_costs_more_than_the_limit_fails_for_good(sent: Sent) -> None:
    queue = sent.queue
    queue.until(lambda: queue.records("exported"), "the worker is killed")
    task = queue.enqueue("never", BURST + 1)
    queue.until(lambda: queue.failure(task) is not None, "the task fails")
    assert "CostExceedsLimit" in str(queue.failure(task))
    assert len(queue.records("priced")) == 1
    assert not queue.records("never")
