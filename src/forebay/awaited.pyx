"""The result of a call that has to be awaited: its coroutine, which refuses to be a truth value.

Compiled, as a call of a leased limiter takes a fraction of a microsecond."""

cimport cython

import sys
from types import CoroutineType

from forebay.errors import NotAwaited


@cython.final
@cython.freelist(16)
cdef class Awaited:
    """A coroutine for all uses except ``bool``, which raises ``NotAwaited``.

    A coroutine object is always true, so a forgotten ``await`` before ``allow`` or ``wait_async`` would admit every
    request. An awaited, gathered or cancelled object, or one given to a task, behaves as the coroutine that it was made
    of. Python warns of a coroutine that is never awaited, and also of this one.

    From Python 3.12 on, the ``repr`` of a task looks whether its coroutine is true. asyncio logs that ``repr``, so this
    one question is answered as a coroutine answers it.
    """

    cdef object coroutine

    def __cinit__(self, coroutine):
        self.coroutine = coroutine

    @property
    def __class__(self):
        # Some libraries of event loops accept only this type when they start a task.
        return CoroutineType

    def __bool__(self):
        # A compiled function has no frame of its own: this one is its caller's.
        if sys._getframe().f_globals.get("__name__") == "asyncio.base_tasks":
            return True
        raise NotAwaited(
            f"{self.coroutine.__qualname__}() was not awaited: what it returns is neither true nor false before; write "
            "await before the call"
        )

    def __await__(self):
        return self.coroutine.__await__()

    def send(self, value):
        return self.coroutine.send(value)

    def throw(self, *error):
        return self.coroutine.throw(*error)

    def close(self):
        self.coroutine.close()

    def __getattr__(self, name):
        """``cr_frame`` and the like, by which debuggers and task groups look at it."""
        return getattr(self.coroutine, name)

    def __repr__(self):
        return f"<awaited {self.coroutine!r}>"
