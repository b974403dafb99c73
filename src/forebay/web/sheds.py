"""The load shedders among the rules: they decide first, and count each request until it ends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from forebay.web.answers import UNAVAILABLE
from forebay.web.ban_plan import BanPlan
from forebay.web.cleanup import RequestCleanup
from forebay.web.denials import STORE_WAIT_S, log_for_operator
from forebay.web.fastpath import Passage
from forebay.web.functions import result_of
from forebay.web.patterns import UnseenPaths
from forebay.web.plan import Plan
from forebay.web.request import Request
from forebay.web.rules import Denial, Shed
from forebay.web.shadow import ShadowedPlan
from forebay.web.store_errors import STORE_ERRORS, WhenUnavailable

__all__ = ["Sheds"]

_Entered: TypeAlias = Passage | Denial | None
_Plan: TypeAlias = Plan | BanPlan | ShadowedPlan


class Sheds:
    """The sheds of a gate, in their order.

    All those that match a request have to admit it. If one doesn't, or a rule denies the request afterwards, the
    others no longer count it, and get no sample of it.
    """

    def __init__(self, sheds: Sequence[Shed], when_unavailable: WhenUnavailable) -> None:
        self._sheds = tuple(sheds)
        self._when_unavailable = when_unavailable
        self._unseen = UnseenPaths("Shed", self._sheds)
        self._awaited = [shed for shed in self._sheds if shed.functions_to_await]

    def enter(self, request: Request, plan_for: Callable[[Request], _Plan | None]) -> _Entered:
        """Whether a request may be handled, by the sheds, and then by the plan of the rules that match it."""
        cleanup = RequestCleanup()
        try:
            if (denial := self._admit(request, cleanup)) is not None:
                return denial
            plan = plan_for(request)
            return _counted(cleanup, None if plan is None else plan.admit(request))
        except BaseException:
            cleanup.roll_back()
            raise

    async def enter_async(
        self, request: Any, resolve: Callable[[Any], Awaitable[None]], plan_for: Callable[[Request], _Plan | None]
    ) -> _Entered:
        """As ``enter``, for a ``ResolvedRequest``. `resolve` awaits what chooses the rules."""
        if self._awaited:
            methods, paths = request.methods, request.paths
            matching = [shed for shed in self._awaited if shed.where.matches(methods, paths)]
            await request.resolve(function for shed in matching for function in shed.functions_to_await)
        cleanup = RequestCleanup()
        try:
            if (denial := self._admit(request, cleanup)) is not None:
                return denial
            await resolve(request)
            plan = plan_for(request)
            return _counted(cleanup, None if plan is None else await plan.admit_async(request))
        except BaseException:
            cleanup.roll_back()
            raise

    def _admit(self, request: Request, cleanup: RequestCleanup) -> Denial | None:
        """The denial by the first shed that doesn't admit a request. Otherwise `cleanup` has the admissions."""
        methods, paths = request.methods, request.paths
        if self._unseen.unseen:
            self._unseen.observe(methods, paths)
        for shed in self._sheds:
            if not shed.where.matches(methods, paths):
                continue
            priority = None if shed.priority is None else result_of(shed.priority, request)
            try:
                admission = shed.shedder.admit(priority)
            except STORE_ERRORS as error:
                if self._when_unavailable == "allow":
                    log_for_operator("admitted without a load shedder", error)
                    continue
                cleanup.roll_back()
                return self._unavailable(shed, error)
            if not admission:
                cleanup.roll_back()
                return _shed(shed)
            cleanup.count(admission, shed.shedder.lease_ns)
        return None

    def _unavailable(self, shed: Shed, error: Exception) -> Denial:
        status = int(self._when_unavailable)
        log_for_operator(f"answered by {status}", error)
        failing = dataclasses.replace(shed, status=status, answer=None)
        return Denial(failing, (), None, STORE_WAIT_S, (), cause=UNAVAILABLE)


def _shed(shed: Shed) -> Denial:
    wait_s = random.randint(shed.retry_after_s, 2 * shed.retry_after_s)
    return Denial(shed, (shed.shedder.name,), None, wait_s, ())


def _counted(cleanup: RequestCleanup, entered: _Entered) -> _Entered:
    """The decision of the rules, with the admissions, which end with the request."""
    if isinstance(entered, Denial):
        cleanup.roll_back()
        return entered
    if not cleanup:
        return entered
    # Decisions over Redis may have taken longer than the handler will.
    cleanup.begin_work()
    if entered is None:
        return Passage([], cleanup)
    if entered.cleanup is None:
        return Passage(entered.fields, cleanup)
    entered.cleanup.merge(cleanup)
    return entered
