from typing_extensions import disjoint_base

from forebay.core.cell_limiter import CellLimiter
from forebay.rate import MAX_PERIOD_NS as MAX_PERIOD_NS
from forebay.rate import Rate

@disjoint_base
class GcraLimiter(CellLimiter):
    """Base class of the limiters by GCRA; not used by itself."""
    @property
    def rate(self) -> Rate: ...
