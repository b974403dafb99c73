"""The picture of docs/redis.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_shows_the_decisions_of_the_stores() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "draw_redis.py", "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
