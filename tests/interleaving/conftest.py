"""These tests run in the explorer's build of forebay: `bash ci/prove tests/interleaving`."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("forebay.core.explorer") is None:
    raise pytest.UsageError("these tests need the explorer's build of forebay: bash ci/prove tests/interleaving")
