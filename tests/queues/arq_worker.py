"""The jobs of arq, limited in Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import recording
from arq import Worker, func
from arq.connections import RedisSettings

import forebay
from forebay import Concurrency, TokenBucket
from forebay.contrib.arq import limited

store: Any = forebay.connect_async()
partner = TokenBucket(store, "partner", "5/2s")
exports = Concurrency(store, "exports", 1, lease=recording.LEASE)


@limited(partner, key=recording.partner)
async def notify(context: dict[str, Any], order: int) -> str:
    assert context["job_try"] == 1
    return recording.notify(order)


@limited(exports, key=recording.partner, task_time=recording.EXPORT_S / 2)
async def export(context: dict[str, Any], number: int) -> None:
    begun_ns = recording.begin_export(number)
    await asyncio.sleep(recording.EXPORT_S)
    recording.end_export(number, begun_ns)


@limited(partner, key="partner", cost=recording.price)
async def never(context: dict[str, Any], number: int) -> None:
    recording.never(number)


if __name__ == "__main__":
    recording.record(event="started")
    worker = Worker(
        # Without a try of its own, a job that uses one up for a denial would fail.
        [func(notify, name="notify", max_tries=1), func(export, name="export"), func(never, name="never")],
        redis_settings=RedisSettings.from_dsn(recording.REDIS),
        poll_delay=0.1,
        # So that no worker takes all jobs.
        max_jobs=1,
    )
    # How long a job of a killed worker is left alone, by default more than the longest time of a job.
    worker.in_progress_timeout_s = 1
    worker.run()
