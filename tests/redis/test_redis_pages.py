"""The examples of the pages about Redis, over a real server in the place of those that the pages name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import PATIENCE_S, RedisServer

from forebay import Store
from forebay.redis import LeasedStore, RedisStore, SyncedStore
from forebay.redis.transport import clients
from forebay.testing import private_stores

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the examples of one page define. Their stores are closed, those over other stores first."""
    names: dict[str, Any] = {"app": lambda environ, start_response: []}
    with private_stores("time"):
        yield names
    for thing in reversed(names.values()):
        if isinstance(thing, (Store, RedisStore, LeasedStore, SyncedStore)):
            thing.close()


@pytest.mark.parametrize("page", ["redis.md", "redis-failures.md", "redis-leased.md", "redis-synced.md"])
def test_examples_run(page: str, names: dict[str, Any], server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "DEFAULT_TIMEOUT_S", PATIENCE_S)
    snippets = BLOCK.findall((DOCS / page).read_text())
    assert snippets
    for snippet in snippets:
        exec(re.sub(r'"rediss?://[^"]*"', repr(server.url), snippet), names)
    answers = [names[name] for name in ("allowed", "decision") if name in names]
    assert answers
    assert all(answers)
