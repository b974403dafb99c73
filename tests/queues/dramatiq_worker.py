"""The actors of dramatiq, limited in Redis."""

from __future__ import annotations

import logging
import signal

import dramatiq
import recording
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

import forebay
from forebay import Concurrency, TokenBucket
from forebay.contrib.dramatiq import limited

store = forebay.connect()
partner = TokenBucket(store, "partner", "5/2s")
exports = Concurrency(store, "exports", 1, lease=recording.LEASE)

# Messages of a killed worker are taken over after a second, at each maintenance, and each command does that.
broker = RedisBroker(url=recording.REDIS, heartbeat_timeout=1000, maintenance_chance=1_000_000)
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


# Without a retry of its own, a message that uses one up for a denial would fail.
@limited(partner, key=recording.partner)
@dramatiq.actor(max_retries=0)
def notify(order: int) -> None:
    recording.notify(order)


@limited(exports, key=recording.partner, task_time=recording.EXPORT_S / 2)
@dramatiq.actor(max_retries=0)
def export(number: int) -> None:
    recording.export(number)


@limited(partner, key="partner", cost=recording.price)
@dramatiq.actor(max_retries=5)
def never(number: int) -> None:
    recording.never(number)


if __name__ == "__main__":
    recording.record(event="started")
    # As dramatiq's own command.
    logging.basicConfig(level=logging.INFO)
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    signal.sigwait([signal.SIGTERM])
    worker.stop()
