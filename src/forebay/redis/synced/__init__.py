"""Limits that each host counts by itself and exchanges with the other hosts at intervals: a CRDT (G-counter)."""
