from collections.abc import Coroutine
from typing import Any, ClassVar

from typing_extensions import disjoint_base

from penstock.core.keys import Key
from penstock.store import Store

@disjoint_base
class Limiter:
    may_free_early: ClassVar[bool]
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
    def wait(self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool: ...
    def wait_async(
        self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0
    ) -> Coroutine[Any, Any, bool]: ...
