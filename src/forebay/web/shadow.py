"""Rules in the shadow: they decide and count beside the enforced ones, and deny nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from forebay.seldom import Seldom
from forebay.web.ban_plan import BanPlan
from forebay.web.denials import LOG_EVERY_S, log, log_denial
from forebay.web.fastpath import Passage
from forebay.web.functions import ResolvedRequest
from forebay.web.plan import Plan
from forebay.web.request import Request
from forebay.web.rules import Denial

__all__ = ["FailureLog", "ShadowedPlan"]


class FailureLog:
    """Logs errors of the shadow rules of one gate, once a minute for each rule and each plan."""

    def __init__(self) -> None:
        self._turns = Seldom(LOG_EVERY_S)

    def log(self, shadow: Any) -> None:
        """Log the error that is being handled: that of a shadow rule, or of its plan, which both live with the gate."""
        if self._turns.is_due(id(shadow)):
            log.exception("a shadow rule has failed; the request is handled all the same")


class ShadowedPlan:
    """A plan, or None, and a plan for each shadow rule. They decide one by one about a request that the first admits.

    A shadow rule fails no request: its denial is logged, and so is an error of its functions. The permits that it takes
    come back with the request's own.
    """

    def __init__(
        self, enforced: Plan | BanPlan | None, shadows: Sequence[Plan | BanPlan], failures: FailureLog
    ) -> None:
        self._enforced, self._shadows, self._failures = enforced, shadows, failures

    def admit(self, request: Request) -> Passage | Denial | None:
        """As a plan's; None if no rule is enforced, and nothing has to be released."""
        passage = None if self._enforced is None else self._enforced.admit(request)
        if isinstance(passage, Denial):
            return passage
        for shadow in self._shadows:
            with _failing_alone(self._failures, shadow, passage):
                passage = _joined(request, passage, shadow.admit(request))
        return passage

    async def admit_async(self, request: ResolvedRequest) -> Passage | Denial | None:
        """As ``admit``, also with functions that have to be awaited."""
        passage = None if self._enforced is None else await self._enforced.admit_async(request)
        if isinstance(passage, Denial):
            return passage
        for shadow in self._shadows:
            with _failing_alone(self._failures, shadow, passage):
                passage = _joined(request, passage, await shadow.admit_async(request))
        return passage


def _joined(request: Request, passage: Passage | None, decided: Passage | Denial) -> Passage | None:
    """The passage with what a shadow rule has taken for the time of the request."""
    if isinstance(decided, Denial):
        if not decided.is_unavailable:
            log_denial(request, decided, is_shadow=True)
        return passage
    if decided.cleanup is None:
        return passage
    # The request waits for no turn of a shadow rule.
    decided.cleanup.end_turns()
    if not decided.cleanup:
        return passage
    if passage is None:
        return Passage([], decided.cleanup)
    if passage.cleanup is None:
        return Passage(passage.fields, decided.cleanup)
    passage.cleanup.merge(decided.cleanup)
    return passage


@contextlib.contextmanager
def _failing_alone(failures: FailureLog, shadow: Plan | BanPlan, passage: Passage | None) -> Generator[None]:
    """Log an error of the block. If the block is interrupted or cancelled instead, roll `passage` back."""
    try:
        yield
    except Exception:
        failures.log(shadow)
    except BaseException:
        if passage is not None and passage.cleanup is not None:
            passage.cleanup.roll_back()
        raise
