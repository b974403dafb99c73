"""Rule files for tests, and the problems that they have."""

from __future__ import annotations

from typing import Any

from forebay import InvalidRuleFile
from forebay.rules.keys import Functions
from forebay.rules.loading import check

LIMITS = """version = 1
[limits.api]
algorithm = "fixed-window"
rate = "5/hour"
"""
RULE = """[[rules]]
name = "api"
limits = ["api"]
"""
FILE = LIMITS + RULE


def functions(tier: Any = lambda request: "free", user: Any = None) -> Functions:
    return Functions(tier, user)


def problems(text: str | bytes, file: str = "limits.toml", given: Functions | None = None) -> list[str]:
    """The problems of a file as ``line:column: message``."""
    data = text.encode() if isinstance(text, str) else text
    try:
        check(file, data, given or functions())
    except InvalidRuleFile as error:
        return [line.removeprefix(f"{file}:") for line in str(error).split("\n")]
    return []
