from typing import TypeAlias

Key: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
"""A key, by which a limit counts: text, bytes, a whole number, or a tuple of these."""
