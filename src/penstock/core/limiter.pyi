from collections.abc import Coroutine
from typing import Any, ClassVar

from typing_extensions import disjoint_base

from penstock.core.keys import Key
from penstock.rate import Duration
from penstock.store import Store

def bound_arguments(kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]: ...

@disjoint_base
class Limiter:
    may_free_early: ClassVar[bool]
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
    def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool: ...
    def wait_async(
        self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Coroutine[Any, Any, bool]: ...
