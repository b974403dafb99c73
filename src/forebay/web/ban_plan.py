"""A plan around another: it denies banned keys, and counts the denials of the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from forebay.web.bans import Ban
from forebay.web.client import UnknownPeer
from forebay.web.denials import by_ban
from forebay.web.fastpath import Passage
from forebay.web.functions import ResolvedRequest, has_to_be_awaited
from forebay.web.keys import CellKey
from forebay.web.plan import Plan
from forebay.web.request import Request
from forebay.web.rules import Denial, Rule
from forebay.web.store_errors import DENYING_ERRORS, STORE_ERRORS

__all__ = ["BanPlan"]


class BanPlan:
    """As `plan`, which is for `rules`, except for banned keys. A banned key is charged by none of the rules.

    A ban is of a client's key: it counts preflights, and denies them, as the client's other requests.
    """

    def __init__(self, plan: Plan, rules: Sequence[Rule]) -> None:
        self._plan = plan
        self._bans: list[tuple[Rule, Ban]] = [(rule, rule.ban) for rule in rules if rule.ban is not None]
        keys = [rule.key or plan.client for rule, _ in self._bans]
        self._keys_to_await = [key for key in keys if has_to_be_awaited(key)]

    def admit(self, request: Request) -> Passage | Denial:
        """As the plan's."""
        return self._banned(request) or self._counted(request, self._plan.admit(request))

    async def admit_async(self, request: ResolvedRequest) -> Passage | Denial:
        """As the plan's."""
        try:
            await request.resolve(self._keys_to_await)
        except UnknownPeer as error:
            return self._plan.without_decisions(error, request)
        return self._banned(request) or self._counted(request, await self._plan.admit_async(request))

    def _banned(self, request: Request) -> Denial | None:
        """As ``_ban_of``. If the bans can't be read, the denial is of a failing store, or the limits alone decide."""
        try:
            return self._ban_of(request)
        except DENYING_ERRORS as error:
            return self._plan.denials.for_error(error, request)

    def _ban_of(self, request: Request) -> Denial | None:
        """The denial by the ban that lasts longest; None if no key is banned."""
        found = [(rule, ban, ban.peek(self._key_of(rule, request))) for rule, ban in self._bans]
        banned = [one for one in found if not one[2].allowed]
        return by_ban(*max(banned, key=lambda one: one[2].retry_after_ns)) if banned else None

    def _key_of(self, rule: Rule, request: Request) -> Any:
        """For whom a request counts, also where the limit counts in other cells than it did."""
        if isinstance(rule.key, CellKey):
            return rule.key.client_key(request)
        return self._plan.client_key(rule, request)

    def _counted(self, request: Request, passage: Passage | Denial) -> Passage | Denial:
        if isinstance(passage, Denial):
            # The request is denied, whether or not that can be counted.
            with contextlib.suppress(*STORE_ERRORS):
                for rule, ban in self._bans:
                    if any(rule is one for one in passage.denied_by):
                        ban.count_denial(self._key_of(rule, request))
        return passage
