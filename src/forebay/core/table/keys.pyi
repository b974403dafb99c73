from typing import TypeAlias

Key: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
