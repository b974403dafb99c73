"""The load shedders among the rules: they decide first, and count each request until it ends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from forebay.core.algorithms.concurrency import Concurrency
from forebay.web.answers import UNAVAILABLE
from forebay.web.cleanup import RequestCleanup
from forebay.web.denials import STORE_WAIT_S, log_for_operator
from forebay.web.fastpath import Passage
from forebay.web.functions import ResolvedRequest, result_of
from forebay.web.patterns import UnseenPaths
from forebay.web.request import Request
from forebay.web.rules import Denial, Shed
from forebay.web.store_errors import STORE_ERRORS, WhenUnavailable

__all__ = ["Sheds"]

_Entered: TypeAlias = Passage | Denial | None


class Sheds:
    """The sheds of a gate, in their order. False if there are none.

    All those that match a request have to admit it. If one doesn't, or a rule denies the request afterwards, the
    others no longer count it, and get no sample of it.
    """

    def __init__(self, sheds: Sequence[Shed], when_unavailable: WhenUnavailable) -> None:
        self._sheds = tuple(sheds)
        self._when_unavailable = when_unavailable
        self._unseen = UnseenPaths("Shed", self._sheds)
        self._awaited = [shed for shed in self._sheds if shed.functions_to_await]

    def __bool__(self) -> bool:
        return bool(self._sheds)

    @property
    def is_awaited(self) -> bool:
        """Whether only ``enter_async`` may be called."""
        return bool(self._awaited)

    @property
    def limiters(self) -> list[Concurrency]:
        """Those that hold the slots of the shedders."""
        return [limiter for shed in self._sheds for limiter in shed.shedder.limiters]

    def enter(self, request: Request, limited: Callable[[Request], _Entered]) -> _Entered:
        """Whether a request may be handled. `limited` asks the rules."""
        cleanup = RequestCleanup()
        try:
            return self._admit(request, cleanup) or _counted(cleanup, limited(request))
        except BaseException:
            cleanup.roll_back()
            raise

    async def enter_async(
        self, request: ResolvedRequest, limited: Callable[[ResolvedRequest], Awaitable[_Entered]]
    ) -> _Entered:
        """As ``enter``, also with functions that have to be awaited."""
        native: Any = request
        if self._awaited:
            methods, paths = native.methods, native.paths
            matching = [shed for shed in self._awaited if shed.where.matches(methods, paths)]
            await request.resolve(function for shed in matching for function in shed.functions_to_await)
        cleanup = RequestCleanup()
        try:
            return self._admit(native, cleanup) or _counted(cleanup, await limited(request))
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
    """What the rules have decided, with the admissions, which end with the request."""
    if isinstance(entered, Denial):
        cleanup.roll_back()
        return entered
    if not cleanup:
        return entered
    # Decisions over Redis may have taken longer than the handler will.
    for admission in cleanup.admissions:
        admission.begin()
    if entered is None:
        return Passage([], cleanup)
    if entered.cleanup is None:
        return Passage(entered.fields, cleanup)
    entered.cleanup.merge(cleanup)
    return entered
