"""Constants that ``middleware_app`` and its tests share. An import of the application would make its store."""

KEYS = 1000
LIMIT = 200
