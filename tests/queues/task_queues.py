"""Real workers of the four queues, each over one Redis server, and what their tasks have recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import redis
from arq.connections import RedisSettings, create_pool
from arq.jobs import Job as ArqJob
from celery import Celery
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from redis_server import RedisServer, until
from rq import Queue, Retry
from rq.job import Job as RQJob

HERE = Path(__file__).parent


class TaskQueue(ABC):
    """A queue, its worker processes, and their records."""

    name: ClassVar[str]
    workers: ClassVar[int] = 2

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    @abstractmethod
    def enqueue(self, task: str, number: int) -> Any:
        """Put a task into the queue. Returns what identifies it there."""

    @abstractmethod
    def failure(self, task: Any) -> str | None:
        """The error of a task that has failed for good, as text."""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @contextlib.contextmanager
    def running(self, store_url: str) -> Iterator[None]:
        """Worker processes within the block, each with a process group of its own, which ends with the block."""
        environment = os.environ | {
            "QUEUES_NAME": self.name,
            "QUEUES_PORT": str(self.server.port),
            "QUEUES_FOLDER": str(self.folder),
            "FOREBAY_URL": store_url,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        }
        with self.log.open("ab") as log:
            command = [sys.executable, str(HERE / f"{self.name}_worker.py")]
            processes = [
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                for _ in range(self.workers)
            ]
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def records(self, event: str) -> list[dict[str, Any]]:
        file = self.folder / self.name
        lines = file.read_text().splitlines() if file.exists() else []
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; the log of {self.name}:\n{self.log.read_text()}") from None


class CeleryQueue(TaskQueue):
    name = "celery"
    # It has three processes in its pool.
    workers = 1

    def __init__(self, server: RedisServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.app = Celery(broker=server.url)

    def enqueue(self, task: str, number: int) -> str:
        return str(self.app.send_task(task, (number,)).id)

    def failure(self, task: str) -> str | None:
        """From the workers' result backend."""
        with self.server.client() as client:
            result: Any = client.get(f"celery-task-meta-{task}")
        return str(result) if result is not None and json.loads(result)["status"] == "FAILURE" else None


class RQQueue(TaskQueue):
    name = "rq"

    def __init__(self, server: RedisServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.queue = Queue("default", connection=server.client())

    def enqueue(self, task: str, number: int) -> RQJob:
        # A job of a killed process has failed.
        return self.queue.enqueue(f"rq_worker.{task}", number, retry=None if task == "notify" else Retry(max=1))

    def failure(self, task: RQJob) -> str | None:
        return str(task.latest_result().exc_string) if task.get_status() == "failed" else None


class ArqQueue(TaskQueue):
    name = "arq"

    def enqueue(self, task: str, number: int) -> str:
        async def enqueue() -> str:
            pool = await create_pool(RedisSettings.from_dsn(self.server.url))
            job = await pool.enqueue_job(task, number)
            assert job is not None
            await pool.aclose()
            return job.job_id

        return asyncio.run(enqueue())

    def failure(self, task: str) -> str | None:
        async def result() -> str | None:
            pool = await create_pool(RedisSettings.from_dsn(self.server.url))
            info = await ArqJob(task, pool).result_info()
            await pool.aclose()
            return None if info is None or info.success else repr(info.result)

        return asyncio.run(result())


class DramatiqQueue(TaskQueue):
    name = "dramatiq"

    def __init__(self, server: RedisServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.broker = RedisBroker(url=server.url)

    def enqueue(self, task: str, number: int) -> str:
        self.broker.declare_queue("default")
        message = Message(queue_name="default", actor_name=task, args=(number,), kwargs={}, options={})
        return str(self.broker.enqueue(message).message_id)

    def failure(self, task: str) -> str | None:
        """The worker's log of it, if it is in the queue of dead messages."""
        client: redis.Redis = self.broker.client
        dead: Any = client.hvals("dramatiq:default.XQ.msgs")
        if not any(json.loads(message)["message_id"] == task for message in dead):
            return None
        return "".join(line for line in self.log.read_text().splitlines() if "never(" in line)


QUEUES = (CeleryQueue, RQQueue, ArqQueue, DramatiqQueue)
STORES = {"celery": "shm", "rq": "shm", "arq": "redis", "dramatiq": "redis"}
"""Where each queue's limits are kept."""
