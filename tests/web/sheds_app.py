"""The application of test_gunicorn_sheds.py. A request for /hang writes the worker's pid, and is never answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from forebay import Store
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, ReservedSlots
from forebay.web import Request, Shed, WSGIMiddleware

WORKERS: Final = 3


def importance(request: Request) -> str:
    return "critical" if request.path == "/pay" else "default"


class Shedders:
    """The shedders of all workers, and of the test that looks at them."""

    def __init__(self, store: Store) -> None:
        self.fleet = ReservedSlots(store, "fleet", WORKERS, {"critical": 1, "default": 0})
        self.workers = BusyWorkers(store, "workers", WORKERS, ["critical", "default"], above=1, below=0.9)
        self.backend = AdaptiveLimit(store, "backend", AIMD(initial=WORKERS))
        self.rules = [
            Shed(self.fleet, priority=importance),
            Shed(self.workers, priority=importance),
            Shed(self.backend),
        ]


def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/hang":
        pids = Path(os.environ["SHEDS_PIDS"])
        (pids / str(os.getpid())).touch()
        signal.pause()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "4")])
    return [b"done"]


def make_app() -> Any:
    return WSGIMiddleware(answer, Shedders(Store(os.environ["SHEDS_STORE"], keys=100)).rules)
