from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from shop_server import Serve, ShopServer

from forebay import Store


@pytest.fixture
def store_name() -> Iterator[str]:
    """A unique store name; the store is unlinked afterwards."""
    name = f"test-web-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    Store.unlink(name, missing_ok=True)


@pytest.fixture
def serve(store_name: str, tmp_path: Path) -> Iterator[Serve]:
    """Start gunicorn servers of one shop with ``ShopServer``'s options; all of them end with the test."""
    with ExitStack() as servers:

        def start(**options: Any) -> ShopServer:
            log_path = tmp_path / f"gunicorn-{len(list(tmp_path.iterdir()))}.log"
            return servers.enter_context(ShopServer(store_name, log_path, **options))

        yield start
