"""What a server remembers between two questions about limits that Python charges."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.serving.first_answers import FirstAnswers
from forebay.serving.leases import HeldLeases
from forebay.serving.taken import TakenCharges

__all__ = ["Remembered"]


@dataclass(frozen=True, slots=True)
class Remembered:
    """Each part is for all versions of live rules. *Threads*: safe."""

    charges: TakenCharges = field(default_factory=TakenCharges)
    leases: HeldLeases = field(default_factory=HeldLeases)
    answers: FirstAnswers = field(default_factory=FirstAnswers)
