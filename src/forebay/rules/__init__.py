"""Limits and rules from files: TOML and YAML with the extra ``forebay[rules]``.

The stages: `reading` turns bytes into structs (`model`), and finds problems of words and values with their places
(`toml`, `yaml`, `places`, `problems`). `building` turns structs into limiters and rules (`keys`, `conditions`,
`overrides`, `refusals`), and finds problems of their meaning. `loading` does both, and `explanation` shows what the
rules do with one request.
"""

from forebay.errors import RuleFileProblem
from forebay.rules.loading import load_rules

__all__ = ["RuleFileProblem", "load_rules"]
