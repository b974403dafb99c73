from typing import TypeAlias

Key: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
"""What a limit counts by: text, bytes, a whole number, or a tuple of these."""
