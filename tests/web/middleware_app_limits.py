"""What ``middleware_app`` and its tests both know. Importing the application itself would make its store."""

KEYS = 1000
LIMIT = 200
