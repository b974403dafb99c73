"""Load shedding: deny some requests early, so that the others are answered in time.

| module | content |
| --- | --- |
| `shedder` | what all shedders have: priorities, and the `Admission` that a request holds |
| `measuring` | what the two that measure have |
| `reserved` | `ReservedSlots`: a share of the slots for the important requests |
| `workers` | `BusyWorkers`: sheds while the workers of the host are busy; `level` has the arithmetic |
| `adaptive` | `AdaptiveLimit`: a limit on requests in flight that follows the latency |
| `estimates` | `Gradient2` and `AIMD`: how that limit follows |

``forebay.web.Shed`` puts a shedder among the rules of a web application.
"""

from forebay.shedding.adaptive import AdaptiveLimit
from forebay.shedding.estimates import AIMD, Gradient2
from forebay.shedding.reserved import ReservedSlots
from forebay.shedding.shedder import Admission, Shedder
from forebay.shedding.workers import BusyWorkers

__all__ = ["AIMD", "AdaptiveLimit", "Admission", "BusyWorkers", "Gradient2", "ReservedSlots", "Shedder"]
