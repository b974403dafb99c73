from typing_extensions import disjoint_base

from penstock.store import Store

@disjoint_base
class Limiter:
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
