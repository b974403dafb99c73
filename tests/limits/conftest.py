from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from forebay import Store


@pytest.fixture
def store_name() -> Iterator[str]:
    """A unique store name; the store is unlinked afterwards."""
    name = f"test-limits-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    Store.unlink(name, missing_ok=True)
