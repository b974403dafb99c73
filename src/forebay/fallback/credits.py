"""Credits: prepaid permits that no time brings. See core/algorithms/credits.pyx."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from forebay.core.arguments import MOST_PERMITS, no_reset_of_credits, permits_of, too_many_permits
from forebay.errors import StoreFull
from forebay.fallback.cell_limiter import CellAlgorithm, CellLimiter
from forebay.fallback.decision import Decision, Outlook, decision_of
from forebay.fallback.gcra import PERMITS
from forebay.fallback.keys import Key
from forebay.fallback.memory import Charge, LimitParams, Tag, Verdict
from forebay.rate import NEVER_NS, NS

__all__ = ["Credits"]

SPENT_NS: Final = 300 * NS
PARAMS: Final = LimitParams(MOST_PERMITS, 1, 1)


class Prepaid(CellAlgorithm):
    """The state is so much above `PERMITS` as the key has, or a time: with a balance of 0, until when it is kept."""

    def expiry_ns(self, state: int) -> int:
        return state

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        left = balance_of(state) - charge.amount
        return None if left < 0 else PERMITS + left if left else now_ns + SPENT_NS

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        return Outlook(
            balance_of(verdict.state),
            retry_after_ns=0 if verdict.allowed else NEVER_NS,
            reset_after_ns=NEVER_NS,
        )


class Adding(Prepaid):
    """``add`` as a request: it charges the permits that it adds."""

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        balance = balance_of(state) + charge.amount
        return PERMITS + balance if balance <= MOST_PERMITS else None


class GivingBack(Prepaid):
    """A charge that comes back, as a request."""

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        return PERMITS + min(balance_of(state) + charge.amount, MOST_PERMITS) if charge.amount else None


def balance_of(state: int) -> int:
    return max(state - PERMITS, 0)


class Credits(CellLimiter):
    """Prepaid permits: a key has as many as ``add`` gave it, and no time brings more.

    ``Credits(store, "api calls")``, and ``add(key, 1000)`` once the customer has paid. A request that costs more than
    the key's balance is denied. A decision's ``limit`` and ``remaining`` are the balance after it; its ``reset_after``,
    and ``retry_after`` of a denial, are infinity.

    Raises ``InvalidLimiter``, ``TooManyLimiters``.
    """

    def __init__(self, store: Any, name: str) -> None:
        self.begin(store, name)
        self.params = PARAMS
        self.algorithm = Prepaid()
        self.register("Credits", "credits", self.params.limit)

    def __repr__(self) -> str:
        return f"<Credits {self.name!r}>"

    def decision_by(self, charge: Charge, verdict: Verdict) -> Decision:
        outlook = self.algorithm.describe(charge, verdict)
        return decision_of(self.name, verdict.allowed, outlook.available, outlook, full=verdict.full)

    def add(self, key: Key, permits: int) -> int:
        """Give `key` so many permits more. Returns its balance.

        Raises ``InvalidCost``, ``StoreFull``, ``InvalidKey`` and ``StoreClosed``: then nothing was added.
        """
        number = permits_of(permits, self.name)
        tag = self.tag_of(key)
        if not number:
            return self.peek(key, 0).remaining
        with self.memory.lock:
            verdict = self._decide_by(Adding(), tag, Charge(number, 0, self.params), self.open_now_ns())
            if not verdict.allowed:
                raise too_many_permits(number, self.name)
            return balance_of(verdict.state)

    def give_back(self, tag: Tag, now_ns: int, charge: Charge) -> None:
        """As in the base class, but a key that was forgotten is remembered again: to it, that is none with permits."""
        self._decide_by(GivingBack(), tag, charge, now_ns)

    def _decide_by(self, algorithm: Prepaid, tag: Tag, charge: Charge, now_ns: int) -> Verdict:
        verdict = self.table.decide(tag, now_ns, algorithm, charge, self.on_full, self.counts)
        if verdict.full:
            raise StoreFull(self.name)
        return verdict

    def reset(self, key: Key) -> NoReturn:
        """Raises ``InvalidLimiter``: to forget a key would delete what it has paid for.

        ``take_up_to(key, 2**48)`` takes the whole balance, and returns how much that was.
        """
        raise no_reset_of_credits(self)
