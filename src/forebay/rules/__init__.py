"""Limits and rules from files: TOML and YAML with the extra ``forebay[rules]``.

The stages: `reading` turns bytes into structs (`model`), and finds problems of words and values with their places
(`toml`, `yaml`, `places`, `problems`). `building` turns structs into limiters and rules (`keys`, `conditions`,
`overrides`, `refusals`, `shedders`), and finds problems of their meaning (`together`). `loading` does both, and
`explanation` shows what the rules do with one request. `live` publishes rules that change while the application runs.
"""

from forebay.errors import RuleFileProblem
from forebay.rules.live import FileSource, LiveRules, LiveStatus, RedisSource, Source, SqlSource
from forebay.rules.loading import load_rules

__all__ = [
    "FileSource",
    "LiveRules",
    "LiveStatus",
    "RedisSource",
    "RuleFileProblem",
    "Source",
    "SqlSource",
    "load_rules",
]
