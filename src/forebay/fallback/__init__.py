"""The pure-Python fallback: every limiter and decision of the compiled core, for one process, without shared memory.

It is for development on macOS and Windows, where the compiled core can't be built. ``forebay._native`` chooses it, and
`stand_ins` lists which of its modules stands in for which compiled one.

* A decision has the compiled core's arithmetic, with its roundings: every field of every ``Decision`` is equal to the
  nanosecond. ``tests/property/test_fallback_agrees.py`` compares both.
* The states of a store are in a `Memory` (``memory``): dicts of this process. Stores of one name in one process share
  one. A forked child has a copy, and counts alone from then on.
* One lock of a store's memory guards each decision from its first to its last step, so a limiter needs none of the
  compiled core's protocols. The lock is reentrant, as a signal handler may make a decision, too.
* A state is immutable, and one assignment replaces it: a decision that ``KeyboardInterrupt`` ends is charged or not.

The functions and methods have the names of those of the compiled core. There are the reasons for what they do.
"""
