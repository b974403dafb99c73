"""Constants that ``bytes_app`` and its tests share. An import of the application would make its store."""

KEYS = 1000
RATE, BURST, AFTER = 2**19, 2**16, 2**15
"""Bytes in a second, at once, and free in each body."""
SIZE = 2**18
"""Bytes of a body."""
