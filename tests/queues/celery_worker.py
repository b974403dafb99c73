"""The tasks of Celery, limited in shared memory."""

from __future__ import annotations

import recording
from celery import Celery, Task

import forebay
from forebay import Concurrency, TokenBucket
from forebay.contrib.celery import limited

store = forebay.connect()
partner = TokenBucket(store, "partner", "5/2s")
exports = Concurrency(store, "exports", 1, lease=recording.LEASE)

app = Celery("tasks", broker=recording.REDIS, backend=recording.REDIS)
# Without a retry of its own, a task that uses one up for a denial would fail.
app.conf.update(task_annotations={"*": {"max_retries": 0}}, broker_connection_retry_on_startup=True)


@app.task(name="notify", bind=True)
@limited(partner, key=recording.partner)
def notify(task: Task, order: int) -> str:
    assert task.request.retries == 0
    return recording.notify(order)


@app.task(name="export", acks_late=True, reject_on_worker_lost=True)
@limited(exports, key=recording.partner, task_time=recording.EXPORT_S / 2)
def export(number: int) -> None:
    recording.export(number)


@app.task(name="never")
@limited(partner, key="partner", cost=recording.price)
def never(number: int) -> None:
    recording.never(number)


if __name__ == "__main__":
    recording.record(event="started")
    options = ["--pool", "prefork", "--concurrency", "3", "--loglevel", "WARNING"]
    app.worker_main(["worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])
