from typing_extensions import disjoint_base

from penstock.store import Store

@disjoint_base
class Limiter:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
