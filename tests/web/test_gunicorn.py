"""Under gunicorn all workers share one limit, and the limit outlives each of them.

The limit does not refill. Requests use it up while processes start and end. Over all processes, exactly its burst is
admitted, and the statistics, read from another process, count every request.
"""

from __future__ import annotations

import signal

import pytest
from shop_server import LOST, UVICORN, WORKERS, Answer, Serve, ShopServer, statuses, wait_until, workers_of

# Each worker class once, with and without preload in turn.
LIVES = pytest.mark.parametrize(
    ("worker_class", "preload"), [("sync", True), ("gthread", False), ("gevent", True), (UVICORN, False)]
)


def check_exact(shop: ShopServer, answers: list[Answer], burst: int) -> None:
    """Use up the rest and reach every worker once more: exactly the burst was charged, and every request counted.

    A request whose answer was lost with its worker may have been charged or not; every other request is certain.
    """
    answers = (
        answers + shop.send_until(lambda more: 429 in statuses(more), "the limit is reached") + shop.reach_all_workers()
    )
    counts, stats, lost = statuses(answers), shop.stats(), answers.count(LOST)
    assert counts.keys() <= {200, 429, LOST.status}
    assert stats.allowed == burst
    assert counts[200] <= burst <= counts[200] + lost
    assert len(answers) - lost <= stats.allowed + stats.denied <= len(answers)


# `LIVES` has the other pairs, and each of its tests makes the same assertion.
@pytest.mark.parametrize(
    ("worker_class", "preload"), [("sync", False), ("gthread", True), ("gevent", False), (UVICORN, True)]
)
def test_all_workers_share_one_limit(serve: Serve, worker_class: str, preload: bool) -> None:
    shop = serve(worker_class=worker_class, preload=preload, burst=50)
    answers = shop.reach_all_workers()
    assert statuses(answers) == {200: 50, 429: len(answers) - 50}
    stats = shop.stats()
    assert (stats.allowed, stats.denied) == (50, len(answers) - 50)


@LIVES
def test_recycled_workers_continue_the_count(serve: Serve, worker_class: str, preload: bool) -> None:
    shop = serve(worker_class=worker_class, preload=preload, burst=300, options=["--max-requests", "25"])
    answers = shop.send_requests(150, at_once=20)
    first_workers = workers_of(answers)
    # One of the four workers has answered at least 25 requests, so it exits.
    wait_until(lambda: not first_workers <= {process.pid for process in shop.workers()}, "a worker is gone")
    answers += shop.send_until(
        lambda more: bool(workers_of(more) - first_workers) and len(more) - more.count(LOST) >= 300,
        "a new worker has answered, and more requests than the burst were sent",
    )
    # A uvicorn worker that exits closes connections that it accepted but did not read: these were not charged.
    answers = [answer for answer in answers if answer != LOST]
    assert statuses(answers) == {200: 300, 429: len(answers) - 300}
    stats = shop.stats()
    assert (stats.allowed, stats.denied) == (300, len(answers) - 300)


@LIVES
def test_reload_keeps_the_limit(serve: Serve, worker_class: str, preload: bool) -> None:
    shop = serve(worker_class=worker_class, preload=preload, burst=600)
    answers = shop.reach_all_workers()
    old_workers = workers_of(answers)
    answers += shop.send_requests(300, at_once=20, every=200, then=lambda: shop.signal(shop.masters(), signal.SIGHUP))
    shop.wait_gone(old_workers)
    check_exact(shop, answers, 600)


# Each signal with two worker classes; on QUIT, uvicorn's workers keep running until the timeout.
@pytest.mark.parametrize(
    ("worker_class", "preload", "end_old"),
    [
        ("sync", True, signal.SIGTERM),
        ("gthread", False, signal.SIGQUIT),
        ("gevent", True, signal.SIGTERM),
        (UVICORN, False, signal.SIGQUIT),
    ],
)
def test_upgrade_keeps_the_limit(serve: Serve, worker_class: str, preload: bool, end_old: signal.Signals) -> None:
    shop = serve(worker_class=worker_class, preload=preload, burst=900)
    answers = shop.reach_all_workers()
    [old_master], old_workers = shop.masters(), workers_of(answers)
    shop.signal([old_master], signal.SIGUSR2)
    wait_until(lambda: len(shop.masters()) == 2, "the new master listens")
    answers += shop.send_until(lambda more: bool(workers_of(more) - old_workers), "a new worker has answered")
    answers += shop.send_requests(300, at_once=20, every=200, then=lambda: shop.signal([old_master], end_old))
    shop.wait_gone([old_master, *old_workers])
    check_exact(shop, answers, 900)


@LIVES
def test_killed_workers_lose_no_state(serve: Serve, worker_class: str, preload: bool) -> None:
    shop = serve(worker_class=worker_class, preload=preload, burst=600)
    answers = shop.reach_all_workers()
    killed: list[int] = []

    def kill_one() -> None:
        victims = [process.pid for process in shop.workers()][:1]
        shop.signal(victims, signal.SIGKILL)
        killed.extend(victims)

    answers += shop.send_requests(800, at_once=40, every=100, then=kill_one)
    assert len(killed) > WORKERS
    shop.wait_gone(killed)
    check_exact(shop, answers, 600)


@LIVES
def test_limit_outlives_a_killed_master(serve: Serve, worker_class: str, preload: bool) -> None:
    first = serve(worker_class=worker_class, preload=preload, burst=600)
    answers = first.reach_all_workers()
    answers += first.send_requests(
        300, at_once=20, every=200, then=lambda: first.signal(first.masters(), signal.SIGKILL)
    )
    # Whether orphaned workers exit depends on their class, so end them as a service manager would.
    first.signal([process.pid for process in first.workers()], signal.SIGKILL)
    wait_until(lambda: not first.processes(), "the first gunicorn is gone")

    second = serve(worker_class=worker_class, preload=preload, burst=600)
    check_exact(second, answers, 600)
