"""These tests run in the explorer's build of penstock: `bash ci/prove tests/interleaving`."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("penstock.core.explorer") is None:
    raise pytest.UsageError("these tests need the explorer's build of penstock: bash ci/prove tests/interleaving")
