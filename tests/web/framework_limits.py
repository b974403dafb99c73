"""The limits of the applications ``framework_*.py``: each serves the same paths with the same limits by its framework.

| path | what is limited |
| --- | --- |
| `/worker` | nothing; every path answers with the worker's pid |
| `/orders` | the view, by customer; `/orders/other` is the same in the framework's other colour (sync or async) |
| `/both` | the view, by two limits |
| `/wide/...` | the application's rule, except for internal requests |
| `/login?status=` | the view: only failures are charged |
| `/fragile?status=` | the view: server errors are not charged; status 0 raises an exception |
| `/held` | the view: concurrent responses, and responses sent whole; the second line waits for the file `open` |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from forebay import Concurrency, Store, TokenBucket
from forebay.web import DISCONNECTED, Request, Rule, header

LIMIT = 40
WIDE = 60
FAILURES = 5
AT_ONCE = 2
STORE_KEYS = 10_000


class Limits:
    """The limiters, in one named store that all workers and the test share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.orders = TokenBucket(store, "orders", f"{LIMIT}/day")
        self.narrow = TokenBucket(store, "narrow", f"{LIMIT}/day")
        self.ample = TokenBucket(store, "ample", f"{2 * LIMIT}/day")
        self.wide = TokenBucket(store, "wide", f"{WIDE}/day")
        self.failures = TokenBucket(store, "failures", f"{FAILURES}/day")
        self.handled = TokenBucket(store, "handled", f"{LIMIT}/day")
        self.held = Concurrency(store, "held", AT_ONCE)
        self.sent = TokenBucket(store, "sent", f"{LIMIT}/day")
        self.users = TokenBucket(store, "users", f"{LIMIT}/day")

    def of_streams(self) -> list[Rule]:
        """Limit concurrent streams, and the streams that were sent whole."""
        return [Rule(self.held, key=customer), Rule(self.sent, key=customer, charge_on=was_sent)]


def of_environment() -> Limits:
    return Limits(Store(os.environ["FRAMEWORK_STORE"], keys=STORE_KEYS))


def nobody(request: Request) -> str:
    return "nobody"


customer = header("X-Customer", otherwise=nobody)


def key_of(name: str) -> tuple[str, str, str]:
    """The key that `customer` returns for a request from `name`."""
    return ("header", "x-customer", name)


def is_internal(request: Request) -> bool:
    return request.header("X-Internal") == "yes"


def was_sent(status: int) -> bool:
    return status != DISCONNECTED


def not_server_error(status: int) -> bool:
    return status < 500


def answer() -> dict[str, Any]:
    return {"worker": os.getpid()}


def is_open() -> bool:
    return Path(os.environ["FRAMEWORK_DIRECTORY"], "open").exists()
