"""What the tasks of every queue do: they record when they asked and when they ran, and one of them kills its process.

The environment names the queue, the port of its Redis server, the folder of the records, and the forebay store's URL.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

QUEUE = os.environ["QUEUES_NAME"]
REDIS = f"redis://127.0.0.1:{os.environ['QUEUES_PORT']}/0"
FOLDER = Path(os.environ["QUEUES_FOLDER"])
LEASE = "1 second" if os.environ["FOREBAY_URL"].startswith("redis") else "30 seconds"
"""Redis doesn't notice that a process has ended, so a killed task's permit comes back with the end of its lease."""
EXPORT_S = 0.1

_asked_ns = threading.local()


def partner(*arguments: Any, **options: Any) -> str:
    """The key of every task. Called before the limiter is."""
    _asked_ns.value = time.monotonic_ns()
    record(event="asked")
    return "partner"


def notify(order: int) -> str:
    record(event="notified", order=order, asked_ns=_asked_ns.value)
    return f"notified {order}"


def begin_export(number: int) -> int:
    """The first of them is killed while it runs. Returns when it has begun."""
    begun_ns = time.monotonic_ns()
    try:
        (FOLDER / f"{QUEUE}-killed").touch(exist_ok=False)
    except FileExistsError:
        return begun_ns
    record(event="killed", order=number)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process goes on after its kill")


def end_export(number: int, begun_ns: int) -> None:
    record(event="exported", order=number, begun_ns=begun_ns)


def export(number: int) -> None:
    begun_ns = begin_export(number)
    time.sleep(EXPORT_S)
    end_export(number, begun_ns)


def price(*arguments: Any) -> int:
    """The cost of a task that can never run."""
    record(event="priced")
    return int(arguments[-1])


def never(number: int) -> None:
    record(event="never", order=number)


def record(**event: Any) -> None:
    line = json.dumps({**event, "ran_ns": time.monotonic_ns(), "pid": os.getpid()}) + "\n"
    descriptor = os.open(FOLDER / QUEUE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
