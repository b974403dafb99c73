"""The jobs of RQ, limited in shared memory. A worker forks a process for each job."""

from __future__ import annotations

import recording
import redis
from rq import Queue, Worker

import forebay
from forebay import Concurrency, TokenBucket
from forebay.contrib.rq import limited

store = forebay.connect()
partner = TokenBucket(store, "partner", "5/2s")
exports = Concurrency(store, "exports", 1, lease=recording.LEASE)


@limited(partner, key=recording.partner)
def notify(order: int) -> str:
    return recording.notify(order)


@limited(exports, key=recording.partner, task_time=recording.EXPORT_S / 2)
def export(number: int) -> None:
    recording.export(number)


@limited(partner, key="partner", cost=recording.price)
def never(number: int) -> None:
    recording.never(number)


if __name__ == "__main__":
    recording.record(event="started")
    connection = redis.Redis.from_url(recording.REDIS)
    Worker([Queue("default", connection=connection)], connection=connection).work(
        with_scheduler=True, logging_level="WARNING"
    )
