from typing_extensions import disjoint_base

from penstock.core.cell_limiter import CellLimiter
from penstock.rate import MAX_PERIOD_NS as MAX_PERIOD_NS
from penstock.rate import Rate

@disjoint_base
class GcraLimiter(CellLimiter):
    """Base class of the limiters by GCRA; not used by itself."""
    @property
    def rate(self) -> Rate: ...
