"""The result of a call that has to be awaited: its coroutine, which refuses to be a truth value."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Generator
from types import CoroutineType
from typing import Any, Generic, TypeVar, final

from forebay.errors import NotAwaited

__all__ = ["Awaited"]

T_co = TypeVar("T_co", covariant=True)


@final
class Awaited(Generic[T_co]):
    """A coroutine for all uses except ``bool``, which raises ``NotAwaited``.

    A coroutine object is always true, so a forgotten ``await`` before ``allow`` or ``wait_async`` would admit every
    request. Python warns of a coroutine that is never awaited, and also of this one.

    From Python 3.12 on, the ``repr`` of a task looks whether its coroutine is true. asyncio logs that ``repr``, so this
    one question is answered as a coroutine answers it.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, T_co]) -> None:
        self._coroutine = coroutine

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Some libraries of event loops accept only this type when they start a task.
        return CoroutineType

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__") == "asyncio.base_tasks":
            return True
        raise NotAwaited(
            f"{self.__qualname__}() was not awaited: what it returns is neither true nor false before; "
            "write await before the call"
        )

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        """``cr_frame`` and the like, by which debuggers and task groups look at it."""
        return getattr(self._coroutine, name)

    def __repr__(self) -> str:
        return f"<awaited {self._coroutine!r}>"
